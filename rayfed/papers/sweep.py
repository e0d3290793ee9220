"""Figures over the settings of a grid: a number by a key of the job, bars, two numbers together.

Each figure is a function of runs. It raises `InputError` if a run lacks what is to be drawn. A
number is one of the table's, such as `last` or `forgetting.round`, or the last value of one that
has a value by round, such as `drift.alignment`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayfed.base.errors import InputError, did_you_mean, nearest
from rayfed.job import flat
from rayfed.papers.curves import number_by_name, words_of
from rayfed.papers.panels import (
    ABREAST,
    apart,
    legend,
    looks,
    panels,
    shortened,
    span,
)
from rayfed.papers.settings import settings_of, unique
from rayfed.papers.style import COLOURS, INK
from rayfed.papers.uneven import common_name, shared_steps
from rayfed.report.read import Group, Run
from rayfed.report.table import HEADS, Row, figures, rows
from rayfed.report.words import spread


def sweep(runs: Sequence[Run], x: str = "", of: str = "last", width: float | None = None) -> Figure:
    """Draw a number of runs by a key of their jobs: a line for each method (FedNTD Fig. 15, 16).

    A point is the mean over the seeds of a setting, with the standard deviation as an error bar.
    Runs that differ in another key than `x` and the seed are of different lines. A run without the
    key, such as FedAvg where `x` is `method.beta`, is a dotted line. Raises `InputError` if no job
    has the key, or all have the same value.
    """
    if not x:
        raise InputError(
            "rayfed figure sweep: name the key of the job that is the axis, such as "
            "--x train.local_epochs"
        )
    settings = rows(runs)
    # Settings without the key, such as FedAvg, are the same everywhere on the axis.
    flat_settings = [row for row in settings if value_of(row, x) is None]
    settings = [row for row in settings if value_of(row, x) is not None]
    if not settings:
        raise lacking_key(runs[0], x)
    values = [value_of(row, x) for row in settings]
    if len({str(value) for value in values}) < 2:
        raise InputError(
            f"--x {x}: all runs have {x} = {values[0]}, so there is no axis; give runs that differ "
            "in it, such as those of a grid"
        )
    together: dict[str, list[Row]] = {}
    for row in settings:
        together.setdefault(all_but(row, x), []).append(row)
    axis = places_on_axis(values)
    place_of = {row.name: place for row, place in zip(settings, axis, strict=True)}
    seeds = span(len(row.runs) for row in settings)
    seed_word = "seed" if seeds == "1" else "seeds"
    caption = sentence(f"{words(of)} by {x}: {seeds} {seed_word} per point")
    width = width or 5.5
    figure, axes = panels(caption, 1, 1, 0.65 * width, width=width)
    labels = line_names(list(together.values()))
    for number, (label, of_line) in enumerate(zip(labels, together.values(), strict=True)):
        ordered = sorted(of_line, key=lambda row: place_of[row.name])
        means, deviations = statistics(ordered, of)
        positions = [place_of[row.name] for row in ordered]
        axes[0, 0].errorbar(positions, means, deviations, label=label, capsize=2, **looks(number))
    for number, row in enumerate(flat_settings, start=len(together)):
        (mean,), _ = statistics([row], of)
        look = {"color": looks(number)["color"], "linestyle": ":"}
        axes[0, 0].axhline(mean, label=row.name, **look)
    scale_axis(axes[0, 0], axis, values)
    axes[0, 0].set(xlabel=x, ylabel=words(of))
    legend(figure, axes[0, 0])
    return figure


# From this ratio of the largest to the smallest value on, an axis is logarithmic.
WIDE = 50


def scale_axis(axes: Axes, places: Sequence[Any], values: Sequence[Any]) -> None:
    """Write the values below an axis, on which wide numbers are logarithmic."""
    if places != values:
        names = list(dict.fromkeys(str(value) for value in values))
        axes.set_xticks(range(len(names)), names)
    elif min(places) > 0 and max(places) / min(places) >= WIDE:
        axes.set_xscale("log")
        # Powers of ten would be formulas, which the style shows as they are written.
        axes.set_xticks(sorted(set(places)), [f"{place:g}" for place in sorted(set(places))])
        axes.minorticks_off()
    elif all(isinstance(value, int) for value in values):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def lacking_key(run: Run, key: str) -> InputError:
    """Make the error for a key that no job of the runs has."""
    known = [*flat(run.job), "data.partition"]
    for option in options_of(run.job["method"]):
        known.append(f"{METHOD}{option}")
    return InputError(
        f"--x {key}: the job of '{run.folder}' has no such key{did_you_mean(key, known)}"
    )


# The keys of a method's parts begin so.
METHOD = "method."


def value_of(row: Row, key: str) -> Any:
    """Return the value of a key in the jobs of a setting; None if they have no such key.

    A key such as `method.beta` is that of a part. `data.partition` is the rule with what it takes.
    """
    job = row.runs[0].job
    if key == "data.partition":
        return partition_text(job["data"]["partition"])
    if key.startswith(METHOD):
        return options_of(job["method"]).get(key.removeprefix(METHOD))
    return flat(job).get(key)


def partition_text(rule: Mapping[str, Any]) -> str:
    """Return a rule of partition with its own values.

    >>> partition_text({"name": "dirichlet", "alpha": 0.1, "num_clients": 10, "seed": 0})
    'dirichlet 0.1'
    """
    own = [str(value) for key, value in rule.items() if key in ("alpha", "s", "k")]
    return " ".join([str(rule["name"]), *own])


def options_of(method: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options of a method's parts; the last part of several that have it counts."""
    options: dict[str, Any] = {}
    for part in method:
        options |= {key: value for key, value in part.items() if key != "name"}
    return options


def all_but(row: Row, key: str) -> str:
    """Return a setting's job without a key, seeds, and what changes no number, as text."""
    job = flat(row.runs[0].job)
    if key.startswith(METHOD):
        option = key.removeprefix(METHOD)
        parts = []
        for part in job["method"]:
            parts.append({name: value for name, value in part.items() if name != option})
        job["method"] = parts
    for name in list(job):
        if name in (key, "name", "seed", "data.partition.seed", "track") or name.startswith(
            ("output.", "ray.", f"{key}.")
        ):
            del job[name]
    return json.dumps(job, sort_keys=True, default=str)


def line_names(lines: Sequence[Sequence[Row]]) -> list[str]:
    """Return the names of lines: what is common to the names of a line's settings.

    Lines with the same name get the values of the keys in which they differ, but for the method.
    """
    names = [line_name(line) for line in lines]
    jobs = [flat(line[0].runs[0].job) for line in lines]
    told = []
    for name, job in zip(names, jobs, strict=True):
        twins = [other for number, other in enumerate(jobs) if names[number] == name]
        apart = [key for key in DISTINCT if len({str(twin.get(key)) for twin in twins}) > 1]
        told.append(", ".join([name, *(str(job.get(key)) for key in apart)]))
    return told


# The keys by which lines of one method are told apart.
DISTINCT = ("data.source", "data.partition.name", "model.name")


def beginning_of(names: Sequence[str]) -> str:
    """Return the letters with which all names begin, without a dash at their end.

    >>> beginning_of(["fedlmd-tf", "fedlmd-tf-beta-0.5"]), beginning_of(["mu-1", "tau-1"])
    ('fedlmd-tf', '')
    """
    first = names[0]
    length = len(first)
    for name in names[1:]:
        while not name.startswith(first[:length]):
            length -= 1
    return first[:length].rstrip("-_.+/")


def line_name(line: Sequence[Row]) -> str:
    """Return what the names of a line's settings have in common: steps, or else their beginning."""
    names = [row.name for row in line]
    shared = shared_steps(names)
    beginning = beginning_of(names)
    return shortened(shared or beginning) if shared or beginning else common_name(line)


def places_on_axis(values: Sequence[Any]) -> list[Any]:
    """Return where values stand on an axis: numbers as they are, others one after the other.

    >>> places_on_axis([0.1, 10]), places_on_axis(["iid", "shards", "iid"])
    ([0.1, 10], [0, 1, 0])
    """
    if all(isinstance(value, int | float) for value in values):
        return list(values)
    names = list(dict.fromkeys(str(value) for value in values))
    return [names.index(str(value)) for value in values]


def number_of(run: Run, of: str) -> float:
    """Return a number of a run: of the table, or the last of those by round; shares in percent."""
    numbers = figures(run)
    if of in numbers:
        return numbers[of]
    try:
        _, values = number_by_name(of).take(run)
    except InputError as error:
        near = nearest(of, numbers)
        hint = f"; a number of the table is '{near}'" if near else ""
        raise InputError(f"{error}{hint}") from None
    if not len(values):
        raise InputError(f"'{run.folder}' has no value of '{of}'")
    return float(values[-1])


def statistics(settings: Sequence[Row | Group], of: str) -> tuple[list[float], list[float] | None]:
    """Return the mean of each setting over its seeds, and the deviations if all have several."""
    means, deviations = [], []
    for row in settings:
        mean, deviation = spread([number_of(run, of) for run in row.runs])
        means.append(mean)
        if deviation is not None:
            deviations.append(deviation)
    return means, deviations if len(deviations) == len(means) else None


def words(of: str) -> str:
    """Return the words for a number, with its unit."""
    if of in ("best", "last", "last_10"):
        return HEADS[of].replace(" (%)", " accuracy (%)")
    return HEADS.get(of) or words_of(of)


def sentence(text: str) -> str:
    """Begin a text with a capital letter."""
    return text[:1].upper() + text[1:]


def bars(
    runs: Sequence[Run], of: str = "last", by_setting: bool = False, width: float | None = None
) -> Figure:
    """Draw a number as a bar for each method, with its deviation over the seeds (FedLMD Fig. 5).

    With `by_setting`, runs that differ in their method alone share a panel.
    """
    groups = apart(runs, most=MOST_BARS)
    settings = settings_of(groups) if by_setting else {"": groups}
    labels = unique(label for of_setting in settings.values() for label in of_setting)
    seeds = span(len(group.runs) for group in groups.values())
    caption = sentence(f"{words(of)}: means of n = {seeds} seeds")
    columns = min(len(settings), ABREAST)
    width = width or max(3.3, (0.5 * len(labels) + 0.4) * columns + 0.8)
    rows_of_panels = -(-len(settings) // columns)
    figure, axes = panels(caption, rows_of_panels, columns, 2.6, width, sharey=True)
    lowest, highest = np.inf, -np.inf
    for panel, (title, of_setting) in zip(axes.flat, settings.items(), strict=False):
        means, deviations = statistics([*of_setting.values()], of)
        colours = [COLOURS[labels.index(label) % len(COLOURS)] for label in of_setting]
        places = np.arange(len(means))
        panel.bar(places, means, yerr=deviations, color=colours, capsize=2, width=0.7)
        panel.set_xticks(places, [*of_setting], rotation=45, ha="right")
        panel.set_title(title)
        panel.grid(axis="x", visible=False)
        lowest, highest = min(lowest, *means), max(highest, *means)
    for panel in axes.flat[len(settings) :]:
        panel.set_axis_off()
    # From 0 on, bars that differ by a few points would look alike.
    if lowest > 0.5 * highest:
        room = max(highest - lowest, 1.0)
        axes[0, 0].set_ylim(lowest - room, highest + 0.5 * room)
    for row in axes:
        row[0].set_ylabel(words(of))
    return figure


# Most bars of a figure.
MOST_BARS = 120


def scatter(
    runs: Sequence[Run],
    x: str = "",
    of: str | None = None,
    by_round: bool = False,
    width: float | None = None,
) -> Figure:
    """Draw a number of each run against another number of it (FedNTD Fig. 8).

    A point is a run, or with `by_round` a round of a run (FedSSD Fig. 2a). If `of` is not given, it
    is the last accuracy, or with `by_round` the accuracy of the round. Runs that differ in their
    seed alone look alike. On the dotted line, which is drawn if both numbers are accuracies, the
    two are equal.
    """
    if not x:
        raise InputError(
            "rayfed figure scatter: name the number on the axis, such as --x forgetting.round"
        )
    if of is None:
        of = "test_accuracy" if by_round else "last"
    settings = rows(runs)
    width = width or 4.5
    of_each = "round of a run" if by_round else "run"
    caption = sentence(f"{words(of)} against {words(x)}: a point for each {of_each}")
    figure, axes = panels(caption, 1, 1, 0.75 * width, width=width)
    take = points_by_round if by_round else points
    for number, row in enumerate(settings):
        xs, ys = take(row, x, of)
        look = looks(number) | {"linestyle": "none"}
        if by_round:
            look |= {"markersize": 3, "alpha": 0.7}
        axes[0, 0].plot(xs, ys, label=row.name, **look)
    if {x, of} <= ACCURACIES:
        low = max(axes[0, 0].get_xlim()[0], axes[0, 0].get_ylim()[0])
        axes[0, 0].axline((low, low), slope=1, color=INK, linestyle=":", linewidth=0.8)
    axes[0, 0].set(xlabel=words(x), ylabel=words(of))
    legend(figure, axes[0, 0])
    return figure


# Two of these on the axes of a scatter have a line where they are equal.
ACCURACIES = {
    "best",
    "last",
    "last_10",
    "test_accuracy",
    "local.before.accuracy",
    "local.after.accuracy",
}


def points(row: Row, x: str, of: str) -> tuple[list[float], list[float]]:
    """Return two numbers of each run."""
    return [number_of(run, x) for run in row.runs], [number_of(run, of) for run in row.runs]


def points_by_round(row: Row, x: str, of: str) -> tuple[list[float], list[float]]:
    """Return two numbers in each round of each run that has both; shares are in percent."""
    xs: list[float] = []
    ys: list[float] = []
    for run in row.runs:
        across, up = number_by_name(x).take(run), number_by_name(of).take(run)
        _, places, other_places = np.intersect1d(across[0], up[0], return_indices=True)
        xs += across[1][places].tolist()
        ys += up[1][other_places].tolist()
    return xs, ys
