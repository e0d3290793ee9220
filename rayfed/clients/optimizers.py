"""A client's optimizer: its state (momentum, Adam's moments) begins anew in every round.

It calls torch's own fused functions. Torch's classes would import its compiler, which takes 90 MB
and two seconds in each process.
"""

from collections.abc import Callable
from typing import Any, assert_never

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.adam import adam as torch_adam
from torch.optim.sgd import sgd as torch_sgd

from rayfed.clients.settings import Training
from rayfed.tensors.weights import Weights

# It changes parameters in place, by their gradients.
Update = Callable[[list[Tensor], list[Tensor]], None]


def stepper(parameters: Weights, training: Training, round: int) -> Callable[[Tensor], None]:
    """Return a function that does a training step on a loss.

    A step gives the same bits as torch's class with `fused=True`.

    With `train.clip` the gradient of the whole loss is clipped: all parts' terms together, also
    those that correct a gradient (SCAFFOLD's `c - c_i`). Its norm is taken over all parameters that
    are trained.
    """
    options = {
        "lr": training.lr_at(round),
        "weight_decay": training.weight_decay,
        "maximize": False,
        "fused": True,
    }
    if training.optimizer == "sgd":
        update = _sgd(training.momentum, options)
    elif training.optimizer == "adam" or training.optimizer == "adamw":
        update = _adam(training.optimizer, options)
    else:
        assert_never(training.optimizer)

    def step(loss: Tensor) -> None:
        for parameter in parameters.values():
            parameter.grad = None
        loss.backward()
        reached = [parameter for parameter in parameters.values() if parameter.grad is not None]
        if training.clip:
            clip_grad_norm_(reached, training.clip)
        gradients = [parameter.grad for parameter in reached if parameter.grad is not None]
        with torch.no_grad():
            update(reached, gradients)

    return step


def _sgd(momentum: float, options: dict[str, Any]) -> Update:
    """Return an update by SGD that keeps the momentum of each parameter."""
    options = {"momentum": momentum, "dampening": 0.0, "nesterov": False, **options}
    # The momentum of each parameter.
    buffers: dict[Tensor, Tensor | None] = {}

    def update(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        momenta = [buffers.get(parameter) for parameter in parameters] if momentum else []
        torch_sgd(parameters, gradients, momenta, **options)
        buffers.update(zip(parameters, momenta, strict=False))

    return update


def _adam(name: str, options: dict[str, Any]) -> Update:
    """Return an update by Adam or AdamW that keeps the moments of each parameter.

    Adam is from Kingma and Ba, ICLR 2015, and AdamW from Loshchilov and Hutter, ICLR 2019. Betas
    and epsilon are torch's.
    """
    options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, **options}
    options |= {"decoupled_weight_decay": name == "adamw"}
    # The running means of each parameter's gradient and of its square, and its number of steps.
    means: dict[Tensor, Tensor] = {}
    squares: dict[Tensor, Tensor] = {}
    steps: dict[Tensor, Tensor] = {}

    def update(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        for parameter in parameters:
            if parameter not in steps:
                means[parameter] = torch.zeros_like(parameter)
                squares[parameter] = torch.zeros_like(parameter)
                steps[parameter] = torch.zeros((), device=parameter.device)
        torch_adam(
            parameters,
            gradients,
            [means[parameter] for parameter in parameters],
            [squares[parameter] for parameter in parameters],
            [],
            [steps[parameter] for parameter in parameters],
            **options,
        )

    return update
