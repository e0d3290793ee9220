"""Runs as a table, as papers print it: means over seeds, paired differences from the first run, the paper's numbers.

Accuracies are in percent. Two runs are a pair if they have the same data, partition, seed and number of rounds, so that
only the method, or whatever else their jobs say, differs between them.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.errors import InputError, did_you_mean
from rayfed.grid import Cell, expand, spread
from rayfed.job import MEASURE, differences, read_toml
from rayfed.report.read import SEED, Group, Run, grouped, shorten

LAST = 10  # evaluated rounds in the mean of the last
RESAMPLES = 10_000
FEWEST = 3  # pairs for which an interval says anything
PAPERS = Path("jobs/papers")

Stat = tuple[float, float | None]  # a mean, and the sample standard deviation if there are several values


@dataclass(frozen=True)
class Difference:
    """From the reference, in points of accuracy: the mean over pairs, and its 95 % interval from 3 pairs on."""

    reference: str
    pairs: int
    mean: float
    interval: tuple[float, float] | None

    @property
    def sure(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class Row:
    """A group of runs that differ in their seeds."""

    name: str
    runs: Sequence[Run]
    figures: dict[str, Stat]  # best, last, last_10, forgetting
    difference: Difference | None  # None for a reference


def rows(runs: Sequence[Run], of: str = "last") -> list[Row]:
    """A row for each group; the difference `of` "best", "last" or "last_10" is from the first group that has its pairs.

    Raises `InputError` for a run without an evaluated round.
    """
    groups = grouped(runs)
    made: list[Row] = []
    for name, group in zip(shorten(groups), groups, strict=True):
        for run in group.runs:
            if not (run.evaluated[1:]).any():
                raise InputError(f"'{run.folder}' has no evaluated round yet, so there is nothing to put into a table")
        figures = {key: spread([_figures(run)[key] for run in group.runs]) for key in _figures(group.runs[0])}
        found = (_difference(row, group, of) for row in made if row.difference is None)
        made.append(Row(name, group.runs, figures, next((difference for difference in found if difference), None)))
    return made


def _figures(run: Run) -> dict[str, float]:
    accuracy = 100 * run.rounds["test_accuracy"][run.evaluated][1:]
    last = float(np.mean(accuracy[-LAST:]))
    forgetting = float(run.rounds["forgetting"][run.evaluated][-1])
    return {"best": float(accuracy.max()), "last": float(accuracy[-1]), "last_10": last, "forgetting": forgetting}


def _pair(run: Run) -> tuple[Any, ...]:
    """What the two runs of a pair have in common."""
    return run.job.get("seed", 0), *map(run.environment.get, ("data", "partition")), run.summary["rounds"]


def _difference(reference: Row, group: Group, of: str) -> Difference | None:
    known = {_pair(run): run for run in reference.runs}
    pairs = [(known[_pair(run)], run) for run in group.runs if _pair(run) in known]
    if not pairs:
        return None
    gaps = [_figures(run)[of] - _figures(other)[of] for other, run in pairs]
    return Difference(reference.name, len(gaps), float(np.mean(gaps)), interval(gaps))


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % interval of the mean: percentiles of means of values drawn again with replacement (bootstrap).

    None for fewer than three values.

    >>> interval([1.0, 1.0, 1.0]), interval([1.0, 2.0])
    ((1.0, 1.0), None)
    """
    if len(values) < FEWEST:
        return None
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.asarray(values)[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


# Beside a paper -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theirs:
    """A paper's number for a row: accuracy in percent, or forgetting."""

    metric: str
    value: float
    spread: float  # nan where it gives none
    stat: str  # of which round: best, last, or blank where the paper does not say
    note: str


@dataclass(frozen=True)
class Paper:
    """A table of a paper: its grid, and its numbers, by the name of a cell without the seed."""

    cells: dict[str, Cell]
    numbers: dict[str, list[Theirs]]

    def of(self, run: Run) -> tuple[list[Theirs], list[str]]:
        """The paper's numbers for a run, and how the run differs from the grid; nothing for a run of another grid."""
        name = SEED.sub("", run.name)
        if name not in self.cells:
            return [], []
        meant = protocol(self.cells[name].job().table())
        return self.numbers.get(name, []), differences(meant, protocol(run.job), "in the grid", "here")


def protocol(job: dict[str, Any]) -> dict[str, Any]:
    """What a number depends on in a job's tables, but for the seed and where the images lie."""
    kept = {key: value for key, value in job.items() if key not in ("name", "seed", "ray", "output", *MEASURE)}
    return {**kept, "data": {key: value for key, value in job["data"].items() if key not in ("source", "test")}}


def read_paper(name: str, folder: Path = PAPERS) -> Paper:
    """A table of a paper, such as fedntd/table1. Raises `InputError` where `folder` has no such grid."""
    path = folder / f"{name}.toml"
    if not path.is_file():
        known = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.glob("*/*.toml"))
        where = f"; the grids are sought in {folder}, below the current folder" if not known else ""
        raise InputError(f"--paper {name}: there is no such grid{did_you_mean(name, known, '')}{where}")
    cells = {SEED.sub("", cell.name): cell for cell in expand(read_toml(path))}
    numbers: dict[str, list[Theirs]] = {}
    with (path.parent / "results.csv").open(newline="") as file:
        found = [line for line in csv.DictReader(file) if line["grid"] == path.stem]
    for name, cell in cells.items():
        numbers[name] = [
            Theirs(line["metric"], float(line["value"]), float(line["spread"] or "nan"), line["stat"], line["note"])
            for line in found
            if (line["setting"], line["method"]) == (cell.setting, cell.method)
        ]
    return Paper(cells, numbers)


# As text --------------------------------------------------------------------------------------------------------------

HEADS = {
    "best": "best (%)",
    "last": "last (%)",
    "last_10": f"mean of last {LAST} at most (%)",
    "forgetting": "forgetting",
}
MARKS = {"text": "{}*", "md": "**{}**", "latex": r"\textbf{{{}}}"}  # of a difference that is sure


def cells_of(found: Sequence[Row], paper: Paper | None, form: str) -> tuple[list[str], list[list[str]], list[str]]:
    """The head, the rows, and notes to be printed below them."""
    head = ["run", "seeds", "rounds", *HEADS.values(), "difference (points)"]
    head += ["paper's accuracy (%)", "ours less theirs", "paper's forgetting"] if paper else []
    made, notes, known = [], [], False
    for row in found:
        played, wanted = row.runs[0].summary["rounds"], row.runs[0].job["train"]["num_rounds"]
        line = [row.name, str(len(row.runs)), str(played) if played == wanted else f"{played} of {wanted}"]
        line += [_stat(row.figures[key], 3 if key == "forgetting" else 2) for key in HEADS]
        line += [_gap(row.difference, form)]
        if paper:
            theirs, differing = paper.of(row.runs[0])
            known |= bool(theirs)
            line += _beside(row, {number.metric: number for number in theirs})
            notes += [f"{row.name}: {difference}" for difference in differing]
            notes += [f"{row.name}: the paper's {number.metric} is {number.note}" for number in theirs if number.note]
        made.append(line)
    if paper and not known:
        notes.append(f"the paper has no number for these runs; its grid's runs are named as {next(iter(paper.cells))}")
    return head, made, notes


def _beside(row: Row, theirs: Mapping[str, Theirs]) -> list[str]:
    """The paper's accuracy, ours less theirs, and the paper's forgetting; '' where it has no such number."""
    accuracy, forgetting = theirs.get("test_accuracy"), theirs.get("forgetting")
    if accuracy is None:
        return ["", "", _theirs(forgetting)]
    gap = row.figures[accuracy.stat or "last"][0] - accuracy.value
    return [f"{_theirs(accuracy)} ({accuracy.stat or 'round not said'})", f"{gap:+.2f}", _theirs(forgetting)]


def _stat(stat: Stat, digits: int) -> str:
    mean, deviation = stat
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def _gap(difference: Difference | None, form: str) -> str:
    if difference is None:
        return ""
    text = f"{difference.mean:+.2f}"
    if difference.interval is not None:
        text += f" [{difference.interval[0]:+.2f}, {difference.interval[1]:+.2f}]"
    return MARKS[form].format(text) if difference.sure else text


def _theirs(number: Theirs | None) -> str:
    return "" if number is None else _stat((number.value, None if np.isnan(number.spread) else number.spread), 2)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *escaped))


def latex(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in LaTeX, for the package booktabs."""
    rows = [" & ".join(_tex(cell) for cell in line) + r" \\" for line in (head, *lines)]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}"
    return "\n".join([begin, r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}"])


def _tex(cell: str) -> str:
    bold = cell.startswith(r"\textbf{")
    escaped = cell if bold else re.sub(r"([&%$#_{}])", r"\\\1", cell)
    return escaped.replace("±", r"$\pm$")


def as_csv(found: Sequence[Row], paper: Paper | None) -> str:
    """Comma-separated values: plain numbers, each in a column of its own."""
    table = []
    for row in found:
        line: dict[str, Any] = {"run": row.name, "seeds": len(row.runs), "rounds": row.runs[0].summary["rounds"]}
        for key, (mean, deviation) in row.figures.items():
            line |= {key: mean, f"{key}_spread": deviation}
        gap = row.difference
        low, high = gap.interval if gap and gap.interval else (None, None)
        line |= {
            "difference": gap and gap.mean,
            "difference_from": low,
            "difference_to": high,
            "pairs": gap and gap.pairs,
        }
        if paper:
            numbers = {number.metric: number for number in paper.of(row.runs[0])[0]}
            for metric in ("test_accuracy", "forgetting"):
                line |= {f"paper_{metric}": numbers[metric].value if metric in numbers else None}
        table.append(line)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue().rstrip("\n")
