"""The figures of the page: curves by round in panels, of which two stand side by side, and heat maps over the page.

Importing matplotlib takes half a second. Shapes: `T` rounds, `C` classes, `N` clients.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayfed.report.read import Columns, Group, Run, shorten
from rayfed.report.svg import COLOURS, DASHES, INK, STYLE, svg, title_points

COUNTS = LinearSegmentedColormap.from_list("counts", ["#2b8cd62e", "#2b8cd6ff"])  # the page shines through it
WIDTH, PANEL = 9.0, (4.5, 2.9)  # inches
LETTERS = 9.0  # points, as in the style
NAMED = 60  # class names that fit beside a heat map
LONGEST_NAME = 24  # characters, of a class or a run
MOST_COLUMNS = 400  # for clients; if there are more, several share a column
MOST_POINTS = 60  # of a line, with a title each


@svg
def accuracy(groups: Sequence[Group]) -> Figure:
    """Accuracy on the test images by round, beside that of a guess; of a single run, also the best round."""
    figure, axes = panel("Accuracy", "test accuracy (%)", len(groups))
    ends = curves(axes, groups, "test_accuracy", 100, "%")
    for share in {1 / len(run.classes) for group in groups for run in group.runs if run.classes}:
        axes.axhline(100 * share, color=INK, alpha=0.6, linewidth=0.9, linestyle=":", zorder=1)
        at_right: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom", "alpha": 0.7}
        axes.annotate("chance", (1, 100 * share), fontsize="small", **at_right)
    if len(runs := [run for group in groups for run in group.runs]) == 1 and (best := runs[0].summary.get("best")):
        axes.plot(best["round"], 100 * best["test_accuracy"], "o", color=COLOURS[1], clip_on=False, zorder=3)
    name_ends(axes, ends)
    return figure


@svg
def loss(groups: Sequence[Group]) -> Figure:
    """Loss on the test images by round; of a single group, also the training loss."""
    figure, axes = panel("Loss", "mean loss per image (nats)", len(groups))
    ends = curves(axes, groups, "test_loss")
    if len(groups) == 1:
        training = curves(axes, groups, "train_loss", first=1, number=1)
        named = zip(("test", "training"), (ends, training), strict=True)
        ends = [end._replace(name=name) for name, found in named for end in found]
    name_ends(axes, ends)
    return figure


@svg
def forgetting(groups: Sequence[Group]) -> Figure:
    """Forgetting by round."""
    figure, axes = panel("Forgetting", "forgetting (%)", len(groups))
    ends = curves(axes, groups, "forgetting", 100, "%", first=1)
    axes.axhline(0, color=INK, linewidth=0.8, zorder=1)
    name_ends(axes, ends)
    return figure


@svg
def class_accuracy(run: Run) -> Figure:
    """Class accuracy by round, classes downwards, a column for each evaluated round.

    Without round 0: what an untrained model says is nothing learnt.
    """
    extent = (0.5, len(run.class_accuracy) - 0.5)
    figure, axes = heat_map(100 * run.class_accuracy[1:].T, run.classes, extent, "viridis", "accuracy (%)", top=100)
    label(axes, "Class accuracy", "round", "class")
    numbers: dict[float, int] = dict(enumerate(run.class_rounds))  # by column
    axes.xaxis.set_major_formatter(lambda place, _: str(numbers.get(place, "")))
    return figure


@svg
def partition(cells: Columns, classes: Sequence[str], num_clients: int) -> Figure:
    """The images of each class that each client holds, clients across; a blank is none."""
    together = -(-num_clients // MOST_COLUMNS)
    columns = -(-num_clients // together)
    index = cells["class"] * columns + cells["client"] // together
    counts = np.bincount(index, cells["count"], len(classes) * columns).reshape(-1, columns) / together
    unit = "images" if together == 1 else f"images, mean of {together} clients"
    extent = (-0.5, columns * together - 0.5)
    figure, axes = heat_map(np.where(counts, counts, np.nan), classes, extent, COUNTS, unit)
    label(axes, "Partition", "client", "class")
    return figure


def save_partition(cells: Columns, classes: Sequence[str], num_clients: int, path: Path) -> None:
    """The same in a file of its own: PNG, SVG or PDF, by the path's suffix."""
    with style.context(["default", STYLE]):
        partition.__wrapped__(cells, classes, num_clients).savefig(path, dpi=150)  # type: ignore[attr-defined]


@svg
def training_loss(run: Run) -> Figure:
    """The sampled clients' losses by round."""
    figure, axes = panel("Training loss", "mean loss per step (nats)")
    spread_of(axes, run.clients["round"], finite(run.clients["train_loss"]))
    return figure


@svg
def notes(run: Run, beginning: str, title: str, unit: str) -> Figure:
    """The notes whose names have this beginning, by round: means over the clients' images."""
    found = {name.removeprefix(beginning): line for name, line in run.notes.items() if name.startswith(beginning)}
    figure, axes = panel(title, unit, len(found))
    ends = []
    for n, (name, (rounds, means)) in enumerate(found.items()):
        colour, means = COLOURS[n % len(COLOURS)], finite(means)
        axes.plot(rounds, means, color=colour, marker="." if len(rounds) <= 40 else "")
        ends += [End(rounds[-1], means[-1], name, colour)] if np.isfinite(means[-1]) else []
    name_ends(axes, ends)
    return figure


@svg
def seconds(run: Run) -> Figure:
    """The sampled clients' times by round."""
    figure, axes = panel("Time", "seconds per client")
    spread_of(axes, run.clients["round"], finite(run.clients["seconds"]))
    return figure


@svg
def participation(run: Run) -> Figure:
    """How often clients were sampled."""
    figure, axes = panel("Participation", "number of clients", x="rounds in which a client was sampled")
    times = np.bincount(np.bincount(run.clients["client"], minlength=run.num_clients))
    axes.bar(np.arange(len(times)), times, width=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def panel(title: str, y: str, lines: int = 1, x: str = "round") -> tuple[Figure, Axes]:
    """A figure of half the page's width, high enough for the names of its lines."""
    width, height = PANEL
    figure = Figure(figsize=(width, max(height, 0.9 + lines * 1.4 * LETTERS / 72)))
    axes = figure.subplots()
    label(axes, title, x, y)
    return figure, axes


class End(NamedTuple):
    """The end of a line."""

    round: int
    value: float
    name: str
    colour: str


def curves(
    axes: Axes,
    groups: Sequence[Group],
    column: str,
    factor: float = 1,
    unit: str = "",
    first: int = 0,
    number: int = 0,
) -> list[End]:
    """A column by round, from the round `first` on: a line for each group, the first one in the look of `number`.

    Of several runs, the mean, in a band from the lowest to the highest run. A round has a point where all runs of the
    group were evaluated.
    """
    ends = []
    for n, (group, name) in enumerate(zip(groups, shorten(groups), strict=True), start=number):
        there = np.all([run.evaluated | (column == "train_loss") for run in group.runs], axis=0)
        rounds = first + np.flatnonzero(there[first:])
        values = np.stack([finite(run.rounds[column][rounds]) * factor for run in group.runs])  # (runs, points)
        middle = values.mean(axis=0)
        lowest, highest = values.min(axis=0), values.max(axis=0)
        colour, dashes = COLOURS[n % len(COLOURS)], DASHES[n // len(COLOURS) % len(DASHES)]
        points = "." if len(rounds) <= 40 or not there.all() else ""  # a line alone would look measured all along
        (line,) = axes.plot(rounds, middle, color=colour, marker=points)
        if dashes:
            line.set_dashes([float(length) for length in dashes.split()])
        if len(values) > 1:
            axes.fill_between(rounds, lowest, highest, color=colour, alpha=0.18, linewidth=0)
        shown = np.flatnonzero(np.isfinite(middle))
        if not len(shown):
            continue
        prefix, digits = f"{name}, " if len(groups) > 1 else "", ".1f" if unit else ".3f"
        title_points(
            axes,
            {
                (rounds[i], middle[i]): f"{prefix}round {rounds[i]}: {middle[i]:{digits}}{unit}"
                + (f" ({lowest[i]:{digits}} to {highest[i]:{digits}})" if len(values) > 1 else "")
                for i in shown[:: -(-len(shown) // MOST_POINTS)]
            },
        )
        ends.append(End(rounds[shown[-1]], middle[shown[-1]], name, colour))
    return ends


def name_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write the names of several lines at their ends, as far apart as letters need."""
    if len(ends) < 2:
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    wanted = np.array([(end.value - low) / (high - low) for end in ends])
    height = 72 * axes.figure.bbox.height / axes.figure.dpi - 60  # points, of the axes
    order, step = np.argsort(wanted, kind="stable"), 1.3 * LETTERS / height
    stacks: list[tuple[float, int]] = []  # names that touch: the place of the lowest, and how many
    for n, place in enumerate(wanted[order]):
        stack = place - n * step, 1
        while stacks and stacks[-1][0] > stack[0]:
            (below, count), (above, more) = stacks.pop(), stack
            stack = (below * count + above * more) / (count + more), count + more
        stacks.append(stack)
    lowest = [place for place, count in stacks for _ in range(count)]
    places = np.clip(lowest, 0, 1 - (len(ends) - 1) * step) + np.arange(len(ends)) * step
    for place, end in zip(places, (ends[i] for i in order), strict=True):
        leader = {"arrowstyle": "-", "linestyle": ":", "color": end.colour, "shrinkA": 0, "shrinkB": 0}
        beside: dict[str, Any] = {"xytext": (1.06, place), "textcoords": "axes fraction", "va": "center"}
        name = end.name if len(end.name) <= LONGEST_NAME else f"…{end.name[1 - LONGEST_NAME :]}"  # its end differs
        axes.annotate(name, (end.round, end.value), arrowprops=leader | {"relpos": (0, 0.5)}, **beside)


def spread_of(axes: Axes, rounds: np.ndarray, values: np.ndarray) -> None:
    """The median of each round, in a band from its smallest to its largest value."""
    numbers, starts = np.unique(rounds, return_index=True)
    groups = np.split(values, starts[1:])
    middle = [np.median(group) for group in groups]
    lowest, highest = [group.min() for group in groups], [group.max() for group in groups]
    axes.fill_between(numbers, lowest, highest, alpha=0.25, linewidth=0)
    axes.plot(numbers, middle, marker="." if len(numbers) <= 40 else "")
    if not (values < 0).any():  # the loss of a method of one's own may be negative
        axes.set_ylim(bottom=0)


def heat_map(
    values: np.ndarray,
    classes: Sequence[str],
    extent: tuple[float, float],
    colours: str | Colormap,
    unit: str,
    top: float | None = None,
) -> tuple[Figure, Axes]:
    """Values (C, columns) from 0 to `top`, or the largest, that stretch over an `extent` of the horizontal axis."""
    height = min(max(0.2 * len(classes), 1.6), 9.0)
    figure = Figure(figsize=(WIDTH, height + 0.9))
    axes = figure.subplots()
    edges = (*extent, len(classes) - 0.5, -0.5)
    picture = axes.imshow(values, aspect="auto", cmap=colours, vmin=0, vmax=top, interpolation="none", extent=edges)
    figure.colorbar(picture, label=unit, pad=0.02, aspect=10 * height).outline.set_visible(False)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    if len(classes) <= NAMED:
        names = [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…" for name in classes]
        axes.set_yticks(range(len(classes)), names)
        axes.tick_params(axis="y", length=0)
    return figure, axes


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Name axes; the horizontal axis counts in whole numbers."""
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def finite(values: np.ndarray) -> np.ndarray:
    """Values with a gap in place of NaN and infinity, which cannot be drawn."""
    return np.where(np.isfinite(values), values, np.nan)
