"""Entries of a model's state that stay at each client, so that every client has a model of its own,
and who has them.

A part says which entries stay: its `local_names`. They are kept as its memory of a client.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed import losses
from rayfed.base.errors import InputError
from rayfed.base.values import Ge, Lt
from rayfed.clients.settings import Training
from rayfed.methods.part import Part, Parts, defines
from rayfed.methods.sharpness import with_gradient
from rayfed.methods.views import Batch, ClientView
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights, other_names, parameters_of, state

# Slot of a part -> the entries that it leaves at the clients.
Local = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class LocalNorm(Part):
    """BatchNorm's parameters and statistics stay at each client.

    FedBN (Li et al., ICLR 2021), algorithm 1.
    """

    def check(self, model: nn.Module, training: Training) -> None:
        if not self.local_names(model):
            raise InputError(
                "local_norm: the model has no BatchNorm layer that trains, so nothing would stay "
                "at the clients"
            )

    def local_names(self, model: nn.Module) -> Collection[str]:
        return _entries(
            model, (module for module in model.modules() if isinstance(module, _BatchNorm))
        )


@dataclass(frozen=True)
class LocalHead(Part):
    """The head stays at each client; all other layers are averaged.

    FedPer (Arivazhagan et al., 2019), algorithm 1.
    """

    def check(self, model: nn.Module, training: Training) -> None:
        if not self.local_names(model):
            raise InputError(
                "local_head: the model has no module `head` that trains, so nothing would stay at "
                "the clients"
            )

    def local_names(self, model: nn.Module) -> Collection[str]:
        head = getattr(model, "head", None)
        return _entries(model, [head]) if isinstance(head, nn.Module) else []


@dataclass(frozen=True)
class LocalModel(Part):
    """The whole model stays at each client, and nothing is averaged: the floor.

    `Local` in Ditto (ICML 2021).

    The global model stays the initial one; `rayfed clients` measures the clients' models.
    """

    def local_names(self, model: nn.Module) -> Collection[str]:
        return state(model).keys()


@dataclass(frozen=True)
class HeadThenBody(Part):
    """Cross-entropy that trains the head alone, then the body alone.

    In FedRep (Collins et al., ICML 2021).

    Algorithm 1. With `head = 0` the head is never trained, as in FedBABU (Oh et al., ICLR 2022).
    What is not trained has no gradient from this term.
    """

    slot: ClassVar[str] = "supervise"
    head: Annotated[
        float, Ge(0), Lt(1), "share of a client's steps, rounded down, that train the head"
    ] = 0.9

    def check(self, model: nn.Module, training: Training) -> None:
        if not isinstance(getattr(model, "head", None), nn.Module):
            raise InputError(
                "head_then_body: the model has no module `head`; give its last layer that name"
            )
        head = head_parameters(model)
        body = parameters_of(model).keys() - head.keys()
        if self.head and not head:
            raise InputError(
                f"{self!r}: nothing in the model's head trains; freeze fewer of its parameters"
            )
        if not body:
            raise InputError(
                f"{self!r}: nothing in the model's body trains; freeze fewer of its parameters"
            )

    def begin(self, client: ClientView) -> Iterator[bool]:
        # 0.7 * 90 is 62.99...
        return chain(repeat(True, int(round(self.head * client.steps, 9))), repeat(False))

    def loss(self, batch: Batch, trains_head: Iterator[bool]) -> Tensor:
        loss = losses.cross_entropy(batch.logits, batch.labels)
        head = head_parameters(batch.model)
        now = next(trains_head)
        trained = {
            name: p for name, p in parameters_of(batch.model).items() if (name in head) == now
        }
        gradients = torch.autograd.grad(
            loss, list(trained.values()), retain_graph=True, allow_unused=True
        )
        return with_gradient(loss, gradients, trained)


def head_parameters(model: nn.Module) -> Weights:
    """The parameters of the model's `head` that train; none where it has no such module."""
    head = getattr(model, "head", None)
    inside = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
    return {name: p for name, p in parameters_of(model).items() if id(p) in inside}


def _entries(model: nn.Module, layers: Iterable[nn.Module]) -> list[str]:
    """The names of some layers' parameters and buffers in the model's state.

    An entry counts that any other layer has too, as a tied weight.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    owners = {
        name for name, module in model.named_modules(remove_duplicate=False) if id(module) in inside
    }
    of_layers = {name for name in state(model) if name.rpartition(".")[0] in owners}
    for name, first in other_names(model).items():
        if name.rpartition(".")[0] in owners:
            of_layers.add(first)
    return [name for name in state(model) if name in of_layers]


def local_names(parts: Parts, model: nn.Module) -> Local:
    """The entries of a model's state that stay at each client."""
    return {
        part.slot: frozenset(part.local_names(model))
        for part in parts
        if defines(part, "local_names")
    }


def shared(local: Local, weights: Weights) -> Weights:
    """Some weights without those that stay at each client."""
    return {
        name: w for name, w in weights.items() if not any(name in names for names in local.values())
    }


def put_back(local: Local, proposed: Weights, weights: Weights) -> Weights:
    """The proposed weights, in which what stays at each client is as in the other weights."""
    return {**proposed, **{name: weights[name] for names in local.values() for name in names}}


def recalled(local: Local, memory: Mapping[str, Tree]) -> Weights:
    """A client's own entries, out of its memory by slot; empty before its first training."""
    return {name: tensor for slot in local for name, tensor in memory.get(slot, {}).items()}


def remembered(
    local: Local, state: Mapping[str, Tensor], memory: dict[str, Tree]
) -> dict[str, Tree]:
    """A client's memory by slot, with its own entries.

    Raises TypeError where a part has another memory besides.
    """
    both = sorted(local.keys() & memory.keys())
    if both:
        raise TypeError(
            f"the part '{both[0]}' has local names, and so no other memory; keep that in a second "
            "part"
        )
    return memory | {
        slot: {name: w for name, w in state.items() if name in names}
        for slot, names in local.items()
    }
