"""The work of a round on the actors of a crew: the messages to them, and their replies.

Who calls whom: the engine asks `RayWorkers` for a stage; its calls go to `Dispatch`, which takes idle members from the
`Crew` and sends each a message, by the function `submit` of the stage. That calls a method of `ClientActor`, which has
a `Worker` do the work. `Dispatch` gives the answers in the order of the calls, and `together` makes replies of them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, starmap
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from rayfed.base.errors import WorkersLost
from rayfed.clients.clock import images_trained
from rayfed.methods.part import parts_at, remembers
from rayfed.rounds.client_work import Broadcast
from rayfed.rounds.round import Kind, Round
from rayfed.rounds.site import Site
from rayfed.rounds.tasks import Task, TaskReply, grouped, task_text
from rayfed.rounds.workers import Look, Piece, Progress, Workers
from rayfed.runtime.actors import NOTHING, together
from rayfed.runtime.causes import ray_may_fail
from rayfed.runtime.crew import Crew
from rayfed.runtime.deadline import Deadline
from rayfed.runtime.dispatch import Dispatch
from rayfed.runtime.gauges import Gauges
from rayfed.runtime.heartbeat import got
from rayfed.runtime.stage import Answer, Call, Stage
from rayfed.tensors.trees import Tree, num_bytes
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed, pack

SMALL = 10_000  # bytes
LARGE = 2**24  # bytes, from which on a tree goes to many nodes by way of others
FETCH_LIMIT = 600.0  # seconds in which a client's memory must arrive here
MOST_TASKS = 4  # in a message
MOST_BYTES = 2**26  # of the sums of a message


class RayWorkers(Workers):
    """The actors of a crew that has come up."""

    def __init__(self, crew: Crew, site: Site, progress: Progress, gauges: Gauges) -> None:
        super().__init__(site)
        self._crew = crew
        self._site = site
        options = site.job.ray
        self._large: dict[
            ObjectRef, float
        ] = {}  # those of `_sent` that are large, and when they were put
        deadline = Deadline(options.deadline)
        self._dispatch = Dispatch(crew, deadline, options.max_retries, gauges.retried, self._large)
        self._progress = progress
        self._looked = (
            time.monotonic(),
            0.0,
        )  # when the last round was finished, and what had been worked by then
        self._gauges = gauges
        self._sent: dict[
            str, tuple[Tree, ObjectRef | Packed]
        ] = {}  # by name, the tree that was sent last

    def survey(self, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[TaskReply]:
        def submit(actor: Any, calls: Sequence[Call]) -> list[ObjectRef]:
            survey = actor.survey.options(
                num_returns=_num_returns(calls), name=f"survey round {broadcast.round}"
            )
            return survey.remote([call.task for call in calls], *self._fields(broadcast))

        calls = self._calls(tasks, remembering=False)
        stage = Stage("survey", broadcast.round, calls, submit, self._send_again, _most(broadcast))
        return starmap(together, self._dispatch.begin(stage))

    def train(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, ObjectRef]
    ) -> Iterator[TaskReply]:
        remembering = remembers(parts_at(self._site.job.method, broadcast.round))

        def submit(actor: Any, calls: Sequence[Call]) -> list[ObjectRef]:
            held = {
                client: memories[client]
                for call in calls
                for client in call.task
                if client in memories
            }
            tasks = [call.task for call in calls]
            fit = actor.fit.options(
                num_returns=_num_returns(calls), name=f"fit round {broadcast.round}"
            )
            return fit.remote(
                tasks, remembering, list(held), *self._fields(broadcast), *held.values()
            )

        def missing(error: ObjectLostError, calls: Sequence[Call]) -> None:
            for call in calls:
                for client in call.task:
                    if client in memories and memories[client].hex() == error.object_ref_hex:
                        work = task_text(call.task, broadcast.round, survey=False)
                        raise WorkersLost(
                            f"{work}: the memory of client {client} of an earlier round is lost "
                            f"({type(error).__name__}); `rayfed resume` continues from a checkpoint, to the same bits"
                        )
            self._send_again(error, calls)

        def add(actor: Any, answers: Sequence[Answer]) -> list[ObjectRef]:
            replies = [replace(answer.value, clients=()) for answer in answers]
            memories = [memory for answer in answers for memory in answer.objects[1:]]
            call = actor.add.options(num_returns=2, name=f"add round {broadcast.round}")
            summands, limit = (
                [answer.objects[0] for answer in answers],
                self._dispatch.deadline.of_fetching,
            )
            return call.remote(f"round {broadcast.round}", replies, summands, memories, limit)

        calls, start = self._calls(tasks, remembering), 0
        groups = grouped(tasks, num_bytes(broadcast.weights))
        in_groups = len(groups) < len(tasks)
        for group in groups if in_groups else ():
            calls.append(Call(len(group), num_objects=1, adds=range(start, start + len(group))))
            start += len(group)
        stage = Stage(
            "train",
            broadcast.round,
            calls,
            submit,
            missing,
            _most(broadcast),
            self._show_progress,
            add,
        )
        answers = self._dispatch.begin(stage)
        return starmap(_of_group if in_groups else together, answers)

    def _calls(self, tasks: Sequence[Task], remembering: bool) -> list[Call]:
        return [Call(self._images(task), task, (), 1 + len(task) * remembering) for task in tasks]

    def _images(self, clients: Sequence[int]) -> int:
        """That these clients train on in a round, each as often as it does."""
        return int(
            images_trained(
                self._site.federation.partition.sizes[list(clients)], self._site.job.train
            ).sum()
        )

    def _show_progress(self, done: int, total: int) -> None:
        self._progress(done, total)
        self._gauges.clients(done, total)

    def evaluate_pieces(
        self, weights: Weights, pieces: Sequence[Piece], look: Look
    ) -> Iterator[Any]:
        def submit(actor: Any, calls: Sequence[Call]) -> list[ObjectRef]:
            (call,) = calls
            return [actor.evaluate.remote(self._put("weights", weights), call.pieces, look)]

        # One call per actor: those that are done first begin the next round.
        count = min(len(pieces), max(1, self._crew.size))
        ends = [-(-len(pieces) * i // count) for i in range(count + 1)]
        calls = [
            Call(pieces[end - 1][1] - pieces[start][0], (), pieces[start:end])
            for start, end in pairwise(ends)
        ]
        values = self._dispatch.begin(Stage(look, 0, calls, submit, self._send_again))
        return (result for results, *_ in values for result in results)

    @ray_may_fail()
    def recall(self, memory: ObjectRef) -> Packed:
        (packed,) = got([memory], FETCH_LIMIT, "a client's memory")
        return packed

    @ray_may_fail()
    def remember(self, memory: Packed) -> ObjectRef:
        return ray.put(memory)

    def kinds(self) -> list[Kind]:
        return list(self._crew.kinds)

    @ray_may_fail()
    def finished(self, round: Round) -> bool:
        clients = [row.client for row in round.clients]
        self._gauges.round(round, self._images(clients) if clients else 0, self._idle_share())
        self._crew.grow()
        return self._crew.head.silent  # Ray may soon end this process

    def _idle_share(self) -> float:
        """The part of the actors' time since the last call in which they had no work."""
        then, before = self._looked
        now, worked = time.monotonic(), self._dispatch.seconds_worked()
        self._looked = now, worked
        return max(
            0.0, 1 - (worked - before) / max(1e-9, self._crew.size * (now - then))
        )  # actors may have gone

    def _fields(self, broadcast: Broadcast) -> tuple[Any, ...]:
        """The fields of a packed `Broadcast`."""
        trees = (
            self._put(name, getattr(broadcast, name)) for name in ("weights", "states", "payloads")
        )
        return (broadcast.round, *trees, broadcast.since)

    def _put(self, name: str, tree: Tree) -> ObjectRef | Packed:
        """One object per node for all its actors. The tree that was sent last under this name is not sent again.

        That is known by its identity, as nobody writes to a tree of a round. A small tree goes along with each call: to
        fetch an object from the store takes a millisecond.
        """
        last, sent = self._sent.get(name, (None, None))
        if sent is None or last is not tree:
            if isinstance(sent, ObjectRef):
                self._large.pop(sent, None)
            packed = pack(tree)
            sent = packed if packed.num_bytes < SMALL else ray.put(packed)
            self._sent[name] = tree, sent
            if isinstance(sent, ObjectRef) and packed.num_bytes > LARGE:
                self._large[sent] = time.monotonic()
        return sent

    def _send_again(self, error: ObjectLostError, calls: Sequence[Call]) -> None:
        """An object in the store is lost: put all trees again, from this process."""
        self._sent.clear()
        self._large.clear()


def _most(broadcast: Broadcast) -> int:
    """The most tasks in a message: an actor holds their sums, in float64, until all are done."""
    return max(1, min(MOST_TASKS, MOST_BYTES // (2 * max(1, num_bytes(broadcast.weights)))))


def _of_group(answers: Sequence[Answer], summands: Packed, rest: Sequence[ObjectRef]) -> TaskReply:
    """The reply of a group: its tasks', with the sum of their summands; there is no `rest`."""
    replies = [together(answer.value, NOTHING, answer.objects[1:]) for answer in answers]
    clients = [client for reply in replies for client in reply.clients]
    bytes_up = sum(reply.bytes_up for reply in replies)
    return TaskReply(replies[0].first, replies[0].layout, bytes_up, summands, clients)


def _num_returns(calls: Sequence[Call]) -> int:
    return 1 + sum(call.num_objects for call in calls)
