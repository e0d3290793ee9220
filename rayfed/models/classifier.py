"""A model: penultimate features, and a head that turns them into logits; between them, perhaps, a projection."""

import functools
import inspect
from collections.abc import Callable
from typing import TypeGuard

from torch import Tensor, nn

from rayfed.base.errors import InputError, told


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


Builder = Callable[..., Classifier]


def with_projection(builder: Builder) -> Builder:
    """The builder with the option `project`, the number of features after a projection head; 0 is no such head.

    MOON's network (Li et al., CVPR 2021, section 3.2, and its public code): features (B, D), a linear layer to D, ReLU,
    a linear layer to `project`; these are the features that methods see. The head is on top of them.
    """

    @functools.wraps(builder)
    def build(*, project: int = 0, **options: object) -> Classifier:
        if not isinstance(project, int) or isinstance(project, bool) or project < 0:
            raise InputError(f"model '{builder.__name__}'.project = {told(project)}: give a whole number, 0 or more")
        model = builder(**options)
        if not project:
            return model
        *before, last = model.head if isinstance(model.head, nn.Sequential) else [model.head]  # mobilenet's has dropout
        assert isinstance(last, nn.Linear) and isinstance(model.features, nn.Sequential)
        width = last.in_features
        projection = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, project)
        head = nn.Linear(project, last.out_features)
        return Classifier(nn.Sequential(*model.features, *projection), nn.Sequential(*before, head) if before else head)

    option = inspect.Parameter("project", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=int)
    signature = inspect.signature(builder)
    build.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    return build
