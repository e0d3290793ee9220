"""Whether a run has learnt anything: its accuracy beside that of a guess."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfed.clients.settings import Training
from rayfed.folder.summary import best_of

# Of a two-sided 99.9 % interval: a false alarm is worse than none.
NORMAL = 3.29


def guess(labels: np.ndarray) -> float:
    """The share of test examples that one gets right by always answering their most frequent class.

    >>> guess(np.array([0, 1, 1, 2]))
    0.5
    """
    return float(np.bincount(labels).max() / len(labels))


def no_better_than_a_guess(
    rows: Sequence[Mapping[str, Any]], by_guess: float, num_examples: int, training: Training
) -> str:
    """Why a run is no better than a guess, and what to try; '' if it is, or if too few examples can
    tell.

    `rows` are those of `rounds.parquet`, `by_guess` the accuracy of a guess on so many test
    examples. Too few: a model half-way between a guess and no mistake would have this accuracy by
    chance, by Wilson's interval.
    """
    best = best_of([dict(row) for row in rows])
    if best is None or by_guess == 1:
        return ""
    last = [row for row in rows if row["test_accuracy"] is not None][-1]
    if last["test_accuracy"] > by_guess:
        return ""
    if highest(last["test_accuracy"], num_examples) >= (1 + by_guess) / 2:
        return ""
    answer = f"always answering the most frequent test class gives {by_guess:.1%}"
    if best["test_accuracy"] > by_guess:
        was = f"round {best['round']} had {best['test_accuracy']:.1%}"
        return (
            f"the last round is no better than a guess: {answer}; {was}; try a smaller train.lr "
            f"than {training.lr:g}, or more train.clients_per_round than "
            f"{training.clients_per_round}"
        )
    ways = [f"a larger train.lr than {training.lr:g}"]
    ways.append(f"more train.num_rounds than {training.num_rounds}")
    if training.optimizer == "sgd" and not training.momentum:
        ways.append("train.momentum = 0.9")
    return f"no round is better than a guess: {answer}; try {', or '.join(ways)}"


def highest(share: float, count: int) -> float:
    """The upper end of Wilson's 99.9 % interval of a share of so many.

    >>> round(highest(0.5, 20), 2), round(highest(0.5, 2000), 2)
    (0.8, 0.54)
    """
    squared = NORMAL**2 / count
    middle = share + squared / 2
    half = NORMAL * math.sqrt(share * (1 - share) / count + squared / (4 * count))
    return (middle + half) / (1 + squared)
