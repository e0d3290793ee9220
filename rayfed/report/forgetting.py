"""A run's forgetting round by round, by each definition of `measures/forgetting.py`, from what its
tables hold.

Shapes: `E` evaluated rounds, round 0 first; `C` classes; `K` measured clients of a round.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

# Rounds, and their values.
Series = tuple[np.ndarray, np.ndarray]


def by_round(
    rounds: np.ndarray,
    accuracy: np.ndarray,
    seen: np.ndarray,
    eval_every: int,
    clients: Iterable[tuple[int, np.ndarray]],
    after: int = 0,
) -> dict[str, Series]:
    """By name of a definition: the rounds after `after` that have a value, and the values, as
    fractions of 1.

    `rounds` (E,); the global model's class `accuracy` (E, C); `seen` (E, C) images of a round's
    clients; by round, its measured `clients` have accuracies (K, C). Of the rounds before, only
    multiples of `eval_every` can be a peak.
    """
    # Brings torch, which a reader of tables may not need.
    from rayfed.measures import forgetting as defined

    trained = rounds > 0
    rounds, accuracy, learnt = rounds[trained], accuracy[trained], seen[trained] > 0
    best = peaks(rounds, accuracy, eval_every)
    later = range(max(1, int(np.searchsorted(rounds, after, side="right"))), len(rounds))
    values = {
        "peak": [(rounds[i], defined.peak(best[i - 1], accuracy[i])) for i in later],
        "round": [(rounds[i], defined.dropped(accuracy[i - 1], accuracy[i])) for i in later],
        "continual": [
            (rounds[i], defined.continual(best[i - 1], accuracy[i], learnt[i])) for i in later
        ],
        "local": [],
        "aggregation": [],
    }
    of_round = dict(zip(rounds.tolist(), accuracy, strict=True))
    for round, of_clients in clients:
        if round - 1 in of_round:
            values["local"].append((round, defined.local(of_round[round - 1], of_clients)))
        if round in of_round:
            values["aggregation"].append((round, defined.aggregation(of_clients, of_round[round])))
    known = {
        name: [pair for pair in pairs if np.isfinite(pair[1])] for name, pairs in values.items()
    }
    return {
        name: (np.array([r for r, _ in of]), np.array([v for _, v in of]))
        for name, of in known.items()
        if of
    }


def peaks(rounds: np.ndarray, accuracy: np.ndarray, eval_every: int) -> np.ndarray:
    """The best accuracy of each class (E, C) up to each round, of the multiples of `eval_every`;
    nan before any.
    """
    counts = (rounds % eval_every == 0)[:, None]
    return np.fmax.accumulate(np.where(counts, accuracy, np.nan))


def client_accuracies(
    cells: Mapping[str, np.ndarray], num_classes: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Each round with measured clients, and their models' class accuracies (K, C); nan without test
    examples.

    `cells` are those of the confusion matrices, as `report.read.confusions` gives them.
    """
    of_clients = {name: column[cells["client"] >= 0] for name, column in cells.items()}
    for round in np.unique(of_clients["round"]).tolist():
        rows = {name: column[of_clients["round"] == round] for name, column in of_clients.items()}
        clients, index = np.unique(rows["client"], return_inverse=True)
        places = index * num_classes + rows["class"]
        right = np.bincount(
            places, rows["count"] * (rows["class"] == rows["predicted"]), len(clients) * num_classes
        )
        total = np.bincount(places, rows["count"], len(clients) * num_classes)
        shares = np.divide(right, total, out=np.full(len(total), np.nan), where=total > 0)
        yield round, shares.reshape(len(clients), num_classes)
