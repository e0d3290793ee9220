"""A paper's table next to our runs, where the paper has numbers for them."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfed.base.errors import InputError, did_you_mean
from rayfed.grid.cells import Cell, expand
from rayfed.job import EXAMPLES, differences, read_toml
from rayfed.papers.ours import Theirs, ours
from rayfed.report.forms import Sheet
from rayfed.report.read import SEED, Run
from rayfed.report.table import Row, left_out, pair_of, protocol, remarks, rounds_text, rows
from rayfed.report.words import Stat, spread, stat_text

# The method from which papers count rounds to a target, and speed-ups.
BASELINE = "fedavg"
# The file of a paper that says which tables and figures it has. The other files are grids.
ITEMS = "items.toml"


@dataclass(frozen=True)
class Paper:
    """A table of a paper: its grid and its numbers, by the name of a cell without the seed."""

    cells: dict[str, Cell]
    numbers: dict[str, list[Theirs]]

    def unlike(self, run: Run) -> list[str]:
        """Say how a run of the grid differs from the grid.

        The grid's job gets the seed of the run, as a partition may follow the seed.
        """
        cell = self.cells[plain(run.name)]
        of_grid = protocol(Cell(cell.tables | {"seed": run.job["seed"]}).job().table())
        of_run = protocol(run.job)
        if cell.after:
            # Both begin with the weights of the first run, whatever folder the runs are in.
            for tables in (of_grid, of_run):
                tables["model"] = {**tables["model"], "weights": ""}
        return differences(of_grid, of_run, "in the grid", "here")

    def baseline(self, run: Run, runs: Sequence[Run]) -> Run | None:
        """Return the run of FedAvg in the same setting that is a pair with a run.

        It has the same data, partition, seed and number of rounds. If there is none, it is None.
        """
        setting = self.cells[plain(run.name)].setting
        for other in runs:
            cell = self.cells.get(plain(other.name))
            if not cell or (cell.setting, cell.method) != (setting, BASELINE):
                continue
            if pair_of(other) == pair_of(run):
                return other
        return None


def plain(name: str) -> str:
    """Return a run's name without the seed and without the grid's name, which may be changed.

    >>> plain("table1/mnist/fedavg/seed-0")
    'mnist/fedavg'
    """
    return SEED.sub("", name).partition("/")[2]


def grids() -> dict[str, Path]:
    """Return the papers' grids by their names, such as fedntd/table1.

    They are in jobs/papers in the current folder, or if there is no such folder, in rayfed.
    """
    here = Path("jobs/papers")
    folder = here if here.is_dir() else EXAMPLES / "papers"
    return {
        str(file.relative_to(folder).with_suffix("")): file
        for file in sorted(folder.glob("*/*.toml"))
        if file.name != ITEMS
    }


def grid_of(name: str) -> Path:
    """Return the job file of a paper's table.

    Raises `InputError` if `grids` has no such name.
    """
    files = grids()
    if name not in files:
        raise InputError(
            f"'{name}': there is no such grid in jobs/papers{did_you_mean(name, files)}"
        )
    return files[name]


def read_paper(name: str) -> Paper:
    """Read a table of a paper, such as fedntd/table1.

    Raises `InputError` if `grids` has no such name.
    """
    path = grid_of(name)
    cells = {plain(cell.name): cell for cell in expand(read_toml(path))}
    with (path.parent / "results.csv").open(newline="", encoding="utf-8") as file:
        printed = [line for line in csv.DictReader(file) if line["grid"] == path.stem]
    numbers = {name: _numbers_of(cell, printed) for name, cell in cells.items()}
    return Paper(cells, numbers)


def _numbers_of(cell: Cell, printed: Sequence[dict[str, str]]) -> list[Theirs]:
    """Return the numbers that a paper prints for a cell."""
    numbers = []
    for line in printed:
        if (line["setting"], line["method"]) == (cell.setting, cell.method):
            numbers.append(
                Theirs(line["metric"], line["value"], line["spread"], line["stat"], line["note"])
            )
    return numbers


# Next to ours
# --------------------------------------------------------------------------------------------------

HEAD = ["run", "seeds", "rounds", "metric", "ours", "paper", "difference", "notes"]
# The unit of a metric, by a word in its name.
UNITS = {"accuracy": "%", "forgetting": "of 1"}
# The digits of a metric, by the first word of its name. The others have 2.
DIGITS = {"forgetting": 3, "alignment": 3, "rounds": 1}


def sheet(runs: Sequence[Run], paper: Paper, figure: str = "last") -> Sheet:
    """Return a line for each number that the paper has for our runs.

    Where the paper does not say of which round a number is, `figure` does. Raises `InputError` if
    no run is of the paper's grid, or if the paper has no number for the runs.
    """
    every_row = rows(runs, figure)
    evaluated: list[Run] = []
    for row in every_row:
        evaluated += [*row.runs, *row.behind]
    of_paper = [row for row in every_row if _name(row) in paper.cells]
    if not of_paper:
        name_there = SEED.sub("", next(iter(paper.cells.values())).name)
        name_here = SEED.sub("", every_row[0].runs[0].name)
        raise InputError(
            "none of the runs is of the paper's grid: "
            f"its runs are named as {name_there}, this one {name_here}"
        )
    order = list(paper.cells)
    of_paper.sort(key=lambda row: order.index(_name(row)))
    lines: list[list[str]] = []
    records: list[dict[str, Any]] = []
    # The number of each note below the table.
    marks: dict[str, int] = {}
    for row in of_paper:
        about = _about(row, paper)
        for number in paper.numbers[_name(row)]:
            stat, notes = _ours(row, number, evaluated, paper, figure)
            notes = about + notes
            if number.note:
                notes.append(f"paper: {number.note}")
            numbered = sorted(marks.setdefault(note, len(marks) + 1) for note in notes)
            cells = [row.name, str(len(row.runs)), rounds_text(row)]
            cells += _cells(number, stat)
            cells.append(", ".join(map(str, numbered)))
            lines.append(cells)
            records.append(_record(row, number, stat, notes))
    if not lines:
        raise InputError(f"results.csv has no number for {', '.join(row.name for row in of_paper)}")
    below = [f"{mark}. {note}" for note, mark in marks.items()]
    below += _not_shown(every_row, of_paper, paper)
    return Sheet(HEAD, lines, below + left_out(runs), records)


def _name(row: Row) -> str:
    """Return the name of a row's cell in a paper's grid."""
    return plain(row.runs[0].name)


def _about(row: Row, paper: Paper) -> list[str]:
    """Return the notes on all numbers of a row."""
    notes = remarks(row)
    unlike = paper.unlike(row.runs[0])
    if unlike:
        notes.insert(0, "other than the paper's grid: " + "; ".join(unlike))
    return notes


def _not_shown(every_row: Sequence[Row], of_paper: Sequence[Row], paper: Paper) -> list[str]:
    """Say which rows the paper has no number for, and which are not of its grid."""
    notes = []
    unprinted = [row.name for row in of_paper if not paper.numbers[_name(row)]]
    if unprinted:
        notes.append(f"results.csv has no number for {', '.join(unprinted)}")
    others = [row.name for row in every_row if row not in of_paper]
    if others:
        notes.append(f"not of the paper's grid: {', '.join(others)}")
    return notes


def _ours(
    row: Row, number: Theirs, runs: Sequence[Run], paper: Paper, figure: str
) -> tuple[Stat | None, list[str]]:
    """Return our mean over the seeds, which is None unless all runs have a number, and notes."""
    of_runs = [ours(run, number, paper.baseline(run, runs), figure) for run in row.runs]
    lacking = [of_run for of_run in of_runs if math.isnan(of_run.value)]
    if not lacking:
        notes = [f"ours: {of_run.note}" for of_run in of_runs if of_run.note]
        return spread([of_run.value for of_run in of_runs]), list(dict.fromkeys(notes))
    part = f" (so in {len(lacking)} of {len(of_runs)} runs)" if len(lacking) < len(of_runs) else ""
    reasons = [f"ours: {of_run.note or 'not a number'}{part}" for of_run in lacking]
    return None, list(dict.fromkeys(reasons))


def _cells(number: Theirs, stat: Stat | None) -> list[str]:
    """Return the cells of the metric, our number, the paper's number, and the difference."""
    digits = DIGITS.get(number.metric.split("_")[0], 2)
    metric = f"{number.metric}, {number.stat}" if number.stat else number.metric
    units = [unit for word, unit in UNITS.items() if word in number.metric]
    metric += f" ({units[0]})" if units else ""
    theirs = f"{number.value} ± {number.spread}" if number.spread else number.value
    if stat is None:
        return [metric, "", theirs, ""]
    return [metric, stat_text(stat, digits), theirs, f"{stat[0] - float(number.value):+.{digits}f}"]


def _record(row: Row, number: Theirs, stat: Stat | None, notes: Sequence[str]) -> dict[str, Any]:
    """Return a line's numbers for other programs, by the names of their columns."""
    mean, deviation = stat or (None, None)
    return {
        "run": row.name,
        "seeds": len(row.runs),
        "rounds": row.runs[0].summary["rounds"],
        "metric": number.metric,
        "stat": number.stat,
        "ours": mean,
        "ours_spread": deviation,
        "paper": number.value,
        "paper_spread": number.spread,
        "difference": None if mean is None else mean - float(number.value),
        "notes": "; ".join(notes),
    }
