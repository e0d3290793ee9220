"""A round: what is known of it when it is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from rayfed.losses import metrics
from rayfed.losses.metrics import Evaluation
from rayfed.methods.part import Held
from rayfed.tensors.weights import Weights

Memory = Any  # a handle to one client's memory: the workers make it and read it
Kind = dict[str, str]  # of hardware, with its settings: two that are equal compute the same bits


@dataclass(frozen=True)
class ClientRow:
    """One client in one round, as `clients.parquet` has it."""

    client: int
    num_examples: int
    train_loss: float  # mean over the steps
    seconds: float
    node: str
    # Each part's term of the loss, and what parts noted: means over the steps that have them; and measures.
    notes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Round:
    """A round that is averaged, and finished once it is evaluated, with all that the next round needs."""

    round: int  # 0 is the initial model
    weights: Weights  # that the next round sends
    held: dict[str, Held]  # slot -> the part in force, with its state on the server
    memories: Mapping[int, Memory]  # client -> handle, of the clients that have a memory
    evaluation: (
        Evaluation | None
    )  # None in a round that is not evaluated, as are all numbers that come from it
    peak: (
        np.ndarray
    )  # (C,) the best accuracy of each class so far, in the rounds that count (`engine.py`)
    forgetting: float | None
    clients: tuple[ClientRow, ...] = ()
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    notes: Mapping[str, float] = field(default_factory=dict)  # numbers of no single client
    confusions: Mapping[int, np.ndarray] = field(
        default_factory=dict
    )  # client -> int64 (C, C), where measured
    shown: Weights | None = None  # that the method evaluates in place of `weights`

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
        """The clients' mean losses over their steps, weighted by images; None for the initial model."""
        examples = sum(row.num_examples for row in self.clients)
        losses = (row.train_loss * row.num_examples for row in self.clients)
        return (
            reduce(add, losses, 0.0) / examples if examples else None
        )  # from Python 3.12 on, `sum` rounds otherwise

    @property
    def class_accuracy(self) -> np.ndarray | None:
        """(C,)"""
        return metrics.class_accuracy(self.evaluation.confusion) if self.evaluation else None
