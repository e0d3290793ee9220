"""The runs of a grid, many at once or one after the other, with a line for each; then their table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial

from rich.progress import TaskID

from rayfed import experiment
from rayfed.base.errors import STOPPED, InputError, Resumable
from rayfed.base.files import write_text
from rayfed.data.sources import reading_once
from rayfed.folder.places import folder_of, is_done
from rayfed.folder.read import short
from rayfed.folder.summary import Ended, read_summary
from rayfed.grid.cells import Cell
from rayfed.grid.many import run_many
from rayfed.job import Job
from rayfed.report.command import print_sheet
from rayfed.report.forms import as_csv
from rayfed.report.runs import read_runs
from rayfed.report.table import sheet
from rayfed.screen.display import Lines, grid_bar, on_screen, on_terminal
from rayfed.screen.exits import Failure, failures
from rayfed.screen.lines import cell_text
from rayfed.screen.text import duration, shown

FAILED = (1, InputError.exit_code, Resumable.exit_code)  # exit codes of a run that does not end the others


def run_grid(
    cells: list[Cell],
    jobs: list[Job],
    force: bool,
    other_bits: bool,
    show: Callable[[list[Cell]], None] | None = None,
) -> None:
    """Run the jobs, of chosen cells, that are not done, with a line for each; then `show` the results of all cells."""
    todo = [job for job in jobs if force or not is_done(job)]
    if len(todo) < len(jobs):
        print(f"{len(jobs) - len(todo)} of {len(jobs)} runs done already", flush=True)
    width = max((len(job.name) for job in todo), default=0)
    failed: dict[str, int] = {}  # name -> exit code
    started = time.monotonic()
    try:
        with closing(_ended(todo, force, other_bits)) as all_ended:
            for number, ended in enumerate(all_ended, start=1):
                name, code = ended.job.name, ended.exit_code
                line = f"run {number}/{len(todo)}  {name.ljust(width)}"
                if code == 0:
                    left = duration((time.monotonic() - started) / number * (len(todo) - number))
                    print(f"{line}  {cell_text(read_summary(folder_of(ended.job)))}  {left} left", flush=True)
                    continue
                if code == STOPPED:
                    raise KeyboardInterrupt
                failure = Failure(ended.message, code)
                is_input_of_all = code == InputError.exit_code and number == 1  # likely
                if code not in FAILED or is_input_of_all:
                    raise failure
                print(f"{line}  failed", flush=True)
                failure.show()
                failed[name] = code
    except KeyboardInterrupt as error:
        error.__notes__ = ["the same command, without --force, continues where the runs stopped"]
        raise
    finally:
        try:
            (show or show_results)(cells)
        except InputError as error:  # how the runs ended is worth more
            print(f"warning: there is no table: {error}", file=sys.stderr)
    if failed:
        names = "\n".join(failed)
        raise Failure(f"error: {len(failed)} of {len(todo)} runs failed:\n{names}", min(failed.values()))


def _ended(todo: Sequence[Job], force: bool, other_bits: bool) -> Generator[Ended]:
    """The runs as they end: many at once, or one after the other."""
    one_by_one = True
    with watching([job.name for job in todo]) as watch:
        logged = partial(Lines, quiet=True)
        for ended in run_many(todo, watch, force=force, other_bits=other_bits, display=logged):
            one_by_one = False
            yield ended
    with reading_once():
        for number, job in enumerate(todo if one_by_one else (), start=1):
            if not on_terminal():
                say_begun(job)
            run = partial(experiment.run, job, force=force, resume=not force, other_bits=other_bits)
            try:
                with failures():
                    on_screen(run, f"run {number}/{len(todo)}")
            except Failure as failure:
                yield Ended(job, failure.exit_code, failure.message)
            else:
                yield Ended(job)


@contextmanager
def watching(names: Sequence[str]) -> Iterator[Callable[[Sequence[Job]], None]]:
    """On a terminal, bars: one of all runs, and one for each that is under way. Elsewhere, a line as a run begins.

    `names` are those of all runs. A bar has little room, and says only what sets its run apart, and its accuracy.
    """
    seen: set[str] = set()
    if not on_terminal():

        def say(jobs: Sequence[Job]) -> None:
            for job in jobs:
                if job.name not in seen:
                    seen.add(job.name)
                    say_begun(job)

        yield say
        return
    with grid_bar() as progress:
        bars: dict[str, TaskID] = {}
        called = dict(zip(names, short(names), strict=True))
        runs = None

        def watch(jobs: Sequence[Job]) -> None:
            nonlocal runs
            if runs is None:
                runs = progress.add_task("runs", total=len(names), figures="")
            for name in bars.keys() - {job.name for job in jobs}:
                progress.remove_task(bars.pop(name))
            for job in jobs:
                seen.add(job.name)
                if job.name not in bars:
                    total, name = job.train.num_rounds, called[job.name]
                    bars[job.name] = progress.add_task(name, total=total, figures="starting")
                summary = read_summary(folder_of(job))
                if "last" in summary:
                    figures = f"accuracy {summary['last']['test_accuracy']:.3f}"
                    progress.update(bars[job.name], completed=summary["rounds"], figures=figures)
            progress.update(runs, completed=len(seen) - len(jobs))

        yield watch


def say_begun(job: Job) -> None:
    """Name the run that begins, which may take hours, and where its rounds can be followed."""
    print(f"{job.name} begins; its rounds: {shown(folder_of(job) / 'log.txt')}", file=sys.stderr)


def show_results(cells: list[Cell]) -> None:
    """Print the table of a grid's finished cells, and write it beside them."""
    done = finished(cells)
    if not done:
        return
    table = sheet(read_runs(map(folder_of, done)), "text")
    path = folder_of(replace(done[0], name=cells[0].grid)) / "table.csv"
    write_text(path, as_csv(table) + "\n")
    print(f"\n{len(done)} of {len(cells)} runs done; mean ± deviation over seeds, in {shown(path)}:")
    print_sheet(table, "text")


def finished(cells: list[Cell]) -> list[Job]:
    """The jobs of the cells that are done."""
    done = []
    for cell in cells:
        with suppress(InputError):  # a cell that was not chosen may be invalid
            job = cell.job()
            if is_done(job):
                done.append(job)
    return done
