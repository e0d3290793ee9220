"""The kinds of examples, and so what a model takes: images, tokens or vectors of features.

The fields of a kind are the keyword arguments with which a model for it is built.

>>> Tokens(length=32, vocabulary=500)._asdict()
{'length': 32, 'vocabulary': 500}
>>> print(Images((1, 28, 28)), Vectors(7), sep="; ")
images of 1x28x28; vectors of 7 features

Shapes: `n` examples, `B` of a batch, `C` channels, `H` x `W` pixels, `L` tokens, `D` features.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayfed.data.augment import Batches, Rows, kept, prepare
from rayfed.data.samples import Samples
from rayfed.data.settings import Augment

# Sums are taken of that many examples at a time, as squares take twice the memory of the examples.
BLOCK = 1024
Floats = Sequence[float]
# A mean and a standard deviation, as `prepare` takes them.
Moments = tuple[tuple[float, ...], tuple[float, ...]]


class Images(NamedTuple):
    """Images of one shape; in a batch they are normalised, float32 (B, C, H, W)."""

    image_shape: tuple[int, int, int]  # (C, H, W)

    @property
    def size(self) -> str:
        """Return the shape of an image in words for a message."""
        return "x".join(map(str, self.image_shape))

    def __str__(self) -> str:
        return f"images of {self.size}"

    def some(self, count: int) -> Tensor:
        """Make up examples, as a batch has them, to try a model on."""
        pixels = torch.linspace(0, 1, count * math.prod(self.image_shape))
        return pixels.view(count, *self.image_shape)

    def moments(self, examples: np.ndarray) -> Moments:
        """Return mean and deviation of each channel of a training set, uint8 (n, C, H, W).

        They are in units of [0, 1]. The sums are of integers, hence exact and the same on every
        machine. A constant channel has deviation 1, so that it can be a divisor.

        >>> Images((1, 1, 1)).moments(np.array([0, 255], dtype=np.uint8).reshape(2, 1, 1, 1))
        ((0.5,), (0.5,))
        """
        channels = examples.shape[1]
        totals = np.zeros(channels, dtype=np.int64)
        squares = np.zeros(channels, dtype=np.int64)
        for start in range(0, len(examples), BLOCK):
            block = examples[start : start + BLOCK]
            totals += block.sum(axis=(0, 2, 3), dtype=np.int64)
            # 16 bits are enough, as 255**2 < 2**16.
            squares += np.square(block, dtype=np.uint16).sum(axis=(0, 2, 3), dtype=np.int64)
        count = examples.size // channels
        means, deviations = [], []
        for total, square in zip(totals.tolist(), squares.tolist(), strict=True):
            means.append(total / count / 255)
            # n**2 times the variance is a whole number too, and Python's integers do not overflow.
            spread = square * count - total**2
            deviations.append((spread**0.5 / count / 255) or 1.0)
        return tuple(means), tuple(deviations)

    def prepare(
        self, examples: Tensor, mean: Floats, std: Floats, augment: Augment | None
    ) -> Batches:
        """Return images, uint8 (n, C, H, W), ready for batches."""
        return prepare(examples, mean, std, augment)


class Tokens(NamedTuple):
    """Lists of token numbers, cut and padded to one length; in a batch int64 (B, L)."""

    length: int
    # Each number is below the vocabulary; 0, the padding, is one of the numbers.
    vocabulary: int

    @property
    def size(self) -> str:
        """Return the length and the vocabulary in words for a message."""
        return f"{self.length} tokens, vocabulary {self.vocabulary:,}"

    def __str__(self) -> str:
        return f"lists of {self.size}"

    def some(self, count: int) -> Tensor:
        """Make up examples, as a batch has them, to try a model on."""
        return (torch.arange(count * self.length) % self.vocabulary).view(count, self.length)

    def moments(self, examples: np.ndarray) -> Moments:
        """Return no moments, as token numbers are names."""
        return (), ()

    def prepare(self, examples: Tensor, mean: Floats, std: Floats, augment: Augment | None) -> Rows:
        """Return tokens, int64 (n, L), as they are."""
        return Rows(examples)


class Vectors(NamedTuple):
    """Vectors of numbers; in a batch they are standardised, float32 (B, D)."""

    num_features: int

    @property
    def size(self) -> str:
        """Return the number of features in words for a message."""
        return f"{self.num_features} features"

    def __str__(self) -> str:
        return f"vectors of {self.size}"

    def some(self, count: int) -> Tensor:
        """Make up examples, as a batch has them, to try a model on."""
        return torch.linspace(0, 1, count * self.num_features).view(count, self.num_features)

    def moments(self, examples: np.ndarray) -> Moments:
        """Return mean and deviation of each feature of a training set (n, D), in its unit.

        A constant feature has deviation 1.

        >>> Vectors(2).moments(np.array([[1.0, 5.0], [3.0, 5.0]]))
        ((2.0, 5.0), (1.0, 1.0))
        """
        blocks = [examples[start : start + BLOCK] for start in range(0, len(examples), BLOCK)]
        mean = sum(block.sum(axis=0, dtype=np.float64) for block in blocks) / len(examples)
        squares = sum(np.square(block - mean).sum(axis=0) for block in blocks)
        # Rounding may leave a constant feature a deviation that is not quite 0.
        constant = examples.min(axis=0) == examples.max(axis=0)
        deviation = np.where(constant, 1.0, np.sqrt(squares / len(examples)))
        return tuple(mean.tolist()), tuple(deviation.tolist())

    def prepare(self, examples: Tensor, mean: Floats, std: Floats, augment: Augment | None) -> Rows:
        """Return vectors, floats (n, D), standardised by a `mean` and a `std` per feature."""
        # float64 is needed before: a date in seconds has too many digits for float32.
        centre = kept(tuple(mean), torch.float64, examples.device)
        scale = kept(tuple(std), torch.float64, examples.device)
        return Rows(((examples.double() - centre) / scale).float())


Inputs = Images | Tokens | Vectors
INPUTS: tuple[type[Images] | type[Tokens] | type[Vectors], ...] = (Images, Tokens, Vectors)


def inputs_of(samples: Samples) -> Inputs:
    """Say what the examples of a set are, by the type of their numbers."""
    if samples.examples.dtype == np.uint8:
        channels, height, width = samples.shape
        return Images((channels, height, width))
    (length,) = samples.shape
    if samples.examples.dtype.kind == "f":
        return Vectors(length)
    return Tokens(length, samples.vocabulary)


def inputs_with(keywords: Mapping[str, Any]) -> Inputs:
    """Return the inputs with these fields.

    Raises TypeError if no kind of inputs has these fields.

    >>> inputs_with({"num_features": 7})
    Vectors(num_features=7)
    """
    for kind in INPUTS:
        if keywords.keys() == set(kind._fields):
            return kind(**keywords)
    kinds = ", or ".join(" and ".join(kind._fields) for kind in INPUTS)
    raise TypeError(
        f"a model is for inputs given by {kinds}; not by {' and '.join(keywords) or 'nothing'}"
    )
