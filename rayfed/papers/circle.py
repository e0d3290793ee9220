"""Features of length 1 in the plane, with their density, before, after and between local training.

Shapes: `N` test images, `C` classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rayfed.base.errors import InputError
from rayfed.measures.clients import Seen
from rayfed.papers.embedding import COLOURED, colours_of
from rayfed.papers.models import chosen_clients, look, model_name, opened
from rayfed.papers.panels import RAMP, legend, panels, same_classes, shortened, single, span
from rayfed.report.read import Run

# Local models that are drawn if no clients are given, as in the paper.
ABREAST = 3
# The deviation of the kernel: of lengths in the plane, and of angles.
BANDWIDTH = 0.1
# Points along an axis of the plane, and around the circle.
CELLS = 80
ANGLES = 361
# Half the side of the plane that is drawn.
SIDE = 1.4
# How far a feature's length may be from 1.
TOLERANCE = 1e-3


class Column(NamedTuple):
    """A model on test images."""

    title: str
    # The class of each test image, (N,).
    labels: np.ndarray
    # The features, (N, 2).
    points: np.ndarray


def circle(
    runs: Sequence[Run],
    round: int | None = None,
    clients: str = "",
    images: int = 2000,
    width: float | None = None,
) -> Figure:
    """Draw the density of test features on the circle (FedNTD Fig. 18).

    A run has two rows of panels: the density in the plane, and that of the angle for each class.
    The columns are the global model that clients were sent, local models, and the next global
    model. Raises `InputError` for features that are not on a circle.
    """
    of_runs = {}
    by_name = single(runs, "a circle")
    classes = same_classes([*by_name.values()], "a circle")
    for name, run in by_name.items():
        of_runs[name] = columns_of(run, round, clients, images)
    most = max(map(len, of_runs.values()))
    number_of_images = span(len(columns[0].labels) for columns in of_runs.values())
    caption = (
        f"Features of {number_of_images} test images on the circle: density in the plane, and "
        f"of the angle by class (Gaussian kernels with a deviation of {BANDWIDTH:g})"
    )
    width = width or 1.8 * most + 0.4
    side = width / most
    figure, axes = panels(caption, 2 * len(of_runs), most, 0.85 * side, width=width)
    for number, (name, columns) in enumerate(of_runs.items()):
        above, below = axes[2 * number : 2 * number + 2]
        for panel in [*above[len(columns) :], *below[len(columns) :]]:
            panel.set_axis_off()
        for place, column in enumerate(columns):
            draw_plane(above[place], column)
            draw_angles(below[place], column, len(classes))
        above[0].set_ylabel(name, fontsize="small", fontweight="bold")
        below[0].set_ylabel("density")
    if len(classes) <= COLOURED:
        entries = zip(classes, colours_of(len(classes)), strict=True)
        handles = [Line2D([], [], color=colour, label=shortened(name)) for name, colour in entries]
        legend(figure, axes[0, 0], handles)
    return figure


def columns_of(run: Run, round: int | None, clients: str, images: int) -> list[Column]:
    """Return the global model, local models and the next global model of a round."""
    with opened(run) as again:
        number = again.last_round if round is None else round
        of_round = again.open(number)
        chosen = chosen_clients(of_round, clients, ABREAST)
        columns = [column("global", look(again.setup, of_round.start, images))]
        for client, weights in of_round.train(chosen):
            title = shortened(model_name(run, client))
            columns.append(column(title, look(again.setup, weights, images)))
        if number <= again.last_round:
            after = again.global_model(number)
            columns.append(column("averaged", look(again.setup, after, images)))
        return columns


def column(title: str, seen: Seen) -> Column:
    """Return a model's features. Raises `InputError` if they are not on a circle."""
    points = seen.features
    assert points is not None, "`look` refuses models without features"
    lengths = np.linalg.norm(points, axis=1)
    if points.shape[1] != 2 or (np.abs(lengths - 1) > TOLERANCE).any():
        raise InputError(
            f"the features have {points.shape[1]} numbers and lengths from {lengths.min():.3g} to "
            f"{lengths.max():.3g}, and this figure draws two numbers of length 1: train with "
            'model = "circle"'
        )
    return Column(title, seen.labels, points)


def draw_plane(panel: Axes, column: Column) -> None:
    """Draw the density of features in the plane."""
    reach = (-SIDE, SIDE)
    look: dict[str, Any] = {"extent": (*reach, *reach), "origin": "lower", "cmap": RAMP}
    panel.imshow(density_in_plane(column.points), interpolation="bilinear", **look)
    panel.set(title=column.title, xticks=[], yticks=[])
    panel.grid(False)


def draw_angles(panel: Axes, column: Column, classes: int) -> None:
    """Draw the density of the angle of each class's features."""
    angles = np.arctan2(column.points[:, 1], column.points[:, 0])
    places = np.linspace(-np.pi, np.pi, ANGLES)
    for number, colour in enumerate(colours_of(classes)):
        of_class = angles[column.labels == number]
        if len(of_class):
            panel.plot(places, density_of_angle(of_class, places), color=colour, linewidth=1.0)
    panel.set_xticks([-np.pi, 0, np.pi], ["-π", "0", "π"])
    panel.set(ylim=(0, None), yticks=[])


def density_in_plane(points: np.ndarray) -> np.ndarray:
    """Return a Gaussian kernel density of points (N, 2) on a square, (CELLS, CELLS); y first."""
    places = np.linspace(-SIDE, SIDE, CELLS)
    across = kernel(places[:, None] - points[:, 0])
    upward = kernel(places[:, None] - points[:, 1])
    return upward @ across.T / len(points)


def density_of_angle(angles: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return a Gaussian kernel density of angles (N,) at places on the circle.

    >>> at = np.linspace(-np.pi, np.pi, 721)
    >>> density = density_of_angle(np.array([np.pi, 3.0]), at)
    >>> bool(np.isclose(density[0], density[-1])), round(float(np.trapezoid(density, at)), 6)
    (True, 1.0)
    """
    away = places[:, None] - angles
    # A kernel goes on beyond the end of the axis at its other end.
    around = kernel(away) + kernel(away + 2 * np.pi) + kernel(away - 2 * np.pi)
    return around.mean(axis=1)


def kernel(away: np.ndarray) -> np.ndarray:
    """Return the density of a normal distribution with the deviation `BANDWIDTH`."""
    height = 1 / (BANDWIDTH * np.sqrt(2 * np.pi))
    return height * np.exp(-0.5 * (away / BANDWIDTH) ** 2)
