"""A federation: a data set that is dealt to clients.

>>> from rayfed.data.partition import Shards
>>> federation = open_federation(Data(partition=Shards(s=2, num_clients=5)))
>>> federation.num_clients, federation.inputs
(5, Images(image_shape=(1, 28, 28)))
>>> federation.label_counts(0).tolist()
[0, 0, 1000, 0, 1000, 0, 0, 0, 0, 0]
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rayfed.base.errors import InputError
from rayfed.data.augment import Batches, Rows, refuse_too_small
from rayfed.data.inputs import Images, Inputs, inputs_of
from rayfed.data.partition import PARTITIONS, Natural, Partition, Rule
from rayfed.data.samples import Dataset, Samples
from rayfed.data.settings import Augment, Data
from rayfed.data.skews import NoSkew, Skew, skewed

# Examples per forward pass of an evaluation. The batch size can change the last bits, so it is a
# constant.
EVALUATION_BATCH = 250

NO_SKEW = NoSkew()

Read = Callable[[Data], Dataset]


@dataclass(frozen=True, eq=False)
class Federation:
    """The images, or other inputs, and the clients that hold them.

    Clients and the server's auxiliary set are disjoint parts of `train`.

    Shapes: `N` clients, `K` classes, `C` channels, images of `H` x `W` pixels.
    """

    train: Samples
    test: Samples
    # The clients hold what was dealt, without the auxiliary set.
    partition: Partition
    # The rule dealt this partition; its hash is noted as the run's partition.
    dealt: Partition
    # Mean and deviation are per channel, of all training pixels in [0, 1], or per feature. Tokens
    # have none.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # These images were withdrawn from the clients for the server, int64, sorted; none by default.
    auxiliary: np.ndarray
    # Natural clients have the names that the data's column has.
    client_names: tuple[str, ...] = ()

    @property
    def num_clients(self) -> int:
        """Return the number of clients."""
        return self.partition.num_clients

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.train.classes)

    @property
    def inputs(self) -> Inputs:
        """Return what the examples are, and so what a model takes."""
        return inputs_of(self.train)

    def client(self, i: int) -> np.ndarray:
        """Return client `i`'s indices into `train`, sorted."""
        return self.partition.client(i)

    def called(self, i: int) -> str:
        """Return client `i`'s number, and its name if it has one."""
        return f"{i} {self.client_names[i]}" if self.client_names else str(i)

    def num_examples(self, i: int) -> int:
        """Return the number of examples of client `i`."""
        return len(self.client(i))

    def label_counts(self, i: int) -> np.ndarray:
        """Return the number of images of each class that client `i` holds, int64 (K,)."""
        return np.bincount(self.train.labels[self.client(i)], minlength=self.num_classes)

    def prepared(
        self,
        samples: Samples,
        rows: np.ndarray,
        device: torch.device,
        augment: Augment | None = None,
    ) -> tuple[Batches | Rows, Tensor]:
        """Return some rows of `train` or `test`, ready for batches, and their labels.

        Labels are int64 (rows,).
        """
        examples = torch.from_numpy(samples.examples[rows]).to(device)
        labels = torch.from_numpy(samples.labels[rows]).to(device)
        return self.inputs.prepare(examples, self.mean, self.std, augment), labels

    def batches(
        self, samples: Samples, rows: np.ndarray, device: torch.device, size: int = EVALUATION_BATCH
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of some rows of `train` or `test`, and their labels, as a model takes them.

        The rows are in order, and not augmented.
        """
        for start in range(0, len(rows), size):
            examples, labels = self.prepared(samples, rows[start : start + size], device)
            yield examples.plain(), labels

    def cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the filled cells of clients by classes: clients, classes, numbers of images.

        Each has the type int64 and the shape (cells,).
        """
        owners = np.repeat(np.arange(self.num_clients), self.partition.sizes)
        cells = owners * self.num_classes + self.train.labels[self.partition.indices]
        filled, counts = np.unique(cells, return_counts=True)
        return filled // self.num_classes, filled % self.num_classes, counts

    def contents(self) -> dict[str, str]:
        """Return what each part of the data holds: number, shape and a checksum.

        A message says with them what differs.
        """
        parts = {}
        for name, samples in (("training", self.train), ("test", self.test)):
            shape = "x".join(map(str, samples.shape))
            size = f"{len(samples):,} of {shape} {samples.examples.dtype}"
            parts[f"the {name} set"] = f"{size} (checksum {zlib.crc32(samples.examples.data):08x})"
            parts[f"the {name} set's labels"] = f"checksum {zlib.crc32(samples.labels.data):08x}"
        return parts

    def hash(self) -> str:
        """Return a SHA-256 of all images and labels, training and test."""
        digest = hashlib.sha256()
        for samples in (self.train, self.test):
            digest.update(samples.examples.data)
            digest.update(samples.labels.data)
        return digest.hexdigest()


def open_federation(
    data: Data, *, auxiliary_per_class: int = 0, read: Read | None = None
) -> Federation:
    """Load the source and deal it; a natural partition has its client column read.

    The server keeps `auxiliary_per_class` images of each class, or more if the data ask for more.
    `read` reads the source in place of `load`, for example to read it only once. Raises InputError
    for anything wrong with the source, and if the rule refuses the data.
    """
    # This import brings pyarrow and Pillow, which actors that are sent a setup never need.
    from rayfed.data.sources import load

    dataset = (read or load)(data)
    inputs = inputs_of(dataset.train)
    if isinstance(inputs, Images):
        _, height, width = inputs.image_shape
        refuse_too_small(height, width, data.augment)
    return federate(
        dataset,
        data.partition,
        auxiliary_per_class=max(auxiliary_per_class, data.auxiliary_per_class),
        skew=data.skew,
    )


def federate(
    dataset: Dataset, rule: Rule, *, auxiliary_per_class: int = 0, skew: Skew = NO_SKEW
) -> Federation:
    """Deal a data set's training images to clients, then withdraw the server's auxiliary set.

    At last, `skew` changes the images of each client. The mean and the deviation are those before.

    `auxiliary_per_class` images of each class are withdrawn evenly from those who hold it, with the
    partition's seed. Who holds the others does not depend on it. A partition file may have left
    these out: then they are the server's.

    Raises InputError if a partition file has left out others, if a class has fewer images, if a
    client would hold no image, or if the rule refuses the data. Raises it too if a user's rule
    leaves images out, or deals one twice.
    """
    train = dataset.train
    if type(rule) in PARTITIONS.values():
        dealt = rule.split(train.labels, len(train.classes), train.groups)
    else:
        dealt = _split_own(rule, train)
    empty = np.flatnonzero(dealt.sizes == 0)
    if len(empty):
        advice = "set min_size = 1 or more, or " if hasattr(rule, "min_size") else ""
        raise InputError(
            f"data.partition: {len(empty)} of {dealt.num_clients} clients hold no image, such as "
            f"client {empty[0]}, and could not train; {advice}have fewer clients"
        )
    dealt = Partition(
        np.asarray(dealt.indices, dtype=np.int64), np.asarray(dealt.offsets, dtype=np.int64)
    )
    seed = getattr(rule, "seed", 0)
    partition, auxiliary = _withdraw(dealt, train, auxiliary_per_class, seed)
    mean, std = inputs_of(train).moments(train.examples)
    clients = [partition.client(client) for client in range(partition.num_clients)]
    train = replace(train, examples=skewed(skew, train.examples, clients, seed))
    names: tuple[str, ...] = ()
    if isinstance(rule, Natural) and train.groups is not None and train.group_names:
        # A group may be gone with the images that were held out.
        names = tuple(train.group_names[group] for group in np.unique(train.groups))
    return Federation(train, dataset.test, partition, dealt, mean, std, auxiliary, names)


def _split_own(rule: Rule, train: Samples) -> Partition:
    """Return what a user's rule deals, checked.

    Raises InputError if it is no partition of all images.
    """
    name = f"data.partition: {type(rule).__qualname__}.split"
    groups = None if train.groups is None else train.groups.copy()
    # The rule gets copies, as it may write to them.
    dealt = rule.split(train.labels.copy(), len(train.classes), groups)
    if not isinstance(dealt, Partition):
        raise InputError(
            f"{name} gave {type(dealt).__name__}; it must give a Partition, such as "
            "Partition.of_owners(...)"
        )
    n, offsets = len(train), np.asarray(dealt.offsets)
    is_cut = offsets[0] == 0 and offsets[-1] == n and (np.diff(offsets) >= 0).all()
    if not is_cut or not np.array_equal(np.sort(dealt.indices), np.arange(n)):
        raise InputError(
            f"{name} gets {n:,} labels; deal the images whose labels it gets, each once "
            "(Partition.of_owners does)"
        )
    return dealt


def _left_out(dealt: Partition, train: Samples, per_class: int) -> np.ndarray:
    """Return the images that a partition file gives to no client, sorted.

    They are for the server. Raises InputError unless they are `per_class` images of each class.
    """
    images = np.setdiff1d(np.arange(len(train)), dealt.indices)
    counts = np.bincount(train.labels[images], minlength=len(train.classes))
    if (counts != per_class).any():
        raise InputError(
            f"data.partition.path: {len(images):,} of {len(train):,} images have no client, such "
            f"as image {images[0]}; is it of other data? A file leaves out the server's images "
            f"alone, data.auxiliary_per_class of each class: this job has {per_class}, the file "
            f"{counts.min()} to {counts.max()}"
        )
    return images


def _withdraw(
    dealt: Partition, train: Samples, per_class: int, seed: int
) -> tuple[Partition, np.ndarray]:
    """Return what the clients keep, and the images of each class that they give up, sorted.

    The holders of a class give one image after another in turns, so they give as many, or one more
    or fewer. Exceptions are a holder with no more of the class, and a holder with only one image
    left of all, which it keeps. Raises InputError if `per_class` images of a class cannot be taken.
    """
    if len(dealt.indices) < len(train):
        return dealt, _left_out(dealt, train, per_class)
    if not per_class:
        return dealt, np.empty(0, dtype=np.int64)
    # The rule's own draws come from `seed` alone, so this stream is another one.
    rng = np.random.default_rng([seed, 1])
    owners = np.repeat(np.arange(dealt.num_clients), dealt.sizes)
    labels = train.labels[dealt.indices]
    sizes = dealt.sizes
    is_kept = np.ones(len(labels), dtype=bool)
    counts = np.bincount(labels, minlength=len(train.classes))
    # The rarest class comes first, as it has the fewest images to choose from.
    for label in np.argsort(counts, kind="stable"):
        name, count = train.classes[label], counts[label]
        if count < per_class:
            raise InputError(
                f"an auxiliary set of {per_class} images per class cannot be taken: class '{name}' "
                f"has {count} images, and no more can be taken of any class"
            )
        members = rng.permutation(np.flatnonzero(labels == label))
        order = np.argsort(owners[members], kind="stable")
        by_owner = owners[members[order]]
        # An image's turn is 0 if its owner would give it first, 1 if it would give it second, ...
        turns = np.empty_like(order)
        turns[order] = np.arange(len(order)) - np.searchsorted(by_owner, by_owner)
        spare = np.flatnonzero(turns < sizes[owners[members]] - 1)
        if len(spare) < per_class:
            raise InputError(
                f"an auxiliary set of {per_class} images per class cannot be taken: of class "
                f"'{name}', clients can give up only {len(spare)} of {count} images, as each must "
                "keep one; take fewer, or have fewer clients"
            )
        by_turn = np.argsort(turns[spare], kind="stable")
        withdrawn = members[spare[by_turn[:per_class]]]
        is_kept[withdrawn] = False
        sizes = sizes - np.bincount(owners[withdrawn], minlength=dealt.num_clients)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Partition(dealt.indices[is_kept], offsets), np.sort(dealt.indices[~is_kept])
