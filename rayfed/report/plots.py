"""What the page draws: of one run or of groups of runs, as the figures of `charts`. Shapes: `T` rounds, `C` classes."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from rayfed.base.errors import InputError
from rayfed.folder.read import MOST_ACROSS, Columns, Group, Run, dealt, grouped, of_rounds, shorten
from rayfed.report import charts
from rayfed.report.charts import Chart, Line
from rayfed.report.measured import DISTANCES, WHEN, WHERE, by_round, drifts, noted

BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def global_model(groups: Sequence[Group]) -> list[Chart]:
    """Accuracy on the test examples beside that of a guess, forgetting and loss, by round."""
    runs = [run for group in groups for run in group.runs]
    chance = {1 / len(run.classes) for run in runs if run.classes}
    best = runs[0].summary.get("best") if len(runs) == 1 else None
    marked = (best["round"], 100 * best["test_accuracy"], "best") if best else None
    losses = curves(groups, "test_loss")
    if len(groups) == 1:
        losses = [losses[0]._replace(name="test"), curves(groups, "train_loss", first=1)[0]._replace(name="training")]
        losses[1] = losses[1]._replace(number=1)
    accuracy = curves(groups, "test_accuracy", 100)
    lost = curves(groups, "forgetting", 100, first=1)
    rules = [(100 * share, "chance") for share in sorted(chance)]
    return [
        charts.lines("accuracy", "Accuracy", "test accuracy (%)", accuracy, "%", rules=rules, marked=marked),
        charts.lines("forgetting", "Forgetting", "forgetting (%)", lost, "%", rules=[(0.0, "")]),
        charts.lines("loss", "Loss", "mean loss per example (nats)", losses, digits=3),
    ]


def curves(groups: Sequence[Group], column: str, factor: float = 1, first: int = 0) -> list[Line]:
    """A column by round, from the round `first` on: a line for each group.

    Of several runs, the mean, in a band from the lowest to the highest run. A round has a point where all runs of the
    group were evaluated.
    """
    found = []
    for number, (group, name) in enumerate(zip(groups, shorten(groups), strict=True)):
        there = np.all([run.evaluated | (column == "train_loss") for run in group.runs], axis=0)
        rounds = first + np.flatnonzero(there[first:])
        values = np.stack([finite(run.rounds[column][rounds]) * factor for run in group.runs])  # (runs, points)
        found.append(band(name, number, rounds, values))
    return found


def band(name: str, number: int, rounds: np.ndarray, values: np.ndarray) -> Line:
    """The mean of values (runs, points), and from the lowest to the highest if there are several."""
    ends = (values.min(axis=0), values.max(axis=0)) if len(values) > 1 else (None, None)
    return Line(name, number, rounds, values.mean(axis=0), *ends)


def class_accuracy(run: Run) -> Chart:
    """Without round 0: what an untrained model says is nothing learnt."""
    rounds = [str(number) for number in run.class_rounds[1:]]
    values = 100 * run.class_accuracy[1:].T
    x, unit = "round", "accuracy (%)"
    return charts.heat("classes", "Class accuracy", values, run.classes, rounds, x, unit, top=100.0, slider=True)


def partition(cells: Columns, classes: Sequence[str], num_clients: int) -> Chart:
    """The examples of each class that each client holds, clients across; a blank is none."""
    most = min(MOST_ACROSS, max(charts.MOST_CELLS // len(classes), 2))
    counts, together = dealt(cells, len(classes), num_clients, most)
    firsts = range(0, num_clients, together)
    names = [str(n) if together == 1 else f"{n} to {min(n + together, num_clients) - 1}" for n in firsts]
    unit = "examples" if together == 1 else f"examples, mean of {together} clients"
    drawn = np.where(counts, counts, np.nan)
    return charts.heat("partition", "Partition", drawn, classes, names, x="client", unit=unit, faint=True)


def clients(run: Run) -> list[Chart]:
    """What is known of the clients: their losses, the terms of these, who answered, how often each took part."""
    loss = spread_of(run.clients["round"], finite(run.clients["train_loss"]))
    found = [charts.lines("training", "Training loss", "mean loss per step (nats)", [loss], digits=3, zero=True)]
    terms = {name: line for name, line in run.notes.items() if name.startswith("loss.")}
    if len(terms) > 1:
        drawn = [
            Line(name.removeprefix("loss."), number, rounds, finite(means))
            for number, (name, (rounds, means)) in enumerate(terms.items())
        ]
        found.append(charts.lines("terms", "Terms of the loss", "mean per step (nats)", drawn, digits=3, zero=True))
    times = np.bincount(np.bincount(run.clients["client"], minlength=run.num_clients))
    x = "rounds in which a client took part"
    return [*found, *answers(run), charts.bars("participation", "Participation", x, "number of clients", times)]


def answers(run: Run) -> Iterator[Chart]:
    """Of the [clients] table of the job: how the chosen clients answered, and the virtual time."""
    noted = of_rounds(run.folder, "clients.")
    counts = [name for name in ("answered", "dropped", "late") if name in noted]
    if counts:
        drawn = [Line(name, number, *noted[name]) for number, name in enumerate(counts)]
        yield charts.lines("answers", "Chosen clients", "clients per round", drawn, digits=0, zero=True)
    if "virtual_seconds" in noted:
        rounds, seconds = noted["virtual_seconds"]
        total = [Line("so far", 0, rounds, np.cumsum(seconds))]
        yield charts.lines("virtual", "Virtual time", "virtual seconds so far", total, zero=True)


def costs(run: Run) -> list[Chart]:
    """Seconds and bytes by round."""
    rounds = np.arange(len(run.rounds["round"]))[1:]
    taken = Line("round", 0, rounds, finite(run.rounds["seconds"][1:]))
    found = [charts.lines("seconds", "Time", "seconds per round", [taken], digits=2, zero=True)]
    if len(run.clients["round"]):
        client = spread_of(run.clients["round"], finite(run.clients["seconds"]))
        found.append(
            charts.lines("client-seconds", "Time of clients", "seconds per client", [client], digits=2, zero=True)
        )
    most = max((float(np.nanmax(run.rounds[name], initial=1.0)) for name in ("bytes_down", "bytes_up")), default=1.0)
    size, unit = next(((size, unit) for size, unit in BYTES if most >= size), BYTES[-1])
    names = {"bytes_down": "to clients", "bytes_up": "back"}
    sent = [Line(n, i, rounds, finite(run.rounds[c][1:] / size)) for i, (c, n) in enumerate(names.items())]
    return [*found, charts.lines("bytes", "Sent", f"{unit} per round", sent, f" {unit}", zero=True)]


def local_models(run: Run) -> list[Chart]:
    """The figures of measured clients that the run has numbers for."""
    found: list[Chart] = []
    keys = {"accuracy": "all classes", **WHERE}
    for key, words in keys.items() if any(name.startswith("local.") for name in run.notes) else ():
        with suppress(InputError):  # it says what is missing
            columns = noted([run], "local", *(f"local.{when}.{key}" for when in WHEN))
            drawn = []
            for number, (when, name) in enumerate(WHEN.items()):
                values = by_round(columns, f"local.{when}.{key}", 100)
                drawn.append(Line(name, number, values.rounds, values.mean, *values.band(100)))
            title = f"Local models: {words}"
            found.append(charts.lines(f"local-{key}".replace("_", "-"), title, "accuracy (%)", drawn, "%"))
    with suppress(InputError):
        found.append(divergence(run))
    return found


def divergence(run: Run) -> Chart:
    """How far clients move in weights, against how far the global model is from their labels (FedNTD Fig. 8)."""
    columns = drifts(grouped([run])[0])
    values = (columns[name] for name in DISTANCES)
    places = zip(columns["client"].tolist(), columns["round"].tolist(), *values, strict=True)
    points = [(f"client {client}, round {n}", *place, n) for client, n, *place in places]
    x, y = DISTANCES.values()
    return charts.dots("drift", "Drift of the local models", x, y, points)


def local_groups(groups: Sequence[Group]) -> Iterator[Chart]:
    """In-local and out-local accuracy of groups by round: means over clients, then over runs, in their range."""
    for when, model in {"before": "the global model", "after": "clients' models"}.items():
        for where, words in WHERE.items():
            name, drawn = f"local.{when}.{where}", []
            for number, (group, title) in enumerate(zip(groups, shorten(groups), strict=True)):
                with suppress(InputError):
                    of_runs = [by_round(noted([run], "local", name), name, 100) for run in group.runs]
                    rounds = of_runs[0].rounds[
                        np.all([np.isin(of_runs[0].rounds, of.rounds) for of in of_runs], axis=0)
                    ]
                    values = np.stack([of.mean[np.isin(of.rounds, rounds)] for of in of_runs])
                    drawn.append(band(title, number, rounds, values))
            if drawn:
                key = f"{when}-{where}".replace("_", "-")
                yield charts.lines(key, f"{words.capitalize()}, {model}", "accuracy (%)", drawn, "%")


def spread_of(rounds: np.ndarray, values: np.ndarray) -> Line:
    """The median of each round, in a band from its smallest to its largest value."""
    numbers, starts = np.unique(rounds, return_index=True)
    groups = np.split(values, starts[1:])
    middle, low, high = (np.array([take(group) for group in groups]) for take in (np.median, np.min, np.max))
    return Line("median", 0, numbers, middle, low, high)


def finite(values: np.ndarray) -> np.ndarray:
    """Values with a gap in place of NaN and infinity, which cannot be drawn."""
    return np.where(np.isfinite(values), values, np.nan)
