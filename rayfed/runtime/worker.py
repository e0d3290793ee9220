"""A worker serves a site in packed values: the same work and the same wire on an actor and in this process."""

import copy
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from rayfed import local
from rayfed.engine import Arrival, ClientRow, Kind, Memory
from rayfed.local import Broadcast, Evaluation, Site
from rayfed.methods.part import parts_at
from rayfed.runtime.profile import span
from rayfed.tasks import Summed, Task, refusing
from rayfed.trees import Layout, OrderedSum, Packed, Tree, checked, num_bytes, pack, unpack
from rayfed.weights import Weights

EVALUATION_CHUNK = 1000  # test images per piece of work: a constant, so that the sum of losses has a fixed order


@dataclass(frozen=True, eq=False)
class Done:
    """A task's answer without its tensors; the lists have an item per client."""

    layout: Layout  # of each client's summands
    bytes_up: list[int]
    rows: list[ClientRow]  # none after a survey
    remember: list[bool]  # whether a client has a memory: a handle does not show it


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
    """Serves any client of a site. A broadcast comes with packed trees."""

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

    def survey(self, packed: Broadcast, task: Task) -> tuple[Done, Packed]:
        """The clients' summands before training."""
        broadcast = self._unpacker(packed)

        def surveyed(client: int) -> Tree:
            message = broadcast()
            with span("survey", f"client {client}, round {packed.round}"):
                return local.survey(self.site, message, client)

        layout, sizes, total = _summed(f"round {packed.round} (survey)", task, surveyed)
        return Done(layout, sizes, [], []), total

    def train(self, packed: Broadcast, task: Task, memories: Sequence[Packed | None]) -> tuple[Any, ...]:
        """A `Done`, the clients' summands, and the new memory of each client, None for a client that has none."""
        unpacked, before = self._unpacker(packed), dict(zip(task, memories, strict=True))
        rows: list[ClientRow] = []
        kept: list[Packed | None] = []

        def trained(client: int) -> Tree:
            broadcast = unpacked()
            memory: dict[str, Any] = unpack(found) if (found := before[client]) else {"round": 0, "slots": {}}
            # Only of parts that have been in force since the memory was written.
            recalled = {slot: tree for slot, tree in memory["slots"].items() if broadcast.holds(slot, memory["round"])}
            with span("train", f"client {client}, round {packed.round}"):
                reply = local.train(self.site, broadcast, client, recalled)
            rows.append(ClientRow(client, reply.num_examples, reply.train_loss, reply.seconds, self._node))
            kept.append(pack({"round": packed.round, "slots": reply.memory}) if reply.memory else None)
            return reply.summands

        layout, sizes, total = _summed(f"round {packed.round}", task, trained)
        return Done(layout, sizes, rows, [memory is not None for memory in kept]), total, *kept

    def _unpacker(self, packed: Broadcast) -> Callable[[], Broadcast]:
        """Gives each client of a task its broadcast.

        It is a copy of its own where there is a part of the user's, which may write to it. The parts of this package do
        not, as tests/methods/test_contract.py checks.
        """
        parts = parts_at(self.site.job.method, packed.round)
        if not all(type(part).__module__.startswith("rayfed.") for part in parts):
            return lambda: packed.map(unpack)
        once = packed.map(unpack)
        return lambda: once

    def evaluate(self, weights: Packed, start: int, stop: int) -> Evaluation:
        tensors = unpack(weights)
        with span("evaluate", f"test images {start} to {stop}"):
            return local.evaluate(self.site, tensors, start, stop)


def _summed(stage: str, task: Task, work: Callable[[int], Tree]) -> tuple[Layout, list[int], Packed]:
    """The summands of a task's clients, checked: their layout, the bytes of each, and their sum.

    A single client's summands stay as they are: in float32, where a sum has twice the bytes. An exception of a client's
    work gets the client's number, `at_client`.
    """
    total, sizes = OrderedSum(), []
    for client in task:
        try:
            summand = work(client)
        except Exception as error:
            with suppress(AttributeError):
                error.at_client = client  # type: ignore[attr-defined]
            raise
        with refusing(stage, client, task[0]):
            layout = checked(summand)
            if len(task) > 1:
                total.add(summand, layout)
        sizes.append(num_bytes(summand))
    return layout, sizes, pack(total.value if len(task) > 1 else summand)


def at_client(error: BaseException | None, task: Task) -> int | None:
    """The client of a task at which an exception was raised; None where nobody knows."""
    return getattr(error, "at_client", task[0] if len(task) == 1 else None)


def what_of(task: Task, round: int, *, survey: bool) -> str:
    """A task in words, for messages."""
    clients = f"client {task[0]}" if len(task) == 1 else f"{len(task)} clients ({', '.join(map(str, task))})"
    return f"{clients}, round {round}" + (" (survey)" if survey else "")


class CohortWorkers(ABC):
    """`Workers` without the way in which a `Worker` is called: in this process, or on an actor."""

    num_test: int  # images

    @abstractmethod
    def call_each(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Memory] | None
    ) -> Iterator[Sequence[Any]]:
        """The values of `Worker.train` for each task, in order; with `memories` None, those of `Worker.survey`."""

    @abstractmethod
    def evaluate_pieces(self, weights: Weights, pieces: Sequence[tuple[int, int]]) -> Iterator[Evaluation]:
        """The weights on some ranges of the test set."""

    def survey(self, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[tuple[Summed, list[int]]]:
        for done, summands in self.call_each(broadcast, tasks, None):
            yield Summed(unpack(summands, copy=False), done.layout), done.bytes_up

    def train(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Memory]
    ) -> Iterator[tuple[Summed, list[Arrival]]]:
        for done, summands, *kept in self.call_each(broadcast, tasks, memories):
            handles = [memory if there else None for memory, there in zip(kept, done.remember, strict=True)]
            arrivals = [Arrival(*each) for each in zip(done.rows, handles, done.bytes_up, strict=True)]
            yield Summed(unpack(summands, copy=False), done.layout), arrivals

    def evaluate(self, weights: Weights) -> Evaluation:
        starts = range(0, self.num_test, EVALUATION_CHUNK)
        pieces = [(start, min(start + EVALUATION_CHUNK, self.num_test)) for start in starts]
        first, *rest = self.evaluate_pieces(weights, pieces)
        return sum(rest, first)
