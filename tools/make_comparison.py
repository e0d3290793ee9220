"""Remake docs/comparison.md's tables and the figures of docs/methods from the runs of jobs/comparison.

python tools/make_comparison.py runs     # the folder that holds comparison-mnist/ and comparison-cifar10/
"""

from __future__ import annotations

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from rayfed.folder.summary import read_summary
from rayfed.folder.tables import read_table
from rayfed.grid import expand, spread
from rayfed.job import read_toml
from rayfed.report.svg import COLOURS, METADATA, STYLE

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/comparison.md"
RESULTS = ROOT / "docs/comparison/results.csv"
FIGURES = ROOT / "docs/methods/figures"
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
SETTINGS = {"shards-2": "shards 2", "dirichlet-0.1": "Dirichlet 0.1"}
MEASURES = ("best", "last", "forgetting")


class Run(NamedTuple):
    """One finished run; accuracies and forgetting as fractions, forgetting after the last round."""

    data: str
    setting: str
    method: str
    seed: int
    best: float
    last: float
    forgetting: float


def finished(results: Path) -> tuple[list[Run], dict[tuple[str, str, str], list[np.ndarray]]]:
    """All runs that are done; and for each data set, setting and method the curves (2, T) of its seeds."""
    runs, curves = [], defaultdict(list)
    for data in DATA:
        for cell in expand(read_toml(ROOT / f"jobs/comparison/{data}.toml"), {"output.path": str(results)}):
            path = results / cell.name
            if (summary := read_summary(path)).get("status") != "done":
                continue
            best, last = (summary[which]["test_accuracy"] for which in ("best", "last"))
            seed = int(cell.tables["seed"])
            runs.append(Run(data, cell.setting, cell.method, seed, best, last, summary["last"]["forgetting"]))
            rounds = read_table(path, "rounds")
            curve = [rounds[column].to_numpy()[1:] for column in ("test_accuracy", "forgetting")]
            curves[data, cell.setting, cell.method].append(np.stack(curve))
    return runs, curves


def tables(runs: list[Run]) -> str:
    """A table for each data set, in percent: mean and deviation over the seeds, the best mean of each column bold."""
    text = []
    for data, title in DATA.items():
        cells = defaultdict(list)
        for run in runs:
            if run.data == data:
                for measure in MEASURES:
                    cells[run.method, run.setting, measure].append(100 * getattr(run, measure))
        columns = [(setting, measure) for setting in SETTINGS for measure in MEASURES]
        methods = list(dict.fromkeys(method for method, _, _ in cells))
        best = {
            (setting, measure): (min if measure == "forgetting" else max)(
                spread(cells[method, setting, measure])[0] for method in methods
            )
            for setting, measure in columns
        }
        names = [f"{SETTINGS[setting]}: {measure}" for setting, measure in columns]
        text += [f"### {title}", "", f"| method | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for method in methods:
            shown = []
            for setting, measure in columns:
                average, deviation = spread(cells[method, setting, measure])
                number = f"{average:.1f} ± {deviation:.1f}"
                shown.append(f"**{number}**" if average == best[setting, measure] else number)
            text.append(f"| [{method}](methods/{method}.md) | {' | '.join(shown)} |")
        text.append("")
    return "\n".join(text)


def put_tables(page: str, runs: list[Run]) -> str:
    """The page with its tables made anew."""
    return re.sub(
        r"(?<=<!-- tables -->\n).*?(?=<!-- end of tables -->)", lambda _: f"\n{tables(runs)}\n", page, flags=re.DOTALL
    )


def read_runs(file: Path) -> list[Run]:
    """What `write_runs` wrote."""
    rows = csv.DictReader(file.read_text().splitlines())
    return [
        Run(row["data"], row["setting"], row["method"], int(row["seed"]), *(float(row[key]) for key in MEASURES))
        for row in rows
    ]


def write_runs(runs: list[Run], file: Path) -> None:
    with file.open("w", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([Run._fields, *runs])


def draw(method: str, curves: Mapping[tuple[str, str, str], list[np.ndarray]], path: Path) -> None:
    """A method beside FedAvg: accuracy above, forgetting below; lines are means, bands go from seed to seed."""
    look = {"svg.hashsalt": method, "font.size": 8, "axes.titleweight": "normal"}
    with style.context(["default", STYLE, look]):
        figure = Figure(figsize=(9.0, 3.8))
        axes = figure.subplots(2, 4, sharex="col")
        for column, (data, setting) in enumerate((data, setting) for data in DATA for setting in SETTINGS):
            for left, right in axes[:, column - 1 : column + 1] if column % 2 else ():  # of one data set
                right.sharey(left)
                right.tick_params(labelleft=False)
            for name, colour in {"fedavg": "#888888", method: COLOURS[0]}.items():
                seeds = 100 * np.stack(curves[data, setting, name])  # (seeds, 2, T), percent
                rounds = np.arange(1, seeds.shape[2] + 1)
                for row in range(2):
                    low, high = seeds[:, row].min(axis=0), seeds[:, row].max(axis=0)
                    axes[row, column].fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
                    axes[row, column].plot(rounds, seeds[:, row].mean(axis=0), color=colour, label=name)
            axes[0, column].set_title(f"{DATA[data]}, {SETTINGS[setting]}")
            axes[1, column].set_xlabel("round")
        axes[0, 0].set_ylabel("test accuracy (%)")
        axes[1, 0].set_ylabel("forgetting (%)")
        axes[0, 0].legend()
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, format="svg", metadata=METADATA)
    path.write_text(re.sub(r"[ \t]+$", "", path.read_text().replace("#010203", "#333333"), flags=re.MULTILINE))


if __name__ == "__main__":
    runs, curves = finished(Path(sys.argv[1]).expanduser())
    write_runs(runs, RESULTS)
    PAGE.write_text(put_tables(PAGE.read_text(), runs))
    for method in dict.fromkeys(run.method for run in runs):
        draw(method, curves, FIGURES / f"{method}.svg")
    print(f"{len(runs)} runs in {PAGE.name} and {RESULTS.name}")
