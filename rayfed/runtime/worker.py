"""A site that is spoken to in packed values: the same work, behind the same wire, on an actor and in this process."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace

import torch

from rayfed import local
from rayfed.local import Broadcast, Evaluation, Site
from rayfed.rounds import ClientRow
from rayfed.weights import Tree
from rayfed.wire import Packed, pack, unpack


@dataclass(frozen=True, eq=False)
class Envelope:
    """A broadcast, packed: three values that change at different times, so that each is sent only when it does."""

    round: int
    weights: Packed
    states: Packed
    payloads: Packed
    since: dict[str, int]

    def open(self) -> Broadcast:
        return Broadcast(self.round, unpack(self.weights), unpack(self.states), unpack(self.payloads), self.since)


@dataclass(frozen=True)
class Header:
    """The small part of a reply, known before its update is fetched."""

    num_examples: int
    train_loss: float
    seconds: float
    remembers: bool  # whether the client has any memory to keep

    def row(self, client: int, node: str) -> ClientRow:
        return ClientRow(client, self.num_examples, self.train_loss, self.seconds, node)


class Worker:
    """Serves any client of a site. Every call opens its own copy of what was sent, so none can touch another's."""

    def __init__(self, site: Site, device: torch.device) -> None:
        if device.type == "cuda":
            # What CUDA offers for the same bits every time; cuBLAS reads its variable when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.benchmark = False
        if device != site.device:
            # The layout that is quicker on CPUs is the slower one on GPUs, in float32.
            model = copy.deepcopy(site.model).to(device).to(memory_format=torch.contiguous_format)
            site = replace(site, model=model, device=device)
        self.site = site

    def survey(self, envelope: Envelope, client: int) -> Packed:
        return pack(local.survey(self.site, envelope.open(), client))

    def train(self, envelope: Envelope, client: int, memory: Packed | None) -> tuple[Header, Packed, Packed]:
        """The reply's header, its summands, and the client's new memory."""
        reply = local.train(self.site, envelope.open(), client, _recall(memory, envelope.since))
        header = Header(reply.num_examples, reply.train_loss, reply.seconds, bool(reply.memory))
        return header, pack(reply.summands), pack({"round": envelope.round, "slots": reply.memory})

    def evaluate(self, weights: Packed, start: int, stop: int) -> Evaluation:
        return local.evaluate(self.site, unpack(weights), start, stop)


def _recall(memory: Packed | None, since: dict[str, int]) -> dict[str, Tree]:
    """What a client remembers, by slot, of the parts that have been in force ever since."""
    if memory is None:
        return {}
    kept = unpack(memory)
    return {slot: tree for slot, tree in kept["slots"].items() if since.get(slot, kept["round"] + 1) <= kept["round"]}
