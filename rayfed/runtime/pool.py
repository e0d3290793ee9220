"""A pool of Ray actors behind `map`: who gets which items, for how long, and what is tried again.

Items are handed out in their order (tasks have the largest first), and results are given in that
order too. So a result waits only for those before it, and no process ever holds the results of a
whole cohort.

A worker has a single message in flight: others would fail with a dying worker, and wait behind
long work. Where workers are few, a message has several items: each message costs a hundredth of a
second. A call may begin while the one before it ends: that is how evaluation and training overlap.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError

from rayfed.base.errors import RunFailed
from rayfed.clients.clock import images_trained
from rayfed.rounds.executor import AddUp, Executor, Progress, Shared, Work
from rayfed.rounds.round import HardwareKind, Round
from rayfed.rounds.setup import Setup
from rayfed.runtime import policy
from rayfed.runtime.causes import ray_may_fail
from rayfed.runtime.deadline import Deadline
from rayfed.runtime.failures import Mishap, error_at_once, given_up, mishap_of
from rayfed.runtime.gauges import Gauges
from rayfed.runtime.heartbeat import Heartbeat, got
from rayfed.runtime.items import Answer, ItemState, MapCall, Message, QueuedItem, text_of
from rayfed.runtime.policy import Tries, Trouble
from rayfed.runtime.remote import bring, items_to_send, num_objects, together
from rayfed.runtime.signals import refuse_to_go_on
from rayfed.runtime.worker_group import TICK, Worker, WorkerGroup, named
from rayfed.tensors.trees import Tree, num_bytes
from rayfed.tensors.wire import Packed, pack

log = logging.getLogger(__name__)

# A tree of fewer bytes goes along with each message.
SMALL = 10_000
# Seconds in which a client's memory must arrive here.
FETCH_LIMIT = 600.0
# Seconds in which an object that is on this node is read.
READ_LIMIT = 10.0
# Seconds that all other work may wait while an object is on its way.
LONGEST_TICK = 1.0
# The most items in a message whose sums a worker holds.
MOST_ITEMS = 4
# The most bytes that the sums of a message have together.
MOST_BYTES_OF_MESSAGE = 2**26
# What stands in place of a result that has not come.
NOT_HERE = object()


class Pool(Executor):
    """The actors of a worker group that has come up."""

    def __init__(
        self, group: WorkerGroup, setup: Setup, progress: Progress, gauges: Gauges
    ) -> None:
        self._group = group
        self._setup = setup
        self._progress = progress
        self._gauges = gauges
        self._deadline = Deadline(setup.job.ray.deadline)
        self._max_retries = setup.job.ray.max_retries
        self._heartbeat = Heartbeat()
        # The calls that have begun, and whose results are not all given.
        self._calls: list[MapCall] = []
        self._working: dict[ObjectRef, Message] = {}
        # What is on its way here, in words.
        self._coming: list[str] = []
        # By name, the tree that was sent last.
        self._sent: dict[str, tuple[Tree, ObjectRef | Packed]] = {}
        # Seconds of work by all workers in messages that have ended; and both at the last round.
        self._worked = 0.0
        self._at_last_round = time.monotonic(), 0.0

    # What a round asks for.

    def map(self, work: Work, items: Sequence[Any], shared: Shared) -> "PoolResults":
        """Begin a call, after those before it; returns its results, which wait for the workers.

        They raise `ClientFailed` for an exception of the work's own, and `WorkersLost`
        where an item was lost too often.
        """
        call = MapCall(work, shared, self._items(work, items), self._most(work, shared))
        self._calls.append(call)
        with ray_may_fail():
            self._hand_out()
        return PoolResults(self._results(call), call, self)

    def drop(self, call: MapCall) -> None:
        """Hand out nothing more of a call. Work of it that runs goes on, and is ignored."""
        call.end()
        if call in self._calls:
            self._calls.remove(call)

    @ray_may_fail()
    def recall(self, memory: ObjectRef) -> Packed:
        """Fetch a client's memory."""
        (packed,) = got([memory], FETCH_LIMIT, "a client's memory")
        return packed

    @ray_may_fail()
    def remember(self, memory: Packed) -> ObjectRef:
        """Put a client's memory into Ray's store."""
        return ray.put(memory)

    def kinds(self) -> list[HardwareKind]:
        """List the kinds of hardware that workers have come up on."""
        return list(self._group.kinds)

    def may_end(self) -> bool:
        """Say whether Ray may soon end this process, as its head does not answer."""
        return self._group.head.silent

    @ray_may_fail()
    def between_rounds(self, round: Round) -> None:
        """Show a recorded round in the gauges, and look for nodes that have come."""
        clients = [row.client for row in round.clients]
        images = self._images(clients) if clients else 0
        self._gauges.round(round, images, self._idle_share())
        self._group.grow()

    # The items of a call, and their results.

    def _items(self, work: Work, values: Sequence[Any]) -> list[QueuedItem]:
        """Return the items of a call. Workers share a group's addends, and one adds them up."""
        turns: list[QueuedItem] = []
        number = 0
        for value in values:
            addends = []
            for smaller in work.split(value):
                clients = work.clients(smaller)
                size = self._images(clients) if clients else smaller[1] - smaller[0]
                addends.append(QueuedItem(work, smaller, size, number))
                number += 1
            if len(addends) == 1:
                turns.extend(addends)
            else:
                turns.append(QueuedItem(AddUp(work.round), None, len(addends), number, addends))
        return turns

    def _most(self, work: Work, shared: Shared) -> int:
        """Return the most items in a message: a worker holds their sums until all are done."""
        if work.kind in ("survey", "train"):
            bytes_of_sum = 2 * max(1, num_bytes(shared["weights"]))
            return max(1, min(MOST_ITEMS, MOST_BYTES_OF_MESSAGE // bytes_of_sum))
        return sys.maxsize

    def _images(self, clients: Sequence[int]) -> int:
        """Return on how many images these clients train in a round, each as often as it does."""
        sizes = self._setup.federation.partition.sizes[list(clients)]
        return int(images_trained(sizes, self._setup.job.train).sum())

    def _results(self, call: MapCall) -> Generator[Any, None, None]:
        """Yield the results of a call's items in their order, as their turns come."""
        try:
            for item in call.turns:
                self._heartbeat.progress()
                begun = time.monotonic()
                with ray_may_fail():
                    # While the caller used a result, workers may have finished.
                    self._step(0.0)
                    self._show_progress(call)
                    result = self._fetched(call, item, begun)
                    while result is NOT_HERE:
                        self._step(0.0 if self._coming else None)
                        self._show_progress(call)
                        result = self._fetched(call, item, begun)
                call.given(item)
                yield result
        finally:
            self._coming.clear()
            self.drop(call)

    def _fetched(self, call: MapCall, item: QueuedItem, begun: float) -> Any:
        """Return the result of the item whose turn has come, since `begun`; `NOT_HERE` until then.

        To wait for an object lets all other work wait: as long again as it has waited, and a second
        at most.
        """
        self._coming.clear()
        if call.error is not None:
            raise call.error
        if item.state is not ItemState.ANSWERED:
            return NOT_HERE
        answer = item.answer
        waited = time.monotonic() - max(begun, answer.since)
        tick = min(max(waited, TICK), LONGEST_TICK)
        lost: RayError
        try:
            summands = ray.get(answer.objects[0], timeout=tick) if answer.objects else None
            return together(item, summands)
        except GetTimeoutError as error:
            if waited < self._deadline.seconds(item.work.kind, item.size, 1):
                self._coming.append(f"the reply of {text_of([item])} from {answer.worker}")
                return NOT_HERE
            reason = f"its reply did not come from {answer.worker} for {waited:.0f} s"
            lost = error
        except RayError as error:
            reason = f"its reply was lost with {answer.worker} ({type(error).__name__})"
            lost = error
        self._act_on(call, Mishap(Trouble.REPLY, [item], None, reason, lost))
        return NOT_HERE

    def _show_progress(self, call: MapCall) -> None:
        """Tell how many clients are done. Only who waits does: a call may begin before its turn."""
        if call.work.kind == "train" and call.done != call.shown:
            call.shown = call.done
            self._progress(call.done, call.total)
            self._gauges.clients(call.done, call.total)

    # One step: hand out, wait for an event, handle it.

    def _step(self, seconds: float | None = None) -> None:
        """Wait for an event and handle it; with `seconds` 0 only what has happened already."""
        refuse_to_go_on()
        self._hand_out()
        if seconds is None:
            seconds = self._until_something_is_due()
        for reference in self._group.wait(list(self._working), seconds):
            message = self._ended(reference)
            with ending(message.call):
                self._arrived(message)
        now = time.monotonic()
        for reference, message in list(self._working.items()):
            if now >= self._due(message):
                # A late answer is ignored.
                self._ended(reference)
                late = now - message.since
                reason = f"no answer from {message.worker} for {late:.0f} s; it is killed"
                with ending(message.call):
                    mishap = Mishap(Trouble.SILENCE, message.items, message.worker, reason)
                    self._act_on(message.call, mishap)
        self._hand_out()
        self._heartbeat.beat(lambda: named(self._awaited()))

    def _hand_out(self) -> None:
        """Give idle workers what waits, in the order of the calls."""
        workers = max(1, len(self._group.idle) + len(self._working))
        for call in self._calls:
            while call.waiting and self._group.idle:
                worker = self._worker_for(call.waiting[0])
                if worker is None:
                    break
                # The pieces of an evaluation have no clients.
                evenly = not call.total
                items = call.next_message(self._group.size if evenly else workers, evenly=evenly)
                references = self._send(call, items, worker)
                message = Message(call, items, worker, references, time.monotonic())
                self._working[references[0]] = message

    def _worker_for(self, item: QueuedItem) -> Worker | None:
        """Take an idle worker for an item. None while it is better to wait for another.

        A sum goes to a node that makes the fewest: what it adds comes over the node's link. An item
        at which a GPU has failed goes to another GPU, if there is one.
        """
        idle = self._group.idle
        if item.addends:
            sums = Counter(m.worker.node_id for m in self._working.values() if m.items[0].addends)
            worker = min(idle, key=lambda candidate: sums[candidate.node_id])
        else:
            others = [candidate for candidate in idle if candidate.card != item.faulty]
            busy = any(m.worker.card != item.faulty for m in self._working.values())
            if not others and busy:
                return None
            worker = (others or idle)[0]
        self._group.take(worker)
        return worker

    def _send(self, call: MapCall, items: Sequence[QueuedItem], worker: Worker) -> list[ObjectRef]:
        """Send items to a worker; returns the references of the values, and of all objects."""
        work = items[0].work
        shared = {} if items[0].addends else call.shared
        trees = [self._put(name, tree) for name, tree in shared.items()]
        values, objects = items_to_send(items, self._deadline.of_fetching)
        count = 1 + sum(num_objects(item) for item in items)
        do = worker.actor.do.options(num_returns=count, name=work.name)
        references = do.remote(work, values, list(shared), *trees, *objects)
        # Memories that the adding actor made itself have no copy elsewhere; bring one here.
        for item in items:
            for addend in item.addends:
                if addend.answer.worker.node_id == worker.node_id:
                    bring(addend.answer.objects[1:])
        return references if count > 1 else [references]

    def _put(self, name: str, tree: Tree) -> ObjectRef | Packed:
        """Put a tree into Ray's store: one object per node for all its workers.

        The tree that was sent last under this name is not sent again. That is known by its
        identity, as nobody writes to a tree of a round. A small tree goes along with each message:
        to fetch an object from the store takes a millisecond.
        """
        sent_tree, sent = self._sent.get(name, (None, None))
        if sent is None or sent_tree is not tree:
            packed = pack(tree)
            sent = packed if packed.num_bytes < SMALL else ray.put(packed)
            self._sent[name] = tree, sent
        return sent

    def _arrived(self, message: Message) -> None:
        """Take the answer of a message, or act on its failure."""
        call, worker = message.call, message.worker
        try:
            values = ray.get(message.references[0], timeout=READ_LIMIT)
        except RayError as error:
            self._message_failed(message, error)
            return
        self._group.free(worker)
        now = time.monotonic()
        self._deadline.took(message.kind, message.size, now - message.since)
        # This comes first, as the worker waits for work.
        self._hand_out()
        objects = message.references[1:]
        for item, value in zip(message.items, values, strict=True):
            count = num_objects(item)
            # What is added elsewhere is needed there. All else comes here in the meantime: sums for
            # their turn, and memories because a node may be lost.
            if item in call.turns_set:
                bring(objects[:count])
            call.answered(item, Answer(worker, value, objects[:count], now))
            objects = objects[count:]
        self._heartbeat.progress()

    # Failures.

    def _message_failed(self, message: Message, error: RayError) -> None:
        """Find out what an error means, and act on it."""
        mishap = mishap_of(message, error)
        if mishap.trouble is Trouble.ADDEND:
            # The sum waits until its addend is made again.
            message.items[0].state = ItemState.WAITING
        if mishap.trouble is Trouble.TREE:
            # Send all trees again, from this process.
            self._sent.clear()
        self._act_on(message.call, mishap)

    def _act_on(self, call: MapCall, mishap: Mishap) -> None:
        """Do what the policy decides. Raises `RunFailed` where that is the end of the run."""
        items, worker, head = mishap.items, mishap.worker, self._group.head
        if mishap.trouble is Trouble.WORKER and head.memory_was_full(worker.process):
            mishap = replace(mishap, out_of_memory=True)
        tries = Tries(
            together=len(items),
            times_lost=items[0].times_lost,
            max_retries=self._max_retries,
            gpu_failed=items[0].faulty is not None,
            draining=worker is not None and worker.node_id in head.draining,
            out_of_memory=mishap.out_of_memory,
        )
        decision = policy.decide(mishap.trouble, tries)
        if mishap.trouble is Trouble.GPU:
            for item in items:
                item.faulty = worker.card
        if worker is not None:
            self._settle(worker, decision.worker)
        if decision.items is policy.ItemFate.FAIL:
            raise error_at_once(call.work, mishap) from None
        if call.over:
            return
        if decision.counts:
            items[0].times_lost += 1
        if decision.items is policy.ItemFate.GIVE_UP:
            raise given_up(call.work, mishap, self._max_retries)
        self._try_again(call, mishap)

    def _try_again(self, call: MapCall, mishap: Mishap) -> None:
        """Put the items of a mishap back, and log it."""
        items = mishap.items
        again = "running it again"
        if len(items) > 1:
            again = f"running its {len(items)} tasks again, each by itself"
        log.warning("%s: %s; %s", text_of(items), mishap.why, again)
        for _ in items:
            self._gauges.retried()
        self._heartbeat.progress()
        call.wait_again(items)

    def _settle(self, worker: Worker, fate: policy.WorkerFate) -> None:
        """Do with a worker what the policy decides."""
        if fate is policy.WorkerFate.KEEP:
            self._group.free(worker)
        elif fate is policy.WorkerFate.REPLACE:
            self._group.replace_after_fault(worker)
        else:
            self._group.bring_up(worker, kill=fate is policy.WorkerFate.RESTART)

    # Time.

    def _ended(self, reference: ObjectRef) -> Message:
        """Forget a message that is over, and count how long its worker was busy with it."""
        message = self._working.pop(reference)
        self._worked += time.monotonic() - message.since
        return message

    def _idle_share(self) -> float:
        """Return the part of the workers' time since the last call in which they had no work."""
        then, before = self._at_last_round
        now = time.monotonic()
        worked = self._worked + sum(now - message.since for message in self._working.values())
        self._at_last_round = now, worked
        # Workers may have gone.
        return max(0.0, 1 - (worked - before) / max(1e-9, self._group.size * (now - then)))

    def _due(self, message: Message) -> float:
        """Return when an answer would be late. It may become earlier, as others are answered."""
        return message.since + self._deadline.seconds(message.kind, message.size, message.count)

    def _until_something_is_due(self) -> float:
        """Return the seconds until an answer is late, or a line in the log is due."""
        now = time.monotonic()
        dues = [self._due(message) - now for message in self._working.values()]
        return max(0.0, min([self._heartbeat.left, *dues]))

    def _awaited(self) -> list[str]:
        """Say what the run waits for, and where."""
        messages = self._working.values()
        work = [f"{text_of(message.items)} on {message.worker}" for message in messages]
        return [*self._coming, *work, *self._group.awaited()]


@dataclass(frozen=True, eq=False)
class PoolResults:
    """The results of a call, in the order of its items."""

    waiting: Generator[Any, None, None]
    call: MapCall
    pool: Pool

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.waiting)

    def close(self) -> None:
        """Drop the call. A generator alone would not, if no result was asked for yet."""
        self.waiting.close()
        self.pool.drop(self.call)


@contextmanager
def ending(call: MapCall) -> Iterator[None]:
    """End a call with an error, and keep it for whoever waits for the call later."""
    try:
        yield
    except RunFailed as error:
        call.end(error)
