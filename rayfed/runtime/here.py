"""The work of a round in this process, client by client, without Ray (`ray.mode = "off"`)."""

import platform
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rayfed.base.errors import ClientFailed, RunFailed
from rayfed.rounds.local import Broadcast, Site, sample
from rayfed.rounds.round import Kind, Round
from rayfed.rounds.tasks import Task
from rayfed.runtime.signals import refuse_to_go_on
from rayfed.runtime.worker import CohortWorkers, Look, Worker, at_client, what_of
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed, pack

Progress = Callable[[int, int], None]  # called after each client: how many have trained, of how many
no_progress: Progress = lambda done, total: None  # noqa: E731


class Here(CohortWorkers):
    """`Workers` in this process. Values are packed and unpacked as on Ray, and have the same bits."""

    def __init__(self, site: Site, progress: Progress = no_progress, *, gpu: bool = False) -> None:
        device = torch.device("cuda:0" if gpu and torch.cuda.is_available() else "cpu")
        self._worker = Worker(site, device, platform.node())
        self._progress = progress
        self.num_test, self.num_sampled = len(site.federation.test), len(sample(site))

    def call_each(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Packed] | None
    ) -> Iterator[Sequence[Any]]:
        packed, done = broadcast.map(pack), 0
        if memories is None:
            answers: Iterator[Sequence[Any]] = self._worker.survey(packed, tasks)
        else:
            answers = self._worker.train(packed, tasks, memories)
        for task in tasks:
            refuse_to_go_on()
            try:
                answer = next(answers)
            except RunFailed as error:
                error.client, error.round = at_client(error, ()), broadcast.round
                raise
            except Exception as error:
                client = at_client(error, task)
                what = what_of((client,) if client is not None else task, broadcast.round, survey=memories is None)
                text = f"{what} failed:\n{traceback.format_exc().rstrip()}"
                raise ClientFailed(text, client, broadcast.round) from error
            if memories is not None:
                self._progress(done := done + len(task), sum(map(len, tasks)))
            yield answer

    def evaluate_pieces(self, weights: Weights, pieces: Sequence[tuple[int, int]], look: Look) -> Iterator[Any]:
        yield from self._worker.evaluate(pack(weights), pieces, look)

    def recall(self, memory: Packed) -> Packed:
        return memory

    def remember(self, memory: Packed) -> Packed:
        return memory

    def kinds(self) -> list[Kind]:
        return [self._worker.kind]

    def finished(self, round: Round) -> bool:
        return False
