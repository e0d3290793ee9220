"""Checked values from tables: frozen dataclasses, for the tables of a job file and for the parts of a method.

A field's annotation holds its type, its range and a sentence. This single declaration serves as the check, the message,
the list of keys and the documentation:

>>> @dataclass(frozen=True)
... class Proximal(Checked):
...     mu: Annotated[float, Ge(0), "strength of the pull towards the global weights"] = 0.01
>>> build(Proximal, {"mu": 1}, "method")
Proximal(mu=1.0)
>>> build(Proximal, {"nu": 0.1}, "method")
Traceback (most recent call last):
    ...
rayfed.base.values.UnknownKey: method: unknown key 'nu'; did you mean 'mu'? (valid: mu)
>>> Proximal(mu=-1)
Traceback (most recent call last):
    ...
rayfed.base.errors.InputError: Proximal.mu = -1: give 0 or more
"""

import difflib
import functools
import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from rayfed.base.errors import InputError, did_you_mean, refuse_secrets, spelled, told

log = logging.getLogger(__name__)

__all__ = [
    "Checked", "Form", "Ge", "Gt", "Le", "Lt", "PathMark", "UnknownKey", "build", "find", "keys", "name_in", "named",
    "nearest", "sentence", "snake_case", "table",
]  # fmt: skip

T = TypeVar("T")
PLAIN = re.compile(r"-?[\d.]+|(?i:true|false)")  # what stands without quotes in TOML
NEEDED = inspect.Parameter.empty  # in place of a default
WANTED = {  # a kind of pydantic's errors: what to give
    "greater_than_equal": "{ge:.10g} or more", "greater_than": "more than {gt:.10g}",
    "less_than_equal": "{le:.10g} or less", "less_than": "less than {lt:.10g}", "finite_number": "a finite number",
    "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text",
    "list_type": "a list", "dict_type": "a table", "literal_error": "{expected}", "is_instance_of": "a {class}",
}  # fmt: skip


class UnknownKey(InputError):
    """A key that a table cannot have. Its arguments: the table's place, the key, and all valid keys."""

    def __str__(self) -> str:
        where, key, *valid = self.args
        return f"{where or 'the job'}: unknown key '{key}'{did_you_mean(key, valid)}"


class Checked:
    """A frozen dataclass that checks its fields when it is made. Raises `InputError`, with a line per mistake."""

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        for name, value in _validated(type(self), given, type(self).__name__).items():
            object.__setattr__(self, name, value)  # a whole number for a float, for example, is a float now


@dataclass(frozen=True)
class Form:
    """In an annotation: a job file writes this field in a special form."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    default: str = ""  # as a job file would write it
    kinds: Mapping[str, type] | None = field(default=None, hash=False)  # of a table with a `name`: the known classes

    def made(self) -> Any:
        """The default."""
        return self.read(self.default)


class PathMark:
    """In an annotation: the field is a path."""


class Key(NamedTuple):
    """A key of a job file, dotted."""

    name: str
    default: Any  # NEEDED if there is none
    sentence: str
    is_path: bool = False
    kind: str = ""  # the name of the partition that takes this key


def build(maker: Callable[..., T], values: Mapping[str, Any], where: str, **given: Any) -> T:
    """Call `maker`, a dataclass or a function, with a table of `values`. Names, types and ranges are checked.

    `given` are further arguments, unchecked, that a table cannot set. `where` is the table's place in the job file, for
    messages. Raises `InputError`, with a line per mistake.
    """
    parameters = {name: p for name, p in inspect.signature(maker).parameters.items() if name not in given}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    valid = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for key in values:
        if key in given or (key not in valid and not takes_any):
            raise UnknownKey(where, str(key), *valid)
    if missing := [name for name, p in valid.items() if p.default is NEEDED and name not in values]:
        texts = {_join(where, name): sentence(maker, name) for name in missing}
        raise InputError("\n".join(f"{key} is missing{text and ': ' + text}" for key, text in texts.items()))
    ready = {name: _read(maker, name, value, _join(where, name)) for name, value in values.items()}
    return maker(**given, **_validated(maker, ready, where))


def table(value: Any) -> dict[str, Any]:
    """A dataclass as the plain table that `build` reads. None is left out: TOML cannot write it."""
    plain = {}
    for f in fields(value):
        if (item := getattr(value, f.name)) is not None:
            form = _mark(type(value), f.name, Form)
            plain[f.name] = form.write(item) if form else table(item) if is_dataclass(item) else item
    return plain


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Every key that a table can have, with the keys of its inner tables."""
    for f in fields(cls):
        name, hint = _join(prefix, f.name), _hints(cls)[f.name]
        form = _mark(cls, f.name, Form)
        if form and form.kinds is not None:
            yield Key(f"{name}.name", form.default, sentence(cls, f.name))
            for kind, inner in form.kinds.items():
                yield from (key._replace(kind=kind) for key in keys(inner, name))
        elif is_dataclass(hint):
            yield from keys(hint, name)  # type: ignore[arg-type]
        else:
            made = form.default if form else f.default if f.default_factory is MISSING else f.default_factory()
            default = NEEDED if made is MISSING else made
            yield Key(name, default, sentence(cls, f.name), _mark(cls, f.name, PathMark) is not None)


def nearest(given: str, known: Iterable[Key]) -> str:
    """The key or the table that a wrong key probably means: by its last step, else by its meaning; '' if none is near.

    >>> known = [Key("train.lr", 0.01, "learning rate of the first round"), Key("train.num_rounds", 20, "rounds")]
    >>> nearest("lr", known), nearest("rounds", known), nearest("train.learning_rate", known), nearest("x", known)
    ('train.lr', 'train.num_rounds', 'train.lr', '')
    """
    places: dict[str, str] = {}  # the last step of a key or a table: the whole of it
    meant = ""
    last = given.rpartition(".")[2].lower()
    for key in known:
        steps = key.name.split(".")
        for end in range(1, len(steps) + 1):
            places.setdefault(steps[end - 1], ".".join(steps[:end]))
        if not meant and f" {last.replace('_', ' ')} " in f" {key.sentence} " and len(last) > 3:
            meant = key.name
    first = [name for name, place in places.items() if name == place and "." not in given]
    near = [last] if last in places else difflib.get_close_matches(last, first, n=1, cutoff=0.75)
    near = near or difflib.get_close_matches(last, places, n=1, cutoff=0.6)
    return places[near[0]] if near else meant


def sentence(cls: Callable[..., Any], name: str) -> str:
    """The sentence in a field's annotation, or ''."""
    return _mark(cls, name, str) or ""


def find(name: str, known: Mapping[str, T], kind: str) -> T:
    """The value with this name: one of `known`, or an importable `package.module:attribute`. Raises `InputError`."""
    if (name := spelled(name, known)) in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(f"unknown {kind} '{name}'{did_you_mean(name, known)}, or give 'package.module:name'")
    if module.partition(".")[0] in sys.stdlib_module_names:  # to import some of these does something, or to call them
        raise InputError(f"{kind} '{name}': '{module}' is a module of Python itself; name a module of yours")
    try:
        found: Any = importlib.import_module(module)
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}"
        raise InputError(f"{kind} '{name}': Python cannot read {place}: {error.msg}") from error
    except Exception as error:  # the user's module may raise anything
        looked = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            looked = f"; there is no {error.name}.py in this folder ({os.getcwd()})"
        why = f"{type(error).__name__}: {error}{looked}"
        raise InputError(f"{kind} '{name}': importing '{module}' fails: {why}") from error
    _warn_of_another(module.partition(".")[0])
    try:
        found = functools.reduce(getattr, attribute.split("."), found)
    except AttributeError as error:
        raise InputError(f"{kind} '{name}': {error}") from error
    if callable(found) and not _is_ours(found):
        where = "a function or a class that was written for rayfed, in a module of yours"
        raise InputError(f"{kind} '{name}' is {told(found)}, which is Python's own or built in; name {where}")
    return found


@functools.cache  # a job is read several times, and the user is told once
def _warn_of_another(module: str) -> None:
    """Warn where a module came from elsewhere, though the working folder has a file of its name."""
    here = os.path.join(os.getcwd(), f"{module}.py")
    imported = getattr(sys.modules[module], "__file__", None)
    if imported and os.path.isfile(here) and not os.path.samefile(here, imported):
        log.warning("%s comes from %s, not from %s.py in this folder", module, imported, module)


def _is_ours(found: Any) -> bool:
    """Whether something that can be called was written in Python, and not for Python's standard library."""
    found = found.func if isinstance(found, functools.partial) else getattr(found, "__func__", found)  # of a method
    found = inspect.unwrap(found)
    made = found if inspect.isfunction(found) or inspect.isclass(found) else type(found)  # an object with __call__
    return str(made.__module__).partition(".")[0] not in sys.stdlib_module_names


def snake_case(name: str) -> str:
    """A class's name as job files write it.

    >>> snake_case("ServerMomentum")
    'server_momentum'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def name_in(known: Mapping[str, Any], value: Any) -> str:
    """The name under which `find` finds a class or function."""
    return next((name for name, one in known.items() if one is value), f"{value.__module__}:{value.__qualname__}")


def named(given: Any, where: str, default: str | None = None) -> tuple[str, dict[str, Any]]:
    """The name and the options of `"name"` or `{name = "name", option = value, ...}`."""
    if not isinstance(given, str | Mapping):
        raise InputError(f"{where} = {told(given)}: give a name, or a table with a name")
    options = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", default)
    if not isinstance(name, str):
        raise InputError(f"{where}: {told(given)} has no name (such as {{name = '{default or 'fedntd'}'}})")
    return name, options


def _read(maker: Callable[..., Any], name: str, value: Any, place: str) -> Any:
    """A value of a table as its field holds it: a table in it becomes a dataclass."""
    if form := _mark(maker, name, Form):
        return form.read(value)
    hint = _hints(maker).get(name)
    if not (isinstance(hint, type) and issubclass(hint, Checked)) or isinstance(value, hint):
        return value
    if not isinstance(value, Mapping):
        names = ", ".join(f.name for f in fields(hint))  # type: ignore[arg-type]
        raise InputError(f"{place} = {told(value)}: this is a table, [{place}], with the keys {names}")
    return build(hint, value, place)


def _validated(maker: Callable[..., Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values, in the types that the annotations name."""
    from pydantic import ValidationError  # a tenth of a second to import, and `rayfed keys` needs none of it

    mistakes, ready = [], dict(values)
    for name, value in values.items():
        refuse_secrets(value, _join(where, name))
        try:
            if adapter := _adapter(maker, name):
                ready[name] = adapter.validate_python(value, strict=True)
        except ValidationError as error:
            mistakes += _explain(error.errors(), _join(where, name))
    if mistakes:
        raise InputError("\n".join(mistakes))
    return ready


@functools.cache
def _adapter(maker: Callable[..., Any], name: str) -> Any:
    """The check of one parameter; None where its form or its own class has checked it."""
    from pydantic import ConfigDict, TypeAdapter

    hint = _hints(maker).get(name, Any)
    if _mark(maker, name, Form) or (isinstance(hint, type) and is_dataclass(hint)):
        return None
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))


@functools.cache
def _hints(maker: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(maker, include_extras=True)
    except NameError:  # a type that the user's module imports for type checkers only
        return {}


def _mark(maker: Callable[..., Any], name: str, kind: type[T]) -> T | None:
    """The first value of a type in a parameter's annotation."""
    hint = _hints(maker).get(name)
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _explain(errors: Iterable[Any], where: str) -> list[str]:
    """A line for each value that is wrong. For each type that a value may have, pydantic gives an error of its own."""
    wanted: dict[str, list[str]] = {}
    for error in errors:
        place = ".".join([where, *(str(step) for step in error["loc"] if isinstance(step, int))])
        form = WANTED.get(error["type"])
        what = "give " + form.format(**error.get("ctx", {})) if form else error["msg"].removeprefix("Value error, ")
        plain = error["input"] if error["type"] in ("int_type", "float_type", "bool_type") else None
        what += "; write it without quotes" if isinstance(plain, str) and PLAIN.fullmatch(plain) else ""
        what += _nearest(error["input"], error["ctx"]["expected"]) if error["type"] == "literal_error" else ""
        what += f", such as [{told(error['input'])}]" if error["type"] == "list_type" else ""
        wanted.setdefault(f"{place} = {told(error['input'])}: ", []).append(what)
    return [start + " or ".join(whats).replace(" or give ", " or ") for start, whats in wanted.items()]


def _nearest(given: Any, names: str) -> str:
    """Which of the 'names' in a text the given one probably means."""
    near = difflib.get_close_matches(str(given).lower(), names.split("'")[1::2], n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
