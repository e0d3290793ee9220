"""The runs of jobs/cifar10/full-size.toml, as they get done: records, and two tables of the page.

    python docs/reproduction/make_full_size.py runs/full-size
    python docs/reproduction/make_full_size.py

The first adds the finished runs to docs/reproduction/full-size.csv. The second makes the tables of
docs/reproduction.md alone.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
from make_reproduction import (
    LAST,
    PAGE,
    RECORDS,
    ROOT,
    Rows,
    curve,
    printed,
    rounds_of,
    table,
    tens,
    write,
)

from rayfed.folder.found import find_runs
from rayfed.folder.summary import read_summary
from rayfed.grid.cells import expand
from rayfed.job import read_toml
from rayfed.report.read import read_run
from rayfed.report.words import spread, stat_text

# For pages.py, in the folder above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from pages import from_shell, put, refuse_another_job

JOB = ROOT / "jobs/cifar10/full-size.toml"
FILE = RECORDS / "full-size.csv"
BASELINE = "fedavg"
# The two papers with this protocol, what they print, and how a column calls it.
PAPERS = {
    ("fedntd/table1", "last"): "last, FedNTD, Table 1",
    ("fedlmd/table3", "best"): "best, FedLMD, Table 3",
}
# Partition, method and seed -> the rows of its rounds.
Runs = dict[tuple[str, str, str], Rows]


def records(folder: Path) -> Rows:
    """The rounds of all finished runs. `round_forgetting` is `round` of docs/forgetting.md."""
    rows: Rows = []
    for place in find_runs(folder):
        if read_summary(place).get("status") != "done":
            continue
        refuse_another_job(place, JOB)
        partition, method, seed = place.parts[-3:]
        named = {"partition": partition, "method": method, "seed": seed}
        run = read_run(place)
        dropped = dict(zip(*run.forgetting["round"], strict=True))
        for row in rounds_of(run):
            number = dropped.get(row["round"])
            rows.append(
                {**named, **row, "round_forgetting": "" if number is None else f"{number:.4f}"}
            )
    return rows


def by_run(rows: Rows) -> Runs:
    """The rows of each run."""
    runs: Runs = defaultdict(list)
    for row in rows:
        runs[row["partition"], row["method"], row["seed"]].append(row)
    return dict(runs)


def each_run(runs: Runs) -> str:
    """A line for each run."""
    lines = []
    for (partition, method, seed), rows in sorted(runs.items()):
        accuracy = curve(rows, "test_accuracy")
        end = accuracy[-LAST:]
        dropped = [
            float(row["round_forgetting"]) for row in rows[-LAST:] if row["round_forgetting"]
        ]
        lines.append(
            [
                partition,
                f"[{method}](methods/{method}.md)",
                seed.removeprefix("seed-"),
                f"{accuracy.max():.1f} ({accuracy.argmax() + 1})",
                f"{accuracy[-1]:.1f}",
                stat_text(spread(end.tolist()), 1),
                f"{float(rows[-1]['forgetting']):.2f}",
                f"{np.mean(dropped):.2f}" if dropped else "not kept",
            ]
        )
    head = ["partition", "method", "seed", "best (round)", "last", f"mean of the last {LAST}"]
    head += ["forgetting: peak, last round", f"round, mean of the last {LAST}"]
    return f"Done: {len(runs)} of {len(expand(read_toml(JOB)))} runs.\n\n{table(head, lines)}"


def over_seeds(runs: Runs) -> str:
    """A line for each method and partition: means over its seeds, differences from FedAvg by seed,
    and the papers'.
    """
    lines = []
    for partition, method in dict.fromkeys(
        (partition, method) for partition, method, _ in sorted(runs)
    ):
        curves = curves_of(runs, partition, method)
        others = curves_of(runs, partition, BASELINE) if method != BASELINE else {}
        gaps = [
            tens(curves[seed]) - tens(others[seed]) for seed in curves if seed in others
        ]  # (tens,) of each seed
        best_last_end = ((each.max(), each[-1], each[-LAST:].mean()) for each in curves.values())
        lines.append(
            [
                partition,
                f"[{method}](methods/{method}.md)",
                str(len(curves)),
                *(stat_text(spread(of_seeds), 1) for of_seeds in zip(*best_last_end, strict=True)),
                ", ".join(f"{gap[-1]:+.1f}" for gap in gaps),
                f"{np.mean(gaps):+.1f} ({np.min(gaps):+.1f} to {np.max(gaps):+.1f})"
                if gaps
                else "",
                *(beside(partition, method, *paper) for paper in PAPERS),
            ]
        )
    head = ["partition", "method", "seeds", "best", "last", f"mean of the last {LAST}"]
    head += ["less FedAvg there, seed by seed", "less FedAvg, over all tens (lowest to highest)"]
    return table([*head, *PAPERS.values()], lines)


def curves_of(runs: Runs, partition: str, method: str) -> dict[str, np.ndarray]:
    """The accuracies (T,) of each seed, in percent."""
    return {
        seed: curve(rows, "test_accuracy")
        for (*of, seed), rows in runs.items()
        if of == [partition, method]
    }


def beside(partition: str, method: str, paper: str, stat: str) -> str:
    """What the paper prints, and by how much that is above its FedAvg."""
    number, reference = (
        printed(paper, name, "test_accuracy", stat, f"cifar10-{partition}")
        for name in (method, BASELINE)
    )
    if number == "-" or method == BASELINE:
        return number
    gap = Decimal(number.split()[0]) - Decimal(reference.split()[0])
    return f"{number} ({gap.quantize(Decimal('0.1'), ROUND_HALF_UP):+})"


def main(*folders: str) -> None:
    known = list(csv.DictReader(FILE.read_text().splitlines()))
    runs = by_run(known) | by_run([row for folder in folders for row in records(Path(folder))])
    write([row for key in sorted(runs) for row in runs[key]], FILE)
    PAGE.write_text(
        put(
            PAGE.read_text(),
            {"full size": each_run(runs), "full size, over seeds": over_seeds(runs)},
        )
    )


if __name__ == "__main__":
    from_shell(main)
