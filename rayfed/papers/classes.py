"""Figures of classes by round: how well each is known, and how often it is predicted.

Each figure is a function of runs. It raises `InputError` if a run lacks what is to be drawn.
Shapes: `E` evaluated rounds, `C` classes.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from rayfed.base.errors import InputError
from rayfed.folder.tables import confusions, matrices, read_table
from rayfed.measures import metrics
from rayfed.papers.curves import Number, lines
from rayfed.papers.global_model import most_classes
from rayfed.papers.panels import (
    bar_of,
    cells,
    high,
    panels,
    single,
    wide,
)
from rayfed.report.measured import unmeasured
from rayfed.report.read import Run
from rayfed.report.words import listed


def accuracy(
    runs: Sequence[Run],
    client: int | None = None,
    normalised: bool = False,
    width: float | None = None,
) -> Figure:
    """Draw the accuracy of each class by round, as a heat map per run (FedNTD Fig. 2a).

    With `client`, a second heat map is of the model which this client has trained in each measured
    round (FedSSD Fig. 3). With `normalised`, the accuracies of a round add up to 1 (FedNTD Fig.
    10), so that a round's best classes stand out.
    """
    shown = single(runs, "a heat map")
    models = [None] if client is None else [None, client]
    points = {}
    for name, run in shown.items():
        for model in models:
            title = name if client is None else f"{name}\n{model_name(model)}"
            points[title] = run, *class_accuracy(run, model)
    unit, top, scale = "accuracy (%)", 100.0, 100.0
    if normalised:
        unit, scale = "share of the accuracies' sum", 1.0
        points = {title: (run, at, shares(known)) for title, (run, at, known) in points.items()}
        top = max(float(np.nanmax(values, initial=0.0)) for _, _, values in points.values())
    inches = high(most_classes(shown), 1.8, 7.0)
    same_classes = len({run.classes for run in shown.values()}) == 1
    options = {"sharex": True, "sharey": same_classes, "width": width or wide(len(points))}
    caption = f"Accuracy of {listed([model_name(model) for model in models])} by class"
    figure, axes = panels(caption, 1, len(points), inches + 0.7, **options)
    for panel, (title, (run, rounds, values)) in zip(axes.flat, points.items(), strict=True):
        drawn = cells(panel, rounds, scale * values, run.classes, top, inches)
        panel.set(title=title, xlabel="round")
    axes[0, 0].set_ylabel("class")
    bar_of(figure, drawn, axes, unit)
    return figure


def model_name(client: int | None) -> str:
    """Return the words for a client's model, or for the global model without a client."""
    return "the global model" if client is None else f"client {client}'s model"


def class_accuracy(run: Run, client: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds (E,) in which a model was measured, and its class accuracies (E, C).

    Without a client it is the global model. Raises `InputError` if nothing was measured.
    """
    if client is None:
        return run.class_rounds, run.class_accuracy
    table = confusions(run.folder, run.classes)
    if not len(table["round"]):
        raise unmeasured(run, "confusion", "confusion matrices")
    rounds = np.unique(table["round"][table["client"] == client])
    if not len(rounds):
        measured = [number for number in np.unique(table["client"]) if number >= 0]
        raise InputError(
            f"--client {client}: '{run.folder}' has no confusion matrix of this client; it has "
            f"some of {listed(measured)}"
        )
    values = []
    for number in rounds:
        of_models = matrices(table, int(number), len(run.classes))
        values.append(metrics.class_accuracy(of_models[client]))
    return rounds, np.stack(values)


def shares(values: np.ndarray) -> np.ndarray:
    """Divide the accuracies (E, C) of each round by their sum; a round without any stays 0.

    >>> shares(np.array([[0.5, 1.5], [0.0, 0.0]])).tolist()
    [[0.25, 0.75], [0.0, 0.0]]
    """
    sums = np.nansum(values, axis=1, keepdims=True)
    return np.divide(values, sums, out=np.zeros_like(values), where=sums > 0)


def consistency(runs: Sequence[Run], width: float | None = None) -> Figure:
    """Draw how similar the class accuracies are to those of the previous round (FedNTD Fig. 2b).

    The similarity is a cosine: 1 where no class has lost against the others. A line is the mean
    over seeds, in a band from the lowest seed to the highest.
    """
    caption = "Cosine similarity of the class accuracies to those of the round before"
    return lines(runs, [Number(similarity, "cosine similarity")], caption, width)


def similarity(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return rounds, and the cosine of their class accuracies to the evaluated round before.

    Round 0, of the untrained model, does not count. A round whose model knows no class, or follows
    such a model, has none. Raises `InputError` if no round has one.
    """
    trained = run.class_rounds > 0
    rounds, known_classes = run.class_rounds[trained], run.class_accuracy[trained]
    before, after = known_classes[:-1], known_classes[1:]
    lengths = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    known = np.isfinite(lengths) & (lengths > 0)
    if not known.any():
        raise InputError(
            f"'{run.folder}' has no two evaluated rounds in a row in which a class is known"
        )
    products = np.sum(before[known] * after[known], axis=1)
    return rounds[1:][known], products / lengths[known]


def counts(runs: Sequence[Run], width: float | None = None) -> Figure:
    """Draw which labels the clients of a round hold, and which the global model then predicts.

    There are two heat maps for each run, by round and class (FedLMD Fig. 2): the examples of the
    round's clients, and the predictions on the test set. A model that forgets predicts what its
    last clients held.
    """
    shown = single(runs, "a heat map")
    found = {name: label_counts(run) for name, run in shown.items()}
    inches = high(most_classes(shown), 1.8, 7.0)
    wide_enough = width or wide(2 * len(shown))
    caption = "Labels of the round's clients, and labels that the global model predicts"
    columns = 2 * len(shown)
    figure, axes = panels(caption, 1, columns, inches + 0.7, width=wide_enough, sharex="row")
    for number, (name, run) in enumerate(shown.items()):
        rounds, seen, predicted = found[name]
        for panel, values, what in (
            (axes[0, 2 * number], seen, "held by the clients"),
            (axes[0, 2 * number + 1], predicted, "predicted"),
        ):
            drawn = cells(panel, rounds, 100 * shares(values), run.classes, 100.0, inches)
            panel.set(title=f"{name}\n{what}", xlabel="round")
    axes[0, 0].set_ylabel("class")
    bar_of(figure, drawn, axes, "share of the labels (%)")
    return figure


def label_counts(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rounds (E,), and for each class what was seen and predicted, (E, C) each."""
    places = {name: number for number, name in enumerate(run.classes)}
    by_round: dict[int, np.ndarray] = {}
    for row in read_table(run.folder, "classes").to_pylist():
        if row["round"] > 0 and row["predicted"] is not None:
            table = by_round.setdefault(row["round"], np.zeros((2, len(run.classes))))
            table[:, places[row["class"]]] = row["seen"] or 0, row["predicted"]
    if not by_round:
        raise InputError(f"'{run.folder}' has no evaluated round after round 0")
    rounds = np.array(sorted(by_round))
    tables = np.stack([by_round[round] for round in rounds.tolist()])
    return rounds, tables[:, 0], tables[:, 1]
