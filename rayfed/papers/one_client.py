"""The figure of one client: what it holds, and how well each class is known to its models."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from rayfed.base.errors import InputError
from rayfed.folder.tables import confusions, matrices
from rayfed.measures import metrics
from rayfed.papers.panels import GLYPH, RAMP, panels, shortened, single
from rayfed.report.measured import unmeasured
from rayfed.report.read import Run
from rayfed.report.words import listed

# Inches of a number in the table.
CELL = 0.55


def client(
    runs: Sequence[Run],
    client: int | None = None,
    round: int | None = None,
    width: float | None = None,
) -> Figure:
    """Draw a client's label shares, and the class accuracies of models (FedCAD Fig. 2).

    The rows are the shares, the model that the client was sent, and the model that it trained in
    each run. All are of `round`, or of the last measured one, and of `client`, or of the first
    measured one. The model sent out is that of the first run.
    """
    shown = single(runs, "a client's accuracy")
    first = next(iter(shown.values()))
    number, known = trained(first, client, round)
    rows = {"data": shares_of(first, number), "sent out": sent_out(first, known)}
    for name, run in shown.items():
        rows[name] = local_accuracy(run, number, known)
    table = np.stack([*rows.values()])
    label = GLYPH * max(map(len, rows))
    width = width or CELL * table.shape[1] + label + 0.4
    caption = (
        f"Client {number} in round {known}: its share of each class, and the accuracy of the model "
        "that it was sent and of those that it trained"
    )
    figure, axes = panels(caption, 1, 1, 0.3 * len(rows) + 1.1, width)
    panel = axes[0, 0]
    panel.imshow(table, cmap=RAMP, vmin=0, vmax=1, aspect="auto", interpolation="none")
    panel.grid(False)
    panel.set_yticks(range(len(rows)), [shortened(name) for name in rows])
    names = [shortened(name) for name in first.classes]
    panel.set_xticks(range(len(names)), names, rotation=45, ha="right")
    panel.tick_params(length=0)
    for place, values in enumerate(table):
        for of_class, value in enumerate(values):
            colour = "white" if value > 0.45 else "black"
            text = {"ha": "center", "va": "center", "fontsize": 8, "color": colour}
            panel.text(of_class, place, "-" if np.isnan(value) else f"{value:.2f}", **text)
    return figure


def trained(run: Run, client: int | None, round: int | None) -> tuple[int, int]:
    """Return the client and the round to draw.

    Raises `InputError` if the client's model was not measured in the round.
    """
    table = confusions(run.folder, run.classes)
    of_clients = table["client"] >= 0
    if not of_clients.any():
        raise unmeasured(run, "confusion", "confusion matrices of clients")
    clients, rounds = table["client"][of_clients], table["round"][of_clients]
    if round is None:
        of_client = rounds if client is None else rounds[clients == client]
        round = int(of_client.max(initial=0))
    measured = np.unique(clients[rounds == round])
    if client is None and len(measured):
        client = int(measured[0])
    if client not in measured:
        wanted = "no client" if client is None else f"--client {client} --round {round}"
        raise InputError(
            f"{wanted}: '{run.folder}' has no confusion matrix of it; it has some of the clients "
            f"{listed(np.unique(clients))} in the rounds {listed(np.unique(rounds))}"
        )
    assert client is not None
    return client, round


def shares_of(run: Run, client: int) -> np.ndarray:
    """Return the share of each class in the data of a client (C,)."""
    held = run.partition
    own = held["client"] == client
    counts = np.bincount(held["class"][own], held["count"][own], len(run.classes))
    return counts / max(counts.sum(), 1)


def sent_out(run: Run, round: int) -> np.ndarray:
    """Return the class accuracies (C,) of the model that clients were sent in a round.

    Raises `InputError` if it was not evaluated.
    """
    place = np.flatnonzero(run.class_rounds == round - 1)
    if not len(place):
        raise InputError(
            f"--round {round}: '{run.folder}' has not evaluated the model of round {round - 1}, "
            "which its clients were sent"
        )
    return run.class_accuracy[place[0]]


def local_accuracy(run: Run, client: int, round: int) -> np.ndarray:
    """Return the class accuracies (C,) of the model that a client has trained in a round.

    Raises `InputError` if it was not measured.
    """
    of_models = matrices(confusions(run.folder, run.classes), round, len(run.classes))
    if client not in of_models:
        raise InputError(
            f"'{run.folder}' has no confusion matrix of client {client} in round {round}"
        )
    return metrics.class_accuracy(of_models[client])
