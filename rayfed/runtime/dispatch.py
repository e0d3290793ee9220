"""The stages of a run on a crew: which actor gets which call, in which order, for how long, and when it is run again.

Calls are handed out in their order, the longest first, and their answers are given in that order too, whichever
arrives first. So an answer waits only for those before it, and no process ever holds the answers of a whole cohort.

An actor has a single message in flight: others would fail with a dying actor, and wait behind a long call. Where actors
are few, a message has several calls: each message costs a hundredth of a second. A stage may begin while the one before
it ends.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError

from rayfed.base.errors import (
    ClientFailed,
    KilledActors,
    RunFailed,
    WorkersLost,
    first_line,
    uncoloured,
)
from rayfed.rounds.tasks import task_text
from rayfed.runtime import internals
from rayfed.runtime.actors import bring
from rayfed.runtime.causes import cause_of, is_gpu_fault, is_loss, lost_object, ray_may_fail
from rayfed.runtime.crew import TICK, Crew, Member, named
from rayfed.runtime.deadline import Deadline
from rayfed.runtime.heartbeat import Heartbeat
from rayfed.runtime.signals import refuse_to_go_on
from rayfed.runtime.stage import Answer, Stage
from rayfed.runtime.worker import at_client

log = logging.getLogger(__name__)

READ_LIMIT = 10.0  # seconds in which an object that is on this node is read
FETCH = 10.0  # seconds after which a node that fetches a tree holds up no other
LONGEST_TICK = 1.0  # seconds that all other work may wait while an object is on its way
MEMORY = "out of memory"
Values = tuple[
    Any, Any, Sequence[ObjectRef]
]  # what a call gives: its value, its first object, the others' references
MORE_MEMORY = "\nRay killed it, as its node had no memory left: try fewer actors per node (a larger ray.num_cpus)"


@dataclass(frozen=True, eq=False)
class Message:
    """Calls in a row, at work on a member."""

    stage: Stage
    indices: range
    member: Member
    references: list[ObjectRef]
    since: float

    @cached_property  # asked of each message at every step
    def size(self) -> int:
        """Its work, compared with other messages of its kind."""
        return self.stage.size(self.indices)

    @cached_property
    def count(self) -> int:
        """Its tasks, or pieces of the test images."""
        return sum(self.stage.calls[index].count for index in self.indices)


@dataclass(eq=False)
class Dispatch:
    """Runs stages on a crew. A lost call is run again, at most `max_retries` times."""

    crew: Crew
    deadline: Deadline
    max_retries: int
    retried: Callable[[], None]  # called for each lost call that is run again
    trees: Mapping[ObjectRef, float] = field(
        default_factory=dict
    )  # large ones that calls need now: when each was put

    def __post_init__(self) -> None:
        self._stages: list[Stage] = []  # that have begun, and whose answers are not all given
        self._working: dict[ObjectRef, Message] = {}
        self._worked = 0.0  # seconds, by all members together, on messages that have ended
        self._coming: list[str] = []  # what is on its way here, in words
        self._heartbeat = Heartbeat()

    def begin(self, stage: Stage) -> Iterator[Values]:
        """Hand out a stage's calls, after those of the stages before it. Gives what the calls give, in their order.

        To wait for it raises `ClientFailed` for an exception of a call's own, `WorkersLost` where a call was lost too
        often.
        """
        self._stages.append(stage)
        with ray_may_fail():
            self._hand_out()
        return self._answers(stage)

    def _answers(self, stage: Stage) -> Iterator[Values]:
        try:
            for turn in stage.turns:
                self._heartbeat.progress()
                begun = time.monotonic()
                with ray_may_fail():
                    self._step(
                        0.0
                    )  # while the caller used an answer, actors may have finished: none should be idle
                    stage.show_progress()
                    while (values := self._fetched(stage, turn, begun)) is None:
                        self._step(0.0 if self._coming else None)
                        stage.show_progress()
                yield values
        finally:
            self._coming.clear()
            stage.end()
            self._stages.remove(stage)

    def seconds_worked(self) -> float:
        """How long members have been at work, all together, since the run began."""
        now = time.monotonic()
        return self._worked + sum(now - message.since for message in self._working.values())

    def _ended(self, reference: ObjectRef) -> Message:
        message = self._working.pop(reference)
        self._worked += time.monotonic() - message.since
        return message

    def _step(self, seconds: float | None = None) -> None:
        """Wait for an event, and handle it; with `seconds` 0 only what has happened already."""
        refuse_to_go_on()
        self._hand_out()
        seconds = self._until_something_is_due() if seconds is None else seconds
        for reference in self.crew.wait(list(self._working), seconds):
            message = self._ended(reference)
            with _ending(message.stage):
                self._arrived(message)
        now = time.monotonic()
        for reference, message in list(self._working.items()):
            if now < self._due(message):
                continue
            self._ended(reference)  # a late answer is ignored
            self.crew.open(message.member, kill=True)
            why = f"no answer from {message.member} for {now - message.since:.0f} s; it is killed"
            with _ending(message.stage):
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
                references = stage.send(member.actor, indices)
                bring(stage.only_on(member.node_id, indices))
                self._working[references[0]] = Message(
                    stage, indices, member, references, time.monotonic()
                )

    def _member_for(self, stage: Stage, index: int) -> Member | None:
        """An idle member; where a GPU has failed this call, one with another, or None while such a one is at work.

        For a sum, one on a node that makes the fewest: what it adds comes over its node's link.
        """
        faulty = stage.faulty.get(index)
        if stage.calls[index].adds:
            sums = Counter(
                each.member.node_id
                for each in self._working.values()
                if each.stage.adds(each.indices)
            )
            member = min(self.crew.idle, key=lambda one: sums[one.node_id])
        else:
            near = self._near()
            if not near:
                return None
            member = next((member for member in near if member.card != faulty), near[0])
            if member.card == faulty and any(
                other.member.card != faulty for other in self._working.values()
            ):
                return None
        self.crew.idle.remove(member)
        return member

    def _near(self) -> Sequence[Member]:
        """The idle members whose nodes have the large trees, or may fetch them now: two nodes per copy.

        Were all nodes to fetch at once, each would have its copy from this node, over one link. So those that have a
        copy serve others, and n nodes take the time of some log n transfers.
        """
        copies = internals.holders(self.trees)
        if copies is None:
            return self.crew.idle
        since = max(
            [time.monotonic() - FETCH, *self.trees.values()]
        )  # an earlier message does not fetch them
        served = {each.member.node_id for each in self._working.values() if each.since > since}
        if len(served - copies) < 2 * max(1, len(copies)):
            return self.crew.idle
        return [member for member in self.crew.idle if member.node_id in served | copies]

    def _arrived(self, message: Message) -> None:
        """A message has its answer, or has failed."""
        stage, indices, member = message.stage, message.indices, message.member
        seconds = time.monotonic() - message.since
        try:
            values = ray.get(message.references[0], timeout=READ_LIMIT)
        except RayError as error:
            self._failed(message, error)
            return
        self.crew.free(member)
        self._hand_out()  # first of all: the member waits for it
        self.deadline.took(stage.kind_of(indices), message.size, seconds)
        objects = message.references[1:]
        if indices[0] in stage.turns:  # what is added elsewhere is needed there
            bring(
                objects
            )  # in the meantime: summands for their turn, memories since a node may be lost
        for index, value in zip(indices, values, strict=True):
            count = stage.calls[index].num_objects
            stage.answered(index, Answer(member, value, objects[:count], time.monotonic()))
            objects = objects[count:]
        self._heartbeat.progress()

    def _failed(self, message: Message, error: RayError) -> None:
        """Run a message again that was lost. Raises `RunFailed` for an exception of its own."""
        stage, indices, member = message.stage, message.indices, message.member
        missing = lost_object(error)
        if missing is not None:
            self.crew.free(member)
            again = stage.to_run_again(indices, missing)
            which = "it needs" if again == indices else "it gave"
            self._run_again(
                stage, again, f"an object that {which} was lost ({type(missing).__name__})"
            )
        elif is_loss(error):
            full = self.crew.head.memory_was_full(member.process)
            counts = full or member.node_id not in self.crew.head.draining
            self.crew.open(member)
            died = "" if cause_of(error) else "died"
            why = f"lost with {member} ({MEMORY if full else type(error).__name__})"
            self._run_again(stage, indices, why, error, MEMORY if full else died, counts)
        elif is_gpu_fault(error) and indices[0] not in stage.faulty:
            stage.faulty |= dict.fromkeys(indices, member.card)
            self.crew.replace_after_fault(member)
            cause = first_line(cause_of(error) or error)
            self._run_again(
                stage, indices, f"the GPU of {member} failed ({cause})", error, how="GPU"
            )
        else:
            self.crew.free(member)
            raise _failure(message, error) from None

    def _fetched(self, stage: Stage, turn: int, begun: float) -> Values | None:
        """What the call gives whose turn has come, since `begun`; None while that, or its first object, is not here.

        The value of a sum is the answers of the calls that it adds.

        Who waits for the object lets all other work wait: as long again as it has waited, and a second at most.
        """
        self._coming.clear()
        if stage.error is not None:
            raise stage.error
        answer = stage.answers.pop(turn, None)
        if answer is None:
            return None
        indices, waited = range(turn, turn + 1), time.monotonic() - max(begun, answer.since)
        tick = min(max(waited, TICK), LONGEST_TICK)
        lost: RayError
        try:
            first = ray.get(answer.objects[0], timeout=tick) if answer.objects else None
            adds = stage.calls[turn].adds
            value = [stage.answers.pop(index) for index in adds] if adds else answer.value
            return value, first, answer.objects[1:]
        except GetTimeoutError as error:
            if waited < self.deadline.seconds(stage.kind_of(indices), stage.size(indices), 1):
                stage.answers[turn] = answer
                self._coming.append(f"the reply of {stage.text(indices)} from {answer.member}")
                return None
            why, lost = f"its reply did not come from {answer.member} for {waited:.0f} s", error
        except RayError as error:
            why, lost = f"its reply was lost with {answer.member} ({type(error).__name__})", error
        stage.done -= len(stage.calls[turn].task)
        self._run_again(stage, indices, why, lost)
        return None

    def _run_again(
        self,
        stage: Stage,
        indices: range,
        why: str,
        error: RayError | None = None,
        how: str = "",
        counts: bool = True,
    ) -> None:
        """Put lost calls back; `how` they ended an actor, if they did. Too many that count: `WorkersLost`."""
        if stage.over:
            return
        work, times = stage.text(indices), stage.lost(indices, counts)
        if times > self.max_retries:
            problem = f"{work}: lost {times} times, and ray.max_retries = {self.max_retries}; the last time: {why}"
            if error is not None:
                problem += f"\n{error}"
            if how == MEMORY:
                problem += MORE_MEMORY
            task = stage.clients(indices)
            client = task[0] if len(task) == 1 else None
            raise (
                KilledActors(problem, work, how, client, stage.round)
                if how
                else WorkersLost(problem)
            )
        again = (
            "running it again"
            if len(indices) == 1
            else f"running its {len(indices)} tasks again, each by itself"
        )
        log.warning("%s: %s; %s", work, why, again)
        for _ in indices:
            self.retried()
        self._heartbeat.progress()
        stage.wait_again(indices)

    def _due(self, message: Message) -> float:
        """When an answer would be late. It may become earlier, as other messages are answered."""
        kind = message.stage.kind_of(message.indices)
        return message.since + self.deadline.seconds(kind, message.size, message.count)

    def _until_something_is_due(self) -> float:
        if self.trees and self.crew.idle and any(stage.waiting for stage in self._stages):
            return TICK  # members wait until nodes have copies, which nothing tells
        now = time.monotonic()
        return max(
            0.0,
            min(
                [
                    self._heartbeat.left,
                    *(self._due(message) - now for message in self._working.values()),
                ]
            ),
        )

    def _awaited(self) -> list[str]:
        work = [
            f"{each.stage.text(each.indices)} on {each.member}" for each in self._working.values()
        ]
        return [*self._coming, *work, *self.crew.awaited()]


@contextmanager
def _ending(stage: Stage) -> Iterator[None]:
    """An error ends its stage, and is raised for whoever waits for the stage's answers: maybe not those of now."""
    try:
        yield
    except RunFailed as error:
        stage.end(error)


def _failure(message: Message, error: RayError) -> RunFailed:
    """A client's exception, as this process would have raised it."""
    stage, member, cause = message.stage, message.member, cause_of(error)
    if isinstance(cause, RunFailed):
        failed = type(cause)(str(cause))
        failed.client, failed.round = at_client(cause, ()), stage.round
        return failed
    client = at_client(cause, stage.clients(message.indices))
    if client is None:
        work = stage.text(message.indices)
    else:
        work = task_text((client,), stage.round, survey=stage.kind == "survey")
    said = f"{work} failed on {member.node} ({member.name}):\n{uncoloured(str(error))}"
    return ClientFailed(said, client, stage.round)
