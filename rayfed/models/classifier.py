"""A model: penultimate features, and a head that turns them into logits."""

from typing import TypeGuard

from torch import Tensor, nn


class Classifier(nn.Module):
    """A model in two steps, for the methods that look at features: `forward(x) = head(features(x))`.

    `features` takes images (B, *image_shape) to features (B, D), and `head` takes features to logits (B, C).

    >>> import torch
    >>> model = Classifier(features=nn.Flatten(), head=nn.Linear(12, 10))
    >>> x = torch.zeros(2, 3, 2, 2)
    >>> model.features(x).shape, model(x).shape
    (torch.Size([2, 12]), torch.Size([2, 10]))
    """

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def has_features(model: nn.Module) -> TypeGuard[Classifier]:
    """Whether a model has the methods `features` and `head`, as a `Classifier` has; other classes may have them too."""
    return callable(getattr(model, "features", None)) and callable(getattr(model, "head", None))
