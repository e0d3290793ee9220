"""Twenty methods on ten draws (jobs/comparison/README.md): plays the tries and chooses of them.

python tools/make_twenty.py tune shards-2 runs       # plays the tries by halving; the same command continues
python tools/make_twenty.py tune shards-2 runs data.source=mnist-train.parquet data.test=mnist-test.parquet
python tools/make_twenty.py tries runs               # what has been played, into docs/comparison/twenty-tries.csv

`runs` is the folder in which the runs are (`output.path`). Each process plays one run after the other.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from make_comparison import from_shell

from rayfed.base.errors import Diverged
from rayfed.data.sources import Kept
from rayfed.experiment import Way, run_checked
from rayfed.folder.places import folder_of, is_done
from rayfed.folder.read import Run, read_run
from rayfed.grid.cells import Cell, expand
from rayfed.job import read_toml
from rayfed.report.measured import personalised
from rayfed.rounds.display import Display

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("shards-2", "dirichlet-0.1")
TUNING = {setting: ROOT / f"jobs/comparison/twenty-tune-{setting}.toml" for setting in SETTINGS}
TRIES = ROOT / "docs/comparison/twenty-tries.csv"
HALVING = ((5, (100,)), (3, (101,)), (2, (102, 103)))  # so many tries of a method play these seeds
CHANCE = 10.0  # percent: what a run that diverged counts

Scores = dict[str, dict[int, float]]  # try -> seed -> primary number, percent


def primary(run: Run, method: str) -> float:
    """The mean accuracy in percent over the second half of the rounds; of `local`, that of the clients' own models."""
    if run.error.startswith("Diverged"):
        return CHANCE
    accuracy = np.asarray(run.rounds["test_accuracy"][1:], float)
    half = len(accuracy) // 2
    return personalised(run, half) if method == "local" else float(100 * accuracy[half:].mean())


def ended(cell: Cell) -> Run | None:
    """A cell's run where it is done or has diverged."""
    job = cell.job()
    if not (folder_of(job) / "job.toml").is_file():
        return None
    run = read_run(folder_of(job))
    return run if is_done(job) or run.error.startswith("Diverged") else None


def left(scores: Scores, tries: Sequence[str], many: int) -> list[str]:
    """The best tries by the mean over their seeds so far; of equals the first, which is nearer to the middle.

    >>> left({"a": {100: 1.0}, "b": {100: 3.0}, "c": {100: 3.0}}, ["a", "b", "c"], 1)
    ['b']
    """
    if len(tries) <= many:
        return list(tries)
    return sorted(tries, key=lambda name: -float(np.mean(list(scores[name].values()))))[:many]


def cells_of(setting: str, overrides: Mapping[str, Any]) -> dict[str, dict[str, dict[int, Cell]]]:
    """The runs of a partition's tuning: method -> try -> seed."""
    methods: dict[str, dict[str, dict[int, Cell]]] = defaultdict(lambda: defaultdict(dict))
    for cell in expand(read_toml(TUNING[setting]), overrides):
        methods[cell.method.partition("+")[0]][cell.method][cell.tables["seed"]] = cell
    return methods


def tune(setting: str, overrides: Mapping[str, Any]) -> None:
    """Play a partition's tries by halving, method by method; what is played already is read."""
    kept = Kept()
    for method, tries in cells_of(setting, overrides).items():
        scores: Scores = defaultdict(dict)
        names = list(tries)
        for many, seeds in HALVING:
            names = left(scores, names, many)
            for seed in seeds:
                for name in names:
                    scores[name][seed] = primary(play(tries[name][seed], kept), method)
                    print(f"{setting}  {name}  seed {seed}  {scores[name][seed]:.2f}", flush=True)


def play(cell: Cell, kept: Kept) -> Run:
    """A cell's run, played if it is not there yet."""
    if run := ended(cell):
        return run
    with suppress(Diverged):
        run_checked(cell.job(), Way(Display(), read=kept.load), resume=True)
    return read_run(folder_of(cell.job()))


def rows(overrides: Mapping[str, Any]) -> Iterator[tuple[str, str, int, str]]:
    """Partition, try, seed and primary number of each run that has ended."""
    for setting in SETTINGS:
        for method, tries in cells_of(setting, overrides).items():
            for name, seeds in tries.items():
                for seed, cell in seeds.items():
                    if run := ended(cell):
                        yield setting, name, seed, f"{primary(run, method):.4f}"


def main(command: str = "", *words: str) -> None:
    *named, runs = [word for word in words if "=" not in word] or [""]
    overrides = dict(word.split("=", 1) for word in words if "=" in word) | {"output.path": runs, "ray.mode": "off"}
    if command == "tune" and runs and len(named) == 1 and named[0] in SETTINGS:
        tune(named[0], overrides)
    elif command == "tries" and runs and not named:
        with TRIES.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(("setting", "try", "seed", "primary"))
            writer.writerows(rows(overrides))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    from_shell(main)
