"""Partitions: which client holds which training images.

Each rule is a frozen dataclass with one method, `split`. A job file writes `{name = "dirichlet",
alpha = 0.3, num_clients = 20, seed = 0}`. A rule's randomness comes from its own seed alone, so
methods and training seeds can share one partition. Every rule deals every image to exactly one
client (only a file of your own may leave images out). Every rule always ends: it refuses an
impossible request at once, or after a bounded number of tries.

Shapes: `n` images, `N` clients, `K` classes.

>>> partition = Shards(s=2, num_clients=3).split(np.array([0, 1, 2, 0, 1, 2]), num_classes=3)
>>> [partition.client(i).tolist() for i in range(3)]
[[2, 4], [1, 5], [0, 3]]
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, Protocol

import numpy as np

from rayfed.base.errors import InputError
from rayfed.base.values import (
    Checked,
    Ge,
    Le,
    PathMark,
    build,
    find_dataclass,
    name_in,
    named,
    table,
)

# A Dirichlet split may draw that many random numbers by default; it takes about half a minute.
MOST_DRAWS = 5 * 10**8
# A draw has that many random numbers: few enough for the cache, enough to hide numpy's overhead.
CHUNK = 2**15


@dataclass(frozen=True, eq=False)
class Partition:
    """Clients as slices of one array of indices, so that a million of them cost two arrays."""

    # Indices into the training set, int64 (n,), are sorted within each client.
    indices: np.ndarray
    # Client i holds indices[offsets[i]:offsets[i + 1]]; offsets are int64 (N + 1,).
    offsets: np.ndarray

    @classmethod
    def of_owners(cls, owners: np.ndarray, num_clients: int) -> Partition:
        """Return the partition in which each image has the client that `owners` says.

        `owners` are integers (n,) in 0..num_clients-1. Raises InputError for other integers.

        >>> Partition.of_owners(np.array([1, 0, 1]), num_clients=2).client(1).tolist()
        [0, 2]
        """
        for owner in (owners.min(initial=0), owners.max(initial=0)):
            if not 0 <= owner < num_clients:
                raise InputError(
                    f"Partition.of_owners: an owner is {owner}; with {num_clients} clients, owners "
                    f"are 0 to {num_clients - 1}"
                )
        sizes = np.bincount(owners.astype(np.int64), minlength=num_clients)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return cls(np.argsort(owners, kind="stable"), offsets)

    @property
    def num_clients(self) -> int:
        """Return the number of clients."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of images that each client holds, int64 (N,)."""
        return np.diff(self.offsets)

    def client(self, i: int) -> np.ndarray:
        """Return the indices of client `i`, sorted, as a view.

        Raises IndexError if there is no such client.
        """
        if not 0 <= i < self.num_clients:
            raise IndexError(f"client {i} of {self.num_clients}")
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    def hash(self) -> str:
        """Return a SHA-256 of the whole assignment.

        It is equal for equal partitions, on any machine.
        """
        digest = hashlib.sha256()
        for array in (self.offsets, self.indices):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()


class Rule(Protocol):
    """A partition rule: one of `PARTITIONS`, or a frozen dataclass of your own."""

    def split(
        self, labels: np.ndarray, num_classes: int, groups: np.ndarray | None = None
    ) -> Partition:
        """Deal images with these `labels` (n,) and natural clients `groups` (n,).

        Raises InputError.
        """
        ...


@dataclass(frozen=True)
class Iid(Checked):
    """Shuffled slices whose sizes differ by at most one image."""

    num_clients: Annotated[int, Ge(1), "number of clients"] = 10
    seed: Annotated[int, Ge(0), 'seed of the partition alone; "run": the seed of the run'] = 0

    def split(
        self, labels: np.ndarray, num_classes: int, groups: np.ndarray | None = None
    ) -> Partition:
        self._refuse_too_many_clients(len(labels))
        order = np.random.default_rng(self.seed).permutation(len(labels))
        return _deal(order, np.arange(self.num_clients), _even(len(labels), self.num_clients))

    def _refuse_too_many_clients(self, n: int, min_size: int = 1) -> None:
        """Raise InputError if `n` images are too few for `min_size` images per client.

        Each client gets at least one image.
        """
        min_size = max(min_size, 1)
        if self.num_clients * min_size > n:
            rule = name_in(PARTITIONS, type(self))
            with_images = f" with at least {min_size} images each" if min_size > 1 else ""
            raise InputError(
                f"{rule}: {self.num_clients} clients{with_images} cannot be made of {n} images; "
                f"num_clients can be at most {n // min_size}"
            )


class _ByClass(Iid):
    """A rule that cuts each class into runs of images, and gives each run to a client.

    `_owners_and_sizes` says how.
    """

    min_size = 1

    def split(
        self, labels: np.ndarray, num_classes: int, groups: np.ndarray | None = None
    ) -> Partition:
        self._refuse_too_many_clients(len(labels), self.min_size)
        rng = np.random.default_rng(self.seed)
        shuffled = rng.permutation(len(labels))
        counts = np.bincount(labels, minlength=num_classes)
        owners, sizes = self._owners_and_sizes(counts, rng)
        by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
        return _deal(by_class, owners, sizes)

    def _owners_and_sizes(
        self, counts: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the client and the size of each run, in the order of the classes.

        `counts` (K,) are the numbers of images of each class.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Shards(_ByClass):
    """Shards of a single class and of equal size; each client gets `s` shards.

    Two shards of a client may be of one class. McMahan et al., AISTATS 2017, section 3. If the
    labels do not divide evenly, shards are as equal as possible. Each class begins as one shard.
    The class with the largest shards is cut once more, until there are `num_clients * s` shards.
    Shards of one class differ by at most one image.
    """

    s: Annotated[int, Ge(1), "shards per client"] = 2

    def _owners_and_sizes(
        self, counts: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        cuts = self._cuts(counts)
        sizes = [_even(count, cut) for count, cut in zip(counts, cuts, strict=True) if count]
        owners = rng.permutation(np.repeat(np.arange(self.num_clients), self.s))
        return owners, np.concatenate(sizes)

    def _cuts(self, counts: np.ndarray) -> np.ndarray:
        """Return the number of shards that each class is cut into, (K,).

        Raises InputError if there are fewer shards than classes, or more shards than images.
        """
        num_shards, num_present = self.num_clients * self.s, int(np.count_nonzero(counts))
        shards = (
            f"{self.num_clients} clients x s = {self.s} makes {num_shards} shards of a single class"
        )
        if num_shards < num_present:
            raise InputError(
                f"shards: {shards}, fewer than the {num_present} classes; raise s or num_clients"
            )
        if num_shards > counts.sum():
            raise InputError(
                f"shards: {shards}, more than the {counts.sum()} images; lower s or num_clients"
            )
        cuts = (counts > 0).astype(np.int64)
        largest = [(-float(count), label) for label, count in enumerate(counts) if count]
        heapq.heapify(largest)
        for _ in range(num_shards - num_present):
            label = largest[0][1]
            cuts[label] += 1
            heapq.heapreplace(largest, (-counts[label] / cuts[label], label))
        return cuts


@dataclass(frozen=True)
class _Drawn(_ByClass):
    """A rule that draws each class's proportions over the clients.

    It draws again until the smallest client has `min_size` images. At alpha = 0.05 with 100
    clients, 1 draw in 30,000 passes, so many draws are made together, as counts; images are dealt
    once, at the end.
    """

    alpha: Annotated[float, Ge(1e-6), Le(1e6), "concentration: small is skewed, large is even"] = (
        0.5
    )
    min_size: Annotated[int, Ge(0), "images of the smallest client"] = 10
    max_draws: Annotated[
        int, Ge(0), "draws before giving up; 0: as many as take about half a minute"
    ] = 0
    cap = False

    def _owners_and_sizes(
        self, counts: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the first table of images by class and client, (K, N), that passes.

        Its smallest client has `min_size` images. Raises InputError if none of the allowed draws
        passes.
        """
        limit = self.max_draws or max(1, MOST_DRAWS // (self.num_clients * len(counts)))
        num_draws, best = 0, 0
        while num_draws < limit:
            # Blocks grow, 1, 2, 4, ..., as most rules need few draws.
            rows = min(num_draws + 1, limit - num_draws, max(1, CHUNK // self.num_clients))
            tables = self._draw(counts, rows, rng)
            num_draws += rows
            smallest = tables.sum(axis=0).min(axis=1)
            passed = np.flatnonzero(smallest >= self.min_size)
            if len(passed):
                owners = np.tile(np.arange(self.num_clients), len(counts))
                return owners, tables[:, passed[0]].ravel()
            best = max(best, int(smallest.max()))
        raise InputError(
            f"{name_in(PARTITIONS, type(self))}: none of {limit:,} draws with alpha = {self.alpha} "
            f"gave each of {self.num_clients} clients min_size = {self.min_size} images (the best "
            f"draw: {best}); raise alpha, lower num_clients or min_size, or raise max_draws"
        )

    def _draw(self, counts: np.ndarray, rows: int, rng: np.random.Generator) -> np.ndarray:
        """Return `rows` independent tables at once, int64 (K, rows, N)."""
        n, shape = counts.sum(), (rows, self.num_clients)
        tables = np.zeros((len(counts), rows, self.num_clients), dtype=np.int64)
        sizes = np.zeros(shape, dtype=np.int64)
        for class_table, count in zip(tables, counts, strict=True):
            if not count:
                # With no image to give, every client may be full, so there are no proportions.
                continue
            logs = self._logs(shape, rng)
            if self.cap:
                logs[sizes * self.num_clients >= n] = -np.inf
            shares = np.cumsum(np.exp(logs - logs.max(axis=1, keepdims=True)), axis=1)
            ends = (shares / shares[:, -1:] * count).astype(np.int64)
            class_table[:] = np.diff(ends, axis=1, prepend=0)
            sizes += class_table
        return tables

    def _logs(self, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        """Return logarithms of gammas, whose shares of their sum are Dir(alpha).

        Gamma(a) = Gamma(a + 1) U^(1/a), in logarithms: a small alpha's gammas are all below the
        smallest float.
        """
        logs = np.log(rng.standard_gamma(self.alpha + 1, shape))
        return logs - rng.standard_exponential(shape) / self.alpha


@dataclass(frozen=True)
class Dirichlet(_Drawn):
    """For each class, proportions over the clients are drawn from Dir(alpha).

    This is the rule of the public benchmarks (Yurochkin et al., ICML 2019; Li et al., ICDE 2022).
    With `cap`, a client that already holds n / N images gets none of the next class.

    `sizes = "equal"` is the rule in the code of FedACG, FedRCL and FedWSQ. One client after the
    other draws proportions over the classes from Dir(alpha). It draws its images by these weights
    among the images that are left.
    """

    cap: Annotated[bool, "stop giving images to a client that has its equal share (n / N)"] = True
    sizes: Annotated[
        Literal["drawn", "equal"],
        "images per client: drawn, or equal, where each client draws its class proportions",
    ] = "drawn"

    def _owners_and_sizes(
        self, counts: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.sizes == "drawn":
            return super()._owners_and_sizes(counts, rng)
        # These are the classes of the images that are left.
        remaining = np.repeat(np.arange(len(counts)), counts)
        table = np.zeros((len(counts), self.num_clients), dtype=np.int64)
        for client, size in enumerate(_even(len(remaining), self.num_clients)):
            # Images wait for exponential times, at rates in these proportions. The `size` images
            # that come first are a draw by weight.
            waits = np.log(rng.standard_exponential(len(remaining)))
            waits = waits - self._logs((len(counts),), rng)[remaining]
            images = np.argpartition(waits, size - 1)[:size]
            table[:, client] = np.bincount(remaining[images], minlength=len(counts))
            remaining = np.delete(remaining, images)
        return np.tile(np.arange(self.num_clients), len(counts)), table.ravel()


@dataclass(frozen=True)
class Shares(Dirichlet):
    """The first clients hold given shares of the classes, the others what a Dirichlet split gives.

    FedCAD prints such a row for one client (Fig. 2). Each of these clients holds n / N images,
    rounded down.
    """

    shares: Annotated[
        list[list[float]], "a list for each of the first clients: a share of each class"
    ] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < len(self.shares) < self.num_clients:
            raise InputError(
                f"data.partition.shares: {len(self.shares)} lists for {self.num_clients} clients; "
                "give a list for each of the first clients, and one client more"
            )
        for row in self.shares:
            if min(row, default=0) < 0 or sum(row) <= 0:
                raise InputError(
                    f"data.partition.shares = {row}: give shares from 0 on, one of them above 0"
                )

    def split(
        self, labels: np.ndarray, num_classes: int, groups: np.ndarray | None = None
    ) -> Partition:
        rng = np.random.default_rng(self.seed)
        owners = np.full(len(labels), -1)
        for client, row in enumerate(self.shares):
            if len(row) != num_classes:
                raise InputError(
                    f"data.partition.shares = {row}: give a share for each of {num_classes} classes"
                )
            counts = apportioned(len(labels) // self.num_clients, np.array(row))
            for label, count in enumerate(counts):
                left = np.flatnonzero((labels == label) & (owners < 0))
                if count > len(left):
                    raise InputError(
                        f"data.partition.shares: client {client} needs {count} images of class "
                        f"{label}, and {len(left)} are left; lower its share, or raise num_clients"
                    )
                owners[rng.choice(left, count, replace=False)] = client
        rest = np.flatnonzero(owners < 0)
        rule = Dirichlet(
            self.num_clients - len(self.shares),
            self.seed,
            alpha=self.alpha,
            min_size=self.min_size,
            max_draws=self.max_draws,
            cap=self.cap,
            sizes=self.sizes,
        )
        dealt = rule.split(labels[rest], num_classes)
        numbers = np.repeat(np.arange(rule.num_clients), dealt.sizes)
        owners[rest[dealt.indices]] = numbers + len(self.shares)
        return Partition.of_owners(owners, self.num_clients)


def apportioned(total: int, shares: np.ndarray) -> np.ndarray:
    """Divide a whole number by shares, which are scaled to 1; the largest remainders round up.

    >>> apportioned(10, np.array([1.0, 1.0, 2.0])).tolist()
    [3, 2, 5]
    """
    exact = total * shares / shares.sum()
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


@dataclass(frozen=True)
class Quantity(_Drawn):
    """Clients' shares of all images are drawn from Dir(alpha), whatever the classes.

    Each client's images are drawn from all images (Li et al., ICDE 2022).
    """

    def split(
        self, labels: np.ndarray, num_classes: int, groups: np.ndarray | None = None
    ) -> Partition:
        return super().split(np.zeros_like(labels), 1)


@dataclass(frozen=True)
class Classes(_ByClass):
    """Each client holds `k` classes, and each class is split equally among its holders (#K = k).

    Li et al., ICDE 2022. Each class is first dealt to one client, in random order, so that it has a
    holder; the rest of a client's `k` classes is random.
    """

    k: Annotated[int, Ge(1), "classes per client"] = 2

    def _owners_and_sizes(
        self, counts: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        labels, owners = self._holders(np.flatnonzero(counts), rng)
        num_holders = np.bincount(labels, minlength=len(counts))
        too_small = np.flatnonzero(counts < num_holders)
        if len(too_small):
            label = too_small[0]
            raise InputError(
                f"classes: class {label} has {counts[label]} images for {num_holders[label]} "
                "clients; lower num_clients or k"
            )
        sizes = [
            _even(count, holders)
            for count, holders in zip(counts, num_holders, strict=True)
            if holders
        ]
        return owners, np.concatenate(sizes)

    def _holders(
        self, present: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return all pairs of a class and a client that holds it, each (N * k,), sorted by class.

        Raises InputError if `k` does not fit the number of classes.
        """
        num_classes, num_clients = len(present), self.num_clients
        if not self.k <= num_classes <= num_clients * self.k:
            raise InputError(
                f"classes: k = {self.k} classes for each of {num_clients} clients, of "
                f"{num_classes} classes in all; k must be at most {num_classes}, num_clients * k "
                f"at least {num_classes}"
            )
        # A client takes the k classes of lowest rank; the classes dealt to it come first.
        rank = rng.random((num_clients, num_classes))
        dealt = np.arange(max(num_clients, num_classes))
        rank[dealt % num_clients, rng.permutation(num_classes)[dealt % num_classes]] = -1
        classes = np.argsort(rank, axis=1)[:, : self.k].ravel()
        clients = np.repeat(np.arange(num_clients), self.k)
        by_class = np.argsort(classes, kind="stable")
        return present[classes[by_class]], clients[by_class]


@dataclass(frozen=True)
class Natural(Checked):
    """A client for each value of a column of the data: writers, domains, devices."""

    column: Annotated[
        str, "column of the clients; in image trees, any name stands for the folders above classes"
    ] = ""

    def split(
        self, labels: np.ndarray, num_classes: int, groups: np.ndarray | None = None
    ) -> Partition:
        if groups is None:
            raise InputError(
                "natural: the data has no column of clients; name it (data.partition.column)"
            )
        values, owners = np.unique(groups, return_inverse=True)
        return Partition.of_owners(owners, len(values))


@dataclass(frozen=True)
class File(Checked):
    """Each client holds the images that a file says (`rayfed.data.dealt`).

    The file is by others, or by `rayfed partition`.
    """

    path: Annotated[str, PathMark(), "file of each client's images: .json, .txt, .npz or .parquet"]

    def split(
        self, labels: np.ndarray, num_classes: int, groups: np.ndarray | None = None
    ) -> Partition:
        # This import brings pyarrow, which no other rule needs.
        from rayfed.data.dealt import read_dealt

        owners, num_clients = read_dealt(self.path, len(labels))
        images = np.flatnonzero(owners >= 0)
        partition = Partition.of_owners(owners[images], num_clients)
        return Partition(images[partition.indices], partition.offsets)


RULES = (Iid, Shards, Dirichlet, Shares, Quantity, Classes, Natural, File)
PARTITIONS: dict[str, type[Rule]] = {rule.__name__.lower(): rule for rule in RULES}


def read_rule(value: Any) -> Rule:
    """Return the rule that `data.partition` says: a name, or a table with a name and values.

    >>> read_rule({"name": "shards", "s": 3})
    Shards(num_clients=10, seed=0, s=3)
    """
    name, values = named(value, "data.partition", default="iid")
    return build(_find(name), values, "data.partition")


def shared_keys(name: str) -> set[str]:
    """Return those of the keys `num_clients` and `seed` that a rule has.

    A rule that does not exist has none.
    """
    try:
        return {"num_clients", "seed"} & {field.name for field in fields(_find(name))}
    except InputError:
        return set()


def _find(name: str) -> Any:
    """Return the class of a rule: one of `PARTITIONS`, or a user's own, by `module:Name`.

    Raises InputError for a class that is no rule.
    """
    return find_dataclass(name, PARTITIONS, "partition", "split", "split")


# A reader wants to know these values of a partition, also if they are the defaults.
ALWAYS_SHOWN = ("num_clients", "s", "alpha", "k")


def write_rule(rule: Rule) -> dict[str, Any]:
    """Return a rule in the form that `read_rule` reads."""
    return {"name": name_in(PARTITIONS, type(rule)), **table(rule)}


def _even(n: int, parts: int) -> np.ndarray:
    """Return `n` as `parts` sizes that differ by at most one, the larger ones first.

    >>> _even(7, 3).tolist()
    [3, 2, 2]
    """
    return n // parts + (np.arange(parts) < n % parts)


def _deal(order: np.ndarray, owners: np.ndarray, sizes: np.ndarray) -> Partition:
    """Cut the indices `order` (n,) into runs of these `sizes`; run j goes to client `owners[j]`."""
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.repeat(owners, sizes)
    return Partition.of_owners(owner, int(owners.max()) + 1)
