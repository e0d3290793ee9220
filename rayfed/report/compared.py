"""What the page of several runs says of groups: their numbers, in what they differ, what each has
forgotten.
"""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from rich.filesize import decimal as size

from rayfed.base.errors import InputError
from rayfed.job import MEASURE, flat
from rayfed.measures.metrics import rounds_to_target
from rayfed.report.answers import COSTS, headline, headlines
from rayfed.report.charts import MOST_ROWS
from rayfed.report.read import Group, Run, forgotten, shorten
from rayfed.report.table import Row, rows
from rayfed.report.words import html_bar, listed, mean_percent

# And their keys in environment.json.
HASHES = {
    "hash of the data": "data",
    "hash of the partition": "partition",
}
# May differ between the runs of a group.
VARIED = (
    "seed",
    "data.partition.seed",
    "hash of the partition",
)


def numbers(group: Group, target: float, key: str) -> list[str]:
    """A group's row in the table, with the forgetting of a key; of several runs, means and
    deviations.
    """
    runs = group.counted
    seeds = listed(run.job["seed"] for run in runs)
    reached = listed(
        rounds_to_target(run.rounds["test_accuracy"][1:], target) or "never" for run in runs
    )
    if len(runs) == 1:
        shown = [
            f"{value} ({note})" if note else value for _, value, note in headline(runs[0], key)
        ]
        return [seeds, *shown, reached]
    totals = [run.summary for run in runs]
    best, last, since_peak = (
        mean_percent(
            [
                total[which][figure]
                for total in totals
                if which in total and total[which][figure] is not None
            ]
        )
        for which, figure in (
            ("best", "test_accuracy"),
            ("last", "test_accuracy"),
            ("last", "forgetting"),
        )
    )
    shares = [best, last, mean_percent(headlines(group, key)), since_peak]
    seconds, down, up = (int(np.mean([total.get(key, 0) for total in totals])) for key in COSTS)
    played = [total["rounds"] for total in totals]
    rounds = " to ".join(f"{count:,}" for count in sorted({min(played), max(played)}))
    return [seeds, *shares, rounds, str(timedelta(seconds=seconds)), size(down), size(up), reached]


def references(
    groups: Sequence[Group], names: Sequence[str], rows: Sequence[Row] | str
) -> dict[str, str]:
    """By name of a group, the name of the group that it is compared with; its own name if that is
    itself.

    Without differences, all are compared with the first group.
    """
    if isinstance(rows, str):
        return dict.fromkeys(names, names[0])
    # By their folders: a row may have a shorter name than its group, if other groups have no row.
    called = {
        run.folder: name for name, group in zip(names, groups, strict=True) for run in group.counted
    }
    found = dict(zip(names, names, strict=True))
    for row in rows:
        reference = row.pairs[0][0] if row.pairs else row.runs[0]
        found[called[row.runs[0].folder]] = called[reference.folder]
    return found


def targets(groups: Sequence[Group], names: Sequence[str]) -> dict[str, float]:
    """By name of a group, the mean best accuracy of its runs; without those that have none."""
    found: dict[str, float] = {}
    for name, group in zip(names, groups, strict=True):
        bests = [
            run.summary["best"]["test_accuracy"] for run in group.runs if "best" in run.summary
        ]
        if bests:
            found[name] = float(np.mean(bests))
    return found


def differences(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    """Key, value and groups, for each key of the jobs in which runs differ, and the hashes of data
    and partition.
    """
    settings = [
        (name, _settings(run))
        for name, of in zip(shorten(groups), groups, strict=True)
        for run in of.runs
    ]
    rows: list[tuple[str, str, str]] = []
    for key in dict.fromkeys(key for _, setting in settings for key in setting):
        # Value -> groups, in their order.
        users: dict[str, list[str]] = {}
        # Group -> values.
        values: dict[str, set[str]] = {}
        for name, setting in settings:
            value = setting.get(key, "not set")
            users.setdefault(value, []).append(name)
            values.setdefault(name, set()).add(value)
        within = key not in VARIED and any(len(of) > 1 for of in values.values())
        between = len({frozenset(of) for of in values.values()}) > 1
        explained = key in HASHES and any(other.startswith("data.") for other, _, _ in rows)
        if (within or between) and not explained:
            rows += [(key, value, listed(dict.fromkeys(names))) for value, names in users.items()]
    return rows


def partition_of(group: Group) -> dict[str, Any]:
    """The table [data.partition] of a group; where its runs have several values of a key (the
    seed), a list of them.
    """
    tables = [run.job["data"]["partition"] for run in group.runs]
    values = {key: [table.get(key) for table in tables] for key in tables[0]}
    return {key: of if any(value != of[0] for value in of) else of[0] for key, of in values.items()}


def _settings(run: Run) -> dict[str, str]:
    """Whatever two runs may differ in; not the method, which is shown beside, nor what changes no
    numbers.
    """
    left_out = ("name", "method", "ray", "output", "track", *MEASURE)
    settings = flat({key: value for key, value in run.job.items() if key not in left_out})
    settings |= {name: run.environment.get(key, "unknown") for name, key in HASHES.items()}
    return {key: str(value)[:64] for key, value in settings.items()}


def class_losses(groups: Sequence[Group]) -> list[list[Any]]:
    """A row per class, the worst first: how much of it each group has lost, as the mean over its
    runs.
    """
    # Class -> of each group, of each run.
    losses: dict[str, list[list[float]]] = {}
    for number, group in enumerate(groups):
        for run in group.counted:
            for loss in forgotten(run):
                losses.setdefault(loss.name, [[] for _ in groups])[number].append(loss.lost)
    means = {
        name: [float(np.mean(lost)) if lost else math.nan for lost in of]
        for name, of in losses.items()
    }
    worst = sorted(means, key=lambda name: -max(np.nan_to_num(means[name], nan=-np.inf)))[
        :MOST_ROWS
    ]
    return [[name, *map(html_bar, means[name])] for name in worst]


def paired(runs: Sequence[Run]) -> list[Row] | str:
    """The rows of the table of these runs, with paired differences in the last accuracy, or why
    there are none.
    """
    try:
        return rows(runs)
    except InputError as error:
        # It says which two runs are one, or that there is nothing.
        return f"There are no paired differences: {error}."
