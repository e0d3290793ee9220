"""t-SNE of test features of the global model and of local models together.

Shapes: `N` test images, `D` features, `C` classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rayfed.base.errors import InputError
from rayfed.papers.models import GLOBAL, SEED, Shown, features_of, model_name, of_models, shown
from rayfed.papers.panels import panels, same_classes, shortened, single
from rayfed.papers.style import INK
from rayfed.report.read import Run

# t-SNE's usual number of neighbours; it must be below the number of points.
PERPLEXITY = 30
# Most colours that can be told apart.
COLOURED = 20
# Fewest images of which t-SNE makes a picture.
FEWEST = 5


def t_sne(
    runs: Sequence[Run],
    round: int | None = None,
    clients: str = "",
    images: int = 200,
    width: float | None = None,
) -> Figure:
    """Draw test features of the global model and of local models, in one t-SNE for all runs.

    FedNTD Fig. 19 to 21, FedCSD Fig. 7. The colours of the first panel are classes. Those of the
    second are models, or runs if there are several. Raises `InputError` if features have other
    sizes in the runs.
    """
    by_name = single(runs, "t-SNE")
    classes = same_classes([*by_name.values()], "t-SNE")
    of_runs = {}
    for name, run in by_name.items():
        of_runs[name] = shown(run, round, clients, images)
    points = placed(of_runs)
    number = len(next(iter(points.values()))) // len(next(iter(of_runs.values())).seen)
    caption = (
        f"t-SNE of the features of {number:,} test images, of {of_models([*of_runs.values()])}"
    )
    width = width or 8.4
    figure, axes = panels(caption, 1, 2, height_of(width), width=width)
    run = next(iter(by_name.values()))
    by_class(axes[0, 0], classes, of_runs, points)
    if len(by_name) == 1:
        axes[0, 0].set_title(f"{next(iter(by_name))}, by class")
    if len(by_name) > 1:
        by_run(axes[0, 1], of_runs, points)
    else:
        by_model(axes[0, 1], run, next(iter(of_runs.values())), next(iter(points.values())))
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[], box_aspect=1)
        panel.set_aspect("equal", adjustable="datalim")
        panel.grid(False)
        panel.spines[["top", "right"]].set_visible(True)
    return figure


def placed(of_runs: dict[str, Shown]) -> dict[str, np.ndarray]:
    """Return the points of each run's models one below the other, (models * N, 2).

    All are placed together. Raises `InputError` without scikit-learn, for too few images, and for
    features of several sizes.
    """
    features = {name: features_of(of_run) for name, of_run in of_runs.items()}
    sizes = {name: values.shape[1] for name, values in features.items()}
    if len(set(sizes.values())) > 1:
        words = " and ".join(f"{size} in '{name}'" for name, size in sizes.items())
        raise InputError(f"the models have other numbers of features, {words}: draw them apart")
    together = np.concatenate([*features.values()])
    if len(together) < FEWEST:
        raise InputError(f"--images: t-SNE needs at least {FEWEST} points; give more images")
    points = embedded(together)
    ends = np.cumsum([len(values) for values in features.values()])[:-1]
    return dict(zip(features, np.split(points, ends), strict=True))


def embedded(features: np.ndarray) -> np.ndarray:
    """Return the t-SNE of features (points, D), float (points, 2), with a fixed seed.

    Raises `InputError` if scikit-learn is not installed.
    """
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise InputError(
            f"rayfed figure t-sne needs scikit-learn, which cannot be imported ({error}): "
            "pip install 'rayfed-distill[figures]'"
        ) from None
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    # Features without any spread have no principal components.
    begin = "pca" if features.std() > 0 and features.shape[1] > 1 else "random"
    method = TSNE(perplexity=perplexity, init=begin, random_state=SEED)
    return method.fit_transform(features)


def colours_of(count: int) -> list[Any]:
    """Return so many colours: distinct ones up to 20, then those of a rainbow."""
    if count > COLOURED:
        return [colormaps["turbo"](place) for place in np.linspace(0, 1, count)]
    scale = colormaps["tab10" if count <= COLOURED // 2 else "tab20"]
    return [scale(place) for place in range(count)]


def by_class(
    panel: Axes, classes: Sequence[str], of_runs: dict[str, Shown], points: dict[str, np.ndarray]
) -> None:
    """Draw points in the colours of their classes, with a marker for the global models."""
    colours = colours_of(len(classes))
    for name, of_run in of_runs.items():
        parts = np.split(points[name], len(of_run.seen))
        for (client, seen), part in zip(of_run.seen.items(), parts, strict=True):
            shades = [colours[label] for label in seen.labels]
            dots(panel, part, shades, client, len(of_run.seen))
    handles = []
    if len(classes) <= COLOURED:
        handles = [
            handle(colour, "o", shortened(name))
            for name, colour in zip(classes, colours, strict=True)
        ]
    below(panel, handles, "by class")


def by_model(panel: Axes, run: Run, of_run: Shown, points: np.ndarray) -> None:
    """Draw points in the colours of their models, the global model's on top."""
    local = [client for client in of_run.seen if client != GLOBAL]
    colours = dict(zip(local, colours_of(len(local)), strict=True))
    colours[GLOBAL] = INK
    parts = dict(zip(of_run.seen, np.split(points, len(of_run.seen)), strict=True))
    handles = [handle(INK, "x", model_name(run, GLOBAL))]
    for client in local:
        dots(panel, parts[client], colours[client], client, len(of_run.seen))
        handles.append(handle(colours[client], "o", shortened(model_name(run, client))))
    dots(panel, parts[GLOBAL], INK, GLOBAL, len(of_run.seen))
    below(panel, handles if len(local) <= COLOURED else handles[:1], "by model")


def by_run(panel: Axes, of_runs: dict[str, Shown], points: dict[str, np.ndarray]) -> None:
    """Draw points in the colours of their runs."""
    handles = []
    for (name, of_run), colour in zip(of_runs.items(), colours_of(len(of_runs)), strict=True):
        parts = np.split(points[name], len(of_run.seen))
        for client, part in zip(of_run.seen, parts, strict=True):
            dots(panel, part, colour, client, len(of_run.seen))
        handles.append(handle(colour, "o", name))
    below(panel, handles, "by run")


def dots(panel: Axes, points: np.ndarray, colours: Any, client: int, models: int) -> None:
    """Draw the points of a model: dots for a local model, crosses for the global one."""
    look: dict[str, Any] = {"marker": "o", "s": 9, "linewidths": 0, "alpha": 0.75}
    if client == GLOBAL and models > 1:
        look = {"marker": "x", "s": 14, "linewidths": 0.9, "zorder": 3}
    if isinstance(colours, list):
        look["c"] = colours
    else:
        look["color"] = colours
    panel.scatter(points[:, 0], points[:, 1], rasterized=True, **look)


def handle(colour: Any, marker: str, name: str) -> Line2D:
    """Return an entry of a legend."""
    return Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=5, label=name)


def below(panel: Axes, handles: Sequence[Line2D], title: str) -> None:
    """Give a panel a title, and a legend below it."""
    panel.set_title(title)
    if not handles:
        return
    longest = max(len(str(entry.get_label())) for entry in handles)
    columns = max(1, min(5, len(handles), int(56 / (longest + 6))))
    panel.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.02),
        ncols=columns,
        columnspacing=0.9,
        handletextpad=0.2,
    )
    # The figure has room for one row of names.
    figure = panel.figure
    assert isinstance(figure, Figure)
    rows = math.ceil(len(handles) / columns)
    needed = height_of(figure.get_figwidth()) + 0.25 * (rows - 1)
    figure.set_figheight(max(figure.get_figheight(), needed))


def height_of(width: float) -> float:
    """Return the inches of a figure with two square panels, a title and a row of names."""
    return 0.5 * width + 0.55
