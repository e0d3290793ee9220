"""Model weights as plain values: a dict from name to tensor, and its arithmetic, name by name.

`Weights` holds a model's state: parameters and buffers (BatchNorm's running statistics). Both are
sent and averaged; only parameters have a gradient. What is frozen is not among them: it is the same
in every copy of a run's model. A tensor that a model has under several names (tied weights) is a
single entry, under the first of these names.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]

CONSTANTS = (
    # An attribute of a model: the names that `keep_constant` was given.
    "constants_of_rayfed"
)


def frozen(model: nn.Module) -> frozenset[str]:
    """The entries of a model's state that no training changes.

    They are the parameters that take no gradient, and the buffers of modules all of whose
    parameters are such; a module without parameters belongs to the module around it. So are the
    constants (`keep_constant`).

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))
    >>> _ = model[0].requires_grad_(False)
    >>> sorted(frozen(model))
    ['0.bias', '0.weight']
    """
    return _untrained(model) | constants(model)


def constants(model: nn.Module) -> frozenset[str]:
    """The buffers that `keep_constant` has named."""
    return getattr(model, CONSTANTS, frozenset())


def keep_constant(model: nn.Module, names: Iterable[str]) -> None:
    """Count some buffers as frozen: they have no mean, such as a mask with infinities, and no
    training changes them.

    The model keeps their names, and so do its copies.
    """
    setattr(model, CONSTANTS, frozenset(names))


def changed_constants(model: nn.Module, original: nn.Module) -> list[str]:
    """The constants of a model that are not, bit for bit, as in the original."""
    kept = constants(original)
    if not kept:
        return []
    now, before = model.state_dict(), original.state_dict()
    return [name for name in sorted(kept) if not identical(now[name], before[name])]


def identical(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits; a NaN is equal to itself."""
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    return torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 (n,)."""
    dense = tensor.detach().cpu()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    if dense.is_quantized:
        dense = dense.int_repr()
    flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _untrained(model: nn.Module) -> frozenset[str]:
    """What is frozen because its parameters take no gradient."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    still = {name for name, p in parameters.items() if not p.requires_grad}
    if not still:
        return frozenset()
    holding = {place for name in parameters for place in _around(name)}
    training = {place for name in parameters.keys() - still for place in _around(name)}

    def is_still(name: str) -> bool:
        return next(place for place in _around(name) if place in holding) not in training

    return frozenset(
        still | {name for name in model.state_dict() if name not in parameters and is_still(name)}
    )


def _around(name: str) -> list[str]:
    """The modules that an entry is in, the innermost first: a.b, a and the model itself for
    a.b.weight.
    """
    steps = name.split(".")
    return [".".join(steps[:end]) for end in range(len(steps) - 1, -1, -1)]


def state(model: nn.Module) -> Weights:
    """A model's state, parameters and buffers, less what is frozen: live, and without gradients.

    A tensor with several names has one entry, under the first of them.
    """
    still, seen = frozen(model), set()
    weights: Weights = {}
    entries = model.state_dict(keep_vars=True)
    for name, tensor in entries.items():
        if name not in still and id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def other_names(model: nn.Module) -> dict[str, str]:
    """Of each entry of a model's state that has an earlier name too, that first name.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> model[1].weight = model[0].weight
    >>> other_names(model)
    {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    entries = model.state_dict(keep_vars=True)
    for name, tensor in entries.items():
        known = first.setdefault(id(tensor), name)
        if known != name:
            others[name] = known
    return others


def under_all_names(model: nn.Module, weights: Weights) -> Weights:
    """Some weights of a model, with a copy of each tensor under each of its other names, as files
    have them.
    """
    copies: Weights = {}
    for name, first in other_names(model).items():
        if first in weights:
            copies[name] = weights[first].clone()
    return {**weights, **copies}


def state_of(model: nn.Module) -> Weights:
    """A copy of a model's `state`, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state(model).items()}


def whole(model: nn.Module, weights: Weights) -> Weights:
    """A model's state, under all its names, with these weights in place of its own, and with what
    is frozen.
    """
    others, values = other_names(model), model.state_dict()
    return {name: weights.get(others.get(name, name), tensor) for name, tensor in values.items()}


def load(model: nn.Module, weights: Weights) -> None:
    """Give a model these weights, as `state` names them.

    Raises RuntimeError where a name is unknown, or missing and not frozen.
    """
    expendable = frozen(model) | other_names(model).keys()
    differing = model.load_state_dict(weights, strict=not expendable)
    only_in_one = differing.unexpected_keys + sorted(set(differing.missing_keys) - expendable)
    if only_in_one:
        raise RuntimeError(
            f"these weights are not of this model: '{only_in_one[0]}' is only in one of the two"
        )


def overwrite(model: nn.Module, weights: Weights) -> nn.Module:
    """A model with weights that are known to be of its kind: `load` takes three times as long, as
    it checks them.
    """
    for name, tensor in state(model).items():
        tensor.copy_(weights[name])
    return model


def in_training(model: nn.Module) -> nn.Module:
    """The model in training mode, but for modules with frozen buffers: a frozen BatchNorm keeps its
    statistics.
    """
    model.train()
    if still := _untrained(model):
        for name in still - dict(model.named_parameters(remove_duplicate=False)).keys():
            model.get_submodule(name.rpartition(".")[0]).training = False
    return model


def in_evaluation(model: nn.Module) -> nn.Module:
    """The model in evaluation mode.

    A user's `train` or `eval` may return nothing, so no call is chained to them.
    """
    model.eval()
    return model


def parameters_of(model: nn.Module) -> Weights:
    """The model's own trainable parameters, live: a value computed from them has a gradient."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def with_weights(model: nn.Module, weights: Weights) -> nn.Module:
    """A copy of a model in its memory layout, with these weights in place of its own."""
    own = [parameter for name, parameter in model.named_parameters() if name in weights]
    # Copied as empty tensors: to copy the values too would take as long again.
    memo: dict[int, Any] = {
        id(p): type(p)(torch.empty_like(p.detach()), p.requires_grad) for p in own
    }
    copied = copy.deepcopy(model, memo)
    load(copied, weights)
    return copied


def combine(
    function: Callable[..., Tensor], first: Mapping[str, Tensor], *others: Mapping[str, Tensor]
) -> Weights:
    """`function` on the tensors of each name of `first`; the others may hold more names, not fewer.

    >>> combine(torch.sub, {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0]), "buffer": torch.tensor([0.0])})
    {'w': tensor([2.])}
    """
    return {
        name: function(tensor, *(other[name] for other in others)) for name, tensor in first.items()
    }


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], alpha: float = 1.0) -> Weights:
    """`a + alpha * b`."""
    return combine(lambda x, y: torch.add(x, y, alpha=alpha), a, b)


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Weights:
    """`a - b`."""
    return combine(torch.sub, a, b)


def scale(a: Mapping[str, Tensor], factor: float | Tensor) -> Weights:
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


def flat(weights: Mapping[str, Tensor]) -> Tensor:
    """All entries as one vector, (P,), in their order: one operation on it does what one per entry
    would.

    >>> flat({"w": torch.ones(2, 2), "b": torch.zeros(1)})
    tensor([1., 1., 1., 1., 0.])
    """
    return torch.cat([tensor.reshape(-1) for tensor in weights.values()])


def like(values: Mapping[str, Tensor], example: Mapping[str, Tensor]) -> Weights:
    """Values in the dtypes of `example`. A value for an integer buffer is rounded, not cut."""

    def cast(x: Tensor, e: Tensor) -> Tensor:
        return (x if e.is_floating_point() else x.round()).to(e.dtype)

    return {name: cast(tensor, example[name]) for name, tensor in values.items()}
