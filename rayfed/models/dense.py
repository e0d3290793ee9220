"""Small networks for data that are no images: tokens, and vectors of features.

Shapes: `B` examples, `L` tokens of each.
"""

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
    """Build a network of the mean of the tokens' embeddings, and a hidden layer.

    It is the network of Joulin et al. (EACL 2017), who have no hidden layer.
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
    """Build a multilayer perceptron on vectors: `depth` layers of `hidden` neurons with ReLU."""
    layers: list[nn.Module] = []
    width = num_features
    for _ in range(depth):
        layers.append(nn.Linear(width, hidden))
        layers.append(nn.ReLU())
        width = hidden
    return Classifier(nn.Sequential(*layers), head=nn.Linear(hidden, num_classes))


class MeanEmbedding(nn.Module):
    """The mean of the embeddings of an example's tokens, without padding.

    It takes tokens (B, L) to vectors (B, width). An example without tokens gets zeros.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != PADDING).to(self.embedding.weight.dtype)[:, None]  # (B, 1, L)
        sums = (mask @ self.embedding(tokens))[:, 0]  # (B, width)
        return sums / mask.sum(dim=2).clamp(min=1)
