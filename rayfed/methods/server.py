"""Parts that make the new global weights from what the clients send (slot `average`), or change what was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rayfed.methods.anchors import momentum_corrected_steps
from rayfed.methods.part import ClientView, Fit, Part, Step
from rayfed.values import Ge, Lt
from rayfed.weights import Scaled, Tree, Weights, add, combine, like, parameters_of, scale, subtract


@dataclass(frozen=True)
class Average(Part):
    """Weighted mean of the clients' states, parameters and buffers. FedAvg (McMahan et al., AISTATS 2017), algorithm 1.

    FedNTD and FedLMD print a uniform mean in their algorithms, and weigh by samples in text and code: samples it is.
    """

    slot: ClassVar[str] = "average"
    order: ClassVar[int] = 0
    by: Annotated[Literal["samples", "client"], "what a client's weight is: its number of samples, or 1"] = "samples"

    def report(self, client: ClientView, local: None, fit: Fit) -> tuple[Tree, None]:
        weight = client.num_examples if self.by == "samples" else 1
        return {"weight": weight, "weights": Scaled(weight, fit.weights)}, None

    def update(self, state: None, total: Tree, step: Step) -> tuple[None, Step]:
        # Divided, not multiplied by the inverse: one client's weights then come back bit for bit.
        mean = combine(lambda x: x / total["weight"], total["weights"])
        return None, step.towards(like(mean, step.weights))


@dataclass(frozen=True)
class NormalizedAverage(Part):
    """Mean of the clients' steps, each divided by how many it took. FedNova (Wang et al., NeurIPS 2020), eq. 6.

    `w <- w - tau sum p_k (w - w_k) / a_k` with `a_k` the momentum-corrected number of steps, `p_k` the share of samples
    and `tau = sum p_k a_k`. Buffers are averaged as they are.
    """

    slot: ClassVar[str] = "average"
    order: ClassVar[int] = 0

    def report(self, client: ClientView, local: None, fit: Fit) -> tuple[Tree, None]:
        n, a = client.num_examples, momentum_corrected_steps(fit.steps, client.momentum)
        parameters = parameters_of(fit.model)
        buffers = {name: tensor for name, tensor in fit.weights.items() if name not in parameters}
        return {
            "n": n,
            "na": n * a,
            "n/a": n / a,
            "parameters": Scaled(n / a, parameters),
            "buffers": Scaled(n, buffers),
        }, None

    def update(self, state: None, total: Tree, step: Step) -> tuple[None, Step]:
        tau = total["na"] / total["n"]
        old = step.parameters(step.weights)
        moved = combine(
            lambda w, local: w.double() - tau * (total["n/a"] * w.double() - local) / total["n"],
            old,
            total["parameters"],
        )
        buffers = combine(lambda x: x / total["n"], total["buffers"])
        return None, step.towards(like({**moved, **buffers}, step.weights))


@dataclass(frozen=True)
class ServerMomentum(Part):
    """`v <- beta v + (w - w_avg)`, `w <- w - v`, on parameters. FedAvgM (Hsu et al., 2019).

    Buffers are taken as averaged: a running statistic has no momentum. The velocity is kept in float64, so that
    `w - (w - w_avg)` is `w_avg`.
    """

    order: ClassVar[int] = 1
    beta: Annotated[float, Ge(0), Lt(1), "how much of the last step is kept; 0 is FedAvg"] = 0.9

    def update(self, velocity: Weights | None, total: None, step: Step) -> tuple[Weights, Step]:
        before = step.parameters(step.weights)
        change = combine(lambda old, new: old.double() - new.double(), before, step.averaged)
        velocity = change if velocity is None else add(scale(velocity, self.beta), change)
        return velocity, step.towards({**step.averaged, **like(subtract(before, velocity), before)})
