"""The runs of jobs/cifar10/full-size.toml, as they get done: their records, and a table in docs/reproduction.md.

python tools/make_full_size.py runs/full-size   # adds the finished runs to docs/reproduction/full-size.csv
python tools/make_full_size.py                  # the table alone
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from make_reproduction import LAST, PAGE, RECORDS, ROOT, Rows, rounds_of, table, write
from pages import put

from rayfed.folder.read import find_runs, read_run
from rayfed.folder.summary import read_summary
from rayfed.grid.cells import expand
from rayfed.job import read_toml

JOB = ROOT / "jobs/cifar10/full-size.toml"
FILE = RECORDS / "full-size.csv"


def records(folder: Path) -> Rows:
    """The rounds of all finished runs."""
    rows: Rows = []
    for place in find_runs(folder):
        if read_summary(place).get("status") != "done":
            continue
        partition, method, seed = place.parts[-3:]
        named = {"partition": partition, "method": method, "seed": seed}
        rows += [{**named, **row} for row in rounds_of(read_run(place))]
    return rows


def by_run(rows: Rows) -> dict[tuple[str, ...], Rows]:
    """The rows of each run, by partition, method and seed."""
    runs: dict[tuple[str, ...], Rows] = defaultdict(list)
    for row in rows:
        runs[row["partition"], row["method"], row["seed"]].append(row)
    return dict(runs)


def page(runs: dict[tuple[str, ...], Rows]) -> str:
    """The table, and how many runs of the job are in it."""
    lines = []
    for (partition, method, seed), rows in sorted(runs.items()):
        accuracy = 100 * np.array([float(row["test_accuracy"]) for row in rows])
        end = accuracy[-LAST:]
        lines.append(
            [
                partition,
                f"[{method}](methods/{method}.md)",
                seed.removeprefix("seed-"),
                f"{accuracy.max():.1f} ({rows[accuracy.argmax()]['round']})",
                f"{accuracy[-1]:.1f}",
                f"{end.mean():.1f} ± {end.std(ddof=1):.1f}",
                f"{float(rows[-1]['forgetting']):.2f}",
            ]
        )
    head = ["partition", "method", "seed", "best (round)", "last", "mean of the last 10", "forgetting"]
    return f"Done: {len(runs)} of {len(expand(read_toml(JOB)))} runs.\n\n{table(head, lines)}"


def main(*folders: str) -> None:
    known = list(csv.DictReader(FILE.read_text().splitlines())) if FILE.exists() else []
    runs = by_run(known) | by_run([row for folder in folders for row in records(Path(folder))])
    write([row for rows in runs.values() for row in rows], FILE)
    PAGE.write_text(put(PAGE.read_text(), {"full size": page(runs)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
