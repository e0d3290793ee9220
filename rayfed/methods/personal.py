"""Entries of a model's state that stay at each client, so that every client has its own model.

A part's `local_names` says which entries stay. They are stored as the part's memory of a client.
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

# The names of the entries that stay at the clients, by the slot of the part that leaves them there.
Local = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class LocalNorm(Part):
    """Leave BatchNorm's parameters and statistics at each client.

    FedBN (Li et al., ICLR 2021), algorithm 1.
    """

    def check(self, model: nn.Module, training: Training) -> None:
        if not self.local_names(model):
            raise InputError(
                "local_norm (the part of fedbn): the model has no BatchNorm layer that trains, so "
                "nothing would stay at the clients; choose a model with one: -s model=resnet8"
            )

    def local_names(self, model: nn.Module) -> Collection[str]:
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        return _entries(model, layers)


@dataclass(frozen=True)
class LocalHead(Part):
    """Leave the head at each client; all other layers are averaged.

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
    """Leave the complete model at each client, so that each one trains alone.

    `Local` in Ditto (ICML 2021): the least that a federated method should reach.

    Nothing is averaged, and the global model stays the initial model. `rayfed clients` measures the
    clients' models.
    """

    def local_names(self, model: nn.Module) -> Collection[str]:
        return state(model).keys()


@dataclass(frozen=True)
class HeadThenBody(Part):
    """Train the head alone by cross-entropy, then the body alone.

    In FedRep (Collins et al., ICML 2021), algorithm 1.

    With `head = 0` the head is never trained, as in FedBABU (Oh et al., ICLR 2022). The half that
    is not trained has no gradient from this term.
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
        # The product is rounded first, because 0.7 * 90 is 62.99...
        head_steps = int(round(self.head * client.steps, 9))
        return chain(repeat(True, head_steps), repeat(False))

    def loss(self, batch: Batch, trains_head: Iterator[bool]) -> Tensor:
        loss = losses.cross_entropy(batch.logits, batch.labels)
        head = head_parameters(batch.model)
        in_head = next(trains_head)
        trained = {
            name: p for name, p in parameters_of(batch.model).items() if (name in head) == in_head
        }
        gradients = torch.autograd.grad(
            loss, list(trained.values()), retain_graph=True, allow_unused=True
        )
        return with_gradient(loss, gradients, trained)


def head_parameters(model: nn.Module) -> Weights:
    """Return the parameters of the model's `head` that train; none if it has no such module."""
    head = getattr(model, "head", None)
    inside = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
    return {name: p for name, p in parameters_of(model).items() if id(p) in inside}


def _entries(model: nn.Module, layers: Iterable[nn.Module]) -> list[str]:
    """Return the names of some layers' parameters and buffers in the model's state.

    An entry that another layer has too, as a tied weight, counts.
    """
    inside: set[int] = set()
    for layer in layers:
        inside.update(id(module) for module in layer.modules())
    owners = {
        name for name, module in model.named_modules(remove_duplicate=False) if id(module) in inside
    }
    names = {name for name in state(model) if name.rpartition(".")[0] in owners}
    for name, first_name in other_names(model).items():
        if name.rpartition(".")[0] in owners:
            names.add(first_name)
    return [name for name in state(model) if name in names]


def local_names(parts: Parts, model: nn.Module) -> Local:
    """Return the names of the entries of a model's state that stay at each client, by slot."""
    return {
        part.slot: frozenset(part.local_names(model))
        for part in parts
        if defines(part, "local_names")
    }


def shared(local: Local, weights: Weights) -> Weights:
    """Return the weights without the entries that stay at each client.

    >>> shared({"local_head": frozenset(["head.weight"])}, {"head.weight": 1, "body.weight": 2})
    {'body.weight': 2}
    """
    staying = frozenset().union(*local.values())
    return {name: w for name, w in weights.items() if name not in staying}


def put_back(local: Local, proposed: Weights, weights: Weights) -> Weights:
    """Return the proposed weights with the entries that stay at each client as in `weights`."""
    restored = dict(proposed)
    for names in local.values():
        restored.update({name: weights[name] for name in names})
    return restored


def recalled(local: Local, memory: Mapping[str, Tree]) -> Weights:
    """Return a client's own entries, from its memory by slot; empty before its first training."""
    entries: Weights = {}
    for slot in local:
        entries.update(memory.get(slot, {}))
    return entries


def remembered(
    local: Local, state: Mapping[str, Tensor], memory: dict[str, Tree]
) -> dict[str, Tree]:
    """Return a client's memory by slot, with the entries of its state that stay there.

    Raise TypeError if a part with local names has returned another memory.
    """
    with_memory = sorted(local.keys() & memory.keys())
    if with_memory:
        raise TypeError(
            f"the part '{with_memory[0]}' has local names, and so no other memory; keep that in a "
            "second part"
        )
    memory = dict(memory)
    for slot, names in local.items():
        memory[slot] = {name: w for name, w in state.items() if name in names}
    return memory
