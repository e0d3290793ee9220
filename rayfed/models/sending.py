"""A model on its way to other processes. Torch's parametrizations cannot be pickled; here they can.

A module with parametrizations (spectral_norm, weight_norm) has a class that torch makes for it
alone, which refuses to be pickled. It is sent as its first class and its attributes, and gets such
a class again where it arrives.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def make_sendable(model: nn.Module) -> None:
    """Let the parametrized modules of a model be pickled. Nothing else of them changes."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            _let_be_pickled(module)


def _let_be_pickled(module: nn.Module) -> None:
    """Its class is of this module, or of copies of it, alone."""
    type(module).__reduce_ex__ = _reduced  # type: ignore[method-assign, assignment]


def _reduced(
    module: nn.Module, protocol: int
) -> tuple[Callable[..., nn.Module], tuple[type], dict[str, Any], None, None, Callable[..., None]]:
    """What pickle keeps: the class below torch's own, and the attributes."""
    kind = type(module).__bases__[0]
    return _empty, (kind,), dict(vars(module)), None, None, _fill


def _empty(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _fill(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module its attributes, and the class that torch's `register_parametrization` would
    give it.
    """
    vars(module).update(attributes)
    parametrize._inject_new_class(module)
    _let_be_pickled(module)
    parametrizations: Any = module.parametrizations
    for name in parametrizations:
        parametrize._inject_property(module, name)
