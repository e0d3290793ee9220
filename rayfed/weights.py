"""Model weights as plain values: a dict from name to tensor, and the few sums that federated averaging needs.

`Weights` holds a model's whole state: its parameters, which training moves by gradients, and its buffers (BatchNorm's
running statistics), which it moves otherwise. Both are sent, both are averaged; only parameters have a gradient.

A `Tree` is what parts exchange: tensors, numbers and None, nested in dicts, lists and tuples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
Tree = Any  # Tensor | int | float | bool | None | Scaled | dict[str, Tree] | list[Tree] | tuple[Tree, ...]


@dataclass(frozen=True)
class Scaled:
    """A tree that counts `weight` times in a sum: sent as it is (float32), multiplied where it is added (float64)."""

    weight: float
    values: Tree


def state_of(model: nn.Module) -> Weights:
    """A copy of all of a model's state, parameters and buffers, detached and on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def parameters_of(model: nn.Module) -> Weights:
    """The model's own trainable parameters, live: what is computed from them has a gradient."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def combine(function: Callable[..., Tensor], first: Mapping[str, Tensor], *others: Mapping[str, Tensor]) -> Weights:
    """`function` on the tensors of each name of `first`; the others may hold more names, not fewer.

    >>> combine(torch.sub, {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0]), "buffer": torch.tensor([0.0])})
    {'w': tensor([2.])}
    """
    return {name: function(tensor, *(other[name] for other in others)) for name, tensor in first.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], alpha: float = 1.0) -> Weights:
    """`a + alpha * b`, name by name."""
    return combine(lambda x, y: torch.add(x, y, alpha=alpha), a, b)


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Weights:
    """`a - b`, name by name."""
    return combine(torch.sub, a, b)


def scale(a: Mapping[str, Tensor], factor: float) -> Weights:
    """`factor * a`, name by name."""
    return combine(lambda x: x * factor, a)


def zeros_like(a: Mapping[str, Tensor]) -> Weights:
    return combine(torch.zeros_like, a)


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Inner product over the names of `a`; a scalar, differentiable in both."""
    return torch.stack([(tensor * b[name]).sum() for name, tensor in a.items()]).sum()


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """`||a - b||^2` over the names of `a`; a scalar, differentiable in both."""
    return torch.stack([(tensor - b[name]).square().sum() for name, tensor in a.items()]).sum()


def like(values: Mapping[str, Tensor], example: Mapping[str, Tensor]) -> Weights:
    """Values in the dtypes of `example`; what goes into an integer buffer is rounded, not cut."""

    def cast(x: Tensor, e: Tensor) -> Tensor:
        return (x if e.is_floating_point() else x.round()).to(e.dtype)

    return {name: cast(tensor, example[name]) for name, tensor in values.items()}


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """`function` on each leaf of a tree (a `Scaled` keeps its weight)."""
    if isinstance(tree, Scaled):
        return Scaled(tree.weight, tree_map(function, tree.values))
    if isinstance(tree, Mapping):
        return {key: tree_map(function, item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(tree_map(function, item) for item in tree)
    return function(tree)


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """The tree with its tensors on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def num_bytes(tree: Tree) -> int:
    """What the tensors of a tree take."""
    if isinstance(tree, Scaled):
        return num_bytes(tree.values)
    if isinstance(tree, Mapping | list | tuple):
        return sum(num_bytes(item) for item in (tree.values() if isinstance(tree, Mapping) else tree))
    return tree.nbytes if isinstance(tree, Tensor) else 0


def first_invalid(tree: Tree, path: str = "") -> str | None:
    """Where a tree first holds a NaN or an infinity, as a path of keys; None if nowhere."""
    if isinstance(tree, Scaled):
        return first_invalid(tree.weight, path) or first_invalid(tree.values, path)
    if isinstance(tree, Mapping | list | tuple):
        items: Iterable[tuple[Any, Any]] = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        found = (first_invalid(item, f"{path}.{key}" if path else str(key)) for key, item in items)
        return next((where for where in found if where), None)
    valid = bool(torch.isfinite(tree).all()) if isinstance(tree, Tensor) else tree is None or math.isfinite(tree)
    return None if valid else path or "the value"


def first_difference(tree: Tree, example: Tree, path: str = "the value") -> str | None:
    """Where a tree is not built as an example is: other keys, or a tensor of another shape or dtype. None if nowhere.

    >>> first_difference({"w": torch.ones(2)}, {"w": torch.ones(3)})
    'w is float32 (2,), not float32 (3,)'
    """
    if isinstance(example, Scaled) and isinstance(tree, Scaled):
        return first_difference(tree.values, example.values, path)
    if isinstance(example, Mapping | list | tuple) and type(tree) is type(example):
        given, usual = _items(tree), _items(example)
        if given.keys() != usual.keys():
            return f"{path} holds {list(given)}, not {list(usual)}"
        inner = "" if path == "the value" else f"{path}."
        found = (first_difference(given[key], usual[key], f"{inner}{key}") for key in usual)
        return next((where for where in found if where), None)
    return None if _kind(tree) == _kind(example) else f"{path} is {_kind(tree)}, not {_kind(example)}"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    return "a number" if isinstance(leaf, int | float) else "None" if leaf is None else f"a {type(leaf).__name__}"


class OrderedSum:
    """Adds trees one by one, in the order given, in float64 (integers stay exact integers).

    The order is the caller's: clients are added in the order of the cohort, so that the bits of the sum do not depend
    on who was ready first. In float64 the product of a float32 weight and a sample count is exact.

    >>> total = OrderedSum()
    >>> total.add({"n": 2, "w": Scaled(2, torch.tensor([1.0]))})
    >>> total.add({"n": 1, "w": Scaled(1, torch.tensor([4.0]))})
    >>> total.value
    {'n': 3, 'w': tensor([6.], dtype=torch.float64)}
    """

    def __init__(self) -> None:
        self.value: Tree = None
        self._empty = True

    def add(self, summand: Tree) -> None:
        """Raises ValueError, naming the place, where a summand has another shape than those before it."""
        self.value = _start(summand) if self._empty else _add(self.value, summand)
        self._empty = False


def _start(tree: Tree, weight: float | None = None) -> Tree:
    """A tree as the first of a sum, in memory of its own; `weight` is None outside of any `Scaled`."""
    if isinstance(tree, Scaled):
        return _start(tree.values, _times(weight, tree.weight))
    if isinstance(tree, Mapping):
        return {key: _start(item, weight) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [_start(item, weight) for item in tree]
    if isinstance(tree, Tensor):
        integer = weight is None and not tree.is_floating_point()
        return tree.to(torch.int64 if integer else torch.float64, copy=True) * (1 if weight is None else weight)
    return tree if tree is None or weight is None else tree * weight


def _add(total: Tree, tree: Tree, weight: float | None = None, path: str = "") -> Tree:
    if isinstance(tree, Scaled):
        return _add(total, tree.values, _times(weight, tree.weight), path)
    if isinstance(total, dict | list):
        known, given = _items(total), _items(tree)
        if known.keys() != given.keys():
            raise ValueError(f"summand{path}: has {list(given) or tree!r} where others have {list(known)}")
        for key in known:
            total[key] = _add(total[key], given[key], weight, f"{path}.{key}")
        return total
    if isinstance(total, Tensor):
        if not isinstance(tree, Tensor) or tree.shape != total.shape:
            shape = tuple(tree.shape) if isinstance(tree, Tensor) else tree
            raise ValueError(f"summand{path}: {shape} where others have shape {tuple(total.shape)}")
        return total.add_(tree.to(total.dtype), alpha=1 if weight is None else weight)
    if (total is None) != (tree is None) or isinstance(tree, Tensor | Mapping | list | tuple):
        raise ValueError(f"summand{path}: {tree!r} where others have {total!r}")
    return None if total is None else total + tree * (1 if weight is None else weight)


def _times(outer: float | None, inner: float) -> float:
    return inner if outer is None else outer * inner


def _items(tree: Tree) -> dict[Any, Tree]:
    if isinstance(tree, Mapping):
        return dict(tree)
    return dict(enumerate(tree)) if isinstance(tree, list | tuple) else {}
