"""Labelled images as plain arrays: what every source becomes and all later layers work on.

Shapes: `N` images, `C` channels, `H` x `W` pixels, `K` classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayfed.values import InputError

MAX_CLASSES = 2**15  # what is counted of each pair of classes takes 8 GiB then


@dataclass(frozen=True, eq=False)
class Samples:
    """A labelled set of images."""

    images: np.ndarray  # uint8 (N, C, H, W), C-contiguous; C is 1 (grey) or 3 (RGB)
    labels: np.ndarray  # int64 (N,), 0..K-1
    classes: tuple[str, ...]  # the K class names, in label order
    groups: np.ndarray | None = None  # int64 (N,): each row's natural client, if a client column was asked for
    group_names: tuple[str, ...] = ()  # the values of that column, in the order of the codes in `groups`

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def take(self, rows: np.ndarray) -> Samples:
        """The same columns, these rows only; copied."""
        groups = None if self.groups is None else self.groups[rows]
        return Samples(self.images[rows], self.labels[rows], self.classes, groups, self.group_names)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set of one kind: same image shape, same classes."""

    train: Samples
    test: Samples

    def __post_init__(self) -> None:
        for kind, a, b in (
            ("image shape (C, H, W)", self.train.shape, self.test.shape),
            ("classes", self.train.classes, self.test.classes),
        ):
            if a != b:
                raise InputError(f"training and test set disagree in {kind}: {_brief(a)} and {_brief(b)}")


def few_enough(num_classes: int, where: str) -> None:
    """Raises InputError for more classes than can be counted, such as a label column that holds something else."""
    if num_classes > MAX_CLASSES:
        raise InputError(f"{where}: {num_classes:,} classes, more than the {MAX_CLASSES:,} allowed; is it the label?")


def hold_out(samples: Samples, fraction: float, seed: int) -> Dataset:
    """Split `samples` in two, the same `fraction` of every class for the test: one image at least, but never all."""
    rng = np.random.default_rng(seed)
    test = np.zeros(len(samples), dtype=bool)
    for label in np.unique(samples.labels):
        members = np.flatnonzero(samples.labels == label)
        held = min(max(1, round(fraction * len(members))), len(members) - 1)
        test[rng.permutation(members)[:held]] = True
    if not test.any():
        raise InputError(f"data.test_fraction = {fraction}: no class has two images, one to train and one to test on")
    return Dataset(samples.take(np.flatnonzero(~test)), samples.take(np.flatnonzero(test)))


def _brief(value: object, limit: int = 200) -> str:
    text = str(value)
    return text if len(text) <= limit else text[:limit] + "..."
