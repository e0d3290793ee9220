"""Panels of a figure, and the file of a figure.

Runs stand side by side with shared axes, in looks that differ in grey as well.
"""

import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayfed.base.errors import InputError
from rayfed.base.files import write_bytes, writing_to
from rayfed.papers.style import (
    COLOURS,
    LETTERS,
    LONGEST_NAME,
    METADATA,
    NAMED,
    STYLE,
    WARNING,
    WIDTH,
)
from rayfed.report.read import Group, Run, grouped, shorten

# With the six colours, these make 42 looks.
MARKERS = ("o", "s", "^", "D", "v", "X", "P")
LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
# So many lines of a panel may be thick.
FEW_LINES = 4
# Most panels side by side.
MOST_PANELS = 6
# Most panels in a row of several rows.
ABREAST = 4
# Inches that a panel needs for its title.
NARROWEST = 2.3
# The average width of a letter in inches.
GLYPH = 0.078
# The same of the small letters of a remark.
SMALL_GLYPH = 0.072
# Inches of height that the name of a class takes.
ROW = 0.2
# The lower and the upper end of a band.
Band = tuple[np.ndarray, np.ndarray]
# Higher values are darker.
RAMP = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#56b4e9", "#0072b2", "#00233a"])
# Without these entries, the same numbers give the same bytes.
METADATAS = {".svg": METADATA, ".pdf": {"CreationDate": None}}


def save(
    draw: Callable[..., Figure], path: Path, *args: Any, remark: str = "", **kwargs: Any
) -> str:
    """Draw a figure, write it as SVG, PNG or PDF, by the path's suffix, and return its caption.

    A `remark` stands above the figure. Names stay text in SVG. If the font lacks a letter of a
    name, PNG and PDF show a box. An older picture stays if the figure cannot be drawn or written.
    Raises `InputError` if it cannot be written, or if it is too narrow.
    """
    suffix = path.suffix.lower()
    picture = BytesIO()
    options = {"svg.hashsalt": draw.__name__}
    with style.context(["default", STYLE, options]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        warnings.filterwarnings("error", "constrained_layout not applied")
        figure = draw(*args, **kwargs)
        if remark:
            lines = textwrap.wrap(remark, int(figure.get_figwidth() / SMALL_GLYPH))
            figure.set_figheight(figure.get_figheight() + 0.1 + 0.2 * len(lines))
            figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize="small", color=WARNING)
        for panel in figure.axes:
            wrap_title(panel, figure.get_figwidth())
        try:
            figure.savefig(picture, format=suffix[1:], dpi=150, metadata=METADATAS.get(suffix))
        except UserWarning:
            # The warning says that no room is left for an axis.
            raise InputError(
                "the figure is too narrow for what stands side by side; give a larger --width"
            ) from None
    with writing_to(path):
        write_bytes(path, picture.getvalue())
    return str(figure.get_label())


def wrap_title(panel: Axes, inches: float) -> None:
    """Break the lines of a panel's title that are wider than its share of a figure's width."""
    place = panel.get_subplotspec()
    if place is None:
        return
    # An axis takes a tenth of its share, at least.
    letters = max(int(0.9 * inches / place.get_gridspec().ncols / GLYPH), 1)
    # Titles stand at the left, but for those of panels with three dimensions.
    for side in ("left", "center"):
        fitting: list[str] = []
        for words in panel.get_title(side).split("\n"):
            fitting += textwrap.wrap(words, letters, break_on_hyphens=False) or [words]
        panel.set_title("\n".join(fitting), loc=side)


def apart(runs: Sequence[Run], most: int = MOST_PANELS) -> dict[str, Group]:
    """Return the runs by the names of their panels; runs that differ only in their seed are one.

    Raises `InputError` for more than `most` panels.
    """
    groups = grouped(runs)
    if len(groups) > most:
        raise InputError(f"{len(groups)} runs do not fit into one figure; give up to {most}")
    titles = shorten(groups)
    if len(titles) == 1 and len(titles[0]) > LONGEST_NAME:
        # The last step of a name is its method. There is nothing that the others would tell apart.
        titles = [titles[0].rpartition("/")[2]]
    names = []
    for title, group in zip(titles, groups, strict=True):
        names.append(group.runs[0].label or shortened(title))
    if len(set(names)) < len(names):
        # Shortened names may be equal. Their numbers follow the order of the runs.
        names = [f"{number}: {name}" for number, name in enumerate(names, start=1)]
    return dict(zip(names, groups, strict=True))


def single(runs: Sequence[Run], picture: str) -> dict[str, Run]:
    """Return the runs by the names of their panels, for a figure that shows one run per panel.

    Raises `InputError` for a group of several seeds.
    """
    groups = apart(runs)
    for name, group in groups.items():
        if len(group.runs) + len(group.behind) > 1:
            raise InputError(
                f"'{name}' has several seeds, and {picture} is of one run: "
                f"give the folder of one of them, such as {group.runs[0].folder}"
            )
    return {name: group.runs[0] for name, group in groups.items()}


def same_classes(runs: Sequence[Run], picture: str) -> Sequence[str]:
    """Return the names of the classes, which all runs of a picture share.

    Raises `InputError` if they do not.
    """
    first, *others = runs
    for run in others:
        if run.classes != first.classes:
            raise InputError(
                f"'{first.folder}' and '{run.folder}' have other classes, and {picture} has one "
                "colour for each class: draw them apart"
            )
    return first.classes


def shortened(name: str) -> str:
    """Return a name that fits: of a longer name the end, in which it differs from others.

    >>> shortened("a-very-long-prefix/dirichlet-0.1/fedavg")
    '…ix/dirichlet-0.1/fedavg'
    """
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def panels(
    caption: str, rows: int, columns: int, height: float, width: float | None = None, **options: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure with rows of panels, and the axes of the panels (rows, columns).

    The figure is as wide as the page, unless there is a `width`.
    """
    figure = Figure(figsize=(width or WIDTH, rows * height + 0.5), label=caption)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def wide(columns: int) -> float:
    """Return the width in inches of a figure whose panels all have room for their titles.

    It is no less than the page's width.
    """
    # Class names at the left and a scale of colours at the right take 1.8 inches.
    return max(WIDTH, columns * NARROWEST + 1.8)


def legend(figure: Figure, axes: Axes, handles: Sequence[Any] = ()) -> None:
    """Put the legend of a panel's looks, which is for all panels, below the figure.

    The figure grows from the second row of names on.
    """
    shown: Sequence[Any] = handles or axes.get_legend_handles_labels()[0]
    names = [str(handle.get_label()) for handle in shown]
    # The inches of a name and the line next to it.
    column = 0.75 + 0.066 * max(map(len, names), default=0)
    columns = min(max(int(figure.bbox.width / figure.dpi / column), 1), 6)
    # A part of a figure cannot grow.
    if isinstance(figure, Figure):
        figure.set_figheight(figure.get_figheight() + 0.19 * (-(-len(names) // columns) - 1))
    figure.legend(shown, names, loc="outside lower center", ncols=columns, handlelength=3.2)


def span(numbers: Iterable[int]) -> str:
    """Return the smallest and the largest of some numbers in words.

    >>> span([6, 6]), span([1000, 3])
    ('6', '3 to 1,000')
    """
    known = list(numbers)
    low, high = min(known), max(known)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def looks(number: int) -> dict[str, Any]:
    """Return the colour, dashes and marker of the n-th of several lines."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number % len(LINES)],
        "marker": MARKERS[number % len(MARKERS)],
    }


def line(
    axes: Axes,
    number: int,
    x: np.ndarray,
    middle: np.ndarray,
    band: Band,
    name: str,
    num_lines: int = 1,
) -> None:
    """Draw the n-th of `num_lines` lines with its band, and with a marker on some of its points.

    The more lines there are, the fainter are their bands.
    """
    opacity = min(0.15, 0.4 / num_lines)
    colour = COLOURS[number % len(COLOURS)]
    axes.fill_between(x, *band, color=colour, alpha=opacity, linewidth=0)
    every = max(1, -(-len(x) // 12))
    look = looks(number) | {
        "linewidth": 1.8 if num_lines <= FEW_LINES else 1.2,
        "markersize": 4.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
        # Markers of several lines stand at different rounds.
        "markevery": (number * every // 3 % every, every),
    }
    axes.plot(x, middle, label=name, **look)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def high(number: int, least: float, most: float) -> float:
    """Return the inches of height for the names of a number of classes, within two bounds."""
    return min(max(ROW * number, least), most)


def cells(
    axes: Axes,
    places: np.ndarray,
    values: np.ndarray,
    classes: Sequence[str],
    top: float,
    inches: float,
    colours: Colormap = RAMP,
) -> Any:
    """Draw a heat map of values (places, C) from 0 to `top`.

    Each place, which is a round or a client, reaches half-way to its neighbours.
    """
    ends = np.concatenate([[places[0] - 0.5], (places[1:] + places[:-1]) / 2, [places[-1] + 0.5]])
    rows = np.arange(len(classes) + 1) - 0.5
    shown = axes.pcolormesh(
        ends, rows, np.ma.masked_invalid(values.T), cmap=colours, vmin=0, vmax=top, rasterized=True
    )
    axes.set_ylim(len(classes) - 0.5, -0.5)
    axes.grid(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    name_classes(axes, classes, inches)
    return shown


def name_classes(axes: Axes, classes: Sequence[str], inches: float) -> None:
    """Write the names of classes down the vertical axis, which has so many inches.

    The letters are so small that the names do not touch.
    """
    if len(classes) <= NAMED:
        size = min(LETTERS, 0.85 * 72 * inches / len(classes))
        axes.set_yticks(range(len(classes)), [shortened(name) for name in classes], fontsize=size)
    axes.tick_params(axis="y", length=0)


def bar_of(figure: Figure, shown: Any, axes: np.ndarray, unit: str, **options: Any) -> None:
    """Draw the scale of a figure's colours, which all its panels share."""
    # This makes the scale a fifth of an inch wide, whatever its height.
    thin = 5 * figure.get_figheight()
    bar = figure.colorbar(shown, ax=[*axes.flat], label=unit, pad=0.02, aspect=thin, **options)
    bar.outline.set_visible(False)
    bar.minorticks_off()
