"""A round: what is known of it when it is finished."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from rayfed.clients.sampling import State
from rayfed.measures import metrics
from rayfed.measures.metrics import Evaluation
from rayfed.methods.part import Held
from rayfed.tensors.weights import Weights

# A handle to one client's memory: the workers make it and read it.
Memory = Any
# A kind of hardware, with its settings: two that are equal compute the same bits.
HardwareKind = dict[str, str]
# The note of a client whose training has diverged, and of a round with their number, if a part
# skips them.
DIVERGED = "diverged"


@dataclass(frozen=True)
class ClientRow:
    """One client in one round, as `clients.parquet` has it."""

    client: int
    num_examples: int
    # The mean over the steps; NaN for a client that has diverged and is skipped.
    train_loss: float
    seconds: float
    node: str
    # Each part's term of the loss, and what parts noted: means over the steps that have them; and
    # measures.
    notes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Round:
    """A round that is averaged, with all that the next round needs.

    Where the job asks for an evaluation of the round, it has that once the engine yields it.
    """

    # 0 is the initial model.
    round: int
    # The weights that the next round sends.
    weights: Weights
    # By slot, the part in force, with its state on the server.
    held: dict[str, Held]
    # By client, the handle of its memory, of the clients that have one.
    memories: Mapping[int, Memory]
    # It is None in a round that is not evaluated, as are all numbers that come from it.
    evaluation: Evaluation | None
    # The best accuracy of each class so far, (C,), in the rounds that count (`engine.py`).
    peak: np.ndarray
    forgetting: float | None
    clients: tuple[ClientRow, ...] = ()
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    # The numbers that belong to no single client.
    notes: Mapping[str, float] = field(default_factory=dict)
    # By client, its confusion, int64 (C, C), where it was measured.
    confusions: Mapping[int, np.ndarray] = field(default_factory=dict)
    # The weights that the method evaluates in place of `weights`.
    shown: Weights | None = None
    # What the rule of `clients.sampling` has learned so far; None before it has learned anything.
    sampling: State | None = None

    def without_results(self) -> Round:
        """Return the round with what the next round needs alone, without what was found in it."""
        return replace(
            self,
            evaluation=None,
            forgetting=None,
            clients=(),
            seconds=0.0,
            bytes_down=0,
            bytes_up=0,
            notes={},
            confusions={},
        )

    @property
    def evaluated(self) -> Weights:
        """Return the global model as the method evaluates it."""
        return self.weights if self.shown is None else self.shown

    @property
    def test_accuracy(self) -> float | None:
        """Return the share of test images with the right answer; None without an evaluation."""
        return metrics.accuracy(self.evaluation.confusion) if self.evaluation else None

    @property
    def test_loss(self) -> float | None:
        """Return the mean loss over the test images; None without an evaluation."""
        return (
            self.evaluation.loss / int(self.evaluation.confusion.sum()) if self.evaluation else None
        )

    @property
    def macro_f1(self) -> float | None:
        """Return the mean of the classes' F1 scores; None without an evaluation."""
        return metrics.macro_f1(self.evaluation.confusion) if self.evaluation else None

    @property
    def calibration_error(self) -> float | None:
        """Return the expected calibration error; None without an evaluation."""
        if self.evaluation is None:
            return None
        return metrics.calibration_error(
            self.evaluation.overconfidence, int(self.evaluation.confusion.sum())
        )

    @property
    def train_loss(self) -> float | None:
        """Return the clients' mean losses over their steps, weighted by images.

        A client that has diverged is left out. Return None for the initial model, and if no client
        is left.
        """
        rows = [row for row in self.clients if not math.isnan(row.train_loss)]
        examples = sum(row.num_examples for row in rows)
        losses = (row.train_loss * row.num_examples for row in rows)
        # From Python 3.12 on, `sum` would round otherwise.
        return reduce(add, losses, 0.0) / examples if examples else None

    @property
    def class_accuracy(self) -> np.ndarray | None:
        """Return the accuracy on each class, (C,); None without an evaluation."""
        return metrics.class_accuracy(self.evaluation.confusion) if self.evaluation else None
