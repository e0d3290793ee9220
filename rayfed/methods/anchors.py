"""Parts that act on the parameters themselves: they pull them to an anchor, or correct their
gradients.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from rayfed.base.values import Ge, Gt, Le
from rayfed.clients.settings import Training
from rayfed.methods.part import Part
from rayfed.methods.requirements import require_sgd
from rayfed.methods.views import Batch, ClientView, Fit, ServerView, Step
from rayfed.models.classifier import features_and_logits
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights, add, combine, like, scale, subtract, zeros_like


@dataclass(frozen=True)
class Proximal(Part):
    """`mu / 2 ||w_local - w||^2` over the parameters. FedProx (Li et al., MLSys 2020), eq. 2."""

    mu: Annotated[float, Ge(0), "pull towards the round's global weights; 0 is FedAvg"] = 0.01

    def begin(self, client: ClientView) -> Tensor:
        return client.flat(client.weights)

    def loss(self, batch: Batch, anchor: Tensor) -> Tensor:
        return self.mu / 2 * mse_loss(batch.flat, anchor, reduction="sum")


@dataclass(frozen=True)
class Curvature(Part):
    """Elastic weight consolidation on the other clients' tasks.

    FedCurv (Shoham et al., 2019), eq. 4.

    A client's share is the diagonal `u` of its Fisher information at its trained weights, from
    squared batch gradients, and `u w`. The server keeps the sums of all clients' latest shares; a
    client subtracts its own share. It sends the change of its share, so that the sums stay right
    when only some clients take part.
    """

    strength: Annotated[float, Ge(0), "weight of the term (lambda); 0 is FedAvg"] = 1.0

    def tell(self, sums: Tree, server: ServerView, surveyed: None) -> tuple[Tree, Tree]:
        return sums, None if sums is None else {
            key: combine(Tensor.float, sums[key]) for key in sums
        }

    def begin(self, client: ClientView) -> tuple[Tensor, Tensor] | None:
        others = client.payload
        if others is None:
            return None
        if client.memory is not None:
            others = {key: subtract(others[key], client.memory[key]) for key in others}
        return client.flat(others["u"]), 2 * client.flat(others["uw"])

    def loss(self, batch: Batch, others: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """`strength * sum_j (w - w_j)^T diag(u_j) (w - w_j)`, less its constant."""
        if others is None:
            return None
        (u, twice_uw), w = others, batch.flat
        return self.strength * torch.dot(u * w - twice_uw, w)

    def report(self, client: ClientView, others: object, fit: Fit) -> tuple[Tree, Tree]:
        parameters = fit.parameters
        u = zeros_like(combine(Tensor.detach, parameters))
        for images, labels in client.samples(client.batch_size):
            # In float32 under any `train.precision`: squares of gradients span too many orders of
            # magnitude. The batch is of this pass alone, so the model may write to it.
            _, logits = features_and_logits(fit.model, images, copied=True)
            loss = cross_entropy(logits, labels)
            gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
            for name, gradient in zip(u, gradients, strict=True):
                u[name] += gradient.square() * (len(labels) / client.num_examples)
        share = {"u": u, "uw": combine(lambda u, w: u * w.detach(), u, parameters)}
        before = client.memory
        return (
            share if before is None else {key: subtract(share[key], before[key]) for key in share}
        ), share

    def update(self, sums: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        return (total if sums is None else {key: add(sums[key], total[key]) for key in sums}), step


def momentum_corrected_steps(steps: int, momentum: float) -> float:
    """The number of plain SGD steps that equal `steps` steps with momentum: the sum of the weights
    of all gradients.

    Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization" (NeurIPS 2020).

    >>> momentum_corrected_steps(3, 0.0), momentum_corrected_steps(2, 0.5)  # the first counts 1 + 0.5, the second 1
    (3.0, 2.5)
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@dataclass(frozen=True)
class ControlVariates(Part):
    """Gradients corrected by server's and client's control variates.

    SCAFFOLD (Karimireddy et al., ICML 2020).

    Algorithm 1, option II. The correction `c - c_i` is a linear term of the loss, so it passes
    through SGD like any gradient; `K` is the number of steps as momentum counts them. `c` stays the
    mean of all clients' `c_i`; it is kept in float64 for that.
    """

    def check(self, model: nn.Module, training: Training) -> None:
        require_sgd(self, training)

    def tell(
        self, c: Weights | None, server: ServerView, surveyed: None
    ) -> tuple[Weights | None, Weights | None]:
        return c, None if c is None else combine(Tensor.float, c)

    def begin(self, client: ClientView) -> tuple[Weights, Tensor] | None:
        if client.payload is None:
            return None
        correction = (
            client.payload if client.memory is None else subtract(client.payload, client.memory)
        )
        return correction, client.flat(correction)

    def loss(self, batch: Batch, local: tuple[Weights, Tensor] | None) -> Tensor | None:
        return None if local is None else torch.dot(batch.flat, local[1])

    def report(
        self, client: ClientView, local: tuple[Weights, Tensor] | None, fit: Fit
    ) -> tuple[Weights, Weights]:
        """`c_i <- c_i - c + (w - w_local) / (K lr)`; the server gets the change."""
        course = client.lr * momentum_corrected_steps(fit.steps, client.momentum)
        parameters = combine(Tensor.detach, fit.parameters)
        own = combine(lambda local, w: (w - local) / course, parameters, client.weights)
        if local is not None:
            own = subtract(own, local[0])
        return (own if client.memory is None else subtract(own, client.memory)), own

    def update(self, c: Weights | None, change: Weights, step: Step) -> tuple[Weights, Step]:
        """`c <- c + sum(change) / N`, with N the whole population."""
        change = scale(change, 1 / step.server.num_clients)
        return (change if c is None else add(c, change)), step


@dataclass(frozen=True)
class ClientMomentum(Part):
    """`(1 - alpha)` times the server's last step, as a gradient, in each of a client's.

    FedCM (Xu et al., 2021).

    A client's direction is `alpha g + (1 - alpha) d`; the factor `alpha` of the cross-entropy is
    that of its part. `d` is the server's last step over the cohort's mean `K lr`, `(w - w_new) / (K
    lr)`, with `K` the SGD steps as momentum counts them. As a linear term of the loss it passes
    through SGD like any gradient.
    """

    alpha: Annotated[float, Gt(0), Le(1), "share of a client's own gradient; 1 is FedAvg"] = 0.1

    def check(self, model: nn.Module, training: Training) -> None:
        require_sgd(self, training)

    def tell(
        self, d: Weights | None, server: ServerView, surveyed: None
    ) -> tuple[Weights | None, Weights | None]:
        return d, d

    def begin(self, client: ClientView) -> Tensor | None:
        return None if client.payload is None else client.flat(client.payload)

    def loss(self, batch: Batch, d: Tensor | None) -> Tensor | None:
        return None if d is None else (1 - self.alpha) * torch.dot(batch.flat, d)

    def report(self, client: ClientView, d: object, fit: Fit) -> tuple[Tree, None]:
        return {
            "clients": 1,
            "course": client.lr * momentum_corrected_steps(fit.steps, client.momentum),
        }, None

    def update(self, d: Weights | None, total: Tree, step: Step) -> tuple[Weights, Step]:
        before, course = step.parameters(step.weights), total["course"] / total["clients"]
        return like(
            combine(lambda w, new: (w.double() - new) / course, before, step.averaged), before
        ), step
