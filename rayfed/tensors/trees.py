"""Trees: tensors and numbers, nested in dicts, lists and tuples.

Parts exchange trees. `leaves` takes a tree apart into pairs of a path and a leaf, and `tree_of`
puts it together again. Everything else is built on these two functions: sizes, sums (`sums.py`),
messages (`wire.py`) and files (`rayfed/folder/packing.py`).

>>> tree = {"count": 2, "weights": Scaled(2, {"w": torch.tensor([1.0])})}
>>> [(dotted(path), leaf) for path, leaf in leaves(tree)]
[('count', 2), ('weights.w', tensor([1.]))]
>>> tree_of(leaves(tree)) == tree
True
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Tensor | int | float | bool | None | Scaled | dict[str, Tree] | list[Tree] | tuple[Tree, ...].
Tree = Any
# Each step is ("dict", key), ("list", index), ("tuple", index) or ("scaled", weight).
Path = tuple[tuple[str, Any], ...]
# The kind of each leaf by its path. The weights are left out, because a `Scaled` may have any.
Layout = dict[Path, str]
KINDS = {"dict": dict, "list": list, "tuple": tuple}


@dataclass(frozen=True)
class Scaled:
    """A tree that counts `weight` times in a sum.

    It is sent in float32, and multiplied in float64 by the receiver.
    """

    weight: float
    values: Tree


def leaves(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of every leaf, in order.

    An empty dict, list or tuple is a leaf too.
    """
    if isinstance(tree, Scaled):
        yield from leaves(tree.values, (*path, ("scaled", tree.weight)))
    elif is_container(tree) and tree:
        is_mapping = isinstance(tree, Mapping)
        kind = "dict" if is_mapping else type(tree).__name__
        for key, item in tree.items() if is_mapping else enumerate(tree):
            yield from leaves(item, (*path, (kind, key)))
    else:
        yield path, tree


def is_container(value: Any) -> bool:
    """Say whether a value is a container of a tree: a mapping, a list or a tuple.

    A named tuple is a leaf, because a checkpoint would lose its names.

    >>> is_container([1]), is_container(1)
    (True, False)
    """
    return isinstance(value, Mapping) or type(value) in (list, tuple)


def tree_of(pairs: Iterable[tuple[Path, Any]]) -> Tree:
    """Return the tree with these leaves: the inverse of `leaves`."""
    pairs = list(pairs)
    path, value = pairs[0]
    if not path:
        return value
    kind, key = path[0]
    if kind == "scaled":
        return Scaled(key, tree_of((path[1:], value) for path, value in pairs))
    groups: dict[Any, list[tuple[Path, Any]]] = {}
    for path, value in pairs:
        groups.setdefault(path[0][1], []).append((path[1:], value))
    items = {key: tree_of(group) for key, group in groups.items()}
    return items if kind == "dict" else KINDS[kind](items.values())


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return the tree with `function` applied to each leaf.

    >>> tree_map(lambda leaf: leaf + 1, {"a": 1, "b": [2]})
    {'a': 2, 'b': [3]}
    """
    return tree_of((path, function(leaf)) for path, leaf in leaves(tree))


def copied(tree: Tree) -> Tree:
    """Return a copy of the tree, with new containers and tensors."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def dotted(path: Path) -> str:
    """Return a path as messages show it.

    >>> dotted((("dict", "head"), ("scaled", 2.0), ("list", 0)))
    'head.0'
    """
    return ".".join(str(key) for kind, key in path if kind != "scaled") or "the value"


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Return the tree with its tensors on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def num_bytes(tree: Tree) -> int:
    """Return the number of bytes of a tree's tensors; of sparse ones, as if they were dense."""
    total = 0
    for _, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            total += leaf.numel() * leaf.element_size()
    return total


def first_difference(tree: Tree, example: Tree) -> str | None:
    """Return, in words, the first difference of a tree from an example; None if there is none.

    Keys, shapes and dtypes are compared.

    >>> first_difference({"w": torch.ones(2)}, {"w": torch.ones(3)})
    'w is float32 (2,), not float32 (3,)'
    """
    return difference(layout_of(tree), layout_of(example))


def layout_of(tree: Tree) -> Layout:
    """Return the kind of each leaf, by its path without the values of weights."""
    return {_with_any_weight(path): _kind(leaf) for path, leaf in leaves(tree)}


def _with_any_weight(path: Path) -> Path:
    """Return a path with None in the place of each weight."""
    return tuple((step, None if step == "scaled" else key) for step, key in path)


def difference(layout: Layout, usual: Layout) -> str | None:
    """Return, in words, where a layout differs from the usual layout; None if they are equal."""
    for path in usual:
        if path not in layout:
            return f"{dotted(path)} is missing"
    for path, kind in layout.items():
        if path not in usual:
            return f"{dotted(path)} should not be there"
        if kind != usual[path]:
            return f"{dotted(path)} is {kind}, not {usual[path]}"
    return None


def _kind(leaf: Any) -> str:
    """Return the kind of a leaf, as messages show it."""
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    if leaf is None:
        return "None"
    return "a number" if isinstance(leaf, int | float) else f"a {type(leaf).__name__}"
