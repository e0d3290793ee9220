"""Trees on the wire: one flat buffer per dtype in place of many small tensors."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.tensors.trees import Path, Tree, leaves, tree_of


@dataclass(frozen=True)
class Span:
    """The part of its dtype's buffer that a tensor fills; `start` counts elements."""

    dtype: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Packed:
    """A tree on the wire: its leaves, with a `Span` in place of each tensor, and one flat buffer
    per dtype.

    Ray moves a numpy array through its object store without a copy, but pickles torch tensors. One
    large buffer is one message; a dict of small tensors would be many.
    """

    skeleton: list[tuple[Path, Any]]
    # Dtype name -> uint8 (bytes,).
    buffers: dict[str, np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors. The skeleton takes a few dozen more per tensor."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


def pack(tree: Tree) -> Packed:
    """Copy a tree's tensors, in order, into one buffer per dtype.

    Tensors may live on any device.
    """
    tensors: dict[str, list[Tensor]] = {}
    sizes: dict[str, int] = {}

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = str(leaf.dtype).removeprefix("torch.")
        start = sizes.get(dtype, 0)
        tensors.setdefault(dtype, []).append(leaf.detach().reshape(-1))
        sizes[dtype] = start + leaf.numel()
        return Span(dtype, start, tuple(leaf.shape))

    skeleton = [(path, take(leaf)) for path, leaf in leaves(tree)]
    return Packed(skeleton, {dtype: bytes_of(_flat(of_one)) for dtype, of_one in tensors.items()})


def unpack(packed: Packed, *, copy: bool = True) -> Tree:
    """The tree again, in memory of its own, so that its owner may change it; without a copy, for
    reading only.
    """
    buffers = {
        dtype: _tensor(buffer, getattr(torch, dtype), copy)
        for dtype, buffer in packed.buffers.items()
    }

    def put(leaf: Any) -> Any:
        return within(buffers[leaf.dtype], leaf) if isinstance(leaf, Span) else leaf

    return tree_of((path, put(leaf)) for path, leaf in packed.skeleton)


def _flat(tensors: list[Tensor]) -> Tensor:
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
            # Torch warns that the buffer must not be changed.
            warnings.simplefilter("ignore")
            return torch.from_numpy(buffer).view(dtype)
    tensor = torch.empty(buffer.nbytes // dtype.itemsize, dtype=dtype)
    tensor.view(torch.uint8).numpy()[:] = buffer
    return tensor
