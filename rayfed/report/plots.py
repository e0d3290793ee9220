"""What the page draws: of one run or of groups of runs, as the figures of `charts`.

Shapes: `T` rounds, `C` classes.
"""

import functools
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
    """Accuracy on the test examples beside that of a guess, forgetting and loss, by round.

    A group by itself has the forgetting of its first run, by each definition that this has numbers
    for.
    """
    runs = [run for group in groups for run in group.runs]
    chance = {run.summary.get("guess", 1 / len(run.classes)) for run in runs if run.classes}
    best = runs[0].summary.get("best") if len(runs) == 1 else None
    marked = (best["round"], 100 * best["test_accuracy"], "best") if best else None
    losses, lost = curves(groups, "test_loss"), curves(groups, "forgetting", 100, first=1)
    if len(groups) == 1:
        (test,), (training,) = losses, curves(groups, "train_loss", first=1)
        losses = [test._replace(name="test"), training._replace(name="training", number=1)]
        by_definition = enumerate(runs[0].forgetting.items())
        lost = [
            Line(name, number, rounds, 100 * values)
            for number, (name, (rounds, values)) in by_definition
        ]
    accuracy = curves(groups, "test_accuracy", 100)
    rules = [(100 * share, "chance") for share in sorted(chance)]
    return [
        charts.lines(
            "accuracy", "Accuracy", "test accuracy (%)", accuracy, "%", rules=rules, marked=marked
        ),
        charts.lines("forgetting", "Forgetting", "forgetting (%)", lost, "%", rules=[(0.0, "")]),
        charts.lines("loss", "Loss", "mean loss per example (nats)", losses, digits=3),
    ]


def curves(groups: Sequence[Group], column: str, factor: float = 1, first: int = 0) -> list[Line]:
    """A column by round, from the round `first` on: a line for each group.

    Of several runs, the mean, in a band from the lowest to the highest run. A round has a point
    where all runs of the group were evaluated.
    """

    def points(run: Run) -> Series:
        known = run.evaluated
        if column == "train_loss":
            known = np.ones_like(run.evaluated)
        # Nothing can be forgotten before the second evaluated round.
        if column == "forgetting":
            known = np.isfinite(run.rounds[column])
        rounds = first + np.flatnonzero(known[first:])
        return rounds, finite(run.rounds[column][rounds]) * factor

    of_groups = enumerate(zip(shorten(groups), groups, strict=True))
    return [
        over_runs(name, number, [points(run) for run in group.runs])
        for number, (name, group) in of_groups
    ]


def class_accuracy(run: Run) -> Chart:
    """Without round 0: what an untrained model says is nothing learnt."""
    rounds = [str(number) for number in run.class_rounds[1:]]
    values = 100 * run.class_accuracy[1:].T
    x, unit = "round", "accuracy (%)"
    return charts.heat(
        "classes", "Class accuracy", values, run.classes, rounds, x, unit, top=100.0, slider=True
    )


def partition(run: Run) -> Chart:
    """The examples of each class that each client holds, clients across; a blank is none."""
    most = min(MOST_ACROSS, max(charts.MOST_CELLS // len(run.classes), 2))
    counts, together = dealt(run.partition, len(run.classes), run.num_clients, most)
    firsts = range(0, run.num_clients, together)
    names = [
        run.called(n) if together == 1 else f"{n} to {min(n + together, run.num_clients) - 1}"
        for n in firsts
    ]
    unit = "examples" if together == 1 else f"examples, mean of {together} clients"
    drawn = np.where(counts, counts, np.nan)
    return charts.heat(
        "partition", "Partition", drawn, run.classes, names, x="client", unit=unit, faint=True
    )


def clients(run: Run) -> list[Chart]:
    """What is known of the clients: their losses, the terms of these, who answered."""
    loss = spread_of(run.clients["round"], finite(run.clients["train_loss"]))
    figures = [
        charts.lines(
            "training", "Training loss", "mean loss per step (nats)", [loss], digits=3, zero=True
        )
    ]
    terms = {name: line for name, line in run.notes.items() if name.startswith("loss.")}
    if len(terms) > 1:
        drawn = [
            Line(name.removeprefix("loss."), number, rounds, finite(means))
            for number, (name, (rounds, means)) in enumerate(terms.items())
        ]
        figures.append(
            charts.lines(
                "terms", "Terms of the loss", "mean per step (nats)", drawn, digits=3, zero=True
            )
        )
    return [*figures, *chosen(run)]


def chosen(run: Run) -> Iterator[Chart]:
    """Of the [clients] table of the job: how the chosen clients answered, and the virtual time."""
    noted = run.round_notes
    counts = [name for name in ("answered", "dropped", "late") if f"clients.{name}" in noted]
    if counts:
        drawn = [
            Line(name, number, *noted[f"clients.{name}"]) for number, name in enumerate(counts)
        ]
        yield charts.lines(
            "answers", "Chosen clients", "clients per round", drawn, digits=0, zero=True
        )
    if "clients.virtual_seconds" in noted:
        rounds, seconds = noted["clients.virtual_seconds"]
        total = [Line("so far", 0, rounds, np.cumsum(seconds))]
        yield charts.lines("virtual", "Virtual time", "virtual seconds so far", total, zero=True)


def costs(run: Run) -> list[Chart]:
    """Seconds and bytes by round."""
    rounds = np.arange(len(run.rounds["round"]))[1:]
    taken = Line("round", 0, rounds, finite(run.rounds["seconds"][1:]))
    figures = [charts.lines("seconds", "Time", "seconds per round", [taken], digits=2, zero=True)]
    if len(run.clients["round"]):
        client = spread_of(run.clients["round"], finite(run.clients["seconds"]))
        y = "seconds per client"
        figures.append(
            charts.lines("client-seconds", "Time of clients", y, [client], digits=2, zero=True)
        )
    down, up = run.rounds["bytes_down"], run.rounds["bytes_up"]
    most = max(float(np.nanmax(sent, initial=1.0)) for sent in (down, up))
    size, unit = next((size, unit) for size, unit in BYTES if most >= size)
    sent = [
        Line("to clients", 0, rounds, finite(down[1:] / size)),
        Line("back", 1, rounds, finite(up[1:] / size)),
    ]
    return [
        *figures,
        charts.lines("bytes", "Sent", f"{unit} per round", sent, f" {unit}", zero=True),
    ]


def local_models(run: Run) -> list[Chart]:
    """The figures of measured clients that the run has numbers for."""
    figures: list[Chart] = []
    if any(name.startswith("local.") for name in run.notes):
        for key, words in {"accuracy": "all classes", **WHERE}.items():
            # It says what is missing.
            with suppress(InputError):
                figures.append(before_and_after(run, key, f"Local models: {words}"))
    with suppress(InputError):
        figures.append(divergence(run))
    return figures


def before_and_after(run: Run, key: str, title: str) -> Chart:
    """An accuracy of the clients' models before and after their training: means, and deviations
    around them.
    """
    columns = notes_of([run], "local", *(f"local.{when}.{key}" for when in WHEN))
    drawn = []
    for number, (when, name) in enumerate(WHEN.items()):
        values = over_clients(columns, f"local.{when}.{key}", 100)
        drawn.append(Line(name, number, values.rounds, values.mean, *values.band(100)))
    return charts.lines(f"local-{key}".replace("_", "-"), title, "accuracy (%)", drawn, "%")


def divergence(run: Run) -> Chart:
    """How far clients move in weights, against how far the global model is from their labels
    (FedNTD Fig. 8).
    """
    columns = drifts(grouped([run])[0])
    values = (columns[name] for name in DISTANCES)
    places = zip(columns["client"].tolist(), columns["round"].tolist(), *values, strict=True)
    points = [
        (f"client {run.called(client)}, round {n}", *place, n) for client, n, *place in places
    ]
    x, y = DISTANCES.values()
    return charts.dots("drift", "Drift of the local models", x, y, points, DRIFT)


def local_groups(groups: Sequence[Group]) -> Iterator[Chart]:
    """In-local and out-local accuracy of groups by round: means over clients, then over runs, in
    their range.
    """
    for when, model in {"before": "the global model", "after": "clients' models"}.items():
        for where, words in WHERE.items():
            drawn = []
            for number, (group, title) in enumerate(zip(groups, shorten(groups), strict=True)):
                name = f"local.{when}.{where}"
                with suppress(InputError):
                    measured = [
                        over_clients(notes_of([run], "local", name), name, 100)
                        for run in group.runs
                    ]
                    drawn.append(
                        over_runs(title, number, [(of.rounds, of.mean) for of in measured])
                    )
            if drawn:
                key = f"{when}-{where}".replace("_", "-")
                yield charts.lines(
                    key, f"{words.capitalize()}, {model}", "accuracy (%)", drawn, "%"
                )


def over_runs(name: str, number: int, of_runs: Sequence[Series]) -> Line:
    """The mean of runs' values, in the rounds that all of them have; of several, in a band from
    lowest to highest.
    """
    rounds = functools.reduce(np.intersect1d, [there for there, _ in of_runs])
    values = np.stack([values[np.isin(there, rounds)] for there, values in of_runs])
    ends = (values.min(axis=0), values.max(axis=0)) if len(values) > 1 else (None, None)
    return Line(name, number, rounds, values.mean(axis=0), *ends)


def spread_of(rounds: np.ndarray, values: np.ndarray) -> Line:
    """The median of each round, in a band from its smallest to its largest value."""
    numbers, starts = np.unique(rounds, return_index=True)
    groups = np.split(values, starts[1:])
    middle, low, high = (
        np.array([take(group) for group in groups]) for take in (np.median, np.min, np.max)
    )
    return Line("median", 0, numbers, middle, low, high)


def finite(values: np.ndarray) -> np.ndarray:
    """Values with a gap in place of NaN and infinity, which cannot be drawn."""
    return np.where(np.isfinite(values), values, np.nan)
