"""Commands that train: run, resume, replay."""

from __future__ import annotations

import pdb  # noqa: T100
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rayfed.cli.exits import Failure, failures
from rayfed.cli.options import Overrides, job_argument, set_option
from rayfed.cli.profile import profile_option
from rayfed.cli.text import busy, duration, print_table, shown
from rayfed.errors import InputError, Resumable, RunFailed
from rayfed.runtime.profile import profile, span

if TYPE_CHECKING:
    from rayfed.experiment import Display, Result
    from rayfed.grid import Cell
    from rayfed.job import Job

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
@profile_option
@click.option("--only", metavar="PATTERN", default="*", help="Of a grid, the runs whose names match: '*/fedntd/*'.")
@click.option("--list", "listed", is_flag=True, help="List the runs and do nothing.")
def run(job: str, overrides: Overrides, force: bool, resume: bool, other_bits: bool, only: str, listed: bool) -> None:
    """Train the federation of a job file.

    A job with a [grid] is many runs, one after the other, with a line for each: finished runs are skipped, a run that
    was begun continues, and a failed run does not end the others. A table of settings and methods comes last.

    \b
    Examples:
      rayfed run jobs/quickstart.toml --force
      rayfed run jobs/papers/fedntd/table1.toml --list
      rayfed run jobs/papers/fedntd/table1.toml --only 'cifar10-shards-2/fed*/seed-0'
      rayfed run jobs/papers/fedntd/table1.toml -s grid.seeds=[0] -s train.num_rounds=50
    """
    if force and resume:
        raise InputError("--force begins the run again, and --resume continues it: give one of the two")
    with busy(f"reading {job}"), span("imports", "and the job file"):
        from rayfed.grid import expand
        from rayfed.job import read_toml

        cells = expand(read_toml(job), dict(overrides))
        chosen = [cell for cell in cells if fnmatch(cell.name, only) or fnmatch(cell.name, f"*/{only}")]
        if not chosen:
            none = f"none of {len(cells)} runs matches, such as '{cells[0].name}'; see --list"
            raise InputError(f"--only '{only}': {none}")
        jobs = [cell.job() for cell in chosen]  # the first brings torch
    if listed:
        print("\n".join(job.name for job in jobs))
    elif profile() and len(jobs) > 1:
        raise InputError(f"--profile is of a single run: choose one of the {len(jobs)} with --only '{jobs[0].name}'")
    elif chosen[0].grid:
        run_grid(cells, jobs, force, other_bits)
    else:
        run_one(jobs[0], force, resume, other_bits)


@click.command()
@click.argument("run", metavar="RUN")
@set_option
@other_bits_option
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

    _shown(lambda display: experiment.resume(run, dict(overrides), other_bits=other_bits, display=display))


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


def run_one(job: Job, force: bool, resume: bool, other_bits: bool, of_grid: str = "") -> dict[str, Any]:
    """Run a job, showing its progress and its results; of a grid's run, only the progress. Gives the summary."""
    with span("imports"):
        from rayfed import experiment

    options: dict[str, Any] = {"force": force, "resume": resume, "other_bits": other_bits}
    return _shown(lambda display: experiment.run(job, **options, display=display), of_grid)


def _shown(train: Callable[[Display], Result], of_grid: str = "") -> dict[str, Any]:
    with span("imports"):
        from rayfed.cli.display import follow, result_text
    from rayfed.folder.summary import read_summary

    with follow(of_grid) as display:
        result = train(display)
    summary = read_summary(result.path)
    if not of_grid:
        print(result_text(result.path, summary))
    return summary


def run_grid(cells: list[Cell], jobs: list[Job], force: bool, other_bits: bool) -> None:
    """Run the jobs, of chosen cells, that are not done, with a line for each; then show the results of all cells."""
    from rayfed.cli.display import cell_text
    from rayfed.data.sources import reading_once
    from rayfed.folder.places import is_done

    todo = [job for job in jobs if force or not is_done(job)]
    if len(todo) < len(jobs):
        print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are done already")
    failed: dict[str, int] = {}  # name -> exit code
    started = time.monotonic()
    try:
        with reading_once():
            for number, job in enumerate(todo, start=1):
                label = f"run {number}/{len(todo)}"
                line = f"{label}  {job.name.ljust(max(len(other.name) for other in todo))}"
                try:
                    with failures():
                        summary = run_one(job, force, not force, other_bits, label)
                    left = duration((time.monotonic() - started) / number * (len(todo) - number))
                    print(f"{line}  {cell_text(summary)}  {left} left", flush=True)
                except Failure as failure:
                    if failure.exit_code not in (1, Resumable.exit_code):
                        raise
                    print(f"{line}  failed", flush=True)
                    failure.show()
                    failed[job.name] = failure.exit_code
    finally:
        show_results(cells)
    if failed:
        raise Failure("\n".join([f"error: {len(failed)} of {len(todo)} runs failed:", *failed]), min(failed.values()))


def show_results(cells: list[Cell]) -> None:
    """Print the table of a grid's finished cells, and write it beside them."""
    from rayfed.folder.places import folder_of, is_done
    from rayfed.folder.storage import write_text
    from rayfed.folder.summary import read_summary
    from rayfed.grid import FIGURES, as_csv, spread_text, tabulate

    done = []
    for cell in cells:
        with suppress(InputError):  # a cell that was not chosen may be invalid
            if is_done(job := cell.job()):
                done.append((cell, read_summary(folder_of(job))))
    if not done:
        return
    rows = tabulate(done)
    path = folder_of(replace(done[0][0].job(), name=cells[0].grid)) / "table.csv"
    write_text(path, as_csv(rows))
    print(f"\n{len(done)} of {len(cells)} runs are done; mean ± deviation over seeds, in {shown(path)}:")
    listed = [key for key in ("setting", "method") if rows[0][key]]  # a grid of seeds alone has neither
    shown_rows = [
        [*(row[key] for key in listed), str(row["seeds"]), *(spread_text(row[f], row[f"{f}_spread"]) for f in FIGURES)]
        for row in rows
    ]
    print_table([*listed, "seeds", *(figure.replace("_", " ") for figure in FIGURES)], shown_rows)
