"""Parts that adapt the length of the server's step to the clients' updates."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from rayfed.base.errors import InputError
from rayfed.base.values import Ge, Gt, Lt
from rayfed.methods.part import Part
from rayfed.methods.server import Average
from rayfed.methods.views import ClientView, Fit, Step
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights, add, combine, scale, squared_distance, zeros_like


@dataclass(frozen=True)
class AdaptiveStep(Part):
    """Take a step of Adam, Yogi or Adagrad on the server, along the clients' mean update.

    Reddi et al. (ICLR 2021), algorithm 2.

    `m <- beta1 m + (1 - beta1) d` with `d = w_avg - w`, and `w <- w + lr m / (sqrt(v) + tau)`, on
    parameters. `v` follows the squares of `d`. It begins with `tau^2`, the least that the paper
    allows. Neither `m` nor `v` is corrected for its first value. Buffers are the average's. `m` and
    `v` are float64.
    """

    changes_average: ClassVar[bool] = True
    rule: Annotated[Literal["adam", "yogi", "adagrad"], "how v follows the squares"] = "adam"
    lr: Annotated[float, Gt(0), "the server's learning rate (eta)"] = 0.03
    beta1: Annotated[float, Ge(0), Lt(1), "how much of the last direction is kept"] = 0.9
    beta2: Annotated[
        float, Ge(0), Lt(1), "how much of the last squares is kept; adagrad keeps all, and takes 0"
    ] = 0.99
    tau: Annotated[float, Gt(0), "how large an update must be for the step to adapt to it"] = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule == "adagrad" and self.beta2:
            raise InputError(
                f"adaptive_step: beta2 = {self.beta2}: adagrad adds up all squares; give beta2 = 0"
            )

    def update(
        self, state: dict[str, Weights] | None, total: None, step: Step
    ) -> tuple[Tree, Step]:
        before = combine(Tensor.double, step.parameters(step.weights))
        update = combine(lambda w, averaged: averaged.double() - w, before, step.averaged)
        zeros = zeros_like(before)
        state = state or {"m": zeros, "v": combine(lambda x: x + self.tau**2, zeros)}
        m = add(scale(state["m"], self.beta1), update, alpha=1 - self.beta1)
        v = combine(self._follow, state["v"], combine(torch.square, update))
        moved = combine(lambda w, m, v: w + self.lr * m / (v.sqrt() + self.tau), before, m, v)
        return {"m": m, "v": v}, step.changed(moved)

    def _follow(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next `v`, from the squares of the last update."""
        if self.rule == "adagrad":
            return v + square
        if self.rule == "yogi":
            return v - (1 - self.beta2) * square * (v - square).sign()
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class ExtrapolatedAverage(Part):
    """Extend the step to the clients' mean: the less the clients agree, the longer it is.

    FedExP (Jhunjhunwala et al., ICLR 2023), eq. 5.

    `w <- w + eta d` with `d = w_avg - w`, and `eta` half of the clients' mean `||w_k - w||^2` over
    `||d||^2 + epsilon`, but at least 1. Means are weighted as the average is. Buffers are the
    average's. The mean of the last two models is evaluated, as in the paper, because such steps
    oscillate.
    """

    slot: ClassVar[str] = "average"
    epsilon: Annotated[
        float, Gt(0), "holds eta down where the mean update is small; large values are FedAvg"
    ] = 1e-3
    by: Annotated[
        Literal["samples", "client"], "what a client's weight is: its number of samples, or 1"
    ] = "samples"

    def report(self, client: ClientView, local: None, fit: Fit) -> tuple[Tree, None]:
        summand, _ = Average(self.by).report(client, None, fit)
        trained = combine(lambda w: w.detach().double(), fit.parameters)
        moved = float(squared_distance(trained, client.weights))
        return {**summand, "squares": summand["weight"] * moved}, None

    def update(self, state: None, total: Tree, step: Step) -> tuple[None, Step]:
        _, step = Average(self.by).update(None, total, step)
        before = combine(Tensor.double, step.parameters(step.weights))
        update = combine(lambda w, locals: locals / total["weight"] - w, before, total["weights"])
        length = float(squared_distance(update, zeros_like(update)))
        eta = max(1.0, total["squares"] / total["weight"] / 2 / (length + self.epsilon))
        after = add(before, update, alpha=eta)
        middle = combine(lambda w, w_new: (w + w_new) / 2, before, after)
        return None, step.changed(after).showing(middle)
