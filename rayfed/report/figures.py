"""The figures of the page, each as SVG that takes the page's own colour for lines and letters, light or dark.

Importing matplotlib takes half a second. Shapes: `T` rounds, `C` classes, `N` clients.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import numpy as np
from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayfed.report.read import Columns, Run

STYLE = str(Path(__file__).parent / "templates" / "figures.mplstyle")
INK = "#010203"  # stands for the page's colour of letters
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # as in the style
DASHES = ("", "5 2", "1.5 1.5")  # once the colours are used up
COUNTS = LinearSegmentedColormap.from_list("counts", ["#2b8cd62e", "#2b8cd6ff"])  # the page shines through it
WIDTH = 9.0  # inches
NAMED = 60  # class names that fit beside a heat map
LONGEST_NAME = 24  # characters
MOST_COLUMNS = 400  # for clients; if there are more, several share a column
METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
P = ParamSpec("P")


def svg(draw: Callable[P, Figure]) -> Callable[P, Markup]:
    """Make a drawing SVG to stand in a page: the same bytes for the same numbers, and no links."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Markup:
        text = io.StringIO()
        options = {"savefig.transparent": True, "svg.hashsalt": draw.__name__}  # so ids differ between figures
        with style.context(["default", STYLE, options]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser's font has it
            draw(*args, **kwargs).savefig(text, format="svg", metadata=METADATA)
        return Markup(embedded(text.getvalue()))

    return drawn


def embedded(document: str) -> str:
    """An SVG document as an element of an HTML page."""
    element = document[document.index("<svg") :].replace(INK, "currentColor")
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r' xmlns(:xlink)?="[^"]*"', "", element)
    return re.sub(r'<g id="[^"]*"', "<g", element)


@svg
def progress(runs: Sequence[Run]) -> Figure:
    """Accuracy and loss by round, on the test images; of a single run, also the training loss and the best round."""
    figure = Figure(figsize=(WIDTH, 3.0))
    left, right = figure.subplots(1, 2)
    curves(left, runs, "test_accuracy")
    curves(right, runs, "test_loss")
    label(left, "Accuracy", "round", "test accuracy (fraction)")
    label(right, "Loss", "round", "mean loss per image (nats)")
    if len(runs) == 1 and (best := runs[0].summary.get("best")):
        left.plot(best["round"], best["test_accuracy"], "o", color=COLOURS[1], clip_on=False, zorder=3)
        right.plot(runs[0].rounds["round"], finite(runs[0].rounds["train_loss"]), color=COLOURS[1], dashes=(5, 2))
        right.legend(right.lines, ["test, global model", "training, sampled clients"])
    return figure


@svg
def forgetting(runs: Sequence[Run]) -> Figure:
    """Forgetting by round."""
    figure = Figure(figsize=(WIDTH, 2.4))
    axes = figure.subplots()
    curves(axes, runs, "forgetting", first=1)
    label(axes, "Forgetting", "round", "forgetting (fraction)")
    axes.axhline(0, color=INK, linewidth=0.8, zorder=1)
    return figure


@svg
def class_accuracy(run: Run) -> Figure:
    """Class accuracy by round, classes downwards."""
    extent = (-0.5, len(run.class_accuracy) - 0.5)
    figure, axes = heat_map(run.class_accuracy.T, run.classes, extent, "viridis", "accuracy (fraction)", top=1.0)
    label(axes, "Class accuracy", "round", "class")
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
def clients(run: Run) -> Figure:
    """Training loss and seconds of the sampled clients by round, and how often clients were sampled."""
    figure = Figure(figsize=(WIDTH, 2.6))
    left, middle, right = figure.subplots(1, 3)
    for axes, column in ((left, "train_loss"), (middle, "seconds")):
        band(axes, run.clients["round"], finite(run.clients[column]))
    label(left, "Training loss", "round", "mean loss per step (nats)")
    label(middle, "Time", "round", "seconds per client")
    times = np.bincount(np.bincount(run.clients["client"], minlength=run.num_clients))
    right.bar(np.arange(len(times)), times, width=0.8)
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    label(right, "Participation", "rounds in which a client was sampled", "number of clients")
    return figure


def curves(axes: Axes, runs: Sequence[Run], column: str, first: int = 0) -> None:
    """A column by round, from the round `first` on, a line for each run."""
    for number, run in enumerate(runs):
        colour, dashes = look(number)
        (line,) = axes.plot(run.rounds["round"][first:], finite(run.rounds[column][first:]), color=colour)
        line.set_marker("." if len(run.rounds["round"]) <= 40 else "")
        if dashes:
            line.set_dashes([float(length) for length in dashes.split()])


def look(number: int) -> tuple[str, str]:
    """The colour of the n-th of several lines, and its dashes as SVG has them."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def band(axes: Axes, rounds: np.ndarray, values: np.ndarray) -> None:
    """The median of each round, in a band from its smallest to its largest value."""
    numbers, starts = np.unique(rounds, return_index=True)
    groups = np.split(values, starts[1:])
    middle = [np.median(group) for group in groups]
    lowest, highest = [group.min() for group in groups], [group.max() for group in groups]
    axes.fill_between(numbers, lowest, highest, alpha=0.25, linewidth=0)
    axes.plot(numbers, middle, marker="." if len(numbers) <= 40 else "")
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
