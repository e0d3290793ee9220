"""A round: what is known of it when it is finished, and the workers that play it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rayfed.losses import metrics
from rayfed.losses.metrics import Evaluation
from rayfed.methods.part import Held
from rayfed.rounds.local import Broadcast
from rayfed.rounds.measures import Activations
from rayfed.rounds.tasks import Summed, Task
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed

Memory = Any  # a handle to one client's memory: the workers make it and read it
Kind = dict[str, str]  # of hardware, with its settings: two that are equal compute the same bits


@dataclass(frozen=True)
class ClientRow:
    """One client in one round, as `clients.parquet` has it."""

    client: int
    num_examples: int
    train_loss: float
    seconds: float
    node: str
    notes: Mapping[str, float] = field(default_factory=dict)  # as in `local.Reply`


@dataclass(frozen=True, eq=False)
class Arrival:
    """A client that has trained: its row, a handle to its memory (None: it has none), and the bytes it sent."""

    row: ClientRow
    memory: Memory
    bytes_up: int
    confusion: np.ndarray | None = None  # as in `local.Reply`


class Workers(Protocol):
    """The workers of a round, in this process or on Ray. Results come in the order of the tasks.

    On Ray the work begins when a method is called; in this process, when a result is asked for.
    """

    def survey(self, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[tuple[Summed, list[int]]]:
        """Each task's summands, and the bytes that each client sent."""

    def train(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Memory]
    ) -> Iterator[tuple[Summed, list[Arrival]]]:
        """Each task's summands, and the rest of each client's reply."""

    def evaluate(self, weights: Weights) -> Callable[[], Evaluation]:
        """The weights on the whole test set: a function that waits for the result."""

    def activations(self, weights: Weights) -> Activations | None:
        """What the weights' measured layers say of the classes, on the sampled test images; None where that fails."""

    def recall(self, memory: Memory) -> Packed:
        """The memory behind a handle, on its way into a checkpoint."""

    def remember(self, memory: Packed) -> Memory:
        """A handle to a client's memory that comes out of a checkpoint."""

    def kinds(self) -> Sequence[Kind]:
        """The kinds of hardware that have done the run's work so far, in this process's time."""

    def finished(self, round: Round) -> bool:
        """Called after each round. True if Ray may soon end this process, so that a checkpoint is needed now."""


@dataclass(frozen=True, eq=False)
class Round:
    """A round that is averaged, and finished once it is evaluated, with all that the next round needs."""

    round: int  # 0 is the initial model
    weights: Weights
    held: dict[str, Held]  # slot -> the part in force, with its state on the server
    memories: Mapping[int, Memory]  # client -> handle, of the clients that have a memory
    evaluation: Evaluation | None  # None in a round that is not evaluated, as are all numbers that come from it
    peak: np.ndarray  # (C,) the best accuracy of each class so far, in the rounds that count (`engine.py`)
    forgetting: float | None
    clients: tuple[ClientRow, ...] = ()
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    notes: Mapping[str, float] = field(default_factory=dict)  # numbers of no single client
    confusions: Mapping[int, np.ndarray] = field(default_factory=dict)  # client -> int64 (C, C), where measured

    @property
    def test_accuracy(self) -> float | None:
        return metrics.accuracy(self.evaluation.confusion) if self.evaluation else None

    @property
    def test_loss(self) -> float | None:
        return self.evaluation.loss / int(self.evaluation.confusion.sum()) if self.evaluation else None

    @property
    def train_loss(self) -> float | None:
        """The clients' mean losses over their steps, weighted by images; None for the initial model."""
        examples = sum(row.num_examples for row in self.clients)
        return sum(row.train_loss * row.num_examples for row in self.clients) / examples if examples else None

    @property
    def class_accuracy(self) -> np.ndarray | None:
        """(C,)"""
        return metrics.class_accuracy(self.evaluation.confusion) if self.evaluation else None
