"""The command `verify`."""

import sys
from pathlib import Path

import click

from rayfed.base.console import duration, in_line, shown
from rayfed.base.errors import InputError, RunFailed, cut


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
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

    Plays rounds of a run, or of a record of a run, again.

    The checkpoints, the hashes of all that went in, and the tables are checked first. Then round 1,
    and the round after each checkpoint, are played again in this process and compared bit for bit,
    or within a tolerance on other hardware. The exit code is 1 where something differs.

    \b
    Examples:
      rayfed verify runs/quickstart --all
      rayfed verify runs/four --quick      round 1 of each run of a grid
      rayfed verify docs/results           all records in a folder
    """
    from rayfed.folder.found import find_runs

    if every and quick:
        raise InputError("--all plays every round, and --quick only round 1: give one of the two")
    found = [folder for run in runs for folder in find_runs(run)]
    # Also where job.toml is lost.
    found += [file.parent for run in runs for file in run.rglob("environment.json")]
    folders = list(dict.fromkeys(found))
    # These import torch, which takes seconds. A wrong folder is told before.
    from rayfed.report.verify.checks import checks
    from rayfed.report.verify.estimate import seconds_of

    number, unread = 0, 0
    needs = [seconds_of(each, every=every, clients=clients, quick=quick) for each in folders]
    counted = f"{len(folders)} runs, " if len(folders) > 1 else ""
    estimate = f"{counted}about {duration(sum(needs))} by the recorded seconds, in one process"
    print(estimate, file=sys.stderr, flush=True)
    for place, folder in enumerate(folders):
        left = f"  ({place + 1}/{len(folders)}, about {duration(sum(needs[place:]))} left)"
        print(shown(folder))
        if len(folders) > 1:
            print(left, file=sys.stderr, flush=True)
        try:
            for name, compared, faults in checks(folder, every=every, clients=clients, quick=quick):
                print(f"  {name:12}{'DIFFERS' if faults else in_line(compared)}", flush=True)
                print(cut("".join(f"    {in_line(fault)}\n" for fault in faults)), end="")
                number += len(faults)
        except (InputError, RunFailed) as error:
            if len(folders) == 1:
                raise
            print(f"  {'not checked':12}{in_line(str(error))}", flush=True)
            number += isinstance(error, RunFailed)
            unread += 1
    left_out = f"; {unread} of {len(folders)} runs could not be checked" if unread else ""
    if number:
        count = f"{number:,} differences" if number > 1 else "1 difference"
        raise RunFailed(
            f"what was recorded is not what its job gives: {count}, as listed{left_out}"
        )
    if unread:
        raise InputError(f"what was checked agrees with the record{left_out}")
    print(
        f"{f'{len(folders)} runs: ' if len(folders) > 1 else ''}all that was checked agrees with "
        "the record"
    )
