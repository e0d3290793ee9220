"""The workers of a round: what the engine asks of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rayfed.losses.metrics import Evaluation
from rayfed.rounds.client_work import Broadcast, sample
from rayfed.rounds.measures import Activations
from rayfed.rounds.round import Kind, Memory, Round
from rayfed.rounds.site import Site
from rayfed.rounds.tasks import Task, TaskReply
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed

EVALUATION_CHUNK = (
    1000  # test images per piece of work: a constant, so that the sum of losses has a fixed order
)
Look = Literal["evaluation", "activations"]
Piece = tuple[int, int]  # a range of test images
Progress = Callable[
    [int, int], None
]  # called after each client: how many have trained, of how many


def no_progress(done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


class Workers(ABC):
    """The workers of a round, in this process or on Ray. Replies come in the order of the tasks, or of their groups.

    On Ray the work begins when a method is called; in this process, when a reply is asked for.
    """

    def __init__(self, site: Site) -> None:
        self.num_test = len(site.federation.test)  # images
        self.num_sampled = len(sample(site))  # of them, to measure on

    @abstractmethod
    def survey(self, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[TaskReply]:
        """Each task's reply to the survey."""

    @abstractmethod
    def train(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Memory]
    ) -> Iterator[TaskReply]:
        """The reply of each group of tasks (`grouped`) after training, with a handle to each client's new memory."""

    @abstractmethod
    def evaluate_pieces(
        self, weights: Weights, pieces: Sequence[Piece], look: Look
    ) -> Iterator[Any]:
        """What `Worker.evaluate` gives for each piece."""

    @abstractmethod
    def recall(self, memory: Memory) -> Packed:
        """The memory behind a handle, on its way into a checkpoint."""

    @abstractmethod
    def remember(self, memory: Packed) -> Memory:
        """A handle to a client's memory that comes out of a checkpoint."""

    @abstractmethod
    def kinds(self) -> Sequence[Kind]:
        """The kinds of hardware that have done the run's work so far, in this process's time."""

    @abstractmethod
    def finished(self, round: Round) -> bool:
        """Called after each round. True if Ray may soon end this process, so that a checkpoint is needed now."""

    def evaluate(self, weights: Weights) -> Callable[[], Evaluation]:
        """The weights on the whole test set: a function that waits for the result."""
        evaluations = self.evaluate_pieces(weights, pieces_of(self.num_test), "evaluation")
        return lambda: sum(evaluations, next(evaluations))

    def activations(self, weights: Weights) -> Activations | None:
        """What the weights' measured layers say of the classes, on the sampled test images; None where that fails."""
        of_pieces = list(self.evaluate_pieces(weights, pieces_of(self.num_sampled), "activations"))
        return None if None in of_pieces else sum(of_pieces[1:], of_pieces[0])


def pieces_of(images: int) -> list[Piece]:
    """Ranges of test images, each for a piece of work."""
    return [
        (start, min(start + EVALUATION_CHUNK, images))
        for start in range(0, images, EVALUATION_CHUNK)
    ]
