"""Parts with which a client also trains a model or head of its own, and keeps it between rounds."""

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

# A head in training, and a function that takes a step of the job's optimizer on a loss.
OwnHead = tuple[Weights, Callable[[Tensor], None]]
# A client's own model before and after its training; None if it has no own model.
Models = tuple[Weights, Weights] | None


@dataclass(frozen=True, eq=False)
class Own:
    """A client's own model in training, and what its steps need."""

    model: nn.Module
    # Takes a step of the job's optimizer on a loss, with its own momentum.
    step: Callable[[Tensor], None]
    # The global model's trainable parameters, (P,).
    anchor: Tensor


@dataclass(frozen=True)
class OwnModel(Part):
    """Let each client also train a model of its own, which is pulled to the global model.

    Ditto (Li et al., ICML 2021), algorithm 1.

    The own model `v` takes a step on every batch of the global training, by the job's optimizer, on
    the loss `CE(v) + lam / 2 ||v - w||^2`, where `w` is the round's global model. The global
    training stays as it is, bit for bit. A client's first `v` is the `w` of that round; its
    BatchNorm statistics are its own, and are not pulled.

    Raise `Diverged` if the own model is no longer finite, because the loss of the global training
    does not show it.
    """

    lam: Annotated[
        float, Ge(0), "strength of the pull to the global model; 0: own models are trained alone"
    ] = 1.0

    def own_model(self, weights: Weights, memory: Tree) -> Weights:
        return memory or weights

    def begin(self, client: ClientView) -> Own:
        model = with_weights(client.global_model, client.memory or client.weights)
        for name, p in model.named_parameters():
            # Parameters that the job freezes are not among the weights.
            p.requires_grad_(name in client.weights)
        parameters = parameters_of(in_training(model))
        anchor = flat({name: client.weights[name] for name in parameters})
        return Own(model, client.stepper(parameters), anchor)

    def loss(self, batch: Batch, local: Own) -> None:
        """Take a step of the own model; there is no term for the global model."""
        device = batch.images.device
        # Dropout also draws here. The generators are restored, so that the global model has the
        # draws of FedAvg.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            logits = batch.run(local.model, batch.images).logits
            loss = losses.cross_entropy(logits, batch.labels)
        batch.note("own_loss", loss)
        pull: Tensor | float = 0.0
        if self.lam:
            pull = mse_loss(flat(parameters_of(local.model)), local.anchor, reduction="sum")
        local.step(loss + self.lam / 2 * pull)

    def report(self, client: ClientView, local: Own, fit: Fit) -> tuple[None, Weights]:
        smaller = f"train.lr, or a lam below {self.lam}" if self.lam else "train.lr"
        owner = f"client {client.id}'s own model in round {client.round}"
        return None, _finite(state(local.model), owner, smaller)


@dataclass(frozen=True)
class PersonalHead(Part):
    """Let each client also train a head of its own, which is added to the global head.

    In FedRoD (Chen and Chao, ICLR 2022).

    The own head learns by cross-entropy on the sum, by the job's optimizer, and the global model
    learns nothing from it. A client's first head is 0. The client's own model is the global model
    with the sum of both heads.
    """

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)
        refuse_other_heads(self, model)

    def own_model(self, weights: Weights, memory: Tree) -> Weights:
        return weights if memory is None else {**weights, **add(memory, weights)}

    def begin(self, client: ClientView) -> OwnHead:
        global_head = {
            name: w for name, w in client.weights.items() if name in ("head.weight", "head.bias")
        }
        head = combine(torch.clone, client.memory or zeros_like(global_head))
        head = combine(Tensor.requires_grad_, head)
        return head, client.stepper(head)

    def loss(self, batch: Batch, local: OwnHead) -> None:
        """Take a step of the own head; there is no term for the global model."""
        head, step = local
        added = linear(batch.features.detach(), head["head.weight"], head.get("head.bias"))
        loss = losses.cross_entropy(batch.logits.detach() + added, batch.labels)
        batch.note("own_loss", loss)
        step(loss)

    def report(self, client: ClientView, local: OwnHead, fit: Fit) -> tuple[None, Weights]:
        head = combine(Tensor.detach, local[0])
        owner = f"client {client.id}'s own head in round {client.round}"
        return None, _finite(head, owner, "train.lr")


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


def _finite(weights: Weights, owner: str, smaller: str) -> Weights:
    """Return the same weights; raise `Diverged` if a value is NaN or infinite.

    `owner` and `smaller` are words of the message: what has diverged, and which key to reduce.
    """
    try:
        checked(weights)
    except ValueError as error:
        raise Diverged(f"{owner} {error}; try a smaller {smaller}") from None
    return weights


def before_and_after(
    parts: Parts,
    before: tuple[Weights, Mapping[str, Tree]],
    after: tuple[Weights, Mapping[str, Tree]],
) -> Models:
    """Return a client's own model before and after its training; None if it has none.

    `before` and `after` hold the weights at the client, and its memories by slot.
    """
    part = next((part for part in parts if defines(part, "own_model")), None)
    if part is None:
        return None
    models = []
    for weights, memory in (before, after):
        model = part.own_model(weights, memory.get(part.slot))
        if model is None:
            return None
        models.append(model)
    return models[0], models[1]
