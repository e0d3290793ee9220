"""Make the comparison of all methods on MNIST: from finished runs to job files, tables and figures.

    python docs/comparison/make_comparison.py best runs
    python docs/comparison/make_comparison.py page runs
    python docs/comparison/make_comparison.py page

The first takes the best values from runs of mnist-tune.toml and mnist-central-tune.toml into the
other job files. The second makes docs/comparison/results.csv, docs/comparison.md and the figures
from runs of those. The third makes the page's tables alone, from results.csv.
`make_personal.py` does the same for the clients' own models.

`runs` is the folder in which the runs are (`output.path`). No number of the page's tables is typed
by hand.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from rayfed.base.errors import InputError
from rayfed.folder.places import folder_of, is_done
from rayfed.grid.cells import Cell, expand
from rayfed.job import read_toml
from rayfed.papers.style import COLOURS, STYLE
from rayfed.report.read import Run, read_run
from rayfed.report.table import LAST, Difference, figures
from rayfed.report.words import interval, spread, stat_text

# For pages.py, in the folder above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from pages import from_shell, put, to_svg

ROOT = Path(__file__).resolve().parents[2]
TUNING = ROOT / "jobs/comparison/mnist-tune.toml"
# The ceiling has a partition of its own: one client.
CENTRAL = ROOT / "jobs/comparison/mnist-central-tune.toml"
# Of its methods, make_twenty.py has better numbers.
TEN_DRAWS = ROOT / "jobs/comparison/twenty-shards-2.toml"
PAGE = ROOT / "docs/comparison.md"
RESULTS = ROOT / "docs/comparison/results.csv"
FIGURES = ROOT / "docs/methods/figures"
SETTINGS = {"shards-2": "shards 2", "dirichlet-0.1": "Dirichlet 0.1"}
REPORTED = {setting: ROOT / f"jobs/comparison/mnist-{setting}.toml" for setting in SETTINGS}
# What methods are compared by: the mean of the last rounds.
HEADLINE = "last_10"
BASELINE = "fedavg"
CEILING = "central"
LOST = "Runs that diverged are in no mean and no pair, which flatters their methods."


class Record(NamedTuple):
    """A run's numbers in percent; None where it diverged."""

    setting: str
    method: str
    seed: int
    last_10: float | None
    best: float | None
    last: float | None
    forgetting: float | None


# From runs
# ------------------------------------------------------------------------------------------


def played(
    job_file: str | Path | Mapping[str, Any], runs: Path
) -> Iterator[tuple[Cell, Run | None]]:
    """The runs of a grid, None where one diverged.

    `InputError` for a run that is not done, or is another job's.
    """
    for cell in expand(read_toml(job_file), {"output.path": str(runs)}):
        done = is_done(job := cell.job())
        run = read_run(folder_of(job)) if (folder_of(job) / "job.toml").is_file() else None
        if not done and not (run and run.error.startswith("Diverged")):
            raise InputError(
                f"'{folder_of(job)}' is not done: {run.status if run else 'not begun'}; give "
                "`rayfed run` again"
            )
        yield cell, run if done else None


def record(setting: str, method: str, seed: int, run: Run | None) -> Record:
    if run is None:
        return Record(setting, method, seed, None, None, None, None)
    known = figures(run)
    return Record(setting, method, seed, *(known[key] for key in Record._fields[3:]))


def write_records(records: Sequence[Any], file: Path) -> None:
    """A table of named tuples, which begin as `Record` does."""
    rows = [["" if value is None else f"{value:.4f}" for value in each[3:]] for each in records]
    with file.open("w", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows(
            [
                records[0]._fields,
                *([*each[:3], *row] for each, row in zip(records, rows, strict=True)),
            ]
        )


def _number(text: str) -> float | None:
    return float(text) if text else None


def read_records(file: Path, kind: type[Any] = Record) -> list[Any]:
    """What `write_records` wrote."""
    _, *rows = csv.reader(file.read_text().splitlines())
    return [
        kind(setting, method, int(seed), *map(_number, values))
        for setting, method, seed, *values in rows
    ]


# The best of the tuning
# ------------------------------------------------------------------------------------------


def chosen(
    job_file: str | Path | Mapping[str, Any],
    runs: Path,
    score: Callable[[Run], float] = lambda run: figures(run)[HEADLINE],
    together: bool = False,
) -> dict[str, list[str]]:
    """For each setting the lines of its `grid.method`: of each method the try with the highest mean
    of the last rounds.

    Or with the highest `score`; with `together`, the lines for "all settings", by the mean of a
    try's scores. The numbers of all tries stand above it. Of equals the first is taken, which is
    the middle of the grid.
    """
    entries = {entry["name"]: entry for entry in read_toml(job_file)["grid"]["method"]}
    tries: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for cell, run in played(job_file, runs):
        scores = tries["all settings" if together else cell.setting][cell.method.partition("+")[0]][
            cell.method
        ]
        scores.append(score(run) if run else float("-inf"))
    of_settings = {}
    for setting, methods in tries.items():
        lines = []
        for method, of_tries in methods.items():
            found = {name: float(np.mean(scores)) for name, scores in of_tries.items()}
            best = max(found, key=found.__getitem__)
            if found[best] == float("-inf"):
                raise InputError(
                    f"{setting}: all tries of {method} diverged; give it lower rates in {job_file}"
                )
            tried = ((name.partition("+")[2] or "middle", number) for name, number in found.items())
            numbers = ", ".join(
                f"{name} {number:.1f}" if np.isfinite(number) else f"{name} diverged"
                for name, number in tried
            )
            lines += [f"  # {numbers}", f"  {inline({**entries[best], 'name': method})},"]
        of_settings[setting] = lines
    return of_settings


def inline(value: Any) -> str:
    """A value of TOML on one line.

    >>> inline({"name": "a", "train.lr": 0.02})
    '{ name = "a", "train.lr" = 0.02 }'
    """
    if isinstance(value, Mapping):
        pairs = (
            f"{key if key.isidentifier() else json.dumps(key)} = {inline(each)}"
            for key, each in value.items()
        )
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(value)


def put_methods(job: str, lines: Sequence[str]) -> str:
    """A job file with other lines of `grid.method`."""
    methods = "\n".join(["method = [", *lines, "]\n"])
    job, count = re.subn(
        r"^method = \[\n.*?^\]\n", lambda _: methods, job, flags=re.DOTALL | re.MULTILINE
    )
    if count != 1:
        raise InputError(f"a job file has one list `method = [`, and this one has {count}")
    return job


# The page
# ------------------------------------------------------------------------------------------


def difference(
    records: Sequence[Any], setting: str, method: str, reference: str, measure: str = HEADLINE
) -> Difference:
    """Over the seeds for which neither run diverged; as `rayfed.report.table.rows` has it."""
    known: dict[str, dict[int, float]] = defaultdict(dict)
    for each in records:
        if each.setting == setting and (value := getattr(each, measure)) is not None:
            known[each.method][each.seed] = value
    gaps = [
        value - known[reference][seed]
        for seed, value in known[method].items()
        if seed in known[reference]
    ]
    return Difference(
        reference, len(gaps), float(np.mean(gaps)) if gaps else float("nan"), interval(gaps)
    )


def told(gap: Difference) -> str:
    """A difference with its interval, bold where the interval leaves 0 out."""
    text = f"{gap.mean:+.1f}" if gap.pairs else ""
    if gap.interval is not None:
        text += f" [{gap.interval[0]:+.1f}, {gap.interval[1]:+.1f}]"
    return f"**{text}**" if gap.sure else text


def link(method: str) -> str:
    # A page for both bounds.
    return f"[{method}](methods/{'local' if method == CEILING else method}.md)"


def tables(records: Sequence[Record]) -> str:
    """The table of FedAvg and the methods that ten draws do not have; how forgetting goes with the
    last round.
    """
    better = {entry["name"] for entry in read_toml(TEN_DRAWS)["grid"]["method"]} - {BASELINE}
    text = side_by_side(
        [each for each in records if each.method not in better], {HEADLINE: f"mean of last {LAST}"}
    )
    pairs = [(each.last, each.forgetting) for each in records if each.last is not None]
    if len(pairs) > 1:
        correlation = np.corrcoef(np.array(pairs, float), rowvar=False)[0, 1]
        text.append(
            f"Over all runs of results.csv, forgetting has a correlation of {correlation:.2f} with "
            "the last round."
        )
    if any(each.best is None for each in records):
        text += ["", LOST]
    return "\n".join(text).rstrip()


def side_by_side(records: Sequence[Any], measures: Mapping[str, str]) -> list[str]:
    """The lines of a table: a row per method, and per setting its measures; the first of these is
    compared.

    The highest mean of the first setting comes first.
    """
    compared, *others = measures
    head = ["method"]
    for title in SETTINGS.values():
        head += [
            f"{title}: {measures[compared]}",
            "difference from FedAvg",
            *(measures[key] for key in others),
        ]
    rows: dict[str, float] = {}
    for method in dict.fromkeys(each.method for each in records):
        cells, means = [link(method)], []
        for setting in SETTINGS:
            every = [each for each in records if (each.setting, each.method) == (setting, method)]
            done = [each for each in every if getattr(each, compared) is not None]
            texts = [
                stat_text(spread([getattr(each, key) for each in done]), 1) if done else ""
                for key in measures
            ]
            if len(done) < len(every):
                texts[0] = f"{texts[0]} ({len(every) - len(done)} of {len(every)} diverged)".strip()
            gap = (
                ""
                if method == BASELINE
                else told(difference(records, setting, method, BASELINE, compared))
            )
            cells += [texts[0], gap, *texts[1:]]
            means.append(
                spread([getattr(each, compared) for each in done])[0] if done else float("-inf")
            )
        rows[f"| {' | '.join(cells)} |"] = means[0]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return [*lines, *sorted(rows, key=rows.__getitem__, reverse=True), ""]


def put_tables(page: str, records: Sequence[Record]) -> str:
    """The page with its tables made anew."""
    return put(page, {"tables": tables(records)})


def draw(method: str, curves: Mapping[tuple[str, str], Sequence[np.ndarray]], path: Path) -> None:
    """A method beside FedAvg: accuracy above, forgetting below; lines are means, bands go from seed
    to seed.

    `curves`: of each setting and method the curves (2, T) of its seeds, as fractions.
    """
    with style.context(["default", STYLE, {"font.size": 8, "axes.titleweight": "normal"}]):
        figure = Figure(figsize=(6.5, 3.8))
        axes = figure.subplots(2, len(SETTINGS), sharex=True, sharey="row", squeeze=False)
        for column, (setting, title) in enumerate(SETTINGS.items()):
            for name, colour in {BASELINE: "#888888", method: COLOURS[0]}.items():
                # All seeds have diverged.
                if not (found := curves.get((setting, name))):
                    continue
                seeds = 100 * np.stack(found)  # (seeds, 2, T), percent
                rounds = np.arange(1, seeds.shape[2] + 1)
                for row in range(2):
                    low, high = seeds[:, row].min(axis=0), seeds[:, row].max(axis=0)
                    axes[row, column].fill_between(
                        rounds, low, high, color=colour, alpha=0.2, linewidth=0
                    )
                    axes[row, column].plot(
                        rounds, seeds[:, row].mean(axis=0), color=colour, label=name
                    )
            axes[0, column].set_title(f"MNIST, {title}")
            axes[1, column].set_xlabel("round")
        axes[0, 0].set_ylabel("test accuracy (%)")
        axes[1, 0].set_ylabel("forgetting (%)")
        axes[0, 0].legend()
        to_svg(figure, path)


def main(command: str = "", runs: str = "") -> None:
    if command == "best" and runs:
        (central,) = chosen(CENTRAL, Path(runs).expanduser()).values()
        for setting, methods in chosen(TUNING, Path(runs).expanduser()).items():
            lines = [*methods, *central]
            REPORTED[setting].write_text(put_methods(REPORTED[setting].read_text(), lines))
            print("\n".join([str(REPORTED[setting].relative_to(ROOT)), *lines]))
    elif command == "page":
        if runs:
            records, curves = [], defaultdict(list)
            for setting, file in REPORTED.items():
                for cell, run in played(file, Path(runs).expanduser()):
                    records.append(record(setting, cell.method, cell.tables["seed"], run))
                    if run:
                        curve = [
                            run.rounds[column][1:] for column in ("test_accuracy", "forgetting")
                        ]
                        curves[setting, cell.method].append(np.stack(curve))
            write_records(records, RESULTS)
            for method in dict.fromkeys(each.method for each in records):
                draw(method, curves, FIGURES / f"{method}.svg")
        PAGE.write_text(put_tables(PAGE.read_text(), read_records(RESULTS)))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    from_shell(main)
