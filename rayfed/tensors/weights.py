"""Model weights as plain values: a dict from name to tensor, and its arithmetic, name by name.

`Weights` holds a model's state: parameters and buffers (BatchNorm's running statistics). Both are
sent and averaged; only parameters have a gradient. Frozen entries are left out, because they are
the same in every copy of a run's model. A tensor that a model has under several names (tied
weights) is a single entry, under the first of these names.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]

# The attribute of a model that holds the names that `keep_constant` was given.
CONSTANTS = "constants_of_rayfed"


def frozen(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's entries that no training changes.

    They are the parameters that take no gradient, the buffers of modules with only such parameters,
    and the constants (`keep_constant`). A module without parameters belongs to the module around
    it.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))
    >>> _ = model[0].requires_grad_(False)
    >>> sorted(frozen(model))
    ['0.bias', '0.weight']
    """
    return _untrained(model) | constants(model)


def constants(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that `keep_constant` was given."""
    return getattr(model, CONSTANTS, frozenset())


def keep_constant(model: nn.Module, names: Iterable[str]) -> None:
    """Count some buffers as frozen.

    No training changes them, and they may have no mean, for example a mask with infinities. The
    model and its copies keep the names.

    >>> model = nn.BatchNorm1d(2)
    >>> keep_constant(model, ["num_batches_tracked"])
    >>> sorted(frozen(model))
    ['num_batches_tracked']
    """
    setattr(model, CONSTANTS, frozenset(names))


def changed_constants(model: nn.Module, original: nn.Module) -> list[str]:
    """Return the names of the constants whose bits differ from the original model's."""
    names = constants(original)
    if not names:
        return []
    entries, before = model.state_dict(), original.state_dict()
    return [name for name in sorted(names) if not identical(entries[name], before[name])]


def identical(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors have the same type, shape and bits; a NaN is equal to itself.

    >>> nan = torch.tensor([float("nan")])
    >>> identical(nan, nan.clone()), identical(torch.tensor([0.0]), torch.tensor([-0.0]))
    (True, False)
    """
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    return torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 (n,)."""
    dense = tensor.detach().cpu()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    if dense.is_quantized:
        dense = dense.int_repr()
    flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _untrained(model: nn.Module) -> frozenset[str]:
    """Return the entries that are frozen because parameters take no gradient.

    They are these parameters, and the buffers of modules without any other parameter.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    untrained = {name for name, p in parameters.items() if not p.requires_grad}
    if not untrained:
        return frozenset()
    # The modules that have a parameter inside, and the modules that have one that trains.
    holding: set[str] = set()
    training: set[str] = set()
    for name in parameters:
        holding.update(_around(name))
        if name not in untrained:
            training.update(_around(name))
    buffers = model.state_dict().keys() - parameters.keys()
    for name in buffers:
        module = next(module for module in _around(name) if module in holding)
        if module not in training:
            untrained.add(name)
    return frozenset(untrained)


def _around(name: str) -> list[str]:
    """Return the modules around an entry, the innermost first; '' is the model.

    >>> _around("a.b.weight")
    ['a.b', 'a', '']
    """
    steps = name.split(".")
    return [".".join(steps[:end]) for end in range(len(steps) - 1, -1, -1)]


def state(model: nn.Module) -> Weights:
    """Return a model's parameters and buffers without the frozen entries.

    The tensors share the model's memory, and have no gradient. A tensor with several names has one
    entry, under the first of them.
    """
    left_out, seen = frozen(model), set()
    weights: Weights = {}
    entries = model.state_dict(keep_vars=True)
    for name, tensor in entries.items():
        if name not in left_out and id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def other_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor that a model's state holds once more under another name.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> model[1].weight = model[0].weight
    >>> other_names(model)
    {'1.weight': '0.weight'}
    """
    first_names: dict[int, str] = {}
    others: dict[str, str] = {}
    entries = model.state_dict(keep_vars=True)
    for name, tensor in entries.items():
        first_name = first_names.setdefault(id(tensor), name)
        if first_name != name:
            others[name] = first_name
    return others


def under_all_names(model: nn.Module, weights: Weights) -> Weights:
    """Return weights with a copy of each tensor under each of its other names, as in files."""
    copies: Weights = {}
    for name, first_name in other_names(model).items():
        if first_name in weights:
            copies[name] = weights[first_name].clone()
    return {**weights, **copies}


def state_of(model: nn.Module) -> Weights:
    """Return a copy of a model's `state`, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state(model).items()}


def whole(model: nn.Module, weights: Weights) -> Weights:
    """Return a model's complete state with these weights, under all names.

    Entries that `weights` lacks, for example frozen ones, are the model's.
    """
    first_names = other_names(model)
    entries = model.state_dict()
    return {
        name: weights.get(first_names.get(name, name), tensor) for name, tensor in entries.items()
    }


def load(model: nn.Module, weights: Weights) -> None:
    """Give a model these weights, with the names that `state` uses.

    Raise RuntimeError if a name is unknown, or missing and not frozen.
    """
    expendable = frozen(model) | other_names(model).keys()
    differing = model.load_state_dict(weights, strict=not expendable)
    only_in_one = differing.unexpected_keys + sorted(set(differing.missing_keys) - expendable)
    if only_in_one:
        raise RuntimeError(
            f"these weights are not of this model: '{only_in_one[0]}' is only in one of the two"
        )


def overwrite(model: nn.Module, weights: Weights) -> nn.Module:
    """Give a model weights that are known to fit, and return it.

    `load` takes three times as long, because it checks them.
    """
    for name, tensor in state(model).items():
        tensor.copy_(weights[name])
    return model


def in_training(model: nn.Module) -> nn.Module:
    """Set the model to training mode, except modules with frozen buffers, and return it.

    So a frozen BatchNorm keeps its statistics.
    """
    model.train()
    untrained = _untrained(model)
    if untrained:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in untrained - parameters.keys():
            model.get_submodule(name.rpartition(".")[0]).training = False
    return model


def in_evaluation(model: nn.Module) -> nn.Module:
    """Set the model to evaluation mode and return it.

    A user's `train` or `eval` may return nothing, so no call is chained to them.
    """
    model.eval()
    return model


def parameters_of(model: nn.Module) -> Weights:
    """Return the model's trainable parameters themselves.

    A value that is computed from them has a gradient.
    """
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def with_weights(model: nn.Module, weights: Weights) -> nn.Module:
    """Return a copy of a model, in its memory layout, with these weights instead of its own."""
    replaced = [parameter for name, parameter in model.named_parameters() if name in weights]
    # These parameters are copied as empty tensors: copying their values would take as long again.
    memo: dict[int, Any] = {
        id(p): type(p)(torch.empty_like(p.detach()), p.requires_grad) for p in replaced
    }
    copied = copy.deepcopy(model, memo)
    load(copied, weights)
    return copied


def combine(
    function: Callable[..., Tensor], values: Mapping[str, Tensor], *others: Mapping[str, Tensor]
) -> Weights:
    """Apply `function` to the tensors of each name of `values`.

    The others may hold more names, not fewer.

    >>> a = {"w": torch.tensor([3.0])}
    >>> b = {"w": torch.tensor([1.0]), "buffer": torch.tensor([0.0])}
    >>> combine(torch.sub, a, b)
    {'w': tensor([2.])}
    """
    combined: Weights = {}
    for name, tensor in values.items():
        arguments = [other[name] for other in others]
        combined[name] = function(tensor, *arguments)
    return combined


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], alpha: float = 1.0) -> Weights:
    """Return `a + alpha * b`.

    >>> add({"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}, alpha=0.5)
    {'w': tensor([2.])}
    """
    return combine(lambda x, y: torch.add(x, y, alpha=alpha), a, b)


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Weights:
    """Return `a - b`."""
    return combine(torch.sub, a, b)


def scale(a: Mapping[str, Tensor], factor: float | Tensor) -> Weights:
    """Return `factor * a`."""
    return combine(lambda x: x * factor, a)


def zeros_like(a: Mapping[str, Tensor]) -> Weights:
    """Return zeros in the shape and dtype, and on the device, of each tensor."""
    return combine(torch.zeros_like, a)


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return the inner product over the names of `a`: a scalar, differentiable in both."""
    return torch.stack([(tensor * b[name]).sum() for name, tensor in a.items()]).sum()


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return `||a - b||^2` over the names of `a`: a scalar, differentiable in both."""
    return torch.stack([(tensor - b[name]).square().sum() for name, tensor in a.items()]).sum()


def flat(weights: Mapping[str, Tensor]) -> Tensor:
    """Return all entries as one vector, (P,), in their order.

    One operation on this vector replaces one operation per entry.

    >>> flat({"w": torch.ones(2, 2), "b": torch.zeros(1)})
    tensor([1., 1., 1., 1., 0.])
    """
    return torch.cat([tensor.reshape(-1) for tensor in weights.values()])


def like(values: Mapping[str, Tensor], example: Mapping[str, Tensor]) -> Weights:
    """Return values in the dtypes of `example`; a value for an integer buffer is rounded, not cut.

    >>> like({"count": torch.tensor([2.7])}, {"count": torch.tensor([0])})
    {'count': tensor([3])}
    """
    cast: Weights = {}
    for name, tensor in values.items():
        dtype = example[name].dtype
        rounded = tensor if dtype.is_floating_point else tensor.round()
        cast[name] = rounded.to(dtype)
    return cast
