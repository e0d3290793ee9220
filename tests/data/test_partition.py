"""Partitions: laws of every rule, cases by hand, and refusals."""

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rayfed
from rayfed.base.errors import InputError
from rayfed.base.values import Ge
from rayfed.data.dealt import write_dealt
from rayfed.data.federation import Federation, federate, open_federation
from rayfed.data.partition import (
    PARTITIONS,
    Classes,
    Dirichlet,
    File,
    Iid,
    Natural,
    Partition,
    Quantity,
    Shards,
    Shares,
    apportioned,
)
from rayfed.data.samples import Dataset, Samples
from rayfed.folder.provenance import read_environment
from rayfed.job import read_job

few = settings(max_examples=40)
CIFAR = np.repeat(np.arange(10), 5000)


@st.composite
def label_arrays(draw: st.DrawFn, min_count: int = 0) -> tuple[np.ndarray, int]:
    """Labels in random order and the number of classes, some of which may be empty."""
    counts = draw(st.lists(st.integers(min_count, 40), min_size=1, max_size=6).filter(any))
    labels = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng(draw(st.integers(0, 99))).permutation(labels), len(counts)


@st.composite
def splits(draw: st.DrawFn) -> tuple[object, np.ndarray, int]:
    """A rule, and labels that it can split."""
    labels, num_classes = draw(label_arrays())
    present = np.count_nonzero(np.bincount(labels))
    kind = draw(
        st.sampled_from([kind for kind in PARTITIONS.values() if kind not in (File, Shares)])
    )
    if kind is Natural:
        return Natural(), labels, num_classes
    options, smallest, largest = {"seed": draw(st.integers(0, 2**40))}, 1, len(labels)
    if kind is Shards:
        options["s"] = s = draw(st.integers(1, 4).filter(lambda s: len(labels) // s * s >= present))
        smallest, largest = -(-present // s), len(labels) // s
    if kind is Dirichlet:
        sizes = draw(st.sampled_from(["drawn", "equal"]))
        options |= {
            "alpha": draw(st.floats(1e-6, 100)),
            "cap": draw(st.booleans()),
            "min_size": 0,
            "sizes": sizes,
        }
    if kind is Quantity:
        options |= {"alpha": draw(st.floats(1e-6, 100)), "min_size": 0}
    if kind is Classes:
        options["k"] = k = draw(st.integers(1, present))
        smallest, largest = -(-present // k), 8 + present
    rule = kind(draw(st.integers(smallest, largest)), **options)
    if kind is Classes:
        # Enough for every holder.
        labels = np.concatenate([labels, np.repeat(np.unique(labels), rule.num_clients)])
    return rule, labels, num_classes


def table(partition: Partition, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Images by client and class, (N, K)."""
    clients = range(partition.num_clients)
    return np.stack(
        [np.bincount(labels[partition.client(i)], minlength=num_classes) for i in clients]
    )


@few
@given(splits())
def test_every_rule_deals_each_image_to_one_client_and_is_repeatable(case):
    rule, labels, num_classes = case
    groups = np.arange(len(labels)) % 3
    partition = rule.split(labels, num_classes, groups)
    assert partition.num_clients == getattr(rule, "num_clients", len(np.unique(groups)))
    clients = [partition.client(i) for i in range(partition.num_clients)]
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(len(labels)))
    assert all(np.all(np.diff(client) > 0) for client in clients)
    assert partition.indices.dtype == partition.offsets.dtype == np.int64
    assert partition.hash() == rule.split(labels, num_classes, groups).hash()


def opened(rule: object, labels: np.ndarray, per_class: int) -> Federation:
    """A federation of black pictures with these labels, of three natural clients."""
    pixels, groups = np.zeros((len(labels), 1, 1, 1), dtype=np.uint8), np.arange(len(labels)) % 3
    train = Samples(pixels, labels, tuple(map(str, range(labels.max() + 1))), groups)
    return federate(Dataset(train, train), rule, auxiliary_per_class=per_class)


@few
@given(splits(), st.integers(1, 6))
def test_an_auxiliary_set_is_withdrawn_from_what_every_rule_deals_evenly_within_a_class(
    case, per_class
):
    rule, labels, _ = case
    # No class without images, of which none could be taken.
    labels = np.unique(labels, return_inverse=True)[1]
    try:
        whole = opened(rule, labels, 0)
        less = opened(rule, labels, per_class)
    except InputError:
        assume(False)
    num_classes, n = labels.max() + 1, whole.num_clients
    assert (
        np.bincount(labels[less.auxiliary], minlength=num_classes).tolist()
        == [per_class] * num_classes
    )
    for i in range(n):
        assert np.array_equal(less.client(i), np.setdiff1d(whole.client(i), less.auxiliary))
    assert (
        less.dealt.hash() == whole.dealt.hash() == whole.partition.hash() != less.partition.hash()
    )
    assert less.partition.sizes.min() >= 1
    had = table(whole.partition, labels, num_classes)
    lost = had - table(less.partition, labels, num_classes)
    for held, gone in zip(had.T, lost.T, strict=True):
        assert np.ptp(gone[held >= gone.max()]) <= 1
        fewer = held < gone.max()
        # All of it, or all but the client's last image.
        assert np.all(gone[fewer] >= held[fewer] - 1)
    assert np.array_equal(opened(rule, labels, per_class).auxiliary, less.auxiliary)


@dataclass(frozen=True)
class Listed:
    """A user's rule: the clients, image by image."""

    owners: tuple[int, ...]
    seed: int = 0

    def split(self, labels, num_classes, groups=None):
        return Partition.of_owners(np.array(self.owners), max(self.owners) + 1)


@pytest.mark.parametrize(
    ("owners", "labels", "per_class", "lost"),
    [
        # Client 2 gives the one of class 1.
        (
            [0, 0, 0, 0, 0, 1, 2, 2, 2],
            [0, 0, 0, 0, 0, 0, 0, 0, 1],
            1,
            None,
        ),
        ([0, 0, 0, 0, 0, 1, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1], 2, [2, 0, 2]),
        # Client 1 keeps its only image; 0 and 2 give two each in turns, then 0 a third one.
        ([0, 0, 0, 0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0], 4, [2, 0, 2]),
        ([0, 0, 0, 0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0], 5, [3, 0, 2]),
        # Both images of class 1 go; so client 0 must keep that of class 0, and client 1 gives up
        # two.
        ([0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0], 2, [1, 3]),
    ],
)
def test_withdrawals_by_hand(owners, labels, per_class, lost):
    for seed in range(20):
        rule = Listed(tuple(owners), seed)
        whole, less = (opened(rule, np.array(labels), count) for count in (0, per_class))
        found = whole.partition.sizes - less.partition.sizes
        assert found.sum() == per_class * (max(labels) + 1)
        assert less.partition.sizes.min() >= 1
        assert lost is None or found.tolist() == lost


def test_which_images_are_withdrawn_follows_the_partitions_seed():
    sets = {tuple(opened(Iid(10, seed), CIFAR, 3).auxiliary) for seed in (0, 0, 1)}
    assert len(sets) == 2


@pytest.mark.parametrize(
    ("owners", "labels", "per_class", "message"),
    [
        (
            [0, 0, 1, 1],
            [0, 0, 0, 1],
            2,
            "of 2 images per class cannot be taken: class '1' has 1 images, and no more can",
        ),
        (
            [0, 1, 2, 2],
            [0, 0, 0, 0],
            2,
            "of class '0', clients can give up only 1 of 4 images, as each must keep one",
        ),
    ],
)
def test_withdrawals_that_cannot_be_are_refused(owners, labels, per_class, message):
    with pytest.raises(InputError, match=message):
        opened(Listed(tuple(owners)), np.array(labels), per_class)


@pytest.mark.parametrize("rule", [Iid, Shards, Dirichlet, Quantity, Classes])
def test_another_seed_makes_another_partition(rule):
    assert rule(seed=0).split(CIFAR, 10).hash() != rule(seed=1).split(CIFAR, 10).hash()


@few
@given(label_arrays(), st.data())
def test_iid_sizes_differ_by_at_most_one(case, data):
    labels, num_classes = case
    rule = Iid(data.draw(st.integers(1, len(labels))))
    assert np.ptp(rule.split(labels, num_classes).sizes) <= 1


def test_shards_of_balanced_labels_have_one_size_and_one_class_each():
    partition = Shards(s=2, num_clients=100).split(CIFAR, 10)
    counts = table(partition, CIFAR, 10)
    assert set(counts.ravel()) <= {0, 250, 500}
    assert set(partition.sizes) == {500}
    # A client may get two shards of one class.
    assert (counts == 500).any()


@few
@given(label_arrays(min_count=10), st.integers(0, 5))
def test_shards_of_unbalanced_labels_have_one_class_each_and_nearly_one_size(case, seed):
    labels, num_classes = case
    counts = table(
        Shards(2 * num_classes, seed, s=1).split(labels, num_classes), labels, num_classes
    )
    assert np.all(np.count_nonzero(counts, axis=1) == 1)
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1


def test_shards_by_hand():
    """8 + 3 + 1 images in 5 shards: the largest class is cut into 3 + 3 + 2; 3 and 1 stay whole."""
    labels = np.repeat([0, 2, 3], [8, 3, 1])
    counts = table(Shards(s=1, num_clients=5).split(labels, 4), labels, 4)
    assert sorted(map(tuple, counts)) == [
        (0, 0, 0, 1),
        (0, 0, 3, 0),
        (2, 0, 0, 0),
        (3, 0, 0, 0),
        (3, 0, 0, 0),
    ]


@few
@given(label_arrays(), st.floats(1e-6, 1e6), st.data())
def test_dirichlet_clients_of_equal_sizes_differ_by_at_most_one(case, alpha, data):
    labels, num_classes = case
    rule = Dirichlet(data.draw(st.integers(1, len(labels))), alpha=alpha, min_size=0, sizes="equal")
    assert np.ptp(rule.split(labels, num_classes).sizes) <= 1


def test_dirichlet_clients_of_equal_sizes_draw_their_proportions_over_the_classes():
    """A tenth of each client's images is of each class on average, with the variance of Dir(alpha)
    among the first.
    """
    few = CIFAR[::50]
    even = table(Dirichlet(10, alpha=1e6, sizes="equal").split(few, 10), few, 10)
    assert np.abs(even - 10).max() < 5 * np.sqrt(10)
    skewed = table(Dirichlet(10, alpha=1e-6, sizes="equal").split(few, 10), few, 10)
    assert set(skewed.ravel()) == {0, 100}, "each of a single class, as 100 divides 100"
    shares = []
    for seed in range(200):
        rule = Dirichlet(10, seed, alpha=0.5, sizes="equal")
        first = table(rule.split(few, 10), few, 10)[0] / 100
        shares.append(first[:3])
    shares = np.concatenate(shares)
    assert abs(shares.mean() - 0.1) < 5 * 0.12 / np.sqrt(600)
    assert abs(shares.var() / (0.1 * 0.9 / (0.5 * 10 + 1)) - 1) < 0.4


def test_of_sizes_that_differ_by_one_the_first_clients_have_the_larger():
    labels = np.zeros(10, dtype=np.int64)
    assert Iid(4).split(labels, 1).sizes.tolist() == [3, 3, 2, 2]


def test_quantity_skews_sizes_alone():
    partition = Quantity(20, alpha=0.5).split(CIFAR, 10)
    counts = table(partition, CIFAR, 10)
    assert partition.sizes.min() >= 10 and partition.sizes.max() > 3 * partition.sizes.mean()
    expected = partition.sizes[:, None] / 10
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()
    sizes = np.concatenate(
        [Quantity(10, seed, alpha=2.0, min_size=0).split(CIFAR, 10).sizes for seed in range(100)]
    )
    assert abs((sizes / 50_000).var() / (0.1 * 0.9 / (2.0 * 10 + 1)) - 1) < 0.3, (
        "the variance of Dir(2)"
    )


@pytest.mark.parametrize("suffix", [".json", ".npz", ".parquet"])
def test_an_exported_partition_is_read_back(tmp_path, suffix):
    dealt = Dirichlet(7, alpha=0.3, min_size=1).split(CIFAR[::100], 10)
    write_dealt(tmp_path / f"a{suffix}", [dealt.client(i) for i in range(7)])
    assert File(str(tmp_path / f"a{suffix}")).split(CIFAR[::100], 10).hash() == dealt.hash()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fedacg.txt", "{0: [4, 1], 2: [0], 1: [3, 2]}\n"),
        ("sets.txt", "{0: {1, 4}, 1: {2, 3}, 2: {0}}"),
        ("named.json", '{"0": [1, 4], "1": [2, 3], "2": [0]}'),
        ("lists.json", "[[1, 4], [2, 3], [0]]"),
    ],
)
def test_others_files_are_read(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    partition = File(str(tmp_path / name)).split(np.zeros(5), 1)
    assert [partition.client(i).tolist() for i in range(3)] == [[1, 4], [2, 3], [0]]


@pytest.mark.parametrize("withdrawn", [0, 8])
def test_a_runs_own_partition_is_read_and_gives_the_same_weights(tmp_path, withdrawn):
    keys = {
        "ray.mode": "off",
        "train.num_rounds": 1,
        "train.local_steps": 2,
        "output.path": str(tmp_path),
    }
    keys |= {"model": "lenet", "train.clients_per_round": 3}
    keys |= {"data.auxiliary_per_class": withdrawn, "method": "fedssd" if withdrawn else "fedntd"}
    first = rayfed.run("jobs/quickstart.toml", keys | {"name": "first"})
    file = {"name": "file", "path": str(first.path / "partition.parquet")}
    second = rayfed.run("jobs/quickstart.toml", keys | {"name": "second", "data.partition": file})
    held = [read_environment(result.path)["partition"] for result in (first, second)]
    assert (held[0] == held[1]) == (not withdrawn), (
        "what was dealt is not known of the server's images"
    )
    assert all(torch.equal(tensor, second.weights[name]) for name, tensor in first.weights.items())


def test_dirichlet_keeps_min_size_and_cap():
    """With the cap, a client above n / N images gets no further class."""
    partition = Dirichlet(alpha=0.1, num_clients=20).split(CIFAR, 10)
    counts = table(partition, CIFAR, 10)
    assert partition.sizes.min() >= 10
    before = np.cumsum(counts, axis=1) - counts
    assert not np.any((before >= len(CIFAR) / 20) & (counts > 0))


@pytest.mark.parametrize("seed", range(5))
def test_a_client_that_holds_exactly_its_share_gets_no_more(seed):
    """With six images in each of four classes and three clients, n / N is 8: some hold just that
    before the end.
    """
    labels, exactly = np.repeat(np.arange(4), 6), 0
    for number in range(20):
        rule = Dirichlet(3, alpha=1.0, min_size=0, seed=100 * seed + number)
        given = table(rule.split(labels, 4), labels, 4).T
        # Before each class.
        held = np.cumsum(given, axis=0) - given
        assert (given[held >= 8] == 0).all()
        exactly += np.count_nonzero(held == 8)
    assert exactly


def test_dirichlet_without_the_cap_has_the_moments_of_its_distribution():
    """One class, two clients: the first one's share has mean 1/2 and variance 1 / (4 (2 alpha +
    1)).
    """
    labels = np.zeros(1000, dtype=np.int64)
    alpha = 0.3
    shares = [
        Dirichlet(2, seed, alpha, cap=False, min_size=0).split(labels, 1).sizes[0] / 1000
        for seed in range(2000)
    ]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.04)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


def test_a_dirichlet_split_that_passes_3_times_in_100_000_draws_is_found():
    partition = Dirichlet(alpha=0.05, num_clients=100, seed=1).split(CIFAR, 10)
    assert partition.sizes.min() >= 10


@few
@given(st.integers(1, 10), st.integers(1, 30), st.integers(0, 99))
def test_classes_gives_k_classes_to_each_client_and_leaves_out_no_class(k, num_clients, seed):
    if k * num_clients < 10:
        return
    labels = np.repeat(np.arange(10), 60)
    counts = table(Classes(num_clients, seed, k).split(labels, 10), labels, 10)
    assert np.all(np.count_nonzero(counts, axis=1) == k)
    assert np.all(counts.sum(axis=0) == 60)
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1


def test_natural_clients_are_the_groups():
    partition = Natural().split(np.zeros(5, dtype=np.int64), 1, np.array([7, 2, 7, 9, 2]))
    assert [partition.client(i).tolist() for i in range(3)] == [[1, 4], [0, 2], [3]]


def test_a_partition_by_hand():
    partition = Partition(np.array([0, 3, 1, 2]), np.array([0, 2, 2, 4]))
    assert partition.num_clients == 3
    assert [partition.client(i).tolist() for i in range(3)] == [[0, 3], [], [1, 2]]
    eight = b"".join(n.to_bytes(8, "little") for n in (0, 2, 2, 4, 0, 3, 1, 2))
    assert partition.hash() == hashlib.sha256(eight).hexdigest()
    with pytest.raises(IndexError, match="client -1 of 3"):
        partition.client(-1)


# Rules in a job file.


@dataclass(frozen=True)
class Halves:
    """A user's rule: client 0 gets all images before the middle, client 1 the others."""

    middle: Annotated[float, Ge(0)] = 0.5

    def split(self, labels, num_classes, groups=None):
        return Partition.of_owners(np.arange(len(labels)) >= self.middle * len(labels), 2)


def job_with(partition):
    return read_job({"name": "own", "data": {"partition": partition}})


def test_a_users_rule_deals_the_data():
    job = job_with({"name": f"{__name__}:Halves", "middle": 0.25})
    assert job.data.partition == Halves(0.25)
    assert read_job(job.table()) == job
    assert open_federation(job.data).partition.sizes.tolist() == [2500, 7500]


UNEVEN = (
    "data.partition: Wrong.split gets 10,000 labels; deal the images whose labels it gets, each "
    "once"
)


@dataclass(frozen=True)
class Wrong:
    """A user's rule that goes wrong in one of many ways."""

    how: str = ""
    size: int = 10_000

    def split(self, labels, num_classes, groups=None):
        n = len(labels)
        dealt = Partition.of_owners(np.arange(n) % 2, 2)
        order, offsets = dealt.indices, dealt.offsets
        return {
            "whole": lambda: dealt,
            "negative": lambda: Partition.of_owners(np.arange(n) - 1, n),
            "large": lambda: Partition.of_owners(np.arange(n), n - 1),
            "table": lambda: Partition.of_owners(np.arange(self.size) % 2, 2),
            "fewer": lambda: Partition(order[1:], np.array([0, 10, n - 1])),
            "twice": lambda: Partition(np.concatenate([order[:-1], order[:1]]), offsets),
            "beyond": lambda: Partition(order + 1, offsets),
            "offsets": lambda: Partition(order, np.array([0, n + 5, n])),
            "empty": lambda: Partition.of_owners(np.zeros(n, int), 3),
            "list": lambda: [dealt],
        }[self.how]()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "negative",
            "Partition.of_owners: an owner is -1; with 10000 clients, owners are 0 to 9999",
        ),
        ("large", "Partition.of_owners: an owner is 9999; with 9999 clients, owners are 0 to 9998"),
        *((how, UNEVEN) for how in ("fewer", "twice", "beyond", "offsets")),
        ("list", "data.partition: Wrong.split gave list; it must give a Partition, such as"),
        (
            "empty",
            "data.partition: 2 of 3 clients hold no image, such as client 1, and could not train; "
            "have fewer",
        ),
    ],
)
def test_a_users_rule_that_does_not_deal_each_image_once_is_refused(how, message):
    assert (
        open_federation(job_with({"name": f"{__name__}:Wrong", "how": "whole"}).data).num_clients
        == 2
    )
    with pytest.raises(InputError, match=f"^{message}"):
        open_federation(job_with({"name": f"{__name__}:Wrong", "how": how}).data)


def test_a_users_rule_may_write_to_the_labels():
    @dataclass(frozen=True)
    class Sorting:
        def split(self, labels, num_classes, groups=None):
            labels.sort()
            return Partition.of_owners(labels % 2, 2)

    labels = np.array([2, 0, 1])
    assert opened(Sorting(), labels, 0).train.labels.tolist() == [2, 0, 1]


def test_a_users_rule_gets_all_labels_where_the_server_keeps_some_images():
    data = job_with({"name": f"{__name__}:Wrong", "how": "table"}).data
    whole, less = open_federation(data), open_federation(data, auxiliary_per_class=64)
    assert (len(whole.partition.indices), len(less.partition.indices)) == (10_000, 9_360)
    for i in range(2):
        assert np.array_equal(less.client(i), np.setdiff1d(whole.client(i), less.auxiliary))


def test_a_partition_file_may_number_its_clients_up_to_the_number_of_images_alone(tmp_path):
    file = tmp_path / "dealt.json"
    file.write_text('{"2": [0, 1, 2]}')
    assert File(str(file)).split(np.zeros(3, dtype=np.int64), 1).sizes.tolist() == [0, 0, 3]
    file.write_text('{"3": [0, 1, 2]}')
    with pytest.raises(InputError, match="client 3; clients are numbered from 0, and there are"):
        File(str(file)).split(np.zeros(3, dtype=np.int64), 1)


@pytest.mark.parametrize(("left_out", "refused"), [([0, 1, 4], True), ([0, 4], False)])
def test_a_partition_file_leaves_out_as_many_images_as_the_server_keeps(
    tmp_path, left_out, refused
):
    """The job asks for one image of each class; with three, the first class gives two."""
    labels = np.array([0, 0, 0, 0, 1, 1])
    dealt = [image for image in range(6) if image not in left_out]
    file = tmp_path / "dealt.json"
    file.write_text(json.dumps([dealt]))
    if refused:
        with pytest.raises(InputError, match=r"this job has 1, the file 1 to 2$"):
            opened(File(str(file)), labels, 1)
    else:
        assert opened(File(str(file)), labels, 1).auxiliary.tolist() == left_out


def test_a_partition_file_that_leaves_out_too_few_images_is_refused(tmp_path):
    file = tmp_path / "dealt.json"
    file.write_text("[[0, 1, 2, 3, 5]]")
    with pytest.raises(InputError, match=r"this job has 1, the file 0 to 1$"):
        opened(File(str(file)), np.array([0, 0, 0, 0, 1, 1]), 1)


# Given shares
# ------------------------------------------------------------------------------------------


FEDCAD = [0.0, 0.0, 0.02, 0.03, 0.04, 0.08, 0.18, 0.22, 0.22, 0.22]


@few
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(any), st.integers(0, 1000))
def test_shares_divide_a_whole_number_within_one(shares, total):
    counts = apportioned(total, np.array(shares))
    assert counts.sum() == total
    assert np.abs(counts - total * np.array(shares) / sum(shares)).max() < 1 + 1e-9


def test_the_first_clients_hold_their_shares_and_the_others_a_dirichlet_split():
    rule = Shares(10, seed=3, alpha=0.5, shares=[FEDCAD])
    partition = rule.split(CIFAR, 10)
    assert np.array_equal(np.sort(partition.indices), np.arange(len(CIFAR)))
    held = np.bincount(CIFAR[partition.client(0)], minlength=10)
    # The printed shares add up to 1.01.
    np.testing.assert_allclose(held, 5000 * np.array(FEDCAD) / 1.01, atol=1)
    rest = np.setdiff1d(np.arange(len(CIFAR)), partition.client(0))
    others = Dirichlet(9, 3, alpha=0.5).split(CIFAR[rest], 10)
    for client in range(9):
        assert np.array_equal(partition.client(client + 1), rest[others.client(client)])
    assert partition.hash() == rule.split(CIFAR, 10).hash()
    assert partition.hash() != Shares(10, seed=4, shares=[FEDCAD]).split(CIFAR, 10).hash()


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([], "0 lists for 3 clients"),
        ([[1.0], [1.0], [1.0]], "3 lists for 3 clients"),
        ([[0.5, -0.5]], "give shares from 0 on"),
        ([[0.0, 0.0]], "give shares from 0 on"),
        ([[1.0]], "give a share for each of 2 classes"),
        ([[1.0, 0.0]], "client 0 needs 20 images of class 0, and 10 are left"),
    ],
)
def test_shares_that_cannot_be_dealt_are_refused(shares, message):
    with pytest.raises(InputError, match=message):
        Shares(3, shares=shares).split(np.repeat([0, 1], [10, 50]), 2)
