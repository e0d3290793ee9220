"""How uneven a partition is, against closed forms, and against sums over all cells of a dense
table.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rayfed.data.partition import Dirichlet
from rayfed.data.unevenness import unevenness


def measured(table):
    """Of a table (N, K) of counts."""
    client, label = np.nonzero(table)
    return unevenness(client, label, table[client, label], *table.shape)


@pytest.mark.parametrize("k", [2, 5, 10])
def test_a_class_per_client_and_all_alike(k):
    apart = measured(7 * np.eye(k, dtype=int))
    divergence = math.log2(2 * k / (k + 1)) / 2 + (math.log2(2 / (k + 1)) / k + (k - 1) / k) / 2
    assert apart["hellinger"] == pytest.approx(math.sqrt(1 - math.sqrt(1 / k)))
    assert apart["jensen_shannon"] == pytest.approx(math.sqrt(divergence))
    assert apart["earth_mover"] == pytest.approx(2 * (1 - 1 / k))
    assert (apart["size_gini"], apart["missing_classes"]) == (pytest.approx(0), k - 1)
    alike = measured(np.outer([1, 1, 2], np.arange(1, k + 1)))
    assert max(
        alike[name] for name in ("hellinger", "jensen_shannon", "earth_mover")
    ) == pytest.approx(0, abs=1e-7)
    assert (alike["size_gini"], alike["missing_classes"]) == (pytest.approx(1 / 6), 0)


def test_one_client_that_has_all_is_even_but_for_its_size():
    found = measured(np.array([[3, 5], [0, 0], [0, 0], [0, 0]]))
    assert (found["size_gini"], found["hellinger"], found["missing_classes"]) == (0.75, 0, 0)


@given(arrays(np.int64, (4, 3), elements=st.integers(0, 9)).filter(lambda table: table.any()))
def test_of_filled_cells_alone_it_is_what_it_is_of_all_cells(table):
    found, held = measured(table), table[table.any(axis=1)]
    p, q = held / held.sum(axis=1, keepdims=True), held.sum(axis=0) / held.sum()
    both = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.nan_to_num(p * np.log2(p / both)) + np.nan_to_num(q * np.log2(q / both))
    assert found["hellinger"] == pytest.approx(
        np.sqrt(np.square(np.sqrt(p) - np.sqrt(q)).sum(axis=1) / 2).mean(), abs=1e-7
    )
    assert found["jensen_shannon"] == pytest.approx(
        np.sqrt(np.maximum(terms.sum(axis=1) / 2, 0)).mean(), abs=1e-7
    )
    assert found["earth_mover"] == pytest.approx(np.abs(p - q).sum(axis=1).mean())
    sizes = table.sum(axis=1)
    gaps = np.abs(sizes[:, None] - sizes).mean() / (2 * sizes.mean())
    assert found["size_gini"] == pytest.approx(gaps)


def test_a_smaller_alpha_is_more_uneven():
    labels = np.arange(6000) % 10
    of_alpha = []
    for alpha in (100.0, 1.0, 0.1):
        dealt = Dirichlet(alpha=alpha, num_clients=20, seed=0).split(labels, num_classes=10)
        table = np.stack([np.bincount(labels[dealt.client(i)], minlength=10) for i in range(20)])
        of_alpha.append(measured(table))
    for name in of_alpha[0]:
        assert (
            of_alpha[0][name] < of_alpha[1][name] < of_alpha[2][name] or name == "missing_classes"
        )
