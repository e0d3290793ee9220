"""Measure each client's own model after a run, as papers report it.

It is measured at every client, without another local epoch. A client's own model is the global
model with the entries that stay at the client (FedPer, FedRep, FedBN), or the model that it keeps
beside the global one (Ditto); with other methods it is the global model. A client that never
trained has the global model. Some papers tune that model at the client before they measure it:
FedBABU its head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import nn

from rayfed.base.errors import InputError
from rayfed.base.isolation import isolated
from rayfed.base.seeds import Purpose, seed_of
from rayfed.measures import metrics
from rayfed.methods.part import Parts, defines, parts_at
from rayfed.methods.personal import head_parameters, local_names, recalled
from rayfed.methods.supervise import CrossEntropy
from rayfed.rounds.client_work import RoundContext, descend, refuse_diverged, view_of
from rayfed.rounds.evaluation import evaluate
from rayfed.rounds.executor import Executor
from rayfed.rounds.messages import Broadcast
from rayfed.rounds.round import Round
from rayfed.rounds.setup import Setup
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights, in_evaluation, parameters_of, with_weights

TUNES: Parts = (CrossEntropy(),)


@dataclass(frozen=True)
class Tuning:
    """Epochs of plain cross-entropy at a client.

    They run with the job's optimizer, at the last round's learning rate.
    """

    epochs: float
    # FedBABU tunes either the head or all layers.
    layers: Literal["head", "all"] = "all"


@dataclass(frozen=True)
class OwnRow:
    """A client's own model on all test images, before and after tuning.

    What is None after tuning was not tuned.
    """

    client: int
    # The name of a natural client.
    name: str | None
    num_examples: int
    held_out: bool
    accuracy: float
    # The accuracy with classes weighted as the client's labels (FedNTD eq. 6).
    in_local: float
    tuned_accuracy: float | None = None
    tuned_in_local: float | None = None


def own_rows(
    setup: Setup, last: Round, executor: Executor, tuning: Tuning | None
) -> Iterator[OwnRow]:
    """Yield the results of all clients' own models after a round, in this process.

    `executor` fetches the clients' memories. Raise `InputError` where the head is to be tuned and
    the model has none, and `Diverged` where tuning diverges.
    """
    if tuning is not None:
        training = replace(setup.job.train, local_epochs=tuning.epochs, local_steps=None)
        setup = replace(setup, job=replace(setup.job, train=training))
    if tuning is not None and tuning.layers == "head" and not head_parameters(setup.model):
        raise InputError(
            "--tune head: the model has no module `head` that trains; give all (in Python "
            "layers='all')"
        )
    parts = parts_at(setup.job.method, last.round)
    since = {slot: held.since for slot, held in last.held.items()}
    context = RoundContext(setup, Broadcast(last.round, last.evaluated, {}, {}, since))
    global_results = _measured(setup, with_weights(setup.model, context.broadcast.weights))
    for client in range(setup.federation.num_clients):
        num_examples = setup.federation.num_examples(client)
        label_shares = setup.federation.label_counts(client) / num_examples
        memory = executor.recall(last.memories[client]) if client in last.memories else None
        seed = seed_of(setup.job.seed, Purpose.EVALUATION, last.round, client)
        with isolated(seed, setup.device):
            own_weights = _own_weights(context, parts, context.broadcast.read_memory(memory))
        model = with_weights(setup.model, {**context.broadcast.weights, **own_weights})
        accuracy, by_class = _measured(setup, model) if own_weights else global_results
        in_local = metrics.in_local_accuracy(by_class, label_shares)
        name = setup.federation.client_names[client] if setup.federation.client_names else None
        row = OwnRow(client, name, num_examples, client in setup.held_out, accuracy, in_local)
        if tuning is not None:
            _tune(context, client, model, own_weights, tuning)
            accuracy, by_class = _measured(setup, model)
            in_local = metrics.in_local_accuracy(by_class, label_shares)
            row = replace(row, tuned_accuracy=accuracy, tuned_in_local=in_local)
        yield row


def _own_weights(context: RoundContext, parts: Parts, memory: dict[str, Tree]) -> Weights:
    """Return the entries in which a client's own model is not the global one.

    They are empty where it is the same.
    """
    keeper = next((part for part in parts if defines(part, "own_model")), None)
    if keeper is not None:
        part_memory = memory.get(keeper.slot)
        if part_memory is None:
            return {}
        return keeper.own_model(context.broadcast.weights, part_memory) or {}
    return recalled(local_names(parts, context.setup.model), memory)


def _measured(setup: Setup, model: nn.Module) -> tuple[float, np.ndarray]:
    """Return a model's accuracy on the test images, and on each class (C,)."""
    confusion = evaluate(setup, in_evaluation(model), 0, len(setup.federation.test)).confusion
    return metrics.accuracy(confusion), metrics.class_accuracy(confusion)


def _tune(
    context: RoundContext, client: int, model: nn.Module, own_weights: Weights, tuning: Tuning
) -> None:
    """Train a client's own model in place, for the epochs of `tuning`."""
    setup, round = context.setup, context.broadcast.round
    if tuning.layers == "head":
        head = head_parameters(model)
        for name, parameter in parameters_of(model).items():
            parameter.requires_grad_(name in head)
    seed = seed_of(setup.job.seed, Purpose.TUNE, round, client)
    with isolated(seed, setup.device):
        order = torch.Generator().manual_seed(
            seed_of(setup.job.seed, Purpose.TUNE, round, client, 1)
        )
        local = {part.slot: None for part in TUNES}
        view = view_of(context, client, own_weights)
        losses, notes = descend(setup, model, view, TUNES, local, order)
    refuse_diverged(losses, notes, f"client {client}, while its own model was tuned", TUNES)
