"""Parts put together into a method."""

import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, get_type_hints

from rayfed.methods.part import Part, Parts, arrange
from rayfed.methods.server import Average
from rayfed.methods.supervise import CrossEntropy

P = ParamSpec("P")


def compose(*parts: Part | Sequence[Part]) -> Parts:
    """One method of parts and of other methods, flattened, in the order in which they act.

    Without a part for the slot `supervise` it gets cross-entropy, and without a part for `average` the mean by samples:
    `compose()` is FedAvg. Raises `InputError` where two parts fill one slot.
    """
    flat = [part for group in parts for part in (group if isinstance(group, tuple | list) else (group,))]
    slots = {part.slot for part in flat if isinstance(part, Part)}
    defaults = [part for part in (Average(), CrossEntropy()) if part.slot not in slots]
    return arrange((*defaults, *flat))


def recipe(name: str, part: Callable[P, Part]) -> Callable[P, Parts]:
    """The method of a single part, with the part's parameters and docstring, under a name."""

    def method(*values: P.args, **named: P.kwargs) -> Parts:
        return compose(part(*values, **named))

    method.__name__ = method.__qualname__ = name
    method.__module__ = "rayfed.methods.recipes"  # where it is found again: a method may be pickled by its name
    method.__doc__ = part.__doc__
    method.__annotations__ = get_type_hints(part, include_extras=True)
    method.__signature__ = inspect.signature(part)  # type: ignore[attr-defined]
    return method
