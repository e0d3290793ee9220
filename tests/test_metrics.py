"""Metrics: examples computed by hand, and laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rayfed.measures import forgetting, metrics

fractions = st.floats(0, 1)
confusions = st.integers(1, 6).flatmap(
    lambda c: arrays(np.int64, (c, c), elements=st.integers(0, 50))
)
histories = arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=6), elements=fractions)
updates = arrays(
    np.float64,
    st.tuples(st.integers(2, 5), st.integers(1, 8)),
    elements=st.floats(-10, 10, width=32),
)


def distributions(classes):
    counts = arrays(np.int64, classes, elements=st.integers(0, 20)).filter(lambda n: n.sum() > 0)
    return counts.map(lambda n: n / n.sum())


# Confusion.


def test_confusion_by_hand():
    confusion = metrics.confusion_matrix(
        np.array([0, 0, 2, 2, 2], np.uint8), np.array([0, 1, 2, 2, 0]), 3
    )
    assert confusion.dtype == np.int64
    assert confusion.tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 2]]
    assert metrics.accuracy(confusion) == 3 / 5
    np.testing.assert_allclose(metrics.class_accuracy(confusion), [1 / 2, np.nan, 2 / 3])
    np.testing.assert_allclose(
        metrics.row_normalised(confusion), [[0.5, 0.5, 0], [np.nan] * 3, [1 / 3, 0, 2 / 3]]
    )


def test_many_classes_in_small_integers_do_not_overflow():
    labels = np.arange(200, dtype=np.uint8)
    assert np.array_equal(metrics.confusion_matrix(labels, labels, 200), np.eye(200))


def test_no_samples_have_no_accuracy():
    empty = metrics.confusion_matrix(np.array([], int), np.array([], int), 2)
    assert math.isnan(metrics.accuracy(empty))
    assert np.isnan(metrics.class_accuracy(empty)).all()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.integers(0, 5))
def test_the_confusions_of_batches_add_up(pairs, cut):
    def counted(pairs):
        labels, predictions = np.array(pairs, int).reshape(-1, 2).T
        return metrics.confusion_matrix(labels, predictions, 4)

    assert np.array_equal(counted(pairs), counted(pairs[:cut]) + counted(pairs[cut:]))


@given(confusions)
def test_rows_sum_to_one_and_class_accuracies_average_to_the_accuracy(confusion):
    rows = confusion.sum(axis=1)
    np.testing.assert_allclose(metrics.row_normalised(confusion)[rows > 0].sum(axis=1), 1.0)
    if rows.sum():
        weighted = metrics.in_local_accuracy(metrics.class_accuracy(confusion), rows / rows.sum())
        assert weighted == pytest.approx(metrics.accuracy(confusion))


@pytest.mark.parametrize(
    ("confidence", "bin"), [(0.2, 2), (0.4, 5), (0.6, 8), (0.8, 11), (1.0, 14)]
)
def test_a_confidence_on_the_edge_of_two_bins_is_in_the_lower_one(confidence, bin):
    """Guo et al.: bin m of M = 15 holds the confidences in ((m - 1) / M, m / M]."""
    for right in (0, 1):
        bins = metrics.overconfidence(np.array([confidence]), np.array([right]))
        assert np.flatnonzero(bins).tolist() == ([bin] if confidence != right else [])
    above = metrics.overconfidence(np.array([min(confidence + 1e-6, 1.0)]), np.array([0]))
    assert np.flatnonzero(above).tolist() == [min(bin + 1, 14)]
    assert np.flatnonzero(metrics.overconfidence(np.array([1e-6]), np.array([0]))).tolist() == [0]


# Forgetting.


def test_forgetting_by_hand():
    history = np.array([[0.8, 0.0, 0.5], [0.2, 0.6, 0.5], [0.3, 0.5, 0.9]])
    assert forgetting.peak(history[:-1].max(axis=0), history[-1]) == pytest.approx(
        ((0.8 - 0.3) + (0.6 - 0.5) + (0.5 - 0.9)) / 3
    )
    assert forgetting.peak(np.array([0.8, np.nan]), np.array([0.6, np.nan])) == pytest.approx(
        0.2
    ), "no test samples"


@given(histories)
def test_forgetting_is_within_one_and_zero_for_one_round_or_a_model_that_does_not_change(history):
    best, now = history.max(axis=0), history[-1]
    assert 0 <= forgetting.peak(best, now) <= 1 and -1 <= forgetting.peak(history[0], now) <= 1
    assert forgetting.peak(np.full_like(now, np.nan), now) == forgetting.peak(now, now) == 0.0


# In- and out-local accuracy.


def test_in_and_out_local_by_hand():
    p = np.array([0.7, 0.3, 0.0, 0.0])
    accuracies = np.array([1.0, 0.5, 0.2, 0.1])
    assert metrics.in_local_accuracy(accuracies, p) == pytest.approx(0.85)
    assert metrics.out_local_accuracy(accuracies, p) == pytest.approx(
        (0.3 * 1.0 + 0.7 * 0.5 + 0.2 + 0.1) / 3
    )


@given(arrays(np.float64, 4, elements=fractions), distributions(4))
def test_in_local_is_weighted_by_p_and_out_local_by_the_rest_of_each_class(accuracies, p):
    inside, outside = (
        metrics.in_local_accuracy(accuracies, p),
        metrics.out_local_accuracy(accuracies, p),
    )
    assert inside == pytest.approx(p @ accuracies)
    assert inside + 3 * outside == pytest.approx(accuracies.sum())


def test_classes_without_test_samples_are_left_out_of_the_weights():
    accuracies = np.array([0.5, np.nan, 1.0])
    assert metrics.in_local_accuracy(accuracies, np.array([0.25, 0.5, 0.25])) == 0.75
    assert math.isnan(metrics.in_local_accuracy(accuracies, np.array([0.0, 1.0, 0.0])))
    assert math.isnan(metrics.out_local_accuracy(np.array([0.5]), np.array([1.0])))


# Speed.


def test_rounds_to_target_and_speed_up_by_hand():
    assert metrics.rounds_to_target([0.5], target=0.5) == 1
    assert metrics.rounds_to_target(np.array([0.1, 0.3, 0.2]), target=0.25) == 2
    assert metrics.rounds_to_target([0.1, math.nan], target=0.25) is None
    assert metrics.rounds_to_target([], target=0.25) is None
    assert metrics.speed_up([0.1], baseline=[0.5], target=0.5) is None
    assert metrics.speed_up([0.5], baseline=[0.1], target=0.5) is None


@given(st.lists(fractions, min_size=1))
def test_a_run_is_as_fast_as_itself(accuracies):
    assert metrics.speed_up(accuracies, accuracies, target=max(accuracies)) == 1.0
    assert metrics.speed_up(accuracies, accuracies, target=accuracies[-1]) == 1.0


# Drift.


def test_distribution_distance_by_hand():
    p = np.array([1.0, 0.0])
    assert metrics.distribution_distance(np.array([0.3, 0.0]), p) == 0.0
    assert metrics.distribution_distance(np.array([0.4, 0.4]), p) == 1.0
    assert metrics.distribution_distance(np.array([np.nan, 0.4]), p) == 2.0
    assert math.isnan(metrics.distribution_distance(np.zeros(2), p))


def diversity(updates):
    return metrics.gradient_diversity(
        updates.sum(axis=0), np.square(updates, dtype=float).sum(), len(updates)
    )


def pairwise(updates):
    lengths = np.linalg.norm(updates, axis=1, keepdims=True)
    units = np.divide(updates, lengths, out=np.zeros_like(updates), where=lengths > 0)
    return metrics.mean_pairwise_cosine(units.sum(axis=0), int((lengths > 0).sum()), len(updates))


def test_gradient_diversity_by_hand():
    assert diversity(np.array([[1.0, 2.0], [1.0, 2.0]])) == 1.0
    assert diversity(np.eye(4)) == pytest.approx(4.0)
    assert diversity(np.array([[1.0], [-1.0]])) == math.inf
    assert math.isnan(diversity(np.zeros((3, 2))))


@given(updates.filter(lambda updates: updates.any()))
def test_diversity_is_at_least_one_and_the_mean_cosine_is_that_of_all_pairs(updates):
    assert diversity(updates) >= 1 - 1e-9
    clients = range(len(updates))
    lengths = np.linalg.norm(updates, axis=1, keepdims=True)
    units = updates / np.where(lengths > 0, lengths, 1)
    pairs = [units[i] @ units[j] for i in clients for j in clients if i != j]
    assert pairwise(updates) == pytest.approx(np.mean(pairs), abs=1e-9)


def test_drift_is_measured_in_float64():
    big = np.full(3, 1e30, np.float32)
    assert metrics.weight_divergence(big, -big) == pytest.approx(2e30 * math.sqrt(3))
    assert metrics.gradient_diversity(2 * big, 6 * np.float64(1e30) ** 2, 2) == pytest.approx(1.0)
    outputs = np.full((10**6, 1), 0.1, np.float32)
    assert metrics.class_sums(outputs, np.zeros(10**6), 1)[0, 0] == pytest.approx(
        1e6 * float(np.float32(0.1)), rel=1e-9
    )


def test_a_single_client_has_no_pairs_and_a_zero_update_has_no_direction():
    assert math.isnan(pairwise(np.ones((1, 3))))
    assert pairwise(np.array([[1.0, 0.0], [0.0, 0.0]])) == 0.0


def test_feature_distance_by_hand():
    assert metrics.feature_distance(np.zeros((2, 2)), np.array([[3.0, 4.0], [0.0, 1.0]])) == 3.0


def test_class_preference_by_hand_and_alignment():
    features = np.array([[9.0, 0.0, 1.0], [0.0, 2.0, 1.5], [0.0, 2.0, 1.5], [1.0, 1.0, 5.0]])
    labels = np.array([0, 3, 3, 4])
    sums = metrics.class_sums(features, labels, num_classes=6)
    assert sums[3].tolist() == [0.0, 4.0, 3.0] and not sums[[1, 2, 5]].any()
    preference = metrics.class_preference(
        sums - 100 * np.bincount(labels, minlength=6)[:, None], np.bincount(labels, minlength=6)
    )
    assert preference.tolist() == [0, 3, 4], (
        "all means are negative, and a class without samples has 0"
    )
    preference = metrics.class_preference(sums, np.bincount(labels, minlength=6))
    assert preference.tolist() == [0, 3, 4]
    assert metrics.alignment(preference, np.array([0, 3, 0])) == pytest.approx(2 / 3)
    silent = metrics.class_preference(sums * [1, 0, 1], np.bincount(labels, minlength=6))
    assert silent.tolist() == [0, -1, 4], "a neuron that is 0 on all images prefers no class"
    assert metrics.alignment(silent, np.array([-1, -1, 4])) == 1 and math.isnan(
        metrics.alignment(silent, -np.ones(3))
    )
    assert metrics.dead(silent, np.array([-1, -1, 4])) == pytest.approx(2 / 3)
