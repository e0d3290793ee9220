"""A round: what is known of it when it is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from rayfed.measures import metrics
from rayfed.measures.metrics import Evaluation
from rayfed.methods.part import Held
from rayfed.tensors.weights import Weights

# A handle to one client's memory: the workers make it and read it.
Memory = Any
# Of hardware, with its settings: two that are equal compute the same bits.
Kind = dict[str, str]


@dataclass(frozen=True)
class ClientRow:
    """One client in one round, as `clients.parquet` has it."""

    client: int
    num_examples: int
    # Mean over the steps.
    train_loss: float
    seconds: float
    node: str
    # Each part's term of the loss, and what parts noted: means over the steps that have them; and
    # measures.
    notes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Round:
    """A round that is averaged, and finished once it is evaluated, with all that the next round
    needs.
    """

    # 0 is the initial model.
    round: int
    # That the next round sends.
    weights: Weights
    # Slot -> the part in force, with its state on the server.
    held: dict[str, Held]
    # Client -> handle, of the clients that have a memory.
    memories: Mapping[int, Memory]
    # None in a round that is not evaluated, as are all numbers that come from it.
    evaluation: Evaluation | None
    # (C,) the best accuracy of each class so far, in the rounds that count (`engine.py`)
    peak: np.ndarray
    forgetting: float | None
    clients: tuple[ClientRow, ...] = ()
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    # Numbers of no single client.
    notes: Mapping[str, float] = field(default_factory=dict)
    # Client -> int64 (C, C), where measured.
    confusions: Mapping[int, np.ndarray] = field(default_factory=dict)
    # That the method evaluates in place of `weights`.
    shown: Weights | None = None

    def without_results(self) -> Round:
        """Return the round without what was found in it: with what the next round needs alone."""
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
        """The global model as the method evaluates it."""
        return self.weights if self.shown is None else self.shown

    @property
    def test_accuracy(self) -> float | None:
        return metrics.accuracy(self.evaluation.confusion) if self.evaluation else None

    @property
    def test_loss(self) -> float | None:
        return (
            self.evaluation.loss / int(self.evaluation.confusion.sum()) if self.evaluation else None
        )

    @property
    def macro_f1(self) -> float | None:
        return metrics.macro_f1(self.evaluation.confusion) if self.evaluation else None

    @property
    def calibration_error(self) -> float | None:
        if self.evaluation is None:
            return None
        return metrics.calibration_error(
            self.evaluation.overconfidence, int(self.evaluation.confusion.sum())
        )

    @property
    def train_loss(self) -> float | None:
        """The clients' mean losses over their steps, weighted by images; None for the initial
        model.
        """
        examples = sum(row.num_examples for row in self.clients)
        losses = (row.train_loss * row.num_examples for row in self.clients)
        # From Python 3.12 on, `sum` rounds otherwise.
        return reduce(add, losses, 0.0) / examples if examples else None

    @property
    def class_accuracy(self) -> np.ndarray | None:
        """(C,)"""
        return metrics.class_accuracy(self.evaluation.confusion) if self.evaluation else None
