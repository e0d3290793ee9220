"""Parts that take the gradient of the cross-entropy at other weights, near those in training.

The gradient enters as a linear term of the loss, so it passes through SGD like any other; the value
of the term stays that of the loss at the weights in training.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from rayfed import losses
from rayfed.base.values import Ge, Gt
from rayfed.methods.part import Part
from rayfed.methods.views import Batch, ClientView, Fit, Outputs, ServerView, Step
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import (
    Weights,
    add,
    combine,
    dot,
    flat,
    parameters_of,
    subtract,
    zeros_like,
)


@dataclass(frozen=True)
class SharpnessAware(Part):
    """Cross-entropy with its gradient at the weights where it is highest nearby.

    FedSAM (Qu et al., ICML 2022).

    Also Caldarola et al., ECCV 2022. A step of length `rho` along the gradient, then the gradient
    there, on the same batch. BatchNorm's running statistics count the pass at the weights in
    training alone.
    """

    slot: ClassVar[str] = "supervise"
    rho: Annotated[float, Ge(0), "length of the step to the other weights; 0 is FedAvg"] = 0.1
    weight: Annotated[float, Ge(0), "factor of the term"] = 1.0

    def loss(self, batch: Batch, local: None) -> Tensor:
        loss = losses.cross_entropy(batch.logits, batch.labels)
        if self.rho:
            loss = _with_gradient_at(_ascent(loss, batch.parameters, self.rho), loss, batch)
        return loss if self.weight == 1 else self.weight * loss


@dataclass(frozen=True)
class GlobalPerturbation(Part):
    """Cross-entropy with its gradient at weights back along the global model's path.

    FedLESAM (Fan et al., ICML 2024).

    The step has length `rho` and goes to the global model that the client was sent when it last
    trained, from the one of this round: where the global loss has fallen from. A client's first
    round has none. The authors' code (MediaBrain-SJTU/FedLESAM) takes the server's last step for
    all clients, which is the same where all take part.
    """

    slot: ClassVar[str] = "supervise"
    rho: Annotated[float, Ge(0), "length of the step to the other weights; 0 is FedAvg"] = 0.1

    def begin(self, client: ClientView) -> Weights | None:
        if not self.rho or client.memory is None:
            return None
        return _of_length(subtract(client.memory, client.weights), self.rho)

    def loss(self, batch: Batch, step: Weights | None) -> Tensor:
        loss = losses.cross_entropy(batch.logits, batch.labels)
        return loss if step is None else _with_gradient_at(step, loss, batch)

    def report(self, client: ClientView, local: object, fit: Fit) -> tuple[None, Weights]:
        return None, {name: client.weights[name] for name in fit.parameters}


@dataclass(frozen=True)
class ProximalPerturbation(Part):
    """Cross-entropy with its gradient at weights that are further from the teacher's logits.

    FedSOL (CVPR 2024).

    Lee et al. The step is along the gradient of the divergence from the global model's softmax,
    scaled by how far each weight has moved from the global one, with norm 1 or 0 over the first
    dimension, as in the authors' code (Lee-Gihun/FedSOL, `fedsol_adaptive`).
    """

    slot: ClassVar[str] = "supervise"
    rho: Annotated[float, Ge(0), "length of the step to the other weights; 0 is FedAvg"] = 1.0
    tau: Annotated[float, Gt(0), "temperature of both softmaxes"] = 3.0

    def begin(self, client: ClientView) -> Weights:
        return client.weights

    def loss(self, batch: Batch, anchor: Weights) -> Tensor:
        loss = losses.cross_entropy(batch.logits, batch.labels)
        if not self.rho:
            return loss
        divergence = losses.distill(batch.logits, batch.teacher.logits, tau=self.tau)
        step = _ascent(divergence, batch.parameters, self.rho)
        moved = combine(
            lambda w, w_global: normalize((w.detach() - w_global).abs(), dim=0),
            batch.parameters,
            anchor,
        )
        return _with_gradient_at(combine(torch.mul, step, moved), loss, batch)


@dataclass(frozen=True)
class AgreedPerturbation(Part):
    """Cross-entropy with its gradient at weights that all clients agree on.

    In FedSMOO (Sun et al., ICML 2023).

    The step has length `rho` along the gradient less `mu_i + s`, and `mu_i` follows by the step
    less `s`: multipliers for the constraint that all clients take the same step `s`, which has the
    direction of the cohort's mean `mu_i`. It is so in the authors' code
    (woodenchild95/FL-Simulator, `DRegSAM.py`); the paper's `s` has the clients' steps too.
    """

    slot: ClassVar[str] = "supervise"
    rho: Annotated[float, Ge(0), "length of the step to the other weights; 0 takes none"] = 0.1

    def tell(
        self, s: Weights | None, server: ServerView, surveyed: None
    ) -> tuple[Weights | None, Weights | None]:
        return s, s

    def begin(self, client: ClientView) -> tuple[Weights | None, Weights]:
        return client.payload, dict(client.memory or {})

    def loss(self, batch: Batch, local: tuple[Weights | None, Weights]) -> Tensor:
        """`mu_i` changes with every step: the round's own dict holds it."""
        s, mu = local
        loss = losses.cross_entropy(batch.logits, batch.labels)
        if not self.rho:
            return loss
        zeros = zeros_like(combine(Tensor.detach, batch.parameters))
        s, before = s or zeros, mu or zeros
        step = _ascent(loss, batch.parameters, self.rho, less=add(before, s))
        mu.update(add(before, subtract(step, s)))
        return _with_gradient_at(step, loss, batch)

    def report(
        self, client: ClientView, local: tuple[Tree, Weights], fit: Fit
    ) -> tuple[Tree, Tree]:
        mu = local[1] or None
        return mu, mu

    def update(
        self, s: Weights | None, total: Weights | None, step: Step
    ) -> tuple[Weights | None, Step]:
        if total is None:
            return s, step
        return combine(Tensor.float, _of_length(total, self.rho)), step


class _Runner(nn.Module):
    """A forward pass as a module, so that `functional_call` can give it other weights."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.model, self._run = batch.model, batch.run

    def forward(self, images: Tensor) -> Outputs:
        return self._run(self.model, images)


def _ascent(loss: Tensor, parameters: Weights, rho: float, less: Weights | None = None) -> Weights:
    """A step of length `rho` along the gradient of a loss, less a vector; its graph is kept, as
    other terms need it.
    """
    gradients = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=True, materialize_grads=True
    )
    gradient = dict(zip(parameters, gradients, strict=True))
    if less:
        gradient = subtract(gradient, less)
    return _of_length(gradient, rho)


def _of_length(step: Weights, rho: float) -> Weights:
    norm = dot(step, step).sqrt() + 1e-12
    return combine(lambda x: rho / norm * x, step)


def _with_gradient_at(step: Weights, loss: Tensor, batch: Batch) -> Tensor:
    """The value of a loss, with the gradient that the batch's cross-entropy has a step away.

    What stays at the client is not in the step, and trains all the same.
    """
    parameters = parameters_of(batch.model)
    there = {
        name: w.detach() + step[name] if name in step else w.detach()
        for name, w in parameters.items()
    }
    gradients = gradients_at(there, batch, batch.images, batch.labels)
    return with_gradient(loss, gradients, parameters)


def gradients_at(
    there: Weights, batch: Batch, images: Tensor, labels: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of the cross-entropy at other parameters, in their order; labels (B,), or
    probabilities (B, C).

    The pass updates copies of the buffers: BatchNorm's running statistics must count each batch
    once.
    """
    there = combine(Tensor.requires_grad_, there)
    values = there | {name: buffer.clone() for name, buffer in batch.model.named_buffers()}
    named = {f"model.{name}": value for name, value in values.items()}
    outputs: Outputs = torch.func.functional_call(_Runner(batch), named, (images,))
    loss = losses.cross_entropy(outputs.logits, labels)
    return torch.autograd.grad(loss, list(there.values()), allow_unused=True)


def with_gradient(loss: Tensor, gradients: Iterable[Tensor | None], parameters: Weights) -> Tensor:
    """The value of a loss with other gradients on some parameters, in their order; None is no
    gradient.

    A parameter without a gradient is left alone by a step, without weight decay or momentum.
    """
    given = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    linear = torch.dot(flat({name: parameters[name] for name in given}), flat(given))
    return loss.detach() + (linear - linear.detach())
