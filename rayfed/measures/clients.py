"""Measures of a client: its model before its training, compared with its model after it.

Both are seen on a sample of the test images. `N` images, `C` classes, `D` features or neurons, `P`
parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rayfed.measures import metrics
from rayfed.tensors.weights import Weights

# In place of a layer's name: the features before the head.
FEATURES = ""


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


Measure = Callable[[Seen, Seen, np.ndarray], Iterator[tuple[str, float]]]


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
