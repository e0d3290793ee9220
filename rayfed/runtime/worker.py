"""A worker serves a site in packed values: the same work and the same wire on an actor and in this process."""

import copy
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rayfed import local
from rayfed.engine import Arrival, ClientRow, Kind, Memory
from rayfed.local import Broadcast, Evaluation, Site
from rayfed.trees import Packed, Tree, pack, unpack
from rayfed.weights import Weights

EVALUATION_CHUNK = 1000  # test images per piece of work: a constant, so that the sum of losses has a fixed order
Trained = tuple[ClientRow, bool]  # a client's row, and whether it has a memory


def kind_of(device: torch.device) -> Kind:
    """The hardware, and torch's settings: what the bits of a result depend on beside the code and its versions."""
    settings = {
        "float32": torch.get_float32_matmul_precision(),
        "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
    }
    if device.type == "cuda":
        tf32 = "yes" if torch.backends.cudnn.allow_tf32 else "no"
        return {"device": torch.cuda.get_device_name(device), "tf32 in cudnn": tf32, **settings}
    instructions = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"device": device.type, "instructions": instructions, **settings}


class Worker:
    """Serves any client of a site. A broadcast comes with packed trees; every call unpacks a copy of its own."""

    def __init__(self, site: Site, device: torch.device, node: str) -> None:
        if device.type == "cuda":
            # CUDA's means to give the same bits every time; cuBLAS reads its variable when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.benchmark = False
        if device != site.device:
            # The layout that is faster on CPUs is slower on GPUs, in float32.
            model = copy.deepcopy(site.model).to(device).to(memory_format=torch.contiguous_format)
            site = replace(site, model=model, device=device)
        self.site = site
        self.kind = kind_of(device)
        self._node = node

    def survey(self, packed: Broadcast, client: int) -> tuple[None, Packed]:
        """The client's summands before training, as the second value, as in `train`."""
        return None, pack(local.survey(self.site, packed.map(unpack), client))

    def train(self, packed: Broadcast, client: int, memory: Packed | None) -> tuple[Trained, Packed, Packed]:
        """The client's row and whether it has a memory; its summands; its new memory."""
        broadcast = packed.map(unpack)
        kept: dict[str, Any] = unpack(memory) if memory else {"round": 0, "slots": {}}
        # Only of parts that have been in force since the memory was written.
        recalled = {slot: tree for slot, tree in kept["slots"].items() if broadcast.holds(slot, kept["round"])}
        reply = local.train(self.site, broadcast, client, recalled)
        row = ClientRow(client, reply.num_examples, reply.train_loss, reply.seconds, self._node)
        return (row, bool(reply.memory)), pack(reply.summands), pack({"round": packed.round, "slots": reply.memory})

    def evaluate(self, weights: Packed, start: int, stop: int) -> Evaluation:
        return local.evaluate(self.site, unpack(weights), start, stop)


class CohortWorkers(ABC):
    """`Workers` without the way in which a `Worker` is called: in this process, or on an actor."""

    num_test: int  # images

    @abstractmethod
    def call_each(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Mapping[int, Memory] | None
    ) -> Iterator[Sequence[Any]]:
        """The values of `Worker.train` for each client, in order; with `memories` None, those of `Worker.survey`."""

    @abstractmethod
    def evaluate_pieces(self, weights: Weights, pieces: Sequence[tuple[int, int]]) -> Iterator[Evaluation]:
        """The weights on some ranges of the test set."""

    def survey(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[tuple[dict[str, Tree], int]]:
        for _, summands, *_ in self.call_each(broadcast, clients, None):
            yield unpack(summands), summands.num_bytes

    def train(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Mapping[int, Memory]
    ) -> Iterator[tuple[dict[str, Tree], Arrival]]:
        for (row, remembers), summands, memory in self.call_each(broadcast, clients, memories):
            yield unpack(summands), Arrival(row, memory if remembers else None, summands.num_bytes)

    def evaluate(self, weights: Weights) -> Evaluation:
        starts = range(0, self.num_test, EVALUATION_CHUNK)
        pieces = [(start, min(start + EVALUATION_CHUNK, self.num_test)) for start in starts]
        first, *rest = self.evaluate_pieces(weights, pieces)
        return sum(rest, first)
