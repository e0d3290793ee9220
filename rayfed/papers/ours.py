"""Our number for each number of a paper, taken from a run.

Accuracies are in percent. Forgetting and alignment are fractions of 1, as in a paper's
`results.csv`.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayfed.folder.tables import confusions, matrices
from rayfed.measures import metrics
from rayfed.report.forms import DOMAIN
from rayfed.report.measured import over_clients
from rayfed.report.read import Run, of_clients
from rayfed.report.table import accuracies, figures

# The layer of a `cnn` with a second hidden layer, by its width (FedNTD, Table 2).
LAYERS = {"512": "features.8", "128": "features.10"}


@dataclass(frozen=True)
class Theirs:
    """A paper's number for a cell of its grid, as the paper prints it."""

    metric: str
    value: str
    # Empty if the paper prints none.
    spread: str
    # The round of the number: best, last, or empty if the paper does not say it.
    stat: str
    note: str


class Ours(NamedTuple):
    """The number of a run; it is nan if there is none, and the note says why."""

    value: float
    note: str = ""


def ours(run: Run, number: Theirs, baseline: Run | None, figure: str = "last") -> Ours:
    """Return our number for a paper's number.

    Where the paper does not say of which round it is, `figure` does.
    """
    for pattern, take in MEASURES.items():
        match = re.fullmatch(pattern, number.metric)
        if match:
            return take(run, number, baseline, number.stat or figure, *match.groups())
    return Ours(math.nan, without(number.metric))


def without(metric: str) -> str:
    """Return why no run has a metric; '' if a run has it."""
    measured = any(re.fullmatch(pattern, metric) for pattern in MEASURES)
    return "" if measured else f"'{metric}' is not a measure of rayfed"


def _figure(run: Run, number: Theirs, baseline: Run | None, stat: str) -> Ours:
    """Return an accuracy or the forgetting, as `rayfed table` has it."""
    unsaid = ""
    if not number.stat:
        words = stat.replace("_", " ")
        unsaid = f"the paper does not say of which round; ours is the {words}"
    if number.metric == "forgetting":
        lost = figures(run).get("forgetting", math.nan)
        return Ours(lost / 100, unsaid)
    return Ours(figures(run)[stat], unsaid)


def _rounds_to_target(run: Run, number: Theirs, baseline: Run | None, stat: str) -> Ours:
    """Return the rounds to the last accuracy of FedAvg (FedSSD, Table 1).

    FedAvg itself takes all of its rounds.
    """
    if baseline is None:
        return _no_baseline()
    if baseline is run:
        return Ours(float(np.flatnonzero(run.evaluated)[-1]))
    target = accuracies(baseline)[baseline.evaluated[1:]][-1]
    reached = metrics.rounds_to_target(accuracies(run), target)
    return _not_reached(target, "last") if reached is None else Ours(float(reached))


def _speed_up(run: Run, number: Theirs, baseline: Run | None, stat: str) -> Ours:
    """Return the speed-up in rounds to the best accuracy of FedAvg (FedLMD, Table 3)."""
    if baseline is None:
        return _no_baseline()
    target = np.nanmax(accuracies(baseline))
    faster = metrics.speed_up(accuracies(run), accuracies(baseline), target)
    return _not_reached(target, "best") if faster is None else Ours(faster)


def _no_baseline() -> Ours:
    """Say that there is no run of FedAvg to compare with."""
    text = (
        "it needs the run of fedavg in this setting, with the same data, partition, seed and "
        "number of rounds"
    )
    return Ours(math.nan, text)


def _not_reached(target: float, round: str) -> Ours:
    """Say that a run does not reach the best or the last accuracy of FedAvg."""
    return Ours(math.nan, f"FedAvg's {round} accuracy, {100 * target:.2f} %, is not reached")


def _class_accuracy(run: Run, number: Theirs, baseline: Run | None, stat: str, k: str) -> Ours:
    """Return a class's accuracy in the round that the paper's note names, or else in the last.

    A model that the note calls initial is that of round 0.
    """
    named = re.search(r"after round (\d+)", number.note)
    wanted = int(named[1]) if named else int(run.class_rounds[-1])
    if "initial model" in number.note:
        wanted = 0
    place = np.flatnonzero(run.class_rounds == wanted)
    if not len(place) or int(k) >= len(run.classes):
        return Ours(math.nan, f"there is no accuracy of this class after round {wanted}")
    return Ours(100 * float(run.class_accuracy[place[0], int(k)]))


def _local_class_accuracy(
    run: Run, number: Theirs, baseline: Run | None, stat: str, k: str
) -> Ours:
    """Return the accuracy of a class of the model that the first measured client has trained last.

    It is that of FedCAD, Fig. 2.
    """
    table = confusions(run.folder, run.classes)
    of_clients = table["client"] >= 0
    if not of_clients.any() or int(k) >= len(run.classes):
        return Ours(math.nan, 'measure = ["confusion"] records it')
    round = int(table["round"][of_clients].max())
    client = int(table["client"][of_clients & (table["round"] == round)].min())
    matrix = matrices(table, round, len(run.classes))[client]
    accuracy = 100 * float(metrics.class_accuracy(matrix)[int(k)])
    return Ours(accuracy, f"client {client} in round {round}")


def _alignment(
    run: Run, number: Theirs, baseline: Run | None, stat: str, width: str, model: str
) -> Ours:
    """Return the alignment of a hidden layer (FedNTD, Table 2), whose width is that of a `cnn`.

    It is the mean over clients, or that of the global model. A run that has measured one layer
    alone has measured that of 512.
    """
    notes = run.notes if model == "local" else run.round_notes
    names = sorted(name for name in notes if name.startswith("drift.alignment"))
    chosen = f"drift.alignment.{LAYERS[width]}"
    if chosen not in names and width == "512":
        chosen = names[0] if len(names) == 1 else "drift.alignment"
    if chosen not in names:
        has = f": the run has {', '.join(names)}" if names else ""
        text = (
            f'measure = ["drift"] with measure_layers = ["{LAYERS[width]}"] records the alignment '
            f"of this layer{has}"
        )
        return Ours(math.nan, text)
    if model == "local":
        return Ours(float(over_clients(of_clients(run.folder, chosen), chosen).mean[-1]))
    return Ours(float(notes[chosen][1][-1]))


def _domain(run: Run, number: Theirs, baseline: Run | None, stat: str, domain: str) -> Ours:
    """Return the accuracy on a domain in the last evaluated round (FedCSD, Table II).

    The domain "mean" is the mean over the domains, whatever their sizes.
    """
    by_domain = {}
    for key, value in figures(run).items():
        if key.startswith(DOMAIN):
            by_domain[key.removeprefix(DOMAIN).casefold()] = value
    values = [value for name, value in by_domain.items() if domain in ("mean", name)]
    if not values:
        has = ", ".join(by_domain) or "none"
        text = f"there is no accuracy by domain for it; the test data have these domains: {has}"
        return Ours(math.nan, text)
    unsaid = "" if number.stat else "the paper does not say of which round; ours is the last"
    return Ours(float(np.mean(values)), unsaid)


def _personalised(run: Run, number: Theirs, baseline: Run | None, stat: str) -> Ours:
    """Return the accuracy of the clients' models, as the mean of the last measured rounds.

    PFLlib prints the best of all its rounds.
    """
    value = figures(run).get("personalised", math.nan)
    if math.isnan(value):
        return Ours(value, 'measure = ["local"] records it')
    return Ours(value, "the mean of the last ten measured")


MEASURES: dict[str, Callable[..., Ours]] = {
    r"test_accuracy|forgetting": _figure,
    r"rounds_to_target": _rounds_to_target,
    r"speed_up": _speed_up,
    r"class_accuracy_(\d+)": _class_accuracy,
    r"local_class_accuracy_(\d+)": _local_class_accuracy,
    r"alignment_fc(512|128)_(local|global)": _alignment,
    r"test_accuracy_(\w+)": _domain,
    r"personalised_accuracy": _personalised,
}
