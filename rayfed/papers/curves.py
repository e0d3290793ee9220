"""The figure of a number by round.

A line for each method shows the mean over its seeds, in a band around them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rayfed.base.errors import InputError, did_you_mean
from rayfed.papers.panels import MARKERS, apart, legend, line, panels, span
from rayfed.papers.style import COLOURS
from rayfed.report.forgetting import Series
from rayfed.report.forms import DOMAIN, NAMES, in_words
from rayfed.report.plots import over_runs
from rayfed.report.read import Run
from rayfed.report.table import lacking

# These numbers are fractions of 1, which are drawn in percent.
SHARES = ("test_accuracy", "forgetting", "macro_f1", "calibration_error")


# What stands between two numbers, and what is computed of them.
PAIRS = {" - ": np.subtract, "/": np.divide}


def curves(runs: Sequence[Run], of: str = "test_accuracy", width: float | None = None) -> Figure:
    """Draw a number by round, as `series` returns it.

    A line is the mean over seeds, in a band from the lowest seed to the highest.
    """
    words = words_of(of)
    scale = 100 if words.endswith("(%)") else 1

    def number_of(run: Run) -> Series:
        rounds, values = series(run, of)
        return rounds, scale * values

    caption = f"{words[:1].upper()}{words[1:]} by round"
    return lines(runs, number_of, caption, words, width)


def lines(
    runs: Sequence[Run],
    number_of: Callable[[Run], Series],
    caption: str,
    unit: str,
    width: float | None = None,
) -> Figure:
    """Draw a line for each method: the mean over seeds, in a band from the lowest to the highest.

    `number_of` returns the rounds and the values of a run. The caption gets the number of seeds,
    and the runs that are left out.
    """
    groups = apart(runs, most=len(MARKERS) * len(COLOURS))
    if any(len(group.runs) > 1 for group in groups.values()):
        seeds = span(len(group.runs) for group in groups.values())
        caption += f": means of n = {seeds} seeds, in bands from the lowest seed to the highest"
    behind = []
    for group in groups.values():
        behind += [str(run.folder) for run in group.behind]
    if behind:
        caption += f"; not drawn, as other seeds have more rounds: {', '.join(behind)}"
    width = width or 5.5
    figure, axes = panels(caption, 1, 1, 0.65 * width, width=width)
    for number, (name, group) in enumerate(groups.items()):
        drawn = over_runs(name, number, [number_of(run) for run in group.runs])
        # The band of a single run has no width.
        low = drawn.y if drawn.low is None else drawn.low
        high = drawn.y if drawn.high is None else drawn.high
        line(axes[0, 0], number, drawn.x, drawn.y, (low, high), name, len(groups))
    axes[0, 0].set(xlabel="round", ylabel=unit)
    # The legend has the order of the runs, as tables do.
    legend(figure, axes[0, 0], axes[0, 0].lines)
    return figure


def words_of(of: str) -> str:
    """Return the words for a number, with its unit if it is in percent.

    >>> words_of("test_accuracy"), words_of("train_loss")
    ('test accuracy (%)', 'train loss')
    """
    if of.startswith(("forgetting.", DOMAIN)):
        return in_words(of)
    words = of.replace("_", " ")
    return f"{words} (%)" if of in SHARES else words


def series(run: Run, of: str) -> Series:
    """Return the rounds that have a number, and its values.

    A number is a column of `rounds.parquet`, `forgetting.NAME`, or a note of clients or rounds; or
    two of them: `A/B`, or `A - B`. Raises `InputError` if the run does not have it.
    """
    for operator, function in PAIRS.items():
        first, found, second = of.partition(operator)
        if found:
            return together(series(run, first), series(run, second), function)
    known = {name: (run.rounds["round"], values) for name, values in run.rounds.items()}
    del known["round"]
    known |= {f"forgetting.{name}": of_name for name, of_name in run.forgetting.items()}
    known |= run.round_notes | run.notes
    if of not in known and of.startswith("forgetting.") and of.removeprefix("forgetting.") in NAMES:
        raise lacking(run, of)
    if of not in known:
        raise InputError(
            f"--of {of}: '{run.folder}' has no such number by round{did_you_mean(of, known)}"
        )
    rounds, values = known[of]
    finite = np.isfinite(values)
    return rounds[finite], values[finite]


def together(first: Series, second: Series, function: Any) -> Series:
    """Return the rounds that two numbers have, and a function of their values where it is finite.

    >>> one = np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0])
    >>> other = np.array([2, 3]), np.array([4.0, 0.0])
    >>> together(one, other, np.divide)
    (array([2]), array([0.5]))
    """
    rounds, places, other_places = np.intersect1d(first[0], second[0], return_indices=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = function(first[1][places], second[1][other_places])
    finite = np.isfinite(values)
    return rounds[finite], values[finite]
