"""Labelled examples as plain arrays.

Every source is read into them, and all later layers use them. Examples are images, lists of tokens
or vectors of features (`rayfed.data.inputs`).

Shapes: `N` examples, `C` channels, `H` x `W` pixels, `K` classes, `L` tokens, `D` features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfed.base.errors import InputError

# With more classes, the counts of each pair of classes would take more than 8 GiB.
MAX_CLASSES = 2**15
# This number stands in place of a token after the end of a list.
PADDING = 0


@dataclass(frozen=True, eq=False)
class Samples:
    """A labelled set of examples."""

    # Images are uint8 (N, C, H, W), where C is 1 or 3. Tokens are int64 (N, L). Vectors are floats
    # (N, D). The array is C-contiguous.
    examples: np.ndarray
    # Labels are int64 (N,), 0..K-1.
    labels: np.ndarray
    # The K class names are in label order.
    classes: tuple[str, ...]
    # The natural client of each row, int64 (N,), is numbered as in `group_names`.
    groups: np.ndarray | None = None
    # The domain of each row, int64 (N,), is numbered as in `domain_names`.
    domains: np.ndarray | None = None
    # The names of the domains are sorted.
    domain_names: tuple[str, ...] = ()
    # Each token is below the vocabulary; 0 if the examples are no tokens.
    vocabulary: int = 0
    # The names of the natural clients are sorted.
    group_names: tuple[str, ...] = ()
    # The files say which number is which class: their labels are numbers, or they list the names.
    numbered: bool = False
    # The number of tokens of each example before it was cut or padded, int64 (N,); None if the
    # examples are no tokens.
    lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one example: (C, H, W), (L,) or (D,)."""
        return self.examples.shape[1:]

    def take(self, rows: np.ndarray) -> Samples:
        """Return a copy with these rows only."""
        return replace(
            self,
            examples=self.examples[rows],
            labels=self.labels[rows],
            groups=_rows_of(self.groups, rows),
            domains=_rows_of(self.domains, rows),
            lengths=_rows_of(self.lengths, rows),
        )

    def by_domain(self, rows: np.ndarray) -> np.ndarray:
        """Return how many of these rows each domain has, int64 (domains,).

        The result has the shape (0,) if the set has no domains.
        """
        domains = np.empty(0, dtype=np.int64) if self.domains is None else self.domains[rows]
        return np.bincount(domains, minlength=len(self.domain_names))


def _rows_of(values: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    """Return these rows of `values`; None of None."""
    return None if values is None else values[rows]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set of one kind: same shape, same classes."""

    train: Samples
    test: Samples

    def __post_init__(self) -> None:
        shape = "image shape (C, H, W)" if len(self.train.shape) == 3 else "number of features"
        for kind, attribute in ((shape, "shape"), ("classes", "classes")):
            in_train, in_test = getattr(self.train, attribute), getattr(self.test, attribute)
            if in_train != in_test:
                raise InputError(
                    f"training and test set disagree in {kind}: {shortened(in_train)} and "
                    f"{shortened(in_test)}"
                )


def shortened(values: Sequence[object], limit: int = 10) -> str:
    """Return values for a message: only the first values, if there are many.

    >>> shortened("abcd", limit=2)
    'a, b, ...'
    """
    return ", ".join(map(str, values[:limit])) + (", ..." if len(values) > limit else "")


def refuse_many_classes(num_classes: int, place: str) -> None:
    """Raise InputError for too many classes, as the label column may hold something else.

    `place` begins the message.
    """
    if num_classes > MAX_CLASSES:
        raise InputError(
            f"{place}: {num_classes:,} classes, more than the {MAX_CLASSES:,} allowed; is it the "
            "label? Numbers of classes begin with 0 and have no gaps"
        )


def hold_out(samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """Split `samples` in two: a set to train on and a set to test on.

    The test set has a `fraction` of every class, at least one image but never all. Raises
    InputError if no class has two images.
    """
    rng = np.random.default_rng(seed)
    for_test = np.zeros(len(samples), dtype=bool)
    for label in np.unique(samples.labels):
        members = np.flatnonzero(samples.labels == label)
        num_held = min(max(1, round(fraction * len(members))), len(members) - 1)
        for_test[rng.permutation(members)[:num_held]] = True
    if not for_test.any():
        raise InputError(
            f"data.test_fraction = {fraction}: no class has two images, one to train and one to "
            "test on"
        )
    train = samples.take(np.flatnonzero(~for_test))
    test = samples.take(np.flatnonzero(for_test))
    return train, test
