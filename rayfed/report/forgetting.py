"""A run's forgetting round by round, by each definition of `measures/forgetting.py`.

It is computed from what the run's tables hold. Shapes: `E` evaluated rounds, round 0 first; `C`
classes; `K` measured clients of a round.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from rayfed.measures import forgetting as defined

# Rounds, and their values.
Series = tuple[np.ndarray, np.ndarray]


def series_of(pairs: Iterable[tuple[int, float]]) -> Series:
    """Return the rounds and the values of pairs as two arrays.

    >>> series_of([(1, 0.5), (3, 0.25)])
    (array([1, 3]), array([0.5 , 0.25]))
    """
    rounds, values = [], []
    for round, value in pairs:
        rounds.append(round)
        values.append(value)
    return np.array(rounds), np.array(values)


def by_round(
    rounds: np.ndarray,
    accuracy: np.ndarray,
    seen: np.ndarray,
    eval_every: int,
    clients: Iterable[tuple[int, np.ndarray]],
    after: int = 0,
) -> dict[str, Series]:
    """Return for each definition the rounds after `after` that have a value, and the values.

    Values are fractions of 1. A definition without a value is left out. `rounds` (E,); the global
    model's class `accuracy` (E, C); `seen` (E, C) images of a round's clients; `clients` yields
    rounds, each with the accuracies (K, C) of its measured clients. Of the rounds before, only
    multiples of `eval_every` can be a peak.
    """
    trained = rounds > 0
    rounds = rounds[trained]
    accuracy = accuracy[trained]
    learnt = seen[trained] > 0
    best = peaks(rounds, accuracy, eval_every)
    later = range(max(1, int(np.searchsorted(rounds, after, side="right"))), len(rounds))
    values: dict[str, list[tuple[int, float]]] = {
        "peak": [],
        "round": [],
        "continual": [],
        "local": [],
        "aggregation": [],
    }
    for i in later:
        peak = defined.peak(best[i - 1], accuracy[i])
        dropped = defined.dropped(accuracy[i - 1], accuracy[i])
        continual = defined.continual(best[i - 1], accuracy[i], learnt[i])
        values["peak"].append((rounds[i], peak))
        values["round"].append((rounds[i], dropped))
        values["continual"].append((rounds[i], continual))
    of_round = dict(zip(rounds.tolist(), accuracy, strict=True))
    for round, of_clients in clients:
        if round - 1 in of_round:
            values["local"].append((round, defined.local(of_round[round - 1], of_clients)))
        if round in of_round:
            values["aggregation"].append((round, defined.aggregation(of_clients, of_round[round])))
    series = {}
    for name, pairs in values.items():
        known = [pair for pair in pairs if np.isfinite(pair[1])]
        if known:
            series[name] = series_of(known)
    return series


def peaks(rounds: np.ndarray, accuracy: np.ndarray, eval_every: int) -> np.ndarray:
    """Return the best accuracy of each class (E, C) up to each round; nan before there is any.

    Only the rounds that are multiples of `eval_every` count.
    """
    counts = (rounds % eval_every == 0)[:, None]
    return np.fmax.accumulate(np.where(counts, accuracy, np.nan))


def client_accuracies(
    cells: Mapping[str, np.ndarray], num_classes: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each round with measured clients, and their models' class accuracies (K, C).

    A class without test examples is nan. `cells` are those of the confusion matrices, as
    `folder.tables.confusions` returns them.
    """
    of_clients = {name: column[cells["client"] >= 0] for name, column in cells.items()}
    for round in np.unique(of_clients["round"]).tolist():
        rows = {name: column[of_clients["round"] == round] for name, column in of_clients.items()}
        clients, index = np.unique(rows["client"], return_inverse=True)
        places = index * num_classes + rows["class"]
        size = len(clients) * num_classes
        right = np.bincount(places, rows["count"] * (rows["class"] == rows["predicted"]), size)
        total = np.bincount(places, rows["count"], size)
        shares = np.divide(right, total, out=np.full(len(total), np.nan), where=total > 0)
        yield round, shares.reshape(len(clients), num_classes)
