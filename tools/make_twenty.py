"""Twenty methods on ten draws (jobs/comparison/README.md): plays the tries, chooses of them, and tests the differences.

python tools/make_twenty.py tune shards-2 runs     # plays the tries by halving; the same command continues
python tools/make_twenty.py tries runs             # what has been played, into docs/comparison/twenty-tries.csv
python tools/make_twenty.py best                   # the best tries of that file, into the job files that are reported
python tools/make_twenty.py records runs           # the runs of those that are done, into docs/comparison/twenty.csv
python tools/make_twenty.py tables                 # the tables of that file

`runs` is the folder in which the runs are (`output.path`). Words such as `data.source=mnist-train.parquet` replace
values of the jobs. Each process plays one run after the other. What is in a file already, from another machine, stays.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from make_comparison import BASELINE, from_shell, inline, put_methods

from rayfed.base.errors import Diverged, InputError
from rayfed.data.sources import Kept
from rayfed.experiment import Way, run_checked
from rayfed.folder.places import folder_of, is_done
from rayfed.folder.read import Run, read_run
from rayfed.grid.cells import Cell, expand
from rayfed.job import read_toml
from rayfed.report.measured import personalised
from rayfed.report.words import interval, spread, stat_text
from rayfed.rounds.display import Display

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("shards-2", "dirichlet-0.1")
TUNING = {setting: ROOT / f"jobs/comparison/twenty-tune-{setting}.toml" for setting in SETTINGS}
REPORTED = {setting: ROOT / f"jobs/comparison/twenty-{setting}.toml" for setting in SETTINGS}
TRIES = ROOT / "docs/comparison/twenty-tries.csv"
RECORDS = ROOT / "docs/comparison/twenty.csv"
BOUNDS = ("local", "central")  # that are no methods, and are not tested
HALVING = ((5, (100,)), (3, (101,)), (2, (102, 103)))  # so many tries of a method play these seeds
CHANCE = 10.0  # percent: what a run that diverged counts

Scores = dict[str, dict[int, float]]  # try -> seed -> primary number, percent


def primary(run: Run, method: str) -> float:
    """The mean accuracy in percent over the second half of the rounds; of `local`, that of the clients' own models."""
    if run.error.startswith("Diverged"):
        return CHANCE
    accuracy = np.asarray(run.rounds["test_accuracy"][1:], float)
    if len(accuracy) < run.job["train"]["num_rounds"] or not np.isfinite(accuracy).all():
        raise InputError(f"'{run.folder}' lacks rounds of its table; remove the folder, to have it played again")
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
    """Play a partition's tries by halving, method by method; what is played already, here or elsewhere, is read."""
    known = {tuple(row[:3]): float(row[3]) for row in read(TRIES)}
    kept = Kept()
    for method, tries in cells_of(setting, overrides).items():
        scores: Scores = defaultdict(dict)
        names = list(tries)
        for many, seeds in HALVING:
            names = left(scores, names, many)
            for seed in seeds:
                for name in names:
                    number = known.get((setting, name, str(seed)))
                    scores[name][seed] = primary(play(tries[name][seed], kept), method) if number is None else number
                    print(f"{setting}  {name}  seed {seed}  {scores[name][seed]:.2f}", flush=True)


def play(cell: Cell, kept: Kept) -> Run:
    """A cell's run, played if it is not there yet."""
    if run := ended(cell):
        return run
    with suppress(Diverged):
        run_checked(cell.job(), Way(Display(), read=kept.load), resume=True)
    return read_run(folder_of(cell.job()))


def tried(overrides: Mapping[str, Any]) -> Iterator[tuple[str, str, int, float]]:
    """Partition, try, seed and primary number of each run of the tuning that has ended."""
    for setting in SETTINGS:
        for method, tries in cells_of(setting, overrides).items():
            for name, seeds in tries.items():
                for seed, cell in seeds.items():
                    if run := ended(cell):
                        yield setting, name, seed, primary(run, method)


def chosen(tries: Mapping[str, Scores]) -> dict[str, str]:
    """Of each method the try that is reported: of those that have played all seeds, that with the best mean."""
    seeds = sum(len(seeds) for _, seeds in HALVING)
    best: dict[str, str] = {}
    for method, scores in tries.items():
        finalists = [name for name in scores if len(scores[name]) == seeds]
        if finalists:
            (best[method],) = left(scores, finalists, 1)
    return best


def put_best() -> None:
    """Write the job files that are reported: those of the tuning, with the chosen tries and all training images."""
    if not TRIES.exists():
        raise InputError(f"there is no {TRIES.relative_to(ROOT)} yet; make it with `tries runs`")
    played: dict[str, dict[str, Scores]] = {setting: {} for setting in SETTINGS}
    for setting, name, seed, number in read(TRIES):
        of_method = played[setting].setdefault(name.partition("+")[0], {})
        of_method.setdefault(name, {})[int(seed)] = float(number)
    for setting in SETTINGS:
        entries = {entry["name"]: entry for entry in read_toml(TUNING[setting])["grid"]["method"]}
        lines = []
        for method, name in chosen(played[setting]).items():
            scores = played[setting][method]
            means = (f"{one.partition('+')[2] or 'middle'} {np.mean([*scores[one].values()]):.1f}" for one in scores)
            own = {"measure": ["local"], "measure_images": 1000} if method == BASELINE else {}
            lines += [f"  # {', '.join(means)}", f"  {inline({**entries[name], 'name': method, **own})},"]
        job = put_methods(TUNING[setting].read_text(), lines)
        job = re.sub(r"^test_fraction.*\n", "", job, flags=re.MULTILINE)
        job = job.replace("twenty-tune-", "twenty-").replace("[100, 101, 102, 103]", str(list(range(10))))
        about = [
            f"# rayfed run jobs/comparison/twenty-{setting}.toml",
            "#",
            "# Twenty methods on ten draws (README.md, beside this file): each at the best of its tries, the means of",
            "# which over their seeds, in percent, stand above it.",
        ]
        REPORTED[setting].write_text("\n".join([*about, job[job.index("name = ") :]]))


def reported(overrides: Mapping[str, Any]) -> Iterator[tuple[str, str, int, float, float]]:
    """Partition, method, seed, primary and second number of each reported run that has ended."""
    for setting in SETTINGS:
        runs = {(c.method, c.tables["seed"]): ended(c) for c in expand(read_toml(REPORTED[setting]), overrides)}
        for (method, seed), run in runs.items():
            baseline = runs.get((BASELINE, seed))
            if run is not None and baseline is not None:
                end = float(100 * np.asarray(baseline.rounds["test_accuracy"][-10:], float).mean())
                yield setting, method, seed, primary(run, method), rounds_to(end, run)


def rounds_to(goal: float, run: Run) -> int:
    """The first round in which the mean of the last five accuracies is at least `goal`, in percent; else 61."""
    accuracy = 100 * np.asarray(run.rounds["test_accuracy"][1:], float)
    means = np.array([accuracy[end - 5 : end].mean() for end in range(5, len(accuracy) + 1)])
    reached = np.flatnonzero(means >= goal)
    return int(reached[0]) + 5 if len(reached) else run.job["train"]["num_rounds"] + 1


# Tests ----------------------------------------------------------------------------------------------------------------


def sign_flip(differences: Sequence[float]) -> float:
    """The exact two-sided p-value of a mean of 0, where each difference is as likely to have the other sign.

    >>> sign_flip([1.0, 2.0, 3.0]), sign_flip([1.0, -1.0])
    (0.25, 1.0)
    """
    values = np.asarray(differences)
    signs = np.array(list(product((1, -1), repeat=len(values))))
    return float(np.mean(np.abs(signs @ values) >= abs(values.sum()) - 1e-9))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p-values of a family, corrected by Holm (1979).

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        corrected[name] = largest
    return corrected


def critical_difference(methods: int, draws: int, level: float = 0.05) -> float:
    """The least difference of two mean ranks that is sure, by Nemenyi's test (Demsar, JMLR 2006).

    >>> round(critical_difference(10, 30), 2)
    2.47
    """
    z = np.linspace(-8, 8, 4001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    normal = (np.cumsum(density) - density / 2) * (z[1] - z[0])

    def inside(q: float) -> float:  # that the range of so many normal values is at most q
        between = normal - np.interp(z - q, z, normal, left=0.0)
        return float(methods * np.sum(density * between ** (methods - 1)) * (z[1] - z[0]))

    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 1 - level else (low, middle)
    return low / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * draws))


def table(numbers: Mapping[str, Mapping[int, float]], seconds: Mapping[str, Mapping[int, float]]) -> list[str]:
    """A partition's table: each method's mean, its difference from FedAvg with interval and corrected p, and rounds."""
    gaps = {
        method: [value - numbers[BASELINE][seed] for seed, value in of_seed.items() if seed in numbers[BASELINE]]
        for method, of_seed in numbers.items()
        if method not in (BASELINE, *BOUNDS)
    }
    p_values = holm({method: sign_flip(of_method) for method, of_method in gaps.items()})
    lines = [
        "| method | draws | mean of rounds 31 to 60 | difference from FedAvg | p | rounds to FedAvg's end |",
        "|---" * 6 + "|",
    ]
    for method in sorted(numbers, key=lambda name: -fmean(numbers[name].values())):
        values, of_method = [*numbers[method].values()], gaps.get(method)
        cells = [
            method,
            str(len(values)),
            stat_text(spread(values), 1),
            "",
            "",
            f"{np.median([*seconds[method].values()]):.0f}",
        ]
        if of_method:
            low, high = interval(of_method) or (math.nan, math.nan)
            cells[3:5] = f"{fmean(of_method):+.1f} [{low:+.1f}, {high:+.1f}]", f"{p_values[method]:.3f}"
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# Files ----------------------------------------------------------------------------------------------------------------


def read(file: Path) -> list[list[str]]:
    """The rows of a file; none where it is not there yet."""
    return list(csv.reader(file.read_text().splitlines()))[1:] if file.exists() else []


def add(file: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Add rows to a file, each by its partition, name and seed; a row that is there already is replaced."""
    known = {tuple(row[:3]): row for row in read(file)}
    for setting, name, seed, *numbers in rows:
        known[setting, name, str(seed)] = [setting, name, str(seed), *(f"{number:.4f}" for number in numbers)]
    with file.open("w", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([head, *known.values()])


def main(command: str = "", *words: str) -> None:
    named = [word for word in words if "=" not in word]
    overrides = {"output.path": named[-1] if named else "", "ray.mode": "off"}
    overrides |= dict(word.split("=", 1) for word in words if "=" in word)
    match command, named:
        case "tune", [setting, _] if setting in SETTINGS:
            tune(setting, overrides)
        case "tries", [_]:
            add(TRIES, ("setting", "try", "seed", "primary"), tried(overrides))
        case "best", []:
            put_best()
        case "records", [_]:
            add(RECORDS, ("setting", "method", "seed", "primary", "rounds_to_fedavg"), reported(overrides))
        case "tables", []:
            for setting in SETTINGS:
                numbers, seconds = defaultdict[str, dict[int, float]](dict), defaultdict[str, dict[int, float]](dict)
                for _, method, seed, *values in (row for row in read(RECORDS) if row[0] == setting):
                    numbers[method][int(seed)], seconds[method][int(seed)] = map(float, values)
                if BASELINE in numbers:
                    print("\n".join([setting, "", *table(numbers, seconds), ""]))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    from_shell(main)
