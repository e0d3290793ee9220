"""What can be measured of a run beside its loss: of a client's model, and of a round's updates
together.

Measures of a client compare the model with which it begins (the global model, with what the client
has kept of its own) with its model after its training, on a sample of the test images; their
numbers become notes of the client's round. Measures of a round become notes of the round. None of
them changes the training. `N` images, `C` classes, `D` features or neurons, `P` parameters.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.base.errors import InputError, did_you_mean
from rayfed.data.inputs import Inputs
from rayfed.losses import metrics
from rayfed.methods.views import Run, run_on_copy
from rayfed.tensors.trees import Scaled, Tree
from rayfed.tensors.weights import Weights, in_evaluation, parameters_of

# In place of a layer's name: the features before the head.
FEATURES = ""
UPDATES = (
    # The slot of `summand`: beside those of the parts, and none of them.
    "updates, to be measured"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Activations:
    """What the neurons of some layers say of each class, summed over images; two of them add up."""

    # Layer -> float64 (C, D).
    sums: dict[str, np.ndarray]
    # int64 (C,): the images.
    counts: np.ndarray

    def __add__(self, other: Activations) -> Activations:
        sums = {layer: both + other.sums[layer] for layer, both in self.sums.items()}
        return Activations(sums, self.counts + other.counts)


@dataclass(frozen=True, eq=False)
class Seen:
    """A model's parameters, and its outputs on the sampled test images."""

    parameters: Weights
    # int64 (N,).
    labels: np.ndarray
    # float32 (N, C).
    logits: np.ndarray
    # float32 (N, D); None where the model has none.
    features: np.ndarray | None
    # The chosen layers' outputs, float32 (N, D); by default the features, if any.
    layers: dict[str, np.ndarray]

    @functools.cached_property
    def confusion(self) -> np.ndarray:
        """(C, C)"""
        return metrics.confusion_matrix(
            self.labels, self.logits.argmax(axis=1), self.logits.shape[1]
        )

    @functools.cached_property
    def activations(self) -> Activations:
        classes = self.logits.shape[1]
        sums = {
            layer: metrics.class_sums(outputs, self.labels, classes)
            for layer, outputs in self.layers.items()
        }
        return Activations(sums, np.bincount(self.labels, minlength=classes))


def sampled(total: int, wanted: int, seed: int) -> np.ndarray:
    """The test images to measure on, sorted: `wanted` of them, or all where that is 0 or more than
    there are.
    """
    rows = np.arange(total)
    if not 0 < wanted < total:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, wanted, replace=False))


def see(
    run: Run, layers: Sequence[str], batches: Iterable[tuple[Tensor, Tensor]], model: nn.Module
) -> Seen:
    """A model in eval mode on batches of images and labels; `layers` are names of its modules."""
    labels, logits, by_batch = [], [], []
    with torch.no_grad(), _outputs(model, layers) as by_layer:
        for images, answers in batches:
            outputs = run(model, images)
            labels.append(answers.cpu())
            logits.append(outputs.logits.cpu())
            if outputs.features is not None:
                by_batch.append(outputs.features.cpu())
    for layer, parts in by_layer.items():
        if len(parts) != len(labels):
            raise ValueError(
                f"the layer '{layer}' gave {len(parts)} outputs in {len(labels)} forward passes"
            )
    features = torch.cat(by_batch).numpy() if by_batch else None
    chosen = {layer: torch.cat(parts).numpy() for layer, parts in by_layer.items()}
    if not layers and features is not None:
        chosen = {FEATURES: features}
    return Seen(
        parameters_of(model), torch.cat(labels).numpy(), torch.cat(logits).numpy(), features, chosen
    )


@contextmanager
def _outputs(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """What layers give while the context lasts, (N, D) per forward pass.

    A map (N, D, h, w) counts as its mean.
    """
    by_layer: dict[str, list[Tensor]] = {layer: [] for layer in layers}

    def keep(layer: str, module: nn.Module, inputs: object, output: object) -> None:
        if not isinstance(output, Tensor) or output.ndim < 2:
            raise ValueError(
                f"the layer '{layer}' gives no tensor with a dimension of images and one of neurons"
            )
        values = output.float().flatten(2).mean(dim=2) if output.ndim > 2 else output
        # The next layer may write to it, as ReLU can.
        by_layer[layer].append(values.to("cpu", torch.float32, copy=True))

    hooks = [
        model.get_submodule(layer).register_forward_hook(functools.partial(keep, layer))
        for layer in layers
    ]
    try:
        yield by_layer
    finally:
        for hook in hooks:
            hook.remove()


def refuse_absent(
    layers: Sequence[str],
    model: nn.Module,
    inputs: Inputs,
) -> None:
    """Raises `InputError` for a layer that is not there, or cannot be measured."""
    names = [name for name, _ in model.named_modules() if name]
    for layer in layers:
        if layer not in names:
            raise InputError(
                f"measure_layers: the model has no layer '{layer}'{did_you_mean(layer, names)}"
            )
        two = [(inputs.some(2), torch.zeros(2, dtype=torch.int64))]
        try:
            see(run_on_copy, [layer], two, in_evaluation(copy.deepcopy(model)))
        except Exception as error:
            # The user's module may raise anything.
            raise InputError(
                f"measure_layers = ['{layer}']: {error}; choose another layer"
            ) from error


Measure = Callable[[Seen, Seen, np.ndarray], Iterator[tuple[str, float]]]
# Show a model the images, as it is before and after training.
Looks = tuple[Callable[[], Seen], Callable[[], Seen]]


def local(before: Seen, after: Seen, p: np.ndarray) -> Iterator[tuple[str, float]]:
    """Accuracy, weighted as the client's labels, and as their reverse, before and after (FedNTD
    2.2, eq. 6 and 7).

    `in_local` is also FedNTD's personalised accuracy (appendices H and I).
    """
    for when, seen in (("before", before), ("after", after)):
        by_class = metrics.class_accuracy(seen.confusion)
        yield f"{when}.accuracy", metrics.accuracy(seen.confusion)
        yield f"{when}.in_local", metrics.in_local_accuracy(by_class, p)
        yield f"{when}.out_local", metrics.out_local_accuracy(by_class, p)


def drift(before: Seen, after: Seen, p: np.ndarray) -> Iterator[tuple[str, float]]:
    """How far a client has moved: in parameters, in all and by layer, in logits and features.

    And how far its labels are from what the global model knows: the distance that, for FedNTD,
    makes it move.

    FedNTD section 5 (Fig. 8, Table 2), FedCSD Fig. 1b.
    """
    layers: dict[str, list[float]] = {}
    for name in before.parameters:
        of_both = (
            seen.parameters[name].detach().flatten().cpu().numpy() for seen in (before, after)
        )
        layers.setdefault(name.rpartition(".")[0] or name, []).append(
            metrics.weight_divergence(*of_both)
        )
    yield (
        "divergence",
        metrics.length(np.array([moved for layer in layers.values() for moved in layer])),
    )
    for layer, moves in layers.items():
        yield f"divergence.{layer}", metrics.length(np.array(moves))
    yield (
        "distribution_distance",
        metrics.distribution_distance(metrics.class_accuracy(before.confusion), p),
    )
    yield "logit_distance", metrics.feature_distance(before.logits, after.logits)
    if before.features is not None and after.features is not None:
        yield "feature_distance", metrics.feature_distance(before.features, after.features)
    yield from aligned(before.activations, after.activations)


def aligned(before: Activations, after: Activations) -> Iterator[tuple[str, float]]:
    """By layer, the share of neurons that prefer the same class in both models (FedNTD section 5.1,
    appendix M).

    And the share of those that are dead in one of them, which are left out.
    """
    for layer in before.sums:
        of_both = [
            metrics.class_preference(model.sums[layer], model.counts) for model in (before, after)
        ]
        end = "" if layer == FEATURES else f".{layer}"
        yield f"alignment{end}", metrics.alignment(*of_both)
        yield f"dead{end}", metrics.dead(*of_both)


# And confusion, which is no note.
MEASURES: dict[str, Measure] = {"local": local, "drift": drift}


def measured(
    names: Sequence[str], trained: Looks, own: Looks, p: np.ndarray
) -> tuple[dict[str, float], np.ndarray | None]:
    """The measures' numbers, `local.after.accuracy` and so on, and the confusion (C, C) of the
    model after, if asked.

    `drift` is of the model whose update is sent, `trained`; the others are of the client's `own`
    model, which with most methods is the same. `p` (C,) is the client's label distribution. A
    measure that fails is left out, with a warning: it does not end a run.
    """
    numbers: dict[str, float] = {}
    confusion = None
    for name in names:
        before, after = trained if name == "drift" else own
        try:
            if name == "confusion":
                confusion = after().confusion
            else:
                numbers |= {
                    f"{name}.{key}": value for key, value in MEASURES[name](before(), after(), p)
                }
        except Exception as error:
            warn_of_failure(name, error)
    return numbers, confusion


def summand(before: Weights, after: nn.Module) -> Tree:
    """A client's update, for `of_round`: as it is, scaled to length 1, and its squared length;
    parameters only.

    Where this fails, it is a summand of zeros, as summands must be alike, with a warning.
    """
    parameters = parameters_of(after)
    try:
        update = torch.cat(
            [(p.detach() - before[name]).flatten() for name, p in parameters.items()]
        )
        length = float(torch.linalg.vector_norm(update, dtype=torch.float64))
        if not math.isfinite(length):
            raise ValueError("an update is not finite")
        clients = 1
    except Exception as error:
        warn_of_failure("drift", error)
        update = torch.cat([torch.zeros(p.numel(), dtype=p.dtype) for p in parameters.values()])
        clients, length = 0, 0.0
    unit = Scaled(1 / length if length else 0.0, update)
    return {
        "clients": clients,
        "moved": int(length > 0),
        "squares": length**2,
        "updates": update,
        "units": unit,
    }


def of_round(total: Tree, clients: int) -> dict[str, float]:
    """How much the updates of a round's clients agree, from the total of their summands; nothing if
    one has failed.

    FedNTD section 2.3, eq. 8. Every client counts once, whatever its number of images.
    """
    if total is None or total["clients"] < clients:
        return {}
    diversity = metrics.gradient_diversity(total["updates"].numpy(), total["squares"], clients)
    cosine = metrics.mean_pairwise_cosine(total["units"].numpy(), total["moved"], clients)
    return {"drift.gradient_diversity": diversity, "drift.update_cosine": cosine}


def warn_of_failure(name: str, error: Exception) -> None:
    """Log, once in a process, that a measure fails.

    Raises the error where it is of a GPU's memory, after which cuDNN may go on with other bits:
    `hardware.advising`.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    _warn(name, f"{type(error).__name__}: {error}")


@functools.cache
def _warn(name: str, why: str) -> None:
    log.warning("measure = %s fails, and is left out: %s", name, why)
