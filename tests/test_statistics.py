"""Our statistics against scipy's: intervals, tests of a difference, ranks, quantiles."""

import importlib.util
import math
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rayfed.folder.guess import NORMAL
from rayfed.papers.clients import correlation, ranks
from rayfed.report.table import Difference
from rayfed.report.words import interval, spread

FOLDER = Path(__file__).resolve().parents[1] / "docs/comparison"
# Demsar (JMLR 2006, table 5a): quantiles of Nemenyi's test at 0.05, for 2 to 10 methods.
NEMENYI = [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]
SIZES = [2, 3, 5, 10, 30, 31, 32, 60, 200]


@pytest.fixture(scope="module")
def twenty():
    """The script that tests the differences of twenty methods."""
    sys.path.append(str(FOLDER))
    spec = importlib.util.spec_from_file_location("make_twenty", FOLDER / "make_twenty.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_twenty"] = module
    spec.loader.exec_module(module)
    return module


def values_of(size, seed=0, shift=0.0):
    """So many normal values around a shift."""
    return (np.random.default_rng(seed).normal(size=size) + shift).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_an_interval_is_students(size):
    values = values_of(size)
    mean, deviation = spread(values)
    assert mean == pytest.approx(np.mean(values))
    assert deviation == pytest.approx(stats.tstd(values))
    expected = stats.t.interval(0.95, size - 1, np.mean(values), stats.sem(values))
    half_width = (expected[1] - expected[0]) / 2
    # Our points have three decimals.
    assert interval(values) == pytest.approx(expected, abs=2e-3 * half_width)


@pytest.mark.parametrize("size", [3, 6, 20])
def test_a_difference_is_sure_where_a_t_test_says_so(size):
    sure = []
    for seed in range(40):
        gaps = values_of(size, seed, shift=0.6)
        p = stats.ttest_1samp(gaps, 0.0).pvalue
        # Nearer to the limit, the third decimal of our points may decide.
        if abs(p - 0.05) < 1e-3:
            continue
        difference = Difference("fedavg", size, float(np.mean(gaps)), interval(gaps))
        assert difference.sure == (p < 0.05), (seed, p)
        sure.append(difference.sure)
    assert set(sure) == {True, False}


@pytest.mark.parametrize("seed", range(5))
def test_a_sign_flip_counts_all_signs(twenty, seed):
    gaps = np.array(values_of(7, seed, shift=0.5))
    as_far = 0
    for signs in product([1, -1], repeat=len(gaps)):
        as_far += abs(signs @ gaps) >= abs(gaps.sum()) - 1e-9
    assert twenty.sign_flip(gaps.tolist()) == pytest.approx(as_far / 2**7)


def test_a_sign_flip_by_hand(twenty):
    assert twenty.sign_flip([1.0] * 10) == pytest.approx(2 / 1024)
    assert twenty.sign_flip([3.0, -1.0]) == pytest.approx(1.0)
    assert twenty.sign_flip([0.0, 0.0, 0.0]) == pytest.approx(1.0)


def test_a_critical_difference_is_that_of_the_printed_table(twenty):
    for methods, quantile in enumerate(NEMENYI, start=2):
        expected = quantile * math.sqrt(methods * (methods + 1) / (6 * 30))
        assert twenty.critical_difference(methods, 30) == pytest.approx(expected, rel=1e-3)


def test_ranks_and_their_correlation_are_spearmans():
    random = np.random.default_rng(0)
    # Few values, so that many are equal.
    x = random.integers(0, 5, size=30).astype(float)
    y = x + random.integers(0, 5, size=30)
    assert ranks(x).tolist() == (stats.rankdata(x) - 1).tolist()
    assert correlation(x, y) == f"rank correlation {stats.spearmanr(x, y).statistic:.2f}"


def test_the_quantile_of_a_guess_is_the_normal_one():
    assert pytest.approx(stats.norm.ppf(0.9995), abs=1e-3) == NORMAL
