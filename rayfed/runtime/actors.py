"""The actor that does the clients' work. It needs torch and this package; torchvision stays out of its imports."""

from __future__ import annotations

import ray
import torch

from rayfed.local import Evaluation, Site
from rayfed.runtime.worker import Envelope, Header, Worker
from rayfed.wire import Packed


@ray.remote
class ClientActor:
    """Serves any client of the run, one after the other. Method names are what the dashboard shows, so they stay."""

    def __init__(self, name: str, threads: int) -> None:
        torch.set_num_threads(threads)  # Ray would leave fewer, and the number of threads can change the last bits
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def open(self, site: Site) -> tuple[str, str]:
        """Take up the run's work; said again to an actor that was restarted. Gives its node and its device.

        Not in the constructor: Ray cannot restart an actor whose constructor's arguments lie in the object store.
        """
        device = torch.device("cuda:0" if _has_gpu() else "cpu")  # Ray shows an actor its own GPUs only
        self._worker = Worker(site, device)
        return _node(), str(device)

    def survey(
        self, round: int, weights: Packed, states: Packed, payloads: Packed, since: dict[str, int], client: int
    ) -> tuple[str, Packed]:
        return _node(), self._worker.survey(Envelope(round, weights, states, payloads, since), client)

    def fit(
        self,
        round: int,
        weights: Packed,  # sent as references of their own, so that Ray fetches them once a node
        states: Packed,
        payloads: Packed,
        since: dict[str, int],
        client: int,
        memory: Packed | None,
    ) -> tuple[tuple[str, Header], Packed, Packed]:
        envelope = Envelope(round, weights, states, payloads, since)
        header, summands, kept = self._worker.train(envelope, client, memory)
        return (_node(), header), summands, kept

    def evaluate(self, weights: Packed, start: int, stop: int) -> tuple[str, Evaluation]:
        return _node(), self._worker.evaluate(weights, start, stop)


def _has_gpu() -> bool:
    """Whether Ray gave this actor a GPU that torch can see: on a machine with pretended GPUs it cannot."""
    return bool(ray.get_gpu_ids()) and torch.cuda.is_available()


def _node() -> str:
    return ray.util.get_node_ip_address()
