"""Commands that train: run, resume, replay."""

from __future__ import annotations

import pdb  # noqa: T100
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rayfed.cli.options import Overrides, job_argument, set_option
from rayfed.display import follow, print_table, result_text, shown
from rayfed.exits import Resumable, RunFailed, failures
from rayfed.values import InputError

if TYPE_CHECKING:
    from rayfed.experiment import Display, Result
    from rayfed.grid import Cell
    from rayfed.job import Job


@click.command()
@job_argument
@set_option
@click.option("--force", is_flag=True, help="Replace the results of an earlier run.")
@click.option("--resume", is_flag=True, help="Go on with the run if it was begun; else begin it.")
@click.option("--only", metavar="PATTERN", default="*", help="Of a grid, the runs whose names match: '*/fedntd/*'.")
@click.option("--list", "listed", is_flag=True, help="List the runs and do nothing.")
def run(job: str, overrides: Overrides, force: bool, resume: bool, only: str, listed: bool) -> None:
    """Train what a job file says.

    A job with a [grid] stands for many runs. They go one after the other; those that are done already are passed over,
    one that was begun goes on, and one that fails does not hold up the others. At the end comes a table of settings and
    methods.

    \b
    Examples:
      rayfed run jobs/quickstart.toml --force
      rayfed run jobs/papers/fedntd/table1.toml --list
      rayfed run jobs/papers/fedntd/table1.toml --only 'cifar10-shards-2/fed*/seed-0'
      rayfed run jobs/papers/fedntd/table1.toml -s grid.seeds=[0] -s train.num_rounds=50
    """
    from rayfed.grid import expand
    from rayfed.job import read_table

    cells = expand(read_table(job), dict(overrides))
    chosen = [cell for cell in cells if fnmatch(cell.name, only) or fnmatch(cell.name, f"*/{only}")]
    if not chosen:
        raise InputError(f"--only '{only}': none of {len(cells)} runs matches, such as '{cells[0].name}'; see --list")
    if listed:
        print("\n".join(cell.name for cell in chosen))
    elif chosen[0].grid:
        run_grid(cells, chosen, force)
    else:
        run_one(chosen[0].job(), force, resume)


@click.command()
@click.argument("run", metavar="RUN")
@set_option
def resume(run: str, overrides: Overrides) -> None:
    """Go on with a run that was stopped, or killed.

    From its newest checkpoint that is whole, up to train.num_rounds, and to the same bits as a run that never stopped.
    RUN is the run's folder, or the folder or URI of its checkpoints. Where the work is done may change (ray.*), where
    results go (output.*), and how many rounds there are.

    \b
    Examples:
      rayfed resume runs/quickstart
      rayfed resume runs/quickstart -s train.num_rounds=50
      rayfed resume runs/quickstart -s ray.mode=off
    """
    from rayfed import experiment

    _shown(lambda display: experiment.resume(run, dict(overrides), display=display))


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--round", type=int, required=True, help="The round, from 1 on.")
@click.option("--client", type=int, required=True, help="A client that was in it.")
@click.option("--debug", is_flag=True, help="Open Python's debugger where the client fails.")
def replay(run: Path, round: int, client: int, debug: bool) -> None:
    """Train one client of a run's round again.

    In this process, without Ray, from the same weights and with the same random numbers: to look into what it did, or
    why it failed. Rounds since the checkpoint before it are played again first.

    \b
    Example:
      rayfed replay runs/quickstart --round 7 --client 10
    """
    from rayfed.replay import replay as again

    try:
        row, recorded = again(run, round, client)
    except Exception as error:
        if debug and error.__cause__ is not None:
            pdb.post_mortem(error.__cause__.__traceback__)
        raise
    print(
        f"client {row.client}, round {round}: {row.num_examples} images, loss {row.train_loss!r}, {row.seconds:.1f} s"
    )
    if recorded is not None:
        print("the run recorded the same loss" if recorded == row.train_loss else f"the run recorded {recorded!r}")


def run_one(job: Job, force: bool, resume: bool) -> None:
    """Run a job, showing how it goes and what came of it."""
    from rayfed import experiment

    _shown(lambda display: experiment.run(job, force=force, resume=resume, display=display))


def _shown(train: Callable[[Display], Result]) -> None:
    from rayfed.record import read_summary

    with follow() as display:
        result = train(display)
    print(result_text(result.path, read_summary(result.path)))


def run_grid(cells: list[Cell], chosen: list[Cell], force: bool) -> None:
    """Run the chosen cells that are not done; then show the results of all that are."""
    from rayfed.record import is_done

    jobs = [cell.job() for cell in chosen]
    todo = [job for job in jobs if force or not is_done(job)]
    if len(todo) < len(jobs):
        print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are done already")
    failed = []
    try:
        for number, job in enumerate(todo, start=1):
            print(f"\nrun {number} of {len(todo)}", flush=True)
            try:
                with failures():
                    run_one(job, force, resume=not force)
            except (RunFailed, Resumable) as failure:
                failure.show()
                failed.append(job.name)
    finally:
        show_results(cells)
    if failed:
        raise RunFailed("\n".join([f"error: {len(failed)} of {len(todo)} runs failed:", *failed]))


def show_results(cells: list[Cell]) -> None:
    """Print the table of a grid's finished cells, and write it beside them."""
    from rayfed.grid import as_csv, tabulate
    from rayfed.record import folder_of, is_done, read_summary
    from rayfed.storage import whole

    done = []
    for cell in cells:
        with suppress(InputError):  # of a cell that was not chosen, and cannot run
            if is_done(job := cell.job()):
                done.append((cell, read_summary(folder_of(job))))
    if not done:
        return
    rows = tabulate(done)
    path = folder_of(replace(done[0][0].job(), name=cells[0].grid)) / "table.csv"
    with whole(path) as aside:
        aside.write_text(as_csv(rows))
    print(f"\n{len(done)} of {len(cells)} runs are done; mean ± deviation over seeds, in {shown(path)}:")
    columns = [field.name for field in fields(rows[0])]
    print_table([name.replace("_", " ") for name in columns], [[str(getattr(row, c)) for c in columns] for row in rows])
