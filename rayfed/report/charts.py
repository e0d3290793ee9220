"""Figures of the page as data for its script, and as tables for readers who do not see figures.

A figure stays small however long a run is: past some points, rounds are left out, and its note says
so. Shapes: `P` points of a line, `C` rows of a heat map.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rayfed.report.table import Difference

# Most points of a line.
MOST_POINTS = 400
# Most cells of a heat map.
MOST_CELLS = 40_000
# Most rows of a table.
MOST_ROWS = 50
# Most columns of the table of a heat map.
MOST_COLUMNS = 12


class Chart(NamedTuple):
    """A figure: `data` is for the page's script, `head` and `rows` are its table."""

    # Each figure of a page has another key.
    key: str
    title: str
    data: dict[str, Any]
    head: list[str]
    rows: list[list[str]]
    # What the table or the figure leaves out.
    note: str = ""
    # A wide figure is as wide as the page. Two other figures stand side by side.
    wide: bool = False


class Line(NamedTuple):
    """A line, with a band around it if it shows several values."""

    name: str
    # The number chooses the look of the line.
    number: int
    x: np.ndarray  # (P,)
    y: np.ndarray  # (P,)
    low: np.ndarray | None = None  # (P,)
    high: np.ndarray | None = None  # (P,)

    def thinned(self) -> "Line":
        """Return the line with a part of its points, if it has many."""
        places = thinned(len(self.x))
        low = None if self.low is None else self.low[places]
        high = None if self.high is None else self.high[places]
        return Line(self.name, self.number, self.x[places], self.y[places], low, high)

    def data(self) -> dict[str, Any]:
        """Return the line as data for the page's script."""
        data = {"name": self.name, "number": self.number, "x": self.x.tolist()}
        columns = {"y": self.y, "low": self.low, "high": self.high}
        for name, values in columns.items():
            if values is not None:
                data[name] = rounded(values)
        return data

    def value(self, i: int, unit: str, digits: int) -> str:
        """Return a point in words, with its band."""
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
    """Return a chart of lines by round.

    Horizontal `rules` have names, and the point that is `marked` has one. With `zero`, the vertical
    axis begins at 0, or below it where values are negative.
    """
    evaluated: set[int] = set()
    for line in drawn:
        evaluated |= set(line.x.tolist())
    drawn = [line.thinned() for line in drawn]
    cells = _cells(drawn, unit, digits)
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
        "rules": [{"y": y, "name": name} for y, name in rules if math.isfinite(y)],
        "marked": dict(zip(("x", "y", "name"), marked, strict=True)) if marked else None,
    }
    head = ["round"] + [line.name for line in drawn]
    note = fewer("rounds", len(evaluated), len(shown), len(rounds))
    return Chart(key, title, data, head, [[str(x), *cells[x]] for x in shown], note)


def _cells(drawn: Sequence[Line], unit: str, digits: int) -> dict[int, list[str]]:
    """Return the table of lines by round: a cell for each line, empty where it has no point."""
    cells: dict[int, list[str]] = {}
    for number, line in enumerate(drawn):
        for i, round in enumerate(line.x.tolist()):
            row = cells.setdefault(round, [""] * len(drawn))
            row[number] = line.value(i, unit, digits)
    return cells


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
    """Return a heat map of values (C, columns) from 0 to `top`, or to the largest value.

    If `faint`, the page shines through small values. With a slider, a reader can look at a single
    column.
    """
    places = thinned(len(columns), max(MOST_CELLS // max(len(rows), 1), 2))
    cells = values[:, places]
    names = [columns[i] for i in places]
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
        words = ["" if math.isnan(value) else f"{value:,.{digits}f}" for value in row]
        table.append([name, *words])
    notes = [
        fewer("classes", len(rows), len(table), len(rows)),
        fewer(f"{x}s", len(columns), len(few), len(names)),
    ]
    head = ["class"] + [f"{x} {names[i]}" for i in few]
    return Chart(key, title, data, head, table, " ".join(filter(None, notes)), wide=True)


def dots(
    key: str,
    title: str,
    x: str,
    y: str,
    points: Sequence[tuple[str, float, float, int]],
    meaning: str,
) -> Chart:
    """Return a chart of points, each with a name, x, y and a round; the later, the more opaque.

    Of too many points, it has evenly spread ones.
    """
    drawn = [points[i] for i in thinned(len(points), 2 * MOST_POINTS)]
    places = []
    for name, point_x, point_y, round in drawn:
        coordinates = rounded(np.array([point_x, point_y]))
        places.append([name, *coordinates, round])
    rows = []
    for name, point_x, point_y, _ in drawn[:MOST_ROWS]:
        rows.append([name, f"{point_x:.3g}", f"{point_y:.3g}"])
    note = f"{meaning} {fewer('points', len(points), len(rows), len(drawn))}".strip()
    data = {"kind": "dots", "x": x, "y": y, "points": places}
    return Chart(key, title, data, ["point", x, y], rows, note)


def gaps(key: str, title: str, x: str, differences: Sequence[tuple[str, Difference]]) -> Chart:
    """Return a chart of differences by name, with their intervals, and what they are from."""
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
    """Return at most `most` evenly spread places of `count`, with the first and the last place.

    >>> thinned(4), thinned(10, 4)
    (array([0, 1, 2, 3]), array([0, 3, 6, 9]))
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def fewer(things: str, there: int, table: int, figure: int) -> str:
    """Return a sentence on what the table and the figure leave out; '' if they have all.

    >>> fewer("rounds", 200, 50, 200), fewer("rounds", 3, 3, 3)
    ('Of 200 rounds, the table has 50; the Parquet files have all.', '')
    """
    parts = []
    if table < there:
        parts.append(f"the table has {table:,}")
    if figure < there:
        parts.append(f"the figure has {figure:,}")
    if not parts:
        return ""
    return f"Of {there:,} {things}, {' and '.join(parts)}; the Parquet files have all."


def rounded(values: np.ndarray) -> list[float | None]:
    """Return numbers with six digits, and None for those that cannot be drawn.

    >>> rounded(np.array([0.1 + 0.2, np.nan]))
    [0.3, None]
    """
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
