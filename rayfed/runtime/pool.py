"""Actors that live for the whole run and serve any client: who works on what, in which order, and what if one dies.

Longest client first, so that the last one of a round does not hold up the others. Results come out in the order of the
calls, whatever the order in which they arrive. An actor that failed gets no work until it has answered again, so that a
worker that fails fast never looks like an idle one.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from rayfed.local import Broadcast, ClientFailed, Evaluation, RunFailed
from rayfed.rounds import Arrival, Round
from rayfed.runtime.here import Progress, chunks, quiet
from rayfed.weights import Tree, Weights
from rayfed.wire import Packed, pack, unpack

log = logging.getLogger(__name__)

COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Ray paints its tracebacks
HEARTBEAT = 10.0  # seconds without progress after which a line says who is awaited
MAX_RETRIES = 3  # times that one piece of work is run again after its worker was lost


class WorkersLost(RunFailed):
    """Work that was lost with its worker, again and again."""


@dataclass(frozen=True)
class Call:
    """A piece of work: how to submit it to an actor, and how long it may take compared with others."""

    what: str
    size: int
    submit: Callable[[Any], list[ObjectRef]]  # the first of the references is small and tells of an error


class Pool:
    """`Workers` on Ray actors, which have been opened; `reopen` does so for one that was restarted, and tells its node.

    `num_examples` gives a client's number of samples,"""

    def __init__(
        self,
        actors: Sequence[Any],
        reopen: Callable[[Any], ObjectRef],
        num_examples: Callable[[int], int],
        num_test: int,
        progress: Progress = quiet,
    ) -> None:
        self._names = {actor: f"client-{i}" for i, actor in enumerate(actors)}
        self._idle = deque(actors)
        self._recovering: dict[ObjectRef, Any] = {}
        self._reopen = reopen
        self._num_examples = num_examples
        self._num_test = num_test
        self._progress = progress
        self._sent: dict[str, tuple[Tree, ObjectRef]] = {}

    def survey(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[tuple[dict[str, Tree], int]]:
        envelope = self._seal(broadcast)

        def call(client: int) -> Call:
            return Call(
                f"client {client}, round {broadcast.round} (survey)",
                self._num_examples(client),
                lambda actor: [actor.survey.remote(*envelope, client)],
            )

        for (_, summands), _, _ in self._each([call(client) for client in clients]):
            yield unpack(summands), summands.num_bytes

    def train(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Mapping[int, ObjectRef]
    ) -> Iterator[tuple[dict[str, Tree], Arrival]]:
        envelope = self._seal(broadcast)

        def call(client: int) -> Call:
            return Call(
                f"client {client}, round {broadcast.round}",
                self._num_examples(client),
                lambda actor: actor.fit.options(num_returns=3).remote(*envelope, client, memories.get(client)),
            )

        replies = self._each([call(client) for client in clients], self._progress)
        for client, ((node, header), summands, memory) in zip(clients, replies, strict=True):
            row = header.row(client, node)
            yield unpack(summands), Arrival(row, memory if header.remembers else None, summands.num_bytes)

    def evaluate(self, weights: Weights) -> Evaluation:
        sent = self._put("weights", weights)

        def call(start: int, stop: int) -> Call:
            return Call(
                f"evaluation of test images {start} to {stop}",
                stop - start,
                lambda actor: [actor.evaluate.remote(sent, start, stop)],
            )

        first, *rest = (result for (_, result), _, _ in self._each([call(*chunk) for chunk in chunks(self._num_test)]))
        return sum(rest, first)

    def recall(self, memory: ObjectRef) -> Packed:
        return ray.get(memory)

    def remember(self, memory: Packed) -> ObjectRef:
        return ray.put(memory)

    def finished(self, round: Round) -> None:
        pass

    def _seal(self, broadcast: Broadcast) -> tuple[int, ObjectRef, ObjectRef, ObjectRef, dict[str, int]]:
        return (
            broadcast.round,
            self._put("weights", broadcast.weights),
            self._put("states", broadcast.states),
            self._put("payloads", broadcast.payloads),
            broadcast.since,
        )

    def _put(self, name: str, tree: Tree) -> ObjectRef:
        """One object per node for everybody; what has not changed since the last time is not sent again."""
        if name not in self._sent or self._sent[name][0] is not tree:
            self._sent[name] = tree, ray.put(pack(tree))
        return self._sent[name][1]

    def _each(self, calls: Sequence[Call], progress: Progress = quiet) -> Iterator[tuple[Any, Any, ObjectRef | None]]:
        """Run the calls; yield, in their order, each one's first and second value and the reference to its third."""
        waiting = deque(sorted(range(len(calls)), key=lambda i: -calls[i].size))
        working: dict[ObjectRef, tuple[Any, int, list[ObjectRef]]] = {}
        finished: dict[int, tuple[Any, list[ObjectRef]]] = {}
        retries: Counter[int] = Counter()
        num_finished = 0

        def again(index: int, error: RayError) -> None:
            retries[index] += 1
            if retries[index] > MAX_RETRIES:
                raise WorkersLost(
                    f"{calls[index].what}: lost with its worker {retries[index]} times; the last: {error}"
                ) from error
            log.warning("%s: lost with its actor (%s); running it again", calls[index].what, type(error).__name__)
            waiting.appendleft(index)

        turn = 0
        try:
            while turn < len(calls):
                while waiting and self._idle:
                    index, actor = waiting.popleft(), self._idle.popleft()
                    references = calls[index].submit(actor)
                    working[references[0]] = actor, index, references
                for reference in self._wait(list(working), calls, working):
                    actor, index, references = working.pop(reference)
                    try:
                        finished[index] = ray.get(reference), references
                        self._idle.append(actor)
                        num_finished += 1
                        progress(num_finished, len(calls))
                    except RayTaskError as error:
                        raise _failure(calls[index].what, error) from None
                    except RayError as error:
                        self._recover(actor)
                        again(index, error)
                while turn in finished:
                    # Fetched now that its turn has come, and dropped by the caller: the driver never holds a cohort.
                    first, references = finished.pop(turn)
                    try:
                        second = ray.get(references[1]) if len(references) > 1 else None
                    except RayError as error:
                        num_finished -= 1
                        again(turn, error)
                        break
                    third = references[2] if len(references) > 2 else None
                    del references
                    yield first, second, third
                    turn += 1
        finally:
            for reference in working:
                ray.cancel(reference, force=False)

    def _wait(self, references: list[ObjectRef], calls: Sequence[Call], working: Mapping[Any, Any]) -> list[ObjectRef]:
        """The calls that have ended; takes back actors that have recovered, and says who is awaited."""
        if not references and not self._recovering:
            if not self._idle:
                raise WorkersLost("no actor is left to work on")
            return []
        ready, _ = ray.wait([*references, *self._recovering], timeout=HEARTBEAT)
        if not ready:
            whom = [f"{calls[index].what} on actor {self._names[actor]}" for actor, index, _ in working.values()]
            whom += [f"actor {self._names[actor]} to come back" for actor in self._recovering.values()]
            log.warning("no progress for %.0f s; waiting for %s", HEARTBEAT, ", ".join(whom))
        for reference in ready:
            if reference in self._recovering:
                self._take_back(reference)
        return [reference for reference in ready if reference in working]

    def _recover(self, actor: Any) -> None:
        self._recovering[self._reopen(actor)] = actor

    def _take_back(self, reference: ObjectRef) -> None:
        actor = self._recovering.pop(reference)
        try:
            node, _ = ray.get(reference)
        except ActorDiedError as error:
            log.warning("actor %s is gone for good: %s", self._names[actor], error)
        except ActorUnavailableError:
            time.sleep(0.1)  # it is being restarted; it is asked again, and no work goes to it meanwhile
            self._recover(actor)
        else:
            log.warning("actor %s is back, on %s", self._names[actor], node)
            self._idle.append(actor)


def _failure(what: str, error: RayTaskError) -> RunFailed:
    """What a client raised, as this process would have raised it."""
    if isinstance(error.cause, RunFailed):
        return type(error.cause)(str(error.cause))
    return ClientFailed(f"{what} failed:\n{COLOURS.sub('', str(error))}")
