"""FedReg's part: steps that leave alone what the global model says of images that are made from a
client's own.
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

MIDDLE = (
    # Where the code takes the gradients on pseudo data, between the global and the own weights.
    0.5
)


class Made(NamedTuple):
    """Images made of a batch of a client's own, in the directions that raise the global model's
    loss.
    """

    # Far from them: they stand for what the client does not have.
    pseudo: Tensor
    said: Tensor  # (B, C), the global model's probabilities on these
    # Near to them.
    perturbed: Tensor
    labels: Tensor  # (B,), of the own images


@dataclass(frozen=True)
class PseudoData(Part):
    """Cross-entropy whose steps are freed of what would change the global model.

    FedReg (Xu et al., ICLR 2022).

    As in the authors' code (Zoesgithub/FedReg): the gradient is taken between the global and the
    own weights. From the way that a client has then gone from the global model, the share along the
    gradient on pseudo data is removed, with the global model's predictions for labels, and then
    that along the gradient on perturbed data, each if it leads up that loss. That enters as a
    gradient, divided by the rate, so the maths holds for SGD without momentum.
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
            self._made(client, images, labels)
            for images, labels in client.samples(client.batch_size)
        ]
        return client, cycle(made)

    def loss(self, batch: Batch, local: tuple[ClientView, "cycle[Made]"]) -> Tensor:
        client, made = local
        data, anchor = next(made), client.weights
        own = combine(Tensor.detach, parameters_of(batch.model))
        shared = {name: w for name, w in own.items() if name in batch.parameters}

        def gradient(share: float, of: Weights, images: Tensor, labels: Tensor) -> Weights:
            between = combine(lambda w, w_global: torch.lerp(w_global, w, share), of, anchor)
            found = gradients_at(own | between, batch, images, labels)
            return {
                n: torch.zeros_like(w) if g is None else g
                for (n, w), g in zip(own.items(), found, strict=True)
            }

        plain = gradient(self.gamma, shared, batch.images, batch.labels)
        moved = add(shared, plain, alpha=-client.lr)
        way = subtract(moved, anchor)
        removed = zeros_like(shared)
        for images, labels in ((data.pseudo, data.said), (data.perturbed, data.labels)):
            found = gradient(MIDDLE, moved, images, labels)
            g = {name: found[name] for name in shared}
            share = scale(g, (dot(way, g) / dot(g, g).clamp(min=1e-30)).clamp(min=0))
            way, removed = subtract(way, share), add(removed, share)
        whole = plain | combine(lambda x, g: g + x / client.lr, removed, plain)
        loss = losses.cross_entropy(batch.logits, batch.labels)
        return with_gradient(loss, whole.values(), parameters_of(batch.model))

    def _made(self, client: ClientView, images: Tensor, labels: Tensor) -> Made:
        pseudo = self._uphill(client, images, labels, self.pseudo)
        with torch.no_grad():
            said = client.run(client.global_model, pseudo).logits.softmax(dim=1)
        return Made(pseudo, said, self._uphill(client, images, labels, self.perturbed), labels)

    def _uphill(self, client: ClientView, images: Tensor, labels: Tensor, length: float) -> Tensor:
        """Images after steps along the sign of the loss's gradient (FGSM)."""
        for _ in range(self.iterations):
            images = images.detach().requires_grad_()
            loss = losses.cross_entropy(client.run(client.global_model, images).logits, labels)
            (gradient,) = torch.autograd.grad(loss, images)
            images = images + length * gradient.sign()
        return images.detach()
