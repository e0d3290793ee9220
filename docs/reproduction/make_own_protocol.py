"""FedCAD, FedSSD and MNIST in the protocols of the papers: from runs to docs/reproduction.md.

    python docs/reproduction/make_own_protocol.py runs/fedssd-table2 runs/fedssd-mean
    python docs/reproduction/make_own_protocol.py runs/fedntd-table1 runs/fedlmd-table3
    rayfed table runs/fedcad-fig2 --paper fedcad/fig2 -o fedcad-fig2.csv
    python docs/reproduction/make_own_protocol.py fedcad-fig2.csv
    python docs/reproduction/make_own_protocol.py

The first two add the rounds of runs, also of those that have not ended. The next two add our
numbers beside those of a figure. The last makes the page's tables alone.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path

from make_full_size import PAPERS, Runs, by_run
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
    write,
)

from rayfed.folder.found import find_runs
from rayfed.report.read import read_run
from rayfed.report.words import spread, stat_text

# For pages.py, in the folder above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from pages import from_shell, put, refuse_another_job

# Table of the page -> how the names of its partitions begin, and what the papers print there.
TABLES = {
    "own protocol": ("cifar10-", {("fedssd/table2", "last"): "last, FedSSD, Table 2 (100 rounds)"}),
    "mnist": ("mnist-", PAPERS),
}
JOBS = [ROOT / f"jobs/papers/{paper}.toml" for _, papers in TABLES.values() for paper, _ in papers]
# FedSSD in another reading of its paper is called so, and has a job of its own.
MEAN = "fedssd-mean"
JOBS.append(RECORDS / f"{MEAN}.toml")
# Runs that have not ended are compared here: the rounds from the first to before the second.
EARLY = slice(30, 40)
FILE = RECORDS / "own-protocol.csv"
FIGURE = RECORDS / "fedcad-fig2.csv"
# The columns of the figure's numbers that are kept.
KEPT = ("run", "metric", "ours", "paper")


def records(folder: Path) -> Rows:
    """Return the rounds of all runs of the jobs in a folder."""
    rows: Rows = []
    for place in find_runs(folder):
        refuse_another_job(place, *JOBS)
        partition, method, seed = place.parts[-3:]
        named = {"partition": partition, "method": method, "seed": seed}
        rows += [{**named, **row} for row in rounds_of(read_run(place))]
    return rows


def each_run(runs: Runs, begins: str, papers: Mapping[tuple[str, str], str]) -> str:
    """Return a table with a line for each run whose partition's name begins so.

    `papers` has the paper's table and the number of a run that it prints, and the column's name.
    """
    lines = []
    for (partition, method, seed), rows in sorted(runs.items()):
        if not partition.startswith(begins):
            continue
        accuracy = curve(rows, "test_accuracy")
        early = accuracy[EARLY].tolist()
        lines.append(
            [
                partition.removeprefix(begins),
                f"[{method}](methods/{'fedssd' if method == MEAN else method}.md)",
                seed.removeprefix("seed-"),
                str(len(accuracy)),
                stat_text(spread(early), 1) if early else "-",
                f"{accuracy.max():.1f} ({accuracy.argmax() + 1})",
                f"{accuracy[-1]:.1f}",
                stat_text(spread(accuracy[-LAST:].tolist()), 1),
                *(
                    printed(paper, method, "test_accuracy", number, partition)
                    for paper, number in papers
                ),
            ]
        )
    head = ["partition", "method", "seed", "rounds"]
    head += [f"mean of rounds {EARLY.start + 1} to {EARLY.stop}", "best (round)", "last"]
    return table([*head, f"mean of the last {LAST}", *papers.values()], lines)


def of_figure(rows: Rows) -> str:
    """Return a table of FedCAD's Fig. 2: the accuracy of each class, ours and the paper's."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        metric, _, label = row["metric"].removesuffix(" (%)").rpartition("_")
        start = metric == "class_accuracy"
        model = "the model it is sent" if start else f"{row['run'].split('/')[-1]}, its model"
        ours = lines.setdefault(f"{model}, ours", [])
        papers = lines.setdefault(f"{model}, paper", [])
        assert int(label) == len(ours), "the classes come in their order"
        ours.append(f"{float(row['ours']):.0f}")
        papers.append(row["paper"])
    head = ["class", *map(str, range(10))]
    return table(head, [[name, *numbers] for name, numbers in lines.items()])


def main(*places: str) -> None:
    runs = by_run(read_rows(FILE))
    figure = read_rows(FIGURE)
    for place in places:
        if place.endswith(".csv"):
            figure = [{name: row[name] for name in KEPT} for row in read_rows(Path(place))]
        else:
            runs |= by_run(records(Path(place)))
    if runs:
        write([row for key in sorted(runs) for row in runs[key]], FILE)
    write(figure, FIGURE)
    tables = {"fedcad fig2": of_figure(figure)}
    for name, (begins, papers) in TABLES.items():
        tables[name] = each_run(runs, begins, papers)
    PAGE.write_text(put(PAGE.read_text(), tables))


def read_rows(file: Path) -> Rows:
    """Return the rows of a file with a line of names; none if there is no such file."""
    return list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []


if __name__ == "__main__":
    from_shell(main)
