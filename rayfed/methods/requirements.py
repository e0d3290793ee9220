"""Functions for a part's `check`, with which it requires something of a run before it starts."""

import logging

from torch import nn

from rayfed.base.errors import InputError
from rayfed.base.values import snake_case
from rayfed.clients.settings import Training
from rayfed.models.classifier import has_features

log = logging.getLogger(__name__)


def require_features(part: object, model: nn.Module) -> None:
    """Raise `InputError` if the model does not give its features.

    >>> from rayfed.methods import Part
    >>> class MeanFeatures(Part):
    ...     def check(self, model, training):
    ...         require_features(self, model)
    """
    if not has_features(model):
        raise InputError(
            f"{part!r} looks at features, and this model has none: "
            "the model needs the methods `features(x)` and `head(h)`"
        )


def require_sgd(part: object, training: Training) -> None:
    """Raise `InputError` if a client's steps are not the learning rate times a gradient."""
    if training.optimizer != "sgd":
        raise InputError(
            f"train.optimizer = '{training.optimizer}': the part "
            f"'{snake_case(type(part).__name__)}' counts on steps that are the learning rate times "
            "a gradient, which are those of sgd alone; give train.optimizer = 'sgd', or another "
            "method"
        )


def warn_of_momentum(part: object, training: Training) -> None:
    """Warn if the part's maths holds only for steps without momentum, and there is some."""
    if training.momentum:
        log.warning(
            "the maths of %s holds for steps without momentum, and train.momentum = %g: "
            "give train.momentum = 0",
            snake_case(type(part).__name__),
            training.momentum,
        )
