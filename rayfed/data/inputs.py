"""What the examples of a data set are, and so what a model takes: images, lists of tokens, or vectors of features.

The fields of a kind are the keyword arguments with which a model for it is built.

>>> Tokens(length=32, vocabulary=500)._asdict()
{'length': 32, 'vocabulary': 500}
>>> print(Images((1, 28, 28)), Vectors(7), sep="; ")
images of 1x28x28; vectors of 7 features
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Images(NamedTuple):
    """Images of one shape; in a batch normalised, float32 (B, C, H, W)."""

    image_shape: tuple[int, int, int]  # (channels, height, width)

    @property
    def less(self) -> str:
        return "smaller images"

    @property
    def size(self) -> str:
        return "x".join(map(str, self.image_shape))

    def __str__(self) -> str:
        return f"images of {self.size}"

    def some(self, count: int) -> Tensor:
        """Made-up examples, as a batch has them, to try a model on."""
        return torch.linspace(0, 1, count * math.prod(self.image_shape)).view(count, *self.image_shape)


class Tokens(NamedTuple):
    """Lists of token numbers, cut and padded to one length; in a batch int64 (B, length)."""

    length: int
    vocabulary: int  # each number is below it; 0, the padding, is one of them

    @property
    def less(self) -> str:
        return "a smaller data.vocabulary"

    @property
    def size(self) -> str:
        return f"{self.length} tokens, vocabulary {self.vocabulary:,}"

    def __str__(self) -> str:
        return f"lists of {self.size}"

    def some(self, count: int) -> Tensor:
        """Made-up examples, as a batch has them, to try a model on."""
        return (torch.arange(count * self.length) % self.vocabulary).view(count, self.length)


class Vectors(NamedTuple):
    """Vectors of numbers; in a batch standardised, float32 (B, num_features)."""

    num_features: int

    @property
    def less(self) -> str:
        return "fewer features"

    @property
    def size(self) -> str:
        return f"{self.num_features} features"

    def __str__(self) -> str:
        return f"vectors of {self.size}"

    def some(self, count: int) -> Tensor:
        """Made-up examples, as a batch has them, to try a model on."""
        return torch.linspace(0, 1, count * self.num_features).view(count, self.num_features)


Inputs = Images | Tokens | Vectors
INPUTS: tuple[type[Images] | type[Tokens] | type[Vectors], ...] = (Images, Tokens, Vectors)


def inputs_of(given: Mapping[str, Any]) -> Inputs:
    """The inputs with these fields. Raises TypeError where they are those of no kind."""
    for kind in INPUTS:
        if given.keys() == {*kind._fields}:
            return kind(**given)
    kinds = ", or ".join(" and ".join(kind._fields) for kind in INPUTS)
    raise TypeError(f"a model is for inputs given by {kinds}; not by {' and '.join(given) or 'nothing'}")
