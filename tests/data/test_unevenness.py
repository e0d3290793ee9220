"""How uneven a partition is, against closed forms, and against sums over a whole table.

`N` clients, `K` classes; `p` are the label shares of a client, `q` those of all.
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
    """Return the measures of a table (N, K) of counts."""
    client, label = np.nonzero(table)
    return unevenness(client, label, table[client, label], *table.shape)


@pytest.mark.parametrize("k", [2, 5, 10])
def test_a_class_per_client_is_as_uneven_as_it_can_be(k):
    apart = measured(7 * np.eye(k, dtype=int))
    # A client has p = 1 for its class, where the mean of p and q is (k + 1) / 2k; elsewhere q / 2.
    from_p = math.log2(2 * k / (k + 1))
    from_q = math.log2(2 / (k + 1)) / k + (k - 1) / k
    assert apart["hellinger"] == pytest.approx(math.sqrt(1 - math.sqrt(1 / k)))
    assert apart["jensen_shannon"] == pytest.approx(math.sqrt((from_p + from_q) / 2))
    assert apart["earth_mover"] == pytest.approx(2 * (1 - 1 / k))
    assert apart["size_gini"] == pytest.approx(0)
    assert apart["missing_classes"] == k - 1


@pytest.mark.parametrize("k", [2, 5, 10])
def test_clients_that_differ_in_size_alone_have_the_same_labels(k):
    alike = measured(np.outer([1, 1, 2], np.arange(1, k + 1)))
    for name in ("hellinger", "jensen_shannon", "earth_mover"):
        assert alike[name] == pytest.approx(0, abs=1e-7)
    assert alike["size_gini"] == pytest.approx(1 / 6)
    assert alike["missing_classes"] == 0


def test_one_client_that_has_all_is_even_but_for_its_size():
    measures = measured(np.array([[3, 5], [0, 0], [0, 0], [0, 0]]))
    assert measures["size_gini"] == 0.75
    assert measures["hellinger"] == 0
    assert measures["missing_classes"] == 0


@given(arrays(np.int64, (4, 3), elements=st.integers(0, 9)).filter(lambda table: table.any()))
def test_of_filled_cells_alone_it_is_what_it_is_of_all_cells(table):
    measures = measured(table)
    # Clients without examples have no label shares.
    held = table[table.any(axis=1)]
    p = held / held.sum(axis=1, keepdims=True)
    q = held.sum(axis=0) / held.sum()

    squares = np.square(np.sqrt(p) - np.sqrt(q)).sum(axis=1)
    assert measures["hellinger"] == pytest.approx(np.sqrt(squares / 2).mean(), abs=1e-7)

    between = (p + q) / 2
    # A share of 0 adds nothing.
    with np.errstate(divide="ignore", invalid="ignore"):
        from_p = np.nan_to_num(p * np.log2(p / between))
        from_q = np.nan_to_num(q * np.log2(q / between))
    divergence = np.maximum((from_p + from_q).sum(axis=1) / 2, 0)
    assert measures["jensen_shannon"] == pytest.approx(np.sqrt(divergence).mean(), abs=1e-7)

    assert measures["earth_mover"] == pytest.approx(np.abs(p - q).sum(axis=1).mean())

    sizes = table.sum(axis=1)
    gaps = np.abs(sizes[:, None] - sizes).mean()
    assert measures["size_gini"] == pytest.approx(gaps / (2 * sizes.mean()))


def test_a_smaller_alpha_is_more_uneven():
    labels = np.arange(6000) % 10
    by_alpha = []
    for alpha in (100.0, 1.0, 0.1):
        dealt = Dirichlet(alpha=alpha, num_clients=20, seed=0).split(labels, num_classes=10)
        table = []
        for client in range(20):
            table.append(np.bincount(labels[dealt.client(client)], minlength=10))
        by_alpha.append(measured(np.stack(table)))
    even, middle, uneven = by_alpha
    # With alpha = 100 and 1 no class may be missing at all.
    for name in even.keys() - {"missing_classes"}:
        assert even[name] < middle[name] < uneven[name]
