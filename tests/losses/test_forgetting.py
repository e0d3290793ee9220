"""Each definition of forgetting: a case by hand, and what holds for any accuracies."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rayfed.measures.forgetting import aggregation, continual, dropped, local, peak

C = 4
share = st.floats(0, 1)
model = arrays(float, C, elements=share)
clients = arrays(float, (3, C), elements=share)
history = arrays(float, (5, C), elements=share)


def test_by_hand():
    before, after = np.array([0.9, 0.5, 0.2, np.nan]), np.array([0.6, 0.8, 0.1, np.nan])
    # The gain of 0.3 does not make up for it.
    assert dropped(before, after) == pytest.approx((0.3 + 0.1) / 3)
    assert peak(before, after) == pytest.approx((0.3 - 0.3 + 0.1) / 3)
    of_clients = np.array([[1.0, 0.0, 0.2, np.nan], [0.9, 0.5, 0.2, np.nan]])
    assert local(before, of_clients) == pytest.approx((0.5 / 3 + 0) / 2)
    assert aggregation(of_clients, after) == pytest.approx(((0.4 + 0.1) / 3 + (0.3 + 0.1) / 3) / 2)
    trained = np.array([True, False, False, False])
    assert continual(before, after, trained) == pytest.approx((-0.3 + 0.1) / 2)
    assert math.isnan(continual(before, after, np.ones(C, bool))) and math.isnan(
        dropped(before[3:], after[3:])
    )


@given(model, clients, model)
def test_a_round_forgets_no_more_than_its_clients_and_their_average_together(before, models, after):
    assert dropped(before, after) <= local(before, models) + aggregation(models, after) + 1e-12


@given(model, model)
def test_what_is_dropped_less_what_is_dropped_on_the_way_back_is_the_change_of_the_accuracy(
    before, after
):
    assert dropped(before, after) - dropped(after, before) == pytest.approx(
        before.mean() - after.mean(), abs=1e-12
    )
    assert 0 <= dropped(before, after) <= 1 and dropped(before, np.maximum(before, after)) == 0


@given(history)
def test_the_peak_is_no_more_than_all_that_was_dropped_and_what_is_never_lost_is_not_forgotten(
    accuracy,
):
    drops = sum(dropped(a, b) for a, b in pairwise(accuracy))
    assert peak(accuracy[:-1].max(axis=0), accuracy[-1]) <= drops + 1e-12
    rising = np.maximum.accumulate(accuracy)
    assert peak(rising[-2], rising[-1]) <= 0 and all(
        dropped(a, b) == 0 for a, b in pairwise(rising)
    )


@given(history, arrays(bool, C))
def test_the_peak_is_the_mean_of_the_continual_of_trained_and_other_classes(accuracy, trained):
    best, now = accuracy[:-1].max(axis=0), accuracy[-1]
    parts = [
        (trained.sum(), continual(best, now, ~trained)),
        ((~trained).sum(), continual(best, now, trained)),
    ]
    assert peak(best, now) == pytest.approx(sum(n * value for n, value in parts if n) / C)
