"""Figures of the page as data: what its script draws, and the same numbers as a table for those who
do not see it.

A figure stays small however long a run is: past some points, rounds are left out, and its note says
so. Shapes: `P` points of a line, `C` rows of a heat map.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rayfed.report.table import Difference

# Of a line.
MOST_POINTS = 400
# Of a heat map.
MOST_CELLS = 40_000
# Of a table.
MOST_ROWS = 50
# Of the table of a heat map.
MOST_COLUMNS = 12


class Chart(NamedTuple):
    """A figure: `data` is for the page's script."""

    # No two in a page are the same.
    key: str
    title: str
    data: dict[str, Any]
    # Of its table.
    head: list[str]
    rows: list[list[str]]
    # What its table leaves out, or the figure itself.
    note: str = ""
    # Over the page, else beside another one.
    wide: bool = False


class Line(NamedTuple):
    """A line, with a band around it if it is of several values."""

    name: str
    # Its look.
    number: int
    x: np.ndarray  # (P,)
    y: np.ndarray  # (P,)
    low: np.ndarray | None = None  # (P,)
    high: np.ndarray | None = None  # (P,)

    def thinned(self) -> "Line":
        """The line with a part of its points, if it has many."""
        kept = thinned(len(self.x))
        band = [end if end is None else end[kept] for end in (self.low, self.high)]
        return Line(self.name, self.number, self.x[kept], self.y[kept], *band)

    def data(self) -> dict[str, Any]:
        """For the page's script."""
        ends = {"y": self.y, "low": self.low, "high": self.high}
        numbers = {name: rounded(values) for name, values in ends.items() if values is not None}
        return {"name": self.name, "number": self.number, "x": self.x.tolist(), **numbers}

    def value(self, i: int, unit: str, digits: int) -> str:
        """A point in words, with its band."""
        if not math.isfinite(self.y[i]):
            return "n/a"
        value = f"{self.y[i]:.{digits}f}{unit}"
        if self.low is None or self.high is None:
            return value
        return f"{value} ({self.low[i]:.{digits}f} to {self.high[i]:.{digits}f})"


def lines(
    key: str,
    title: str,
    y: str,
    drawn: Sequence[Line],
    unit: str = "",
    digits: int = 1,
    rules: Sequence[tuple[float, str]] = (),
    marked: tuple[int, float, str] | None = None,
    zero: bool = False,
) -> Chart:
    """Lines by round; horizontal `rules` with their names, and a point that is `marked` with its
    name.

    With `zero`, the vertical axis begins at 0, or below it where values are negative.
    """
    evaluated = len({x for line in drawn for x in line.x.tolist()})
    drawn = [line.thinned() for line in drawn]
    # By round.
    cells: dict[int, list[str]] = {}
    for number, line in enumerate(drawn):
        for i, at in enumerate(line.x.tolist()):
            cells.setdefault(at, [""] * len(drawn))[number] = line.value(i, unit, digits)
    rounds = sorted(cells)
    shown = [rounds[i] for i in thinned(len(rounds), MOST_ROWS)]
    data = {
        "kind": "lines",
        "x": "round",
        "y": y,
        "unit": unit,
        "digits": digits,
        "zero": zero,
        "series": [line.data() for line in drawn],
        "rules": [{"y": at, "name": name} for at, name in rules if math.isfinite(at)],
        "marked": dict(zip(("x", "y", "name"), marked, strict=True)) if marked else None,
    }
    head = ["round", *(line.name for line in drawn)]
    note = fewer("rounds", evaluated, len(shown), len(rounds))
    return Chart(key, title, data, head, [[str(x), *cells[x]] for x in shown], note)


def heat(
    key: str,
    title: str,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    x: str,
    unit: str,
    top: float | None = None,
    slider: bool = False,
    faint: bool = False,
) -> Chart:
    """Values (C, columns) from 0 to `top`, or the largest; if `faint`, the page shines through
    small ones.

    With a slider, a column can be looked at by itself.
    """
    kept = thinned(len(columns), max(MOST_CELLS // max(len(rows), 1), 2))
    cells, names = values[:, kept], [columns[i] for i in kept]
    largest = top or float(np.nanmax(cells, initial=0.0)) or 1.0
    data = {
        "kind": "heat",
        "x": x,
        "unit": unit,
        "top": largest,
        "slider": slider,
        "faint": faint,
        "columns": names,
        "rows": list(rows),
        "values": [rounded(row) for row in cells],
    }
    few = thinned(len(names), MOST_COLUMNS)
    digits = 1 if np.any(np.nan_to_num(cells) % 1) else 0
    table = []
    for name, row in zip(rows[:MOST_ROWS], cells[:, few], strict=False):
        table.append(
            [name, *("" if math.isnan(value) else f"{value:,.{digits}f}" for value in row)]
        )
    notes = [
        fewer("classes", len(rows), len(table), len(rows)),
        fewer(f"{x}s", len(columns), len(few), len(names)),
    ]
    head = ["class", *(f"{x} {names[i]}" for i in few)]
    return Chart(key, title, data, head, table, " ".join(filter(None, notes)), wide=True)


def dots(
    key: str,
    title: str,
    x: str,
    y: str,
    points: Sequence[tuple[str, float, float, int]],
    meaning: str,
) -> Chart:
    """Points with a name, x, y and a round, the more opaque the later.

    Of too many, evenly spread ones.
    """
    drawn = [points[i] for i in thinned(len(points), 2 * MOST_POINTS)]
    places = [
        [name, *rounded(np.array([at_x, at_y])), number] for name, at_x, at_y, number in drawn
    ]
    rows = [[name, f"{at_x:.3g}", f"{at_y:.3g}"] for name, at_x, at_y, _ in drawn[:MOST_ROWS]]
    note = f"{meaning} {fewer('points', len(points), len(rows), len(drawn))}".strip()
    return Chart(
        key, title, {"kind": "dots", "x": x, "y": y, "points": places}, ["point", x, y], rows, note
    )


def gaps(key: str, title: str, x: str, differences: Sequence[tuple[str, Difference]]) -> Chart:
    """Differences by name, with their intervals where there are any, and what they are from."""
    rows: list[list[str]] = []
    points: list[dict[str, Any]] = []
    for name, gap in differences:
        reference = f"{gap.reference} ({gap.pairs} {'pair' if gap.pairs == 1 else 'pairs'})"
        ends = f"{gap.interval[0]:+.2f} to {gap.interval[1]:+.2f}" if gap.interval else "n/a"
        rows.append([name, f"{gap.mean:+.2f}", ends, reference])
        points.append({"name": name, "mean": gap.mean, "ends": gap.interval, "from": reference})
    head = ["run", x, "95 % interval", "from"]
    return Chart(key, title, {"kind": "gaps", "x": x, "points": points}, head, rows, wide=True)


def thinned(count: int, most: int = MOST_POINTS) -> np.ndarray:
    """Evenly spread places of so many, with the first and the last.

    >>> thinned(4), thinned(10, 4)
    (array([0, 1, 2, 3]), array([0, 3, 6, 9]))
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def fewer(things: str, there: int, table: int, figure: int) -> str:
    """A sentence on what the table and the figure leave out.

    >>> fewer("rounds", 200, 50, 200), fewer("rounds", 3, 3, 3)
    ('Of 200 rounds, the table has 50; the Parquet files have all.', '')
    """
    parts = {"the table": table, "the figure": figure}
    told = " and ".join(f"{part} has {shown:,}" for part, shown in parts.items() if shown < there)
    return f"Of {there:,} {things}, {told}; the Parquet files have all." if told else ""


def rounded(values: np.ndarray) -> list[float | None]:
    """Numbers of six digits, and None for those that cannot be drawn.

    >>> rounded(np.array([0.1 + 0.2, np.nan]))
    [0.3, None]
    """
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
