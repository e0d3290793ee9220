"""A model of each client's own, or a head, which it trains beside the global model and keeps from
round to round.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from rayfed import losses
from rayfed.base.errors import Diverged, InputError
from rayfed.base.values import Ge
from rayfed.clients.settings import Training
from rayfed.methods.part import Part, Parts, defines
from rayfed.methods.requirements import require_features
from rayfed.methods.views import Batch, ClientView, Fit
from rayfed.tensors.sums import checked
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import (
    Weights,
    add,
    combine,
    flat,
    in_training,
    other_names,
    parameters_of,
    state,
    with_weights,
    zeros_like,
)

# In training, and its step on a loss: by the job's optimizer.
OwnHead = tuple[Weights, Callable[[Tensor], None]]
# A client's own model before and after its training, where it keeps one.
Models = tuple[Weights, Weights] | None


@dataclass(frozen=True, eq=False)
class Own:
    """A client's own model in training, and what its steps need."""

    model: nn.Module
    # On a loss: the job's optimizer, with a momentum of its own.
    step: Callable[[Tensor], None]
    # The global model's trainable parameters, (P,).
    anchor: Tensor


@dataclass(frozen=True)
class OwnModel(Part):
    """Each client also trains a model of its own, pulled to the global one.

    Ditto (Li et al., ICML 2021), algorithm 1.

    The own model `v` takes a step on every batch of the global training, by the job's optimizer, on
    the loss `CE(v) + lam / 2 ||v - w||^2`, where `w` is the round's global model. The global
    training stays as it is, bit for bit. A client's first `v` is the `w` of that round; its
    BatchNorm statistics are its own, and are not pulled.

    Raises `Diverged` where the own model is no longer finite, which the loss of the global training
    does not show.
    """

    lam: Annotated[
        float, Ge(0), "strength of the pull to the global model; 0: own models are trained alone"
    ] = 1.0

    def own_model(self, weights: Weights, memory: Tree) -> Weights:
        return memory or weights

    def begin(self, client: ClientView) -> Own:
        model = with_weights(client.global_model, client.memory or client.weights)
        for name, p in model.named_parameters():
            # The job's frozen parameters are not among the weights.
            p.requires_grad_(name in client.weights)
        parameters = parameters_of(in_training(model))
        anchor = flat({name: client.weights[name] for name in parameters})
        return Own(model, client.stepper(parameters), anchor)

    def loss(self, batch: Batch, local: Own) -> None:
        """A step of the own model; no term of the loss."""
        device = batch.images.device
        # Dropout draws here too. The generators are restored, so that the global model has the
        # draws of FedAvg.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            loss = losses.cross_entropy(batch.run(local.model, batch.images).logits, batch.labels)
        batch.note("own_loss", loss)
        pull = (
            mse_loss(flat(parameters_of(local.model)), local.anchor, reduction="sum")
            if self.lam
            else 0.0
        )
        local.step(loss + self.lam / 2 * pull)

    def report(self, client: ClientView, local: Own, fit: Fit) -> tuple[None, Weights]:
        smaller = f"train.lr, or a lam below {self.lam}" if self.lam else "train.lr"
        return None, _finite(
            state(local.model), f"client {client.id}'s own model in round {client.round}", smaller
        )


@dataclass(frozen=True)
class PersonalHead(Part):
    """A head of each client's own, added to the global head's logits.

    In FedRoD (Chen and Chao, ICLR 2022).

    It learns by cross-entropy on the sum, by the job's optimizer, and the global model learns
    nothing from it. A client's first head is 0. The client's own model is the global one with the
    sum of both heads.
    """

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)
        refuse_other_heads(self, model)

    def own_model(self, weights: Weights, memory: Tree) -> Weights:
        return weights if memory is None else {**weights, **add(memory, weights)}

    def begin(self, client: ClientView) -> OwnHead:
        head = {
            name: w for name, w in client.weights.items() if name in ("head.weight", "head.bias")
        }
        own = combine(torch.clone, client.memory or zeros_like(head))
        own = combine(Tensor.requires_grad_, own)
        return own, client.stepper(own)

    def loss(self, batch: Batch, local: OwnHead) -> None:
        """A step of the own head; no term of the loss."""
        own, step = local
        added = linear(batch.features.detach(), own["head.weight"], own.get("head.bias"))
        loss = losses.cross_entropy(batch.logits.detach() + added, batch.labels)
        batch.note("own_loss", loss)
        step(loss)

    def report(self, client: ClientView, local: OwnHead, fit: Fit) -> tuple[None, Weights]:
        own = combine(Tensor.detach, local[0])
        return None, _finite(
            own, f"client {client.id}'s own head in round {client.round}", "train.lr"
        )


def refuse_other_heads(part: Part, model: nn.Module) -> None:
    """Raise `InputError` unless the model's head is a single linear layer that trains."""
    if not isinstance(model.head, nn.Linear):
        raise InputError(f"{part!r} needs a model with a single linear layer as its head")
    if "head.weight" in other_names(model):
        raise InputError(
            f"{part!r} learns the head, whose weight is that of another layer too "
            f"('{other_names(model)['head.weight']}'); give the head a weight of its own"
        )
    if not model.head.weight.requires_grad:
        raise InputError(f"{part!r} learns the head, which is frozen; freeze less")


def _finite(own: Weights, whose: str, smaller: str) -> Weights:
    """The same weights. Raises `Diverged` where one is NaN or infinite."""
    try:
        checked(own)
    except ValueError as error:
        raise Diverged(f"{whose} {error}; try a smaller {smaller}") from None
    return own


def before_and_after(
    parts: Parts,
    before: tuple[Weights, Mapping[str, Tree]],
    after: tuple[Weights, Mapping[str, Tree]],
) -> Models:
    """A client's own model before and after its training, where it has one, out of weights and
    memories by slot.
    """
    part = next((part for part in parts if defines(part, "own_model")), None)
    if part is None:
        return None
    first, then = (
        part.own_model(weights, memory.get(part.slot)) for weights, memory in (before, after)
    )
    return None if first is None or then is None else (first, then)
