"""Which runs a folder holds, and in which order they are shown."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayfed.base.errors import InputError, nearest
from rayfed.base.files import read_regular, write_text

NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)")
# In a grid's folder: its runs in the order of its job file.
ORDER = "grid-order.txt"


def _is_run(folder: Path) -> bool:
    beside = ("summary.json", "environment.json", "rounds.parquet")
    return (folder / "job.toml").is_file() and any((folder / name).exists() for name in beside)


def find_runs(folder: Path) -> list[Path]:
    """The folder, if it is a run's; else all runs below it, such as those of a grid.

    Raises `InputError` for none.

    The runs of a grid come in the order of its job file, others in the order of their names. A job
    file of the user's may lie in a folder above the runs.
    """
    if _is_run(folder):
        return [folder]
    jobs = [file.parent for file in folder.rglob("job.toml")]
    found = [each for each in jobs if _is_run(each)] or jobs
    if found:
        orders: dict[Path, dict[str, int]] = {}
        return sorted(found, key=lambda run: _place(run, orders))
    why = "it holds no job.toml, nor does any folder in it" if folder.is_dir() else "it is a file"
    why = why if folder.exists() else f"there is no such folder{near_run(folder)}"
    raise InputError(f"'{folder}' is not the folder of a run: {why}")


def near_run(folder: Path) -> str:
    """Return the end of a message about a folder that is missing: the run that was probably meant,
    or ''.

    It is the folder of this name in `runs`, or a run or grid beside the missing folder with nearly
    its name.
    """
    in_runs = Path("runs") / folder
    if in_runs.is_dir():
        return f"; did you mean '{in_runs}'?"
    with suppress(OSError):
        beside = [
            each.name
            for each in folder.parent.iterdir()
            if (each / "job.toml").is_file() or (each / ORDER).is_file()
        ]
        near = nearest(folder.name, beside, 0.6)
        return f"; did you mean '{folder.with_name(near)}'?" if near else ""
    return ""


def write_order(grid: Path, runs: Sequence[Path]) -> None:
    """Note in a grid's folder the order of its runs, as its job file has them; runs noted before
    come after these.
    """
    names = [str(run.relative_to(grid)) for run in runs]
    before = read_order(grid)
    if set(names) <= set(before):
        # A part of the grid.
        return
    write_text(grid / ORDER, "\n".join(dict.fromkeys([*names, *before])) + "\n")


def read_order(grid: Path) -> list[str]:
    """The runs that a grid's folder notes, as paths in it; empty for a folder that is not a grid's."""
    try:
        return read_regular(grid / ORDER).decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _place(run: Path, orders: dict[Path, dict[str, int]]) -> tuple[Any, ...]:
    """What runs are sorted by: their grid's name, their place in the grid, their own name."""
    for above in run.parents:
        if above not in orders:
            orders[above] = {name: place for place, name in enumerate(read_order(above))}
        order = orders[above]
        if order:
            place = order.get(str(run.relative_to(above)), len(order))
            return _natural(above), place, _natural(run)
    return _natural(run), 0, _natural(run)


def _natural(path: Path) -> list[float | str]:
    """What a name is sorted by: seed-10 comes after seed-2, lr-0.1 after lr-1e-05."""
    steps = NUMBER.split(str(path))
    return [float(step) if place % 2 else step for place, step in enumerate(steps)]
