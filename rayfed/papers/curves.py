"""The figure of a number by round.

A line for each method shows the mean over its seeds, in a band around them.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rayfed.base.errors import InputError, did_you_mean
from rayfed.papers.panels import (
    ABREAST,
    MARKERS,
    MOST_PANELS,
    apart,
    legend,
    line,
    panels,
    span,
    wide,
)
from rayfed.papers.settings import settings_of, unique
from rayfed.papers.style import COLOURS
from rayfed.report.forgetting import Series
from rayfed.report.forms import DOMAIN, NAMES, in_words
from rayfed.report.plots import over_runs
from rayfed.report.read import Group, Run
from rayfed.report.table import lacking
from rayfed.report.words import listed

# Letters of a line that fit beside a panel.
LETTERS_BESIDE = 33
# These numbers are fractions of 1, which are drawn in percent.
SHARES = ("test_accuracy", "forgetting", "macro_f1", "calibration_error")
# The words for where the accuracy of a client's model is measured.
LOCAL = {
    "local.accuracy": "",
    "local.in_local": " on own classes",
    "local.out_local": " on other classes",
    "train.accuracy": " on own training images",
}
# What stands between two numbers, and what is computed of them.
PAIRS = {" - ": np.subtract, "/": np.divide}


class Number(NamedTuple):
    """A number by round: a function of a run, and the words for the number with its unit."""

    take: Callable[[Run], Series]
    unit: str


def curves(
    runs: Sequence[Run],
    of: str = "test_accuracy",
    by_setting: bool = False,
    width: float | None = None,
) -> Figure:
    """Draw a number by round, as `series` returns it, or several that commas divide.

    A line is the mean over seeds, in a band from the lowest seed to the highest. Each number has a
    row of panels. With `by_setting`, runs that differ in their method alone share a panel, and each
    setting has a column (FedNTD Fig. 7).
    """
    names = [name.strip() for name in of.split(",")]
    caption = listed([words_of(name) for name in names])
    caption = f"{caption[:1].upper()}{caption[1:]} by round"
    return lines(runs, [number_by_name(name) for name in names], caption, width, by_setting)


def number_by_name(of: str) -> Number:
    """Return a number by round with its words; shares are in percent."""
    words = words_of(of)
    scale = 100 if words.endswith(("(%)", "(points)")) else 1

    def take(run: Run) -> Series:
        rounds, values = series(run, of)
        return rounds, scale * values

    return Number(take, words)


def lines(
    runs: Sequence[Run],
    numbers: Sequence[Number],
    caption: str,
    width: float | None = None,
    by_setting: bool = False,
) -> Figure:
    """Draw a line for each method: the mean over seeds, in a band from the lowest to the highest.

    There is a row of panels for each number, and with `by_setting` a column for each setting. The
    caption gets the number of seeds, and the runs that are left out.
    """
    most = len(MARKERS) * len(COLOURS)
    groups = apart(runs, most=most * MOST_PANELS if by_setting else most)
    settings = settings_of(groups) if by_setting else {"": groups}
    caption += seeds_of(groups)
    labels = unique(label for of_setting in settings.values() for label in of_setting)
    rows, columns = layout(len(numbers), len(settings))
    width = width or (5.5 if columns == 1 else wide(columns))
    height = 0.65 * width if columns == 1 else 2.3
    # Accuracies below each other are compared.
    all_shares = all(number.unit.endswith("(%)") for number in numbers)
    options: dict[str, Any] = {"sharey": "all" if len(numbers) == 1 or all_shares else "row"}
    figure, axes = panels(caption, rows, columns, height, width, **options)
    drawn: dict[str, Any] = {}
    without: list[str] = []
    for place, number in enumerate(numbers):
        # One number of many settings takes several rows.
        row = axes.flat if len(numbers) == 1 else axes[place]
        for panel, (title, of_setting) in zip(row, settings.items(), strict=False):
            for label, group in of_setting.items():
                look = labels.index(label)
                drawn[label] = line_of(panel, look, label, group, number, len(of_setting))
                if not len(drawn[label].get_xdata()):
                    without.append(f"'{label}' has no value of {number.unit}")
            panel.set_title(title if row is axes.flat or place == 0 else "")
    if without:
        if len(without) == len(groups) * len(numbers):
            raise InputError(f"there is nothing to draw: {'; '.join(without)}")
        figure.set_label(f"{caption}; {'; '.join(without)}")
    decorate(axes, numbers, len(settings))
    # The legend has the order of the runs, as tables do.
    legend(figure, axes[0, 0], [drawn[label] for label in labels])
    return figure


def line_of(
    panel: Axes, look: int, label: str, group: Group, number: Number, num_lines: int
) -> Any:
    """Draw a number of a group of runs, and return its line."""
    drawn = over_runs(label, look, [number.take(run) for run in group.runs])
    # The band of a single run has no width.
    low = drawn.y if drawn.low is None else drawn.low
    high = drawn.y if drawn.high is None else drawn.high
    line(panel, look, drawn.x, drawn.y, (low, high), label, num_lines)
    return panel.lines[-1]


def decorate(axes: np.ndarray, numbers: Sequence[Number], num_settings: int) -> None:
    """Name the axes of panels, and take away the panels that are left over."""
    if len(numbers) == 1:
        for panel in axes.flat[num_settings:]:
            panel.set_axis_off()
    for panel in axes[-1]:
        panel.set_xlabel("round")
    for place, row in enumerate(axes):
        unit = numbers[min(place, len(numbers) - 1)].unit
        row[0].set_ylabel(textwrap.fill(unit, LETTERS_BESIDE))


def layout(num_numbers: int, num_settings: int) -> tuple[int, int]:
    """Return the rows and columns of panels. Raises `InputError` if there are too many.

    >>> layout(1, 2), layout(1, 6), layout(3, 4)
    ((1, 2), (2, 4), (3, 4))
    """
    if num_numbers == 1:
        columns = min(num_settings, ABREAST)
        return -(-num_settings // columns), columns
    if num_settings > MOST_PANELS:
        raise InputError(
            f"{num_settings} settings do not fit side by side; give runs of up to {MOST_PANELS}"
        )
    return num_numbers, num_settings


def seeds_of(groups: Mapping[str, Group]) -> str:
    """Return the end of a caption: the number of seeds, and the runs that are not drawn."""
    text = ""
    if any(len(group.runs) > 1 for group in groups.values()):
        seeds = span(len(group.runs) for group in groups.values())
        text = f": means of n = {seeds} seeds, in bands from the lowest seed to the highest"
    behind: list[str] = []
    for group in groups.values():
        behind += [str(run.folder) for run in group.behind]
    if behind:
        text += f"; not drawn, as other seeds have more rounds: {', '.join(behind)}"
    return text


def words_of(of: str) -> str:
    """Return the words for a number, with its unit if it is in percent.

    >>> words_of("test_accuracy"), words_of("train_loss")
    ('test accuracy (%)', 'train loss')
    >>> words_of("local.after.in_local")
    'accuracy on own classes after local training (%)'
    >>> words_of("train.before.accuracy")
    'accuracy on own training images before local training (%)'
    >>> words_of("test_accuracy - local.after.accuracy")
    'test accuracy less accuracy after local training (points)'
    """
    first, minus, second = of.partition(" - ")
    if minus and is_share(first) and is_share(second):
        both = [words_of(part).removesuffix(" (%)") for part in (first, second)]
        return f"{' less '.join(both)} (points)"
    if of.startswith(("forgetting.", DOMAIN)):
        return in_words(of)
    measure, _, when = of.partition(".")
    time, _, where = when.partition(".")
    if f"{measure}.{where}" in LOCAL:
        return f"accuracy{LOCAL[f'{measure}.{where}']} {time} local training (%)"
    words = of.replace("_", " ")
    return f"{words} (%)" if of in SHARES else words


def is_share(of: str) -> bool:
    """Say whether a number is a fraction of 1 that is drawn in percent."""
    measure, _, when = of.partition(".")
    return of in SHARES or f"{measure}.{when.partition('.')[2]}" in LOCAL


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
            f"'{of}': '{run.folder}' has no such number by round{did_you_mean(of, known)}"
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
