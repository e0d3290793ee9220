"""Model weights as plain values: a dict from name to tensor, and its arithmetic, name by name.

`Weights` holds a model's whole state: parameters and buffers (BatchNorm's running statistics). Both are sent and
averaged; only parameters have a gradient.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd as torch_sgd

Weights = dict[str, Tensor]


def state_of(model: nn.Module) -> Weights:
    """A copy of a model's whole state, parameters and buffers, detached and on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def parameters_of(model: nn.Module) -> Weights:
    """The model's own trainable parameters, live: a value computed from them has a gradient."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def sgd(parameters: Weights, lr: float, momentum: float, weight_decay: float) -> Callable[[Tensor], None]:
    """A function that does a step on a loss, as `torch.optim.SGD(fused=True)` does, to the same bits.

    That class imports torch's compiler, which takes 90 MB and two seconds in each process.
    """
    buffers: dict[Tensor, Tensor | None] = {}  # parameter -> its momentum
    options: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dampening": 0.0}

    def step(loss: Tensor) -> None:
        for p in parameters.values():
            p.grad = None
        loss.backward()
        found = {p: p.grad for p in parameters.values() if p.grad is not None}
        held = [buffers.get(p) for p in found] if momentum else []
        with torch.no_grad():
            torch_sgd([*found], [*found.values()], held, fused=True, nesterov=False, maximize=False, **options)
        buffers.update(zip(found, held, strict=False))

    return step


def with_weights(model: nn.Module, weights: Weights) -> nn.Module:
    """A copy of a model in its memory layout, with these weights in place of its own."""
    own = [parameter for name, parameter in model.named_parameters() if name in weights]
    # Copied as empty tensors: to copy the values too would take as long again.
    memo: dict[int, Any] = {id(p): type(p)(torch.empty_like(p.detach()), p.requires_grad) for p in own}
    copied = copy.deepcopy(model, memo)
    copied.load_state_dict(weights)
    return copied


def combine(function: Callable[..., Tensor], first: Mapping[str, Tensor], *others: Mapping[str, Tensor]) -> Weights:
    """`function` on the tensors of each name of `first`; the others may hold more names, not fewer.

    >>> combine(torch.sub, {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0]), "buffer": torch.tensor([0.0])})
    {'w': tensor([2.])}
    """
    return {name: function(tensor, *(other[name] for other in others)) for name, tensor in first.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], alpha: float = 1.0) -> Weights:
    """`a + alpha * b`."""
    return combine(lambda x, y: torch.add(x, y, alpha=alpha), a, b)


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Weights:
    """`a - b`."""
    return combine(torch.sub, a, b)


def scale(a: Mapping[str, Tensor], factor: float) -> Weights:
    """`factor * a`."""
    return combine(lambda x: x * factor, a)


def zeros_like(a: Mapping[str, Tensor]) -> Weights:
    """A zero of the shape, dtype and device of each tensor."""
    return combine(torch.zeros_like, a)


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Inner product over the names of `a`; a scalar, differentiable in both."""
    return torch.stack([(tensor * b[name]).sum() for name, tensor in a.items()]).sum()


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """`||a - b||^2` over the names of `a`; a scalar, differentiable in both."""
    return torch.stack([(tensor - b[name]).square().sum() for name, tensor in a.items()]).sum()


def like(values: Mapping[str, Tensor], example: Mapping[str, Tensor]) -> Weights:
    """Values in the dtypes of `example`. A value for an integer buffer is rounded, not cut."""

    def cast(x: Tensor, e: Tensor) -> Tensor:
        return (x if e.is_floating_point() else x.round()).to(e.dtype)

    return {name: cast(tensor, example[name]) for name, tensor in values.items()}
