"""A set of calls on a crew: which actor gets which call, in which order, for how long, and when a call is run again.

Calls are handed out in their order, the longest first, and their answers are given in that order too, whichever
arrives first. So an answer waits only for those before it, and no process ever holds the answers of a whole cohort. An
actor has a single message in flight, because all that are queued on a dying actor would fail with it. Where actors are
few, a message has several calls: each message costs a hundredth of a second.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from rayfed.errors import ClientFailed, KilledActors, RunFailed, WorkersLost, first_line, uncoloured
from rayfed.runtime.calls import Answer, Call, Deadline, Submit, together
from rayfed.runtime.causes import cause_of, is_gpu_fault, is_loss, lost_object
from rayfed.runtime.crew import Crew, Member, named
from rayfed.runtime.head import memory_was_full
from rayfed.runtime.heartbeat import Heartbeat
from rayfed.runtime.profile import profile, received, span
from rayfed.runtime.signals import refuse_to_go_on
from rayfed.runtime.worker import at_client, what_of

log = logging.getLogger(__name__)

FETCH_LIMIT = 600.0  # seconds in which the reply of a finished call must arrive
MEMORY = "out of memory"
MORE_MEMORY = "\nRay killed it, as its node had no memory left: try fewer actors per node (a larger ray.num_cpus)"


@dataclass(frozen=True, eq=False)
class Message:
    """Calls in a row, at work on a member."""

    indices: range
    call: Call  # all of them as one
    member: Member
    references: list[ObjectRef]
    since: float


@dataclass(eq=False)
class Dispatch:
    """Runs calls on a crew; `answers` gives their answers. A lost call is run again, at most `max_retries` times."""

    crew: Crew
    calls: Sequence[Call]
    submit: Submit
    most: int  # calls in a message
    deadline: Deadline
    max_retries: int
    progress: Callable[[int, int], None]  # called when a message is answered: how many clients are done, of how many
    retried: Callable[[], None]  # called for each lost call that is run again

    def __post_init__(self) -> None:
        self._waiting = deque(range(len(self.calls)))
        self._left = sum(call.size for call in self.calls)  # of those that wait
        self._largest = max((call.size for call in self.calls), default=0)
        self._working: dict[ObjectRef, Message] = {}
        self._finished: dict[int, tuple[Member, Answer]] = {}  # and not yet given out
        self._losses: Counter[int] = Counter()
        self._alone: set[int] = set()  # calls that get a message of their own
        self._faulty: dict[int, str] = {}  # call -> the node whose GPU failed it; the call is tried on another, once
        self._heartbeat = Heartbeat()
        self._clients_done = 0

    def answers(self) -> Iterator[Answer]:
        """Each call's answer, in the order of the calls.

        Raises `ClientFailed` for an exception of the call's own, `WorkersLost` where a call was lost too often.
        """
        try:
            for turn in range(len(self.calls)):
                self._heartbeat.progress()
                with span(f"waiting: {self.calls[turn].kind}"):
                    self._step(0.0)  # while the caller used an answer, actors may have finished: none should be idle
                    while (answer := self._fetched(turn)) is None:
                        self._step()
                yield answer
        finally:
            for message in self._working.values():  # an error has ended the round: their answers are not needed
                self.crew.open(message.member)

    def _step(self, seconds: float | None = None) -> None:
        """Wait for an event, and handle it; with `seconds` 0 only what has happened already."""
        refuse_to_go_on()
        self._hand_out()
        seconds = self._until_something_is_due() if seconds is None else seconds
        for reference in self.crew.wait(list(self._working), seconds):
            self._arrived(self._working.pop(reference))
        now = time.monotonic()
        for reference, message in list(self._working.items()):
            if now >= message.since + self.deadline.seconds(message.call):
                del self._working[reference]  # a late answer is ignored
                self.crew.open(message.member, kill=True)
                if profiled := profile():
                    profiled.call(message.member.name, message.call.what, message.since, None)
                why = f"no answer from {message.member} for {now - message.since:.0f} s; it is killed"
                self._run_again(message.indices, why, how="no answer")
        self._hand_out()
        self._heartbeat.beat(lambda: named(self._awaited()))

    def _hand_out(self) -> None:
        kept: list[int] = []
        while self._waiting and self.crew.idle:
            if (member := self._member_for(self._waiting[0])) is None:
                kept.append(self._waiting.popleft())
                continue
            indices = self._next_message()
            calls = [self.calls[index] for index in indices]
            references = self.submit(member.actor, calls)
            self._working[references[0]] = Message(indices, together(calls), member, references, time.monotonic())
        self._waiting.extendleft(reversed(kept))  # in their order

    def _next_message(self) -> range:
        """The next call, and those after it, up to the work of the largest call and half an even share of what waits.

        So the last messages are short, and all actors are done at about the same time (Flynn Hummel et al., 1992,
        "Factoring").
        """
        first = self._waiting.popleft()
        room = min(self._largest, self._left / (2 * (1 + len(self.crew.idle) + len(self._working))))
        end, size = first + 1, self.calls[first].size
        while self._waiting and self._waiting[0] == end < first + self.most and not self._alone & {first, end}:
            if (size := size + self.calls[end].size) > room:
                break
            end += 1
            self._waiting.popleft()
        self._left -= sum(self.calls[index].size for index in range(first, end))
        return range(first, end)

    def _member_for(self, index: int) -> Member | None:
        """An idle member; where a GPU has failed this call, on another node, or None while such a member is at work."""
        idle, faulty = self.crew.idle, self._faulty.get(index)
        member = next((member for member in idle if member.node_id != faulty), None)
        if member is None:
            if any(message.member.node_id != faulty for message in self._working.values()):
                return None
            member = idle[0]
        idle.remove(member)
        return member

    def _arrived(self, message: Message) -> None:
        indices, call, member = message.indices, message.call, message.member
        seconds = time.monotonic() - message.since
        try:
            firsts = ray.get(message.references[0], timeout=FETCH_LIMIT)
            firsts = received(firsts, member.name, call.what, message.since)
        except RayError as error:
            if profiled := profile():
                profiled.call(member.name, call.what, message.since, None)
            if gone := lost_object(error):
                call.missing(gone)
                self.crew.idle.append(member)
                self._run_again(indices, f"an object that it needs was lost ({type(gone).__name__})")
            elif is_loss(error):
                full = member.place is not None and not self.crew.in_danger and memory_was_full(member.place.process)
                self.crew.open(member)
                why = MEMORY if full else type(error).__name__
                self._run_again(indices, f"lost with {member} ({why})", error, how=MEMORY if full else "died")
            elif is_gpu_fault(error) and indices[0] not in self._faulty:
                self._faulty |= dict.fromkeys(indices, member.node_id)
                self.crew.open(member, kill=True)  # the error would stay in its process
                said = first_line(cause_of(error) or error)
                self._run_again(indices, f"the GPU of {member} failed ({said})", error, how="GPU")
            elif call.count > 1 and not _names_its_client(cause_of(error)):
                self.crew.idle.append(member)
                self._run_again(indices, f"an exception on {member} that does not name its client", error)
            else:
                raise _failure(call, member, error) from None
            return
        self.crew.idle.append(member)
        self._hand_out()  # first of all: the member waits for it
        self.deadline.took(call, seconds)
        others = iter(rest := message.references[1:])
        for index, first in zip(indices, firsts, strict=True):
            self._finished[index] = member, [first, *islice(others, self.calls[index].others)]
        # The rest is brought to this node in the meantime: the sum for its turn, memories since a node may be lost.
        ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=True)
        self._heartbeat.progress()
        self._clients_done += len(call.task)
        self.progress(self._clients_done, sum(len(call.task) for call in self.calls))

    def _fetched(self, turn: int) -> Answer | None:
        """The whole answer whose turn has come; None while it is not there."""
        if turn not in self._finished:
            return None
        member, answer = self._finished.pop(turn)
        try:
            with span("wire", f"fetch {self.calls[turn].what}"):
                return [*answer[:1], *ray.get(answer[1:2], timeout=FETCH_LIMIT), *answer[2:]]
        except RayError as error:
            self._clients_done -= len(self.calls[turn].task)
            why = f"its reply was lost with {member} ({type(error).__name__})"
            self._run_again(range(turn, turn + 1), why, error)
            return None

    def _run_again(self, indices: range, why: str, error: RayError | None = None, how: str = "") -> None:
        """Put lost calls back; `how` they ended their actor, if they did. Raises `WorkersLost` after too many losses.

        A loss of several calls counts for none of them: from now on each is alone, so it is known which loses actors.
        """
        call = together([self.calls[index] for index in indices])
        self._alone.update(indices)
        self._losses.update(indices if call.count == 1 else ())
        if (times := self._losses[indices[0]]) > self.max_retries:
            text = (
                f"{call.what}: lost {times} times, and ray.max_retries = {self.max_retries}; "
                f"the last time: {why}" + (f"\n{error}" if error else "") + (MORE_MEMORY if how == MEMORY else "")
            )
            client = call.task[0] if len(call.task) == 1 else None
            raise KilledActors(text, call.what, how, client, call.round) if how else WorkersLost(text)
        again = "running it again" if call.count == 1 else f"running its {call.count} tasks again, each by itself"
        log.warning("%s: %s; %s", call.what, why, again)
        for _ in indices:
            self.retried()
        self._heartbeat.progress()
        self._waiting.extendleft(reversed(indices))
        self._left += call.size

    def _until_something_is_due(self) -> float:
        now = time.monotonic()
        due = (message.since + self.deadline.seconds(message.call) for message in self._working.values())
        return max(0.0, min([self._heartbeat.left, *(moment - now for moment in due)]))

    def _awaited(self) -> list[str]:
        work = [f"{message.call.what} on {message.member}" for message in self._working.values()]
        return [*work, *self.crew.awaited()]


def _names_its_client(cause: BaseException | None) -> bool:
    """Whether an exception says at which client it was raised: those that cannot be pickled do not."""
    return isinstance(cause, RunFailed) or at_client(cause, ()) is not None


def _failure(call: Call, member: Member, error: RayError) -> RunFailed:
    """A client's exception, as this process would have raised it."""
    cause = cause_of(error)
    if isinstance(cause, RunFailed):
        return type(cause)(str(cause))
    node = member.place.node if member.place else "?"
    client = at_client(cause, call.task)
    what = call.what if client is None else what_of((client,), call.round, survey=call.kind == "survey")
    return ClientFailed(f"{what} failed on {node} ({member.name}):\n{uncoloured(str(error))}", client, call.round)
