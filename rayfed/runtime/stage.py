"""A stage of a round (its evaluation, survey or training) as calls on actors: which wait, and what the others gave."""

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
    """The work of one task, or an actor's share of an evaluation: it is done, lost and run again as a whole.

    It gives a value, and objects: the task's summands, which are fetched in turn, and memories, which stay references.
    """

    size: int  # compared with the stage's other calls
    task: Task = ()  # the clients; none in an evaluation
    pieces: Sequence[Piece] = ()  # of the test images, in an evaluation
    num_objects: int = 0


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
    submit: Callable[[Any, Sequence[Call]], list[ObjectRef]]  # sends calls to an actor: their values, then all objects
    missing: Callable[[ObjectLostError, Sequence[Call]], None]  # called where an object that calls need is lost
    most: int = 1  # calls in a message
    progress: Progress = no_progress

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.calls)))
        self.answers: dict[int, Answer] = {}  # by call: those that are here, and not given out yet
        self.losses: Counter[int] = Counter()
        self.alone: set[int] = set()  # calls that get a message of their own
        self.faulty: dict[int, tuple[str, str]] = {}  # call -> the GPU that failed it; it is tried on another, once
        self.error: RunFailed | None = None  # for whoever waits for the answers
        self.over = False
        self.done = self._shown = 0  # clients
        self._total = sum(len(call.task) for call in self.calls)
        self._largest = max((call.size for call in self.calls), default=0)
        self._left = self.size(self.waiting)  # of the work that waits: counted along, as a stage may have 2,000 calls

    def size(self, indices: Iterable[int]) -> int:
        """The work of some calls."""
        return sum(self.calls[index].size for index in indices)

    def clients(self, indices: range) -> Task:
        """The clients of some calls."""
        return tuple(client for index in indices for client in self.calls[index].task)

    def text(self, indices: range) -> str:
        """Some calls, in words."""
        clients, pieces = self.clients(indices), self.calls[indices[-1]].pieces
        if clients:
            return task_text(clients, self.round, survey=self.kind == "survey")
        return f"{self.kind} of test images {self.calls[indices[0]].pieces[0][0]} to {pieces[-1][1]}"

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
