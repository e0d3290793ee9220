"""Draw the README's figure: how far 17 methods are from FedAvg, with 95 % intervals.

    python docs/comparison/forest.py    # docs/comparison/twenty.csv -> docs/comparison/forest.svg

The picture is plain text, without a library, so that the same numbers give the same bytes.
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rayfed.report.words import interval

HERE = Path(__file__).parent
RECORDS, FIGURE = HERE / "twenty.csv", HERE / "forest.svg"
BASELINE = "fedavg"
# These are bounds, not methods.
BOUNDS = ("local", "central", "fedavg-own")
TITLES = {
    "shards-2": "two shards per client",
    "dirichlet-0.1": "Dirichlet(0.1)",
}
# In pixels.
WIDTH, NAMES, PANEL, GAP = 760, 96, 310, 24
TOP, ROW, BOTTOM = 44, 20, 46
# The ends of the axis, in points.
LEAST, MOST, STEP = -14, 12, 4
# These are read on white and on dark pages.
INK, LINE, AHEAD, BEHIND = "#6e7781", "#b0b7bf", "#0072B2", "#D55E00"


class Effect(NamedTuple):
    """The mean difference of a method from FedAvg in points, and its interval."""

    mean: float
    low: float
    high: float

    @property
    def colour(self) -> str:
        """The colour of an interval, which is grey if 0 is in it."""
        if self.low > 0:
            return AHEAD
        return BEHIND if self.high < 0 else INK


def effects() -> dict[str, dict[str, Effect]]:
    """Return the effects that the file of records has: setting -> method -> effect."""
    numbers: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in csv.DictReader(RECORDS.read_text().splitlines()):
        numbers[row["setting"]][row["method"]][row["seed"]] = float(row["primary"])
    found: dict[str, dict[str, Effect]] = {}
    for setting, methods in numbers.items():
        base = methods[BASELINE]
        found[setting] = {}
        for method, of_seeds in methods.items():
            if method == BASELINE or method in BOUNDS:
                continue
            gaps = [of_seeds[seed] - base[seed] for seed in base]
            ends = interval(gaps)
            assert ends is not None
            found[setting][method] = Effect(fmean(gaps), *ends)
    return found


def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 12) -> str:
    """Return words at a place."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{INK}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    """Return a line between two places."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def panel(left: float, title: str, methods: list[str], values: dict[str, Effect]) -> list[str]:
    """Return the marks of one setting."""
    bottom = TOP + ROW * len(methods)

    def place(points: float) -> float:
        return left + PANEL * (points - LEAST) / (MOST - LEAST)

    marks = [text(left + PANEL / 2, TOP - 16, title, size=13)]
    for points in range(LEAST + 2, MOST + 1, STEP):
        width = 1.2 if points == 0 else 0.4
        marks.append(line(place(points), TOP - 6, place(points), bottom, LINE, width))
        marks.append(text(place(points), bottom + 16, f"{points:+d}" if points else "0", size=11))
    marks.append(text(left + PANEL / 2, bottom + 36, "points of accuracy, compared with FedAvg"))
    for number, method in enumerate(methods):
        effect, y = values[method], TOP + ROW * (number + 0.5)
        marks.append(line(place(effect.low), y, place(effect.high), y, effect.colour, 2.0))
        dot = f'cx="{place(effect.mean):.1f}" cy="{y:.1f}" r="4"'
        marks.append(f'<circle {dot} fill="{effect.colour}"/>')
    return marks


def figure() -> str:
    """Return the picture of all settings, with the best method of the first one on top."""
    of_settings = effects()
    first = of_settings[next(iter(TITLES))]
    methods = sorted(first, key=lambda method: -first[method].mean)
    height = TOP + ROW * len(methods) + BOTTOM
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    marks = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif">',
        "<title>Methods compared with FedAvg: differences and 95 % intervals</title>",
    ]
    for number, method in enumerate(methods):
        marks.append(text(NAMES - 10, TOP + ROW * (number + 0.5) + 4, method, anchor="end"))
    for number, (setting, title) in enumerate(TITLES.items()):
        left = NAMES + number * (PANEL + GAP)
        marks += panel(left, title, methods, of_settings[setting])
    return "\n".join([*marks, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(figure())
