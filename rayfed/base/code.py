"""The code of the user's modules: as it was imported, and as the files have it now.

Python imports a module once, and its file may be edited afterwards. Then the file is not the code
that runs. A run records the files, so it begins only where they are the code that runs; and it
sends that code to its actors, which may be started hours later.
"""

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

# Seconds by which the clock of a file's system may differ.
SLACK = 2.0
PLAIN = (bool, int, float, complex, str, bytes, type(None))
ABSENT = object()


@dataclass(frozen=True)
class Source:
    """A module of the user's, as it was when the run began."""

    name: str
    file: str
    content: bytes


def edited(module: ModuleType, content: bytes) -> str:
    """What of an imported module is not as the content of its file has it, in words; '' where
    nothing is.

    A change of comments or of empty lines is none.
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
    for code in _within(compiled):
        written.setdefault(code.co_qualname, []).append(_print_of(code))
    for name, function in _functions(vars(module), module.__name__):
        code = function.__code__
        of_file = code.co_filename == file and code.co_qualname
        if of_file and _print_of(code) not in written.get(code.co_qualname, ()):
            return f"{name} is another function"
    return next(_other_values(tree.body, vars(module), ""), "")


def _may_be_newer(file: str) -> bool:
    """Whether a file may have been written since this process began: no module was imported before
    that.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime ")
        )
        state = os.stat(file)
    except (OSError, ValueError, IndexError, StopIteration):
        return True
    began = boot + ticks / os.sysconf("SC_CLK_TCK")
    return max(state.st_mtime, state.st_ctime) > began - SLACK


def _within(code: CodeType) -> Iterator[CodeType]:
    """All functions' code in some code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _within(constant)


def _print_of(code: CodeType) -> Any:
    """What a function's code does, without the lines on which it stands."""
    constants = [
        _print_of(each) if isinstance(each, CodeType) else (type(each).__name__, _text(each))
        for each in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return code.co_code, counts, names, constants


def _text(constant: object) -> str:
    if isinstance(constant, frozenset):
        return repr(sorted(map(repr, constant)))
    return repr(constant)


def _functions(
    namespace: Mapping[str, Any], module: str, around: str = ""
) -> Iterator[tuple[str, FunctionType]]:
    """The functions of a module, and of its classes, with their names."""
    for name, value in list(namespace.items()):
        if isinstance(value, type):
            is_inner = value.__qualname__ == f"{around}{name}"
            if value.__module__ == module and is_inner:
                yield from _functions(vars(value), module, f"{around}{name}.")
            continue
        for function in _of(value):
            if function.__module__ == module:
                yield f"{around}{name}", function


def _of(value: Any) -> Iterator[FunctionType]:
    """The functions of what stands under a name: itself, what it wraps, what a property calls."""
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
    """Plain values that have other values in the file: assigned once, or defaults of functions."""
    body = list(body)
    assigned = [
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    changing = {
        name
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Global)
        for name in node.names
    }
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            inner = namespace.get(statement.name)
            if isinstance(inner, type):
                yield from _other_values(statement.body, vars(inner), f"{around}{statement.name}.")
        elif isinstance(statement, ast.FunctionDef):
            yield from _other_defaults(statement, namespace.get(statement.name), around)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if not isinstance(target, ast.Name):
                    continue
                name = target.id
                here, there = namespace.get(name, ABSENT), _literal(statement.value)
                is_known = there is not ABSENT and type(here) in PLAIN
                once = assigned.count(name) == 1 and name not in changing
                if once and is_known and repr(here) != repr(there):
                    yield f"{around}{name} is {here!r} here, and {there!r} in the file"


def _other_defaults(node: ast.FunctionDef, value: Any, around: str) -> Iterator[str]:
    function = next(_of(value), None)
    if function is None or function.__qualname__ != f"{around}{node.name}":
        return
    here = function.__defaults__ or ()
    there = [_literal(default) for default in node.args.defaults]
    if len(here) != len(there):
        yield f"{around}{node.name} has other defaults"
        return
    for mine, written in zip(here, there, strict=True):
        if written is not ABSENT and type(mine) in PLAIN and repr(mine) != repr(written):
            yield f"a default of {around}{node.name} is {mine!r} here, and {written!r} in the file"


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return ABSENT
    return value if type(value) in PLAIN else ABSENT


class _Given(importlib.machinery.SourceFileLoader):
    """Loads a module from given code, whatever its file has."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.name, source.file)
        self._content = source.content

    def get_data(self, path: str) -> bytes:
        if path == self.path:
            return self._content
        return super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        # Then Python neither reads nor writes compiled code beside the file, which is of the file.
        raise OSError(path)


class Finder:
    """Finds the user's modules in given code, before Python looks for their files."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = {source.name: source for source in sources}

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        source = self._sources.get(name)
        if source is None:
            return None
        is_package = os.path.basename(source.file) == "__init__.py"
        inside = [os.path.dirname(source.file)] if is_package else None
        return importlib.util.spec_from_file_location(
            name, source.file, loader=_Given(source), submodule_search_locations=inside
        )


def import_from(sources: Iterable[Source]) -> None:
    """Import these modules from their given code from now on, in this process."""
    for finder in list(sys.meta_path):
        if isinstance(finder, Finder):
            with suppress(ValueError):
                sys.meta_path.remove(finder)
    sys.meta_path.insert(0, Finder(sources))
