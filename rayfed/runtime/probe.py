"""What a client takes of a GPU (`ray.num_gpus = "auto"`): the largest one is tried on the real device, and measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from rayfed.local import Broadcast, Site
from rayfed.rounds import Arrival, Round, play, start
from rayfed.runtime.here import Here
from rayfed.weights import Tree, state_of
from rayfed.wire import Packed


class OneClient(Here):
    """Workers for whom every cohort is one and the same client."""

    def __init__(self, site: Site, client: int) -> None:
        super().__init__(site, gpu=True)
        self._client = client

    def survey(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[tuple[dict[str, Tree], int]]:
        return super().survey(broadcast, [self._client])

    def train(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Mapping[int, Packed]
    ) -> Iterator[tuple[dict[str, Tree], Arrival]]:
        return super().train(broadcast, [self._client], dict(zip([self._client], memories.values(), strict=False)))


def rehearse(site: Site) -> Round:
    """Play the first round, and the last one twice, with the largest client alone.

    The method may have switched until the last round; and the second time the client has something to remember.
    """
    federation = site.federation
    largest = max(range(federation.num_clients), key=federation.num_examples)
    site = replace(site, training=replace(site.training, clients_per_round=1))
    workers = OneClient(site, largest)
    last = start(site, state_of(site.model), workers)
    for number in (1, site.training.num_rounds, site.training.num_rounds):
        last = play(site, replace(last, round=number - 1), workers)
    return last


def peak_bytes(site: Site) -> int:
    """Bytes of GPU memory that this process takes at most for a client; 0 without a GPU. It has the GPU for itself."""
    if not torch.cuda.is_available():
        return 0
    rehearse(site)
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()  # CUDA's own: some hundred MiB a process
    return torch.cuda.max_memory_reserved() + max(0, beside)


def gpu_bytes() -> list[int]:
    """The memory of each GPU of this node."""
    return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
