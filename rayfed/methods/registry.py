"""Methods and parts by name: the `method` of a job file, read into parts and written back.

A method is a name, a table (`{name = "fedntd", beta = 0.5}`), a list of tables to compose, or, to
change in time, a list of `{until = 50, method = ...}` whose last entry has no `until`. A name is a
recipe's, a part's, or `package.module:Name` of a part or a recipe of your own.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

from rayfed.base.errors import InputError, told
from rayfed.base.values import build, find, name_in, named, sentence, table
from rayfed.methods import recipes
from rayfed.methods.composition import DEFAULTS, compose
from rayfed.methods.part import Method, Part, Parts, Switch, all_parts, in_turn, name_of, switch


def _parts() -> Iterator[type[Part]]:
    """The parts of this room's modules, in the order of the modules' names."""
    for module in pkgutil.iter_modules(sys.modules["rayfed.methods"].__path__):
        home = f"rayfed.methods.{module.name}"
        for value in vars(importlib.import_module(home)).values():
            if (
                inspect.isclass(value)
                and value.__module__ == home
                and issubclass(value, Part)
                and value is not Part
            ):
                yield value


RECIPES: dict[str, Callable[..., Parts]] = {
    name: value
    for name, value in vars(recipes).items()
    if inspect.isfunction(value) and value.__module__ == recipes.__name__
}
PARTS: dict[str, type[Part]] = {name_of(part): part for part in _parts()}


def read_method(given: Any) -> Method:
    """The parts that a job file's `method` says.

    Raises `InputError` with the nearest valid name or key.
    """
    if isinstance(given, str | Mapping):
        given = [given]
    if not isinstance(given, list) or not given:
        raise InputError(
            f"method = {told(given)}: give a name, a table with a name, or a list of tables"
        )
    if any(isinstance(entry, Mapping) and "method" in entry for entry in given):
        return _read_switch(given)
    entries = [named(entry, "method") for entry in given]
    groups = [build(_find(name), values, f"method {name}") for name, values in entries]
    slots = [
        {getattr(part, "slot", "") for part in group} if isinstance(group, tuple) else set()
        for group in groups
    ]
    whole = [
        f"'{name}'"
        for (name, _), of_group in zip(entries, slots, strict=True)
        if "average" in of_group
    ]
    if len(whole) > 1:
        raise InputError(
            f"method: {' and '.join(whole)} are whole methods, and a run has one; to compare them, "
            f"give a grid: grid.method = [{', '.join(whole)}]; to combine them, keep one and add "
            "the other's own part"
        )
    composed = compose(*groups)
    # All parts, one by one: as a run's job.toml has them.
    if len(entries) in (1, len(composed)):
        return composed
    lines = [_line(name, values, _defaults(_find(name))) for name, values in entries]
    return Typed(composed, " + ".join(lines))


class Typed(tuple[Part, ...]):
    """The parts of a method that a job file composes, with its names for them, by which people know
    the method.
    """

    line: str

    def __new__(cls, parts: Parts, line: str = "") -> Self:
        """The parts as they are; two methods are the same if their parts are."""
        made = super().__new__(cls, parts)
        made.line = line
        return made


def check_method(method: Any) -> None:
    """Raise `InputError` unless `compose`, a recipe or `switch` made the method."""
    for parts in in_turn(method):
        if not isinstance(parts, tuple) or "average" not in {
            getattr(part, "slot", "") for part in parts
        }:
            raise InputError(
                f"method = {told(parts)}: not a method; make one with compose(...), fedntd() and "
                "the like, or switch"
            )
    for part in all_parts(method):
        # Raises where a job could not record it.
        table(part)


def write_method(method: Method) -> Any:
    """A method as `read_method` reads it."""
    lists = [
        [{"name": name_in(PARTS, type(part)), **table(part)} for part in parts]
        for parts in in_turn(method)
    ]
    if not isinstance(method, Switch):
        return lists[0]
    untils = [{"until": first - 1} for first, _ in method.stages[1:]]
    return [{**until, "method": parts} for until, parts in zip([*untils, {}], lists, strict=True)]


def _read_switch(entries: list[Any]) -> Method:
    allowed = [{"until", "method"}] * (len(entries) - 1) + [{"method"}]
    for entry, keys in zip(entries, allowed, strict=True):
        if not isinstance(entry, Mapping) or set(entry) != keys:
            form = (
                "each entry is {until = ROUND, method = ...}, and the last entry only {method = "
                "...}"
            )
            raise InputError(f"method: {entry!r} in a list that changes in time: {form}")
    first, *rest = entries
    if not rest:
        return read_method(first["method"])
    if not isinstance(first["until"], int) or first["until"] < 1:
        raise InputError(
            f"method.until = {first['until']!r}: give the last round of this entry, 1 or more"
        )
    if (
        len(rest) > 1
        and isinstance(rest[0].get("until"), int)
        and rest[0]["until"] <= first["until"]
    ):
        raise InputError(
            f"method.until = {rest[0]['until']} follows {first['until']}: rounds must grow"
        )
    return switch(read_method(first["method"]), _read_switch(rest), at=first["until"] + 1)


def _find(name: str) -> Callable[..., Part | Parts]:
    found: Any = find(name, {**RECIPES, **PARTS}, "method")
    if not callable(found) or (inspect.isclass(found) and not issubclass(found, Part)):
        raise InputError(
            f"method '{name}' is {told(found)}; it must be a Part, or a function that returns parts"
        )
    return found


def describe(method: Method) -> str:
    """A method in a line: as a job file composes it, else by its recipe and the parts beside it.

    With the values that are not defaults.

    >>> describe(read_method({"name": "fedntd", "beta": 0.5})), describe(read_method(["fedntd", "proximal"]))
    ('fedntd beta = 0.5', 'fedntd + proximal')
    """
    if isinstance(method, Switch):
        first, *later = method.stages
        return describe(first[1]) + "".join(
            f"; from round {at} on: {describe(parts)}" for at, parts in later
        )
    if isinstance(method, Typed) and method.line:
        return method.line
    # Of two parts with a field of one name, the first one's value counts.
    held: dict[str, Any] = {}
    for part in reversed(method):
        for field in dataclasses.fields(part):  # type: ignore[arg-type]
            held[field.name] = getattr(part, field.name)
    # Parts beside the recipe, length of its line, its line.
    found: list[tuple[int, int, str]] = []
    # Line of a recipe: the parts of the method that it lacks.
    beside: dict[str, list[Part]] = {}
    for name, recipe in RECIPES.items():
        defaults = _defaults(recipe)
        given = {key: held[key] for key in defaults if key in held}
        # The value is another recipe's, and out of range here.
        with suppress(InputError):
            of_recipe = recipe(**given)
            if all(part in method for part in of_recipe):
                line = _line(name, given, defaults)
                beside[line] = [part for part in method if part not in of_recipe]
                found.append((len(beside[line]), len(line), line))
    if found:
        # fedlmd_tf, not fedlmd teacher = False.
        *_, line = min(found)
        return " + ".join([line, *map(_part_line, beside[line])])
    usual = [part for part in reversed(DEFAULTS) if part in method]
    own = [part for part in method if part not in usual]
    text = " + ".join(map(_part_line, own))
    return (
        f"{text}, with {' and '.join(name_in(PARTS, type(part)) for part in usual)}"
        if usual
        else text
    )


def _part_line(part: Part) -> str:
    """A part with the values that are not defaults."""
    return _line(name_in(PARTS, type(part)), table(part), _defaults(type(part)))


def document(name: str) -> str:
    """The docstring of a recipe or part; '' if it has none of its own."""
    maker = _find(name)
    text = inspect.getdoc(maker) or ""
    # By `dataclass`, from the fields.
    made = text.startswith(f"{getattr(maker, '__name__', '')}(")
    return "" if made or text == inspect.getdoc(Part) else text


def _defaults(maker: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: parameter.default for name, parameter in inspect.signature(maker).parameters.items()
    }


def _line(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    changed = [f"{key} = {value!r}" for key, value in values.items() if value != defaults[key]]
    return " ".join([name, *([", ".join(changed)] if changed else [])])


def parameters(name: str) -> list[tuple[str, Any, str]]:
    """Name, default and sentence of each hyper-parameter of a recipe or part."""
    maker = _find(name)
    parts: tuple[Any, ...] = (maker,) if inspect.isclass(maker) else tuple(map(type, maker()))  # type: ignore[arg-type]
    sentences = {
        f.name: sentence(part, f.name) for part in reversed(parts) for f in dataclasses.fields(part)
    }
    return [
        (p.name, p.default, sentences.get(p.name, ""))
        for p in inspect.signature(maker).parameters.values()
    ]
