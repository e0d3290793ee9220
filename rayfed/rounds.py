"""The round engine: a generator that yields one finished round at a time. Callers log, checkpoint and stop.

    sample a cohort -> survey it -> tell the parts -> train it -> add up its summands -> update -> evaluate

Nothing in here knows where the work is done: that is the `Workers`' business. Nothing in here depends on who was ready
first: the cohort is drawn from the seed, and its summands are added in its order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rayfed import metrics
from rayfed.local import Broadcast, Evaluation, RunFailed, Site, server_view
from rayfed.methods.part import Part, Parts, Step, defines, parts_at
from rayfed.seeds import cohort
from rayfed.weights import OrderedSum, Tree, Weights, first_difference, first_invalid, num_bytes, parameters_of
from rayfed.wire import Packed

Memory = Any  # a handle to what one client remembers: the workers' to make and to read


@dataclass(frozen=True)
class ClientRow:
    """One client in one round, as `clients.parquet` has it."""

    client: int
    num_examples: int
    train_loss: float
    seconds: float
    node: str


@dataclass(frozen=True, eq=False)
class Arrival:
    """A client that has trained: its row, a handle to its memory (None: it has none), and the bytes it sent."""

    row: ClientRow
    memory: Memory
    bytes_up: int


class Workers(Protocol):
    """Those who do the work of a round, in this process or on Ray. Results come in the order of the cohort."""

    def survey(self, broadcast: Broadcast, clients: Sequence[int]) -> Iterator[tuple[dict[str, Tree], int]]:
        """Each client's summands, and the bytes that they take."""

    def train(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Mapping[int, Memory]
    ) -> Iterator[tuple[dict[str, Tree], Arrival]]:
        """Each client's summands, and the rest of what there is to know of its training."""

    def evaluate(self, weights: Weights) -> Evaluation:
        """The weights on the whole test set."""

    def recall(self, memory: Memory) -> Packed:
        """What a handle stands for: on its way into a checkpoint."""

    def remember(self, memory: Packed) -> Memory:
        """A handle to what a client remembers: out of a checkpoint."""

    def finished(self, round: Round) -> bool:
        """A round is over: they may show it, and look after themselves before the next.

        Whether all of this process may soon be lost, so that it would be well to write a checkpoint now.
        """


@dataclass(frozen=True, eq=False)
class Held:
    """A part in force, since when without a break, and its state."""

    part: Part
    since: int
    state: Tree


@dataclass(frozen=True, eq=False)
class Round:
    """A finished round, with all that the next one needs."""

    round: int  # 0 is the initial model
    weights: Weights
    held: dict[str, Held]  # slot -> the part in force, with its state on the server
    memories: Mapping[int, Memory]  # client -> handle, of the clients that have anything to remember
    evaluation: Evaluation
    peak: np.ndarray  # (C,) the best accuracy of each class in rounds 1 to this one
    forgetting: float
    clients: tuple[ClientRow, ...] = ()
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0

    @property
    def test_accuracy(self) -> float:
        return metrics.accuracy(self.evaluation.confusion)

    @property
    def test_loss(self) -> float:
        return self.evaluation.loss / int(self.evaluation.confusion.sum())

    @property
    def train_loss(self) -> float | None:
        """The mean over the round's images; None for the initial model, which nobody trained."""
        examples = sum(row.num_examples for row in self.clients)
        return sum(row.train_loss * row.num_examples for row in self.clients) / examples if examples else None

    @property
    def class_accuracy(self) -> np.ndarray:
        """(C,)"""
        return metrics.class_accuracy(self.evaluation.confusion)


def start(site: Site, weights: Weights, workers: Workers) -> Round:
    """Round 0: the initial model, evaluated."""
    # Its accuracies are no peak: an untrained model may well know one class by accident, and nobody forgets that.
    no_peak = np.full(site.federation.num_classes, np.nan)
    return Round(0, weights, {}, {}, workers.evaluate(weights), no_peak, 0.0)


def rounds(site: Site, last: Round, workers: Workers) -> Iterator[Round]:
    """The rounds after `last`, up to `site.training.num_rounds`."""
    while last.round < site.training.num_rounds:
        last = play(site, last, workers)
        yield last


@dataclass(frozen=True, eq=False)
class Opening:
    """A round up to its training: who is in it, and what they are sent."""

    clients: list[int]
    parts: Parts
    held: dict[str, Held]  # as the last round left them
    states: dict[str, Tree]  # slot -> state, once the parts have told
    broadcast: Broadcast
    bytes_surveyed: int


def play(site: Site, last: Round, workers: Workers) -> Round:
    """The round after `last`. Raises `RunFailed` where a client's update cannot be averaged."""
    started = time.perf_counter()
    opening = open_round(site, last, workers)
    broadcast, clients, states = opening.broadcast, opening.clients, opening.states
    number, num_clients = broadcast.round, site.federation.num_clients

    total, arrivals = _train(workers, broadcast, clients, last.memories)
    memories = {client: memory for client, memory in last.memories.items() if client not in arrivals}
    memories |= {client: arrival.memory for client, arrival in arrivals.items() if arrival.memory is not None}

    step = Step(last.weights, None, number, num_clients, frozenset(parameters_of(site.model)))
    for part in opening.parts:
        states[part.slot], step = part.update(states[part.slot], total.get(part.slot), step)
    if (where := first_difference(step.averaged, last.weights)) is not None:
        raise RunFailed(f"round {number}: the average does not fit the model: {where}")
    weights = {name: step.averaged[name] for name in last.weights}  # always in the model's order
    evaluation = workers.evaluate(weights)
    class_accuracy = metrics.class_accuracy(evaluation.confusion)
    return Round(
        round=number,
        weights=weights,
        held={slot: replace(hold, state=states[slot]) for slot, hold in opening.held.items()},
        memories=memories,
        evaluation=evaluation,
        peak=np.fmax(last.peak, class_accuracy),
        forgetting=metrics.forgetting_from(last.peak, class_accuracy),
        clients=tuple(arrival.row for arrival in arrivals.values()),
        seconds=time.perf_counter() - started,
        bytes_down=num_bytes([broadcast.weights, broadcast.states, broadcast.payloads]) * len(clients),
        bytes_up=opening.bytes_surveyed + sum(arrival.bytes_up for arrival in arrivals.values()),
    )


def open_round(site: Site, last: Round, workers: Workers) -> Opening:
    """Sample the cohort of the round after `last`, survey it, and have the parts tell what it is sent."""
    number = last.round + 1
    clients = cohort(site.seed, number, site.federation.num_clients, site.training.clients_per_round)
    parts = parts_at(site.method, number)
    held = {part.slot: _hold(part, last) for part in parts}
    states = {slot: hold.state for slot, hold in held.items()}

    surveyors = {part.slot: states[part.slot] for part in parts if defines(part, "survey")}
    broadcast = Broadcast(number, last.weights, surveyors, {}, {slot: hold.since for slot, hold in held.items()})
    surveyed, bytes_surveyed = _survey(workers, broadcast, clients) if surveyors else ({}, 0)

    view, payloads = server_view(site, number, last.weights), {}
    for part in parts:
        states[part.slot], payload = part.tell(states[part.slot], view, surveyed.get(part.slot))
        if payload is not None:
            payloads[part.slot] = payload
    return Opening(clients, parts, held, states, replace(broadcast, payloads=payloads), bytes_surveyed)


def _survey(workers: Workers, broadcast: Broadcast, clients: Sequence[int]) -> tuple[dict[str, Tree], int]:
    """The cohort's summands before training, added up by slot, and their bytes."""
    total, size = OrderedSum(), 0
    for summands, num_bytes_up in workers.survey(broadcast, clients):
        total.add(summands)
        size += num_bytes_up
    return total.value, size


def _train(
    workers: Workers, broadcast: Broadcast, clients: Sequence[int], memories: Mapping[int, Memory]
) -> tuple[dict[str, Tree], dict[int, Arrival]]:
    """The cohort's summands after training, added up by slot; and what is left of each client's reply without them."""
    total, arrivals, first = OrderedSum(), {}, None
    for client, (summands, arrival) in zip(clients, workers.train(broadcast, clients, memories), strict=True):
        who = f"client {client}, round {broadcast.round}"
        if (where := first_invalid(summands)) is not None:
            raise RunFailed(f"{who}: its update holds a NaN or an infinity at {where}; nothing was averaged")
        first = summands if first is None else first
        if (where := first_difference(summands, first)) is not None:
            raise RunFailed(f"{who}: its update is not like those before it: {where}; nothing was averaged")
        total.add(summands)  # and is dropped: the driver never holds a cohort's updates
        arrivals[client] = arrival
    return total.value, arrivals


def _hold(part: Part, last: Round) -> Held:
    """A part with its state from the round before; one that was not in force then starts anew."""
    before = last.held.get(part.slot)
    if before is not None and type(before.part) is type(part):
        return replace(before, part=part)
    return Held(part, last.round + 1, part.init(last.weights))
