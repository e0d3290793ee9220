"""Calls on an actor, several of which may go together in a message, and how long that may take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray import ObjectRef
from ray.exceptions import ObjectLostError

from rayfed.rounds.tasks import Task, task_text

# A call's reply, value by value: the first is small; the second is fetched when its turn comes; others stay references.
# A message's values are a list of the first values of all its calls, and then, call by call, the others.
Values = list[Any]

Submit = Callable[[Any, Sequence["Call"]], list[ObjectRef]]  # sends an actor a message; references of its values

FIRST_DEADLINE, LEAST_DEADLINE, SLOWER = 3600.0, 300.0, 10.0  # seconds, seconds, times the longest call so far


@dataclass(frozen=True)
class Call:
    """A task or an evaluation, and its size compared with other calls of its kind; or several that go together."""

    kind: str
    work: str  # in words
    size: int
    others: int = 0  # values after the first
    missing: Callable[[ObjectLostError], None] = lambda error: None  # called when an object that it needs is lost
    task: Task = ()  # the clients; none in an evaluation
    round: int = 0
    count: int = 1  # of calls that go together
    pieces: Sequence[tuple[int, int]] = ()  # of an evaluation: ranges of test images


def together(calls: Sequence[Call]) -> Call:
    """Calls of clients as one call: all are of the same kind and round."""
    if len(calls) == 1:
        return calls[0]

    def missing(error: ObjectLostError) -> None:
        for call in calls:
            call.missing(error)

    task = tuple(client for call in calls for client in call.task)
    return replace(
        calls[0],
        work=task_text(task, calls[0].round, survey=calls[0].kind == "survey"),
        size=sum(call.size for call in calls),
        others=sum(call.others for call in calls),
        missing=missing,
        task=task,
        count=len(calls),
    )


class Deadline:
    """The longest time that a call may take, in seconds: `ray.deadline` for each task, or piece of the test set.

    With "auto": ten times the longest call of its kind so far, in proportion to the size where it is larger than that
    call; at least five minutes; and an hour while no call has finished.
    """

    def __init__(self, seconds: float | Literal["auto"]) -> None:
        self._fixed = seconds
        self._longest: dict[str, tuple[float, int]] = {}  # kind -> seconds, size

    def seconds(self, call: Call) -> float:
        if self._fixed != "auto":
            return self._fixed * max(call.count, len(call.pieces))
        if call.kind not in self._longest:
            return FIRST_DEADLINE
        seconds, size = self._longest[call.kind]
        return max(LEAST_DEADLINE, SLOWER * seconds * max(1.0, call.size / max(1, size)))

    def took(self, call: Call, seconds: float) -> None:
        """Note how long a call took."""
        self._longest[call.kind] = max(self._longest.get(call.kind, (0.0, 0)), (seconds, call.size))
