"""The figure of clients' models during their training, by local epoch.

It is drawn from the notes of `measure = ["epochs"]`.
"""

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from rayfed.base.errors import InputError, did_you_mean
from rayfed.folder.tables import Columns
from rayfed.papers.panels import apart, legend, line, panels, span, wide
from rayfed.report.measured import measured_on, over_clients, unmeasured
from rayfed.report.read import Group, Run, of_clients
from rayfed.report.words import listed

# A note: the epoch, which is a whole number except for an epoch that was cut short, and what it is.
NOTE = re.compile(r"epochs\.(\d+(?:\.\d+)?)\.(\w+)")
WORDS = {
    "accuracy": "accuracy, all classes (%)",
    "in_local": "accuracy, own classes (%)",
    "out_local": "accuracy, other classes (%)",
    "divergence": "weight distance (L2)",
    "divergence_l1": "weight distance (L1)",
    "logit_kl": "logit distance (KL)",
    "logit_distance": "logit distance (L2)",
    "feature_distance": "feature distance (L2)",
}
# These are fractions of 1, which are drawn in percent.
SHARES = ("accuracy", "in_local", "out_local")
# What is drawn if nothing is asked for: FedNTD's Fig. 6.
USUAL = ("in_local", "out_local")


def epochs(
    runs: Sequence[Run],
    of: str | None = None,
    round: int | None = None,
    width: float | None = None,
) -> Figure:
    """Draw numbers of clients' models by local epoch, in a round or in the last measured one.

    `of` is one of `WORDS`. Without it, there are two panels: the accuracy on a client's own classes
    and on the others (FedNTD Fig. 6). The distances are FedCSD's Fig. 1a and 1b. A line is the mean
    over the clients of a round, in a band of a standard deviation.
    """
    if of is not None and of not in WORDS:
        raise InputError(f"--of {of}: there is no such number by epoch{did_you_mean(of, WORDS)}")
    keys = USUAL if of is None else (of,)
    groups = apart(runs)
    rounds = {name: round_of(group, round) for name, group in groups.items()}
    counts: list[int] = []
    inches = width or (wide(2) if len(keys) > 1 else 5.5)
    figure, axes = panels("", 1, len(keys), 3.0, inches)
    for panel, key in zip(axes[0], keys, strict=True):
        is_share = key in SHARES
        for number, (name, group) in enumerate(groups.items()):
            columns = numbers_of(group, key, rounds[name])
            counts += np.unique(columns["round"], return_counts=True)[1].tolist()
            values = over_clients(columns, key, 100 if is_share else 1)
            band = values.band(100 if is_share else np.inf)
            line(panel, number, values.rounds, values.mean, band, name, len(groups))
        panel.set(xlabel="local epoch", ylabel=WORDS[key])
        panel.set_ylim(*((0, 100) if is_share else (0, None)))
    figure.set_label(caption_of(runs, rounds, counts))
    legend(figure, axes[0, 0], axes[0, 0].lines)
    return figure


def caption_of(runs: Sequence[Run], rounds: dict[str, int], counts: Sequence[int]) -> str:
    """Return the caption: which rounds, how many clients, and on how many images."""
    numbers = sorted(set(rounds.values()))
    words = "round" if len(numbers) == 1 else "rounds"
    clients = "client" if max(counts) == 1 else "clients"
    return (
        f"Local models during training, in {words} {listed(numbers)}: mean and standard deviation "
        f"of n = {span(counts)} {clients} on {span(measured_on(run) for run in runs)} test examples"
    )


def names_of(run: Run, key: str) -> dict[float, str]:
    """Return the names of the notes that a run has of a number, by epoch."""
    names = {}
    for name in run.notes:
        match = NOTE.fullmatch(name)
        if match and match[2] == key:
            names[float(match[1])] = name
    return dict(sorted(names.items()))


def round_of(group: Group, round: int | None) -> int:
    """Return the round to draw: the given one, or the last in which all seeds were measured.

    Raises `InputError` if there is none.
    """
    rounds = set.intersection(*(_measured_rounds(run) for run in group.runs))
    if round is None and rounds:
        return max(rounds)
    if round not in rounds:
        has = listed(sorted(rounds))
        raise InputError(
            f"--round {round}: the epochs of '{group.runs[0].folder}' were measured in the rounds "
            f"{has}"
        )
    return round


def _measured_rounds(run: Run) -> set[int]:
    """Return the rounds whose epochs were measured; raises `InputError` if there are none."""
    rounds: set[int] = set()
    for name in names_of(run, "accuracy").values():
        rounds |= set(run.notes[name][0].tolist())
    if not rounds:
        why = unmeasured(run, "epochs", "numbers by local epoch")
        raise InputError(
            f"{why}; the training stays bit-identical. `rayfed replay` and `rayfed verify` cannot "
            "add these numbers: they play what the run's job asks for"
        )
    return rounds


def numbers_of(group: Group, key: str, round: int) -> Columns:
    """Return a number of the clients of a round, with its epoch in the column `round`.

    So `over_clients` has a mean for each epoch. Raises `InputError` if no client has the number.
    """
    at: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for run in group.runs:
        for epoch, name in names_of(run, key).items():
            columns = of_clients(run.folder, name)
            found = columns[name][columns["round"] == round]
            at.append(np.full(len(found), epoch))
            values.append(found)
    if not at:
        raise InputError(
            f"--of {key}: '{group.runs[0].folder}' has no such number by epoch, as its model gives "
            "no features"
        )
    return {"round": np.concatenate(at), key: np.concatenate(values)}
