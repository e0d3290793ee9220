"""Compare the user's modules as they were imported with their files, and send them to actors.

Python imports a module once, and its file may be edited afterwards. Then the file is not the code
that runs. A run records the files, so it begins only if they are the code that runs. It sends this
code to its actors, which may be started hours later.
"""

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import psutil

# The clock of a file's system may differ by so many seconds.
SLACK = 2.0
PLAIN = (bool, int, float, complex, str, bytes, type(None))
ABSENT = object()


@dataclass(frozen=True)
class Source:
    """A module of the user, as it was when the run began."""

    name: str
    file: str
    content: bytes


def edited(module: ModuleType, content: bytes) -> str:
    """Say in what an imported module differs from the content of its file; '' if in nothing.

    Comments and empty lines do not count.
    """
    file = str(module.__file__)
    if not _may_be_newer(file):
        return ""
    try:
        tree = ast.parse(content)
        compiled = compile(content, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return "Python cannot read it any more"
    written: dict[str, list[Any]] = {}
    for code in _inner_codes(compiled):
        written.setdefault(code.co_qualname, []).append(_effect_of(code))
    for name, function in _functions(vars(module), module.__name__):
        code = function.__code__
        if code.co_filename != file:
            continue
        if _effect_of(code) not in written.get(code.co_qualname, ()):
            return f"{name} is another function"
    return next(_other_values(tree.body, vars(module), ""), "")


def _may_be_newer(file: str) -> bool:
    """Say whether a file may have been written since this process began.

    No module was imported before the process began. If its time is unknown, the answer is yes.
    """
    try:
        began, state = psutil.Process().create_time(), os.stat(file)
    except (OSError, psutil.Error):
        return True
    return max(state.st_mtime, state.st_ctime) > began - SLACK


def _inner_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of all functions and classes in some code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner_codes(constant)


def _effect_of(code: CodeType) -> Any:
    """Return what a function's code does, without the lines on which it stands."""
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_effect_of(constant))
        else:
            constants.append((type(constant).__name__, _text(constant)))
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return code.co_code, counts, names, constants


def _text(constant: object) -> str:
    """Return a constant as text. A set is sorted, because its order changes with the process."""
    if isinstance(constant, frozenset):
        return repr(sorted(map(repr, constant)))
    return repr(constant)


def _functions(
    namespace: Mapping[str, Any], module: str, around: str = ""
) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions of a module and of its classes, with their names."""
    for name, value in list(namespace.items()):
        if isinstance(value, type):
            is_inner = value.__qualname__ == f"{around}{name}"
            if value.__module__ == module and is_inner:
                yield from _functions(vars(value), module, f"{around}{name}.")
            continue
        for function in _functions_of(value):
            if function.__module__ == module:
                yield f"{around}{name}", function


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the functions of a value: itself, what it wraps, and what a property calls."""
    candidates = [value, getattr(value, "__func__", None), getattr(value, "func", None)]
    if isinstance(value, property):
        candidates += [value.fget, value.fset, value.fdel]
    for candidate in candidates:
        while isinstance(candidate, FunctionType):
            yield candidate
            candidate = getattr(candidate, "__wrapped__", None)


def _other_values(
    body: Iterable[ast.stmt], namespace: Mapping[str, Any], around: str
) -> Iterator[str]:
    """Say which plain values the file has otherwise: constants, and defaults of functions.

    A constant is a name that is assigned once. `around` is the name of the class around, and a dot.
    """
    body = list(body)
    constants = _assigned_once(body)
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            inner = namespace.get(statement.name)
            if isinstance(inner, type):
                yield from _other_values(statement.body, vars(inner), f"{around}{statement.name}.")
        elif isinstance(statement, ast.FunctionDef):
            yield from _other_defaults(statement, namespace.get(statement.name), around)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            written = _literal(statement.value)
            for name in _targets(statement):
                value = namespace.get(name, ABSENT)
                is_plain = written is not ABSENT and type(value) in PLAIN
                if name in constants and is_plain and repr(value) != repr(written):
                    yield f"{around}{name} is {value!r} here, and {written!r} in the file"


def _assigned_once(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names to which statements assign one value, and which no function changes."""
    assigned: list[str] = []
    changing: set[str] = set()
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                assigned.append(node.id)
            elif isinstance(node, ast.Global):
                changing.update(node.names)
    return {name for name, count in Counter(assigned).items() if count == 1} - changing


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the names to which an assignment gives its value."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _other_defaults(node: ast.FunctionDef, value: Any, around: str) -> Iterator[str]:
    """Say which plain defaults of a function the file has otherwise."""
    function = next(_functions_of(value), None)
    if function is None or function.__qualname__ != f"{around}{node.name}":
        return
    defaults = function.__defaults__ or ()
    literals = [_literal(default) for default in node.args.defaults]
    if len(defaults) != len(literals):
        yield f"{around}{node.name} has other defaults"
        return
    for value, written in zip(defaults, literals, strict=True):
        if written is not ABSENT and type(value) in PLAIN and repr(value) != repr(written):
            yield f"a default of {around}{node.name} is {value!r} here, and {written!r} in the file"


def _literal(node: ast.expr) -> Any:
    """Return the plain value that an expression is; `ABSENT` if it is none."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return ABSENT
    return value if type(value) in PLAIN else ABSENT


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from the code of a `Source`, whatever its file has."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.name, source.file)
        self._content = source.content

    def get_data(self, path: str) -> bytes:
        if path == self.path:
            return self._content
        return super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        # After this error Python neither reads nor writes the compiled code of the file.
        raise OSError(path)


class Finder:
    """Finds the user's modules in sources, before Python looks for their files."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = {source.name: source for source in sources}

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        source = self._sources.get(name)
        if source is None:
            return None
        is_package = os.path.basename(source.file) == "__init__.py"
        inside = [os.path.dirname(source.file)] if is_package else None
        return importlib.util.spec_from_file_location(
            name, source.file, loader=_SourceLoader(source), submodule_search_locations=inside
        )


def import_from(sources: Iterable[Source]) -> None:
    """Import these modules from their sources from now on, in this process."""
    for finder in list(sys.meta_path):
        if isinstance(finder, Finder):
            with suppress(ValueError):
                sys.meta_path.remove(finder)
    sys.meta_path.insert(0, Finder(sources))
