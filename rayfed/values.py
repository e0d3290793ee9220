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
rayfed.errors.InputError: method: unknown key 'nu'; did you mean 'mu'? (valid: mu)
>>> Proximal(mu=-1)
Traceback (most recent call last):
    ...
rayfed.errors.InputError: Proximal.mu = -1: input should be greater than or equal to 0
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from rayfed.errors import InputError, did_you_mean

__all__ = [
    "Checked", "Form", "Ge", "Gt", "Le", "Lt", "PathMark", "build", "find", "keys", "name_in", "named", "sentence",
    "table",
]  # fmt: skip

T = TypeVar("T")
NEEDED = inspect.Parameter.empty  # in place of a default


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
            raise InputError(f"{where or 'the job'}: unknown key '{key}'{did_you_mean(str(key), valid)}")
    missing = [name for name, p in valid.items() if p.default is NEEDED and name not in values]
    if missing:
        raise InputError("\n".join(f"{_join(where, name)} is missing" for name in missing))
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


def sentence(cls: type, name: str) -> str:
    """The sentence in a field's annotation, or ''."""
    return _mark(cls, name, str) or ""


def find(name: str, known: Mapping[str, T], kind: str) -> T:
    """The value with this name: one of `known`, or an importable `package.module:attribute`. Raises `InputError`."""
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(f"unknown {kind} '{name}'{did_you_mean(name, known)}, or give 'package.module:name'")
    try:
        found: Any = importlib.import_module(module)
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}"
        raise InputError(f"{kind} '{name}': Python cannot read {place}: {error.msg}") from error
    except Exception as error:  # the user's module may raise anything
        raise InputError(f"{kind} '{name}': importing '{module}' fails: {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, attribute.split("."), found)
    except AttributeError as error:
        raise InputError(f"{kind} '{name}': {error}") from error


def name_in(known: Mapping[str, Any], value: Any) -> str:
    """The name under which `find` finds a class or function."""
    return next((name for name, one in known.items() if one is value), f"{value.__module__}:{value.__qualname__}")


def named(given: Any, where: str, default: str | None = None) -> tuple[str, dict[str, Any]]:
    """The name and the options of `"name"` or `{name = "name", option = value, ...}`."""
    if not isinstance(given, str | Mapping):
        raise InputError(f"{where} = {given!r}: give a name, or a table with a name")
    options = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", default)
    if not isinstance(name, str):
        raise InputError(f"{where}: {given!r} has no name (such as {{name = '{default or 'fedntd'}'}})")
    return name, options


def _read(maker: Callable[..., Any], name: str, value: Any, place: str) -> Any:
    """A value of a table as its field holds it: a table in it becomes a dataclass."""
    if form := _mark(maker, name, Form):
        return form.read(value)
    hint = _hints(maker).get(name)
    if not (isinstance(hint, type) and issubclass(hint, Checked)) or isinstance(value, hint):
        return value
    if not isinstance(value, Mapping):
        raise InputError(f"{place} = {value!r}: this is a table, [{place}]")
    return build(hint, value, place)


def _validated(maker: Callable[..., Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values, in the types that the annotations name."""
    from pydantic import ValidationError  # a tenth of a second to import, and `rayfed keys` needs none of it

    mistakes, ready = [], dict(values)
    for name, value in values.items():
        try:
            if adapter := _adapter(maker, name):
                ready[name] = adapter.validate_python(value, strict=True)
        except ValidationError as error:
            mistakes += [_explain(e, _join(where, name)) for e in error.errors()]
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


def _explain(error: Any, where: str) -> str:
    place = ".".join([where, *(str(step) for step in error["loc"])])
    message = error["msg"][:1].lower() + error["msg"][1:]
    return f"{place} = {error['input']!r}: {message.removeprefix('value error, ')}"
