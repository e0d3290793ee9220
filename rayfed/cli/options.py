"""Arguments of several commands, and their completion by the shell."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from rayfed.job import Job

Overrides = tuple[tuple[str, Any], ...]


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Job files, up to two folders down."""
    folder = Path(incomplete if incomplete.endswith("/") else os.path.dirname(incomplete))
    found = sorted(str(file) for depth in ("", "*/", "*/*/") for file in folder.glob(f"{depth}*.toml"))
    return starting(incomplete.removeprefix("./"), found) or [CompletionItem(incomplete, type="file")]


def complete_set(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The job file's keys; where none of them fits, all keys."""
    from rayfed.errors import InputError
    from rayfed.job import Job, flat, read_toml
    from rayfed.values import keys

    if incomplete.startswith("method="):
        return starting(incomplete, [f"method={entry['name']}" for entry in catalogue()])
    # Click does not parse a line that ends in -s: its words are all arguments.
    job = next((word for word in ctx.args if word.endswith(".toml")), "")
    try:
        in_file = starting(incomplete, [f"{key}=" for key in flat(read_toml(job))])
    except InputError:
        in_file = []
    return in_file or starting(incomplete, sorted({f"{key.name}=" for key in keys(Job)}))


def complete_method(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The names of methods and parts."""
    return starting(incomplete, [entry["name"] for entry in catalogue()])


def starting(incomplete: str, words: list[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def catalogue() -> list[dict[str, Any]]:
    """The methods and parts as `tools/make_catalogue.py` wrote them: reading the code itself takes seconds.

    Each has a name, a kind (recipe or part), a docstring and its parameters; a recipe also its bytes down and up.
    """
    return json.loads(files("rayfed.cli").joinpath("methods.json").read_text())


def read_overrides(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> Overrides:
    """The values of `--set`."""
    from rayfed.job import read_override

    return tuple(map(read_override, given))


job_argument = click.argument("job", shell_complete=complete_job)
SET: dict[str, Any] = {"multiple": True, "metavar": "KEY=VALUE", "shell_complete": complete_set}
SET["help"] = "Replace a value of the job: -s train.num_rounds=2. May be given often."
set_option = click.option("-s", "--set", "overrides", callback=read_overrides, **SET)
settings_option = click.option("-s", "--set", "settings", **SET)  # as they are: `submit` passes them to `run`


def read_base(job: str, overrides: Overrides) -> Job:
    """A job, or the job under a grid."""
    from rayfed.job import read_job, read_toml

    return read_job({key: value for key, value in read_toml(job).items() if key != "grid"}, dict(overrides))
