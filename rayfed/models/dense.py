"""Small networks for data that are no images: tokens, and vectors of features.

Shapes: `B` examples, `L` tokens of each.
"""

from itertools import chain, pairwise
from typing import Annotated

from torch import Tensor, nn

from rayfed.base.values import Ge
from rayfed.data.samples import PADDING
from rayfed.models.classifier import Classifier


def text(
    *,
    length: int,
    vocabulary: int,
    num_classes: int,
    embedding: Annotated[int, Ge(1)] = 64,
    hidden: Annotated[int, Ge(1)] = 128,
) -> Classifier:
    """The mean of the tokens' embeddings, and a hidden layer (Joulin et al., EACL 2017, without
    it).
    """
    features = nn.Sequential(
        MeanEmbedding(vocabulary, embedding), nn.Linear(embedding, hidden), nn.ReLU()
    )
    return Classifier(features, head=nn.Linear(hidden, num_classes))


def mlp(
    *,
    num_features: int,
    num_classes: int,
    hidden: Annotated[int, Ge(1)] = 64,
    depth: Annotated[int, Ge(1)] = 2,
) -> Classifier:
    """A multilayer perceptron on vectors: `depth` layers of `hidden` neurons with ReLU."""
    widths = [num_features, *[hidden] * depth]
    layers = chain.from_iterable((nn.Linear(*both), nn.ReLU()) for both in pairwise(widths))
    return Classifier(nn.Sequential(*layers), head=nn.Linear(hidden, num_classes))


class MeanEmbedding(nn.Module):
    """The mean of the embeddings of an example's tokens, without padding: (B, L) to (B, width);
    zeros where none is.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        there = (tokens != PADDING).to(self.embedding.weight.dtype)[:, None]  # (B, 1, L)
        return (there @ self.embedding(tokens))[:, 0] / there.sum(dim=2).clamp(min=1)
