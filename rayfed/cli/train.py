"""Commands that train: run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import click

from rayfed.cli.options import Overrides, job_argument, set_option
from rayfed.display import follow, print_table, result_text, shown
from rayfed.exits import RunFailed, failures
from rayfed.values import InputError

if TYPE_CHECKING:
    from rayfed.grid import Cell
    from rayfed.job import Job


@click.command()
@job_argument
@set_option
@click.option("--force", is_flag=True, help="Replace the results of an earlier run.")
@click.option("--only", metavar="PATTERN", default="*", help="Of a grid, the runs whose names match: '*/fedntd/*'.")
@click.option("--list", "listed", is_flag=True, help="List the runs and do nothing.")
def run(job: str, overrides: Overrides, force: bool, only: str, listed: bool) -> None:
    """Train what a job file says.

    A job with a [grid] stands for many runs. They go one after the other; those that are done already are passed over,
    and one that fails does not hold up the others. At the end comes a table of settings and methods.

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
        run_one(chosen[0].job(), force)


def run_one(job: Job, force: bool) -> None:
    """Run a job, showing how it goes and what came of it."""
    from rayfed.experiment import run
    from rayfed.record import read_summary

    with follow() as display:
        result = run(job, force=force, display=display)
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
                    run_one(job, force=True)  # over what an unfinished run left
            except RunFailed as failure:
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

    done = []
    for cell in cells:
        with suppress(InputError):  # of a cell that was not chosen, and cannot run
            if is_done(job := cell.job()):
                done.append((cell, read_summary(folder_of(job))))
    if not done:
        return
    rows = tabulate(done)
    path = folder_of(replace(done[0][0].job(), name=cells[0].grid)) / "table.csv"
    path.write_text(as_csv(rows))
    print(f"\n{len(done)} of {len(cells)} runs are done; mean ± deviation over seeds, in {shown(path)}:")
    columns = [field.name for field in fields(rows[0])]
    print_table([name.replace("_", " ") for name in columns], [[str(getattr(row, c)) for c in columns] for row in rows])
