"""The command `verify`."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rayfed.base.console import duration, in_line, shown
from rayfed.base.errors import InputError, RunFailed, cut
from rayfed.cli.options import RUN


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=RUN)
@click.option("--all", "every", is_flag=True, help="Play every round again.")
@click.option(
    "--clients",
    type=click.IntRange(0),
    default=0,
    help="Of each round, only so many clients, drawn anew.",
)
@click.option(
    "--quick", is_flag=True, help="Play only round 1 of each run again, as of a large grid."
)
def verify(runs: tuple[Path, ...], every: bool, clients: int, quick: bool) -> None:
    """Check that results can be reproduced.

    The command checks a run, or a record of a run: first its checkpoints, the hashes of all that
    went in, and its tables. Then it plays round 1, and the round after each checkpoint, again in
    this process. It compares them bit for bit, or within a tolerance on other hardware. The exit
    code is 1 if something differs.

    \b
    Examples:
      rayfed verify runs/quickstart --all
      rayfed verify runs/four --quick      round 1 of each run of a grid
      rayfed verify docs/results           all records in a folder
    """
    if every and quick:
        raise InputError("--all plays every round, and --quick only round 1: give one of the two")
    folders = _folders(runs)
    # These import torch, which takes seconds. An error about a wrong folder comes before.
    from rayfed.report.verify.estimate import seconds_of

    seconds = [seconds_of(folder, every=every, clients=clients, quick=quick) for folder in folders]
    of_all = f"{len(folders)} runs" if len(folders) > 1 else ""
    estimate = f"about {duration(sum(seconds))} by the recorded seconds, in one process"
    print(f"{of_all}, {estimate}" if of_all else estimate, file=sys.stderr, flush=True)
    differences, unread = 0, 0
    for place, folder in enumerate(folders):
        print(shown(folder))
        if of_all:
            left = f"about {duration(sum(seconds[place:]))} left"
            print(f"  ({place + 1}/{len(folders)}, {left})", file=sys.stderr, flush=True)
        try:
            for count in _check(folder, every=every, clients=clients, quick=quick):
                differences += count
        except (InputError, RunFailed) as error:
            if not of_all:
                raise
            print(f"  {'not checked':12}{in_line(str(error))}", flush=True)
            differences += isinstance(error, RunFailed)
            unread += 1
    left_out = f"; {unread} of {len(folders)} runs could not be checked" if unread else ""
    if differences:
        words = f"{differences:,} differences" if differences > 1 else "1 difference"
        raise RunFailed(
            f"what was recorded is not what its job gives: {words}, as listed{left_out}"
        )
    if unread:
        raise InputError(f"what was checked agrees with the record{left_out}")
    print((f"{of_all}: " if of_all else "") + "all that was checked agrees with the record")


def _folders(runs: Sequence[Path]) -> list[Path]:
    """Return the folders of runs and records that are named, each once.

    Raises `InputError` for a folder without any.
    """
    from rayfed.folder.found import find_runs

    folders: dict[Path, None] = {}
    for run in runs:
        folders |= dict.fromkeys(find_runs(run))
    # A run whose job.toml is lost still has environment.json.
    for run in runs:
        folders |= dict.fromkeys(file.parent for file in run.rglob("environment.json"))
    return list(folders)


def _check(folder: Path, *, every: bool, clients: int, quick: bool) -> Iterator[int]:
    """Print the checks of a run, and yield how many differences each has."""
    from rayfed.report.verify.checks import checks

    for name, compared, faults in checks(folder, every=every, clients=clients, quick=quick):
        print(f"  {name:12}{'DIFFERS' if faults else in_line(compared)}", flush=True)
        lines = [f"    {in_line(fault)}\n" for fault in faults]
        print(cut("".join(lines)), end="")
        yield len(faults)
