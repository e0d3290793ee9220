"""Figures of the page as data: what its script draws, and the same numbers as a table for those who do not see it.

A figure stays small however long a run is: past some points, rounds are left out, and its note says so.
Shapes: `P` points of a line, `C` rows of a heat map.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MOST_POINTS = 400  # of a line
MOST_CELLS = 40_000  # of a heat map
MOST_ROWS = 50  # of a table
MOST_COLUMNS = 12  # of the table of a heat map
LOOKS = 6  # colours of the page, --line-1 and on
DASHES = ("", "6 3", "2 2", "8 3 2 3")  # as in page.js


class Chart(NamedTuple):
    """A figure: `data` is for the page's script."""

    key: str  # no two in a page are the same
    title: str
    data: dict[str, Any]
    head: list[str]  # of its table
    rows: list[list[str]]
    note: str = ""  # what its table leaves out, or the figure itself
    wide: bool = False  # over the page, else beside another one


class Line(NamedTuple):
    """A line, with a band around it if it is of several values."""

    name: str
    number: int  # its look
    x: np.ndarray  # (P,)
    y: np.ndarray  # (P,)
    low: np.ndarray | None = None  # (P,)
    high: np.ndarray | None = None  # (P,)


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
    """Lines by round; horizontal `rules` with their names, and a point that is `marked` with its name.

    With `zero`, the vertical axis begins at 0, or below it where values are negative.
    """
    there = len({x for line in drawn for x in line.x.tolist()})
    drawn = [line._replace(x=line.x[kept], **_at(line, kept)) for line in drawn for kept in [thinned(len(line.x))]]
    points: dict[int, list[str]] = {}
    for number, line in enumerate(drawn):
        for i, x in enumerate(line.x.tolist()):
            points.setdefault(x, [""] * len(drawn))[number] = _value(line, i, unit, digits)
    rounds = sorted(points)
    shown = [rounds[i] for i in thinned(len(rounds), MOST_ROWS)]
    series = [
        {"name": line.name, "number": line.number, "x": line.x.tolist()}
        | {end: rounded(values) for end in ("y", "low", "high") if (values := getattr(line, end)) is not None}
        for line in drawn
    ]
    data = {
        **{"kind": "lines", "x": "round", "y": y, "unit": unit, "digits": digits, "zero": zero, "series": series},
        "rules": [{"y": place, "name": name} for place, name in rules if math.isfinite(place)],
        "marked": dict(zip(("x", "y", "name"), marked, strict=True)) if marked else None,
    }
    head = ["round", *(line.name for line in drawn)]
    note = fewer("rounds", there, len(shown), len(rounds))
    return Chart(key, title, data, head, [[str(x), *points[x]] for x in shown], note)


def _at(line: Line, kept: np.ndarray) -> dict[str, Any]:
    return {end: None if (of := getattr(line, end)) is None else of[kept] for end in ("y", "low", "high")}


def _value(line: Line, i: int, unit: str, digits: int) -> str:
    if not math.isfinite(line.y[i]):
        return "n/a"
    text = f"{line.y[i]:.{digits}f}{unit}"
    if line.low is None or line.high is None:
        return text
    return f"{text} ({line.low[i]:.{digits}f} to {line.high[i]:.{digits}f})"


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
    """Values (C, columns) from 0 to `top`, or the largest; if `faint`, the page shines through small ones.

    With a slider, a column can be looked at by itself.
    """
    kept = thinned(len(columns), max(MOST_CELLS // max(len(rows), 1), 2))
    cells, names = values[:, kept], [columns[i] for i in kept]
    largest = top or float(np.nanmax(cells, initial=0.0)) or 1.0
    data = {
        **{"kind": "heat", "x": x, "unit": unit, "top": largest, "slider": slider, "faint": faint, "columns": names},
        "rows": list(rows),
        "values": [rounded(row) for row in cells],
    }
    some = thinned(len(names), MOST_COLUMNS)
    digits = 1 if np.any(np.nan_to_num(cells) % 1) else 0
    told = [
        [name, *("" if math.isnan(value) else f"{value:,.{digits}f}" for value in row[some])]
        for name, row in zip(rows[:MOST_ROWS], cells, strict=False)
    ]
    left_out = [
        fewer("classes", len(rows), len(told), len(rows)),
        fewer(f"{x}s", len(columns), len(some), len(names)),
    ]
    head = ["class", *(f"{x} {names[i]}" for i in some)]
    return Chart(key, title, data, head, told, " ".join(filter(None, left_out)), wide=True)


def bars(key: str, title: str, x: str, y: str, heights: np.ndarray) -> Chart:
    """Bars over 0, 1, 2, ..."""
    data = {"kind": "bars", "x": x, "y": y, "values": heights.tolist()}
    rows = [[str(place), f"{height:,}"] for place, height in enumerate(heights) if height]
    note = fewer("bars", len(rows), len(rows[:MOST_ROWS]), len(rows))
    return Chart(key, title, data, [x, y], rows[:MOST_ROWS], note)


def dots(key: str, title: str, x: str, y: str, points: Sequence[tuple[str, float, float, int]]) -> Chart:
    """Points with a name, x, y and a round, the more opaque the later. Of too many, evenly spread ones."""
    kept = thinned(len(points), 2 * MOST_POINTS)
    places = [[name, *rounded(np.array([at_x, at_y])), round] for name, at_x, at_y, round in (points[i] for i in kept)]
    rows = [[name, f"{at_x:.3g}", f"{at_y:.3g}"] for name, at_x, at_y, _ in (points[i] for i in kept[:MOST_ROWS])]
    note = fewer("points", len(points), len(rows), len(kept))
    return Chart(key, title, {"kind": "dots", "x": x, "y": y, "points": places}, ["point", x, y], rows, note)


def gaps(key: str, title: str, x: str, found: Sequence[tuple[str, float, tuple[float, float] | None, str]]) -> Chart:
    """Differences by name, with their intervals where there are any, and what they are from."""
    rows = [
        [name, f"{mean:+.2f}", f"{ends[0]:+.2f} to {ends[1]:+.2f}" if ends else "n/a", of]
        for name, mean, ends, of in found
    ]
    places = [{"name": name, "mean": mean, "ends": ends, "from": of} for name, mean, ends, of in found]
    head = ["run", x, "95 % interval", "from"]
    return Chart(key, title, {"kind": "gaps", "x": x, "points": places}, head, rows, wide=True)


def look(number: int) -> tuple[str, str]:
    """The n-th of several lines: its colour, which is brighter in the dark, and its dashes, other than its neighbours'.

    >>> look(0), look(7), len({look(number) for number in range(24)})
    (('var(--line-1)', ''), ('var(--line-2)', ''), 24)
    """
    return f"var(--line-{number % LOOKS + 1})", DASHES[(number + number // LOOKS) % len(DASHES)]


def thinned(count: int, most: int = MOST_POINTS) -> np.ndarray:
    """Evenly spread places of so many, with the first and the last.

    >>> thinned(4), thinned(10, 4)
    (array([0, 1, 2, 3]), array([0, 3, 6, 9]))
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def fewer(what: str, there: int, table: int, figure: int) -> str:
    """A sentence on what the table and the figure leave out.

    >>> fewer("rounds", 200, 50, 200), fewer("rounds", 3, 3, 3)
    ('Of 200 rounds, the table has 50; the Parquet files have all.', '')
    """
    less = [f"the {where} has {number:,}" for where, number in (("table", table), ("figure", figure)) if number < there]
    text = " and ".join(less).replace("and the figure has", "and the figure")
    return f"Of {there:,} {what}, {text}; the Parquet files have all." if less else ""


def rounded(values: np.ndarray) -> list[float | None]:
    """Numbers of six digits, and None for those that cannot be drawn.

    >>> rounded(np.array([0.1 + 0.2, np.nan]))
    [0.3, None]
    """
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
