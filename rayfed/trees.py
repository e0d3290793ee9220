"""Trees: tensors and numbers, nested in dicts, lists and tuples. Parts exchange them.

`leaves` takes a tree apart into pairs of a path and a leaf, and `tree_of` puts it together again. Everything else is
built on these two functions: sizes, checks, ordered sums, the wire, and the disk (`rayfed/folder/packing.py`).

>>> tree = {"count": 2, "weights": Scaled(2, {"w": torch.tensor([1.0])})}
>>> [(dotted(path), leaf) for path, leaf in leaves(tree)]
[('count', 2), ('weights.w', tensor([1.]))]
>>> tree_of(leaves(tree)) == tree
True
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.errors import Unlike
from rayfed.runtime.profile import timed

Tree = Any  # Tensor | int | float | bool | None | Scaled | dict[str, Tree] | list[Tree] | tuple[Tree, ...]
Path = tuple[tuple[str, Any], ...]  # steps: ("dict", key), ("list", index), ("tuple", index) or ("scaled", weight)
Layout = dict[Path, str]  # the kind of each leaf by its path, in which a `Scaled` may have any weight
KINDS = {"dict": dict, "list": list, "tuple": tuple}


@dataclass(frozen=True)
class Scaled:
    """A tree that counts `weight` times in a sum. It is sent in float32, and multiplied in float64 by the receiver."""

    weight: float
    values: Tree


def leaves(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The path and the value of every leaf, in order. An empty dict, list or tuple is a leaf too."""
    if isinstance(tree, Scaled):
        yield from leaves(tree.values, (*path, ("scaled", tree.weight)))
    elif is_container(tree) and tree:
        kind = "dict" if isinstance(tree, Mapping) else "list" if isinstance(tree, list) else "tuple"
        for key, item in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(item, (*path, (kind, key)))
    else:
        yield path, tree


def is_container(value: Any) -> bool:
    """Whether a value is one that trees are made of; a named tuple is not, since a checkpoint would lose its names."""
    return isinstance(value, Mapping) or type(value) in (list, tuple)


def tree_of(pairs: Iterable[tuple[Path, Any]]) -> Tree:
    """The tree with these leaves: the inverse of `leaves`."""
    pairs = list(pairs)
    path, value = pairs[0]
    if not path:
        return value
    (kind, key), *_ = path
    if kind == "scaled":
        return Scaled(key, tree_of((path[1:], value) for path, value in pairs))
    groups: dict[Any, list[tuple[Path, Any]]] = {}
    for path, value in pairs:
        groups.setdefault(path[0][1], []).append((path[1:], value))
    items = {key: tree_of(group) for key, group in groups.items()}
    return items if kind == "dict" else KINDS[kind](items.values())


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The tree with `function` applied to each leaf."""
    return tree_of((path, function(leaf)) for path, leaf in leaves(tree))


def copied(tree: Tree) -> Tree:
    """The tree with containers and tensors of its own."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def dotted(path: Path) -> str:
    """A path for messages."""
    return ".".join(str(key) for kind, key in path if kind != "scaled") or "the value"


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """The tree with its tensors on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def num_bytes(tree: Tree) -> int:
    """The bytes of a tree's tensors."""
    return sum(leaf.nbytes for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def first_difference(tree: Tree, example: Tree) -> str | None:
    """The first place where a tree differs from an example in its keys, a shape or a dtype; None if there is none.

    >>> first_difference({"w": torch.ones(2)}, {"w": torch.ones(3)})
    'w is float32 (2,), not float32 (3,)'
    """
    return _difference(_layout(tree), _layout(example))


def _layout(tree: Tree) -> Layout:
    found = leaves(tree)
    return {tuple((k, None if k == "scaled" else key) for k, key in path): _describe(leaf) for path, leaf in found}


def _difference(given: Mapping[Path, str], usual: Mapping[Path, str]) -> str | None:
    if (absent := next((path for path in usual if path not in given), None)) is not None:
        return f"{dotted(absent)} is missing"
    for path, kind in given.items():
        if path not in usual:
            return f"{dotted(path)} should not be there"
        if kind != usual[path]:
            return f"{dotted(path)} is {kind}, not {usual[path]}"
    return None


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    return "a number" if isinstance(leaf, int | float) else "None" if leaf is None else f"a {type(leaf).__name__}"


@timed("fold")
def checked(summand: Tree) -> Layout:
    """The layout of a summand. Raises ValueError, naming the place, for what cannot be added: a NaN, an infinity."""
    for path, leaf in leaves(summand):
        if (problem := _problem(path, leaf)) is not None:
            raise ValueError(f"{problem} at {dotted(path)}")
    return _layout(summand)


class OrderedSum:
    """Adds trees in the given order, in float64; integers stay exact integers.

    The order is the caller's, so the bits of the sum do not depend on which client was ready first. The product of a
    float32 weight and a number of samples is exact in float64.

    >>> total = OrderedSum()
    >>> total.add({"n": 2, "w": Scaled(2, torch.tensor([1.0]))})
    >>> total.add({"n": 1, "w": Scaled(1, torch.tensor([4.0]))})
    >>> total.value
    {'n': 3, 'w': tensor([6.], dtype=torch.float64)}
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None  # of each summand
        self._totals: dict[Path, Any] = {}

    @property
    def value(self) -> Tree:
        """The sum, without any `Scaled`; None before the first summand."""
        return tree_of(self._totals.items()) if self._totals else None

    @timed("fold")
    def add(self, summand: Tree, layout: Layout | None = None) -> None:
        """Raises ValueError as `checked` does, and `Unlike` for another layout than before.

        A summand that was checked elsewhere comes with its layout, and so does a sum, with that of its summands.
        """
        layout = checked(summand) if layout is None else layout
        if self.layout is not None and (difference := _difference(layout, self.layout)) is not None:
            raise Unlike(difference)
        self.layout = layout
        for path, leaf in leaves(summand):
            place = tuple(step for step in path if step[0] != "scaled")
            self._totals[place] = _plus(self._totals.get(place), leaf, _weight(path))


def _problem(path: Path, leaf: Any) -> str | None:
    """Why a leaf cannot be added to a sum."""
    if not (isinstance(leaf, Tensor | int | float | None) or is_container(leaf)):  # of the containers, only empty ones
        return f"holds a {type(leaf).__name__}, which is neither a tensor nor a number,"
    if isinstance(leaf, Tensor) and (leaf.is_complex() or leaf.layout != torch.strided or leaf.is_quantized):
        return f"holds a tensor ({leaf.dtype}, {leaf.layout}) that is neither of real numbers nor dense,"
    numbers = [_weight(path) or 0, leaf if isinstance(leaf, int | float) else 0]
    finite = all(map(math.isfinite, numbers)) and (not isinstance(leaf, Tensor) or _is_finite(leaf))
    return None if finite else "holds a NaN or an infinity"


def _is_finite(tensor: Tensor) -> bool:
    """A sum is a tenth of the work; it is infinite too where finite values are too large."""
    return bool(torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all())


def _weight(path: Path) -> float | None:
    weights = [weight for kind, weight in path if kind == "scaled"]
    return math.prod(weights) if weights else None


def _plus(total: Any, leaf: Any, weight: float | None) -> Any:
    """`total + weight * leaf`, in place where `total` is a tensor. The first tensor of a sum is copied."""
    factor = 1 if weight is None else weight
    if isinstance(total, Tensor):
        return total.add_(leaf.to(total.dtype), alpha=factor)
    if isinstance(leaf, Tensor):
        integer = weight is None and not leaf.is_floating_point()
        return leaf.to(torch.int64 if integer else torch.float64, copy=True) * factor
    if isinstance(leaf, int | float):
        return leaf * factor if total is None else total + leaf * factor
    return leaf


@dataclass(frozen=True)
class Span:
    """The part of its dtype's buffer that a tensor fills; `start` counts elements."""

    dtype: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Packed:
    """A tree on the wire: its leaves, with a `Span` in place of each tensor, and one flat buffer per dtype.

    Ray moves a numpy array through its object store without a copy, but pickles torch tensors. One large buffer is one
    message; a dict of small tensors would be many.
    """

    skeleton: list[tuple[Path, Any]]
    buffers: dict[str, np.ndarray]  # dtype name -> uint8 (bytes,)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors. The skeleton takes a few dozen more per tensor."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


@timed("wire")
def pack(tree: Tree) -> Packed:
    """Copy a tree's tensors, in order, into one buffer per dtype. Tensors may live on any device."""
    found: dict[str, list[Tensor]] = {}
    sizes: dict[str, int] = {}

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = str(leaf.dtype).removeprefix("torch.")
        start = sizes.get(dtype, 0)
        found.setdefault(dtype, []).append(leaf.detach().reshape(-1))
        sizes[dtype] = start + leaf.numel()
        return Span(dtype, start, tuple(leaf.shape))

    skeleton = [(path, take(leaf)) for path, leaf in leaves(tree)]
    return Packed(skeleton, {dtype: _joined(tensors).view(torch.uint8).numpy() for dtype, tensors in found.items()})


@timed("wire")
def unpack(packed: Packed, *, copy: bool = True) -> Tree:
    """The tree again, in memory of its own, so that its owner may change it; without a copy, for reading only."""
    buffers = {dtype: _tensor(buffer, getattr(torch, dtype), copy) for dtype, buffer in packed.buffers.items()}

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, Span):
            return leaf
        return buffers[leaf.dtype][leaf.start : leaf.start + math.prod(leaf.shape)].view(leaf.shape)

    return tree_of((path, put(leaf)) for path, leaf in packed.skeleton)


def _joined(tensors: list[Tensor]) -> Tensor:
    """Flat tensors, concatenated, on the CPU; tensors of one device are copied together."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.cat(tensors).cpu()


def _tensor(buffer: np.ndarray, dtype: torch.dtype, copy: bool) -> Tensor:
    """Bytes as a tensor (n,). A buffer in Ray's object store is shared and must not be changed."""
    if not copy:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the buffer must not be changed
            return torch.from_numpy(buffer).view(dtype)
    tensor = torch.empty(buffer.nbytes // dtype.itemsize, dtype=dtype)
    tensor.view(torch.uint8).numpy()[:] = buffer
    return tensor
