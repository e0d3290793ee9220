"""A batch of work on a crew: who works on what, in which order, how long, and what if it is lost.

Longest first, so that the last one does not hold up the others. One call at a time is in flight on an actor, as all
that are queued on a dying one would fail with it. Results come out in the order of the calls, whatever the order in
which they arrive, and are fetched when their turn has come: nobody ever holds a whole cohort's.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
import torch
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from rayfed.local import ClientFailed, RunFailed
from rayfed.runtime.crew import COLOURS, Crew, Member, WorkersLost, lost, lost_object

log = logging.getLogger(__name__)

HEARTBEAT = 10.0  # seconds without progress after which a line says who is awaited; twice as many until the next one
FIRST_DEADLINE, LEAST_DEADLINE, SLOWER = 3600.0, 300.0, 10.0  # seconds, seconds, times the longest call so far
FETCH_LIMIT = 600.0  # seconds in which a reply must have come over once it is finished
NAMED = 5  # of those who are awaited


@dataclass(frozen=True)
class Call:
    """A piece of work: how it is submitted to an actor, and how long it may take compared with others of its kind."""

    kind: str
    what: str  # for messages
    size: int
    submit: Callable[[Any], list[ObjectRef]]  # the first one is small, and tells of an error; the second is a result
    missing: Callable[[ObjectLostError], None] = lambda error: None  # an object that it needs is lost: put it again
    client: int | None = None
    round: int | None = None


@dataclass(frozen=True, eq=False)
class Result:
    """What a call gave."""

    node: str
    first: Any
    second: Any = None
    third: ObjectRef | None = None  # on this process's node


@dataclass(frozen=True, eq=False)
class InFlight:
    """A call at work."""

    index: int
    member: Member
    references: list[ObjectRef]
    since: float


class Deadline:
    """How long a call may take (`ray.deadline`), in seconds.

    With "auto", ten times as long as the longest of its kind so far, and longer in proportion where it has more samples
    than that had; five minutes at least, and an hour while none has finished.
    """

    def __init__(self, given: float | Literal["auto"]) -> None:
        self._given = given
        self._longest: dict[str, tuple[float, int]] = {}  # kind -> seconds, size

    def of(self, call: Call) -> float:
        if self._given != "auto":
            return self._given
        if call.kind not in self._longest:
            return FIRST_DEADLINE
        seconds, size = self._longest[call.kind]
        return max(LEAST_DEADLINE, SLOWER * seconds * max(1.0, call.size / max(1, size)))

    def took(self, call: Call, seconds: float) -> None:
        self._longest[call.kind] = max(self._longest.get(call.kind, (0.0, 0)), (seconds, call.size))


class Batch:
    """Calls that are run on a crew; `results` gives theirs. `progress` and `retried` are told of what happens.

    One that is lost is run again, `max_retries` times at most.
    """

    def __init__(
        self,
        crew: Crew,
        calls: Sequence[Call],
        deadline: Deadline,
        max_retries: int,
        progress: Callable[[int, int], None],
        retried: Callable[[], None],
    ) -> None:
        self._crew = crew
        self._calls = calls
        self._deadline = deadline
        self._max_retries = max_retries
        self._progress = progress
        self._retried = retried
        self._waiting = deque(sorted(range(len(calls)), key=lambda i: -calls[i].size))
        self._working: dict[ObjectRef, InFlight] = {}
        self._finished: dict[int, tuple[InFlight, Result]] = {}  # and not yet given out
        self._losses: Counter[int] = Counter()
        self._home = ray.get_runtime_context().get_node_id()

    def results(self) -> Iterator[Result]:
        """Each call's result, in the order of the calls.

        Raises `ClientFailed` for an exception of its own, `WorkersLost` where one was lost too often.
        """
        try:
            for turn in range(len(self._calls)):
                self._moved()
                while (result := self._fetched(turn)) is None:
                    self._step()
                yield result
        finally:
            for flight in self._working.values():  # nobody wants the rest
                self._crew.open(flight.member)

    def _step(self) -> None:
        """Wait for something to happen, and see to it."""
        self._hand_out()
        for reference in self._crew.wait(list(self._working), self._until_something_is_due()):
            self._arrived(self._working.pop(reference))
        now = time.monotonic()
        for reference, flight in list(self._working.items()):
            if now >= flight.since + self._deadline.of(self._calls[flight.index]):
                del self._working[reference]  # a late answer goes unheard
                self._crew.open(flight.member, kill=True)
                self._again(flight, f"no answer from {flight.member} for {now - flight.since:.0f} s; it is killed")
        if now >= self._quiet_since + self._beat:
            log.warning("no progress for %.0f s; waiting for %s", now - self._quiet_since, self._awaited())
            self._beat *= 2
        self._hand_out()  # once more: nobody should be idle while a result is made use of

    def _hand_out(self) -> None:
        while self._waiting and self._crew.idle:
            index, member = self._waiting.popleft(), self._crew.idle.popleft()
            references = self._calls[index].submit(member.actor)
            self._working[references[0]] = InFlight(index, member, references, time.monotonic())

    def _arrived(self, flight: InFlight) -> None:
        call, member = self._calls[flight.index], flight.member
        seconds = time.monotonic() - flight.since
        try:
            first = ray.get(flight.references[0], timeout=FETCH_LIMIT)
            third = self._brought_home(flight) if len(flight.references) > 2 else None
        except RayError as error:
            if gone := lost_object(error):
                call.missing(gone)
                self._crew.idle.append(member)
                self._again(flight, f"an object that it needs was lost ({type(gone).__name__})")
            elif lost(error):
                self._crew.open(member)
                self._again(flight, f"lost with {member} ({type(error).__name__})", error)
            else:
                raise _failure(call, member, error) from None
            return
        self._crew.idle.append(member)
        self._deadline.took(call, seconds)
        self._finished[flight.index] = flight, Result(_node(member), first, None, third)
        self._moved()
        self._progress(len(self._calls) - len(self._waiting) - len(self._working), len(self._calls))

    def _fetched(self, turn: int) -> Result | None:
        """The result whose turn has come, whole; None while it is not there."""
        if turn not in self._finished:
            return None
        flight, result = self._finished.pop(turn)
        if len(flight.references) < 2:
            return result
        try:
            return replace(result, second=ray.get(flight.references[1], timeout=FETCH_LIMIT))
        except RayError as error:
            self._again(flight, f"its reply was lost with {flight.member} ({type(error).__name__})", error)
            return None

    def _brought_home(self, flight: InFlight) -> ObjectRef:
        """What a client remembers, on the node of this process: with any other node it could be lost."""
        memory = flight.references[2]
        if flight.member.place is not None and flight.member.place.node_id == self._home:
            return memory
        return ray.put(ray.get(memory, timeout=FETCH_LIMIT))

    def _again(self, flight: InFlight, why: str, error: RayError | None = None) -> None:
        call = self._calls[flight.index]
        self._losses[flight.index] += 1
        if self._losses[flight.index] > self._max_retries:
            raise WorkersLost(
                f"{call.what}: lost {self._losses[flight.index]} times, and ray.max_retries = {self._max_retries}; "
                f"the last time: {why}" + (f"\n{error}" if error else "")
            )
        log.warning("%s: %s; running it again", call.what, why)
        self._retried()
        self._moved()
        self._waiting.appendleft(flight.index)

    def _moved(self) -> None:
        """There is progress, or something else has just been said."""
        self._quiet_since, self._beat = time.monotonic(), HEARTBEAT

    def _until_something_is_due(self) -> float:
        due = [flight.since + self._deadline.of(self._calls[flight.index]) for flight in self._working.values()]
        return max(0.0, min([self._quiet_since + self._beat, *due]) - time.monotonic())

    def _awaited(self) -> str:
        whom = [f"{self._calls[flight.index].what} on {flight.member}" for flight in self._working.values()]
        whom += [f"{member} to come up" for member in self._crew.opening.values()]
        more = f" and {len(whom) - NAMED} more" if len(whom) > NAMED else ""
        return (", ".join(whom[:NAMED]) or "room for an actor") + more


def _node(member: Member) -> str:
    return member.place.node if member.place else "?"


def _failure(call: Call, member: Member, error: RayError) -> RunFailed:
    """What a client raised, as this process would have raised it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RunFailed):
        return type(cause)(str(cause))
    text = f"{call.what} failed on {_node(member)} (actor {member.name}):\n{COLOURS.sub('', str(error))}"
    if isinstance(cause, torch.OutOfMemoryError):
        text += (
            "\nthe GPU memory that its actor may take was not enough: try a larger ray.num_gpus (auto measures what "
            "it takes), or a smaller train.batch_size"
        )
    return ClientFailed(text, call.client, call.round)
