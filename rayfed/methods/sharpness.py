"""Parts that take the gradient of the cross-entropy at other weights, near those in training.

The gradient enters as a linear term of the loss, so it passes through SGD like any other. The value
of the term stays the value of the loss at the weights in training.
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
    """Take the gradient of the cross-entropy at nearby weights where the loss is highest.

    FedSAM (Qu et al., ICML 2022; also Caldarola et al., ECCV 2022).

    It takes a step of length `rho` along the gradient, and then the gradient there, on the same
    batch. BatchNorm's running statistics count only the pass at the weights in training.
    """

    slot: ClassVar[str] = "supervise"
    rho: Annotated[float, Ge(0), "length of the step to the other weights; 0 is FedAvg"] = 0.1
    weight: Annotated[float, Ge(0), "factor of the term"] = 1.0

    def loss(self, batch: Batch, local: None) -> Tensor:
        loss = losses.cross_entropy(batch.logits, batch.labels)
        if self.rho:
            loss = _with_gradient_at(_ascent(loss, batch.parameters, self.rho), loss, batch)
        return losses.scaled(self.weight, loss)


@dataclass(frozen=True)
class GlobalPerturbation(Part):
    """Take the gradient of the cross-entropy at weights back along the global model's path.

    FedLESAM (Fan et al., ICML 2024).

    The step has length `rho`. Its direction is from this round's global model to the global model
    that the client received when it last trained, where the global loss was higher. A client's
    first round has no step. The authors' code (MediaBrain-SJTU/FedLESAM) takes the server's last
    step for all clients, which is the same if all take part.
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
    """Take the gradient of the cross-entropy at weights further from the teacher's logits.

    FedSOL (Lee et al., CVPR 2024).

    The step is along the gradient of the divergence from the global model's softmax. It is scaled
    by how far each weight has moved from the global weight, with norm 1 or 0 over the first
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

        def scaled_move(w: Tensor, w_global: Tensor) -> Tensor:
            return normalize((w.detach() - w_global).abs(), dim=0)

        moved = combine(scaled_move, batch.parameters, anchor)
        return _with_gradient_at(combine(torch.mul, step, moved), loss, batch)


@dataclass(frozen=True)
class AgreedPerturbation(Part):
    """Take the gradient of the cross-entropy a step away, where clients agree on the step.

    In FedSMOO (Sun et al., ICML 2023).

    The step has length `rho`, along the gradient less `mu_i + s`. Then the step less `s` is added
    to `mu_i`. These are multipliers for the constraint that all clients take the same step `s`,
    which has the direction of the mean `mu_i` of the round's clients. It follows the authors' code
    (woodenchild95/FL-Simulator, `DRegSAM.py`); the paper's `s` also has the clients' steps.
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
        """Return the term, and change `mu_i`, the round's own dict, by the step."""
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
    """A forward pass as a module, so that `functional_call` can use other weights."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.model, self._run = batch.model, batch.run

    def forward(self, images: Tensor) -> Outputs:
        return self._run(self.model, images)


def _ascent(loss: Tensor, parameters: Weights, rho: float, less: Weights | None = None) -> Weights:
    """Return a step of length `rho` along the gradient of a loss, less a vector.

    The graph of the loss is kept, because other terms need it.
    """
    gradients = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=True, materialize_grads=True
    )
    gradient = dict(zip(parameters, gradients, strict=True))
    if less:
        gradient = subtract(gradient, less)
    return _of_length(gradient, rho)


def _of_length(step: Weights, rho: float) -> Weights:
    """Return a step of length `rho` in the same direction."""
    norm = dot(step, step).sqrt() + 1e-12
    return combine(lambda x: rho / norm * x, step)


def _with_gradient_at(step: Weights, loss: Tensor, batch: Batch) -> Tensor:
    """Return the value of a loss, with the gradient of the batch's cross-entropy a step away.

    Entries that stay at the client are not in the step, but have a gradient too.
    """
    parameters = parameters_of(batch.model)
    away: Weights = {}
    for name, w in parameters.items():
        away[name] = w.detach() + step[name] if name in step else w.detach()
    gradients = gradients_at(away, batch, batch.images, batch.labels)
    return with_gradient(loss, gradients, parameters)


def gradients_at(
    parameters: Weights, batch: Batch, images: Tensor, labels: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the cross-entropy at other parameters, in their order.

    `labels` are (B,), or probabilities (B, C). The pass updates copies of the buffers, because
    BatchNorm's running statistics must count each batch once.
    """
    parameters = combine(Tensor.requires_grad_, parameters)
    values = parameters | {name: buffer.clone() for name, buffer in batch.model.named_buffers()}
    by_path = {f"model.{name}": value for name, value in values.items()}
    outputs: Outputs = torch.func.functional_call(_Runner(batch), by_path, (images,))
    loss = losses.cross_entropy(outputs.logits, labels)
    return torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)


def with_gradient(loss: Tensor, gradients: Iterable[Tensor | None], parameters: Weights) -> Tensor:
    """Return the value of a loss with other gradients on some parameters, in their order.

    None is no gradient. A step does not change a parameter without a gradient, not even by weight
    decay or momentum.
    """
    known = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    linear = torch.dot(flat({name: parameters[name] for name in known}), flat(known))
    return loss.detach() + (linear - linear.detach())
