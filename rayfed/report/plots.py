"""The charts that a page draws of one run or of groups of runs.

Shapes: `T` rounds, `C` classes.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from rayfed.base.errors import InputError
from rayfed.report import charts
from rayfed.report.charts import Chart, Line
from rayfed.report.forgetting import Series
from rayfed.report.measured import DISTANCES, WHEN, WHERE, drifts, notes_of, over_clients
from rayfed.report.read import MOST_ACROSS, Group, Run, dealt, grouped, shorten

DRIFT = (
    "Each point is a client in a round, the paler the earlier. Weight divergence: how far its "
    "training moved the parameters. Distribution distance: of the global model's class accuracies, "
    "scaled to sum to 1, from the client's labels."
)
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def global_model(groups: Sequence[Group]) -> list[Chart]:
    """Return charts of accuracy on the test examples, with that of a guess, forgetting and loss.

    They are by round. A group by itself has the forgetting of its first run, by each definition
    that this run has numbers for.
    """
    runs: list[Run] = []
    for group in groups:
        runs += group.runs
    marked = None
    if len(runs) == 1 and runs[0].summary.get("best"):
        best = runs[0].summary["best"]
        marked = (best["round"], 100 * best["test_accuracy"], "best")
    losses = curves(groups, "test_loss")
    lost = curves(groups, "forgetting", 100, start=1)
    if len(groups) == 1:
        test = losses[0]._replace(name="test")
        training = curves(groups, "train_loss", start=1)[0]
        losses = [test, training._replace(name="training", number=1)]
        lost = []
        for number, (name, (rounds, values)) in enumerate(runs[0].forgetting.items()):
            lost.append(Line(name, number, rounds, 100 * values))
    accuracy = curves(groups, "test_accuracy", 100)
    chance = {run.summary.get("guess", 1 / len(run.classes)) for run in runs if run.classes}
    rules = [(100 * share, "chance") for share in sorted(chance)]
    return [
        charts.lines(
            "accuracy", "Accuracy", "test accuracy (%)", accuracy, "%", rules=rules, marked=marked
        ),
        charts.lines("forgetting", "Forgetting", "forgetting (%)", lost, "%", rules=[(0.0, "")]),
        charts.lines("loss", "Loss", "mean loss per example (nats)", losses, digits=3),
    ]


def curves(groups: Sequence[Group], column: str, factor: float = 1, start: int = 0) -> list[Line]:
    """Return a column by round, from the round `start` on, as a line for each group.

    Several runs give their mean, in a band from the lowest to the highest run. A round has a point
    where all runs of the group were evaluated.
    """
    drawn = []
    for number, (name, group) in enumerate(zip(shorten(groups), groups, strict=True)):
        of_runs = [_points(run, column, factor, start) for run in group.runs]
        drawn.append(over_runs(name, number, of_runs))
    return drawn


def _points(run: Run, column: str, factor: float, start: int) -> Series:
    """Return the rounds of a run in which a column is known, from `start` on, and its values."""
    known = run.evaluated
    if column == "train_loss":
        known = np.ones_like(run.evaluated)
    # Nothing can be forgotten before the second evaluated round.
    if column == "forgetting":
        known = np.isfinite(run.rounds[column])
    rounds = start + np.flatnonzero(known[start:])
    return rounds, finite(run.rounds[column][rounds]) * factor


def class_accuracy(run: Run) -> Chart:
    """Return a heat map of each class's accuracy by round.

    Round 0 is left out: what an untrained model says is nothing learnt.
    """
    rounds = [str(number) for number in run.class_rounds[1:]]
    values = 100 * run.class_accuracy[1:].T
    x, unit = "round", "accuracy (%)"
    return charts.heat(
        "classes", "Class accuracy", values, run.classes, rounds, x, unit, top=100.0, slider=True
    )


def partition(run: Run) -> Chart:
    """Return a heat map of the examples of each class that each client holds.

    Clients go across. A blank is no example.
    """
    most = min(MOST_ACROSS, max(charts.MOST_CELLS // len(run.classes), 2))
    counts, together = dealt(run.partition, len(run.classes), run.num_clients, most)
    names = []
    for start in range(0, run.num_clients, together):
        end = min(start + together, run.num_clients) - 1
        names.append(run.called(start) if together == 1 else f"{start} to {end}")
    unit = "examples" if together == 1 else f"examples, mean of {together} clients"
    drawn = np.where(counts, counts, np.nan)
    return charts.heat(
        "partition", "Partition", drawn, run.classes, names, x="client", unit=unit, faint=True
    )


def clients(run: Run) -> list[Chart]:
    """Return charts of the clients: their losses, the terms of the losses, and who answered."""
    loss = spread_of(run.clients["round"], finite(run.clients["train_loss"]))
    figures = [
        charts.lines(
            "training", "Training loss", "mean loss per step (nats)", [loss], digits=3, zero=True
        )
    ]
    terms = {name: line for name, line in run.notes.items() if name.startswith("loss.")}
    if len(terms) > 1:
        drawn = []
        for number, (name, (rounds, means)) in enumerate(terms.items()):
            drawn.append(Line(name.removeprefix("loss."), number, rounds, finite(means)))
        figures.append(
            charts.lines(
                "terms", "Terms of the loss", "mean per step (nats)", drawn, digits=3, zero=True
            )
        )
    return figures + list(chosen(run))


def chosen(run: Run) -> Iterator[Chart]:
    """Yield charts of the job's table [clients]: who answered, and the virtual time."""
    noted = run.round_notes
    counts = [name for name in ("answered", "dropped", "late") if f"clients.{name}" in noted]
    if counts:
        drawn = []
        for number, name in enumerate(counts):
            drawn.append(Line(name, number, *noted[f"clients.{name}"]))
        yield charts.lines(
            "answers", "Chosen clients", "clients per round", drawn, digits=0, zero=True
        )
    if "clients.virtual_seconds" in noted:
        rounds, seconds = noted["clients.virtual_seconds"]
        total = [Line("so far", 0, rounds, np.cumsum(seconds))]
        yield charts.lines("virtual", "Virtual time", "virtual seconds so far", total, zero=True)


def costs(run: Run) -> list[Chart]:
    """Return charts of the seconds and the bytes by round."""
    rounds = np.arange(len(run.rounds["round"]))[1:]
    taken = Line("round", 0, rounds, finite(run.rounds["seconds"][1:]))
    figures = [charts.lines("seconds", "Time", "seconds per round", [taken], digits=2, zero=True)]
    if len(run.clients["round"]):
        client = spread_of(run.clients["round"], finite(run.clients["seconds"]))
        y = "seconds per client"
        figures.append(
            charts.lines("client-seconds", "Time of clients", y, [client], digits=2, zero=True)
        )
    down = run.rounds["bytes_down"]
    up = run.rounds["bytes_up"]
    most = max(float(np.nanmax(sent, initial=1.0)) for sent in (down, up))
    size, unit = _unit_of(most)
    sent = [
        Line("to clients", 0, rounds, finite(down[1:] / size)),
        Line("back", 1, rounds, finite(up[1:] / size)),
    ]
    figures.append(charts.lines("bytes", "Sent", f"{unit} per round", sent, f" {unit}", zero=True))
    return figures


def _unit_of(most: float) -> tuple[float, str]:
    """Return the largest unit that is not larger than a number of bytes, and its name.

    >>> _unit_of(2e6), _unit_of(1.0)
    ((1000000.0, 'MB'), (1.0, 'bytes'))
    """
    for size, unit in BYTES:
        if most >= size:
            return size, unit
    raise AssertionError("a run that has sent something has sent a byte")


def local_models(run: Run) -> list[Chart]:
    """Return the charts of measured clients that the run has numbers for."""
    figures: list[Chart] = []
    if any(name.startswith("local.") for name in run.notes):
        for key, words in {"accuracy": "all classes", **WHERE}.items():
            # A chart without numbers is left out: the error only says what is missing.
            with suppress(InputError):
                figures.append(before_and_after(run, key, f"Local models: {words}"))
    with suppress(InputError):
        figures.append(divergence(run))
    return figures


def before_and_after(run: Run, key: str, title: str) -> Chart:
    """Return a chart of an accuracy of the clients' models before and after their training.

    It shows means, and deviations around them.
    """
    notes = [f"local.{when}.{key}" for when in WHEN]
    columns = notes_of([run], "local", *notes)
    drawn = []
    for number, (note, words) in enumerate(zip(notes, WHEN.values(), strict=True)):
        values = over_clients(columns, note, 100)
        low, high = values.band(100)
        drawn.append(Line(words, number, values.rounds, values.mean, low, high))
    return charts.lines(f"local-{key}".replace("_", "-"), title, "accuracy (%)", drawn, "%")


def divergence(run: Run) -> Chart:
    """Return a chart of how far clients move in weights, by the distance of the model from labels.

    This is Fig. 8 of FedNTD: the distance is that of the global model from a client's labels.
    """
    columns = drifts(grouped([run])[0])
    x, y = DISTANCES
    points = []
    for client, round, distance, divergence in zip(
        columns["client"].tolist(),
        columns["round"].tolist(),
        columns[x],
        columns[y],
        strict=True,
    ):
        name = f"client {run.called(client)}, round {round}"
        points.append((name, distance, divergence, round))
    return charts.dots(
        "drift", "Drift of the local models", DISTANCES[x], DISTANCES[y], points, DRIFT
    )


def local_groups(groups: Sequence[Group]) -> Iterator[Chart]:
    """Yield charts of the in-local and out-local accuracy of groups by round.

    A line shows means over clients, then over runs, in the range of the runs.
    """
    for when, model in {"before": "the global model", "after": "clients' models"}.items():
        for where, words in WHERE.items():
            drawn = _local_lines(groups, f"local.{when}.{where}")
            if drawn:
                key = f"{when}-{where}".replace("_", "-")
                title = f"{words.capitalize()}, {model}"
                yield charts.lines(key, title, "accuracy (%)", drawn, "%")


def _local_lines(groups: Sequence[Group], note: str) -> list[Line]:
    """Return a line of a note for each group that has measured it."""
    drawn = []
    for number, (group, name) in enumerate(zip(groups, shorten(groups), strict=True)):
        with suppress(InputError):
            of_runs = []
            for run in group.runs:
                values = over_clients(notes_of([run], "local", note), note, 100)
                of_runs.append((values.rounds, values.mean))
            drawn.append(over_runs(name, number, of_runs))
    return drawn


def over_runs(name: str, number: int, of_runs: Sequence[Series]) -> Line:
    """Return the mean of runs' values in the rounds that all of them have.

    Several runs have a band from the lowest to the highest.
    """
    rounds = of_runs[0][0]
    for of_run, _ in of_runs[1:]:
        rounds = np.intersect1d(rounds, of_run)
    values = np.stack([of_run[np.isin(known, rounds)] for known, of_run in of_runs])
    if len(values) == 1:
        return Line(name, number, rounds, values.mean(axis=0))
    return Line(name, number, rounds, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def spread_of(rounds: np.ndarray, values: np.ndarray) -> Line:
    """Return the median of each round, in a band from its smallest to its largest value."""
    numbers, starts = np.unique(rounds, return_index=True)
    of_rounds = np.split(values, starts[1:])
    middle = np.array([np.median(of_round) for of_round in of_rounds])
    low = np.array([np.min(of_round) for of_round in of_rounds])
    high = np.array([np.max(of_round) for of_round in of_rounds])
    return Line("median", 0, numbers, middle, low, high)


def finite(values: np.ndarray) -> np.ndarray:
    """Return values with a gap instead of NaN and infinity, which cannot be drawn."""
    return np.where(np.isfinite(values), values, np.nan)
