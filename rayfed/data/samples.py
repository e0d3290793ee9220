"""Labelled examples as plain arrays: every source is read into them, and all later layers use them.

Examples are images, lists of tokens or vectors of features (`rayfed.data.inputs`).

Shapes: `N` examples, `C` channels, `H` x `W` pixels, `K` classes, `L` tokens, `D` features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfed.base.errors import InputError

# The counts of each pair of classes take 8 GiB then.
MAX_CLASSES = 2**15
# In place of a token, after the end of a list.
PADDING = 0


@dataclass(frozen=True, eq=False)
class Samples:
    """A labelled set of examples."""

    # uint8 (N, C, H, W), C is 1 or 3; or tokens, int64 (N, L); or floats (N, D); C-contiguous.
    examples: np.ndarray
    # int64 (N,), 0..K-1.
    labels: np.ndarray
    # The K class names, in label order.
    classes: tuple[str, ...]
    groups: np.ndarray | None = (
        # int64 (N,): each row's natural client, numbered by sorted name.
        None
    )
    domains: np.ndarray | None = (
        # int64 (N,): each row's domain, numbered as in `domain_names`.
        None
    )
    # Sorted
    domain_names: tuple[str, ...] = ()
    # Of tokens: each is below it.
    vocabulary: int = 0
    # Sorted
    group_names: tuple[str, ...] = ()
    # The files say which number is which class: their labels are numbers, or they list the names.
    numbered: bool = False
    # Of text and tokens: int64 (N,), how many each example had before it was cut or padded.
    lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W), (L,) or (D,): of one example."""
        return self.examples.shape[1:]

    def take(self, rows: np.ndarray) -> Samples:
        """A copy with these rows only."""
        return replace(
            self,
            examples=self.examples[rows],
            labels=self.labels[rows],
            groups=_taken(self.groups, rows),
            domains=_taken(self.domains, rows),
            lengths=_taken(self.lengths, rows),
        )

    def by_domain(self, rows: np.ndarray) -> np.ndarray:
        """How many of these rows each domain has, int64 (domains,); (0,) where the set has no
        domains.
        """
        found = np.empty(0, dtype=np.int64) if self.domains is None else self.domains[rows]
        return np.bincount(found, minlength=len(self.domain_names))


def _taken(values: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    return None if values is None else values[rows]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set of one kind: same shape, same classes."""

    train: Samples
    test: Samples

    def __post_init__(self) -> None:
        shape = "image shape (C, H, W)" if len(self.train.shape) == 3 else "number of features"
        for kind, attribute in ((shape, "shape"), ("classes", "classes")):
            ours, theirs = getattr(self.train, attribute), getattr(self.test, attribute)
            if ours != theirs:
                raise InputError(
                    f"training and test set disagree in {kind}: {shortened(ours)} and "
                    f"{shortened(theirs)}"
                )


def shortened(values: Sequence[object], limit: int = 10) -> str:
    """Values for a message: only the first values, if there are many."""
    return ", ".join(map(str, values[:limit])) + (", ..." if len(values) > limit else "")


def few_classes(num_classes: int, where: str) -> None:
    """Raises InputError for too many classes: the label column may hold something else."""
    if num_classes > MAX_CLASSES:
        raise InputError(
            f"{where}: {num_classes:,} classes, more than the {MAX_CLASSES:,} allowed; is it the "
            "label? Numbers of classes begin with 0 and have no gaps"
        )


def hold_out(samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """Split `samples` in two: `fraction` of every class is for the test, at least one image but
    never all.
    """
    rng = np.random.default_rng(seed)
    test = np.zeros(len(samples), dtype=bool)
    for label in np.unique(samples.labels):
        members = np.flatnonzero(samples.labels == label)
        held = min(max(1, round(fraction * len(members))), len(members) - 1)
        test[rng.permutation(members)[:held]] = True
    if not test.any():
        raise InputError(
            f"data.test_fraction = {fraction}: no class has two images, one to train and one to "
            "test on"
        )
    return samples.take(np.flatnonzero(~test)), samples.take(np.flatnonzero(test))
