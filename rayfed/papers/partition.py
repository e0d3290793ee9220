"""The picture of a partition: `rayfed partition JOB -o FILE`, and of those of runs."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from rayfed.folder.tables import Columns
from rayfed.papers.global_model import most_classes
from rayfed.papers.panels import RAMP, bar_of, cells, high, panels, single, wide
from rayfed.report.read import Run, dealt

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


# So many clients have columns where their distributions are drawn.
FIRST = 10


def of_runs(runs: Sequence[Run], outside: bool = False, width: float | None = None) -> Figure:
    """Draw the share of each class in the data of the first ten clients (FedSSD Fig. 6).

    With `outside`, each run has a second panel: the out-local distribution, in which a class has
    (1 - share) / (C - 1) (FedNTD eq. 7 and Fig. 3).
    """
    shown = single(runs, "a heat map")
    drawn = {}
    for name, run in shown.items():
        shares = shares_of(run)
        drawn[f"{name}\nin-local" if outside else name] = run, shares
        if outside:
            drawn[f"{name}\nout-local"] = run, (1 - shares) / (shares.shape[1] - 1)
    inches = high(most_classes(shown), 1.8, 7.0)
    caption = f"Labels of the first {FIRST} clients: each class's share of a client's data"
    if outside:
        caption += " (in-local), and (1 - share) / (number of classes - 1) (out-local)"
    figure, axes = panels(caption, 1, len(drawn), inches + 0.7, width or wide(len(drawn)))
    top = 100 * max(float(shares.max()) for _, shares in drawn.values())
    for panel, (title, (run, shares)) in zip(axes.flat, drawn.items(), strict=True):
        places = np.arange(len(shares))
        scale = cells(panel, places, 100 * shares, run.classes, top, inches, RAMP)
        panel.set(title=title, xlabel="client")
    axes[0, 0].set_ylabel("class")
    bar_of(figure, scale, axes, "share (%)" if outside else "share of the client's examples (%)")
    return figure


def shares_of(run: Run) -> np.ndarray:
    """Return the share of each class in the data of the first clients (clients, C)."""
    held = run.partition
    counts = np.zeros((int(held["client"].max()) + 1, len(run.classes)))
    np.add.at(counts, (held["client"], held["class"]), held["count"])
    counts = counts[:FIRST]
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
