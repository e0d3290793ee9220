"""FedReg's part: its steps do not change what the global model predicts for made images.

The images are made from the client's own images.
"""

from dataclasses import dataclass
from itertools import cycle
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rayfed import losses
from rayfed.base.errors import InputError
from rayfed.base.values import Ge, Le
from rayfed.clients.settings import Training
from rayfed.methods.part import Part
from rayfed.methods.requirements import require_sgd, warn_of_momentum
from rayfed.methods.sharpness import gradients_at, with_gradient
from rayfed.methods.views import Batch, ClientView
from rayfed.tensors.weights import (
    Weights,
    add,
    combine,
    dot,
    parameters_of,
    scale,
    subtract,
    zeros_like,
)

# The point between the global weights (0) and the client's weights (1) at which the authors' code
# takes the gradients on pseudo data.
MIDDLE = 0.5


class Made(NamedTuple):
    """Images made from a batch of a client, in directions that raise the global model's loss."""

    # Far from the client's images: they stand for what the client does not have.
    pseudo: Tensor
    # The global model's probabilities on the pseudo images, (B, C).
    probabilities: Tensor
    # Near the client's images.
    perturbed: Tensor
    # The labels of the client's images, (B,).
    labels: Tensor


@dataclass(frozen=True)
class PseudoData(Part):
    """Remove from a client's steps what would make it forget the global model's predictions.

    FedReg (Xu et al., ICLR 2022), as in the authors' code (Zoesgithub/FedReg).

    The gradient of the cross-entropy is taken between the global and the client's weights. A step
    along it leads to new weights. From the difference of these to the global weights, the share
    along the gradient on pseudo data is removed, whose labels are the global model's predictions.
    Then the share along the gradient on perturbed data is removed. Each share is removed only if it
    raises that loss. The removed shares enter as a gradient, divided by the learning rate, so the
    maths holds for SGD without momentum.
    """

    slot: ClassVar[str] = "supervise"
    gamma: Annotated[
        float, Ge(0), Le(1), "where the gradient is taken: 1 is at the own weights"
    ] = 0.4
    iterations: Annotated[int, Ge(1), "steps that make an image"] = 10
    pseudo: Annotated[float, Ge(0), "length of such a step for pseudo data, per pixel"] = 0.2
    perturbed: Annotated[float, Ge(0), "length of such a step for perturbed data"] = 0.002

    def check(self, model: nn.Module, training: Training) -> None:
        require_sgd(self, training)
        warn_of_momentum(self, training)
        if any(isinstance(module, nn.Embedding) for module in model.modules()):
            raise InputError(
                f"{self!r} changes examples along a gradient, and those of this model are token "
                "numbers"
            )

    def begin(self, client: ClientView) -> tuple[ClientView, "cycle[Made]"]:
        made = [
            self._make(client, images, labels)
            for images, labels in client.samples(client.batch_size)
        ]
        return client, cycle(made)

    def loss(self, batch: Batch, local: tuple[ClientView, "cycle[Made]"]) -> Tensor:
        client, made_batches = local
        made, anchor = next(made_batches), client.weights
        current = combine(Tensor.detach, parameters_of(batch.model))
        shared = {name: w for name, w in current.items() if name in batch.parameters}

        def gradient(share: float, end: Weights, images: Tensor, labels: Tensor) -> Weights:
            between = combine(lambda w, w_global: torch.lerp(w_global, w, share), end, anchor)
            gradients = gradients_at(current | between, batch, images, labels)
            return {
                name: torch.zeros_like(w) if g is None else g
                for (name, w), g in zip(current.items(), gradients, strict=True)
            }

        plain = gradient(self.gamma, shared, batch.images, batch.labels)
        moved = add(shared, plain, alpha=-client.lr)
        distance = subtract(moved, anchor)
        removed = zeros_like(shared)
        for images, labels in (
            (made.pseudo, made.probabilities),
            (made.perturbed, made.labels),
        ):
            gradients = gradient(MIDDLE, moved, images, labels)
            g = {name: gradients[name] for name in shared}
            along = scale(g, (dot(distance, g) / dot(g, g).clamp(min=1e-30)).clamp(min=0))
            distance, removed = subtract(distance, along), add(removed, along)
        corrected = plain | combine(lambda x, g: g + x / client.lr, removed, plain)
        loss = losses.cross_entropy(batch.logits, batch.labels)
        return with_gradient(loss, corrected.values(), parameters_of(batch.model))

    def _make(self, client: ClientView, images: Tensor, labels: Tensor) -> Made:
        """Make pseudo and perturbed images from a batch."""
        pseudo = self._uphill(client, images, labels, self.pseudo)
        with torch.no_grad():
            probabilities = client.run(client.global_model, pseudo).logits.softmax(dim=1)
        perturbed = self._uphill(client, images, labels, self.perturbed)
        return Made(pseudo, probabilities, perturbed, labels)

    def _uphill(self, client: ClientView, images: Tensor, labels: Tensor, length: float) -> Tensor:
        """Return the images after steps along the sign of the loss's gradient (FGSM)."""
        for _ in range(self.iterations):
            images = images.detach().requires_grad_()
            loss = losses.cross_entropy(client.run(client.global_model, images).logits, labels)
            (gradient,) = torch.autograd.grad(loss, images)
            images = images + length * gradient.sign()
        return images.detach()
