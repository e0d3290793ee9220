"""Methods and parts by name: what a job file says, read into parts and written back.

A method is a name, a table (`{name = "fedntd", beta = 0.5}`), a list of tables to compose, or, to change in time, a
list of `{until = 50, method = ...}` whose last entry has no `until`. A name is a recipe's, a part's, or
`package.module:Name` of a part or a recipe of one's own.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rayfed.methods import anchors, distill, features, recipes, server, supervise
from rayfed.methods.part import Method, Part, Parts, Switch, name_of, switch
from rayfed.values import InputError, build, did_you_mean, sentence, table

RECIPES: dict[str, Callable[..., Parts]] = {
    name: function
    for name, function in vars(recipes).items()
    if inspect.isfunction(function) and function.__module__ == recipes.__name__ and name != "compose"
}
PARTS: dict[str, type[Part]] = {
    name_of(cls): cls
    for module in (supervise, distill, features, anchors, server)
    for cls in vars(module).values()
    if inspect.isclass(cls) and issubclass(cls, Part) and cls.__module__ == module.__name__
}


def read_method(given: Any) -> Method:
    """What a job file's `method` says, as parts. Raises `InputError` with the nearest valid name or key."""
    if isinstance(given, str | Mapping):
        given = [given]
    if not isinstance(given, list) or not given:
        raise InputError(f"method = {given!r}: give a name, a table with a name, or a list of tables")
    if any(isinstance(entry, Mapping) and "method" in entry for entry in given):
        return _read_switch(given)
    return recipes.compose(*(_read_entry(entry) for entry in given))


def write_method(method: Method) -> Any:
    """A method as the table that `read_method` reads back."""
    if isinstance(method, Switch):
        after = write_method(method.after)
        later = after if isinstance(method.after, Switch) else [{"method": after}]
        return [{"until": method.at - 1, "method": write_method(method.before)}, *later]
    if callable(method):
        raise InputError(
            f"method = {method!r}: a job can hold parts, or a `switch` between them; not any other function"
        )
    return [{"name": _name(part), **table(part)} for part in method]


def _name(part: Part) -> str:
    name = name_of(type(part))
    return name if PARTS.get(name) is type(part) else f"{type(part).__module__}:{type(part).__qualname__}"


def _read_switch(entries: list[Any]) -> Method:
    allowed = [{"until", "method"}] * (len(entries) - 1) + [{"method"}]
    for entry, keys in zip(entries, allowed, strict=True):
        if not isinstance(entry, Mapping) or set(entry) != keys:
            raise InputError(
                f"method: {entry!r} in a list that changes in time: each entry is {{until = ROUND, method = ...}}, "
                "and the last one only {method = ...}"
            )
    first, *rest = entries
    if not rest:
        return read_method(first["method"])
    if not isinstance(first["until"], int) or first["until"] < 1:
        raise InputError(f"method.until = {first['until']!r}: give the last round of this entry, 1 or more")
    if len(rest) > 1 and isinstance(rest[0].get("until"), int) and rest[0]["until"] <= first["until"]:
        raise InputError(f"method.until = {rest[0]['until']} follows {first['until']}: rounds must grow")
    return switch(read_method(first["method"]), _read_switch(rest), at=first["until"] + 1)


def _read_entry(entry: Any) -> Part | Parts:
    values = {"name": entry} if isinstance(entry, str) else dict(entry) if isinstance(entry, Mapping) else {}
    if not isinstance(name := values.pop("name", None), str):
        raise InputError(f"method: {entry!r} has no name (such as {{name = 'fedntd', beta = 1.0}})")
    maker: Callable[..., Part | Parts] = _find(name)
    return build(maker, values, where=f"method {name}")


def _find(name: str) -> Callable[..., Parts] | type[Part]:
    if name in RECIPES:
        return RECIPES[name]
    if name in PARTS:
        return PARTS[name]
    if ":" not in name:
        raise InputError(f"unknown method '{name}'{did_you_mean(name, [*RECIPES, *PARTS])}")
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"method '{name}' cannot be imported: {error}") from None
    if not callable(found) or (inspect.isclass(found) and not issubclass(found, Part)):
        raise InputError(f"method '{name}' is {found!r}; it must be a Part, or a function that returns parts")
    return found


def parameters(name: str) -> list[tuple[str, Any, str]]:
    """Name, default and sentence of each hyper-parameter of a recipe or part, for the command `methods`."""
    maker = _find(name)
    parts: tuple[Any, ...] = (maker,) if inspect.isclass(maker) else tuple(type(part) for part in maker())
    sentences = {f.name: sentence(part, f.name) for part in reversed(parts) for f in dataclasses.fields(part)}
    return [(p.name, p.default, sentences.get(p.name, "")) for p in inspect.signature(maker).parameters.values()]
