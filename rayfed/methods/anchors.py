"""Parts that pull the parameters to an anchor, or correct their gradients."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from rayfed.base.values import Ge, Gt, Le
from rayfed.clients.settings import Training
from rayfed.losses import scaled
from rayfed.methods.part import Part
from rayfed.methods.requirements import require_sgd
from rayfed.methods.views import Batch, ClientView, Fit, ServerView, Step
from rayfed.models.classifier import features_and_logits
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights, add, combine, like, scale, subtract, zeros_like


@dataclass(frozen=True)
class Proximal(Part):
    """Pull a client's parameters to the round's global parameters.

    FedProx (Li et al., MLSys 2020), eq. 2. The term is `mu / 2 ||w_local - w||^2`.
    """

    mu: Annotated[float, Ge(0), "pull towards the round's global weights; 0 is FedAvg"] = 0.01

    def begin(self, client: ClientView) -> Tensor:
        return client.flat(client.weights)

    def loss(self, batch: Batch, anchor: Tensor) -> Tensor:
        return self.mu / 2 * mse_loss(batch.flat, anchor, reduction="sum")


@dataclass(frozen=True)
class Curvature(Part):
    """Pull parameters that matter to other clients to these clients' values.

    FedCurv (Shoham et al., 2019), eq. 4: elastic weight consolidation on the other clients' tasks.

    A client's share is the diagonal `u` of its Fisher information at its trained weights, from
    squared batch gradients, and `u w`. The server keeps the sums of all clients' latest shares; a
    client subtracts its own share. It sends the change of its share, so that the sums stay right
    when only some clients take part.
    """

    strength: Annotated[float, Ge(0), "weight of the term (lambda); 0 is FedAvg"] = 1.0
    samples: Annotated[
        int, Ge(0), "images of a client for its Fisher information, drawn anew each round; 0: all"
    ] = 0

    def tell(self, sums: Tree, server: ServerView, surveyed: None) -> tuple[Tree, Tree]:
        if sums is None:
            return None, None
        return sums, {key: combine(Tensor.float, sums[key]) for key in sums}

    def begin(self, client: ClientView) -> tuple[Tensor, Tensor] | None:
        sums = client.payload
        if sums is None:
            return None
        if client.memory is not None:
            sums = {key: subtract(sums[key], client.memory[key]) for key in sums}
        return client.flat(sums["u"]), 2 * client.flat(sums["uw"])

    def loss(self, batch: Batch, local: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """Return `strength * sum_j (w - w_j)^T diag(u_j) (w - w_j)`, less its constant."""
        if local is None:
            return None
        u, twice_uw = local
        w = batch.flat
        return scaled(self.strength, torch.dot(u * w - twice_uw, w))

    def report(self, client: ClientView, local: object, fit: Fit) -> tuple[Tree, Tree]:
        parameters = fit.parameters
        u = zeros_like(combine(Tensor.detach, parameters))
        count = min(self.samples or client.num_examples, client.num_examples)
        for images, labels in self._batches(client, count):
            # The pass is in float32 under any `train.precision`, because squares of gradients span
            # too many orders of magnitude. The model may write to a copy of the batch.
            _, logits = features_and_logits(fit.model, images, copied=True)
            loss = cross_entropy(logits, labels)
            gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
            for name, gradient in zip(u, gradients, strict=True):
                u[name] += gradient.square() * (len(labels) / count)
        share = {"u": u, "uw": combine(lambda u, w: u * w.detach(), u, parameters)}
        before = client.memory
        if before is None:
            return share, share
        return {key: subtract(share[key], before[key]) for key in share}, share

    @staticmethod
    def _batches(client: ClientView, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of so many of the client's samples, drawn at random unless it is all."""
        if count == client.num_examples:
            yield from client.samples(client.batch_size)
            return
        # Generators are seeded by round and client, so the draw is the same on any worker.
        chosen = torch.zeros(client.num_examples, dtype=torch.bool)
        chosen[torch.randperm(client.num_examples)[:count]] = True
        drawn: list[Tensor] = []
        drawn_labels: list[Tensor] = []
        start = 0
        for images, labels in client.samples():
            of_batch = chosen[start : start + len(labels)].to(labels.device)
            start += len(labels)
            drawn.append(images[of_batch])
            drawn_labels.append(labels[of_batch])
        size = client.batch_size
        of_images, of_labels = torch.cat(drawn).split(size), torch.cat(drawn_labels).split(size)
        yield from zip(of_images, of_labels, strict=True)

    def update(self, sums: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        if sums is None:
            return total, step
        return {key: add(sums[key], total[key]) for key in sums}, step


def momentum_corrected_steps(steps: int, momentum: float) -> float:
    """Return the number of plain SGD steps that equal `steps` steps with momentum.

    It is the sum of the weights that all gradients have in the final weights. Wang et al.,
    "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (NeurIPS
    2020).

    >>> momentum_corrected_steps(3, 0.0)
    3.0
    >>> momentum_corrected_steps(2, 0.5)  # the first gradient counts 1 + 0.5, the second 1
    2.5
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@dataclass(frozen=True)
class ControlVariates(Part):
    """Correct a client's gradients by the control variates of the server and the client.

    SCAFFOLD (Karimireddy et al., ICML 2020), algorithm 1, option II.

    The correction `c - c_i` is a linear term of the loss, so it passes through SGD like any
    gradient; `K` is the number of steps as momentum counts them. `c` is the mean of all clients'
    `c_i`, and is float64, so that it stays this mean.
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
        correction = client.payload
        if client.memory is not None:
            correction = subtract(correction, client.memory)
        return correction, client.flat(correction)

    def loss(self, batch: Batch, local: tuple[Weights, Tensor] | None) -> Tensor | None:
        return None if local is None else torch.dot(batch.flat, local[1])

    def report(
        self, client: ClientView, local: tuple[Weights, Tensor] | None, fit: Fit
    ) -> tuple[Weights, Weights]:
        """Return the change of `c_i`, and `c_i <- c_i - c + (w - w_local) / (K lr)`."""
        course = client.lr * momentum_corrected_steps(fit.steps, client.momentum)
        parameters = combine(Tensor.detach, fit.parameters)
        c_i = combine(lambda local, w: (w - local) / course, parameters, client.weights)
        if local is not None:
            c_i = subtract(c_i, local[0])
        change = c_i if client.memory is None else subtract(c_i, client.memory)
        return change, c_i

    def update(self, c: Weights | None, change: Weights, step: Step) -> tuple[Weights, Step]:
        """Return `c <- c + sum(change) / N`, with N the number of all clients."""
        change = scale(change, 1 / step.server.num_clients)
        return (change if c is None else add(c, change)), step


@dataclass(frozen=True)
class ClientMomentum(Part):
    """Add `(1 - alpha)` times the server's last step to a client's gradients.

    FedCM (Xu et al., 2021).

    A client's direction is `alpha g + (1 - alpha) d`, where the part for the cross-entropy has the
    factor `alpha`. `d` is the server's last step over the mean `K lr` of the round's clients,
    `(w - w_new) / (K lr)`, with `K` the SGD steps as momentum counts them. As a linear term of the
    loss it passes through SGD like any gradient.
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
        course = client.lr * momentum_corrected_steps(fit.steps, client.momentum)
        return {"clients": 1, "course": course}, None

    def update(self, d: Weights | None, total: Tree, step: Step) -> tuple[Weights, Step]:
        before = step.parameters(step.weights)
        course = total["course"] / total["clients"]
        d = combine(lambda w, w_new: (w.double() - w_new) / course, before, step.averaged)
        return like(d, before), step
