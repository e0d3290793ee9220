"""The actor that does the clients' work. It needs torch and this package; torchvision stays out of its imports."""

from __future__ import annotations

from dataclasses import replace

import ray
import torch

from rayfed.local import Evaluation, Site
from rayfed.runtime.worker import Envelope, Header, Worker
from rayfed.wire import Packed


@ray.remote
class ClientActor:
    """Serves any client of the run, one after the other. Method names are what the dashboard shows, so they stay."""

    def __init__(self, name: str, site: Site, threads: int) -> None:
        torch.set_num_threads(threads)  # Ray would leave fewer, and the number of threads can change the last bits
        self._name = name
        self._worker = Worker(replace(site, device=torch.device("cuda" if _has_gpu() else "cpu")))

    def __repr__(self) -> str:
        return self._name

    def ready(self) -> tuple[str, str]:
        """Where this actor is, and the device it computes on."""
        return _node(), str(self._worker.site.device)

    def survey(self, round: int, weights: Packed, states: Packed, payloads: Packed, client: int) -> tuple[str, Packed]:
        return _node(), self._worker.survey(Envelope(round, weights, states, payloads), client)

    def fit(
        self, round: int, weights: Packed, states: Packed, payloads: Packed, client: int, memory: Packed | None
    ) -> tuple[tuple[str, Header], Packed, Packed]:
        header, summands, kept = self._worker.train(Envelope(round, weights, states, payloads), client, memory)
        return (_node(), header), summands, kept

    def evaluate(self, weights: Packed, start: int, stop: int) -> tuple[str, Evaluation]:
        return _node(), self._worker.evaluate(weights, start, stop)


def _has_gpu() -> bool:
    """Whether Ray gave this actor a GPU that torch can see: on a machine with pretended GPUs it cannot."""
    return bool(ray.get_gpu_ids()) and torch.cuda.is_available()


def _node() -> str:
    return ray.util.get_node_ip_address()
