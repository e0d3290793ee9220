"""Parts put together into a method."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, ParamSpec, get_type_hints

from rayfed.base.errors import InputError, told
from rayfed.methods.part import HOOKS, Part, Parts, defines, name_of
from rayfed.methods.server import Average
from rayfed.methods.supervise import CrossEntropy

P = ParamSpec("P")
DEFAULTS = (Average(), CrossEntropy())


def compose(*parts: Part | Sequence[Part]) -> Parts:
    """One method of parts and of other methods, flattened, in the order in which they act.

    Without a part for the slot `supervise` it gets cross-entropy, and without a part for `average`
    the mean by samples: `compose()` is FedAvg. Raises `InputError` where two parts fill one slot.

    >>> from rayfed.methods import Proximal, fedntd
    >>> compose(fedntd(), Proximal(mu=0.01))  # FedNTD with FedProx's term
    (Average(by='samples'), CrossEntropy(weight=1.0, smoothing=0.0),
     NotTrueDistill(beta=1.0, tau=1.0, mix=1.0, form='kl', teacher=True), Proximal(mu=0.01))
    """
    # With what it came with.
    by_slot: dict[str, tuple[Part, Sequence[Any]]] = {}
    for each in parts:
        group: Sequence[Any] = each if isinstance(each, tuple | list) else [each]
        for part in group:
            refuse_unfit(part)
            if part.slot in by_slot:
                raise InputError(_twice(by_slot[part.slot], (part, group)))
            by_slot[part.slot] = part, group
    defaults = [part for part in DEFAULTS if part.slot not in by_slot]
    # Which would go on beside the part that is to take its place.
    for default in defaults:
        for slot in get_close_matches(default.slot, by_slot, cutoff=0.8):
            raise InputError(
                f"{by_slot[slot][0]!r} has the slot '{slot}'; did you mean '{default.slot}'?"
            )
    return tuple(sorted([*defaults, *(part for part, _ in by_slot.values())], key=turn))


def _twice(*filled: tuple[Part, Sequence[Part]]) -> str:
    """That two parts fill one slot, each with what it came with, and what to give in place of whole
    methods.
    """
    (first, _), (later, _) = filled
    own = [
        name_of(type(one))
        for _, of in filled
        for one in of
        if one.slot != first.slot and one not in DEFAULTS
    ]
    rather = (
        f"; of a whole method, give what is its own, so that the slot is free: {', '.join(own)}"
        if own
        else ""
    )
    return (
        f"two parts fill the slot '{first.slot}': {first!r} and {later!r}; keep one of them{rather}"
    )


def turn(part: Part) -> int:
    """When a part's `update` runs: first the average, then what changes it, then the others, which
    read the outcome.
    """
    if part.slot == "average":
        return 0
    return 1 if part.changes_average else 2


def refuse_unfit(part: object) -> None:
    """Raise `InputError` for what cannot be in a method."""
    if not isinstance(part, Part):
        name = getattr(part, "__name__", "")
        rather = f"; did you mean {name}()?" if callable(part) and name.isidentifier() else ""
        raise InputError(f"a method is made of parts; {told(part)} is not a part{rather}")
    if not is_dataclass(part) or not part.__dataclass_params__.frozen:
        raise InputError(
            f"{told(part)} is not a frozen dataclass; put @dataclass(frozen=True) above its class"
        )
    if not any(defines(part, hook) for hook in (*HOOKS, "local_names")):
        raise InputError(
            f"{told(part)} has no hook, and would change nothing; the hooks are {', '.join(HOOKS)}"
        )
    if part.slot == "average" and not defines(part, "update"):
        raise InputError(
            f"{told(part)} fills the slot 'average', so it has to define update, and return "
            "step.towards(weights) there"
        )


def recipe(name: str, part: Callable[P, Part]) -> Callable[P, Parts]:
    """The method of a single part, with the part's parameters and docstring, under a name."""

    def method(*values: P.args, **named: P.kwargs) -> Parts:
        return compose(part(*values, **named))

    method.__name__ = method.__qualname__ = name
    method.__module__ = (
        # Where it is found again: a method may be pickled by its name.
        "rayfed.methods.recipes"
    )
    method.__doc__ = part.__doc__
    method.__annotations__ = get_type_hints(part, include_extras=True)
    method.__signature__ = inspect.signature(part)  # type: ignore[attr-defined]
    return method
