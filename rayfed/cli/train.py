"""Commands that train: run, reproduce, resume, replay."""

from __future__ import annotations

import pdb  # noqa: T100
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rayfed.cli.options import Overrides, complete_paper, job_argument, set_option, trust_option
from rayfed.cli.profile import profile_option
from rayfed.cli.text import busy
from rayfed.errors import InputError, RunFailed
from rayfed.runtime.profile import profile, span

if TYPE_CHECKING:
    from rayfed.grid import Cell

other_bits_option = click.option(
    "--other-bits",
    is_flag=True,
    help="Allow hardware of several kinds, and another partition or code of yours than before: the bits will differ.",
)


@click.command()
@job_argument
@set_option
@click.option("--force", is_flag=True, help="Replace the results of an earlier run.")
@click.option("--resume", is_flag=True, help="Continue the run if it was begun; else begin it.")
@other_bits_option
@trust_option
@profile_option
@click.option("--only", metavar="PATTERN", default="*", help="Of a grid, the runs whose names match: '*/fedntd/*'.")
@click.option("--list", "listed", is_flag=True, help="List the runs and do nothing.")
def run(job: str, overrides: Overrides, force: bool, resume: bool, other_bits: bool, only: str, listed: bool) -> None:
    """Train the federation of a job file.

    A job with a [grid] is many runs, as many at once as there is room for, with a line for each: finished runs are
    skipped, a run that was begun continues, and a failed run does not end the others. A table comes last.

    \b
    Examples:
      rayfed run jobs/quickstart.toml --force
      rayfed run jobs/papers/fedntd/table1.toml --list
      rayfed run jobs/papers/fedntd/table1.toml --only 'cifar10-shards-2/fed*/seed-0'
      rayfed run jobs/papers/fedntd/table1.toml -s grid.seeds=[0] -s train.num_rounds=50
    """
    if force and resume:
        raise InputError("--force begins the run again, and --resume continues it: give one of the two")
    with busy(f"reading {job}"), span("imports"):
        from rayfed.grid import expand
        from rayfed.job import read_toml

        cells = expand(read_toml(job), dict(overrides))
        chosen = matching(cells, only, "--only")
        jobs = [cell.job() for cell in chosen]  # the first brings torch
    if listed:
        print("\n".join(job.name for job in jobs))
    elif profile() and len(jobs) > 1:
        raise InputError(f"--profile is of a single run: choose one of the {len(jobs)} with --only '{jobs[0].name}'")
    elif chosen[0].grid:
        from rayfed.cli.grid import run_grid

        run_grid(cells, jobs, force, other_bits)
    else:
        with span("imports"):
            from rayfed import experiment
            from rayfed.cli.display import on_screen

        on_screen(partial(experiment.run, jobs[0], force=force, resume=resume, other_bits=other_bits))


def matching(cells: list[Cell], pattern: str, option: str) -> list[Cell]:
    """The cells whose names match. Raises `InputError` if none does, or if two of them are the same job."""
    from rayfed.grid import refuse_same

    found = [cell for cell in cells if fnmatch(cell.name, pattern) or fnmatch(cell.name, f"*/{pattern}")]
    if not found:
        none = f"none of {len(cells)} runs matches, such as '{cells[0].name}'; see --list"
        raise InputError(f"{option} '{pattern}': {none}")
    refuse_same(found)
    return found


@click.command()
@click.argument("table", metavar="PAPER/TABLE", shell_complete=complete_paper)
@set_option
@click.option("--rows", metavar="PATTERN", default="*", help="The runs whose names match: 'cifar10-shards-2/*'.")
@click.option("--force", is_flag=True, help="Begin the runs again, in place of their earlier results.")
@other_bits_option
@trust_option
@click.option("--list", "listed", is_flag=True, help="List the runs and do nothing.")
def reproduce(table: str, overrides: Overrides, rows: str, force: bool, other_bits: bool, listed: bool) -> None:
    """Run what a paper's table needs, and print it.

    Our numbers beside the paper's. The table is a grid in jobs/papers, in the paper's protocol: up to hundreds of runs
    at full size, so see --list, and choose with --rows. Runs that are done are not run again, and runs that were begun
    continue, so the command may be stopped and given again. What -s changes in the protocol is named below the table.

    \b
    Examples:
      rayfed reproduce fedntd/table1 --list
      rayfed reproduce fedntd/table1 --rows 'cifar10-shards-2/fed*/seed-0'
      rayfed reproduce fedntd/table1 --rows 'mnist-shards-2/*' -s name=try -s grid.seeds=[0] -s train.num_rounds=2
    """
    with busy(f"reading {table}"):
        from rayfed.grid import expand
        from rayfed.job import read_toml
        from rayfed.report.papers import grid_of

        chosen = matching(expand(read_toml(grid_of(table)), dict(overrides)), rows, "--rows")
        jobs = [cell.job() for cell in chosen]
    if listed:
        print("\n".join(job.name for job in jobs))
        return
    from rayfed.cli.grid import run_grid, show_beside

    run_grid(chosen, jobs, force, other_bits, partial(show_beside, table))


@click.command()
@click.argument("run", metavar="RUN")
@set_option
@other_bits_option
@trust_option
@profile_option
def resume(run: str, overrides: Overrides, other_bits: bool) -> None:
    """Continue a run that was stopped, or killed.

    From its newest whole checkpoint, up to train.num_rounds, to the same bits as a run that never stopped. RUN is the
    run's folder, or the folder or URI of its checkpoints. Options may change where the work is done (ray.*), where
    results go (output.*), the number of rounds, and what is measured at clients.

    \b
    Examples:
      rayfed resume runs/quickstart
      rayfed resume runs/quickstart -s train.num_rounds=50
      rayfed resume runs/quickstart -s ray.mode=off
    """
    with busy(f"reading {run}"), span("imports"):
        from rayfed import experiment
        from rayfed.cli.display import on_screen

    on_screen(partial(experiment.resume, run, dict(overrides), other_bits=other_bits))


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--round", type=int, required=True, help="The round, from 1 on.")
@click.option("--client", type=int, required=True, help="A client that was in it.")
@click.option("--debug", is_flag=True, help="Open Python's debugger where the client fails.")
def replay(run: Path, round: int, client: int, debug: bool) -> None:
    """Train one client of a run's round again.

    In this process, without Ray, from the same weights and with the same random numbers: to see what the client did, or
    why it failed. The rounds since the checkpoint before that round are played again first.

    \b
    Example:
      rayfed replay runs/quickstart --round 7 --client 10
    """
    from rayfed import experiment

    try:
        row, recorded = experiment.replay(run, round, client)
    except Exception as error:
        if debug and isinstance(error, RunFailed):
            pdb.post_mortem((error.__cause__ or error).__traceback__)
        raise
    print(f"client {client}, round {round}: {row.num_examples} images, loss {row.train_loss:.4f}, {row.seconds:.1f} s")
    if recorded is not None:
        other = f"the run recorded {recorded:.4f}, which is {abs(recorded - row.train_loss):.1g} apart"
        print("the run recorded the same loss" if recorded == row.train_loss else other)
