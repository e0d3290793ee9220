"""A stage of a round (its evaluation, survey or training) as calls on actors: which wait, and what the others gave.

A call is known by its index. In its life it

    waits              in `waiting`; a sum only once all that it adds is answered
    is at work         in a message to an actor (`Dispatch`), with the calls next to it, or alone if it was lost before
    is answered        in `answers`; its objects may still be on their way here
    is given           to the engine, in its turn; then the stage forgets it

and waits again, before all others, when it is lost in between.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef
from ray.exceptions import ObjectLostError

from rayfed.base.errors import RunFailed
from rayfed.rounds.tasks import Task, task_text
from rayfed.rounds.workers import Piece, Progress, no_progress
from rayfed.runtime.crew import Member


@dataclass(frozen=True)
class Call:
    """The work of one task, a sum of tasks' sums, or an actor's share of an evaluation.

    It is done, lost and run again as a whole. It gives a value, and objects: the summands, which are fetched in turn,
    and memories, which stay references.
    """

    size: int  # compared with the stage's other calls of its kind
    task: Task = ()  # the clients; none in an evaluation
    pieces: Sequence[Piece] = ()  # of the test images, in an evaluation
    num_objects: int = 0
    adds: range = range(
        0
    )  # the calls whose summands it adds: it waits for their answers, and is given in their place

    @property
    def count(self) -> int:
        """Tasks, or pieces of the test images."""
        return max(1, len(self.pieces), len(self.adds))


@dataclass(frozen=True, eq=False)
class Answer:
    """What a call has given, who gave it, and since when it is here: its objects may still be on their way."""

    member: Member
    value: Any
    objects: Sequence[ObjectRef]
    since: float


@dataclass(eq=False)
class Stage:
    """The calls of a stage, in the order in which they are handed out."""

    kind: str  # of work: "train", "survey", or what an evaluation looks for
    round: int
    calls: Sequence[Call]
    submit: Callable[
        [Any, Sequence[Call]], list[ObjectRef]
    ]  # sends calls to an actor: their values, then all objects
    missing: Callable[
        [ObjectLostError, Sequence[Call]], None
    ]  # called where an object that calls need is lost
    most: int = 1  # calls in a message
    progress: Progress = no_progress
    add: Callable[[Any, Sequence[Answer]], list[ObjectRef]] | None = (
        None  # as `submit`: has an actor add these
    )

    def __post_init__(self) -> None:
        adding = [index for index, call in enumerate(self.calls) if call.adds]
        self.turns: Sequence[int] = adding or range(
            len(self.calls)
        )  # the calls of which the answers are given
        self.waiting = deque(index for index, call in enumerate(self.calls) if not call.adds)
        self._added_by = {index: number for number in adding for index in self.calls[number].adds}
        self.answers: dict[int, Answer] = {}  # by call: those that are here, and not given out yet
        self.losses: Counter[int] = Counter()
        self.alone = set(adding)  # calls that get a message of their own
        self.faulty: dict[
            int, tuple[str, str]
        ] = {}  # call -> the GPU that failed it; it is tried on another, once
        self.error: RunFailed | None = None  # for whoever waits for the answers
        self.over = False
        self.done = self._shown = 0  # clients
        self._total = sum(len(call.task) for call in self.calls)
        self._largest = max((self.calls[index].size for index in self.waiting), default=0)
        self._left = self.size(
            self.waiting
        )  # the work that waits: counted along, as a stage may have 2,000 calls

    def size(self, indices: Iterable[int]) -> int:
        return sum(self.calls[index].size for index in indices)

    def clients(self, indices: range) -> Task:
        return tuple(client for index in indices for client in self.calls[index].task)

    def adds(self, indices: range) -> range:
        """The calls whose summands a call adds; none for most calls."""
        return self.calls[indices[0]].adds

    def kind_of(self, indices: range) -> str:
        """The kind of work, of which deadlines are learned."""
        return "add" if self.adds(indices) else self.kind

    def text(self, indices: range) -> str:
        """Some calls, in words."""
        clients, pieces = self.clients(indices), self.calls[indices[-1]].pieces
        if clients:
            return task_text(clients, self.round, survey=self.kind == "survey")
        adds = self.adds(indices)
        if adds:
            return f"the sum of tasks {adds[0] + 1} to {adds[-1] + 1}, round {self.round}"
        return (
            f"{self.kind} of test images {self.calls[indices[0]].pieces[0][0]} to {pieces[-1][1]}"
        )

    def next_message(self, actors: int) -> range:
        """The next call, and those after it while together they are no more work than two bounds.

        These are the largest call, and half of an actor's even share of what waits. So the last messages are short, and
        all actors are done at about the same time (Flynn Hummel et al., 1992, "Factoring").
        """
        room = min(self._largest, self._left / (2 * actors))
        first = self.waiting.popleft()
        message = range(first, first + 1)
        while self.waiting and self.waiting[0] == message.stop and len(message) < self.most:
            longer = range(first, message.stop + 1)
            if self.alone & {first, message.stop} or self.size(longer) > room:
                break
            self.waiting.popleft()
            message = longer
        self._left -= self.size(message)
        return message

    def send(self, actor: Any, indices: range) -> list[ObjectRef]:
        adds = self.adds(indices)
        if adds and self.add is not None:
            return self.add(actor, [self.answers[index] for index in adds])
        return self.submit(actor, [self.calls[index] for index in indices])

    def only_on(self, node_id: str, indices: range) -> list[ObjectRef]:
        """The memories that have no copy elsewhere where their summands are added on the node of their own actor."""
        answers = [self.answers[index] for index in self.adds(indices)]
        return [
            memory
            for each in answers
            if each.member.node_id == node_id
            for memory in each.objects[1:]
        ]

    def answered(self, index: int, answer: Answer) -> None:
        """Take an answer. The sum that it was the last one for may be made."""
        self.answers[index] = answer
        self.done += len(self.calls[index].task)
        adding = self._added_by.get(index)
        if adding is not None and all(each in self.answers for each in self.calls[adding].adds):
            self.wait_again(range(adding, adding + 1))

    def to_run_again(self, indices: range, missing: ObjectLostError) -> range:
        """The calls to run again where these have missed an object: themselves, or what a sum has missed."""
        for index in self.adds(indices):
            if self.answers[index].objects[0].hex() == missing.object_ref_hex:
                del self.answers[index]
                self.done -= len(self.calls[index].task)
                return range(index, index + 1)
        self.missing(missing, [self.calls[index] for index in indices])
        return indices

    def wait_again(self, indices: range) -> None:
        """Put calls back, before all others."""
        if not self.over:
            self.waiting.extendleft(reversed(indices))
            self._left += self.size(indices)

    def lost(self, indices: range, counts: bool = True) -> int:
        """Calls were lost that went together: how often that of the first counts now.

        A loss of several calls counts for none of them: from now on each is alone, so it is known which loses actors.
        """
        self.alone.update(indices)
        self.losses.update(indices if counts and len(indices) == 1 else ())
        return self.losses[indices[0]]

    def show_progress(self) -> None:
        """Tell how many clients are done. Only who waits for the answers does: a stage may begin before its turn."""
        if self.done != self._shown:
            self._shown = self.done
            self.progress(self.done, self._total)

    def end(self, error: RunFailed | None = None) -> None:
        """No call is to be run any more; the `error` is why."""
        self.over = True
        self.error = self.error or error
        self.waiting.clear()
