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

from rayfed.base.spans import timed

Tree = Any  # Tensor | int | float | bool | None | Scaled | dict[str, Tree] | list[Tree] | tuple[Tree, ...]
Path = tuple[tuple[str, Any], ...]  # steps: ("dict", key), ("list", index), ("tuple", index) or ("scaled", weight)
Layout = dict[Path, str]  # the kind of each leaf by its path, in which a `Scaled` may have any weight
PIECE = 2**20 - 2**6  # bytes: less than a MiB, and a multiple of 64, to which Ray's store aligns what it holds
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
    return difference(layout_of(tree), layout_of(example))


def layout_of(tree: Tree) -> Layout:
    """The kind of each leaf."""
    found = leaves(tree)
    return {tuple((k, None if k == "scaled" else key) for k, key in path): _describe(leaf) for path, leaf in found}


def difference(given: Mapping[Path, str], usual: Mapping[Path, str]) -> str | None:
    """Where a layout is not the usual one, in words; None if they are the same."""
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
    return layout_of(summand)


def _problem(path: Path, leaf: Any) -> str | None:
    """Why a leaf cannot be added to a sum."""
    if not (isinstance(leaf, Tensor | int | float | None) or is_container(leaf)):  # of the containers, only empty ones
        return f"holds a {type(leaf).__name__}, which is neither a tensor nor a number,"
    if isinstance(leaf, Tensor) and (leaf.is_complex() or leaf.layout != torch.strided or leaf.is_quantized):
        return f"holds a tensor ({leaf.dtype}, {leaf.layout}) that is neither of real numbers nor dense,"
    numbers = [weight_of(path) or 0, leaf if isinstance(leaf, int | float) else 0]
    finite = all(map(math.isfinite, numbers)) and (not isinstance(leaf, Tensor) or _is_finite(leaf))
    return None if finite else "holds a NaN or an infinity"


def _is_finite(tensor: Tensor) -> bool:
    """A sum is a tenth of the work; it is infinite too where finite values are too large."""
    return bool(torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all())


def weight_of(path: Path) -> float | None:
    """How many times a leaf counts in a sum; None where it is in no `Scaled`."""
    weights = [weight for kind, weight in path if kind == "scaled"]
    return math.prod(weights) if weights else None


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

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.skeleton, {name: _pieces(buffer) for name, buffer in self.buffers.items()})


def _pieces(buffer: np.ndarray) -> list[np.ndarray]:
    """A buffer in pieces, which Ray's store copies one by one.

    It copies larger ones by six threads, for which it waits: on cores that are at work that takes twice as long.
    """
    return [buffer[start : start + PIECE] for start in range(0, buffer.nbytes, PIECE)] or [buffer]


def _received(skeleton: list[tuple[Path, Any]], pieces: Mapping[str, list[np.ndarray]]) -> Packed:
    return Packed(skeleton, {name: _whole(some) for name, some in pieces.items()})


def _whole(pieces: list[np.ndarray]) -> np.ndarray:
    """The buffer again: in place where its pieces lie one after the other, as they do in Ray's store.

    The first piece keeps all of them alive, as each holds on to the whole object in the store.
    """
    ends = [piece.ctypes.data + piece.nbytes for piece in pieces]
    if all(end == piece.ctypes.data for end, piece in zip(ends, pieces[1:], strict=False)):
        return np.lib.stride_tricks.as_strided(pieces[0], (sum(piece.nbytes for piece in pieces),), writeable=False)
    return np.concatenate(pieces)


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
    return Packed(skeleton, {dtype: bytes_of(_joined(tensors)) for dtype, tensors in found.items()})


@timed("wire")
def unpack(packed: Packed, *, copy: bool = True) -> Tree:
    """The tree again, in memory of its own, so that its owner may change it; without a copy, for reading only."""
    buffers = {dtype: _tensor(buffer, getattr(torch, dtype), copy) for dtype, buffer in packed.buffers.items()}

    def put(leaf: Any) -> Any:
        return within(buffers[leaf.dtype], leaf) if isinstance(leaf, Span) else leaf

    return tree_of((path, put(leaf)) for path, leaf in packed.skeleton)


def _joined(tensors: list[Tensor]) -> Tensor:
    """Flat tensors, concatenated; tensors of one device are copied together."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.cat(tensors)


def bytes_of(buffer: Tensor) -> np.ndarray:
    """A flat tensor on the wire."""
    return buffer.cpu().view(torch.uint8).numpy()


def within(buffer: Tensor, span: Span) -> Tensor:
    """The tensor of a span, as a view of the buffer."""
    return buffer[span.start : span.start + math.prod(span.shape)].view(span.shape)


def _tensor(buffer: np.ndarray, dtype: torch.dtype, copy: bool) -> Tensor:
    """Bytes as a tensor (n,). A buffer in Ray's object store is shared and must not be changed."""
    if not copy:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the buffer must not be changed
            return torch.from_numpy(buffer).view(dtype)
    tensor = torch.empty(buffer.nbytes // dtype.itemsize, dtype=dtype)
    tensor.view(torch.uint8).numpy()[:] = buffer
    return tensor
