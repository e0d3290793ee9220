"""The work of a round in this process, one client after the other, without Ray (`ray.mode = "off"`)."""

from __future__ import annotations

import platform
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from rayfed.local import Broadcast, ClientFailed, Evaluation, RunFailed, Site
from rayfed.rounds import Arrival, Round
from rayfed.runtime.worker import Envelope, Worker
from rayfed.weights import Tree, Weights
from rayfed.wire import Packed, pack, unpack

Progress = Callable[[int, int], None]  # told of each finished client: how many are done, of how many

EVALUATION_CHUNK = 1000  # test images a piece of work: a constant, so that the sum of losses has one order


def quiet(done: int, total: int) -> None:
    """Progress that nobody follows."""


def chunks(num_examples: int) -> list[tuple[int, int]]:
    """The pieces of an evaluation, as ranges of the test set."""
    return [(start, min(start + EVALUATION_CHUNK, num_examples)) for start in range(0, num_examples, EVALUATION_CHUNK)]


def seal(broadcast: Broadcast) -> Envelope:
    """A broadcast on its way out."""
    return Envelope(
        broadcast.round,
        pack(broadcast.weights),
        pack(broadcast.states),
        pack(broadcast.payloads),
        broadcast.since,
    )


@contextmanager
def _naming(stage: str, client: int, round: int) -> Iterator[None]:
    """Says at which client an exception was raised."""
    try:
        yield
    except RunFailed:
        raise
    except Exception as error:
        raise ClientFailed(
            f"client {client}, round {round}{stage} failed:\n{traceback.format_exc().rstrip()}", client, round
        ) from error


class Here:
    """`Workers` in this process. What it gives is packed and unpacked as on Ray, and has the same bits."""

    def __init__(self, site: Site, progress: Progress = quiet, *, gpu: bool = False) -> None:
        self._worker = Worker(site, torch.device("cuda:0" if gpu and torch.cuda.is_available() else "cpu"))
        self._progress = progress
        self._node = platform.node()

    def survey(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[tuple[dict[str, Tree], int]]:
        envelope = seal(broadcast)
        for client in clients:
            with _naming(" (survey)", client, broadcast.round):
                summands = self._worker.survey(envelope, client)
            yield unpack(summands), summands.num_bytes

    def train(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Mapping[int, Packed]
    ) -> Iterator[tuple[dict[str, Tree], Arrival]]:
        envelope = seal(broadcast)
        for done, client in enumerate(clients, start=1):
            with _naming("", client, broadcast.round):
                header, summands, memory = self._worker.train(envelope, client, memories.get(client))
            self._progress(done, len(clients))
            row = header.row(client, self._node)
            yield unpack(summands), Arrival(row, memory if header.remembers else None, summands.num_bytes)

    def evaluate(self, weights: Weights) -> Evaluation:
        packed, test = pack(weights), self._worker.site.federation.test
        first, *rest = (self._worker.evaluate(packed, start, stop) for start, stop in chunks(len(test.labels)))
        return sum(rest, first)

    def recall(self, memory: Packed) -> Packed:
        return memory

    def remember(self, memory: Packed) -> Packed:
        return memory

    def finished(self, round: Round) -> bool:
        return False
