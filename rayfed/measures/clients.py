"""Measures of a client: its model before its training, compared with its model after it.

Both are seen on a sample of the test images. `N` images, `C` classes, `D` features or neurons, `P`
parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rayfed.measures import metrics
from rayfed.tensors.weights import Weights

# This name of a layer stands for the features before the head.
FEATURES = ""


@dataclass(frozen=True, eq=False)
class Activations:
    """The outputs of some layers' neurons by class, summed over images; two objects add up."""

    # By layer, float64 (C, D).
    sums: dict[str, np.ndarray]
    # The number of images of each class, int64 (C,).
    counts: np.ndarray

    def __add__(self, other: Activations) -> Activations:
        sums = {layer: outputs + other.sums[layer] for layer, outputs in self.sums.items()}
        return Activations(sums, self.counts + other.counts)


@dataclass(frozen=True, eq=False)
class Seen:
    """A model's parameters, and its outputs on the sampled test images."""

    parameters: Weights
    # int64 (N,).
    labels: np.ndarray
    # float32 (N, C).
    logits: np.ndarray
    # float32 (N, D); None where the model has no features.
    features: np.ndarray | None
    # The outputs of the chosen layers, float32 (N, D). By default these are the features, if any.
    layers: dict[str, np.ndarray]

    @functools.cached_property
    def confusion(self) -> np.ndarray:
        """Return the confusion matrix, (C, C)."""
        predictions = self.logits.argmax(axis=1)
        return metrics.confusion_matrix(self.labels, predictions, self.logits.shape[1])

    @functools.cached_property
    def activations(self) -> Activations:
        """Return the outputs of the chosen layers, summed by class."""
        classes = self.logits.shape[1]
        sums = {
            layer: metrics.class_sums(outputs, self.labels, classes)
            for layer, outputs in self.layers.items()
        }
        return Activations(sums, np.bincount(self.labels, minlength=classes))


def sampled(total: int, wanted: int, seed: int) -> np.ndarray:
    """Return the sorted indices of the test images to measure on.

    There are `wanted` of `total` images, or all if `wanted` is 0 or more than `total`.

    >>> sampled(3, wanted=0, seed=1)
    array([0, 1, 2])
    """
    rows = np.arange(total)
    if not 0 < wanted < total:
        return rows
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(rows, wanted, replace=False))


Measure = Callable[[Seen, Seen, np.ndarray], Iterator[tuple[str, float]]]


def local(before: Seen, after: Seen, p: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yield the accuracies before and after training: plain, in-local and out-local.

    `in_local` weighs classes as the client's labels `p` (C,), and `out_local` as their reverse
    (FedNTD 2.2, eq. 6 and 7). `in_local` is also FedNTD's personalised accuracy (appendices H and
    I).
    """
    for when, seen in (("before", before), ("after", after)):
        for key, accuracy in accuracies(seen, p):
            yield f"{when}.{key}", accuracy


def accuracies(seen: Seen, p: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yield a model's accuracies: plain, in-local and out-local, for a client's labels `p` (C,)."""
    by_class = metrics.class_accuracy(seen.confusion)
    yield "accuracy", metrics.accuracy(seen.confusion)
    yield "in_local", metrics.in_local_accuracy(by_class, p)
    yield "out_local", metrics.out_local_accuracy(by_class, p)


def drift(before: Seen, after: Seen, p: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yield how far a client has moved: in parameters, logits and features.

    The distance of the parameters is over all of them, and by layer. `distribution_distance` is how
    far the client's labels `p` (C,) are from what the global model knows. FedNTD says that this
    distance makes the client move.

    FedNTD section 5 (Fig. 8, Table 2), FedCSD Fig. 1b.
    """
    for layer, moves in _moves(before, after).items():
        yield f"divergence.{layer}", metrics.length(np.array(moves))
    by_class = metrics.class_accuracy(before.confusion)
    yield "distribution_distance", metrics.distribution_distance(by_class, p)
    yield from distances(before, after)
    yield from aligned(before.activations, after.activations)


def distances(before: Seen, after: Seen) -> Iterator[tuple[str, float]]:
    """Yield the distances of two models: of all parameters, of logits and of features."""
    all_moves: list[float] = []
    for moves in _moves(before, after).values():
        all_moves.extend(moves)
    yield "divergence", metrics.length(np.array(all_moves))
    yield "divergence_l1", _distance_l1(before, after)
    yield "logit_distance", metrics.feature_distance(before.logits, after.logits)
    yield "logit_kl", metrics.logit_kl(before.logits, after.logits)
    if before.features is not None and after.features is not None:
        yield "feature_distance", metrics.feature_distance(before.features, after.features)


def train(before: Seen, after: Seen, p: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yield the accuracies on the client's own training images, before and after training.

    "Local Train" in FedNTD Fig. 12; FedCSD Fig. 1d.
    """
    yield "before.accuracy", metrics.accuracy(before.confusion)
    yield "after.accuracy", metrics.accuracy(after.confusion)


def epoch(start: Seen, now: Seen, p: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yield a model's accuracies in its training, and its distances to the model at the start.

    FedNTD Fig. 6, FedCSD Fig. 1a and 1b.
    """
    yield from accuracies(now, p)
    yield from distances(start, now)


def _moves(before: Seen, after: Seen) -> dict[str, list[float]]:
    """Return how far each parameter has moved, by layer."""
    by_layer: dict[str, list[float]] = {}
    for name, parameter in before.parameters.items():
        layer = name.rpartition(".")[0] or name
        move = metrics.weight_divergence(_flat(parameter), _flat(after.parameters[name]))
        by_layer.setdefault(layer, []).append(move)
    return by_layer


def _distance_l1(before: Seen, after: Seen) -> float:
    """Return the distance of two models' parameters in the L1 norm."""
    distance = 0.0
    for name, parameter in before.parameters.items():
        values, local_values = _flat(parameter), _flat(after.parameters[name])
        distance += metrics.weight_divergence_l1(values, local_values)
    return distance


def _flat(parameter: Tensor) -> np.ndarray:
    """Return a parameter's entries, (P,)."""
    return parameter.detach().flatten().cpu().numpy()


def aligned(before: Activations, after: Activations) -> Iterator[tuple[str, float]]:
    """Yield, by layer, the share of neurons that prefer the same class in both models.

    Also yield the share of neurons that are dead in one of the models: these are left out of the
    first share (FedNTD section 5.1, appendix M).
    """
    for layer in before.sums:
        preferences = [
            metrics.class_preference(model.sums[layer], model.counts) for model in (before, after)
        ]
        suffix = "" if layer == FEATURES else f".{layer}"
        yield f"alignment{suffix}", metrics.alignment(*preferences)
        yield f"dead{suffix}", metrics.dead(*preferences)


# The measures that compare a client's model before its training with its model after it, by their
# values of the key `measure`. `measured` (rounds/measuring.py) calls them, and notes each number as
# `<measure>.<number>`. The measure `confusion` is not here, because it notes no numbers.
MEASURES: dict[str, Measure] = {"local": local, "train": train, "drift": drift}
