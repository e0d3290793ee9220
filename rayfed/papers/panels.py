"""Panels of a figure of its own: runs side by side with shared axes, in looks that differ in grey
too, and its file.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayfed.base.errors import InputError
from rayfed.papers.style import COLOURS, LETTERS, LONGEST_NAME, METADATA, NAMED, STYLE, WIDTH
from rayfed.report.read import Group, Run, grouped, shorten

# With six colours, 42 looks.
MARKERS = ("o", "s", "^", "D", "v", "X", "P")
LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
# In a panel, which may be thick.
FEW_LINES = 4
# Side by side.
MOST_PANELS = 6
# Inches that a panel needs for its title.
NARROWEST = 2.3
# Inches, the width of one, on average.
GLYPH = 0.078
# Inches that the name of a class takes.
ROW = 0.2
# Its lower and its upper end.
Band = tuple[np.ndarray, np.ndarray]
# Ever darker.
RAMP = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#56b4e9", "#0072b2", "#00233a"])
# The same bytes for the same numbers.
METADATAS = {
    ".svg": METADATA,
    ".pdf": {"CreationDate": None},
}


def save(draw: Callable[..., Figure], path: Path, *args: Any, **kwargs: Any) -> str:
    """Draw, and write the figure: SVG, PNG or PDF, by the path's suffix.

    Nothing is written where it cannot be drawn.

    Gives the figure's caption. Names stay text in SVG. Where the font has no letter of a name, PNG
    and PDF show a box.
    """
    options = {"svg.hashsalt": draw.__name__}
    with style.context(["default", STYLE, options]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        warnings.filterwarnings("error", "constrained_layout not applied")
        figure = draw(*args, **kwargs)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, metadata=METADATAS.get(path.suffix))
        except OSError as error:
            raise InputError(f"the figure cannot be written: {error}") from None
        except UserWarning:
            # No room is left for an axis.
            raise InputError(
                "the figure is too narrow for what stands side by side; give a larger --width"
            ) from None
    return str(figure.get_label())


def apart(runs: Sequence[Run], most: int = MOST_PANELS) -> dict[str, Group]:
    """The runs by the names of their panels; runs that differ in their seed alone are one.

    Raises `InputError`.
    """
    groups = grouped(runs)
    if len(groups) > most:
        raise InputError(f"{len(groups)} runs do not fit into one figure; give up to {most}")
    names = [
        group.runs[0].label or shortened(name)
        for name, group in zip(shorten(groups), groups, strict=True)
    ]
    if len({*names}) < len(names):
        # In the order given.
        names = [f"{number}: {name}" for number, name in enumerate(names, start=1)]
    return dict(zip(names, groups, strict=True))


def single(runs: Sequence[Run], picture: str) -> dict[str, Run]:
    """The same for a figure that shows one run per panel, not a mean.

    Raises `InputError` for several seeds.
    """
    groups = apart(runs)
    for name, group in groups.items():
        if len(group.runs) + len(group.behind) > 1:
            raise InputError(
                f"'{name}' has several seeds, and {picture} is of one run: "
                f"give the folder of one of them, such as {group.runs[0].folder}"
            )
    return {name: group.runs[0] for name, group in groups.items()}


def shortened(name: str) -> str:
    """A run's name with its end, in which it differs from others, or a class's name."""
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def panels(
    caption: str, rows: int, columns: int, height: float, width: float | None = None, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A figure with rows of panels, as wide as the page by default, and their axes (rows, columns)."""
    figure = Figure(figsize=(width or WIDTH, rows * height + 0.5), label=caption)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def wide(columns: int) -> float:
    """The width of a figure, in inches, whose panels all have room for their titles; no less than
    the page's.
    """
    # Class names at the left, a scale of colours at the right.
    return max(WIDTH, columns * NARROWEST + 1.8)


def legend(figure: Figure, axes: Axes, handles: Sequence[Any] = ()) -> None:
    """The legend of a panel's looks, for all panels, below the figure, which grows from the second
    row of names on.
    """
    shown: Sequence[Any] = handles or axes.get_legend_handles_labels()[0]
    names = [str(handle.get_label()) for handle in shown]
    # Inches, with the line beside the name.
    column = 0.75 + 0.066 * max(map(len, names), default=0)
    columns = min(max(int(figure.bbox.width / figure.dpi / column), 1), 6)
    # Not a part of one.
    if isinstance(figure, Figure):
        figure.set_figheight(figure.get_figheight() + 0.19 * (-(-len(names) // columns) - 1))
    figure.legend(shown, names, loc="outside lower center", ncols=columns, handlelength=3.2)


def span(numbers: Iterable[int]) -> str:
    """
    >>> span([6, 6]), span([1000, 3])
    ('6', '3 to 1,000')
    """
    low, *_, high = sorted([*numbers] * 2)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def looks(number: int) -> dict[str, Any]:
    """The n-th of several lines: its colour, dashes and marker."""
    marker = MARKERS[number % len(MARKERS)]
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number % len(LINES)],
        "marker": marker,
    }


def line(
    axes: Axes, number: int, x: np.ndarray, middle: np.ndarray, band: Band, name: str, of: int = 1
) -> None:
    """The n-th `of` so many lines with its band, and with a marker on some of its points; the more,
    the fainter.
    """
    every = max(1, -(-len(x) // 12))
    axes.fill_between(
        x, *band, color=COLOURS[number % len(COLOURS)], alpha=min(0.15, 0.4 / of), linewidth=0
    )
    look = looks(number) | {
        "linewidth": 1.8 if of <= FEW_LINES else 1.2,
        "markersize": 4.5,
        "markeredgecolor": "white",
    }
    axes.plot(
        x,
        middle,
        label=name,
        markeredgewidth=0.5,
        markevery=(number * every // 3 % every, every),
        **look,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def high(number: int, least: float, most: float) -> float:
    """Inches for the names of a number of classes, one below the other."""
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
    """A heat map of values (places, C) from 0 to `top`; each round, or client, reaches half-way to
    those beside it.
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
    """The names of classes down the vertical axis, of so many inches, in letters so small that they
    do not touch.
    """
    if len(classes) <= NAMED:
        size = min(LETTERS, 0.85 * 72 * inches / len(classes))
        axes.set_yticks(range(len(classes)), [shortened(name) for name in classes], fontsize=size)
    axes.tick_params(axis="y", length=0)


def bar_of(figure: Figure, shown: Any, axes: np.ndarray, unit: str, **options: Any) -> None:
    """The scale of a figure's colours, which all its panels share."""
    # A fifth of an inch wide, however high.
    thin = 5 * figure.get_figheight()
    bar = figure.colorbar(shown, ax=[*axes.flat], label=unit, pad=0.02, aspect=thin, **options)
    bar.outline.set_visible(False)
    bar.minorticks_off()
