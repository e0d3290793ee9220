"""Checked values from tables: frozen dataclasses for the tables of a job file and for parts.

The annotation of a field holds its type, its range and a sentence. This single declaration serves
as the check, the message, the list of keys and the documentation:

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

import datetime
import functools
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Ge as Ge
from annotated_types import Gt as Gt
from annotated_types import Le as Le
from annotated_types import Lt as Lt

from rayfed.base.errors import InputError, did_you_mean, nearest, refuse_secrets, spelled, told

T = TypeVar("T")
# The default of a key that must be given.
NEEDED = inspect.Parameter.empty
# For each kind of pydantic's errors: what the user should give.
WANTED = {
    "greater_than_equal": "{ge:.10g} or more",
    "greater_than": "more than {gt:.10g}",
    "less_than_equal": "{le:.10g} or less",
    "less_than": "less than {lt:.10g}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a table",
    "literal_error": "{expected}",
    "is_instance_of": "a {class}",
}


class UnknownKey(InputError):
    """A key that a table cannot have.

    The arguments are the table's place, the key, and all valid keys.
    """

    def __str__(self) -> str:
        where, key, *valid = self.args
        return f"{where or 'the job'}: unknown key '{key}'{did_you_mean(key, valid)}"


class Mistakes(InputError):
    """Several mistakes of a user, told in one message with a line for each."""

    def __init__(self, errors: Sequence[InputError]) -> None:
        self.errors: list[InputError] = []
        for error in errors:
            self.errors += error.errors if isinstance(error, Mistakes) else [error]
        super().__init__("\n".join(str(error) for error in self.errors))


def amended(error: InputError, amend: Callable[[InputError], InputError]) -> InputError:
    """Return an error whose message, or each of whose mistakes, `amend` has made clearer."""
    if isinstance(error, Mistakes):
        return Mistakes([amend(mistake) for mistake in error.errors])
    return amend(error)


class Checked:
    """A frozen dataclass that checks its fields when it is made.

    Raises `InputError`, with a line per mistake.
    """

    def __post_init__(self) -> None:
        own_fields = fields(self)  # type: ignore[arg-type]
        values = {f.name: getattr(self, f.name) for f in own_fields if f.init}
        for name, value in _validated(type(self), values, type(self).__name__).items():
            # The value may have changed: an int for a float field, for example, is a float now.
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Form:
    """A mark in an annotation: a job file writes this field in a special form."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    # The default as a job file would write it.
    default: str = ""
    # If the field is a table with a `name`: the known classes by name.
    kinds: Mapping[str, type] | None = field(default=None, hash=False)
    # To read it imports torch, which takes seconds.
    imports_torch: bool = False


class PathMark:
    """A mark in an annotation: the field is a path."""


class Key(NamedTuple):
    """A key of a job file."""

    # The steps of the name are joined with dots.
    name: str
    # This is NEEDED if there is no default.
    default: Any
    sentence: str
    is_path: bool = False
    # The name of the partition that takes this key.
    kind: str = ""


def build(maker: Callable[..., T], values: Mapping[str, Any], where: str, **given: Any) -> T:
    """Call `maker`, a dataclass or a function, with a table of `values`, and return the result.

    Names, types and ranges are checked. `given` are further arguments that a table cannot set, and
    that are not checked. `where` is the table's place in the job file, for messages. Raises
    `InputError`, with a line for each mistake in it and in its inner tables.
    """
    valid, takes_any = _parameters(maker, given)
    mistakes: list[InputError] = []
    names: list[str] = []
    for name in values:
        if name in given or (name not in valid and not takes_any):
            mistakes.append(UnknownKey(where, str(name), *valid))
        else:
            names.append(name)
    for name, parameter in valid.items():
        if parameter.default is NEEDED and name not in values:
            mistakes.append(InputError(_missing(maker, name, where)))

    # Plain values come first, so that their mistakes stand first.
    names.sort(key=lambda name: _mark(maker, name, Form) is not None)
    arguments: dict[str, Any] = {}
    for name in names:
        form = _mark(maker, name, Form)
        # The mistakes that are known already should be told at once.
        if mistakes and form is not None and form.imports_torch:
            continue
        try:
            value = _read(maker, name, values[name], _join(where, name))
            arguments |= _validated(maker, {name: value}, where)
        except InputError as error:
            mistakes.append(error)
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise Mistakes(mistakes)
    return maker(**given, **arguments)


def _parameters(
    maker: Callable[..., Any], given: Mapping[str, Any]
) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return what a table can set of a maker, and whether the maker takes any other key too."""
    valid: dict[str, inspect.Parameter] = {}
    takes_any = False
    for name, parameter in inspect.signature(maker).parameters.items():
        if name in given:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            valid[name] = parameter
    return valid, takes_any


def table(value: Any) -> dict[str, Any]:
    """Return a dataclass as the plain table that `build` reads.

    A field that is None is left out, because TOML cannot write it. Raises `InputError`, which names
    the field, for a value that a job cannot record.
    """
    plain: dict[str, Any] = {}
    for f in fields(value):
        item = getattr(value, f.name)
        form = _mark(type(value), f.name, Form)
        if form:
            plain[f.name] = form.write(item)
        elif isinstance(item, Checked):
            plain[f.name] = table(item)
        elif item is not None:
            plain[f.name] = _recorded(type(value), f.name, item)
        elif _default(f, None) is not None:
            where = f"{type(value).__name__}.{f.name}"
            raise InputError(
                f"{where} = None: a job cannot record None, and without a value the field has its "
                "default; make None the default, or give another value"
            )
    return plain


def _recorded(cls: type, name: str, item: Any) -> Any:
    """Return a field's value as a job file has it.

    Raises `InputError` if the field could not be read from it again as it was.
    """
    where = f"{cls.__name__}.{name}"
    if not isinstance(item, PurePath | Enum):
        return plain_value(item, where)
    text = str(item) if isinstance(item, PurePath) else plain_value(item.value, where)
    if _of_table(cls, name, text, text) != item:
        raise InputError(_unrecorded(where, item))
    return text


def plain_value(value: Any, where: str) -> Any:
    """Return a value of a table as JSON and TOML both have it.

    Tuples become lists, and NumPy's numbers become Python's. Raises `InputError`, with `where`, for
    a value that a job cannot record.

    >>> plain_value((1, 2.5), "train.steps")
    [1, 2.5]
    """
    value = _pythons(value)
    if type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [plain_value(item, f"{where}.{index}") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise InputError(f"{where}: the key {told(key)} of a table is no text; give text")
        return {key: plain_value(item, f"{where}.{key}") for key, item in value.items()}
    raise InputError(_unrecorded(where, value))


def _unrecorded(where: str, value: Any) -> str:
    """Return the message about a value that a job cannot record."""
    told_value = " ".join(told(value).split())
    if isinstance(value, datetime.date | datetime.time):
        return (
            f"{where} = {value}: a job has no dates and times; give it as text, in quotes: "
            f"'{value}'"
        )
    kind = type(value)
    return (
        f"{where} = {told_value}: a job cannot record this value, of the type {told(kind)}, and so "
        "a run could not be resumed or checked; give numbers, text, true or false, or lists and "
        "tables of these: for a function its name, or choose among functions of your module by a "
        "text"
    )


def _pythons(value: Any) -> Any:
    """Return a single number or text of NumPy as Python's, and any other value as it is."""
    is_numpys = type(value).__module__ == "numpy" and hasattr(value, "dtype")
    if is_numpys and getattr(value, "ndim", None) == 0 and value.dtype.kind in "biufU":
        return value.item()
    return value


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Yield every key that a table can have, with the keys of its inner tables."""
    for f in fields(cls):
        name, hint = _join(prefix, f.name), _hints(cls)[f.name]
        form = _mark(cls, f.name, Form)
        if form and form.kinds is not None:
            yield Key(f"{name}.name", form.default, sentence(cls, f.name))
            for kind, inner in form.kinds.items():
                for key in keys(inner, name):
                    yield key._replace(kind=kind)
        elif is_dataclass(hint):
            yield from keys(hint, name)  # type: ignore[arg-type]
        else:
            is_path = _mark(cls, f.name, PathMark) is not None
            yield Key(name, _default(f, form), sentence(cls, f.name), is_path)


def _default(f: Field[Any], form: Form | None) -> Any:
    """Return the default of a field as a job file would write it; `NEEDED` if there is none."""
    if form:
        return form.default
    if f.default_factory is not MISSING:
        return f.default_factory()
    return NEEDED if f.default is MISSING else f.default


def nearest_key(name: str, keys: Iterable[Key]) -> str:
    """Return the key or the table that a wrong key probably means; '' if none is near.

    The last steps of the keys are compared.

    >>> learning_rate = Key("train.lr", 0.01, "learning rate of the first round")
    >>> keys = [learning_rate, Key("train.num_rounds", 20, "rounds")]
    >>> [nearest_key(name, keys) for name in ("lr", "rounds", "x")]
    ['train.lr', 'train.num_rounds', '']
    """
    # The complete name of a key or a table, by its last step.
    names: dict[str, str] = {}
    for key in keys:
        steps = key.name.split(".")
        for end in range(1, len(steps) + 1):
            names.setdefault(steps[end - 1], ".".join(steps[:end]))
    step = name.rpartition(".")[2].lower()
    return names.get(nearest(step, names, 0.6), "")


def sentence(cls: Callable[..., Any], name: str) -> str:
    """Return the sentence in a field's annotation, or ''."""
    return _mark(cls, name, str) or ""


def find(name: str, known: Mapping[str, T], kind: str, more: str = "") -> T:
    """Return the value with this name, which is in `known` or can be imported.

    The name of a value that is imported is `package.module:attribute`. `kind` says in messages what
    the name stands for, and `more` what else the user can give. Raises `InputError` if there is no
    such value.
    """
    name = spelled(name, known)
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(
            f"unknown {kind} '{name}'{did_you_mean(name, known)}, or give "
            f"'package.module:name'{more}"
        )
    # To import or to call some of these has side effects.
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise InputError(
            f"{kind} '{name}': '{module_name}' is a module of Python itself; name a module of yours"
        )
    module = _imported(module_name, f"{kind} '{name}'")
    value: Any = module
    try:
        for step in attribute.split("."):
            value = getattr(value, step)
    except AttributeError as error:
        names = _written_in(module)
        near = did_you_mean(attribute, names) if names else ""
        raise InputError(f"{kind} '{name}': {error}{near}") from error
    if callable(value) and _home(value) in sys.stdlib_module_names:
        where = "a function or a class that was written for rayfed, in a module of yours"
        raise InputError(
            f"{kind} '{name}' is {told(value)}, which is Python's own or built in; name {where}"
        )
    return value


def find_dataclass(name: str, known: Mapping[str, type], kind: str, method: str, form: str) -> Any:
    """Return the dataclass with this name, which is in `known` or can be imported.

    It must have the `method`, which a message writes as `form`. `kind` is as in `find`. Raises
    `InputError` if there is no such class.
    """
    found: Any = find(name, known, kind)
    is_class = inspect.isclass(found) and is_dataclass(found)
    if not (is_class and callable(getattr(found, method, None))):
        raise InputError(
            f"{kind} '{name}' is {told(found)}; it must be a frozen dataclass with a method "
            f"`{form}`"
        )
    return found


def _imported(module_name: str, wanted: str) -> Any:
    """Import a module. Raises `InputError`, which says what is `wanted` from the module."""
    try:
        return importlib.import_module(module_name)
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}"
        raise InputError(f"{wanted}: Python cannot read {place}: {error.msg}") from error
    except InputError as error:
        # A class in the module is refused, and it may be another one than the wanted class.
        raise InputError(
            f"module '{module_name}': {error} (until then nothing of the module can be used, such "
            f"as {wanted})"
        ) from error
    except Exception as error:
        # The user's module may raise anything.
        place = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            place = f"; there is no {error.name}.py in this folder ({os.getcwd()})"
        reason = f"{type(error).__name__}: {error}{place}"
        raise InputError(f"{wanted}: importing '{module_name}' fails: {reason}") from error


def _written_in(module: Any) -> list[str]:
    """Return the public names of the functions and classes that a module defines itself."""
    names = []
    for name, value in vars(module).items():
        if name.startswith("_") or not callable(value):
            continue
        if getattr(value, "__module__", None) == module.__name__:
            names.append(name)
    return names


def _home(value: Any) -> str:
    """Return the package in which something that can be called was written.

    It is `builtins` if it was not written in Python.
    """
    if isinstance(value, functools.partial):
        value = value.func
    else:
        # A bound method has its function here.
        value = getattr(value, "__func__", value)
    value = inspect.unwrap(value)
    # An object with `__call__` was written where its class was written.
    written = value if inspect.isfunction(value) or inspect.isclass(value) else type(value)
    return str(written.__module__).partition(".")[0]


def snake_case(name: str) -> str:
    """Return a class's name as job files write it.

    >>> snake_case("ServerMomentum")
    'server_momentum'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def name_in(known: Mapping[str, Any], value: Any) -> str:
    """Return the name under which `find` finds a class or function."""
    for name, candidate in known.items():
        if candidate is value:
            return name
    return f"{value.__module__}:{value.__qualname__}"


def named(value: Any, where: str, default: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of `"name"` or `{name = "name", option = value, ...}`.

    A table without a name has the name `default`. Raises `InputError` if there is no name.

    >>> named({"name": "fedprox", "mu": 0.1}, "method")
    ('fedprox', {'mu': 0.1})
    """
    if isinstance(value, str):
        return value, {}
    if not isinstance(value, Mapping):
        raise InputError(f"{where} = {told(value)}: give a name, or a table with a name")
    options = dict(value)
    name = options.pop("name", default)
    if not isinstance(name, str):
        raise InputError(
            f"{where}: {told(value)} has no name (such as {{name = '{default or 'fedntd'}'}})"
        )
    return name, options


def _read(maker: Callable[..., Any], name: str, value: Any, place: str) -> Any:
    """Return a value of a table as its field holds it: a table becomes a dataclass."""
    form = _mark(maker, name, Form)
    if form:
        return form.read(value)
    hint = _hints(maker).get(name)
    if not (isinstance(hint, type) and issubclass(hint, Checked)) or isinstance(value, hint):
        return value
    if not isinstance(value, Mapping):
        names = ", ".join(f.name for f in fields(hint))  # type: ignore[arg-type]
        raise InputError(
            f"{place} = {told(value)}: this is a table, [{place}], with the keys {names}"
        )
    return build(hint, value, place)


def _validated(maker: Callable[..., Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values in the types that the annotations name.

    Raises `InputError`, with a line per mistake.
    """
    # Imported here, because this takes a tenth of a second, and `rayfed keys` does not need it.
    from pydantic import ValidationError

    mistakes, checked = [], dict(values)
    for name, item in values.items():
        refuse_secrets(item, _join(where, name))
        value = _pythons(item)
        checked[name] = value
        adapter = _adapter(maker, name)
        if adapter is None:
            continue
        try:
            checked[name] = adapter.validate_python(value, strict=True)
        except ValidationError as error:
            checked[name] = _of_table(maker, name, value, NEEDED)
            if checked[name] is NEEDED:
                mistakes += _explain(error.errors(), _join(where, name))
    if mistakes:
        raise InputError("\n".join(mistakes))
    return checked


def _of_table(maker: Callable[..., Any], name: str, value: Any, default: Any) -> Any:
    """Return the value that a table writes in a plain form: a tuple, a path, a member of an Enum.

    Returns `default` if this is no form of the field's type.
    """
    from pydantic import ValidationError

    adapter = _adapter(maker, name)
    if adapter is None or not isinstance(value, str | int | float | list):
        return default
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except (TypeError, ValueError, ValidationError):
        return default


@functools.cache
def _adapter(maker: Callable[..., Any], name: str) -> Any:
    """Return the check of one parameter; None if its form or its own class has checked it."""
    from pydantic import ConfigDict, TypeAdapter

    hint = _hints(maker).get(name, Any)
    if _mark(maker, name, Form) or (isinstance(hint, type) and is_dataclass(hint)):
        return None
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))


@functools.cache
def _hints(maker: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotation of each parameter."""
    try:
        return get_type_hints(maker, include_extras=True)
    except NameError:
        # The user's module imports a type for type checkers only.
        return {}


def _mark(maker: Callable[..., Any], name: str, kind: type[T]) -> T | None:
    """Return the first value of a type in a parameter's annotation; None if there is none."""
    hint = _hints(maker).get(name)
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def _join(where: str, name: str) -> str:
    """Return the dotted name of a key in a table, where '' is the job itself."""
    return f"{where}.{name}" if where else name


def _missing(maker: Callable[..., Any], name: str, where: str) -> str:
    """Return the message about a value that must be given."""
    message, text = f"{_join(where, name)} is missing", sentence(maker, name)
    return f"{message}: {text}" if text else message


def _explain(errors: Iterable[Any], where: str) -> list[str]:
    """Return a line for each value that is wrong.

    For each type that a value may have, pydantic gives an error of its own.
    """
    # What the user can give instead of each value.
    remedies: dict[str, list[str]] = {}
    for error in errors:
        steps = [str(step) for step in error["loc"] if isinstance(step, int)]
        value = f"{'.'.join([where, *steps])} = {told(error['input'])}"
        remedies.setdefault(value, []).append(_wanted(error))
    lines = []
    for value, choices in remedies.items():
        remedy = " or ".join(choices).replace(" or give ", " or ")
        lines.append(f"{value}: {remedy}")
    return lines


def _wanted(error: Any) -> str:
    """Say what to do about one of pydantic's errors."""
    kind, value = error["type"], error["input"]
    form = WANTED.get(kind)
    if form is None:
        return str(error["msg"].removeprefix("Value error, "))
    wanted = f"give {form.format(**error.get('ctx', {}))}"
    if kind == "list_type":
        return f"{wanted}, such as [{told(value)}]"
    if kind == "literal_error":
        near = nearest(str(value), wanted.split("'")[1::2], 0.6)
        return f"{wanted}; did you mean '{near}'?" if near else wanted
    return wanted
