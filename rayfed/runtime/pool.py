"""The work of a round on the actors of a crew: what each piece of it is sent, and what is made of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from rayfed.job import RayOptions
from rayfed.local import Broadcast, Evaluation
from rayfed.rounds import Arrival, Round
from rayfed.runtime.crew import Crew, WorkersLost
from rayfed.runtime.dispatch import FETCH_LIMIT, Batch, Call, Deadline, Result
from rayfed.runtime.gauges import Gauges
from rayfed.runtime.here import Progress, chunks, quiet
from rayfed.weights import Tree, Weights
from rayfed.wire import Packed, pack, unpack


class Pool:
    """`Workers` on a crew that has come up. `num_examples` gives a client's number of samples."""

    def __init__(
        self,
        crew: Crew,
        options: RayOptions,
        num_examples: Callable[[int], int],
        num_test: int,
        progress: Progress,
        gauges: Gauges,
    ) -> None:
        self._crew = crew
        self._deadline = Deadline(options.deadline)
        self._max_retries = options.max_retries
        self._num_examples = num_examples
        self._num_test = num_test
        self._progress = progress
        self._gauges = gauges
        self._sent: dict[str, tuple[Tree, ObjectRef]] = {}

    def survey(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[tuple[dict[str, Tree], int]]:
        def call(client: int) -> Call:
            return Call(
                "survey",
                f"client {client}, round {broadcast.round} (survey)",
                self._num_examples(client),
                lambda actor: actor.survey.options(num_returns=2).remote(*self._seal(broadcast), client),
                self._send_again,
                client,
                broadcast.round,
            )

        for result in self._each([call(client) for client in clients]):
            yield unpack(result.second), result.first

    def train(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Mapping[int, ObjectRef]
    ) -> Iterator[tuple[dict[str, Tree], Arrival]]:
        def call(client: int) -> Call:
            memory = memories.get(client)

            def missing(error: ObjectLostError) -> None:
                if memory is not None and error.object_ref_hex == memory.hex():
                    raise WorkersLost(
                        f"client {client}, round {broadcast.round}: what it remembers of an earlier round is lost "
                        f"({type(error).__name__}); `rayfed resume` goes on from a checkpoint, to the same bits"
                    )
                self._send_again(error)

            return Call(
                "fit",
                f"client {client}, round {broadcast.round}",
                self._num_examples(client),
                lambda actor: actor.fit.options(num_returns=3).remote(*self._seal(broadcast), client, memory),
                missing,
                client,
                broadcast.round,
            )

        def progress(done: int, total: int) -> None:
            self._progress(done, total)
            self._gauges.clients(done, total)

        results = self._each([call(client) for client in clients], progress)
        for client, result in zip(clients, results, strict=True):
            header, summands = result.first, result.second
            memory = result.third if header.remembers else None
            yield unpack(summands), Arrival(header.row(client, result.node), memory, summands.num_bytes)

    def evaluate(self, weights: Weights) -> Evaluation:
        def call(start: int, stop: int) -> Call:
            return Call(
                "evaluate",
                f"evaluation of test images {start} to {stop}",
                stop - start,
                lambda actor: [actor.evaluate.remote(self._put("weights", weights), start, stop)],
                self._send_again,
            )

        first, *rest = (result.first for result in self._each([call(*chunk) for chunk in chunks(self._num_test)]))
        return sum(rest, first)

    def recall(self, memory: ObjectRef) -> Packed:
        return ray.get(memory, timeout=FETCH_LIMIT)

    def remember(self, memory: Packed) -> ObjectRef:
        return ray.put(memory)

    def finished(self, round: Round) -> bool:
        self._gauges.round(round)
        self._crew.grow()
        return self._crew.in_danger

    def _each(self, calls: Sequence[Call], progress: Progress = quiet) -> Iterator[Result]:
        return Batch(self._crew, calls, self._deadline, self._max_retries, progress, self._gauges.retried).results()

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

    def _send_again(self, error: ObjectLostError) -> None:
        """Something that was sent is lost; this process still has all of it."""
        self._sent.clear()
