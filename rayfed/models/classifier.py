"""A model: penultimate features, and a head that turns them into logits.

A projection may stand between them.
"""

from typing import TypeGuard

from torch import Tensor, nn


class Classifier(nn.Module):
    """A model in two steps, for the methods that look at features.

    It computes `forward(x) = head(features(x))`.

    `features` takes images `(B, *image_shape)` to features (B, D), and `head` takes features to
    logits (B, C).

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
    """Say whether a model has the methods `features` and `head`.

    A `Classifier` has them, and other classes may have them too.
    """
    return callable(getattr(model, "features", None)) and callable(getattr(model, "head", None))


def features_and_logits(
    model: nn.Module, x: Tensor, *, copied: bool = False
) -> tuple[Tensor | None, Tensor]:
    """Return the features (B, D) and the logits (B, C) of a forward pass.

    The features are None if the model has none. With `copied` the model gets a copy of `x`, and its
    head gets a copy of the features: it may write to them.
    """
    inputs = x.clone() if copied else x
    if not has_features(model):
        return None, model(inputs)
    features = model.features(inputs)
    return features, model.head(features.clone() if copied else features)


def with_projection(model: Classifier, width: int) -> Classifier:
    """Return the model with a projection head between its features and its own head.

    Methods see the `width` features that the projection gives. This is MOON's network (Li et al.,
    CVPR 2021, section 3.2, and its public code): features (B, D), a linear layer to D, ReLU, a
    linear layer to `width`.
    """
    # The head of mobilenet begins with dropout, which stays.
    head_layers = list(model.head) if isinstance(model.head, nn.Sequential) else [model.head]
    linear = head_layers.pop()
    assert isinstance(linear, nn.Linear) and isinstance(model.features, nn.Sequential)
    inner = linear.in_features
    projection = nn.Linear(inner, inner), nn.ReLU(), nn.Linear(inner, width)
    head = nn.Linear(width, linear.out_features)
    features = nn.Sequential(*model.features, *projection)
    if not head_layers:
        return Classifier(features, head)
    return Classifier(features, nn.Sequential(*head_layers, head))
