"""Figures over the settings of a grid: a number by a key of the job, bars, two numbers together.

Each figure is a function of runs. It raises `InputError` if a run lacks what is to be drawn. A
number is one of the table's, such as `last` or `forgetting.round`, or the last value of one that
has a value by round, such as `drift.alignment`.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayfed.base.errors import InputError, did_you_mean
from rayfed.job import flat
from rayfed.papers.curves import SHARES, series, words_of
from rayfed.papers.panels import legend, looks, panels, span
from rayfed.papers.style import COLOURS
from rayfed.papers.uneven import common_name
from rayfed.report.read import Run
from rayfed.report.table import HEADS, Row, figures, rows
from rayfed.report.words import spread


def sweep(runs: Sequence[Run], x: str = "", of: str = "last", width: float | None = None) -> Figure:
    """Draw a number of runs by a key of their jobs: a line for each method (FedNTD Fig. 15, 16).

    A point is the mean over the seeds of a setting, with the standard deviation as an error bar.
    Runs that differ in another key than `x` and the seed are of different lines. Raises
    `InputError` if a job lacks the key, or all have the same value.
    """
    if not x:
        raise InputError(
            "rayfed figure sweep: name the key of the job that is the axis, such as "
            "--x train.local_epochs"
        )
    settings = rows(runs)
    values = [value_of(row, x) for row in settings]
    if len({str(value) for value in values}) < 2:
        raise InputError(
            f"--x {x}: all runs have {x} = {values[0]}, so there is no axis; give runs that differ "
            "in it, such as those of a grid"
        )
    lines: dict[str, list[int]] = {}
    for number, row in enumerate(settings):
        lines.setdefault(all_but(row, x), []).append(number)
    axis = places_on_axis(values)
    seeds = span(len(row.runs) for row in settings)
    caption = sentence(f"{words(of)} by {x}: n = {seeds} seeds per point")
    width = width or 5.5
    figure, axes = panels(caption, 1, 1, 0.65 * width, width=width)
    for number, places in enumerate(lines.values()):
        ordered = sorted(places, key=lambda place: axis[place])
        means, deviations = statistics([settings[place] for place in ordered], of)
        label = common_name([settings[place] for place in ordered])
        positions = [axis[place] for place in ordered]
        axes[0, 0].errorbar(positions, means, deviations, label=label, capsize=2, **looks(number))
    if axis != values:
        names = list(dict.fromkeys(str(value) for value in values))
        axes[0, 0].set_xticks(range(len(names)), names)
    elif min(axis) > 0 and max(axis) / min(axis) >= WIDE:
        axes[0, 0].set_xscale("log")
    elif all(isinstance(value, int) for value in values):
        axes[0, 0].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes[0, 0].set(xlabel=x, ylabel=words(of))
    legend(figure, axes[0, 0])
    return figure


# From this ratio of the largest to the smallest value on, an axis is logarithmic.
WIDE = 50


def value_of(row: Row, key: str) -> Any:
    """Return the value of a key in the jobs of a setting. Raises `InputError` if it has none."""
    job = flat(row.runs[0].job)
    if key not in job:
        raise InputError(
            f"--x {key}: the job of '{row.runs[0].folder}' has no such key{did_you_mean(key, job)}"
        )
    return job[key]


def all_but(row: Row, key: str) -> str:
    """Return a setting's job without a key, seeds, and what changes no number, as text."""
    job = flat(row.runs[0].job)
    for name in list(job):
        if name in (key, "name", "seed", "data.partition.seed", "track") or name.startswith(
            ("output.", "ray.")
        ):
            del job[name]
    return json.dumps(job, sort_keys=True, default=str)


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
    _, values = series(run, of)
    if not len(values):
        raise InputError(f"'{run.folder}' has no value of '{of}'")
    return (100 if of in SHARES else 1) * float(values[-1])


def statistics(settings: Sequence[Row], of: str) -> tuple[list[float], list[float] | None]:
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


def bars(runs: Sequence[Run], of: str = "last", width: float | None = None) -> Figure:
    """Draw a number as a bar for each method, with its deviation over the seeds (FedLMD Fig. 5)."""
    settings = rows(runs)
    means, deviations = statistics(settings, of)
    seeds = span(len(row.runs) for row in settings)
    width = width or max(3.3, 0.5 * len(settings) + 1.0)
    caption = sentence(f"{words(of)}: means of n = {seeds} seeds")
    figure, axes = panels(caption, 1, 1, 2.6, width=width)
    places = np.arange(len(settings))
    colours = [COLOURS[place % len(COLOURS)] for place in places]
    axes[0, 0].bar(places, means, yerr=deviations, color=colours, capsize=2, width=0.7)
    axes[0, 0].set_xticks(places, [row.name for row in settings], rotation=45, ha="right")
    # From 0 on, bars that differ by a few points would look alike.
    if min(means) > 0.5 * max(means):
        room = max(max(means) - min(means), 1.0)
        axes[0, 0].set_ylim(min(means) - room, max(means) + 0.5 * room)
    axes[0, 0].set_ylabel(words(of))
    axes[0, 0].grid(axis="x", visible=False)
    return figure


def scatter(
    runs: Sequence[Run], x: str = "", of: str = "last", width: float | None = None
) -> Figure:
    """Draw a number of each run against another number of it (FedNTD Fig. 8).

    A point is a run. Runs that differ in their seed alone look alike.
    """
    if not x:
        raise InputError(
            "rayfed figure scatter: name the number on the axis, such as --x forgetting.round"
        )
    settings = rows(runs)
    width = width or 4.5
    caption = sentence(f"{words(of)} against {words(x)}: a point for each run")
    figure, axes = panels(caption, 1, 1, 0.75 * width, width=width)
    for number, row in enumerate(settings):
        xs = [number_of(run, x) for run in row.runs]
        ys = [number_of(run, of) for run in row.runs]
        look = looks(number) | {"linestyle": "none"}
        axes[0, 0].plot(xs, ys, label=row.name, **look)
    axes[0, 0].set(xlabel=words(x), ylabel=words(of))
    legend(figure, axes[0, 0])
    return figure
