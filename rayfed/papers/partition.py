"""The picture of a partition: `rayfed partition JOB -o FILE`."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from rayfed.folder.tables import Columns
from rayfed.papers.panels import bar_of, cells, high, panels
from rayfed.report.read import dealt

# The lowest colour is not white, so that a single example is not a blank.
COUNTS = LinearSegmentedColormap.from_list("counts", ["#cfe3f6", "#2b8cd6"])


def partition(held: Columns, classes: Sequence[str], num_clients: int) -> Figure:
    """Draw the examples of each class that each client holds.

    Clients go across. A blank is no example.
    """
    counts, together = dealt(held, len(classes), num_clients)
    clients = np.arange(counts.shape[1]) * together + (together - 1) / 2
    inches = high(len(classes), 1.6, 9.0)
    figure, axes = panels("Partition", 1, 1, inches + 0.6)
    held_or_blank = np.where(counts, counts, np.nan).T
    drawn = cells(axes[0, 0], clients, held_or_blank, classes, counts.max(), inches, COUNTS)
    axes[0, 0].set(xlabel="client", ylabel="class")
    unit = "examples" if together == 1 else f"examples, mean of {together} clients"
    bar_of(figure, drawn, axes, unit)
    return figure
