"""The stages of a run on a crew: which actor gets which call, in which order, for how long, and when it is run again.

Calls are handed out in their order, the longest first, and their answers are given in that order too, whichever
arrives first. So an answer waits only for those before it, and no process ever holds the answers of a whole cohort.

An actor has a single message in flight: others would fail with a dying actor, and wait behind a long call. Where actors
are few, a message has several calls: each message costs a hundredth of a second. A stage may begin while the one before
it ends.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from rayfed.base.errors import ClientFailed, KilledActors, RunFailed, WorkersLost, first_line, uncoloured
from rayfed.rounds.tasks import task_text
from rayfed.runtime.calls import Call, Deadline, Values, together
from rayfed.runtime.causes import cause_of, is_gpu_fault, is_loss, lost_object, ray_may_fail
from rayfed.runtime.crew import Crew, Member, named
from rayfed.runtime.head import memory_was_full
from rayfed.runtime.heartbeat import Heartbeat
from rayfed.runtime.signals import refuse_to_go_on
from rayfed.runtime.stage import Stage
from rayfed.runtime.worker import at_client

log = logging.getLogger(__name__)

FETCH_LIMIT = 600.0  # seconds in which the reply of a finished call must arrive
MEMORY = "out of memory"
MORE_MEMORY = "\nRay killed it, as its node had no memory left: try fewer actors per node (a larger ray.num_cpus)"


@dataclass(frozen=True, eq=False)
class Message:
    """Calls in a row, at work on a member."""

    stage: Stage
    indices: range
    call: Call  # all of them as one
    member: Member
    references: list[ObjectRef]
    since: float


@dataclass(eq=False)
class Dispatch:
    """Runs stages on a crew. A lost call is run again, at most `max_retries` times."""

    crew: Crew
    deadline: Deadline
    max_retries: int
    retried: Callable[[], None]  # called for each lost call that is run again

    def __post_init__(self) -> None:
        self._stages: list[Stage] = []  # that have begun, and whose answers are not all given
        self._working: dict[ObjectRef, Message] = {}
        self._heartbeat = Heartbeat()

    def begin(self, stage: Stage) -> Iterator[Values]:
        """Hand out a stage's calls, after those of the stages before it. Its answers, in the order of its calls.

        To wait for an answer raises `ClientFailed` for an exception of the call's own, `WorkersLost` where a call was
        lost too often.
        """
        self._stages.append(stage)
        with ray_may_fail():
            self._hand_out()
        return self._answers(stage)

    def _answers(self, stage: Stage) -> Iterator[Values]:
        try:
            stage.watch()
            for turn in range(len(stage.calls)):
                self._heartbeat.progress()
                with ray_may_fail():
                    self._step(0.0)  # while the caller used an answer, actors may have finished: none should be idle
                    while (answer := self._fetched(stage, turn)) is None:
                        self._step()
                yield answer
        finally:
            stage.end()
            self._stages.remove(stage)

    def _step(self, seconds: float | None = None) -> None:
        """Wait for an event, and handle it; with `seconds` 0 only what has happened already."""
        refuse_to_go_on()
        self._hand_out()
        seconds = self._until_something_is_due() if seconds is None else seconds
        for reference in self.crew.wait(list(self._working), seconds):
            message = self._working.pop(reference)
            with _failing(message.stage):
                self._arrived(message)
        now = time.monotonic()
        for reference, message in list(self._working.items()):
            if now >= message.since + self.deadline.seconds(message.call):
                del self._working[reference]  # a late answer is ignored
                self.crew.open(message.member, kill=True)
                why = f"no answer from {message.member} for {now - message.since:.0f} s; it is killed"
                with _failing(message.stage):
                    self._run_again(message.stage, message.indices, why, how="no answer")
        self._hand_out()
        self._heartbeat.beat(lambda: named(self._awaited()))

    def _hand_out(self) -> None:
        actors = len(self.crew.idle) + len(self._working)
        for stage in self._stages:
            while stage.waiting and self.crew.idle:
                member = self._member_for(stage, stage.waiting[0])
                if member is None:
                    break
                indices = stage.next_message(actors)
                calls = [stage.calls[index] for index in indices]
                references = stage.submit(member.actor, calls)
                message = Message(stage, indices, together(calls), member, references, time.monotonic())
                self._working[references[0]] = message

    def _member_for(self, stage: Stage, index: int) -> Member | None:
        """An idle member; where a GPU has failed this call, on another node, or None while such a member is at work."""
        idle, faulty = self.crew.idle, stage.faulty.get(index)
        member = next((member for member in idle if member.node_id != faulty), None)
        if member is None:
            if any(message.member.node_id != faulty for message in self._working.values()):
                return None
            member = idle[0]
        idle.remove(member)
        return member

    def _arrived(self, message: Message) -> None:
        """A message has its reply, or has failed."""
        stage, member = message.stage, message.member
        seconds = time.monotonic() - message.since
        try:
            firsts = ray.get(message.references[0], timeout=FETCH_LIMIT)
        except RayError as error:
            self._failed(message, error)
            return
        self.crew.idle.append(member)
        self._hand_out()  # first of all: the member waits for it
        self.deadline.took(message.call, seconds)
        others = message.references[1:]
        of_calls = iter(others)
        for index, first in zip(message.indices, firsts, strict=True):
            stage.finished[index] = member, [first, *islice(of_calls, stage.calls[index].others)]
        # The rest is brought to this node in the meantime: the sum for its turn, memories since a node may be lost.
        ray.wait(others, num_returns=len(others), timeout=0, fetch_local=True)
        self._heartbeat.progress()
        stage.clients_done(len(message.call.task))

    def _failed(self, message: Message, error: RayError) -> None:
        """Run a message again that was lost. Raises `RunFailed` for an exception of its own."""
        stage, indices, member = message.stage, message.indices, message.member
        missing = lost_object(error)
        if missing is not None:
            self.crew.idle.append(member)
            message.call.missing(missing)
            self._run_again(stage, indices, f"an object that it needs was lost ({type(missing).__name__})")
        elif is_loss(error):
            full = member.place is not None and not self.crew.in_danger and memory_was_full(member.place.process)
            self.crew.open(member)
            if full:
                self._run_again(stage, indices, f"lost with {member} ({MEMORY})", error, how=MEMORY)
            else:
                how = "" if cause_of(error) else "died"
                self._run_again(stage, indices, f"lost with {member} ({type(error).__name__})", error, how)
        elif is_gpu_fault(error) and indices[0] not in stage.faulty:
            stage.faulty |= dict.fromkeys(indices, member.node_id)
            self.crew.open(member, kill=True)  # the error would stay in its process
            cause = first_line(cause_of(error) or error)
            self._run_again(stage, indices, f"the GPU of {member} failed ({cause})", error, how="GPU")
        else:
            self.crew.idle.append(member)
            raise _failure(message.call, member, error) from None

    def _fetched(self, stage: Stage, turn: int) -> Values | None:
        """The whole answer whose turn has come; None while it is not there."""
        if stage.error is not None:
            raise stage.error
        if turn not in stage.finished:
            return None
        member, answer = stage.finished.pop(turn)
        try:
            return [*answer[:1], *ray.get(answer[1:2], timeout=FETCH_LIMIT), *answer[2:]]
        except RayError as error:
            stage.clients_done(-len(stage.calls[turn].task))
            why = f"its reply was lost with {member} ({type(error).__name__})"
            self._run_again(stage, range(turn, turn + 1), why, error)
            return None

    def _run_again(self, stage: Stage, indices: range, why: str, error: RayError | None = None, how: str = "") -> None:
        """Put lost calls back; `how` they ended an actor, if they did. Raises `WorkersLost` after too many losses."""
        if stage.over:
            return
        call = together([stage.calls[index] for index in indices])
        times = stage.lost(indices)
        if times > self.max_retries:
            problem = f"{call.work}: lost {times} times, and ray.max_retries = {self.max_retries}; the last time: {why}"
            if error is not None:
                problem += f"\n{error}"
            if how == MEMORY:
                problem += MORE_MEMORY
            client = call.task[0] if len(call.task) == 1 else None
            raise KilledActors(problem, call.work, how, client, call.round) if how else WorkersLost(problem)
        again = "running it again" if call.count == 1 else f"running its {call.count} tasks again, each by itself"
        log.warning("%s: %s; %s", call.work, why, again)
        for _ in indices:
            self.retried()
        self._heartbeat.progress()
        stage.wait_again(indices)

    def _until_something_is_due(self) -> float:
        now = time.monotonic()
        due = (message.since + self.deadline.seconds(message.call) for message in self._working.values())
        return max(0.0, min([self._heartbeat.left, *(moment - now for moment in due)]))

    def _awaited(self) -> list[str]:
        work = [f"{message.call.work} on {message.member}" for message in self._working.values()]
        return [*work, *self.crew.awaited()]


@contextmanager
def _failing(stage: Stage) -> Iterator[None]:
    """An error ends its stage, and is raised for whoever waits for the stage's answers: maybe not those of now."""
    try:
        yield
    except RunFailed as error:
        stage.end(error)


def _failure(call: Call, member: Member, error: RayError) -> RunFailed:
    """A client's exception, as this process would have raised it."""
    cause = cause_of(error)
    if isinstance(cause, RunFailed):
        failed = type(cause)(str(cause))
        failed.client, failed.round = at_client(cause, ()), call.round
        return failed
    node = member.place.node if member.place else "?"
    client = at_client(cause, call.task)
    work = call.work
    if client is not None:
        work = task_text((client,), call.round, survey=call.kind == "survey")
    return ClientFailed(f"{work} failed on {node} ({member.name}):\n{uncoloured(str(error))}", client, call.round)
