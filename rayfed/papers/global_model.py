"""Figures of the global model: what it forgets, and which classes it confuses.

Each figure is a function of runs, which stand side by side. It raises `InputError` if a run lacks
what is to be drawn. Shapes: `E` evaluated rounds, `C` classes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rayfed.base.errors import InputError
from rayfed.folder.tables import confusions, matrices
from rayfed.measures import metrics
from rayfed.papers.panels import (
    ABREAST,
    GLYPH,
    RAMP,
    bar_of,
    cells,
    high,
    name_classes,
    panels,
    shortened,
    single,
    span,
    wide,
)
from rayfed.papers.style import NAMED
from rayfed.report.forgetting import peaks
from rayfed.report.measured import unmeasured
from rayfed.report.read import Run
from rayfed.report.table import lacking
from rayfed.report.words import listed

# Most classes whose numbers fit into a confusion matrix.
FEW = 12
# Most clients that have confusion matrices.
CLIENTS = 3


def forgetting(runs: Sequence[Run], width: float | None = None) -> Figure:
    """Draw the accuracy that each class has lost since its best earlier round, by round.

    FedNTD Fig. 2 and eq. 5. The mean of a round's column is its forgetting. A class that is now at
    its best has lost less than 0, which is drawn as 0.
    """
    shown = single(runs, "a heat map")
    lost = {name: lost_of(run) for name, run in shown.items()}
    top = max(float(np.nanmax(points, initial=1.0)) for _, points in lost.values())
    inches = high(most_classes(shown), 1.8, 7.0)
    same_classes = len({run.classes for run in shown.values()}) == 1
    options = {"sharex": True, "sharey": same_classes, "width": width or wide(len(shown))}
    figure, axes = panels("Forgetting by class", 1, len(shown), inches + 0.7, **options)
    for panel, (name, run) in zip(axes.flat, shown.items(), strict=True):
        drawn = cells(panel, *lost[name], run.classes, top, inches)
        panel.set(
            title=f"{name}\n{100 * run.summary['last']['forgetting']:.1f} points at the end",
            xlabel="round",
        )
    axes[0, 0].set_ylabel("class")
    bar_of(figure, drawn, axes, "accuracy lost since its peak (points)")
    return figure


def lost_of(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds (E,) that have an earlier peak, and the accuracy lost by then (E, C).

    The losses are those of each class, in points. Peaks are as in `forgetting.peak`: of earlier
    rounds without round 0, at multiples of `train.eval_every`. Raises `InputError` if there is no
    peak.
    """
    trained = run.class_rounds > 0
    rounds = run.class_rounds[trained]
    accuracy = run.class_accuracy[trained]
    before = peaks(rounds, accuracy, run.eval_every)[:-1]
    if not np.isfinite(before).any():
        raise lacking(run, "forgetting.peak")
    return rounds[1:], 100 * (before - accuracy[1:])


def confusion(runs: Sequence[Run], round: int | None = None, width: float | None = None) -> Figure:
    """Draw confusion matrices of the global model and of trained clients' models.

    Each run begins a row, in `round`, or in the last measured round. It shows the three measured
    clients with the lowest numbers (FedSSD Fig. 4, FedCAD Fig. 2).
    """
    shown = single(runs, "a confusion matrix")
    of_runs = {name: shown_matrices(run, round) for name, run in shown.items()}
    most = max(len(of_models) for _, of_models, _ in of_runs.values())
    columns, side, size = _confusion_size(shown, most, width)
    caption = "Confusion of classes"
    measured = [len(clients) for _, _, clients in of_runs.values()]
    if max(measured) > CLIENTS:
        caption += f": of the {span(measured)} clients measured in the round, the first {CLIENTS}"
    figure, axes = panels(caption, len(shown) * -(-most // columns), columns, **size)
    rows = axes.reshape(len(shown), -1)
    for row, (name, (number, of_models, _)) in zip(rows, of_runs.items(), strict=True):
        run = shown[name]
        for panel in row[len(of_models) :]:
            panel.set_axis_off()
        for panel, (client, matrix) in zip(row, of_models.items(), strict=False):
            drawn = draw_confusion(panel, matrix, run.classes, side)
            model = "global model" if client < 0 else f"client {client}"
            panel.set(title=f"{name}\n{model}, round {number}", xlabel="predicted class")
            for text, is_held in zip(panel.get_yticklabels(), held_by(run, client), strict=False):
                text.set_fontweight("bold" if is_held else "normal")
    for panel in axes[:, 0]:
        panel.set_ylabel("true class (bold: the client's)")
    bar_of(figure, drawn, axes, "share of the true class (%)")
    return figure


def _confusion_size(
    shown: dict[str, Run], most: int, width: float | None
) -> tuple[int, float, dict[str, float]]:
    """Return the columns of panels, the side of a matrix in inches, and the size of the figure.

    A run has at most `most` matrices.
    """
    number_of_classes = most_classes(shown)
    names = 0.3
    if number_of_classes <= NAMED:
        names = GLYPH * max(_longest_name(run.classes) for run in shown.values())
    side = high(number_of_classes, 2.0, 4.0)
    fitting = int((width - 1.0) / (side + names + 0.2) + 0.5) if width else ABREAST
    columns = max(1, min(most, ABREAST, fitting))
    if width:
        side = max(0.3, (width - 1.0) / columns - names - 0.2)
    full_width = width or columns * (side + names + 0.2) + 1.0
    return columns, side, {"height": side + names + 0.65, "width": full_width}


def _longest_name(classes: Sequence[str]) -> int:
    """Return the length of the longest shortened name."""
    return max(len(shortened(name)) for name in classes)


def shown_matrices(run: Run, round: int | None) -> tuple[int, dict[int, np.ndarray], list[int]]:
    """Return the round, the matrices (C, C) of models in it, and the measured clients.

    The matrices are those of the global model (-1) and of clients. The global model has none in a
    round that was not evaluated. Raises `InputError` if the run has no matrices, or none in the
    round.
    """
    table = confusions(run.folder, run.classes)
    if not len(table["round"]):
        raise unmeasured(run, "confusion", "confusion matrices")
    rounds = np.unique(table["round"])
    if round is None:
        round = int(rounds.max(initial=0))
    if round not in rounds:
        has = listed(rounds)
        raise InputError(
            f"--round {round}: '{run.folder}' has confusion matrices of the rounds {has}"
        )
    of_models = matrices(table, round, len(run.classes))
    measured = sorted(client for client in of_models if client >= 0)
    shown = {}
    for client in [-1, *measured[:CLIENTS]]:
        if client in of_models:
            shown[client] = of_models[client]
    return round, shown, measured


def draw_confusion(panel: Any, matrix: np.ndarray, classes: Sequence[str], inches: float) -> Any:
    """Draw a confusion matrix (C, C) as percentages of its rows.

    Where they fit, percentages over 0.5 are numbers as well.
    """
    rates = 100 * metrics.row_normalised(matrix)
    drawn = panel.imshow(rates, cmap=RAMP, vmin=0, vmax=100, interpolation="none")
    panel.grid(False)
    name_classes(panel, classes, inches)
    if len(classes) > FEW:
        return drawn
    panel.set_xticks(range(len(classes)), [shortened(name) for name in classes], rotation=90)
    panel.tick_params(axis="x", length=0)
    for true, predicted in np.argwhere(np.nan_to_num(rates) > 0.5):
        colour = "white" if rates[true, predicted] > 45 else "black"
        text = {"ha": "center", "va": "center", "fontsize": 6, "color": colour}
        panel.text(predicted, true, f"{rates[true, predicted]:.0f}", **text)
    return drawn


def held_by(run: Run, client: int) -> list[bool]:
    """Say for each class whether a client holds examples of it.

    The global model (-1) holds none.
    """
    classes = run.partition["class"][run.partition["client"] == client]
    return [number in classes for number in range(len(run.classes))]


def most_classes(shown: dict[str, Run]) -> int:
    """Return the largest number of classes of a run."""
    return max(len(run.classes) for run in shown.values())
