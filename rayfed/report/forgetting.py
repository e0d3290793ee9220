"""A run's forgetting, by each definition of `losses/forgetting.py`: from its tables, so also of old runs.

Shapes: `E` evaluated rounds after round 0, `C` classes, `K` measured clients of a round.
"""

from collections.abc import Iterator

import numpy as np

from rayfed.folder.read import Run, confusions
from rayfed.losses import forgetting as defined
from rayfed.report.forms import LAST

Series = tuple[np.ndarray, np.ndarray]  # rounds, and their values


def by_round(run: Run) -> dict[str, Series]:
    """By name of a definition: the rounds that have a value, and the values, as fractions of 1.

    Rounds before are evaluated ones, of which only those at multiples of `train.eval_every` can be a peak.
    """
    after = run.class_rounds > 0
    rounds, accuracy, trained = run.class_rounds[after], run.class_accuracy[after], run.class_seen[after] > 0
    counts = (rounds % run.eval_every == 0)[:, None]
    best = np.fmax.accumulate(np.where(counts, accuracy, np.nan)) if len(rounds) else accuracy
    later = range(1, len(rounds))
    values = {
        "peak": [(rounds[i], defined.peak_from(best[i - 1], accuracy[i])) for i in later],
        "round": [(rounds[i], defined.dropped(accuracy[i - 1], accuracy[i])) for i in later],
        "continual": [(rounds[i], defined.continual(best[i - 1], accuracy[i], trained[i])) for i in later],
        "local": [],
        "aggregation": [],
    }
    of_round = dict(zip(rounds.tolist(), accuracy, strict=True))
    for round, clients in client_accuracies(run):
        if round - 1 in of_round:
            values["local"].append((round, defined.local(of_round[round - 1], clients)))
        if round in of_round:
            values["aggregation"].append((round, defined.aggregation(clients, of_round[round])))
    known = {name: [pair for pair in pairs if np.isfinite(pair[1])] for name, pairs in values.items()}
    return {name: (np.array([r for r, _ in of]), np.array([v for _, v in of])) for name, of in known.items() if of}


def client_accuracies(run: Run) -> Iterator[tuple[int, np.ndarray]]:
    """Each round with measured clients, and their models' class accuracies (K, C); nan without test examples."""
    table = confusions(run)
    of_clients = {name: column[table["client"] >= 0] for name, column in table.items()}
    number = len(run.classes)
    for round in np.unique(of_clients["round"]).tolist():
        rows = {name: column[of_clients["round"] == round] for name, column in of_clients.items()}
        clients, index = np.unique(rows["client"], return_inverse=True)
        cells = index * number + rows["class"]
        right = np.bincount(cells, rows["count"] * (rows["class"] == rows["predicted"]), len(clients) * number)
        total = np.bincount(cells, rows["count"], len(clients) * number)
        shares = np.divide(right, total, out=np.full(len(total), np.nan), where=total > 0)
        yield round, shares.reshape(len(clients), number)


def numbers(run: Run) -> dict[str, float]:
    """The values of `KEYS` in percent that a run has: of the last round with a value, and the mean of the last."""
    found = {}
    for name, (_, values) in by_round(run).items():
        found[f"forgetting.{name}"] = 100 * float(values[-1])
        found[f"forgetting.{name}.last_{LAST}"] = 100 * float(values[-LAST:].mean())
    return found
