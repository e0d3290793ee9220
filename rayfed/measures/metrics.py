"""Measures of a model, of a run, and of the clients' drift: pure functions of numpy arrays.

Shapes: `N` samples, `C` classes, `D` features, `K` clients, `P` parameters, `T` rounds. Accuracies
are fractions of 1.

A class without test samples has no accuracy: it is nan, and every average over classes leaves it
out.

>>> confusion = confusion_matrix(labels=np.array([0, 0, 1, 1]), predictions=np.array([0, 1, 1, 1]), num_classes=2)
>>> confusion
array([[1, 1],
       [0, 2]])
>>> accuracy(confusion), class_accuracy(confusion)
(0.75, array([0.5, 1. ]))
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# Of confidences, as Guo et al. have them.
BINS = 15


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Counts on some test images; two of them add up."""

    # int64 (C, C), rows true, columns predicted.
    confusion: Array
    # Summed over the images.
    loss: float
    # By domain: right answers, images.
    domains: Array = field(default_factory=lambda: np.zeros((2, 0), np.int64))
    overconfidence: Array = field(
        default_factory=lambda: np.zeros(BINS)
    )  # (BINS,), as `overconfidence` has it
    # Of all workers that evaluated, added up.
    seconds: float = 0.0

    def __add__(self, other: "Evaluation") -> "Evaluation":
        return Evaluation(
            self.confusion + other.confusion,
            self.loss + other.loss,
            self.domains + other.domains,
            self.overconfidence + other.overconfidence,
            self.seconds + other.seconds,
        )


def confusion_matrix(labels: Array, predictions: Array, num_classes: int) -> NDArray[np.int64]:
    """Counts (C, C) of the samples by true class (row) and predicted class (column); counts of
    batches add up.
    """
    cells = np.bincount(
        labels.astype(np.int64) * num_classes + predictions, minlength=num_classes**2
    )
    return cells.reshape(num_classes, num_classes)


def accuracy(confusion: Array) -> float:
    """The share of all samples on the diagonal of `confusion` (C, C); nan without samples."""
    total = confusion.sum()
    return float(np.trace(confusion) / total) if total else math.nan


def row_normalised(confusion: Array) -> Array:
    """`P(predicted | true)` (C, C): each row of `confusion` over its sum (FedSSD's matrix A); nan
    in an empty row.
    """
    totals = confusion.sum(axis=1, keepdims=True)
    return np.divide(confusion, totals, out=np.full(confusion.shape, np.nan), where=totals > 0)


def class_accuracy(confusion: Array) -> Array:
    """The accuracy on each true class (C,); nan for a class without samples."""
    return np.diagonal(row_normalised(confusion)).copy()


def macro_f1(confusion: Array) -> float:
    """The mean over classes of `2 TP / (2 TP + FP + FN)`, from `confusion` (C, C), of classes that
    occur in it.

    >>> macro_f1(np.array([[3, 1], [0, 4]])) == (6 / 7 + 8 / 9) / 2
    True
    """
    both = confusion.sum(axis=0) + confusion.sum(axis=1)
    occurs = both > 0
    return (
        float((2 * np.diagonal(confusion)[occurs] / both[occurs]).mean())
        if occurs.any()
        else math.nan
    )


def overconfidence(confidence: Array, right: Array) -> Array:
    """By bin of confidence (BINS,): the sum of confidence minus right answer (0 or 1) over its
    images.

    `confidence` (N,) is the probability of the predicted class, `right` (N,) whether that is the
    label. Bins of batches add up.
    """
    bins = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    return np.bincount(bins, confidence.astype(np.float64) - right, BINS)


def calibration_error(overconfidence: Array, images: int) -> float:
    """The expected calibration error of Guo et al. (ICML 2017, eq. 3), from the bins (BINS,) of so
    many images.

    >>> calibration_error(overconfidence(np.array([0.75, 0.75, 0.25]), np.array([1, 0, 0])), 3)
    0.25
    """
    return float(np.abs(overconfidence).sum() / images) if images else math.nan


def credibility(confusion: Array) -> Array:
    """How credible a model is on each class (C,), from 0 to 1 (FedSSD, below eq. 4).

    `A[k, k] (1 - max_{j != k} A[j, k])` with the rows of `confusion` (C, C) normalised: the recall
    of the class, times 1 minus the largest share of another class that is taken for this class.

    >>> credibility(np.array([[3, 1], [0, 4]]))
    array([0.75, 0.75])
    """
    rates = np.nan_to_num(row_normalised(confusion))
    mistaken = np.where(np.eye(len(rates), dtype=bool), 0.0, rates).max(axis=0)
    return np.diagonal(rates) * (1 - mistaken)


def in_local_accuracy(class_accuracy: Array, p: Array) -> float:
    """The accuracy on data with the client's label distribution `p` (C,) (FedNTD section 2.2, eq.
    6).

    FedNTD's personalised accuracy (appendices H and I), on test samples re-weighted to `p`, is the
    same number. It is nan where no class of the client has test samples.

    >>> in_local_accuracy(np.array([1.0, 0.5, 0.0]), p=np.array([0.5, 0.5, 0.0]))
    0.75
    """
    known = ~np.isnan(class_accuracy)
    total = p[known].sum()
    return float((class_accuracy[known] * p[known]).sum() / total) if total > 0 else math.nan


def out_local_accuracy(class_accuracy: Array, p: Array) -> float:
    """The accuracy on data with the label distribution `(1 - p) / (C - 1)` (C,), the reverse of the
    client's (eq. 7).

    >>> out_local_accuracy(np.array([1.0, 0.5, 0.0]), p=np.array([0.5, 0.5, 0.0]))
    0.375
    """
    return in_local_accuracy(class_accuracy, 1 - p)


def rounds_to_target(accuracies: Sequence[float] | Array, target: float) -> int | None:
    """The first round whose accuracy is at least `target`, or None; `accuracies` (T,) are those
    after rounds 1 to T.

    >>> rounds_to_target([0.2, 0.5, 0.4, 0.6], target=0.5)
    2
    """
    return next(
        (number for number, reached in enumerate(accuracies, start=1) if reached >= target), None
    )


def speed_up(
    accuracies: Sequence[float] | Array, baseline: Sequence[float] | Array, target: float
) -> float | None:
    """How many times sooner than `baseline` a run reaches `target`; None where either run never
    does.

    FedLMD (Table 3) takes FedAvg's best accuracy as the target, FedSSD (Table 1) its final one.

    >>> speed_up([0.3, 0.6, 0.7], baseline=[0.2, 0.3, 0.5, 0.6], target=0.6)
    2.0
    """
    rounds, baseline_rounds = (
        rounds_to_target(accuracies, target),
        rounds_to_target(baseline, target),
    )
    return baseline_rounds / rounds if rounds and baseline_rounds else None


def weight_divergence(weights: Array, local: Array) -> float:
    """The distance `||w - w_k||` of a client's parameters (P,) from the global parameters (FedNTD
    5.2, Fig. 8).
    """
    return length(_float64(local) - _float64(weights))


def length(vector: Array) -> float:
    """The L2 norm of a vector (P,).

    Not NumPy's own, which is BLAS's: its bits depend on the number of threads.
    """
    return math.sqrt(np.square(_float64(vector)).sum())


def distribution_distance(class_accuracy: Array, p: Array) -> float:
    """The L1 distance between a model's class accuracies and the label distribution `p` (C,)
    (FedNTD 5.2, Fig. 8).

    The accuracies are scaled to sum to 1, as a distribution does; FedNTD prints the overall
    accuracy as the divisor, with which they would sum to C. A class without test samples counts as
    unknown.
    """
    known = np.nan_to_num(class_accuracy, nan=0.0)
    total = known.sum()
    return float(np.abs(known / total - p).sum()) if total > 0 else math.nan


def gradient_diversity(total: Array, squares: float, clients: int) -> float:
    """The mean squared length of the updates of K `clients` over that of their mean (FedNTD eq. 8).

    `total` (P,) is the sum of the updates, `squares` that of their squared lengths. 1 where all
    agree, K where they are orthogonal and of one length, infinite where they cancel. FedNTD's
    measure is on gradients; an update is the sum of a client's steps. nan where no client has
    moved.

    >>> updates = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> gradient_diversity(updates.sum(axis=0), squares=np.square(updates).sum(), clients=2)
    2.0
    """
    if squares == 0:
        return math.nan
    together = np.square(_float64(total)).sum()
    return float(clients * squares / together) if together > 0 else math.inf


def mean_pairwise_cosine(units: Array, moved: int, clients: int) -> float:
    """The cosine of the updates of K `clients`, averaged over all pairs of two clients; nan for a
    single one.

    `units` (P,) is the sum of the updates scaled to length 1, of the `moved` clients whose update
    is not 0: that has a cosine of 0. From -1 / (K - 1), where the updates cancel, to 1, where they
    have one direction.

    >>> units = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> mean_pairwise_cosine(units.sum(axis=0), moved=3, clients=3).__round__(6)
    0.333333
    """
    # The square of the sum of units holds every pair twice, and each unit with itself.
    pairs = np.square(_float64(units)).sum() - moved
    return float(pairs / (clients * (clients - 1))) if clients > 1 else math.nan


def feature_distance(features: Array, local_features: Array) -> float:
    """The L2 distance of two models' features (N, D), averaged over the samples (FedCSD Fig. 1b)."""
    return float(np.linalg.norm(_float64(local_features) - _float64(features), axis=1).mean())


def class_sums(outputs: Array, labels: Array, num_classes: int) -> NDArray[np.float64]:
    """The outputs (N, D) of neurons, summed over the samples of each class, (C, D); sums of batches
    add up.
    """
    return np.stack(
        [outputs[labels == c].sum(axis=0, dtype=np.float64) for c in range(num_classes)]
    )


def class_preference(sums: Array, counts: Array) -> Array:
    """For each neuron, the class (D,) on which it is largest on average (FedNTD appendix M, eq.
    19).

    `sums` are `class_sums` over `counts` (C,) samples. FedNTD's equation has the sum over the
    class; its text, and classes of unequal size, ask for the mean. A class without samples is
    preferred by no neuron. A neuron that is 0 on all samples prefers none: -1.

    >>> outputs, labels = np.array([[1.0, 0.0, 0.0], [3.0, 1.0, 0.0], [0.0, 2.0, 0.0]]), np.array([0, 0, 1])
    >>> class_preference(class_sums(outputs, labels, 2), np.bincount(labels))
    array([ 0,  1, -1])
    """
    known = np.flatnonzero(counts)
    return np.where(
        sums.any(axis=0), known[np.argmax(sums[known] / counts[known, None], axis=0)], -1
    )


def alignment(preference: Array, other: Array) -> float:
    """The share of the neurons (D,) that prefer the same class in two models (FedNTD section 5.1,
    Table 2).

    Of those that prefer one in both; nan where none does.
    """
    alive = (preference >= 0) & (other >= 0)
    return float((preference == other)[alive].mean()) if alive.any() else math.nan


def dead(preference: Array, other: Array) -> float:
    """The share of the neurons (D,) that `alignment` leaves out, as they prefer no class in one of
    the models.
    """
    return float(((preference < 0) | (other < 0)).mean())


def _float64(values: Array) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)
