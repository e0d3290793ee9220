"""A model: penultimate features, and a head that turns them into logits; between them, perhaps, a
projection.
"""

from typing import TypeGuard

from torch import Tensor, nn


class Classifier(nn.Module):
    """A model in two steps, for the methods that look at features: `forward(x) =
    head(features(x))`.

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
    """Whether a model has the methods `features` and `head`, as a `Classifier` has; other classes
    may have them too.
    """
    return callable(getattr(model, "features", None)) and callable(getattr(model, "head", None))


def features_and_logits(
    model: nn.Module, x: Tensor, *, copied: bool = False
) -> tuple[Tensor | None, Tensor]:
    """A forward pass: features (B, D), None where the model has none, and logits (B, C).

    With `copied` the model gets a copy of `x`, and its head a copy of the features: it may write to
    them.
    """
    given = x.clone() if copied else x
    if not has_features(model):
        return None, model(given)
    features = model.features(given)
    return features, model.head(features.clone() if copied else features)


def with_projection(model: Classifier, width: int) -> Classifier:
    """The model with a projection head, whose `width` features methods see; the model's head is on
    top of them.

    MOON's network (Li et al., CVPR 2021, section 3.2, and its public code): features (B, D), a
    linear layer to D, ReLU, a linear layer to `width`.
    """
    # Mobilenet's has dropout.
    *before, last = model.head if isinstance(model.head, nn.Sequential) else [model.head]
    assert isinstance(last, nn.Linear) and isinstance(model.features, nn.Sequential)
    inner = last.in_features
    projection = nn.Linear(inner, inner), nn.ReLU(), nn.Linear(inner, width)
    head = nn.Linear(width, last.out_features)
    return Classifier(
        nn.Sequential(*model.features, *projection),
        nn.Sequential(*before, head) if before else head,
    )
