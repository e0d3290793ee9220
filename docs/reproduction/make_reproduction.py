"""The papers' headline rows beside ours: from finished runs to docs/reproduction.md and its figure.

    python docs/reproduction/make_reproduction.py runs/fedntd-table1/cifar10-shards-2
    python docs/reproduction/make_reproduction.py runs/authors-deal fedavg.csv
    python docs/reproduction/make_reproduction.py

The first adds a run's numbers. The second also adds rounds of the authors' own code. The third
makes the page's tables alone.

Given are runs, or folders of runs, one run per method; those of docs/reproduction/authors-deal have
a table of their own, beside rounds of the authors' code from files with the columns method, round
and test_accuracy (a fraction). The records of a method that they lack stay as they were.

No number of the page's tables is typed by hand: ours are those of docs/reproduction/*.csv, which
the runs gave, and the papers' are those of jobs/papers/*/results.csv.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rayfed.folder.found import find_runs
from rayfed.papers.tables import read_paper
from rayfed.report.read import Run, forgotten, read_run

# For pages.py, in the folder above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from pages import from_shell, put, refuse_another_job, to_svg

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reproduction.md"
RECORDS = ROOT / "docs/reproduction"
AUTHORS = RECORDS / "authors.csv"
CODES = {"authors": "the authors' code", "job": "ours, on its clients"}
OWN = "ours, on our own"
# The methods that both codes have played.
BOTH = ("fedavg", "fedntd")
LOOKS = (("#D55E00", "-"), ("#0072B2", "--"), ("#777777", "-."))
JOBS = tuple(ROOT / f"jobs/papers/{paper}.toml" for paper in ("fedntd/table1", "fedlmd/table3"))
# Begins the names of the runs of docs/reproduction/authors-deal.
DEAL = "authors-deal/"
CELL = "cifar10-shards-2"
# And the colour of its line.
METHODS = {
    "fedavg": "#777777",
    "fedntd": "#0072B2",
    "fedlmd": "#D55E00",
}
PAPERS = {"fedntd/table1": "FedNTD, Table 1", "fedlmd/table3": "FedLMD, Table 3"}
ROUNDS = 200
# Rounds, of the mean at the end.
LAST = 10
Rows = list[dict[str, Any]]


# From runs
# ------------------------------------------------------------------------------------------


def records(runs: Sequence[Run]) -> tuple[Rows, Rows]:
    """What the page needs of each run: its rounds, and its classes at the end; accuracies and
    losses as fractions.
    """
    rounds, classes = [], []
    for run in runs:
        method = run.folder.parent.name
        for row, seconds in zip(rounds_of(run), run.rounds["seconds"], strict=True):
            rounds.append({"method": method, **row, "seconds": f"{seconds:.1f}"})
        for loss in forgotten(run):
            numbers = {
                "peak": f"{loss.peak:.4f}",
                "peak_round": loss.peak_round,
                "last": f"{loss.last:.4f}",
            }
            classes.append({"method": method, "class": loss.name, **numbers})
    return rounds, classes


def rounds_of(run: Run) -> Iterator[dict[str, Any]]:
    """A run's rounds; accuracies and losses as fractions."""
    for number, row in enumerate(run.rounds["round"]):
        numbers = {
            key: f"{run.rounds[key][number]:.4f}"
            for key in ("test_accuracy", "test_loss", "forgetting")
        }
        yield {"round": int(row), **numbers}


def write(rows: Rows, file: Path) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(file: Path) -> dict[str, Rows]:
    """The rows that `write` wrote, by method; numbers are numbers."""
    found: dict[str, Rows] = {method: [] for method in METHODS}
    for row in csv.DictReader(file.read_text().splitlines()):
        text = {key: row.pop(key) for key in ("method", "class") if key in row}
        found[text["method"]].append({**text, **{key: float(value) for key, value in row.items()}})
    return {method: rows for method, rows in found.items() if rows}


# The page
# ------------------------------------------------------------------------------------------


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def curve(rows: Rows, column: str) -> np.ndarray:
    """(T,), in percent, without round 0, whose model is untrained."""
    return 100 * np.array([float(row[column]) for row in rows if int(row["round"])])


def printed(paper: str, method: str, metric: str, stat: str, cell: str = CELL) -> str:
    """The number that a paper prints; a hyphen where it prints none."""
    numbers = read_paper(paper).numbers.get(f"{cell}/{method}", [])
    found = [
        n.value + (f" ± {n.spread}" if n.spread else "")
        for n in numbers
        if (n.metric, n.stat) == (metric, stat)
    ]
    return found[0] if found else "-"


def status(rounds: dict[str, Rows]) -> str:
    """Which runs have not ended yet, where there are such."""
    going = {
        method: int(rows[-1]["round"])
        for method, rows in rounds.items()
        if rows[-1]["round"] < ROUNDS
    }
    if not going:
        return "These three runs are complete."
    words = " and ".join(
        f"{method} {number} of {ROUNDS} rounds" for method, number in going.items()
    )
    return f"**Not complete yet**: so far, {words}. Their numbers are those of that round."


def beside(rounds: dict[str, Rows]) -> str:
    """Ours beside the papers'."""
    ntd, lmd = PAPERS
    head = [
        "method",
        "rounds",
        f"best (round) | best, {PAPERS[lmd]}",
        f"last | last, {PAPERS[ntd]}",
    ]
    head += [f"mean of the last {LAST}", f"forgetting | forgetting, {PAPERS[ntd]}"]

    def lines() -> Iterator[Sequence[str]]:
        for method, rows in rounds.items():
            accuracy = curve(rows, "test_accuracy")
            best = int(accuracy.argmax())
            yield [
                f"[{method}](methods/{method}.md)",
                str(len(accuracy)),
                f"{accuracy[best]:.1f} ({best + 1}) | "
                f"{printed(lmd, method, 'test_accuracy', 'best')}",
                f"{accuracy[-1]:.1f} | {printed(ntd, method, 'test_accuracy', 'last')}",
                f"{accuracy[-LAST:].mean():.1f} ± {accuracy[-LAST:].std(ddof=1):.1f}",
                f"{rows[-1]['forgetting']:.2f} | {printed(ntd, method, 'forgetting', 'last')}",
            ]

    return table(" | ".join(head).split(" | "), lines())


def deals(rounds: dict[str, Rows]) -> dict[str, dict[str, np.ndarray]]:
    """The curves (T,), in percent, of the authors' code and of ours on its clients, and of ours on
    our own.
    """
    curves: dict[str, dict[str, list[float]]] = {
        method: {name: [] for name in CODES.values()} for method in BOTH
    }
    for row in csv.DictReader(AUTHORS.read_text().splitlines()):
        if int(row["round"]):
            curves[row["method"]][CODES[row["code"]]].append(100 * float(row["test_accuracy"]))
    arrays = {
        method: {name: np.array(of) for name, of in each.items()} for method, each in curves.items()
    }
    return {
        method: {**each, OWN: curve(rounds[method], "test_accuracy")}
        for method, each in arrays.items()
    }


def smooth(values: np.ndarray) -> np.ndarray:
    """Means of ten rounds, up to each round from the tenth on."""
    return np.convolve(values, np.ones(LAST) / LAST, "valid")


def tens(values: np.ndarray) -> np.ndarray:
    """The means of rounds 1 to 10, 11 to 20, ..., as far as there are such."""
    return values[: len(values) // LAST * LAST].reshape(-1, LAST).mean(axis=1)


def authors(rounds: dict[str, Rows]) -> str:
    """The authors' code and ours on the clients that it deals, and ours on our own: means of ten
    rounds.
    """
    columns = {
        f"{method}: {name}": tens(of)
        for method, each in deals(rounds).items()
        for name, of in each.items()
    }
    ends = range(LAST, ROUNDS + 1, LAST)
    lines = [
        [
            f"{end - LAST + 1} to {end}",
            *(f"{of[i]:.1f}" if i < len(of) else "" for of in columns.values()),
        ]
        for i, end in enumerate(ends)
    ]
    return table(["rounds", *columns], lines)


def gaps(rounds: dict[str, Rows]) -> str:
    """By how much ours on the authors' clients is above their code, and above ours on our own: over
    means of ten.
    """
    theirs, same = CODES.values()
    lines = []
    for method, of in deals(rounds).items():
        for other in (theirs, OWN):
            count = min(len(tens(of[same])), len(tens(of[other])))
            gap = tens(of[same])[:count] - tens(of[other])[:count]
            if count > 1:
                spread = f"{gap.mean():+.1f} ± {gap.std(ddof=1):.1f}"
                lines.append(
                    [
                        method,
                        f"{same}, less {other}",
                        f"1 to {count * LAST}",
                        spread,
                        f"{gap[-1]:+.1f}",
                    ]
                )
    return table(["method", "difference", "rounds", "mean ± deviation of tens", "last ten"], lines)


def draw_deals(rounds: dict[str, Rows], file: Path) -> None:
    """The curves of `deals`, a panel per method: means of ten rounds, and the number that the paper
    prints.
    """
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    for place, (method, each) in zip(
        figure.subplots(1, 2, sharey=True), deals(rounds).items(), strict=True
    ):
        for (name, values), (colour, dash) in zip(each.items(), LOOKS, strict=True):
            if len(values) >= LAST:
                place.plot(
                    np.arange(LAST, len(values) + 1), smooth(values), dash, color=colour, label=name
                )
        paper = float(printed("fedntd/table1", method, "test_accuracy", "last").split()[0])
        place.axhline(
            paper,
            color="#000000",
            linewidth=0.8,
            linestyle=":",
            label="FedNTD, Table 1, at the end",
        )
        place.set(title=method, xlabel="round")
        place.grid(alpha=0.3)
    figure.axes[0].set_ylabel("test accuracy (%), mean of ten rounds")
    figure.axes[1].legend(loc="lower right", fontsize="small")
    to_svg(figure, file)


def speed(rounds: dict[str, Rows]) -> str:
    """Rounds to FedAvg's best accuracy, and the seconds of a round."""
    curves = {method: curve(rows, "test_accuracy") for method, rows in rounds.items()}
    target, reference = curves["fedavg"].max(), int(curves["fedavg"].argmax()) + 1

    def lines() -> Iterator[Sequence[str]]:
        for method, accuracy in curves.items():
            there = np.flatnonzero(accuracy >= target)
            rounds_to = int(there[0]) + 1 if len(there) else None
            seconds = np.array([row["seconds"] for row in rounds[method] if row["round"]])
            yield [
                method,
                str(rounds_to or "not reached"),
                f"{reference / rounds_to:.2f}" if rounds_to else "-",
                printed("fedlmd/table3", method, "speed_up", ""),
                f"{np.percentile(seconds, 10):.0f}",
            ]

    head = [
        f"rounds to {target:.1f} %, FedAvg's best",
        "speed-up",
        f"speed-up, {PAPERS['fedlmd/table3']}",
    ]
    return table(["method", *head, "seconds per round"], lines())


def draw(rounds: dict[str, Rows], file: Path) -> None:
    """Accuracy above and forgetting below, by round: each round thin, the mean of ten rounds
    thick.
    """
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for place, column, label in zip(
        axes, ("test_accuracy", "forgetting"), ("test accuracy (%)", "forgetting (%)"), strict=True
    ):
        for (method, rows), dash in zip(rounds.items(), ("-", "--", "-."), strict=False):
            values = curve(rows, column)
            place.plot(
                np.arange(1, len(values) + 1),
                values,
                color=METHODS[method],
                alpha=0.25,
                linewidth=0.7,
            )
            place.plot(
                np.arange(LAST, len(values) + 1),
                smooth(values),
                dash,
                color=METHODS[method],
                label=method,
            )
        place.set_ylabel(label)
        place.grid(alpha=0.3)
    axes[0].legend(loc="lower right")
    axes[1].set_xlabel("round")
    to_svg(figure, file)


def keep(found: Rows, file: Path) -> None:
    """Write these rows in place of those that the file has of the same methods."""
    new = {row["method"] for row in found}
    before = csv.DictReader(file.read_text().splitlines()) if file.exists() else ()
    rows: Rows = [*found, *(row for row in before if row["method"] not in new)]
    write(sorted(rows, key=lambda row: row["method"]), file)


def keep_deal(runs: Sequence[Run], files: Sequence[Path]) -> None:
    """Put rounds of runs of docs/reproduction/authors-deal, and those of files of the authors'
    code, into its table.
    """
    rows: dict[tuple[str, str, int], Any] = {}
    for row in csv.DictReader(AUTHORS.read_text().splitlines()):
        rows[row["code"], row["method"], int(row["round"])] = row["test_accuracy"]
    for run in runs:
        for row in rounds_of(run):
            rows["job", run.folder.parent.name, row["round"]] = row["test_accuracy"]
    for file in files:
        for row in csv.DictReader(file.read_text().splitlines()):
            rows["authors", row["method"], int(row["round"])] = f"{float(row['test_accuracy']):.4f}"
    heads = ("code", "method", "round", "test_accuracy")
    write(
        [dict(zip(heads, (*key, accuracy), strict=True)) for key, accuracy in sorted(rows.items())],
        AUTHORS,
    )


def main(*folders: str) -> None:
    files = RECORDS / "rounds.csv", RECORDS / "classes.csv"
    if folders:
        given = [Path(folder).expanduser() for folder in folders]
        every = [
            read_run(run)
            for folder in given
            if folder.suffix != ".csv"
            for run in find_runs(folder)
        ]
        runs = [run for run in every if not run.job["name"].startswith(DEAL)]
        for run in runs:
            refuse_another_job(run.folder, *JOBS)
        keep_deal(
            [run for run in every if run not in runs],
            [file for file in given if file.suffix == ".csv"],
        )
        for rows, file in zip(records(runs), files, strict=True):
            keep(rows, file)
    rounds = read(files[0])
    if folders:
        draw(rounds, RECORDS / "curves.svg")
        draw_deals(rounds, RECORDS / "authors.svg")
    made = {each.__name__: each(rounds) for each in (status, beside, speed, authors, gaps)}
    PAGE.write_text(put(PAGE.read_text(), made))


if __name__ == "__main__":
    from_shell(main)
