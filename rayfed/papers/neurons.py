"""The class that each neuron of a layer prefers, in the global model and in local models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from rayfed.measures import metrics
from rayfed.measures.clients import FEATURES, Seen
from rayfed.papers.embedding import COLOURED, colours_of, handle
from rayfed.papers.models import GLOBAL, model_name, of_models, shown
from rayfed.papers.panels import legend, panels, same_classes, shortened, single, span
from rayfed.report.read import Run

# Local models that are drawn if no clients are given.
ABREAST = 4


class Row(NamedTuple):
    """A layer of a run's models."""

    title: str
    run: Run
    # By client, the class that each neuron prefers, (D,); -1 for none.
    preferences: dict[int, np.ndarray]


def neurons(
    runs: Sequence[Run],
    round: int | None = None,
    clients: str = "",
    images: int = 1000,
    width: float | None = None,
) -> Figure:
    """Draw each neuron as a square in the colour of its preferred class (FedNTD Fig. 17).

    There is a row for each run and layer: the global model, then local models, in which a neuron
    has the place that it has in the global model. Neurons stand in the order of the classes that
    they prefer in the global model. Layers are those of `measure_layers`, or the features.
    """
    rows: list[Row] = []
    of_runs = []
    by_name = single(runs, "a picture of neurons")
    classes = same_classes([*by_name.values()], "a picture of neurons")
    for name, run in by_name.items():
        layers = run.job.get("measure_layers", [])
        of_run = shown(run, round, clients, images, layers, ABREAST)
        of_runs.append(of_run)
        for layer in next(iter(of_run.seen.values())).layers:
            title = name if layer == FEATURES else f"{name}, {layer}"
            rows.append(Row(title, run, preferences_of(layer, of_run.seen)))
    columns = max(len(row.preferences) for row in rows)
    width = width or max(3.3, 1.75 * columns + 0.3)
    number = span(len(of_run.seen[GLOBAL].labels) for of_run in of_runs)
    caption = (
        f"The class that neurons prefer on {number} test images, in {of_models(of_runs)}; "
        "white: no class"
    )
    figure, axes = panels(caption, len(rows), columns, width / columns + 0.15, width=width)
    for line, row in zip(axes, rows, strict=True):
        draw_row(line, row)
    if len(classes) <= COLOURED:
        entries = zip(classes, colours_of(len(classes)), strict=True)
        handles = [handle(colour, "s", shortened(name)) for name, colour in entries]
        legend(figure, axes[0, 0], handles)
    return figure


def preferences_of(layer: str, seen: dict[int, Seen]) -> dict[int, np.ndarray]:
    """Return by client the class that each neuron of a layer prefers, (D,)."""
    preferences = {}
    for client, of_model in seen.items():
        sums = of_model.activations.sums[layer]
        preferences[client] = metrics.class_preference(sums, of_model.activations.counts)
    return preferences


def draw_row(line: Sequence[Axes], row: Row) -> None:
    """Draw the models of a layer side by side."""
    in_global = row.preferences[GLOBAL]
    order = np.argsort(in_global, kind="stable")
    colours = ListedColormap(["#ffffff", *colours_of(len(row.run.classes))])
    for panel in line[len(row.preferences) :]:
        panel.set_axis_off()
    for panel, (client, preference) in zip(line, row.preferences.items(), strict=False):
        # A place without a neuron is white, as is a neuron that prefers no class.
        cells = squares(preference[order]) + 1
        look: dict[str, Any] = {"vmin": 0, "vmax": len(row.run.classes)}
        panel.imshow(cells, cmap=colours, interpolation="none", **look)
        title = f"{row.title}\n" if client == GLOBAL else f"{aligned(preference, in_global)}\n"
        panel.set_title(title + shortened(model_name(row.run, client)), fontsize="small")
        panel.set(xticks=[], yticks=[])
        panel.grid(False)
        panel.spines[:].set_visible(False)


def aligned(preference: np.ndarray, in_global: np.ndarray) -> str:
    """Say how many neurons prefer the class that they prefer in the global model.

    >>> aligned(np.array([0, 1, -1]), np.array([0, 2, 1]))
    'alike: 50 %'
    >>> aligned(np.array([-1]), np.array([0]))
    'alike: none known'
    """
    share = metrics.alignment(preference, in_global)
    return "alike: none known" if math.isnan(share) else f"alike: {100 * share:.0f} %"


def squares(values: np.ndarray) -> np.ndarray:
    """Return values (D,) in rows of a nearly square picture; places without a value are -1.

    >>> squares(np.array([5, 6, 7]))
    array([[ 5,  6],
           [ 7, -1]])
    """
    across = math.ceil(math.sqrt(len(values)))
    down = math.ceil(len(values) / across)
    cells = np.full(across * down, -1)
    cells[: len(values)] = values
    return cells.reshape(down, across)
