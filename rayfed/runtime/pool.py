"""The work of a round on the actors of a crew: the messages to them, and their answers."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from rayfed.base.errors import WorkersLost
from rayfed.base.spans import timed
from rayfed.clients.clock import images_trained
from rayfed.methods.part import parts_at, remembers
from rayfed.rounds.local import Broadcast, Site, sample
from rayfed.rounds.round import Kind, Round
from rayfed.rounds.tasks import Task
from rayfed.runtime.calls import Call, Deadline
from rayfed.runtime.causes import ray_may_fail
from rayfed.runtime.crew import Crew
from rayfed.runtime.dispatch import FETCH_LIMIT, Dispatch
from rayfed.runtime.gauges import Gauges
from rayfed.runtime.here import Progress, no_progress
from rayfed.runtime.stage import Stage
from rayfed.runtime.worker import CohortWorkers, Look, what_of
from rayfed.tensors.trees import Tree, num_bytes
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed, pack

SMALL = 10_000  # bytes
TOGETHER, ROOM = 4, 2**26  # tasks in a message, and bytes of summed weights that an actor holds of them


class Pool(CohortWorkers):
    """`Workers` on a crew that has come up."""

    def __init__(self, crew: Crew, site: Site, progress: Progress, gauges: Gauges) -> None:
        self._crew = crew
        self._site = site
        options = site.job.ray
        self._dispatch = Dispatch(crew, Deadline(options.deadline), options.max_retries, gauges.retried)
        self._progress = progress
        self._gauges = gauges
        self._sent: dict[str, tuple[Tree, ObjectRef | Packed]] = {}
        self.num_test, self.num_sampled = len(site.federation.test), len(sample(site))

    def call_each(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, ObjectRef] | None
    ) -> Iterator[Sequence[Any]]:
        survey, sizes, training = memories is None, self._site.federation.partition.sizes, self._site.job.train
        remembering = not survey and remembers(parts_at(self._site.job.method, broadcast.round))

        def call(task: Task) -> Call:
            held = {client: memories[client] for client in task if client in memories} if memories is not None else {}
            what = what_of(task, broadcast.round, survey=survey)

            def missing(error: ObjectLostError) -> None:
                for client, memory in held.items():
                    if error.object_ref_hex == memory.hex():
                        lost = f"the memory of client {client} of an earlier round is lost ({type(error).__name__})"
                        again = "`rayfed resume` continues from a checkpoint, to the same bits"
                        raise WorkersLost(f"{what}: {lost}; {again}")
                self._send_again(error)

            size = int(images_trained(sizes[list(task)], training).sum())
            others = 1 + len(task) * remembering  # the summands, and memories
            return Call("survey" if survey else "train", what, size, others, missing, task, broadcast.round)

        def submit(actor: Any, calls: Sequence[Call]) -> list[ObjectRef]:
            tasks, count = [call.task for call in calls], 1 + sum(call.others for call in calls)
            if memories is None:
                return actor.survey.options(num_returns=count).remote(tasks, *self._fields(broadcast))
            held = {client: memories[client] for task in tasks for client in task if client in memories}
            arguments = tasks, [*held], *self._fields(broadcast), *held.values()
            return actor.fit.options(num_returns=count).remote(*arguments)

        def progress(done: int, total: int) -> None:
            self._progress(done, total)
            self._gauges.clients(done, total)

        summed = 2 * max(1, num_bytes(broadcast.weights))  # float64
        most = max(1, min(TOGETHER, ROOM // summed))
        calls = [call(task) for task in tasks]
        return self._dispatch.begin(Stage(calls, submit, most, no_progress if survey else progress))

    def evaluate_pieces(self, weights: Weights, pieces: Sequence[tuple[int, int]], look: Look) -> Iterator[Any]:
        def call(some: Sequence[tuple[int, int]]) -> Call:
            start, stop = some[0][0], some[-1][1]
            what = f"{look} of test images {start} to {stop}"
            return Call("evaluate", what, stop - start, missing=self._send_again, pieces=some)

        def submit(actor: Any, calls: Sequence[Call]) -> list[ObjectRef]:
            (call,) = calls
            return [actor.evaluate.remote(self._put("weights", weights), call.pieces, look)]

        # One call per actor: those that are done first begin the next round.
        count = min(len(pieces), max(1, self._crew.size))
        ends = [-(-len(pieces) * i // count) for i in range(count + 1)]
        calls = [call(pieces[start:end]) for start, end in pairwise(ends)]
        return (piece for done, *_ in self._dispatch.begin(Stage(calls, submit, 1, no_progress)) for piece in done)

    @ray_may_fail()
    def recall(self, memory: ObjectRef) -> Packed:
        return ray.get(memory, timeout=FETCH_LIMIT)

    @ray_may_fail()
    def remember(self, memory: Packed) -> ObjectRef:
        return ray.put(memory)

    def kinds(self) -> list[Kind]:
        return list(self._crew.kinds)

    @timed("the cluster")
    @ray_may_fail()
    def finished(self, round: Round) -> bool:
        self._gauges.round(round)
        self._crew.grow()
        return self._crew.in_danger

    def _fields(self, broadcast: Broadcast) -> tuple[Any, ...]:
        """The fields of a packed `Broadcast`."""
        trees = (self._put(key, getattr(broadcast, key)) for key in ("weights", "states", "payloads"))
        return (broadcast.round, *trees, broadcast.since)

    @timed("wire")
    def _put(self, name: str, tree: Tree) -> ObjectRef | Packed:
        """One object per node for all its actors. A tree that has not changed since the last time is not sent again.

        A small one goes along with each call: to fetch an object from the store takes a millisecond.
        """
        if name not in self._sent or self._sent[name][0] is not tree:
            packed = pack(tree)
            self._sent[name] = tree, packed if packed.num_bytes < SMALL else ray.put(packed)
        return self._sent[name][1]

    def _send_again(self, error: ObjectLostError) -> None:
        """An object in the store is lost: put all trees again, from this process."""
        self._sent.clear()
