"""Say whether a run has learnt anything: compare its accuracy with the accuracy of a guess."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfed.clients.settings import Training
from rayfed.folder.summary import best_of
from rayfed.rounds.round import DIVERGED

# The normal quantile of a two-sided 99.9 % interval. It is so wide because a false alarm is worse
# than no alarm.
NORMAL = 3.29


def guess(labels: np.ndarray) -> float:
    """Return the accuracy of always answering the most frequent class.

    >>> guess(np.array([0, 1, 1, 2]))
    0.5
    """
    return float(np.bincount(labels).max() / len(labels))


def no_better_than_a_guess(
    rows: Sequence[Mapping[str, Any]], by_guess: float, num_examples: int, training: Training
) -> str:
    """Say why a run is no better than a guess, and what to try.

    Returns '' if the run is better, or if there are too few examples to tell. They are too few if
    by Wilson's interval a model half-way between a guess and no mistake could have this accuracy by
    chance. `rows` are the rows of `rounds.parquet`. `by_guess` is the accuracy of a guess on
    `num_examples` test examples.
    """
    best = best_of([dict(row) for row in rows])
    if best is None or by_guess == 1:
        return ""
    accuracies = [row["test_accuracy"] for row in rows if row["test_accuracy"] is not None]
    if accuracies[-1] > by_guess:
        return ""
    if highest(accuracies[-1], num_examples) >= (1 + by_guess) / 2:
        return ""
    answer = f"always answering the most frequent test class gives {by_guess:.1%}"
    if best["test_accuracy"] > by_guess:
        was = f"round {best['round']} had {best['test_accuracy']:.1%}"
        return (
            f"the last round is no better than a guess: {answer}; {was}; try a smaller train.lr "
            f"than {training.lr:g}, or more train.clients_per_round than "
            f"{training.clients_per_round}"
        )
    if any(dict(row.get("notes") or {}).get(DIVERGED) for row in rows):
        return (
            f"no round is better than a guess: {answer}; clients have diverged; try a smaller "
            f"train.lr than {training.lr:g}"
        )
    remedies = [f"a larger train.lr than {training.lr:g}"]
    remedies.append(f"more train.num_rounds than {training.num_rounds}")
    if training.optimizer == "sgd" and not training.momentum:
        remedies.append("train.momentum = 0.9")
    return f"no round is better than a guess: {answer}; try {', or '.join(remedies)}"


def highest(share: float, count: int) -> float:
    """Return the upper end of Wilson's 99.9 % interval of a share of `count` examples.

    >>> round(highest(0.5, 20), 2), round(highest(0.5, 2000), 2)
    (0.8, 0.54)
    """
    squared = NORMAL**2 / count
    middle = share + squared / 2
    half = NORMAL * math.sqrt(share * (1 - share) / count + squared / (4 * count))
    return (middle + half) / (1 + squared)
