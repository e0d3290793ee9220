"""The work of a round on the actors of a crew: the messages to them, and their replies."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from rayfed.base.errors import WorkersLost
from rayfed.clients.clock import images_trained
from rayfed.methods.part import parts_at, remembers
from rayfed.rounds.local import Broadcast, sample
from rayfed.rounds.round import Kind, Round
from rayfed.rounds.site import Site
from rayfed.rounds.tasks import Task, task_text
from rayfed.rounds.workers import Look, Piece, Progress, Sent, Workers, no_progress
from rayfed.runtime.calls import Call, Deadline
from rayfed.runtime.causes import ray_may_fail
from rayfed.runtime.crew import Crew
from rayfed.runtime.dispatch import FETCH_LIMIT, Dispatch
from rayfed.runtime.gauges import Gauges
from rayfed.runtime.stage import Stage
from rayfed.tensors.trees import Tree, num_bytes
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed, pack

SMALL = 10_000  # bytes
MOST_TASKS = 4  # in a message
MOST_BYTES = 2**26  # of the sums that an actor holds until all tasks of a message are done


class RayWorkers(Workers):
    """The actors of a crew that has come up."""

    def __init__(self, crew: Crew, site: Site, progress: Progress, gauges: Gauges) -> None:
        self._crew = crew
        self._site = site
        options = site.job.ray
        self._dispatch = Dispatch(crew, Deadline(options.deadline), options.max_retries, gauges.retried)
        self._progress = progress
        self._gauges = gauges
        self._sent: dict[str, tuple[Tree, ObjectRef | Packed]] = {}  # by name, the tree that was sent last
        self.num_test = len(site.federation.test)
        self.num_sampled = len(sample(site))

    def call_each(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, ObjectRef] | None
    ) -> Iterator[Sent]:
        survey = memories is None
        remembering = not survey and remembers(parts_at(self._site.job.method, broadcast.round))

        def call(task: Task) -> Call:
            work = task_text(task, broadcast.round, survey=survey)

            def missing(error: ObjectLostError) -> None:
                for client, memory in _of_task(memories, [task]).items():
                    if error.object_ref_hex == memory.hex():
                        raise WorkersLost(
                            f"{work}: the memory of client {client} of an earlier round is lost "
                            f"({type(error).__name__}); `rayfed resume` continues from a checkpoint, to the same bits"
                        )
                self._send_again(error)

            sizes = self._site.federation.partition.sizes[list(task)]
            size = int(images_trained(sizes, self._site.job.train).sum())
            others = 1 + len(task) if remembering else 1  # the summands, and memories
            return Call("survey" if survey else "train", work, size, others, missing, task, broadcast.round)

        def submit(actor: Any, calls: Sequence[Call]) -> list[ObjectRef]:
            of_calls = [call.task for call in calls]
            count = 1 + sum(call.others for call in calls)
            if memories is None:
                return actor.survey.options(num_returns=count).remote(of_calls, *self._fields(broadcast))
            held = _of_task(memories, of_calls)
            return actor.fit.options(num_returns=count).remote(
                of_calls, list(held), *self._fields(broadcast), *held.values()
            )

        def progress(done: int, total: int) -> None:
            self._progress(done, total)
            self._gauges.clients(done, total)

        summed = 2 * max(1, num_bytes(broadcast.weights))  # float64
        most = max(1, min(MOST_TASKS, MOST_BYTES // summed))
        stage = Stage([call(task) for task in tasks], submit, most, no_progress if survey else progress)
        replies = self._dispatch.begin(stage)
        return ((reply, summands, kept) for reply, summands, *kept in replies)

    def evaluate_pieces(self, weights: Weights, pieces: Sequence[Piece], look: Look) -> Iterator[Any]:
        def call(some: Sequence[Piece]) -> Call:
            start, stop = some[0][0], some[-1][1]
            work = f"{look} of test images {start} to {stop}"
            return Call("evaluate", work, stop - start, missing=self._send_again, pieces=some)

        def submit(actor: Any, calls: Sequence[Call]) -> list[ObjectRef]:
            (call,) = calls
            return [actor.evaluate.remote(self._put("weights", weights), call.pieces, look)]

        # One call per actor: those that are done first begin the next round.
        count = min(len(pieces), max(1, self._crew.size))
        ends = [-(-len(pieces) * i // count) for i in range(count + 1)]
        calls = [call(pieces[start:end]) for start, end in pairwise(ends)]
        replies = self._dispatch.begin(Stage(calls, submit, 1, no_progress))
        return (result for values in replies for result in values[0])

    @ray_may_fail()
    def recall(self, memory: ObjectRef) -> Packed:
        return ray.get(memory, timeout=FETCH_LIMIT)

    @ray_may_fail()
    def remember(self, memory: Packed) -> ObjectRef:
        return ray.put(memory)

    def kinds(self) -> list[Kind]:
        return list(self._crew.kinds)

    @ray_may_fail()
    def finished(self, round: Round) -> bool:
        self._gauges.round(round)
        self._crew.grow()
        return self._crew.in_danger

    def _fields(self, broadcast: Broadcast) -> tuple[Any, ...]:
        """The fields of a packed `Broadcast`."""
        trees = (self._put(name, getattr(broadcast, name)) for name in ("weights", "states", "payloads"))
        return (broadcast.round, *trees, broadcast.since)

    def _put(self, name: str, tree: Tree) -> ObjectRef | Packed:
        """One object per node for all its actors. The tree that was sent last under this name is not sent again.

        That is known by its identity, as nobody writes to a tree of a round. A small tree goes along with each call: to
        fetch an object from the store takes a millisecond.
        """
        last, sent = self._sent.get(name, (None, None))
        if sent is None or last is not tree:
            packed = pack(tree)
            sent = packed if packed.num_bytes < SMALL else ray.put(packed)
            self._sent[name] = tree, sent
        return sent

    def _send_again(self, error: ObjectLostError) -> None:
        """An object in the store is lost: put all trees again, from this process."""
        self._sent.clear()


def _of_task(memories: Mapping[int, ObjectRef] | None, tasks: Sequence[Task]) -> dict[int, ObjectRef]:
    """The memories of the clients of some tasks, of those that have one."""
    if memories is None:
        return {}
    return {client: memories[client] for task in tasks for client in task if client in memories}
