"""What is sent in a round, and what comes back.

    Broadcast     from the server to every client of the round: weights, states, payloads
    Assignment    to a worker: the clients of a task, with their memories
    ClientReply   from a client after training
    TaskReply     from a worker: the clients' summands, added up, and the rest of their replies

On the way, trees of tensors are packed (`rayfed.tensors.wire`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayfed.rounds.round import ClientRow, Memory
from rayfed.tensors.trees import Layout, Tree
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed, pack, unpack

# The clients that one worker serves, one after the other.
Task = tuple[int, ...]
# Tasks whose sums are added before they come to the engine.
TaskGroup = Sequence[Task]


@dataclass(frozen=True, eq=False)
class Broadcast:
    """What the server sends in one round, the same to every client.

    Its three trees change at different times.
    """

    round: int
    weights: Weights
    # Slot -> server state, of the parts that survey.
    states: dict[str, Tree]
    # Slot -> payload from the part's `tell`; empty during the survey.
    payloads: dict[str, Tree]
    # Slot -> first round of its part.
    since: dict[str, int]

    def read_memory(self, memory: Packed | None) -> dict[str, Tree]:
        """Return a client's memory by slot; empty before its first training.

        What parts before these have kept is left out.
        """
        if memory is None:
            return {}
        tree = unpack(memory)
        of_these_parts: dict[str, Tree] = {}
        for slot, slot_memory in tree["slots"].items():
            if slot in self.since and self.since[slot] <= tree["round"]:
                of_these_parts[slot] = slot_memory
        return of_these_parts

    def write_memory(self, slots: dict[str, Tree]) -> Packed | None:
        """Pack a client's memory after this round; None where no part keeps any."""
        if not slots:
            return None
        return pack({"round": self.round, "slots": slots})

    def map(self, function: Callable[[Any], Any]) -> Broadcast:
        """Return the broadcast with its three trees packed, unpacked, or moved to a device."""
        return replace(
            self,
            weights=function(self.weights),
            states=function(self.states),
            payloads=function(self.payloads),
        )


@dataclass(frozen=True, eq=False)
class Assignment:
    """A task to train: its clients, and a handle to the memory of each client that has one."""

    clients: Task
    memories: Mapping[int, Memory]

    @classmethod
    def of(cls, task: Task, memories: Mapping[int, Memory]) -> Assignment:
        """Return the task with the memories of its clients out of all memories."""
        of_task = {client: memories[client] for client in task if client in memories}
        return cls(task, of_task)


@dataclass(frozen=True, eq=False)
class ClientReply:
    """A client's reply after training.

    Its summands are added to its task's sum, and its memory is sent by itself.
    """

    row: ClientRow
    # Slot -> the part's report, and what is measured of the update; {} once they are added.
    summands: dict[str, Tree]
    # Slot -> the part's memory of this client. On the way it is packed; the server has a handle, or
    # None.
    memory: Any
    # int64 (C, C), of the client's model on the sampled test images, if it is measured.
    confusion: np.ndarray | None
    # The mean of the squared losses of its steps.
    mean_square: float
    # The bytes that it sends for its summands, without those of measures.
    bytes_up: int


@dataclass(frozen=True, eq=False)
class TaskReply:
    """What comes back from a task, or from several: the sum of what their clients have sent."""

    # The first client, for messages; None where there are none.
    first: int | None
    # The layout of each client's summands.
    layout: Layout
    # The bytes that the clients sent, all together.
    bytes_up: int
    # Slot -> their sum; of a single client, as they are.
    summands: Packed
    # The clients' replies without summands, in their order; none after a survey.
    clients: Sequence[ClientReply] = ()
