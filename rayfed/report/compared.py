"""What the page of several runs says of groups of runs.

It has their numbers, what they differ in, and what each has forgotten.
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
from rayfed.report.answers import COSTS, Number, headline, headline_of_key, headlines
from rayfed.report.charts import MOST_ROWS
from rayfed.report.read import Group, Run, forgotten, shorten
from rayfed.report.table import Row, rows
from rayfed.report.words import html_bar, listed, mean_percent

# The hashes in which runs may differ, and their keys in environment.json.
HASHES = {"hash of the data": "data", "hash of the partition": "partition"}
# The runs of a group may differ in these.
VARIED = ("seed", "data.partition.seed", "hash of the partition")


def columns(run: Run, key: str) -> list[Number]:
    """Return the numbers of a run in the table, with the forgetting of a key."""
    accuracy, last, peak, *costs = headline(run)
    since = ("since the peak", *peak[1:])
    return [accuracy, last, headline_of_key(run, key), since, *costs]


def numbers(group: Group, target: float, key: str) -> list[str]:
    """Return a group's row in the table, with the forgetting of a key.

    A group of several runs has means and deviations.
    """
    runs = group.counted
    seeds = listed(run.job["seed"] for run in runs)
    reached = [rounds_to_target(run.rounds["test_accuracy"][1:], target) for run in runs]
    reached_in = listed(round or "never" for round in reached)
    if len(runs) == 1:
        shown = []
        for _, value, note in columns(runs[0], key):
            shown.append(f"{value} ({note})" if note else value)
        return [seeds, *shown, reached_in]
    summaries = [run.summary for run in runs]
    means = {}
    for cost in COSTS:
        means[cost] = int(np.mean([summary.get(cost, 0) for summary in summaries]))
    played = [summary["rounds"] for summary in summaries]
    return [
        seeds,
        mean_percent(_shares(summaries, "best", "test_accuracy")),
        mean_percent(_shares(summaries, "last", "test_accuracy")),
        mean_percent(headlines(group, key)),
        mean_percent(_shares(summaries, "last", "forgetting")),
        " to ".join(f"{count:,}" for count in sorted({min(played), max(played)})),
        str(timedelta(seconds=means["seconds"])),
        size(means["bytes_down"]),
        size(means["bytes_up"]),
        reached_in,
    ]


def _shares(summaries: Sequence[dict[str, Any]], round: str, figure: str) -> list[float]:
    """Return a number of the best or the last round from the summaries that have it."""
    shares = []
    for summary in summaries:
        if round in summary and summary[round][figure] is not None:
            shares.append(summary[round][figure])
    return shares


def references(
    groups: Sequence[Group], names: Sequence[str], rows: Sequence[Row] | str
) -> dict[str, str]:
    """Return the name of the group that each group is compared with, by the group's name.

    A group that is not compared with another has its own name. Without differences, all are
    compared with the first group.
    """
    if isinstance(rows, str):
        return dict.fromkeys(names, names[0])
    # A row may have a shorter name than its group if other groups have no row. So rows and groups
    # are matched by the folders of their runs.
    called = {}
    for name, group in zip(names, groups, strict=True):
        for run in group.counted:
            called[run.folder] = name
    compared_with = {name: name for name in names}
    for row in rows:
        reference = row.pairs[0][0] if row.pairs else row.runs[0]
        compared_with[called[row.runs[0].folder]] = called[reference.folder]
    return compared_with


def targets(groups: Sequence[Group], names: Sequence[str]) -> dict[str, float]:
    """Return the mean best accuracy of each group that has one, by the group's name."""
    means: dict[str, float] = {}
    for name, group in zip(names, groups, strict=True):
        bests = _shares([run.summary for run in group.runs], "best", "test_accuracy")
        if bests:
            means[name] = float(np.mean(bests))
    return means


def differences(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    """Return key, value and groups for each key of the jobs in which runs differ.

    The hashes of data and partition are among the keys.
    """
    settings = []
    for name, group in zip(shorten(groups), groups, strict=True):
        settings += [(name, _settings(run)) for run in group.runs]
    keys: dict[str, None] = {}
    for _, setting in settings:
        keys |= dict.fromkeys(setting)
    rows: list[tuple[str, str, str]] = []
    for key in keys:
        # A hash says nothing new if a key of the data already differs.
        explained = key in HASHES and any(other.startswith("data.") for other, _, _ in rows)
        users, is_different = _users(key, settings)
        if is_different and not explained:
            rows += [(key, value, listed(dict.fromkeys(names))) for value, names in users.items()]
    return rows


def _users(
    key: str, settings: Sequence[tuple[str, dict[str, str]]]
) -> tuple[dict[str, list[str]], bool]:
    """Return the groups that have each value of a key, and whether the groups' runs differ in it.

    A group has its name once for each of its runs. The runs of one group may differ in `VARIED`.
    """
    users: dict[str, list[str]] = {}
    values: dict[str, set[str]] = {}
    for name, setting in settings:
        value = setting.get(key, "not set")
        users.setdefault(value, []).append(name)
        values.setdefault(name, set()).add(value)
    within = key not in VARIED and any(len(of_group) > 1 for of_group in values.values())
    between = len({frozenset(of_group) for of_group in values.values()}) > 1
    return users, within or between


def partition_of(group: Group) -> dict[str, Any]:
    """Return the table [data.partition] of a group.

    Where its runs have several values of a key (the seed), the value is a list of them.
    """
    tables = [run.job["data"]["partition"] for run in group.runs]
    partition = {}
    for key in tables[0]:
        values = [table.get(key) for table in tables]
        is_same = all(value == values[0] for value in values)
        partition[key] = values[0] if is_same else values
    return partition


def _settings(run: Run) -> dict[str, str]:
    """Return the values that the page compares between runs, as text of at most 64 characters.

    The method is left out, as the page shows it next to them, and so is what changes no numbers.
    """
    left_out = ("name", "method", "ray", "output", "track", *MEASURE)
    settings = flat({key: value for key, value in run.job.items() if key not in left_out})
    settings |= {name: run.environment.get(key, "unknown") for name, key in HASHES.items()}
    return {key: str(value)[:64] for key, value in settings.items()}


def class_losses(groups: Sequence[Group]) -> list[list[Any]]:
    """Return a row per class, the worst first: how much of it each group has lost.

    A loss is the mean over a group's runs.
    """
    # For each class a list per group, which holds the loss in each of its runs.
    losses: dict[str, list[list[float]]] = {}
    for number, group in enumerate(groups):
        for run in group.counted:
            for loss in forgotten(run):
                of_groups = losses.setdefault(loss.name, [[] for _ in groups])
                of_groups[number].append(loss.lost)
    means: dict[str, list[float]] = {}
    for name, of_groups in losses.items():
        means[name] = [float(np.mean(lost)) if lost else math.nan for lost in of_groups]
    ranked = sorted(means, key=lambda name: -max(np.nan_to_num(means[name], nan=-np.inf)))
    rows: list[list[Any]] = []
    for name in ranked[:MOST_ROWS]:
        bars = [html_bar(mean) for mean in means[name]]
        rows.append([name, *bars])
    return rows


def paired(runs: Sequence[Run]) -> list[Row] | str:
    """Return the rows of the table of these runs, or why there are none.

    The rows have paired differences in the last accuracy.
    """
    try:
        return rows(runs)
    except InputError as error:
        # The error says which two runs are one, or that no round was evaluated.
        return f"There are no paired differences: {error}."
