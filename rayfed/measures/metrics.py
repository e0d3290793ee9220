"""Measures of a model, of a run, and of the clients' drift: pure functions of numpy arrays.

Shapes: `N` samples, `C` classes, `D` features, `K` clients, `P` parameters, `T` rounds. Accuracies
are fractions of 1.

A class without test samples has no accuracy: it is nan, and every average over classes leaves it
out.

>>> labels, predictions = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
>>> confusion = confusion_matrix(labels, predictions, num_classes=2)
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
# The number of bins of confidence, as in Guo et al. (ICML 2017).
BINS = 15


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Counts on some test images; two objects add up."""

    # int64 (C, C); a row is a true class, a column a predicted class.
    confusion: Array
    # The loss, summed over the images.
    loss: float
    # By domain, the number of right answers (row 0) and of images (row 1).
    domains: Array = field(default_factory=lambda: np.zeros((2, 0), np.int64))
    # (BINS,), as the function `overconfidence` returns it.
    overconfidence: Array = field(default_factory=lambda: np.zeros(BINS))
    # The seconds that all workers spent on the evaluation, added up.
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
    """Count the samples by true class (row) and predicted class (column): (C, C).

    The counts of several batches add up.
    """
    cells = labels.astype(np.int64) * num_classes + predictions
    counts = np.bincount(cells, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def accuracy(confusion: Array) -> float:
    """Return the share of samples on the diagonal of `confusion` (C, C); nan without samples."""
    total = confusion.sum()
    if not total:
        return math.nan
    return float(np.trace(confusion) / total)


def row_normalised(confusion: Array) -> Array:
    """Return `P(predicted | true)` (C, C): each row of `confusion` over its sum.

    It is FedSSD's matrix A. An empty row is nan.
    """
    totals = confusion.sum(axis=1, keepdims=True)
    return np.divide(confusion, totals, out=np.full(confusion.shape, np.nan), where=totals > 0)


def class_accuracy(confusion: Array) -> Array:
    """Return the accuracy on each true class (C,); nan for a class without samples."""
    return np.diagonal(row_normalised(confusion)).copy()


def macro_f1(confusion: Array) -> float:
    """Return the mean over classes of `2 TP / (2 TP + FP + FN)`, from `confusion` (C, C).

    The mean is over the classes that occur in `confusion`; nan if none does.

    >>> macro_f1(np.array([[3, 1], [0, 4]])) == (6 / 7 + 8 / 9) / 2
    True
    """
    # TP + FP is the sum of a class's column, and TP + FN of its row.
    divisors = confusion.sum(axis=0) + confusion.sum(axis=1)
    occurs = divisors > 0
    if not occurs.any():
        return math.nan
    return float((2 * np.diagonal(confusion)[occurs] / divisors[occurs]).mean())


def overconfidence(confidence: Array, right: Array) -> Array:
    """Sum confidence minus right answer (0 or 1) over the images of each bin, (BINS,).

    `confidence` (N,) is the probability of the predicted class, `right` (N,) says whether that
    class is the label. The bins of several batches add up.
    """
    bins = np.ceil(confidence * BINS).astype(np.int64) - 1
    bins = np.clip(bins, 0, BINS - 1)
    return np.bincount(bins, confidence.astype(np.float64) - right, BINS)


def calibration_error(overconfidence: Array, images: int) -> float:
    """Return the expected calibration error, from the bins (BINS,) of so many `images`.

    Guo et al. (ICML 2017), eq. 3. It is nan without images.

    >>> calibration_error(overconfidence(np.array([0.75, 0.75, 0.25]), np.array([1, 0, 0])), 3)
    0.25
    """
    if not images:
        return math.nan
    return float(np.abs(overconfidence).sum() / images)


def credibility(confusion: Array) -> Array:
    """Return how credible a model is on each class (C,), from 0 to 1 (FedSSD, below eq. 4).

    `A[k, k] (1 - max_{j != k} A[j, k])`, where `A` is `confusion` (C, C) with normalised rows: the
    recall of the class, times 1 minus the largest share of another class that is taken for this
    class.

    >>> credibility(np.array([[3, 1], [0, 4]]))
    array([0.75, 0.75])
    """
    rates = np.nan_to_num(row_normalised(confusion))
    mistaken = np.where(np.eye(len(rates), dtype=bool), 0.0, rates).max(axis=0)
    return np.diagonal(rates) * (1 - mistaken)


def in_local_accuracy(class_accuracy: Array, p: Array) -> float:
    """Return the accuracy on data with the client's label distribution `p` (C,).

    FedNTD section 2.2, eq. 6. FedNTD's personalised accuracy (appendices H and I), on test samples
    re-weighted to `p`, is the same number. It is nan if no class of the client has test samples.

    >>> in_local_accuracy(np.array([1.0, 0.5, 0.0]), p=np.array([0.5, 0.5, 0.0]))
    0.75
    """
    known = ~np.isnan(class_accuracy)
    total = p[known].sum()
    if total <= 0:
        return math.nan
    return float((class_accuracy[known] * p[known]).sum() / total)


def out_local_accuracy(class_accuracy: Array, p: Array) -> float:
    """Return the accuracy on data with the reverse of the client's label distribution `p` (C,).

    The reverse is `(1 - p) / (C - 1)` (FedNTD section 2.2, eq. 7).

    >>> out_local_accuracy(np.array([1.0, 0.5, 0.0]), p=np.array([0.5, 0.5, 0.0]))
    0.375
    """
    return in_local_accuracy(class_accuracy, 1 - p)


def rounds_to_target(accuracies: Sequence[float] | Array, target: float) -> int | None:
    """Return the first round whose accuracy is at least `target`, or None.

    `accuracies` (T,) are the accuracies after rounds 1 to T.

    >>> rounds_to_target([0.2, 0.5, 0.4, 0.6], target=0.5)
    2
    """
    for round, accuracy in enumerate(accuracies, start=1):
        if accuracy >= target:
            return round
    return None


def speed_up(
    accuracies: Sequence[float] | Array, baseline: Sequence[float] | Array, target: float
) -> float | None:
    """Return how many times sooner than `baseline` a run reaches `target`.

    It is None if one of the two never does. FedLMD (Table 3) takes FedAvg's best accuracy as the
    target, and FedSSD (Table 1) takes FedAvg's final accuracy.

    >>> speed_up([0.3, 0.6, 0.7], baseline=[0.2, 0.3, 0.5, 0.6], target=0.6)
    2.0
    """
    rounds = rounds_to_target(accuracies, target)
    baseline_rounds = rounds_to_target(baseline, target)
    if rounds is None or baseline_rounds is None:
        return None
    return baseline_rounds / rounds


def weight_divergence(weights: Array, local: Array) -> float:
    """Return the distance `||w - w_k||` of a client's parameters (P,) from the global parameters.

    FedNTD 5.2, Fig. 8.
    """
    return length(_float64(local) - _float64(weights))


def weight_divergence_l1(weights: Array, local: Array) -> float:
    """Return the same distance in the L1 norm, as FedNTD's table of notation (Table 3) has it.

    >>> weight_divergence_l1(np.array([1.0, 1.0]), np.array([4.0, -3.0]))
    7.0
    """
    return float(np.abs(_float64(local) - _float64(weights)).sum())


def length(vector: Array) -> float:
    """Return the L2 norm of a vector (P,).

    NumPy's norm is not used: it calls BLAS, whose last bits depend on the number of threads.

    >>> length(np.array([3.0, 4.0]))
    5.0
    """
    return math.sqrt(np.square(_float64(vector)).sum())


def distribution_distance(class_accuracy: Array, p: Array) -> float:
    """Return the L1 distance between a model's class accuracies and the labels `p` (C,).

    FedNTD 5.2, Fig. 8. The accuracies are scaled to sum to 1, like a distribution. FedNTD prints
    the overall accuracy as the divisor, with which they would sum to C. A class without test
    samples counts as unknown: its accuracy is taken as 0.
    """
    known = np.nan_to_num(class_accuracy, nan=0.0)
    total = known.sum()
    if total <= 0:
        return math.nan
    return float(np.abs(known / total - p).sum())


def gradient_diversity(total: Array, squares: float, clients: int) -> float:
    """Return the mean squared length of K updates over the squared length of their mean.

    FedNTD eq. 8. `total` (P,) is the sum of the updates of K `clients`, `squares` the sum of their
    squared lengths. The diversity is 1 if all updates agree, K if they are orthogonal and of one
    length, infinite if they cancel, and nan if no client has moved. FedNTD's measure is on
    gradients; an update is the sum of a client's steps.

    >>> updates = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> gradient_diversity(updates.sum(axis=0), squares=np.square(updates).sum(), clients=2)
    2.0
    """
    if squares == 0:
        return math.nan
    together = np.square(_float64(total)).sum()
    return float(clients * squares / together) if together > 0 else math.inf


def mean_pairwise_cosine(units: Array, moved: int, clients: int) -> float:
    """Return the cosine of the updates of two clients, averaged over all pairs of K `clients`.

    `units` (P,) is the sum of the updates, each scaled to length 1, of the `moved` clients whose
    update is not 0. An update of 0 has a cosine of 0 to all others. The mean is -1 / (K - 1) if the
    updates cancel, 1 if they have one direction, and nan for a single client.

    >>> units = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> mean_pairwise_cosine(units.sum(axis=0), moved=3, clients=3).__round__(6)
    0.333333
    """
    if clients <= 1:
        return math.nan
    # The square of the sum of units contains every pair twice, and each unit with itself.
    pairs = np.square(_float64(units)).sum() - moved
    return float(pairs / (clients * (clients - 1)))


def feature_distance(features: Array, local_features: Array) -> float:
    """Return the L2 distance of two models' features (N, D), averaged over the samples.

    FedCSD Fig. 1b.
    """
    moves = _float64(local_features) - _float64(features)
    return float(np.linalg.norm(moves, axis=1).mean())


def logit_kl(logits: Array, local_logits: Array) -> float:
    """Return the KL divergence of a client's softmax from the global model's, over N samples.

    FedCSD Fig. 1a. Both logits are (N, C). The divergence is `sum_c p_c log(p_c / q_c)`, with `p`
    of the global model, averaged over the samples. FedCSD prints neither the direction nor a
    temperature: this is the direction of its distillation, without a temperature.

    >>> logit_kl(np.array([[0.0, 0.0]]), np.log([[0.25, 0.75]])).__round__(6)
    0.143841
    """
    known, learnt = _log_softmax(logits), _log_softmax(local_logits)
    return float((np.exp(known) * (known - learnt)).sum(axis=1).mean())


def _log_softmax(logits: Array) -> NDArray[np.float64]:
    """Return the logarithms of the probabilities (N, C) of logits."""
    shifted = _float64(logits) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def class_sums(outputs: Array, labels: Array, num_classes: int) -> NDArray[np.float64]:
    """Sum the outputs (N, D) of neurons over the samples of each class: (C, D).

    The sums of several batches add up.
    """
    sums = [outputs[labels == c].sum(axis=0, dtype=np.float64) for c in range(num_classes)]
    return np.stack(sums)


def class_preference(sums: Array, counts: Array) -> Array:
    """Return the class (D,) on which each neuron is largest on average.

    FedNTD appendix M, eq. 19. `sums` are `class_sums` over `counts` (C,) samples. FedNTD's equation
    has the sum over the class, but its text, and classes of unequal size, ask for the mean. No
    neuron prefers a class without samples. A neuron that is 0 on all samples prefers no class,
    which is -1.

    >>> outputs = np.array([[1.0, 0.0, 0.0], [3.0, 1.0, 0.0], [0.0, 2.0, 0.0]])
    >>> labels = np.array([0, 0, 1])
    >>> class_preference(class_sums(outputs, labels, 2), np.bincount(labels))
    array([ 0,  1, -1])
    """
    known = np.flatnonzero(counts)
    means = sums[known] / counts[known, None]
    return np.where(sums.any(axis=0), known[np.argmax(means, axis=0)], -1)


def alignment(preference: Array, other: Array) -> float:
    """Return the share of the neurons (D,) that prefer the same class in two models.

    FedNTD section 5.1, Table 2. Only neurons that prefer a class in both models count; nan if there
    is none.

    >>> alignment(np.array([0, 1, -1]), np.array([0, 2, 1]))
    0.5
    """
    alive = (preference >= 0) & (other >= 0)
    if not alive.any():
        return math.nan
    return float((preference == other)[alive].mean())


def dead(preference: Array, other: Array) -> float:
    """Return the share of the neurons (D,) that prefer no class in one of two models.

    `alignment` leaves these neurons out.
    """
    is_dead = (preference < 0) | (other < 0)
    return float(is_dead.mean())


def _float64(values: Array) -> NDArray[np.float64]:
    """Return the values as float64."""
    return np.asarray(values, dtype=np.float64)
