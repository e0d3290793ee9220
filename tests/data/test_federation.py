"""Federations: clients, auxiliary set and pixel moments; and the figure of a partition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rayfed.base.errors import InputError
from rayfed.data.federation import federate
from rayfed.data.inputs import Images
from rayfed.data.naming import number_of, to_ask_for
from rayfed.data.partition import Dirichlet, Iid, Natural, Shards
from rayfed.data.samples import Dataset, Samples
from rayfed.papers.panels import save
from rayfed.papers.partition import partition


def dataset(counts: list[int], groups: np.ndarray | None = None) -> Dataset:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    pixels = np.random.default_rng(1).integers(0, 256, (len(labels), 3, 4, 4), dtype=np.uint8)
    classes = tuple(f"class {c}" for c in range(len(counts)))
    train = Samples(pixels, labels, classes, groups)
    return Dataset(train, train.take(np.arange(5)))


def test_a_federation_knows_its_clients():
    data = dataset([30, 20, 10])
    federation = federate(data, Dirichlet(alpha=1.0, num_clients=4, min_size=1))
    assert (federation.num_clients, federation.num_classes, federation.inputs) == (
        4,
        3,
        Images((3, 4, 4)),
    )
    found = [np.bincount(data.train.labels[federation.client(i)], minlength=3) for i in range(4)]
    for i, counts in enumerate(found):
        assert federation.label_counts(i).tolist() == counts.tolist()
        assert federation.num_examples(i) == len(federation.client(i)) == counts.sum()
    assert np.sum(found, axis=0).tolist() == [30, 20, 10]
    assert len(federation.auxiliary) == 0


def test_cells_are_the_counts_above_zero_by_client_and_class(make_federation):
    table = np.array([[9, 3, 0, 0], [0, 0, 1, 0], [0, 8, 0, 2]])
    assert np.array_equal(make_federation(table).cells(), [*np.nonzero(table), table[table > 0]])


def test_the_hash_covers_every_image_and_label():
    def hashed(part=None, column=None):
        data = dataset([30, 20, 10])
        if part:
            getattr(getattr(data, part), column)[-1] ^= 1
        return federate(data, Iid(2)).hash()

    changed = [
        hashed(part, column) for part in ("train", "test") for column in ("examples", "labels")
    ]
    assert hashed() == hashed()
    assert len({hashed(), *changed}) == 5


@pytest.mark.parametrize(
    "rule", [Iid(4), Shards(4, s=2), Dirichlet(4, alpha=1.0, min_size=1), Natural()]
)
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
    assert federation.dealt.hash() == federate(data, rule).dealt.hash()


@settings(max_examples=40)
@given(hnp.arrays(np.uint8, st.tuples(*(st.integers(1, n) for n in (5, 3, 4, 4)))))
def test_moments_equal_those_of_numpy(images):
    mean, std = Images(images.shape[1:]).moments(images)
    scaled = images.astype(np.float64) / 255
    assert mean == pytest.approx(scaled.mean(axis=(0, 2, 3)))
    expected = scaled.std(axis=(0, 2, 3))
    constant = np.ptp(images, axis=(0, 2, 3)) == 0
    assert std == pytest.approx(np.where(constant, 1.0, expected))


def test_moments_do_not_depend_on_the_order_of_many_images():
    images = np.random.default_rng(0).integers(0, 256, (3000, 2, 8, 8), dtype=np.uint8)
    assert Images(images.shape[1:]).moments(images) == Images(images.shape[1:]).moments(
        images[::-1]
    )


@pytest.mark.parametrize(
    ("suffix", "beginning", "num_clients", "num_classes"),
    [("png", b"\x89PNG\r", 1, 1), ("svg", b"<?xml", 20, 10), ("pdf", b"%PDF-", 1001, 100)],
)
def test_a_figure_of_a_partition_is_drawn(tmp_path, suffix, beginning, num_clients, num_classes):
    clients, classes = np.divmod(np.arange(num_clients * num_classes), num_classes)
    cells = {
        "client": clients,
        "class": classes,
        "count": np.random.default_rng(0).integers(0, 50, len(clients)),
    }
    path = tmp_path / f"p.{suffix}"
    save(partition, path, cells, [f"c{i}" for i in range(num_classes)], num_clients)
    assert path.read_bytes().startswith(beginning)


@pytest.mark.parametrize(
    ("asked", "names", "number"),
    [
        (1, (), 1),
        ("1", (), 1),
        ("number:1", (), 1),
        ("b", ("a", "b", "c"), 1),
        ("0", ("0", "1", "2"), 0),
        ("20", ("10", "20", "30"), 1),
        ("number:2", ("1", "2", "3"), 2),
        ("name:2", ("1", "2", "3"), 1),
        ("3", ("1", "2", "3"), 2),
        ("0", ("1", "2", "3"), 0),
    ],
)
def test_a_client_is_known_by_number_and_name(asked, names, number):
    assert number_of(asked, names, 3) == number
    assert number_of(to_ask_for(number, names), names, 3) == number


@pytest.mark.parametrize("asked", [2, "2"])
def test_a_number_that_is_another_clients_name_is_refused_with_both_readings(asked):
    says = (
        "measure_clients: client 2: number 2 is the client named '3', and the client named '2' has "
        "number 1; give number:2 or name:2"
    )
    with pytest.raises(InputError, match=f"^{says}$"):
        number_of(asked, ("1", "2", "3"), 3, "measure_clients")


@pytest.mark.parametrize(("asked", "names"), [("3", ()), (-1, ()), ("x", ("a", "b", "c"))])
def test_a_client_that_is_not_there_is_refused(asked, names):
    with pytest.raises(InputError, match=f"there is no client {asked}; the clients are 0 to 2"):
        number_of(asked, names, 3)
