"""Arguments of several commands, and their completion by the shell."""

from __future__ import annotations

import ast
import os
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from rayfed.base.errors import InputError
from rayfed.runtime.private import TRUST

if TYPE_CHECKING:
    from rayfed.job import Job

Overrides = tuple[tuple[str, Any], ...]


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Job files, up to two folders down."""
    folder = Path(incomplete if incomplete.endswith("/") else os.path.dirname(incomplete))
    found = sorted(str(file) for depth in ("", "*/", "*/*/") for file in folder.glob(f"{depth}*.toml"))
    return starting(incomplete.removeprefix("./"), found) or [CompletionItem(incomplete, type="file")]


def complete_set(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The job file's keys; where none of them fits, all keys; after `=`, the names that a key can have."""
    from rayfed.base.values import keys
    from rayfed.data.partition import PARTITIONS
    from rayfed.data.settings import SOURCES
    from rayfed.job import Job, flat, read_toml
    from rayfed.models.settings import MODELS

    key, equals, _ = incomplete.partition("=")
    if equals:
        names = {"method": [*method_names()], "model": MODELS, "data.partition": PARTITIONS, "data.source": SOURCES}
        return starting(incomplete, [f"{key}={name}" for name in names.get(key.removesuffix(".name"), ())])
    # Click does not parse a line that ends in -s: its words are all arguments.
    job = next((word for word in ctx.args if word.endswith(".toml")), "")
    try:
        in_file = starting(incomplete, [f"{key}=" for key in flat(read_toml(job))])
    except InputError:
        in_file = []
    return in_file or starting(incomplete, sorted({f"{key.name}=" for key in keys(Job)}))


def complete_method(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The names of methods and parts."""
    return starting(incomplete, [*method_names()])


def starting(incomplete: str, words: list[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def method_names() -> Iterator[str]:
    """The names of recipes, then of parts, from the source: to import them would bring torch, which takes seconds."""
    from rayfed.base.values import snake_case

    room = Path(str(find_spec("rayfed.methods").origin)).parent  # type: ignore[union-attr]
    for statement in ast.parse((room / "recipes.py").read_text()).body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            yield ast.unparse(statement.targets[0])
    for module in sorted(room.glob("*.py")):
        for statement in ast.parse(module.read_text()).body:
            if isinstance(statement, ast.ClassDef) and "Part" in map(ast.unparse, statement.bases):
                yield snake_case(statement.name)


def read_overrides(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> Overrides:
    """The values of `--set`."""
    return tuple(map(read_override, given))


def read_override(text: str) -> tuple[str, Any]:
    """`key.sub=value` from the command line; the value as TOML writes it, quotes around a word may be left out.

    >>> read_override("train.lr=0.1"), read_override("method=fedavg")
    (('train.lr', 0.1), ('method', 'fedavg'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"'{text}': write an override as key.sub=value, such as train.num_rounds=2")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        if value.strip().startswith(("[", "{")):
            how = """write it as TOML, with quotes around words: 'grid.method=["fedavg", "fedntd"]'"""
            raise InputError(f"'{text}': the list or table cannot be read ({error}); {how}") from None
        return key.strip(), value.strip()
    except RecursionError:
        raise InputError(f"'{key.strip()}': the value's lists are nested too deeply") from None


job_argument = click.argument("job", shell_complete=complete_job)
SET: dict[str, Any] = {"multiple": True, "metavar": "KEY=VALUE", "shell_complete": complete_set}
SET["help"] = "Replace a value of the job: -s train.num_rounds=2. May be given often."
set_option = click.option("-s", "--set", "overrides", callback=read_overrides, **SET)
settings_option = click.option("-s", "--set", "settings", **SET)  # as they are: `submit` passes them to `run`
trust_option = click.option(
    "--trust-this-machine",
    is_flag=True,
    expose_value=False,
    callback=lambda ctx, param, given: os.environ.update({TRUST: "1"} if given else {}),
    help="Use a Ray whose files other users of this machine can change.",
)


def read_base(job: str, overrides: Overrides) -> Job:
    """A job, or the job under a grid."""
    from rayfed.job import read_job, read_toml

    return read_job({key: value for key, value in read_toml(job).items() if key != "grid"}, dict(overrides))


other_bits_option = click.option(
    "--other-bits",
    is_flag=True,
    help="Allow hardware of several kinds, and another partition or code of yours than before: the bits will differ.",
)
