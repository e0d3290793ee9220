"""Methods and parts by name: the `method` of a job file, read into parts and written back.

A method is a name, a table (`{name = "fedntd", beta = 0.5}`), or a list of tables to compose. A
method that changes in time is a list of `{until = 50, method = ...}` whose last entry has no
`until`. A name is that of a recipe or a part, or `package.module:Name` of your own part or recipe.
"""

import dataclasses
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

from rayfed.base.errors import InputError, told
from rayfed.base.values import build, find, name_in, named, sentence, table
from rayfed.methods import recipes
from rayfed.methods.composition import DEFAULTS, compose
from rayfed.methods.part import Method, Part, Parts, Switch, all_parts, in_turn, name_of, switch


def _parts() -> Iterator[type[Part]]:
    """Yield the parts of this package's modules, in the order of the modules' names."""
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
# Why methods and parts left, and what is nearest to them.
GONE = {
    "flashback": (
        "its losses were written from memory, as only the abstract of its paper could be found. "
        "Nearest are 'feddf', which distils at the server, and 'fedlmd', which distils at the "
        "clients by their label counts"
    ),
}
GONE["counted_distill"] = GONE["flashback"]
PARTS: dict[str, type[Part]] = {name_of(part): part for part in _parts()}


def read_method(value: Any) -> Method:
    """Return the parts that a job file's `method` names.

    Raise `InputError` with the nearest valid name or key.
    """
    if isinstance(value, str | Mapping):
        value = [value]
    if not isinstance(value, list) or not value:
        raise InputError(
            f"method = {told(value)}: give a name, a table with a name, or a list of tables"
        )
    if any(isinstance(entry, Mapping) and "method" in entry for entry in value):
        return _read_switch(value)
    entries = [named(entry, "method") for entry in value]
    groups = [build(_find(name), values, f"method {name}") for name, values in entries]
    _refuse_two_methods([name for name, _ in entries], groups)
    composed = compose(*groups)
    # A run's job.toml lists all parts, one by one, which is no line that a person wrote.
    if len(entries) in (1, len(composed)):
        return composed
    lines = [_line(name, values, _defaults(_find(name))) for name, values in entries]
    return Typed(composed, " + ".join(lines))


def _refuse_two_methods(names: list[str], groups: list[Any]) -> None:
    """Raise `InputError` if two of the groups are complete methods; parts are no groups."""
    methods, own_parts = [], []
    for name, group in zip(names, groups, strict=True):
        if isinstance(group, tuple) and _has_average(group):
            methods.append(name)
            own_parts.append([part for part in group if part not in DEFAULTS])
    if len(methods) > 1:
        message = (
            f"method: a run has one method, and {' and '.join(map(repr, methods))} are complete "
            "methods\n"
            f"to compare them, give a grid: -s 'grid.method={json.dumps(methods)}'\n"
            "to combine them, keep one and add the other's own part"
        )
        # A second average would not fit.
        if own_parts[1] and not _has_average(own_parts[1]):
            added = [name_of(type(part)) for part in own_parts[1]]
            message += f": -s 'method={json.dumps([methods[0], *added])}'"
        raise InputError(message)


def _has_average(parts: Iterable[Any]) -> bool:
    """Say whether a part has the slot `average`, as in every complete method."""
    return any(getattr(part, "slot", "") == "average" for part in parts)


class Typed(tuple[Part, ...]):
    """The parts of a method that a job file composes, and the line by which people know it.

    Two methods are the same if their parts are, whatever the line.
    """

    line: str

    def __new__(cls, parts: Parts, line: str = "") -> Self:
        """Return the parts with a line."""
        typed = super().__new__(cls, parts)
        typed.line = line
        return typed


def check_method(method: Any) -> None:
    """Raise `InputError` unless `compose`, a recipe or `switch` made the method."""
    if isinstance(method, str):
        raise InputError(
            f"method = '{method}': not a method; make one with compose(...), fedntd() and the "
            f'like, or give its name in the overrides: run(JOB, {{"method": "{method}"}})'
        )
    for parts in in_turn(method):
        if not isinstance(parts, tuple) or not _has_average(parts):
            raise InputError(
                f"method = {told(parts)}: not a method; make one with compose(...), fedntd() and "
                "the like, or switch"
            )
    for part in all_parts(method):
        # This raises an error for a part that a job could not record.
        table(part)


def write_method(method: Method) -> Any:
    """Return a method in the form that `read_method` reads.

    >>> from rayfed.methods import fedavg, switch
    >>> method = switch(fedavg(), read_method("fedntd"), at=51)
    >>> read_method(write_method(method)) == method
    True
    """
    if not isinstance(method, Switch):
        return _tables(method)
    entries = []
    for index, (_, parts) in enumerate(method.stages):
        entry: dict[str, Any] = {"method": _tables(parts)}
        if index + 1 < len(method.stages):
            entry = {"until": method.stages[index + 1][0] - 1, **entry}
        entries.append(entry)
    return entries


def _tables(parts: Parts) -> list[dict[str, Any]]:
    """Return each part as a table with its name."""
    return [{"name": name_in(PARTS, type(part)), **table(part)} for part in parts]


def _read_switch(entries: list[Any]) -> Method:
    """Return the method of a list of `{until = ROUND, method = ...}`."""
    allowed = [{"until", "method"}] * (len(entries) - 1) + [{"method"}]
    for entry, keys in zip(entries, allowed, strict=True):
        if not isinstance(entry, Mapping) or set(entry) != keys:
            form = (
                "each entry is {until = ROUND, method = ...}, and the last entry only "
                "{method = ...}"
            )
            raise InputError(f"method: {entry!r} in a list that changes in time: {form}")
    entry, rest = entries[0], entries[1:]
    if not rest:
        return read_method(entry["method"])
    until = entry["until"]
    if not isinstance(until, int) or until < 1:
        raise InputError(f"method.until = {until!r}: give the last round of this entry, 1 or more")
    next_until = rest[0].get("until")
    if isinstance(next_until, int) and next_until <= until:
        raise InputError(f"method.until = {next_until} follows {until}: rounds must grow")
    return switch(read_method(entry["method"]), _read_switch(rest), at=until + 1)


def _find(name: str) -> Callable[..., Part | Parts]:
    """Return the recipe or the class of a part with this name."""
    if name.lower() in GONE:
        # A run's job.toml may still have it.
        raise InputError(f"method '{name}' has left rayfed: {GONE[name.lower()]}")
    maker: Any = find(name, {**RECIPES, **PARTS}, "method")
    if not callable(maker) or (inspect.isclass(maker) and not issubclass(maker, Part)):
        raise InputError(
            f"method '{name}' is {told(maker)}; it must be a Part, or a function that returns parts"
        )
    return maker


def describe(method: Method) -> str:
    """Return a method as a line, with the values that are not defaults.

    The line is as in the job file, if that composes the method. Else it has the recipe, and the
    parts that the recipe lacks.

    >>> describe(read_method({"name": "fedntd", "beta": 0.5}))
    'fedntd beta = 0.5'
    >>> describe(read_method(["fedntd", "proximal"]))
    'fedntd + proximal'
    """
    if isinstance(method, Switch):
        line = describe(method.stages[0][1])
        for first_round, parts in method.stages[1:]:
            line += f"; from round {first_round} on: {describe(parts)}"
        return line
    if isinstance(method, Typed) and method.line:
        return method.line
    choices = list(_recipe_lines(method))
    if choices:
        # The line with the fewest additional parts is best, and then the shortest line: `fedlmd_tf`
        # is better than `fedlmd teacher = False`.
        _, _, line, missing = min(choices, key=lambda choice: choice[:3])
        return " + ".join([line, *map(_part_line, missing)])
    usual = [part for part in reversed(DEFAULTS) if part in method]
    line = " + ".join(_part_line(part) for part in method if part not in usual)
    if usual:
        line += f", with {' and '.join(name_in(PARTS, type(part)) for part in usual)}"
    return line


def _recipe_lines(method: Parts) -> Iterator[tuple[int, int, str, list[Part]]]:
    """Yield each recipe whose parts are all in a method, as a line.

    With it come the number of the method's parts that the recipe lacks, the length of the line,
    and, last, these parts.
    """
    values = _values(method)
    for name, recipe in RECIPES.items():
        defaults = _defaults(recipe)
        arguments = {key: values[key] for key in defaults if key in values}
        # A value may be of another part, and out of the range that this recipe allows.
        with suppress(InputError):
            parts = recipe(**arguments)
            if all(part in method for part in parts):
                line = _line(name, arguments, defaults)
                missing = [part for part in method if part not in parts]
                yield len(missing), len(line), line, missing


def _values(method: Parts) -> dict[str, Any]:
    """Return the values of all fields of a method's parts by name.

    If two parts have a field of this name, the first part's value counts.
    """
    values: dict[str, Any] = {}
    for part in reversed(method):
        for field in dataclasses.fields(part):  # type: ignore[arg-type]
            values[field.name] = getattr(part, field.name)
    return values


def _part_line(part: Part) -> str:
    """Return a part as a line, with the values that are not defaults."""
    return _line(name_in(PARTS, type(part)), table(part), _defaults(type(part)))


def document(name: str) -> str:
    """Return the docstring of a recipe or part; '' if it has none of its own.

    >>> document("fedavg").partition(".")[0]
    "Average the clients' weights, by their numbers of samples"
    """
    maker = _find(name)
    text = inspect.getdoc(maker) or ""
    # `dataclass` makes a docstring from the fields.
    is_made = text.startswith(f"{getattr(maker, '__name__', '')}(")
    return "" if is_made or text == inspect.getdoc(Part) else text


def _defaults(maker: Callable[..., Any]) -> dict[str, Any]:
    """Return the default of each parameter of a recipe or part."""
    return {
        name: parameter.default for name, parameter in inspect.signature(maker).parameters.items()
    }


def _line(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return a name, and the values that are not defaults."""
    changed = [f"{key} = {value!r}" for key, value in values.items() if value != defaults[key]]
    return f"{name} {', '.join(changed)}" if changed else name


def parameters(name: str) -> list[tuple[str, Any, str]]:
    """Return the name, default and sentence of each hyper-parameter of a recipe or part.

    >>> parameters("fedprox")
    [('mu', 0.01, "pull towards the round's global weights; 0 is FedAvg")]
    """
    maker: Any = _find(name)
    kinds: list[Any] = [maker] if inspect.isclass(maker) else [type(part) for part in maker()]
    sentences: dict[str, str] = {}
    for kind in reversed(kinds):
        for field in dataclasses.fields(kind):
            sentences[field.name] = sentence(kind, field.name)
    return [
        (parameter.name, parameter.default, sentences.get(parameter.name, ""))
        for parameter in inspect.signature(maker).parameters.values()
    ]
