"""A paper's table beside our runs, as long as it has numbers for them."""

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


@dataclass(frozen=True)
class Paper:
    """A table of a paper: its grid, and its numbers, by the name of a cell without the seed."""

    cells: dict[str, Cell]
    numbers: dict[str, list[Theirs]]

    def unlike(self, run: Run) -> list[str]:
        """How a run of the grid differs from it, with its own seed: a partition may follow the
        seed.
        """
        of_grid = Cell(self.cells[plain(run.name)].tables | {"seed": run.job["seed"]}).job().table()
        return differences(protocol(of_grid), protocol(run.job), "in the grid", "here")

    def baseline(self, run: Run, runs: Sequence[Run]) -> Run | None:
        """The run of FedAvg in the same setting, of the same data, partition, seed and number of
        rounds.
        """
        meant = self.cells[plain(run.name)].setting, BASELINE
        cells = [self.cells.get(plain(other.name)) for other in runs]
        same = (
            other
            for other, cell in zip(runs, cells, strict=True)
            if cell and (cell.setting, cell.method) == meant
        )
        return next((other for other in same if pair_of(other) == pair_of(run)), None)


def plain(name: str) -> str:
    """A run's name without the grid's own name, which may be changed, and without the seed."""
    return SEED.sub("", name).partition("/")[2]


def grids() -> dict[str, Path]:
    """The papers' grids by their names, such as fedntd/table1.

    They are those in jobs/papers in the current folder, or if there is none, those that came with
    rayfed.
    """
    here = Path("jobs/papers")
    folder = here if here.is_dir() else EXAMPLES / "papers"
    return {
        str(file.relative_to(folder).with_suffix("")): file
        for file in sorted(folder.glob("*/*.toml"))
    }


def grid_of(name: str) -> Path:
    """The job file of a paper's table. Raises `InputError` where `grids` has no such name."""
    every = grids()
    if name not in every:
        raise InputError(
            f"'{name}': there is no such grid in jobs/papers{did_you_mean(name, every)}"
        )
    return every[name]


def read_paper(name: str) -> Paper:
    """A table of a paper, such as fedntd/table1.

    Raises `InputError` where `grids` has no such name.
    """
    path = grid_of(name)
    cells = {plain(cell.name): cell for cell in expand(read_toml(path))}
    with (path.parent / "results.csv").open(newline="", encoding="utf-8") as file:
        printed = [line for line in csv.DictReader(file) if line["grid"] == path.stem]
    numbers = {
        name: [
            Theirs(*(line[key] for key in ("metric", "value", "spread", "stat", "note")))
            for line in printed
            if (line["setting"], line["method"]) == (cell.setting, cell.method)
        ]
        for name, cell in cells.items()
    }
    return Paper(cells, numbers)


# Beside ours
# ----------------------------------------------------------------------------------------------------------

HEAD = ["run", "seeds", "rounds", "metric", "ours", "paper", "difference", "notes"]
# By a word of a metric.
UNITS = {"accuracy": "%", "forgetting": "of 1"}
# By the first word of a metric; 2 for the others.
DIGITS = {
    "forgetting": 3,
    "alignment": 3,
    "rounds": 1,
}


def sheet(runs: Sequence[Run], paper: Paper, of: str = "last") -> Sheet:
    """A line for each number that the paper has for our runs; `of` which round where the paper does
    not say.

    Raises `InputError` if no run is of the paper's grid.
    """
    every_row = rows(runs, of)
    evaluated = [run for row in every_row for run in (*row.runs, *row.behind)]
    of_paper = [row for row in every_row if plain(row.runs[0].name) in paper.cells]
    if not of_paper:
        theirs, first = next(iter(paper.cells.values())).name, every_row[0].runs[0].name
        raise InputError(
            "none of the runs is of the paper's grid: "
            f"its runs are named as {SEED.sub('', theirs)}, this one {SEED.sub('', first)}"
        )
    of_paper.sort(key=lambda row: [*paper.cells].index(plain(row.runs[0].name)))
    lines: list[list[str]] = []
    records: list[dict[str, Any]] = []
    # Note -> its number below the table.
    marks: dict[str, int] = {}
    for row in of_paper:
        about = remarks(row)
        unlike = paper.unlike(row.runs[0])
        if unlike:
            about.insert(0, "other than the paper's grid: " + "; ".join(unlike))
        for number in paper.numbers[plain(row.runs[0].name)]:
            stat, of_ours = _ours(row, number, evaluated, paper, of)
            notes = [*about, *of_ours]
            if number.note:
                notes.append(f"paper: {number.note}")
            numbered = sorted(marks.setdefault(note, len(marks) + 1) for note in notes)
            cells = [row.name, str(len(row.runs)), rounds_text(row), *_cells(number, stat)]
            lines.append([*cells, ", ".join(map(str, numbered))])
            records.append(_record(row, number, stat, notes))
    if not lines:
        raise InputError(f"results.csv has no number for {', '.join(row.name for row in of_paper)}")
    below = [f"{mark}. {note}" for note, mark in marks.items()]
    unprinted = [row.name for row in of_paper if not paper.numbers[plain(row.runs[0].name)]]
    if unprinted:
        below.append(f"results.csv has no number for {', '.join(unprinted)}")
    others = [row.name for row in every_row if row not in of_paper]
    if others:
        below.append(f"not of the paper's grid: {', '.join(others)}")
    return Sheet(HEAD, lines, below + left_out(runs), records)


def _ours(
    row: Row, number: Theirs, runs: Sequence[Run], paper: Paper, of: str
) -> tuple[Stat | None, list[str]]:
    """Our mean over the seeds, None unless all runs have a number, and notes."""
    of_runs = [ours(run, number, paper.baseline(run, runs), of) for run in row.runs]
    lacking = [one for one in of_runs if math.isnan(one.value)]
    if not lacking:
        notes = [f"ours: {one.note}" for one in of_runs if one.note]
        return spread([one.value for one in of_runs]), list(dict.fromkeys(notes))
    part = f" (so in {len(lacking)} of {len(of_runs)} runs)" if len(lacking) < len(of_runs) else ""
    return None, list(dict.fromkeys(f"ours: {one.note or 'not a number'}{part}" for one in lacking))


def _cells(number: Theirs, stat: Stat | None) -> list[str]:
    """The metric, ours, the paper's, and the difference."""
    digits = DIGITS.get(number.metric.split("_")[0], 2)
    metric = f"{number.metric}, {number.stat}" if number.stat else number.metric
    units = [unit for word, unit in UNITS.items() if word in number.metric]
    metric += f" ({units[0]})" if units else ""
    theirs = f"{number.value} ± {number.spread}" if number.spread else number.value
    if stat is None:
        return [metric, "", theirs, ""]
    return [metric, stat_text(stat, digits), theirs, f"{stat[0] - float(number.value):+.{digits}f}"]


def _record(row: Row, number: Theirs, stat: Stat | None, notes: Sequence[str]) -> dict[str, Any]:
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
