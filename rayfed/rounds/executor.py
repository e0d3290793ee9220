"""Work of a round as pure functions, and the one verb for it: `map(work, items, shared)`.

A kind of work is a frozen dataclass that says what is done with an item. What it does depends only
on the setup, the shared trees and the item, so any worker may do it, and do it again.

    work                  an item                                   its result
    Losses                a task                                    the loss at each of its clients
    Survey                a task                                    the task's summands, added up
    Train                 a group of tasks, with clients' memories  the group's summands, added up
    LocalModel            a client, with its memory                 its row and its weights
    AddUp                 the replies of several tasks              their summands, added up
    Evaluate              a range of test images                    an `Evaluation`
    MeasureActivations    a range of test images                    `Activations`, or None

`InProcess` is the meaning of `map`. A pool of workers must give the same results.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Protocol

from rayfed.base.errors import ClientFailed, RunFailed
from rayfed.rounds.messages import Assignment, Broadcast, Task, TaskReply
from rayfed.rounds.round import ClientRow, HardwareKind, Memory, Round
from rayfed.rounds.tasks import add_up, at_client
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed, pack

# The number of test images in an item. It is a constant, so the sum of losses has a fixed order.
EVALUATION_CHUNK = 1000

# A range of test images.
Piece = tuple[int, int]
# Tasks whose sums are added before they come to the engine.
AssignmentGroup = Sequence[Assignment]
# What a kind of work is done for.
Item = Any
# What it returns.
Result = Any
# What all items of a call need, by name.
Shared = Mapping[str, Tree]
# The same where the work is done: packed.
Trees = Mapping[str, Any]
# Called with how many clients have trained, of how many.
Progress = Callable[[int, int], None]


class ClientRunner(Protocol):
    """Serves the clients of a setup; it is a `rayfed.runtime.runner.Runner`.

    This is all that work may ask of the process it runs in.
    """

    def losses(
        self, weights: Packed, tasks: Sequence[Task], round: int, *, one_batch: bool
    ) -> Iterator[list[float]]: ...

    def survey(self, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[TaskReply]: ...

    def train(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Packed]
    ) -> Iterator[TaskReply]: ...

    def local_models(
        self, broadcast: Broadcast, assignments: Sequence[Assignment]
    ) -> Iterator[tuple[ClientRow, Weights]]: ...

    def evaluate(self, weights: Packed, pieces: Sequence[Piece], kind: str) -> list[Any]: ...


@dataclass(frozen=True)
class Work(ABC):
    """A kind of work, with the small values that all its items have in common."""

    # It names the work in messages and on Ray's dashboard, and deadlines are learned for each kind.
    kind: ClassVar[str]
    # What its text says after the round.
    remark: ClassVar[str] = ""
    # The round that the work is done for; 0 if it belongs to none.
    round: int = 0

    @abstractmethod
    def run(self, runner: ClientRunner, shared: Trees, items: Sequence[Item]) -> Iterator[Result]:
        """Yield the result of each item, in order, at a runner that has the shared trees.

        Several items come together so that the trees are unpacked once.
        """

    @property
    def name(self) -> str:
        """Return the name of the work on Ray's dashboard: its kind and the round."""
        return f"{self.kind} round {self.round}"

    def text(self, items: Sequence[Item]) -> str:
        """Describe the items in words, for messages and the heartbeat.

        Work on clients names these; other work has a text of its own.
        """
        return self.text_of_clients(joined(self.clients(item) for item in items))

    def text_of_clients(self, clients: Task) -> str:
        """Name clients and the round. Nothing else puts work on clients into words."""
        if len(clients) == 1:
            named = f"client {clients[0]}"
        else:
            named = f"{len(clients)} clients ({', '.join(map(str, clients))})"
        return f"{named}, round {self.round}{self.remark}"

    def clients(self, item: Item) -> Task:
        """Return the clients whose work the item is; none in an evaluation."""
        return ()

    def split(self, item: Item) -> Sequence[Item]:
        """Cut an item into smaller ones that workers may share; `AddUp` adds their results."""
        return [item]


@dataclass(frozen=True)
class Losses(Work):
    """Ask the clients of a task for the loss of the weights on their data."""

    kind: ClassVar[str] = "losses"
    remark: ClassVar[str] = " (loss)"
    # Whether a client takes one batch, not all its examples.
    one_batch: bool = False

    def run(
        self, runner: ClientRunner, shared: Trees, items: Sequence[Task]
    ) -> Iterator[list[float]]:
        """Yield the losses of each task's clients, in order."""
        return runner.losses(shared["weights"], items, self.round, one_batch=self.one_batch)

    def clients(self, item: Task) -> Task:
        """Return the clients of a task."""
        return item


@dataclass(frozen=True)
class Survey(Work):
    """Ask the clients of a task before the server decides what to send."""

    kind: ClassVar[str] = "survey"
    remark: ClassVar[str] = " (survey)"
    since: dict[str, int] = field(default_factory=dict)

    def run(
        self, runner: ClientRunner, shared: Trees, items: Sequence[Task]
    ) -> Iterator[TaskReply]:
        """Yield the reply of each task."""
        return runner.survey(Broadcast(self.round, since=self.since, **shared), items)

    def clients(self, item: Task) -> Task:
        """Return the clients of a task."""
        return item


@dataclass(frozen=True)
class Train(Work):
    """Train the clients of each task of a group, and add up what they send."""

    kind: ClassVar[str] = "train"
    since: dict[str, int] = field(default_factory=dict)
    # Whether clients have a memory afterwards. A pool must know how many objects come back.
    remembering: bool = False

    def run(
        self, runner: ClientRunner, shared: Trees, items: Sequence[AssignmentGroup]
    ) -> Iterator[TaskReply]:
        """Yield the reply of each group."""
        tasks: list[Task] = []
        memories: dict[int, Packed] = {}
        for group in items:
            for assignment in group:
                tasks.append(assignment.clients)
                memories.update(assignment.memories)
        replies = runner.train(Broadcast(self.round, since=self.since, **shared), tasks, memories)
        for group in items:
            # A task alone keeps its sum as it is: that of a single client is in float32.
            if len(group) == 1:
                yield next(replies)
            else:
                yield add_up(f"round {self.round}", islice(replies, len(group)))

    def clients(self, item: AssignmentGroup) -> Task:
        """Return the clients of a group."""
        return joined(assignment.clients for assignment in item)

    def split(self, item: AssignmentGroup) -> Sequence[AssignmentGroup]:
        """Return the tasks of a group, each as a group of its own."""
        return [[assignment] for assignment in item]


@dataclass(frozen=True)
class LocalModel(Work):
    """Train a client as in its round, and return its row, and its weights afterwards."""

    kind: ClassVar[str] = "local model"
    since: dict[str, int] = field(default_factory=dict)

    def run(
        self, runner: ClientRunner, shared: Trees, items: Sequence[Assignment]
    ) -> Iterator[tuple[ClientRow, Weights]]:
        """Yield the row and the weights of each client."""
        return runner.local_models(Broadcast(self.round, since=self.since, **shared), items)

    def clients(self, item: Assignment) -> Task:
        """Return the client, as a task."""
        return item.clients


@dataclass(frozen=True)
class AddUp(Work):
    """Add the sums of several tasks. A pool does this for a group whose tasks it has spread."""

    kind: ClassVar[str] = "add"

    def run(
        self, runner: ClientRunner, shared: Trees, items: Sequence[Iterable[TaskReply]]
    ) -> Iterator[TaskReply]:
        """Yield the sum of each item's replies, which may be fetched one by one."""
        for replies in items:
            yield add_up(f"round {self.round}", replies)

    def text(self, items: Sequence[Iterable[TaskReply]]) -> str:
        """Name the round."""
        return f"sums of tasks, round {self.round}"


@dataclass(frozen=True)
class Evaluate(Work):
    """Measure the weights on a range of test images."""

    kind: ClassVar[str] = "evaluation"

    def run(self, runner: ClientRunner, shared: Trees, items: Sequence[Piece]) -> Iterator[Any]:
        """Yield the evaluation of each range."""
        yield from runner.evaluate(shared["weights"], items, self.kind)

    def text(self, items: Sequence[Piece]) -> str:
        """Name the test images."""
        return f"{self.kind} of test images {items[0][0]} to {items[-1][1]}"


@dataclass(frozen=True)
class MeasureActivations(Evaluate):
    """See what the measured layers say of the classes, on a range of the sampled test images.

    Where a model does not allow it, the result is None.
    """

    kind: ClassVar[str] = "activations"


class Results(Protocol):
    """The results of a call of `map`, one after the other. A generator is one."""

    def __iter__(self) -> Iterator[Result]: ...

    def __next__(self) -> Result: ...

    def close(self) -> None:
        """Drop the call: no result of it is wanted any more, and no item of it is begun."""


def nothing() -> Generator[Result, None, None]:
    """Return the results of no item."""
    yield from ()


class Executor(ABC):
    """Has work done, in this process or on Ray. Values that stay where they are come as handles."""

    @abstractmethod
    def map(self, work: Work, items: Sequence[Item], shared: Shared) -> Results:
        """Return each item's result, in the order of the items, each exactly once.

        A pool begins at once, a single process when the first result is asked for. An error of the
        work is raised by the results; that of a pool which is lost may be raised by this call.
        """

    @abstractmethod
    def recall(self, memory: Memory) -> Packed:
        """Fetch the memory behind a handle, on its way into a checkpoint."""

    @abstractmethod
    def remember(self, memory: Packed) -> Memory:
        """Store a client's memory that comes out of a checkpoint; returns the handle to it."""

    @abstractmethod
    def kinds(self) -> Sequence[HardwareKind]:
        """List the kinds of hardware that have done the run's work since this process began."""

    @abstractmethod
    def may_end(self) -> bool:
        """Say whether this process may soon be ended, so that a checkpoint is needed now."""

    @abstractmethod
    def between_rounds(self, round: Round) -> None:
        """Use the moment between two rounds: the round is recorded."""


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


class InProcess(Executor):
    """Does the work here, item after item. Its `map` is the specification of every executor.

    Trees are packed and unpacked as on Ray. The layout in memory is then the same, and so are the
    last bits of what convolutions compute.
    """

    def __init__(
        self, runner: ClientRunner, progress: Progress, may_go_on: Callable[[], None]
    ) -> None:
        self._runner = runner
        self._progress = progress
        # Called before each item; raises if the run was asked to stop.
        self._may_go_on = may_go_on

    def map(
        self, work: Work, items: Sequence[Item], shared: Shared
    ) -> Generator[Result, None, None]:
        """Yield each item's result when it is asked for."""
        packed = {name: pack(tree) for name, tree in shared.items()}
        results = work.run(self._runner, packed, items)
        done, total = 0, sum(len(work.clients(item)) for item in items)
        for item in items:
            self._may_go_on()
            with naming_work(work, item):
                result = next(results)
            done += len(work.clients(item))
            if work.kind == "train":
                self._progress(done, total)
            yield result

    def recall(self, memory: Packed) -> Packed:
        """Return the memory, which is its own handle here."""
        return memory

    def remember(self, memory: Packed) -> Packed:
        """Return the memory, which is its own handle here."""
        return memory

    def may_end(self) -> bool:
        """Return False: nothing here ends this process."""
        return False

    def between_rounds(self, round: Round) -> None:
        """Do nothing: there is no cluster that could have changed."""


@contextmanager
def naming_work(work: Work, item: Item) -> Iterator[None]:
    """Raise what work raises as `RunFailed`, which names the work: clients or images, and round."""
    clients = work.clients(item)
    try:
        yield
    except RunFailed as error:
        if clients:
            error.client, error.round = at_client(error, ()), work.round
        raise
    except Exception as error:
        client = at_client(error, clients)
        text = work.text([item]) if client is None else work.text_of_clients((client,))
        said = f"{text} failed:\n{traceback.format_exc().rstrip()}"
        raise ClientFailed(said, client, work.round) from error


def pieces_of(images: int) -> list[Piece]:
    """Cut the test images into ranges."""
    starts = range(0, images, EVALUATION_CHUNK)
    return [(start, min(start + EVALUATION_CHUNK, images)) for start in starts]


def joined(tasks: Iterable[Task]) -> Task:
    """Return the clients of several tasks, in order."""
    clients: list[int] = []
    for task in tasks:
        clients.extend(task)
    return tuple(clients)
