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

from rayfed.measures import metrics
from rayfed.report.forms import DOMAIN
from rayfed.report.measured import over_clients
from rayfed.report.read import Run, of_clients
from rayfed.report.table import accuracies, figures

# Metrics that no run has, and why.
NOWHERE = {
    r"alignment_fc128_\w+": (
        "the `cnn` has a single hidden layer, of width 512: width 128 has no counterpart"
    ),
    r"local_class_accuracy_\d+": "which client it was is not known",
}


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
    reason = without(number.metric)
    if reason:
        return Ours(math.nan, reason)
    for pattern, take in MEASURES.items():
        match = re.fullmatch(pattern, number.metric)
        if match:
            return take(run, number, baseline, number.stat or figure, *match.groups())
    raise AssertionError("`without` has a reason for every other metric")


def without(metric: str) -> str:
    """Return why no run has a metric; '' if a run has it."""
    for pattern, reason in NOWHERE.items():
        if re.fullmatch(pattern, metric):
            return reason
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
    """Return a class's accuracy in the round that the paper's note names, or else in the last."""
    named = re.search(r"after round (\d+)", number.note)
    wanted = int(named[1]) if named else int(run.class_rounds[-1])
    place = np.flatnonzero(run.class_rounds == wanted)
    if not len(place) or int(k) >= len(run.classes):
        return Ours(math.nan, f"there is no accuracy of this class after round {wanted}")
    return Ours(100 * float(run.class_accuracy[place[0], int(k)]))


def _alignment(run: Run, number: Theirs, baseline: Run | None, stat: str, model: str) -> Ours:
    """Return the alignment of the features before the head (FedNTD, Table 2).

    It is the mean over clients, or that of the global model.
    """
    notes = run.notes if model == "local" else run.round_notes
    names = sorted(name for name in notes if name.startswith("drift.alignment"))
    chosen = names[0] if len(names) == 1 else "drift.alignment"
    if chosen not in names:
        has = f": the run has {', '.join(names)}" if names else ""
        text = f'measure = ["drift"], without measure_layers, records the alignment{has}'
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
    r"alignment_fc512_(local|global)": _alignment,
    r"test_accuracy_(\w+)": _domain,
    r"personalised_accuracy": _personalised,
}
