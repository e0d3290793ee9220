"""Twenty methods on ten draws (jobs/comparison/README.md): play tries, choose of them, and test.

    python docs/comparison/make_twenty.py tune shards-2 runs
    python docs/comparison/make_twenty.py tries runs
    python docs/comparison/make_twenty.py best
    python docs/comparison/make_twenty.py play shards-2 runs
    python docs/comparison/make_twenty.py records runs
    python docs/comparison/make_twenty.py page

    tune      play the tries by halving; the same command continues
    tries     write what has been played into docs/comparison/twenty-tries.csv
    best      put the best tries of that file into the job files that are reported
    play      play the runs of those, draw by draw; the same command continues
    records   write what has been played of them into docs/comparison/twenty.csv
    page      make the tables of docs/comparison.md from both files, and a figure

`runs` is the folder in which the runs are (`output.path`). Words such as
`data.source=mnist-train.parquet` replace values of the jobs. Each process plays one run after the
other. A try that is in its file already, and a draw of which all methods are, is not played again.
So machines may share the work, each with tries and whole draws of its own.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from make_comparison import BASELINE, inline, link, put_methods
from matplotlib import style
from matplotlib.figure import Figure
from scipy import stats

from rayfed import experiment
from rayfed.base.errors import Diverged, InputError
from rayfed.cli.options import read_override
from rayfed.data.sources import Kept
from rayfed.experiment import RunOptions
from rayfed.folder.places import folder_of, is_done
from rayfed.grid.cells import Cell, expand
from rayfed.job import read_toml
from rayfed.papers.style import COLOURS, INK, METADATA, STYLE
from rayfed.report.measured import personalised
from rayfed.report.read import Run, read_run
from rayfed.report.words import interval, spread, stat_text

# For pages.py, in the folder above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from pages import from_shell, put

ROOT = Path(__file__).resolve().parents[2]
TITLED = {"shards-2": "shards 2", "dirichlet-0.1": "Dirichlet 0.1"}
SETTINGS = tuple(TITLED)
TUNING = {setting: ROOT / f"jobs/comparison/twenty-tune-{setting}.toml" for setting in SETTINGS}
REPORTED = {setting: ROOT / f"jobs/comparison/twenty-{setting}.toml" for setting in SETTINGS}
TRIES = ROOT / "docs/comparison/twenty-tries.csv"
RECORDS = ROOT / "docs/comparison/twenty.csv"
# That are no methods, and are not tested.
BOUNDS = ("local", "central")
# What `local` is compared with: FedAvg's models after a client's training, on images as its own.
OWN = "fedavg-own"
TITLES = {
    OWN: "fedavg, the clients' own models",
    "local": "[local](methods/local.md), the clients' own models",
}
# The first method is ahead of the second, according to the paper.
CLAIMS = {
    ("fedntd", "fedavg"): "FedNTD, Table 1",
    ("fedlmd", "fedavg"): "FedLMD, Table 3",
    ("fedcad", "fedavg"): "FedCAD, Fig. 1",
    ("fedssd", "fedavg"): "FedSSD, Table 1",
    ("fedcsd", "fedavg"): "FedCSD, Table I",
    ("fedvls", "fedavg"): "FedVLS, Table 13",
    ("fedlmd", "fedntd"): "FedLMD, Tables 1 and 3",
    ("fedlmd", "fedlmd_tf"): "FedLMD, Tables 1 and 2",
    ("fedcsd", "fedgkd"): "FedCSD, Table I",
    ("fedssd", "fedcad"): "FedSSD, Table 1",
    ("fedvls", "fedntd"): "FedVLS, Table 13",
    ("fedvls", "fedlmd"): "FedVLS, Table 16",
}
# A family of their own.
OTHERS = [pair for pair in CLAIMS if pair[1] != BASELINE]
PAGE = ROOT / "docs/comparison.md"
FIGURE = ROOT / "docs/comparison/ranks.svg"
LEVEL = 0.05
# So many tries of a method play these seeds.
HALVING = ((5, (100,)), (3, (101,)), (2, (102, 103)))
# Percent: what a run that diverged counts.
CHANCE = 10.0

# Try -> seed -> primary number, percent.
Scores = dict[str, dict[int, float]]
# Method -> seed -> a number.
Numbers = Mapping[str, Mapping[int, float]]


def primary(run: Run, method: str) -> float:
    """The mean accuracy in percent over the second half of the rounds; of `local`, that of the
    clients' own models.
    """
    if diverged(run):
        return CHANCE
    accuracy = np.asarray(run.rounds["test_accuracy"][1:], float)
    if len(accuracy) < run.job["train"]["num_rounds"] or not np.isfinite(accuracy).all():
        raise InputError(
            f"'{run.folder}' lacks rounds of its table; remove the folder, to have it played again"
        )
    half = len(accuracy) // 2
    return personalised(run, half) if method == "local" else float(100 * accuracy[half:].mean())


def ended(cell: Cell) -> Run | None:
    """A cell's run where it is done or has diverged."""
    job = cell.job()
    if not (folder_of(job) / "job.toml").is_file():
        return None
    run = read_run(folder_of(job))
    return run if is_done(job) or diverged(run) else None


def left(scores: Scores, tries: Sequence[str], many: int) -> list[str]:
    """The best tries by the mean over their seeds so far; of equals the first.

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
    """Play a partition's tries by halving, method by method; what is played already, here or
    elsewhere, is read.
    """
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
                    scores[name][seed] = (
                        primary(play(tries[name][seed], kept), method) if number is None else number
                    )
                    print(f"{setting}  {name}  seed {seed}  {scores[name][seed]:.2f}", flush=True)


def report(setting: str, overrides: Mapping[str, Any]) -> None:
    """Play a partition's reported runs, draw by draw; a draw is played whole, on one machine."""
    known = {(row[0], int(row[2])) for row in read(RECORDS)}
    kept = Kept()
    for seed, cells in draws_of(setting, overrides).items():
        for method, cell in cells.items() if (setting, seed) not in known else ():
            print(
                f"{setting}  {method}  seed {seed}  {primary(play(cell, kept), method):.2f}",
                flush=True,
            )


def draws_of(setting: str, overrides: Mapping[str, Any]) -> dict[int, dict[str, Cell]]:
    """The runs of a partition that are reported: seed -> method."""
    draws: dict[int, dict[str, Cell]] = defaultdict(dict)
    for cell in expand(read_toml(REPORTED[setting]), overrides):
        draws[cell.tables["seed"]][cell.method] = cell
    return draws


def play(cell: Cell, kept: Kept) -> Run:
    """A cell's run, played if it is not there yet."""
    if run := ended(cell):
        return run
    with suppress(Diverged):
        experiment.run(cell.job(), [], RunOptions(read=kept.load), resume=True)
    return read_run(folder_of(cell.job()))


def tried(overrides: Mapping[str, Any]) -> Iterator[tuple[str, str, int, float]]:
    """Partition, try, seed and primary number of each run of the tuning that has ended."""
    for setting in SETTINGS:
        for method, tries in cells_of(setting, overrides).items():
            for name, seeds in tries.items():
                for seed, cell in seeds.items():
                    if run := ended(cell):
                        yield setting, name, seed, primary(run, method)


def chosen(tries: Mapping[str, Scores]) -> dict[str, list[str]]:
    """Of each method the try that is reported, and the next best, by their means over all seeds of
    the tuning.

    Tries that have not played all seeds do not count. A method that has not two others is left out.
    """
    seeds = sum(len(seeds) for _, seeds in HALVING)
    best = {}
    for method, scores in tries.items():
        finalists = [name for name in scores if len(scores[name]) == seeds]
        finalists.sort(key=lambda name, scores=scores: -fmean(scores[name].values()))  # type: ignore[misc]
        if len(finalists) > 1:
            best[method] = finalists[:2]
    return best


def tuned() -> dict[str, dict[str, Scores]]:
    """What `TRIES` has: partition -> method -> try -> seed -> primary number."""
    played: dict[str, dict[str, Scores]] = {setting: {} for setting in SETTINGS}
    for setting, name, seed, number in read(TRIES):
        of_method = played[setting].setdefault(name.partition("+")[0], {})
        of_method.setdefault(name, {})[int(seed)] = float(number)
    return played


def put_best() -> None:
    """Write the job files that are reported: those of the tuning, with the chosen tries and all
    training images.
    """
    for setting, played in tuned().items():
        wanted = {cell.method.partition("+")[0] for cell in expand(read_toml(TUNING[setting]))}
        open_ones = sorted(wanted - chosen(played).keys())
        if open_ones:
            print(
                f"{setting}: not all is played; two tries with all seeds are lacking of "
                f"{', '.join(open_ones)}"
            )
            continue
        entries = {entry["name"]: entry for entry in read_toml(TUNING[setting])["grid"]["method"]}
        lines = []
        for method, (name, _) in chosen(played).items():
            scores = played[method]
            means = (
                f"{one.partition('+')[2] or 'middle'} {np.mean([*scores[one].values()]):.1f}"
                for one in scores
            )
            own = {"measure": ["local"], "measure_images": 1000} if method == BASELINE else {}
            lines += [
                f"  # {', '.join(means)}",
                f"  {inline({**entries[name], 'name': method, **own})},",
            ]
        job = put_methods(TUNING[setting].read_text(), lines)
        job = re.sub(r"^test_fraction.*\n", "", job, flags=re.MULTILINE)
        job = job.replace("twenty-tune-", "twenty-").replace(
            "[100, 101, 102, 103]", str(list(range(10)))
        )
        about = [
            f"# rayfed run jobs/comparison/twenty-{setting}.toml",
            "#",
            "# Twenty methods on ten draws (README.md, beside this file): each at the best of its "
            "tries, the means of",
            "# which over their seeds, in percent, stand above it.",
        ]
        REPORTED[setting].write_text("\n".join([*about, job[job.index("name = ") :]]))


def reported(overrides: Mapping[str, Any]) -> Iterator[tuple[str, str, int, float, float]]:
    """Partition, method, seed, primary and second number of each run of the draws that have been
    played here whole.
    """
    for setting in SETTINGS:
        for seed, cells in draws_of(setting, overrides).items():
            runs = {method: run for method, cell in cells.items() if (run := ended(cell))}
            if len(runs) == len(cells):
                end = last_ten(runs[BASELINE])
                for method, run in runs.items():
                    yield setting, method, seed, primary(run, method), rounds_to(end, run)
                yield setting, OWN, seed, primary(runs[BASELINE], "local"), math.nan


def last_ten(run: Run) -> float:
    """The mean accuracy of the last ten rounds, in percent; of a run that has diverged, chance."""
    return (
        CHANCE
        if diverged(run)
        else float(100 * np.asarray(run.rounds["test_accuracy"][-10:], float).mean())
    )


def rounds_to(goal: float, run: Run) -> int:
    """The first round in which the mean of the last five accuracies is at least `goal`, in percent.

    61 where it never is, or the run has diverged.
    """
    accuracy = 100 * np.asarray(run.rounds["test_accuracy"][1:], float)
    means = np.array([accuracy[end - 5 : end].mean() for end in range(5, len(accuracy) + 1)])
    reached = np.flatnonzero(means >= goal)
    return (
        int(reached[0]) + 5
        if len(reached) and not diverged(run)
        else run.job["train"]["num_rounds"] + 1
    )


def diverged(run: Run) -> bool:
    return run.error.startswith("Diverged")


# Tests
# ------------------------------------------------------------------------------------------


def sign_flip(differences: Sequence[float]) -> float:
    """The exact two-sided p-value of a mean of 0, where each difference is as likely to have the
    other sign.

    >>> sign_flip([1.0, 2.0, 3.0]), sign_flip([1.0, -1.0])
    (0.25, 1.0)
    """
    values = np.asarray(differences)
    assert np.isfinite(values).all(), values
    # Of one sample, scipy flips signs. Without a limit it takes each of the 2^n choices once.
    flipped = stats.permutation_test(
        (values,), np.sum, permutation_type="samples", n_resamples=math.inf
    )
    return float(flipped.pvalue)


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


def critical_difference(methods: int, draws: int, level: float = LEVEL) -> float:
    """The least difference of two mean ranks that is sure, by Nemenyi's test (Demsar, JMLR 2006).

    >>> round(critical_difference(10, 30), 2)
    2.47
    """
    largest_range = stats.studentized_range.ppf(1 - level, methods, math.inf)
    return float(largest_range) / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * draws))


class Tested(NamedTuple):
    """The differences of two methods on the same draws, and the p-value of their mean, corrected
    for its family.
    """

    gaps: list[float]
    p: float

    def __str__(self) -> str:
        low, high = interval(self.gaps) or (math.nan, math.nan)
        return f"{fmean(self.gaps):+.1f} [{low:+.1f}, {high:+.1f}]"

    @property
    def verdict(self) -> str:
        if self.p >= LEVEL:
            return "open"
        return "holds" if fmean(self.gaps) > 0 else "fails"


def family(numbers: Numbers, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Tested]:
    """The tests of a family of pairs, each of a method and what it is compared with, as far as both
    were played.
    """
    gaps = {}
    for pair in pairs:
        one, other = (numbers.get(method, {}) for method in pair)
        if both := sorted(one.keys() & other.keys()):
            gaps[pair] = [one[seed] - other[seed] for seed in both]
    p_values = holm({pair: sign_flip(of_pair) for pair, of_pair in gaps.items()})
    return {pair: Tested(of_pair, p_values[pair]) for pair, of_pair in gaps.items()}


def against_fedavg(numbers: Numbers) -> dict[tuple[str, str], Tested]:
    return family(
        numbers,
        [(method, BASELINE) for method in numbers if method not in (BASELINE, *BOUNDS, OWN)],
    )


def table(numbers: Numbers, rounds: Numbers) -> str:
    """A partition's methods, the best first: means, differences from FedAvg, and rounds to FedAvg's
    end.
    """
    tests = against_fedavg(numbers) | family(numbers, [("local", OWN)])
    by_method = {method: test for (method, _), test in tests.items()}
    head = ["method", "mean of rounds 31 to 60", "difference from FedAvg", "p, corrected"]
    head.append("rounds to FedAvg's end, median")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for method in sorted(numbers, key=lambda name: -fmean(numbers[name].values())):
        values, test = [*numbers[method].values()], by_method.get(method)
        cells = [TITLES.get(method) or link(method), stat_text(spread(values), 1)]
        cells += [str(test), f"{test.p:.3f}" if method not in BOUNDS else ""] if test else ["", ""]
        cells.append(
            "" if method in (*BOUNDS, OWN) else f"{np.median([*rounds[method].values()]):g}"
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def claims(of_settings: Mapping[str, Numbers]) -> str:
    """What the papers say of two methods, and whether it holds on each partition of which all draws
    are recorded.
    """
    lines = [f"| claim | paper | {' | '.join(TITLED.values())} |", "|---" * (2 + len(TITLED)) + "|"]
    tests = {
        setting: against_fedavg(of) | family(of, OTHERS) for setting, of in of_settings.items()
    }
    for (method, other), paper in CLAIMS.items():
        told = (tests.get(setting, {}).get((method, other)) for setting in TITLED)
        cells = [
            f"{test}, p = {test.p:.3f}: **{test.verdict}**" if test else "not played yet"
            for test in told
        ]
        lines.append(f"| {link(method)} over {link(other)} | {paper} | {' | '.join(cells)} |")
    return "\n".join(lines)


def finalists(played: Mapping[str, Mapping[str, Scores]]) -> str:
    """The two tries of each method that played all tuning seeds, and how far they lie apart."""
    head = [
        "method",
        "partition",
        "chosen",
        "its mean",
        "the other",
        "difference over the four seeds",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for setting, methods in played.items():
        for method, (name, other) in chosen(methods).items():
            scores = methods[method]
            gaps = [scores[name][seed] - scores[other][seed] for seed in scores[name]]
            words = [one.partition("+")[2] or "the middle" for one in (name, other)]
            cells = [
                TITLES.get(method) or link(method),
                TITLED[setting],
                words[0],
                f"{fmean(scores[name].values()):.1f}",
            ]
            cells += [words[1], stat_text(spread(gaps), 1)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_ranks(numbers: Numbers) -> tuple[dict[str, float], int]:
    """The mean rank of each method over the draws that all have played, and how many draws these
    are.

    1 is the best, and equals share their ranks.
    """
    ranked = [method for method in numbers if method not in (*BOUNDS, OWN)]
    draws = sorted(set.intersection(*({*numbers[method]} for method in ranked)))
    # (methods, draws)
    values = np.array([[numbers[method][seed] for seed in draws] for method in ranked])
    ranks = stats.rankdata(-values, axis=0)
    return dict(zip(ranked, ranks.mean(axis=1).tolist(), strict=True)), len(draws)


def draw(of_settings: Mapping[str, Numbers], file: Path) -> None:
    """Critical-difference diagrams (Demsar, JMLR 2006): methods by their mean rank, lines join what
    may be equal.
    """
    with style.context(["default", STYLE, {"svg.hashsalt": "twenty", "font.size": 8}]):
        figure = Figure(figsize=(4.5 * len(of_settings), 4.2))
        places = figure.subplots(1, len(of_settings), squeeze=False)[0]
        for place, (setting, numbers) in zip(places, of_settings.items(), strict=True):
            of_methods, draws = mean_ranks(numbers)
            ranks = sorted(of_methods.items(), key=lambda pair: pair[1])
            critical = critical_difference(len(ranks), draws)
            values = np.array([rank for _, rank in ranks])
            place.plot(values, range(len(ranks)), "o", color=COLOURS[0], markersize=4)
            end = -1
            for first, rank in enumerate(values):
                last = int(np.flatnonzero(values <= rank + critical)[-1])
                # Else a line before it joins them too.
                if last > end:
                    place.plot(
                        [rank, values[last]], [first - 0.3] * 2, color=COLOURS[1], linewidth=1.5
                    )
                    end = last
            place.set_yticks(range(len(ranks)), [method for method, _ in ranks])
            place.invert_yaxis()
            place.set(
                title=f"MNIST, {TITLED[setting]}; critical difference {critical:.1f}",
                xlabel="mean rank",
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="svg", metadata=METADATA)
    file.write_text(
        re.sub(r"[ \t]+$", "", file.read_text().replace(INK, "#333333"), flags=re.MULTILINE)
    )


def write_page() -> None:
    """The tables and the figure of the partitions of which all draws are recorded, into the
    page.
    """
    numbers, rounds = (
        {setting: defaultdict[str, dict[int, float]](dict) for setting in SETTINGS}
        for _ in range(2)
    )
    for setting, method, seed, *values in read(RECORDS):
        numbers[setting][method][int(seed)], rounds[setting][method][int(seed)] = map(float, values)
    complete, texts = {}, {}
    for setting, of_methods in numbers.items():
        draws = draws_of(setting, {})
        played = [
            seed
            for seed, cells in draws.items()
            if all(seed in of_methods[method] for method in cells)
        ]
        texts[f"twenty, {setting}"] = (
            f"Not complete yet: {len(played)} of {len(draws)} draws are recorded."
        )
        if len(played) == len(draws):
            complete[setting] = of_methods
            texts[f"twenty, {setting}"] = table(of_methods, rounds[setting])
    texts["twenty, claims"] = (
        claims(complete) if complete else "Not complete yet: see the draws below."
    )
    texts["twenty, tuning"] = finalists(tuned())
    PAGE.write_text(put(PAGE.read_text(), texts))
    if complete:
        draw(complete, FIGURE)


# Files
# ------------------------------------------------------------------------------------------


def read(file: Path) -> list[list[str]]:
    """The rows of a file; none where it is not there yet."""
    return list(csv.reader(file.read_text().splitlines()))[1:] if file.exists() else []


def add(file: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Add rows to a file, each by its partition, name and seed; a row that is there already is
    replaced.
    """
    known = {tuple(row[:3]): row for row in read(file)}
    for setting, name, seed, *numbers in rows:
        known[setting, name, str(seed)] = [
            setting,
            name,
            str(seed),
            *(f"{number:.4f}" for number in numbers),
        ]
    with file.open("w", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([head, *known.values()])


def main(command: str = "", *words: str) -> None:
    named = [word for word in words if "=" not in word]
    overrides = {"output.path": named[-1] if named else "", "ray.mode": "off"}
    overrides |= dict(read_override(word) for word in words if "=" in word)
    match command, named:
        case "tune", [setting, _] if setting in SETTINGS:
            tune(setting, overrides)
        case "play", [setting, _] if setting in SETTINGS:
            report(setting, overrides)
        case "tries", [_]:
            add(TRIES, ("setting", "try", "seed", "primary"), tried(overrides))
        case "best", []:
            put_best()
        case "records", [_]:
            add(
                RECORDS,
                ("setting", "method", "seed", "primary", "rounds_to_fedavg"),
                reported(overrides),
            )
        case "page", []:
            write_page()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    from_shell(main)
