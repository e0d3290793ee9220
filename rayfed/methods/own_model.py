"""A whole model of each client's own, which it trains beside the global model and keeps from round to round."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from rayfed import losses
from rayfed.base.errors import Diverged
from rayfed.base.values import Ge
from rayfed.methods.part import Part, Parts
from rayfed.methods.views import Batch, ClientView, Fit, Run
from rayfed.tensors.sums import checked
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights, in_training, parameters_of, squared_distance, state, with_weights

Models = tuple[Weights, Weights] | None  # a client's own model before and after its training, where it keeps one


@dataclass(frozen=True, eq=False)
class Own:
    """A client's own model in training, and what its steps need."""

    model: nn.Module
    step: Callable[[Tensor], None]  # on a loss: the job's optimizer, with a momentum of its own
    run: Run
    anchor: Weights  # the round's global model


@dataclass(frozen=True)
class OwnModel(Part):
    """Each client also trains a model of its own, pulled to the global one. Ditto (Li et al., ICML 2021), algorithm 1.

    The own model `v` takes a step on every batch of the global training, by the job's optimizer, on the loss
    `CE(v) + lam / 2 ||v - w||^2`, where `w` is the round's global model. The global training stays as it is, bit for
    bit. A client's first `v` is the `w` of that round; its BatchNorm statistics are its own, and are not pulled.

    Raises `Diverged` where the own model is no longer finite, which the loss of the global training does not show.
    """

    keeps_model: ClassVar[bool] = True
    lam: Annotated[float, Ge(0), "strength of the pull to the global model; 0: own models are trained alone"] = 1.0

    def begin(self, client: ClientView) -> Own:
        model = with_weights(client.global_model, client.memory or client.weights)
        for name, p in model.named_parameters():
            p.requires_grad_(name in client.weights)  # the job's frozen parameters are not among the weights
        step = client.stepper(parameters_of(in_training(model)))
        return Own(model, step, client.run, client.weights)

    def loss(self, batch: Batch, local: Own) -> None:
        """A step of the own model; no term of the loss."""
        device = batch.images.device
        # Dropout draws here too. The generators are restored, so that the global model has the draws of FedAvg.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            loss = losses.cross_entropy(local.run(local.model, batch.images).logits, batch.labels)
        batch.note("own_loss", loss)
        pull = squared_distance(parameters_of(local.model), local.anchor) if self.lam else 0.0
        local.step(loss + self.lam / 2 * pull)

    def report(self, client: ClientView, local: Own, fit: Fit) -> tuple[None, Weights]:
        own = state(local.model)
        try:
            checked(own)
        except ValueError as error:
            smaller = f"train.lr, or a lam below {self.lam}" if self.lam else "train.lr"
            whose = f"client {client.id}'s own model in round {client.round}"
            raise Diverged(f"{whose} {error}; try a smaller {smaller}") from None
        return None, own


def before_and_after(parts: Parts, weights: Weights, memory: Mapping[str, Tree], kept: Mapping[str, Tree]) -> Models:
    """A client's own model before and after its training, out of its memories by slot; None where no part keeps one.

    Before its first training it is the round's global model, `weights`.
    """
    part = next((part for part in parts if part.keeps_model), None)
    if part is None:
        return None
    if part.slot not in kept:
        raise TypeError(f"{type(part).__name__} has keeps_model = True, and its report gave no weights as memory")
    return memory.get(part.slot) or weights, kept[part.slot]
