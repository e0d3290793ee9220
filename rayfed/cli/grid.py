"""The runs of a grid, many at once or one after the other, and their table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from rayfed.base.console import duration, shown
from rayfed.base.errors import InputError, Resumable
from rayfed.base.files import write_text
from rayfed.cli.exits import Failure
from rayfed.cli.report import print_sheet
from rayfed.experiment import RUNS_NAMED
from rayfed.folder.found import write_order
from rayfed.folder.places import choices, folder_of, is_checkpoint_of, is_done
from rayfed.folder.provenance import changed_since
from rayfed.folder.summary import Ended, read_summary
from rayfed.grid.cells import Cell
from rayfed.grid.many import run_many
from rayfed.job import Job, flat, read_toml
from rayfed.observers.display import cell_text, quiet_lines
from rayfed.report.forms import as_csv
from rayfed.report.runs import read_runs
from rayfed.report.table import sheet

# A run that fails with one of these exit codes does not end the others.
FAILED = (1, InputError.exit_code, Resumable.exit_code)


def run_grid(
    cells: list[Cell],
    jobs: list[Job],
    force: bool,
    other_bits: bool,
    show: Callable[[list[Cell]], None] | None = None,
) -> None:
    """Run the jobs that are not done, with a line for each, then `show` the results of all cells.

    The jobs are those of the chosen cells. Raises `Failure` if a run has failed, and `InputError`
    before anything starts if a first run would leave runs that began with its weights.
    """
    _refuse_left_behind(cells, jobs, force)
    done = [] if force else [job for job in jobs if is_done(job)]
    done_names = {job.name for job in done}
    todo = [job for job in jobs if job.name not in done_names]
    if done:
        print(f"{len(done)} of {len(jobs)} runs done already", flush=True)
        _warn_of_changes(done)
    width = max((len(job.name) for job in todo), default=0)
    # The exit codes of failed runs, by their names.
    failed: dict[str, int] = {}
    started = time.monotonic()
    try:
        with closing(_in_stages(cells, todo, force, other_bits)) as all_ended:
            for number, ended in enumerate(all_ended, start=1):
                name, code = ended.job.name, ended.exit_code
                line = f"run {number}/{len(todo)}  {name.ljust(width)}"
                if code == 0:
                    _note_order(cells, jobs)
                    left = duration((time.monotonic() - started) / number * (len(todo) - number))
                    results = cell_text(read_summary(folder_of(ended.job)))
                    print(f"{line}  {results}  {left} left", flush=True)
                    continue
                failure = Failure(ended.message, code)
                # An input that is wrong in the first run is probably wrong in all runs.
                is_input_of_all = code == InputError.exit_code and number == 1
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
        except InputError as error:
            # An error here would hide how the runs ended.
            print(f"warning: there is no table: {error}", file=sys.stderr)
    if failed:
        names = "\n".join(failed)
        message = f"error: {len(failed)} of {len(todo)} runs failed:\n{names}"
        raise Failure(message, min(failed.values()))


def _in_stages(
    cells: Sequence[Cell], jobs: Sequence[Job], force: bool, other_bits: bool
) -> Generator[Ended]:
    """Run jobs, and yield how each ended: those that others begin with come before the others.

    If one of them fails, the others are not run.
    """
    needed = {cell.after for cell in cells}
    first = [job for job in jobs if job.name in needed]
    others = [job for job in jobs if job.name not in needed]
    watch = naming()
    failed = False
    for stage in (first, others):
        runs = run_many(stage, watch, force=force, other_bits=other_bits, display=quiet_lines)
        for ended in runs:
            failed = failed or (stage is first and ended.exit_code != 0)
            yield ended
        if failed and others:
            print(
                f"{len(others)} runs begin with the weights of a run that failed, and are not run",
                file=sys.stderr,
            )
            return


def _refuse_left_behind(cells: Sequence[Cell], jobs: Sequence[Job], force: bool) -> None:
    """Raise `InputError` if a first run would end after another round than runs began with.

    Such runs could neither be continued nor be skipped as done. All count that `force` does not
    replace, also if they are not among the jobs.
    """
    needed = {cell.after for cell in cells}
    replaced = {folder_of(job) for job in jobs} if force else set()
    ways = choices()
    if force:
        ways += "\n--force replaces only the runs that you choose; choose this one too"
    for first in jobs:
        if first.name not in needed:
            continue
        grid = folder_of(replace(first, name=cells[0].grid))
        last = first.train.num_rounds
        for folder, number in _began_with(first.name, grid):
            if number != last and folder not in replaced:
                raise InputError(
                    f"grid.first: '{folder}' began with the weights of round {number} of "
                    f"'{first.name}', which would end after round {last}; {ways}"
                )


def _began_with(first: str, grid: Path) -> Generator[tuple[Path, int]]:
    """Yield each run in a grid's folder that began with weights of a first run, and their round."""
    for file in sorted(grid.rglob("job.toml")):
        # A run whose job is damaged says so when it is run.
        with suppress(InputError):
            weights = str(flat(read_toml(file)).get("model.weights", ""))
            number = Path(weights).stem.removeprefix("round-")
            if is_checkpoint_of(weights, first) and number.isdecimal():
                yield file.parent, int(number)


def _note_order(cells: list[Cell], jobs: list[Job]) -> None:
    """Note the order of the cells in the grid's folder, for tables, pages and figures."""
    grid = folder_of(replace(jobs[0], name=cells[0].grid))
    # If nothing can be written here, the runs say so.
    with suppress(OSError):
        grid.mkdir(parents=True, exist_ok=True)
        write_order(grid, [grid / Path(cell.name).relative_to(cell.grid) for cell in cells])


def _warn_of_changes(done: list[Job]) -> None:
    """Warn of each module of the user that has changed since runs were done with it."""
    names_by_module: dict[str, list[str]] = {}
    for job in done:
        for module in changed_since(folder_of(job)):
            names_by_module.setdefault(module, []).append(job.name)
    for module, names in names_by_module.items():
        old_runs = f"{len(names)} runs are of before: {', '.join(names[:RUNS_NAMED])}"
        remedy = "--force trains them again, with --only some of them"
        print(
            f"warning: {module} has changed since; the results of {old_runs}; {remedy}",
            file=sys.stderr,
        )


def naming() -> Callable[[Sequence[Job]], None]:
    """Return a function that names each run that begins, and where its rounds can be followed.

    A run may take hours.
    """
    named: set[str] = set()

    def watch(jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.name not in named:
                named.add(job.name)
                log = shown(folder_of(job) / "log.txt")
                print(f"{job.name} begins; its rounds: {log}", file=sys.stderr)

    return watch


def show_results(cells: list[Cell]) -> None:
    """Print the table of a grid's finished cells, and write it to the grid's folder."""
    done = finished(cells)
    if not done:
        return
    table = sheet(read_runs(map(folder_of, done)), "text")
    path = folder_of(replace(done[0], name=cells[0].grid)) / "table.csv"
    write_text(path, as_csv(table) + "\n")
    print(f"\nas a page: rayfed report {shown(path.parent)}")
    print(f"{len(done)} of {len(cells)} runs done; mean ± deviation over seeds, in {shown(path)}:")
    print_sheet(table, "text")


def finished(cells: list[Cell]) -> list[Job]:
    """Return the jobs of the cells that are done."""
    done = []
    for cell in cells:
        # A cell that was not chosen may be invalid.
        with suppress(InputError):
            job = cell.job()
            if is_done(job):
                done.append(job)
    return done
