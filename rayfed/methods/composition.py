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
    """Return one method of parts and of other methods, in the order in which they act.

    Without a part for the slot `supervise` it gets cross-entropy, and without a part for `average`
    the mean by samples: `compose()` is FedAvg. Raise `InputError` if two parts fill one slot.

    >>> from rayfed.methods import Proximal, fedntd
    >>> compose(fedntd(), Proximal(mu=0.01))  # FedNTD with FedProx's term
    (Average(by='samples'), CrossEntropy(weight=1.0, smoothing=0.0),
     NotTrueDistill(beta=1.0, tau=1.0, mix=1.0, form='kl', teacher=True), Proximal(mu=0.01))
    """
    # Each slot's part, and the argument that it came in.
    by_slot: dict[str, tuple[Part, Sequence[Any]]] = {}
    for argument in parts:
        group: Sequence[Any] = argument if isinstance(argument, tuple | list) else [argument]
        for part in group:
            refuse_unfit(part)
            if part.slot in by_slot:
                earlier, earlier_group = by_slot[part.slot]
                raise InputError(_same_slot(earlier, part, [*earlier_group, *group]))
            by_slot[part.slot] = part, group
    composed: list[Part] = [part for part in DEFAULTS if part.slot not in by_slot]
    # A default would act in addition to a part that is meant to replace it.
    for default in composed:
        for slot in get_close_matches(default.slot, by_slot, cutoff=0.8):
            raise InputError(
                f"{by_slot[slot][0]!r} has the slot '{slot}'; did you mean '{default.slot}'?"
            )
    composed.extend(part for part, _ in by_slot.values())
    return tuple(sorted(composed, key=turn))


def _same_slot(earlier: Part, later: Part, arguments: Sequence[Part]) -> str:
    """Return the message that two parts fill one slot.

    `arguments` are all parts that were given together with them. The message names those that can
    be given instead of complete methods.
    """
    names = []
    for part in arguments:
        if part.slot != earlier.slot and part not in DEFAULTS:
            names.append(name_of(type(part)))
    message = (
        f"two parts fill the slot '{earlier.slot}': {earlier!r} and {later!r}; keep one of them"
    )
    if names:
        message += (
            "; of a whole method, give what is its own, so that the slot is free: "
            f"{', '.join(names)}"
        )
    return message


def turn(part: Part) -> int:
    """Return when a part's `update` runs: 0 is first.

    The average runs first, then the parts that change it, then the others, which read the outcome.
    """
    if part.slot == "average":
        return 0
    return 1 if part.changes_average else 2


def refuse_unfit(part: object) -> None:
    """Raise `InputError` for what cannot be in a method."""
    if not isinstance(part, Part):
        name = getattr(part, "__name__", "")
        advice = f"; did you mean {name}()?" if callable(part) and name.isidentifier() else ""
        raise InputError(f"a method is made of parts; {told(part)} is not a part{advice}")
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
    """Return the recipe `name` of a single part, with the part's parameters and docstring.

    >>> from rayfed.methods import Proximal
    >>> fedprox = recipe("fedprox", Proximal)
    >>> fedprox(mu=0.1) == compose(Proximal(mu=0.1))
    True
    """

    def method(*values: P.args, **named: P.kwargs) -> Parts:
        return compose(part(*values, **named))

    method.__name__ = method.__qualname__ = name
    # A recipe is pickled by its name, and found again in this module.
    method.__module__ = "rayfed.methods.recipes"
    method.__doc__ = part.__doc__
    method.__annotations__ = get_type_hints(part, include_extras=True)
    method.__signature__ = inspect.signature(part)  # type: ignore[attr-defined]
    return method
