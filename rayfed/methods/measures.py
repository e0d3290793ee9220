"""What can be measured of a client's model beside its loss: numbers by name, which become notes of the client's round.

A measure compares the global model before a client's training with the client's model after it, on a sample of the test
images. It changes nothing in the training. `N` images, `C` classes, `D` features.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rayfed import metrics
from rayfed.methods.views import Run
from rayfed.weights import Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Seen:
    """A model's parameters, and its outputs on the sampled test images."""

    parameters: Weights
    labels: np.ndarray  # int64 (N,)
    logits: np.ndarray  # float32 (N, C)
    features: np.ndarray | None  # float32 (N, D); None where the model has none

    @functools.cached_property
    def confusion(self) -> np.ndarray:
        """(C, C)"""
        return metrics.confusion_matrix(self.labels, self.logits.argmax(axis=1), self.logits.shape[1])


def sampled(total: int, wanted: int, seed: int) -> np.ndarray:
    """The test images to measure on, sorted: `wanted` of them, or all where that is 0 or more than there are."""
    rows = np.arange(total)
    if not 0 < wanted < total:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, wanted, replace=False))


def see(run: Run, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]], model: nn.Module) -> Seen:
    """A model in eval mode on batches of images and labels."""
    labels, logits, features = [], [], []
    with torch.no_grad():
        for images, answers in batches():
            outputs = run(model, images)
            labels.append(answers.cpu())
            logits.append(outputs.logits.cpu())
            features += [] if outputs.features is None else [outputs.features.cpu()]
    joined = [torch.cat(each).numpy() if each else None for each in (labels, logits, features)]
    return Seen(dict(model.named_parameters()), *joined)  # type: ignore[arg-type]


Measure = Callable[[Seen, Seen, np.ndarray], Iterator[tuple[str, float]]]


def local(before: Seen, after: Seen, p: np.ndarray) -> Iterator[tuple[str, float]]:
    """Accuracy, weighted as the client's labels, and as their reverse, before and after (FedNTD 2.2, eq. 6 and 7).

    `in_local` is also FedNTD's personalised accuracy (appendices H and I).
    """
    for when, seen in (("before", before), ("after", after)):
        by_class = metrics.class_accuracy(seen.confusion)
        yield f"{when}.accuracy", metrics.accuracy(seen.confusion)
        yield f"{when}.in_local", metrics.in_local_accuracy(by_class, p)
        yield f"{when}.out_local", metrics.out_local_accuracy(by_class, p)


def drift(before: Seen, after: Seen, p: np.ndarray) -> Iterator[tuple[str, float]]:
    """How far a client has moved: in parameters, in all and by layer; from its labels; in logits and features.

    FedNTD section 5 (Fig. 8, Table 2 for the last features), FedCSD Fig. 1b.
    """
    layers: dict[str, list[float]] = {}
    for name in before.parameters:
        of_both = (seen.parameters[name].detach().flatten().cpu().numpy() for seen in (before, after))
        layers.setdefault(name.rpartition(".")[0] or name, []).append(metrics.weight_divergence(*of_both))
    yield "divergence", float(np.linalg.norm([moved for layer in layers.values() for moved in layer]))
    for layer, moves in layers.items():
        yield f"divergence.{layer}", float(np.linalg.norm(moves))
    yield "distribution_distance", metrics.distribution_distance(metrics.class_accuracy(after.confusion), p)
    yield "logit_distance", metrics.feature_distance(before.logits, after.logits)
    if before.features is not None and after.features is not None:
        yield "feature_distance", metrics.feature_distance(before.features, after.features)
        preferred = (metrics.class_preference(seen.features, seen.labels) for seen in (before, after))  # type: ignore[arg-type]
        yield "alignment", metrics.alignment(*preferred)


MEASURES: dict[str, Measure] = {"local": local, "drift": drift}


def measured(
    names: Sequence[str],
    on: Callable[[nn.Module], Seen],
    before: nn.Module,
    after: nn.Module,
    known: list[Seen],
    p: np.ndarray,
) -> dict[str, float]:
    """The measures' numbers, `local.after.accuracy` and so on; `p` (C,) is the client's label distribution.

    `on` shows a model the images. `known` holds what the model before has seen, or is empty, and gets it.
    A measure that fails leaves its numbers out, with a warning: it does not end a run.
    """
    found: dict[str, float] = {}
    failing = " and ".join(names)
    try:
        known[:] = known or [on(before)]
        both = known[0], on(after)
        for failing in names:
            found |= {f"{failing}.{key}": value for key, value in MEASURES[failing](*both, p)}
    except Exception as error:
        _warn(failing, f"{type(error).__name__}: {error}")
    return found


@functools.cache  # once in a process
def _warn(name: str, why: str) -> None:
    log.warning("measure = %s fails, and is left out: %s", name, why)
