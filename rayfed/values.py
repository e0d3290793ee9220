"""Typed, checked values out of plain tables: job sections, partitions and parts are all frozen dataclasses built here.

A field carries its type, its range and one sentence in its annotation, so that one declaration is the check, the
error message and the documentation:

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Proximal:
...     mu: Annotated[float, Ge(0), "strength of the pull towards the global weights"] = 0.01
>>> build(Proximal, {"mu": 0.1}, where="method")
Proximal(mu=0.1)
>>> build(Proximal, {"nu": 0.1}, where="method")
Traceback (most recent call last):
    ...
rayfed.values.InputError: method: unknown key 'nu'; did you mean 'mu'? (it takes: mu)
>>> build(Proximal, {"mu": -1}, where="method")
Traceback (most recent call last):
    ...
rayfed.values.InputError: method.mu = -1: input should be greater than or equal to 0
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

__all__ = ["Ge", "Gt", "InputError", "Le", "Lt", "build", "checked", "did_you_mean", "sentence", "table"]

T = TypeVar("T")


class InputError(ValueError):
    """Something the user gave is wrong. The message says what was given and what would be right (exit code 2)."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """The tail of a message about an unknown name: the nearest valid one, and all of them.

    >>> did_you_mean("fednt", ["fedavg", "fedntd"])
    "; did you mean 'fedntd'? (valid: fedavg, fedntd)"
    """
    allowed = sorted(allowed)
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    return (f"; did you mean '{near[0]}'?" if near else "") + f" (valid: {', '.join(allowed)})"


def build(maker: Callable[..., T], values: Mapping[str, Any], *, where: str) -> T:
    """Call `maker`, a dataclass or a function, with a table of `values`, checking names, types and ranges.

    `where` is the table's place in the job file, for messages. Raises `InputError`, one line a mistake.
    """
    names = list(inspect.signature(maker).parameters)
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise InputError(f"{where}: unknown key '{key}'{hint} (it takes: {', '.join(names) or 'nothing'})")
    mistakes = []
    ready: dict[str, Any] = {}
    for name, parameter in inspect.signature(maker).parameters.items():
        if name in values:
            try:
                ready[name] = _adapters(maker)[name].validate_python(values[name], strict=True)
            except ValidationError as error:
                mistakes += [_explain(e, f"{where}.{name}") for e in error.errors()]
        elif parameter.default is parameter.empty:
            mistakes.append(f"{where}.{name} is missing")
    if mistakes:
        raise InputError("\n".join(mistakes))
    return maker(**ready)


def checked(value: T) -> T:
    """The same dataclass, its fields checked as `build` would; for values that were made in Python."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}  # type: ignore[arg-type]
    return build(type(value), fields, where=type(value).__name__)


def table(value: Any) -> dict[str, Any]:
    """A dataclass as a plain table that `build` reads back; None, which TOML cannot say, is left out."""
    plain = dataclasses.asdict(value)
    return {key: item for key, item in plain.items() if item is not None}


def sentence(cls: type, field: str) -> str:
    """The sentence in a field's annotation, or ''."""
    hint = get_type_hints(cls, include_extras=True)[field]
    if get_origin(hint) is not Annotated:
        return ""
    return next((text for text in get_args(hint)[1:] if isinstance(text, str)), "")


@functools.cache
def _adapters(maker: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(maker, include_extras=True)
    finite = ConfigDict(allow_inf_nan=False)
    return {name: TypeAdapter(hints.get(name, Any), config=finite) for name in inspect.signature(maker).parameters}


def _explain(error: Any, where: str) -> str:
    place = ".".join([where, *(str(step) for step in error["loc"])])
    message = error["msg"][:1].lower() + error["msg"][1:]
    return f"{place} = {error['input']!r}: {message.removeprefix('value error, ')}"
