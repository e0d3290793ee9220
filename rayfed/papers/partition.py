"""The partition as a picture: `rayfed partition JOB -o FILE`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayfed.folder.read import Columns, dealt
from rayfed.papers.style import LONGEST_NAME, NAMED, STYLE, WIDTH

COUNTS = LinearSegmentedColormap.from_list("counts", ["#2b8cd62e", "#2b8cd6ff"])


def save_partition(cells: Columns, classes: Sequence[str], num_clients: int, path: Path) -> None:
    """Write the `draw`n partition to a file: PNG, SVG or PDF, by the path's suffix."""
    with style.context(["default", STYLE]):
        draw(cells, classes, num_clients).savefig(path, dpi=150)


def draw(cells: Columns, classes: Sequence[str], num_clients: int) -> Figure:
    """The examples of each class that each client holds, clients across; a blank is none."""
    counts, together = dealt(cells, len(classes), num_clients)
    unit = "examples" if together == 1 else f"examples, mean of {together} clients"
    height = min(max(0.2 * len(classes), 1.6), 9.0)
    figure = Figure(figsize=(WIDTH, height + 0.9))
    axes = figure.subplots()
    look: dict[str, Any] = {"aspect": "auto", "cmap": COUNTS, "interpolation": "none", "vmin": 0}
    edges = (-0.5, counts.shape[1] * together - 0.5, len(classes) - 0.5, -0.5)
    picture = axes.imshow(np.where(counts, counts, np.nan), extent=edges, **look)
    figure.colorbar(picture, label=unit, pad=0.02, aspect=10 * height).outline.set_visible(False)
    axes.set(title="Partition", xlabel="client", ylabel="class")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(False)
    axes.spines[:].set_visible(False)
    if len(classes) <= NAMED:
        names = [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…" for name in classes]
        axes.set_yticks(range(len(classes)), names)
        axes.tick_params(axis="y", length=0)
    return figure
