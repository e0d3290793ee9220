"""Federations: clients, auxiliary set, moments; and the picture of a partition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rayfed.data.federation import federate, open_federation, pixel_moments
from rayfed.data.partition import Dirichlet, Iid, Natural, Shards
from rayfed.data.samples import Dataset, Samples
from rayfed.data.sources import Source
from rayfed.report.partition import draw_partition, table_text
from rayfed.values import InputError


def dataset(counts: list[int], groups: np.ndarray | None = None) -> Dataset:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    pixels = np.random.default_rng(1).integers(0, 256, (len(labels), 3, 4, 4), dtype=np.uint8)
    classes = tuple(f"class {c}" for c in range(len(counts)))
    train = Samples(pixels, labels, classes, groups, () if groups is None else ("a", "b"))
    return Dataset(train, train.take(np.arange(5)))


def test_a_federation_knows_its_clients():
    data = dataset([30, 20, 10])
    federation = federate(data, Dirichlet(alpha=1.0, num_clients=4, min_size=1))
    assert (federation.num_clients, federation.num_classes, federation.image_shape) == (4, 3, (3, 4, 4))
    table = federation.label_table()
    assert table.sum(axis=0).tolist() == [30, 20, 10]
    for i in range(4):
        counts = np.bincount(data.train.labels[federation.client(i)], minlength=3)
        assert federation.label_counts(i).tolist() == table[i].tolist() == counts.tolist()
        assert federation.num_examples(i) == len(federation.client(i)) == counts.sum()
    assert len(federation.auxiliary) == 0


@pytest.mark.parametrize("rule", [Iid(4), Shards(2, 4), Dirichlet(1.0, 4, min_size=1), Natural()])
def test_auxiliary_images_belong_to_no_client(rule):
    data = dataset([30, 20, 10], groups=np.arange(60) % 2)
    federation = federate(data, rule, auxiliary_per_class=3)
    assert np.bincount(data.train.labels[federation.auxiliary]).tolist() == [3, 3, 3]
    dealt = np.concatenate([federation.client(i) for i in range(federation.num_clients)])
    assert sorted([*dealt, *federation.auxiliary]) == list(range(60))
    assert all(np.all(np.diff(federation.client(i)) > 0) for i in range(federation.num_clients))
    again = federate(data, rule, auxiliary_per_class=3)
    assert np.array_equal(again.auxiliary, federation.auxiliary)
    assert again.partition.hash() == federation.partition.hash()


def test_an_auxiliary_set_that_cannot_be_taken_is_refused():
    with pytest.raises(InputError, match="auxiliary set of 11 images a class cannot be taken: class 'class 2' has 10"):
        federate(dataset([30, 20, 10]), Iid(2), auxiliary_per_class=11)


def test_natural_clients_are_the_groups_of_the_data():
    groups = np.arange(60) // 45
    federation = federate(dataset([30, 20, 10], groups), Natural())
    assert federation.client(0).tolist() == list(range(45))
    assert federation.client(1).tolist() == list(range(45, 60))


def test_two_names_for_the_client_column_are_refused():
    with pytest.raises(InputError, match=r"data.client = 'a' and data.partition.column = 'b' name different columns"):
        open_federation(Source(client="a"), Natural("b"))


@settings(deadline=None, max_examples=40)
@given(hnp.arrays(np.uint8, st.tuples(*(st.integers(1, n) for n in (5, 3, 4, 4)))))
def test_moments_are_numpys(images):
    mean, std = pixel_moments(images)
    scaled = images.astype(np.float64) / 255
    assert mean == pytest.approx(scaled.mean(axis=(0, 2, 3)))
    expected = scaled.std(axis=(0, 2, 3))
    constant = np.ptp(images, axis=(0, 2, 3)) == 0
    assert std == pytest.approx(np.where(constant, 1.0, expected))


def test_moments_do_not_depend_on_the_order_of_many_images():
    images = np.random.default_rng(0).integers(0, 256, (3000, 2, 8, 8), dtype=np.uint8)
    assert pixel_moments(images) == pixel_moments(images[::-1])


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("shape", [(1, 1), (20, 10), (1001, 100)])
def test_the_picture_is_drawn(tmp_path, suffix, shape):
    table = np.random.default_rng(0).integers(0, 50, shape)
    path = draw_partition(table, tuple(f"c{i}" for i in range(shape[1])), tmp_path / f"p.{suffix}", "a title")
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_the_table_has_totals():
    text = table_text(np.array([[1, 0], [2, 30]]), ("a", "b"))
    assert [line.split() for line in text.splitlines()] == [
        ["client", "a", "b", "total"],
        ["0", "1", ".", "1"],
        ["1", "2", "30", "32"],
        ["total", "3", "30", "33"],
    ]


def test_a_client_without_images_is_refused():
    rule = Dirichlet(alpha=0.01, num_clients=50, min_size=0, cap=False)
    with pytest.raises(InputError, match=r"of 50 clients hold no image, such as client \d+.*min_size = 1"):
        open_federation(Source(), rule)
