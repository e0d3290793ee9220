"""Find the runs in a folder, and sort them in the order in which they are shown."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayfed.base.errors import InputError, nearest
from rayfed.base.files import write_text

NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)")
# This file in a grid's folder lists its runs in the order of the job file.
ORDER = "grid-order.txt"
# A run's folder has at least one of these next to its job.toml.
RESULTS = ("summary.json", "environment.json", "rounds.parquet")


def _is_run(folder: Path) -> bool:
    """Say whether a folder is a run's: it has a job.toml and results."""
    has_results = any((folder / name).exists() for name in RESULTS)
    return (folder / "job.toml").is_file() and has_results


def find_runs(folder: Path) -> list[Path]:
    """Return the folder if it is a run's, otherwise all runs below it.

    The runs of a grid come in the order of its job file, other runs in the order of their names. A
    folder with a job file but no results counts only if there is no run. So a job file of the user
    may lie in a folder above the runs. Raises `InputError` if there is none.
    """
    if _is_run(folder):
        return [folder]
    with_job = [file.parent for file in folder.rglob("job.toml")]
    runs = [place for place in with_job if _is_run(place)] or with_job
    if runs:
        orders: dict[Path, dict[str, int]] = {}
        return sorted(runs, key=lambda run: _place(run, orders))
    if not folder.exists():
        reason = f"there is no such folder{near_run(folder)}"
    elif folder.is_dir():
        reason = "it holds no job.toml, nor does any folder in it"
    else:
        reason = "it is a file"
    raise InputError(f"'{folder}' is not the folder of a run: {reason}")


def near_run(folder: Path) -> str:
    """Return a question about the run that was probably meant by a missing folder, or ''.

    It ends a message. The run is the folder of this name in `runs`, or a run or grid next to the
    missing folder with nearly its name.
    """
    in_runs = Path("runs") / folder
    if in_runs.is_dir():
        return f"; did you mean '{in_runs}'?"
    # A name without a folder is that of a run in `runs`.
    parents = [folder.parent, in_runs.parent] if len(folder.parts) == 1 else [folder.parent]
    for parent in parents:
        near = nearest(folder.name, _runs_in(parent), 0.6)
        if near:
            return f"; did you mean '{parent / near}'?"
    return ""


def _runs_in(parent: Path) -> list[str]:
    """Return the names of the runs and grids in a folder; none if it cannot be read."""
    names = []
    with suppress(OSError):
        for place in parent.iterdir():
            if (place / "job.toml").is_file() or (place / ORDER).is_file():
                names.append(place.name)
    return names


def write_order(grid: Path, runs: Sequence[Path]) -> None:
    """Note the order of a grid's runs in its folder.

    Runs that were noted before, and are not among these, come last.
    """
    names = [str(run.relative_to(grid)) for run in runs]
    noted = read_order(grid)
    if set(names) <= set(noted):
        # These are a part of the grid: their order is known.
        return
    order = dict.fromkeys(names + noted)
    write_text(grid / ORDER, "\n".join(order) + "\n")


def read_order(grid: Path) -> list[str]:
    """Return the runs that a grid's folder notes, as paths in it; empty if it is no grid."""
    try:
        return (grid / ORDER).read_bytes().decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _place(run: Path, orders: dict[Path, dict[str, int]]) -> tuple[Any, ...]:
    """Return what a run is sorted by: its grid's name, its place in the grid, its own name.

    `orders` collects the orders of the grids that were read.
    """
    for above in run.parents:
        if above not in orders:
            orders[above] = {name: place for place, name in enumerate(read_order(above))}
        order = orders[above]
        if order:
            place = order.get(str(run.relative_to(above)), len(order))
            return _natural(above), place, _natural(run)
    return _natural(run), 0, _natural(run)


def _natural(path: Path) -> list[float | str]:
    """Return what a name is sorted by: seed-10 comes after seed-2, and lr-0.1 after lr-1e-05.

    >>> _natural(Path("a/seed-10"))
    ['a/seed-', 10.0, '']
    """
    steps = NUMBER.split(str(path))
    return [float(step) if place % 2 else step for place, step in enumerate(steps)]
