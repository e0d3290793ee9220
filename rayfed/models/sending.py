"""A model on its way to other processes: here torch's parametrizations can be pickled.

Torch makes a class for each module with parametrizations (spectral_norm, weight_norm). That class
refuses to be pickled. The module is sent as the class below it and its attributes, and gets such a
class again where it arrives.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def make_sendable(model: nn.Module) -> None:
    """Let the parametrized modules of a model be pickled; nothing else in them changes."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            _let_be_pickled(module)


def _let_be_pickled(module: nn.Module) -> None:
    """Give the module's class a way to be pickled.

    The class belongs to this module and its copies alone.
    """
    type(module).__reduce_ex__ = _reduced  # type: ignore[method-assign, assignment]


def _reduced(
    module: nn.Module, protocol: int
) -> tuple[Callable[..., nn.Module], tuple[type], dict[str, Any], None, None, Callable[..., None]]:
    """Return what pickle keeps: the class below torch's own, and the attributes."""
    kind = type(module).__bases__[0]
    return _empty, (kind,), dict(vars(module)), None, None, _fill


def _empty(kind: type[nn.Module]) -> nn.Module:
    """Return a module of this class without attributes."""
    return kind.__new__(kind)


def _fill(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module its attributes and a class for its parametrizations.

    The class is the one that torch's `register_parametrization` would give it.
    """
    vars(module).update(attributes)
    parametrize._inject_new_class(module)
    _let_be_pickled(module)
    parametrizations: Any = module.parametrizations
    for name in parametrizations:
        parametrize._inject_property(module, name)
