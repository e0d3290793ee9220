"""The work of a round in this process, client by client, without Ray (`ray.mode = "off"`)."""

import platform
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from rayfed.base.errors import ClientFailed, RunFailed
from rayfed.rounds.client_work import Broadcast
from rayfed.rounds.round import Kind, Round
from rayfed.rounds.site import Site
from rayfed.rounds.tasks import Task, TaskReply, add_up, grouped, task_text
from rayfed.rounds.workers import Look, Piece, Progress, Workers, no_progress
from rayfed.runtime.signals import refuse_to_go_on
from rayfed.runtime.worker import Worker, at_client
from rayfed.tensors.trees import num_bytes
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed, pack


class ThisProcess(Workers):
    """A single worker in this process. Values are packed and unpacked as on Ray, and have the same bits."""

    def __init__(self, site: Site, progress: Progress = no_progress, *, gpu: bool = False) -> None:
        super().__init__(site)
        device = torch.device("cuda:0" if gpu and torch.cuda.is_available() else "cpu")
        self._worker = Worker(site, device, platform.node())
        self._progress = progress

    def survey(self, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[TaskReply]:
        replies = self._worker.survey(broadcast.map(pack), tasks)
        for task in tasks:
            yield self._next(replies, task, broadcast.round, survey=True)

    def train(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Packed]
    ) -> Iterator[TaskReply]:
        replies = self._replies(broadcast, tasks, memories)
        for group in grouped(tasks, num_bytes(broadcast.weights)):
            of_tasks = islice(replies, len(group))
            yield add_up(f"round {broadcast.round}", of_tasks) if len(group) > 1 else next(of_tasks)

    def _replies(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Packed]
    ) -> Iterator[TaskReply]:
        """Each task's reply after training."""
        replies = self._worker.train(broadcast.map(pack), tasks, memories)
        total, done = sum(map(len, tasks)), 0
        for task in tasks:
            reply = self._next(replies, task, broadcast.round, survey=False)
            done += len(task)
            self._progress(done, total)
            yield reply

    def _next(
        self, replies: Iterator[TaskReply], task: Task, round: int, *, survey: bool
    ) -> TaskReply:
        """Do the work of a task. Raises what it raises as `RunFailed`, with the client."""
        refuse_to_go_on()
        try:
            return next(replies)
        except RunFailed as error:
            error.client, error.round = at_client(error, ()), round
            raise
        except Exception as error:
            client = at_client(error, task)
            work = task_text(task if client is None else (client,), round, survey=survey)
            raise ClientFailed(
                f"{work} failed:\n{traceback.format_exc().rstrip()}", client, round
            ) from error

    def evaluate_pieces(
        self, weights: Weights, pieces: Sequence[Piece], look: Look
    ) -> Iterator[Any]:
        yield from self._worker.evaluate(pack(weights), pieces, look)

    def recall(self, memory: Packed) -> Packed:
        return memory

    def remember(self, memory: Packed) -> Packed:
        return memory

    def kinds(self) -> list[Kind]:
        return [self._worker.kind]

    def finished(self, round: Round) -> bool:
        return False
