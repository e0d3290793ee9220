"""Arguments of several commands, and their completion by the shell."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from rayfed.base.errors import InputError
from rayfed.runtime.private import TRUST

if TYPE_CHECKING:
    from rayfed.job import Job

Overrides = tuple[tuple[str, Any], ...]
Labels = tuple[tuple[str, str], ...]
# The runs of this folder.
RUNS = Path("runs")


def complete_set(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the keys of a job file that begin with what is typed."""
    from rayfed.base.values import keys
    from rayfed.job import Job

    return starting(incomplete, sorted({f"{key.name}=" for key in keys(Job)}))


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the folders of runs below the folder that is typed so far, or below runs."""
    root = Path(os.path.dirname(incomplete) or RUNS)
    return starting(incomplete, sorted(str(file.parent) for file in root.rglob("job.toml")))


def complete_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the runs of this folder that begin with what is typed."""
    folders = complete_run(ctx, param, f"{RUNS}/{incomplete}")
    return [folder.removeprefix(f"{RUNS}/") for folder in folders]


def run_at(given: str) -> str:
    """Return the place that the name or the path of a run means.

    A name is that of a folder in `runs`. What exists as it is typed comes first.
    """
    if "://" in given or Path(given).expanduser().exists():
        return given
    in_runs = RUNS / given
    return str(in_runs) if in_runs.is_dir() else given


class RunPath(click.Path):
    """A run as an argument: the path of its folder, or its name in `runs`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(run_at(os.fspath(value)), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in complete_run(ctx, param, incomplete)]


def starting(incomplete: str, words: list[str]) -> list[str]:
    """Return the words that begin with what is typed."""
    return [word for word in words if word.startswith(incomplete)]


def read_overrides(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> Overrides:
    """Return the keys and values of `--set`."""
    return tuple(map(read_override, texts))


def read_override(text: str) -> tuple[str, Any]:
    """Return the key and the value of `key.sub=value` from the command line.

    The value is written as in TOML. Quotes around a word may be left out. Raises `InputError` for
    anything else.

    >>> read_override("train.lr=0.1"), read_override("method=fedavg")
    (('train.lr', 0.1), ('method', 'fedavg'))
    >>> read_override(" train.lr = 0.1 "), read_override(" method = fedavg ")
    (('train.lr', 0.1), ('method', 'fedavg'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(
            f"'{text}': write an override as key.sub=value, such as train.num_rounds=2"
        )
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        if value.strip().startswith(("[", "{")):
            raise InputError(
                f"'{text}': the list or table cannot be read ({error}); write it as TOML, with "
                'quotes around words: \'grid.method=["fedavg", "fedntd"]\''
            ) from None
        return key.strip(), value.strip()
    except RecursionError:
        raise InputError(f"'{key.strip()}': the value's lists are nested too deeply") from None


RUN = RunPath(path_type=Path)
job_argument = click.argument("job", type=click.Path())
SET: dict[str, Any] = {"multiple": True, "metavar": "KEY=VALUE", "shell_complete": complete_set}
SET["help"] = "Replace a value of the job: -s train.num_rounds=2. May be given often."
set_option = click.option("-s", "--set", "overrides", callback=read_overrides, **SET)
# `submit` passes these settings to `run` as they are.
settings_option = click.option("-s", "--set", "settings", **SET)
LABEL: dict[str, Any] = {"type": (str, str), "multiple": True, "metavar": "STEP LABEL"}
LABEL["help"] = (
    "What to call a step of runs' names: --label fedntd 'FedNTD (ours)'. May be given often."
)
label_option = click.option("--label", "labels", **LABEL)


def trust_if_given(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    """Set the variable that says that the files of a Ray may be changed by other users."""
    if is_given:
        os.environ[TRUST] = "1"


trust_option = click.option(
    "--trust-this-machine",
    is_flag=True,
    expose_value=False,
    callback=trust_if_given,
    help="Use a Ray whose files other users of this machine can change.",
)


other_bits_option = click.option(
    "--other-bits",
    is_flag=True,
    help=(
        "Continue on other hardware, or with changed code or partition. The results will differ "
        "from an undisturbed run's."
    ),
)


def read_base(job: str | dict[str, Any], overrides: Overrides) -> Job:
    """Return a job, or the job under a grid, from its file or its tables."""
    from rayfed.job import read_job, read_toml

    tables = read_toml(job)
    tables.pop("grid", None)
    return read_job(tables, dict(overrides))
