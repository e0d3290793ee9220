"""The actor that does the clients' work. It needs torch and this package; torchvision stays out of its imports."""

from __future__ import annotations

from collections.abc import Mapping

import ray
import torch
from ray import ObjectRef

from rayfed.local import Evaluation, Site
from rayfed.runtime.placement import Place, memory_cap
from rayfed.runtime.probe import peak_bytes
from rayfed.runtime.worker import Envelope, Header, Worker
from rayfed.wire import Packed


class Restarted(RuntimeError):
    """Work has come to an actor that was restarted and does not know the run yet."""


@ray.remote
class ClientActor:
    """Serves any client of the run, one after the other. Method names are what the dashboard shows, so they stay."""

    def __init__(self, name: str, threads: int, gpu_share: float) -> None:
        torch.set_num_threads(threads)  # Ray would leave fewer, and the number of threads can change the last bits
        self._name = name
        self._gpu_share = gpu_share
        self._opened: Worker | None = None

    def __repr__(self) -> str:
        return self._name

    def open(self, sites: Mapping[str, ObjectRef]) -> Place:
        """Take up the run's work; said again to an actor that was restarted. Gives the place where it is.

        `sites` has the run's site for each node, or one for all under "". Not in the constructor: Ray cannot restart an
        actor whose constructor's arguments lie in the object store.
        """
        device = torch.device("cuda:0" if _has_gpu() else "cpu")  # Ray shows an actor its own GPUs only
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(memory_cap(self._gpu_share))
        self._opened = Worker(_nearest(sites), device)
        return Place(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), str(device))

    def survey(
        self, round: int, weights: Packed, states: Packed, payloads: Packed, since: dict[str, int], client: int
    ) -> tuple[int, Packed]:
        """The bytes that the client's summands take, and those."""
        summands = self._worker.survey(Envelope(round, weights, states, payloads, since), client)
        return summands.num_bytes, summands

    def fit(
        self,
        round: int,
        weights: Packed,  # sent as references of their own, so that Ray fetches them once a node
        states: Packed,
        payloads: Packed,
        since: dict[str, int],
        client: int,
        memory: Packed | None,
    ) -> tuple[Header, Packed, Packed]:
        return self._worker.train(Envelope(round, weights, states, payloads, since), client, memory)

    def evaluate(self, weights: Packed, start: int, stop: int) -> Evaluation:
        return self._worker.evaluate(weights, start, stop)

    def measure(self, sites: Mapping[str, ObjectRef]) -> int:
        """Bytes of GPU memory that this process takes for the largest client; 0 where torch sees no GPU."""
        return peak_bytes(_nearest(sites))

    @property
    def _worker(self) -> Worker:
        if self._opened is None:
            raise Restarted(f"{self._name} was restarted, and has not been opened again")
        return self._opened


def _nearest(sites: Mapping[str, ObjectRef]) -> Site:
    """The run's site, read in place: one copy of the data on each node."""
    return ray.get(sites.get(ray.get_runtime_context().get_node_id()) or next(iter(sites.values())))


def _has_gpu() -> bool:
    """Whether Ray gave this actor a GPU that torch can see: on a machine with pretended GPUs it cannot."""
    return bool(ray.get_gpu_ids()) and torch.cuda.is_available()
