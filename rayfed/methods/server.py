"""Parts that make the new global weights from the clients' summands, or change them.

Those that make them have the slot `average`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from rayfed.base.values import Ge, Gt, Lt
from rayfed.clients.settings import Training
from rayfed.methods.anchors import momentum_corrected_steps
from rayfed.methods.part import Part
from rayfed.methods.requirements import require_sgd
from rayfed.methods.views import Batch, ClientView, Fit, ServerView, Step
from rayfed.tensors.trees import Scaled, Tree
from rayfed.tensors.weights import Weights, add, combine, like, scale, subtract


@dataclass(frozen=True)
class Average(Part):
    """Average the clients' parameters and buffers, by samples or by clients.

    FedAvg (McMahan et al., AISTATS 2017), algorithm 1.

    The algorithms of FedNTD and FedLMD print a uniform mean. Their text and code weigh clients by
    samples, as we do.
    """

    slot: ClassVar[str] = "average"
    by: Annotated[
        Literal["samples", "client"], "what a client's weight is: its number of samples, or 1"
    ] = "samples"

    def report(self, client: ClientView, local: None, fit: Fit) -> tuple[Tree, None]:
        weight = client.num_examples if self.by == "samples" else 1
        return {"weight": weight, "weights": Scaled(weight, fit.weights)}, None

    def update(self, state: None, total: Tree, step: Step) -> tuple[None, Step]:
        # The sum is divided, not multiplied by the inverse. So the weights of a single client come
        # back bit for bit.
        mean = combine(lambda x: x / total["weight"], total["weights"])
        return None, step.towards(like(mean, step.weights))


@dataclass(frozen=True)
class NormalizedAverage(Part):
    """Average the clients' updates, each divided by its number of steps.

    FedNova (Wang et al., NeurIPS 2020), eq. 6.

    `w <- w - tau sum p_k (w - w_k) / a_k` with `a_k` the momentum-corrected number of steps, `p_k`
    the share of samples and `tau = sum p_k a_k`. Buffers are averaged as they are.
    """

    slot: ClassVar[str] = "average"

    def check(self, model: nn.Module, training: Training) -> None:
        require_sgd(self, training)

    def report(self, client: ClientView, local: None, fit: Fit) -> tuple[Tree, None]:
        n = client.num_examples
        a = momentum_corrected_steps(fit.steps, client.momentum)
        parameters = fit.parameters
        buffers = {name: tensor for name, tensor in fit.weights.items() if name not in parameters}
        sums = {"parameters": Scaled(n / a, parameters), "buffers": Scaled(n, buffers)}
        return {"n": n, "na": n * a, "n/a": n / a, **sums}, None

    def update(self, state: None, total: Tree, step: Step) -> tuple[None, Step]:
        tau = total["na"] / total["n"]

        def move(w: Tensor, local: Tensor) -> Tensor:
            return w.double() - tau * (total["n/a"] * w.double() - local) / total["n"]

        moved = combine(move, step.parameters(step.weights), total["parameters"])
        buffers = combine(lambda x: x / total["n"], total["buffers"])
        return None, step.towards(like({**moved, **buffers}, step.weights))


@dataclass(frozen=True)
class DiscrepancyAverage(Part):
    """Average the clients' weights, where clients with uneven labels count less.

    FedDisco (Ye et al., ICML 2023).

    A client weighs `max(0, n_k - a d_k + b)`. `n_k` is its share of the samples of all sampled
    clients, and `d_k` its share of their divergences `KL(labels || uniform)`, as in the authors'
    code (MediaBrain-SJTU/FedDisco, `disco.py`). With `a` below 1 some client has a positive weight.
    """

    slot: ClassVar[str] = "average"
    a: Annotated[
        float, Ge(0), Lt(1), "how much uneven labels count against a client; 0 with b = 0 is FedAvg"
    ] = 0.5
    b: Annotated[float, Ge(0), "what every client gets; large values are a uniform mean"] = 0.1

    def survey(self, client: ClientView) -> Tree:
        return {"samples": client.num_examples, "divergence": _divergence(client.label_counts)}

    def tell(self, state: None, server: ServerView, surveyed: Tree) -> tuple[None, Tree]:
        return None, surveyed

    def report(self, client: ClientView, cohort: Tree, fit: Fit) -> tuple[Tree, None]:
        share = _divergence(client.label_counts) / (cohort["divergence"] or 1.0)
        # The weight is in samples, not in shares of them. So with a = b = 0 it is FedAvg's, bit for
        # bit.
        weight = max(0.0, client.num_examples + cohort["samples"] * (self.b - self.a * share))
        return {"weight": weight, "weights": Scaled(weight, fit.weights)}, None

    def update(self, state: None, total: Tree, step: Step) -> tuple[None, Step]:
        return Average().update(None, total, step)


def _divergence(counts: Tensor) -> float:
    """Return the divergence of class shares from even shares, in nats; 0 for even counts."""
    shares = counts.cpu().double() / counts.sum().item()
    return max(0.0, float(torch.special.xlogy(shares, shares * len(shares)).sum()))


@dataclass(frozen=True)
class DynamicRegularizer(Part):
    """Regularise clients by their past drift from the global model, and correct their mean.

    FedDyn (Acar et al., ICLR 2021), algorithm 1.

    The term is `-<g_i, w_local> + alpha / 2 ||w_local - w||^2`. The part also averages, with the
    uniform mean of the sampled clients. With `by_size` a client's alpha is divided by its number of
    samples over the mean number, as in the authors' code; the server's alpha stays.
    """

    slot: ClassVar[str] = "average"
    alpha: Annotated[float, Gt(0), "strength of the regulariser"] = 0.01
    by_size: Annotated[
        bool, "divide a client's alpha by its number of samples over the clients' mean"
    ] = False

    def begin(self, client: ClientView) -> tuple[float, Tensor, Tensor | None]:
        alpha = self.alpha
        if self.by_size:
            alpha = alpha * client.mean_examples / client.num_examples
        g = None if client.memory is None else client.flat(client.memory)
        return alpha, client.flat(client.weights), g

    def loss(self, batch: Batch, local: tuple[float, Tensor, Tensor | None]) -> Tensor:
        alpha, anchor, g = local
        near = alpha / 2 * mse_loss(batch.flat, anchor, reduction="sum")
        return near if g is None else near - torch.dot(batch.flat, g)

    def report(
        self, client: ClientView, local: tuple[float, Tensor, Tensor | None], fit: Fit
    ) -> tuple[Tree, Tree]:
        """Return the summands, and `g_i <- g_i - alpha (w_local - w)`."""
        alpha, g = local[0], client.memory
        moved = subtract(combine(Tensor.detach, fit.parameters), client.weights)
        memory = scale(moved, -alpha) if g is None else add(g, moved, alpha=-alpha)
        return {"clients": 1, "weights": Scaled(1, fit.weights)}, memory

    def update(self, h: Weights | None, total: Tree, step: Step) -> tuple[Weights, Step]:
        """Return `h <- h - alpha / N sum (w_local - w)`, and the step to `mean - h / alpha`.

        h is float64, and N is the number of all clients.
        """

        def move(w: Tensor, sum_of_locals: Tensor) -> Tensor:
            return sum_of_locals - total["clients"] * w.double()

        moved = combine(move, step.parameters(step.weights), total["weights"])
        change = scale(moved, -self.alpha / step.server.num_clients)
        h = change if h is None else add(h, change)
        mean = combine(lambda x: x / total["clients"], total["weights"])
        corrected = add(step.parameters(mean), h, alpha=-1 / self.alpha)
        return h, step.towards(like({**mean, **corrected}, step.weights))


@dataclass(frozen=True)
class ServerMomentum(Part):
    """Give the server's steps momentum.

    FedAvgM (Hsu et al., 2019).

    `v <- beta v + (w - w_avg)` and `w <- w - v`, on parameters. Buffers have no momentum: they are
    the average's. The velocity is float64, so that `w - (w - w_avg)` is `w_avg`. With `nesterov`
    the new weights are a step ahead, `w_avg - beta v`: clients train where momentum will take the
    model, as in FedACG (Kim et al., CVPR 2024, algorithm 1). FedACG's `m` is `-v`, and its theta is
    `w_avg`, which is evaluated.
    """

    changes_average: ClassVar[bool] = True
    beta: Annotated[float, Ge(0), Lt(1), "how much of the last step is kept; 0 is FedAvg"] = 0.9
    nesterov: Annotated[bool, "go on from the average by the velocity, times beta"] = False

    def update(self, velocity: Weights | None, total: None, step: Step) -> tuple[Weights, Step]:
        before = step.parameters(step.weights)
        change = combine(lambda old, new: old.double() - new.double(), before, step.averaged)
        velocity = change if velocity is None else add(scale(velocity, self.beta), change)
        if not self.nesterov:
            return velocity, step.changed(subtract(before, velocity))
        ahead = step.changed(subtract(before, add(change, velocity, alpha=self.beta)))
        return velocity, ahead.showing(step.parameters(step.averaged))


@dataclass(frozen=True)
class Smoothed(Part):
    """Evaluate the exponential average of the global models; the training does not change.

    `s <- decay s + (1 - decay) w`, from the first round's `w` on, buffers included. If another part
    evaluates other weights than the new ones, `w` are these weights.
    """

    decay: Annotated[
        float, Ge(0), Lt(1), "how much of the average is kept; 0 evaluates the last model"
    ] = 0.6

    def update(self, average: Weights | None, total: None, step: Step) -> tuple[Weights, Step]:
        w = combine(Tensor.double, step.averaged if step.shown is None else step.shown)
        if average is None:
            average = w
        else:
            average = add(scale(average, self.decay), w, alpha=1 - self.decay)
        return average, step.showing(average)
