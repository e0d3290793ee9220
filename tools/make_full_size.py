"""The runs of jobs/cifar10/full-size.toml, as they get done: their records, and two tables in docs/reproduction.md.

python tools/make_full_size.py runs/full-size   # adds the finished runs to docs/reproduction/full-size.csv
python tools/make_full_size.py                  # the tables alone
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
from make_reproduction import LAST, PAGE, RECORDS, ROOT, Rows, printed, rounds_of, table, tens, write
from pages import put

from rayfed.folder.read import find_runs, read_run
from rayfed.folder.summary import read_summary
from rayfed.grid.cells import expand
from rayfed.job import read_toml

JOB = ROOT / "jobs/cifar10/full-size.toml"
FILE = RECORDS / "full-size.csv"
BASELINE = "fedavg"
NTD, LMD = (
    ("fedntd/table1", "last"),
    ("fedlmd/table3", "best"),
)  # the two papers with this protocol, and what they print
Runs = dict[tuple[str, str, str], Rows]  # partition, method and seed -> the rows of its rounds


def records(folder: Path) -> Rows:
    """The rounds of all finished runs. `round_forgetting` is `round` of docs/forgetting.md."""
    rows: Rows = []
    for place in find_runs(folder):
        if read_summary(place).get("status") != "done":
            continue
        partition, method, seed = place.parts[-3:]
        named = {"partition": partition, "method": method, "seed": seed}
        run = read_run(place)
        dropped = dict(zip(*run.forgetting["round"], strict=True))
        for row in rounds_of(run):
            number = dropped.get(row["round"])
            rows.append({**named, **row, "round_forgetting": "" if number is None else f"{number:.4f}"})
    return rows


def by_run(rows: Rows) -> Runs:
    """The rows of each run."""
    runs: Runs = defaultdict(list)
    for row in rows:
        runs[row["partition"], row["method"], row["seed"]].append(row)
    return dict(runs)


def accuracy_of(rows: Rows) -> np.ndarray:
    """(T,), in percent, without round 0, whose model is untrained."""
    return 100 * np.array([float(row["test_accuracy"]) for row in rows[1:]])


def each_run(runs: Runs) -> str:
    """A line for each run."""
    lines = []
    for (partition, method, seed), rows in sorted(runs.items()):
        accuracy = accuracy_of(rows)
        end = accuracy[-LAST:]
        dropped = [float(row["round_forgetting"]) for row in rows[-LAST:] if row["round_forgetting"]]
        lines.append(
            [
                partition,
                f"[{method}](methods/{method}.md)",
                seed.removeprefix("seed-"),
                f"{accuracy.max():.1f} ({accuracy.argmax() + 1})",
                f"{accuracy[-1]:.1f}",
                f"{end.mean():.1f} ± {end.std(ddof=1):.1f}",
                f"{float(rows[-1]['forgetting']):.2f}",
                f"{np.mean(dropped):.2f}" if dropped else "not kept",
            ]
        )
    head = ["partition", "method", "seed", "best (round)", "last", f"mean of the last {LAST}"]
    head += ["forgetting: peak, last round", f"round, mean of the last {LAST}"]
    return f"Done: {len(runs)} of {len(expand(read_toml(JOB)))} runs.\n\n{table(head, lines)}"


def over_seeds(runs: Runs) -> str:
    """A line for each method and partition: means over its seeds, differences from FedAvg by seed, and the papers'."""
    lines = []
    for partition, method in dict.fromkeys((partition, method) for partition, method, _ in sorted(runs)):
        curves = {seed: accuracy_of(rows) for (*of, seed), rows in runs.items() if of == [partition, method]}
        gaps = {}
        for seed, curve in curves.items():
            if method != BASELINE and (partition, BASELINE, seed) in runs:
                gaps[seed] = tens(curve) - tens(accuracy_of(runs[partition, BASELINE, seed]))
        every = np.concatenate([*gaps.values()]) if gaps else None
        lines.append(
            [
                partition,
                f"[{method}](methods/{method}.md)",
                str(len(curves)),
                *(spread([number(curve) for curve in curves.values()]) for number in (np.max, last, end)),
                ", ".join(f"{gap[-1]:+.1f}" for gap in gaps.values()),
                "" if every is None else f"{every.mean():+.1f} ({every.min():+.1f} to {every.max():+.1f})",
                *(beside(partition, method, *paper) for paper in (NTD, LMD)),
            ]
        )
    head = ["partition", "method", "seeds", "best", "last", f"mean of the last {LAST}"]
    head += ["less FedAvg there, seed by seed", "less FedAvg, over all tens (lowest to highest)"]
    return table([*head, "last, FedNTD, Table 1", "best, FedLMD, Table 3"], lines)


def last(curve: np.ndarray) -> float:
    return float(curve[-1])


def end(curve: np.ndarray) -> float:
    return float(curve[-LAST:].mean())


def spread(numbers: list[float]) -> str:
    """The mean, and the deviation over seeds where there are several."""
    deviation = f" ± {np.std(numbers, ddof=1):.1f}" if len(numbers) > 1 else ""
    return f"{np.mean(numbers):.1f}{deviation}"


def beside(partition: str, method: str, paper: str, stat: str) -> str:
    """What the paper prints, and by how much that is above its FedAvg."""
    number, reference = (
        printed(paper, name, "test_accuracy", stat, f"cifar10-{partition}") for name in (method, BASELINE)
    )
    if number == "-" or method == BASELINE:
        return number
    gap = Decimal(number.split()[0]) - Decimal(reference.split()[0])
    return f"{number} ({gap.quantize(Decimal('0.1'), ROUND_HALF_UP):+})"


def main(*folders: str) -> None:
    known = list(csv.DictReader(FILE.read_text().splitlines()))
    runs = by_run(known) | by_run([row for folder in folders for row in records(Path(folder))])
    write([row for key in sorted(runs) for row in runs[key]], FILE)
    PAGE.write_text(put(PAGE.read_text(), {"full size": each_run(runs), "full size, over seeds": over_seeds(runs)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
