"""A partition as a picture and as text: which client holds how much of which class.

Shapes: `N` clients, `K` classes.

>>> print(table_text(np.array([[20, 0], [5, 15]]), ("cat", "dog")))
client  cat  dog  total
     0   20    .     20
     1    5   15     20
 total   25   15     40
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

MOST_ROWS = 400  # clients drawn one by one; beyond, several share a row of the picture
NAMED = 60  # client or class names that fit beside the picture


def table_text(table: np.ndarray, classes: tuple[str, ...]) -> str:
    """The counts (N, K) as aligned text, with totals; a dot stands for none."""
    head = ["client", *classes, "total"]
    body = [[str(i), *_cells(row)] for i, row in enumerate(table)]
    lines = [head, *body, ["total", *_cells(table.sum(axis=0))]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def _cells(counts: np.ndarray) -> list[str]:
    return [str(count or ".") for count in counts] + [str(counts.sum())]


def draw_partition(table: np.ndarray, classes: tuple[str, ...], path: str | Path, title: str = "") -> Path:
    """Draw the counts (N, K) as a heat map, clients downwards and classes across; PNG or SVG by the path's suffix."""
    # Imported here: it is slow, and only pictures need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = table.shape
    per_row = -(-num_clients // MOST_ROWS)
    starts = np.arange(0, num_clients, per_row)
    rows = np.add.reduceat(table, starts, axis=0) / np.minimum(per_row, num_clients - starts)[:, None]
    height = min(max(0.16 * len(rows), 2.0), 12.0)
    width = min(max(0.4 * num_classes, 4.0), 16.0)
    figure = Figure(figsize=(width + 2.5, height + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    last = int(starts[-1]) + per_row - 0.5
    picture = axes.imshow(
        rows, aspect="auto", cmap="Blues", vmin=0, interpolation="none", extent=(-0.5, num_classes - 0.5, last, -0.5)
    )
    figure.colorbar(picture, label="images" if per_row == 1 else f"images, mean of {per_row} clients")
    axes.set_title(textwrap.fill(title, int(10 * width)), fontsize="medium")
    axes.set_ylabel("client")
    axes.yaxis.set_major_locator(MaxNLocator(20, integer=True))
    if num_classes <= NAMED:
        axes.set_xticks(range(num_classes), classes, rotation=45, ha="right", rotation_mode="anchor")
    else:
        axes.set_xlabel("class")
    figure.savefig(path, dpi=150)
    return Path(path)
