"""A client's optimizer. Its state (momentum, Adam's moments) begins anew in every round.

By torch's own fused functions: its classes import its compiler, which takes 90 MB and two seconds
in each process.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.adam import adam as torch_adam
from torch.optim.sgd import sgd as torch_sgd

from rayfed.clients.settings import Training
from rayfed.tensors.weights import Weights

# Of parameters, by their gradients, in place.
Update = Callable[[list[Tensor], list[Tensor]], None]


def stepper(parameters: Weights, training: Training, round: int) -> Callable[[Tensor], None]:
    """A function that does a step on a loss, as torch's class with `fused=True` does, to the same
    bits.

    With `train.clip` the gradient of the whole loss is clipped: all parts' terms together, also
    those that correct a gradient (SCAFFOLD's `c - c_i`), and by its norm over all parameters that
    are trained.
    """
    options = {
        "lr": training.lr_at(round),
        "weight_decay": training.weight_decay,
        "maximize": False,
        "fused": True,
    }
    update = (
        _sgd(training.momentum, options)
        if training.optimizer == "sgd"
        else _adam(training.optimizer, options)
    )

    def step(loss: Tensor) -> None:
        for p in parameters.values():
            p.grad = None
        loss.backward()
        reached = [p for p in parameters.values() if p.grad is not None]
        if training.clip:
            clip_grad_norm_(reached, training.clip)
        with torch.no_grad():
            update(reached, [p.grad for p in reached if p.grad is not None])

    return step


def _sgd(momentum: float, options: dict[str, Any]) -> Update:
    options = {"momentum": momentum, "dampening": 0.0, "nesterov": False, **options}
    # Parameter -> its momentum.
    buffers: dict[Tensor, Tensor | None] = {}

    def update(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        held = [buffers.get(p) for p in parameters] if momentum else []
        torch_sgd(parameters, gradients, held, **options)
        buffers.update(zip(parameters, held, strict=False))

    return update


def _adam(name: str, options: dict[str, Any]) -> Update:
    """Adam (Kingma and Ba, ICLR 2015), or AdamW (Loshchilov and Hutter, ICLR 2019); betas and
    epsilon are torch's.
    """
    options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, **options}
    options |= {"decoupled_weight_decay": name == "adamw"}
    # Parameter -> means of gradient and square, steps.
    held: dict[Tensor, tuple[Tensor, Tensor, Tensor]] = {}

    def update(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        for p in parameters:
            if p not in held:
                held[p] = torch.zeros_like(p), torch.zeros_like(p), torch.zeros((), device=p.device)
        first, second, steps = ([held[p][i] for p in parameters] for i in range(3))
        torch_adam(parameters, gradients, first, second, [], steps, **options)

    return update
