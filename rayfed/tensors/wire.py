"""Trees as messages: one flat buffer per dtype instead of many small tensors."""

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
    """The range of its dtype's buffer that a tensor fills; `start` counts elements."""

    dtype: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Packed:
    """A tree as a message: its leaves, and one flat buffer of tensors per dtype.

    A leaf that is a tensor is replaced by a `Span`. Ray moves a numpy array through its object
    store without a copy, but pickles torch tensors. One large buffer is one message; a dict of
    small tensors would be many messages.
    """

    skeleton: list[tuple[Path, Any]]
    # By the name of a dtype, uint8 (bytes,).
    buffers: dict[str, np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensors. The skeleton needs a few dozen more per tensor."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


def pack(tree: Tree) -> Packed:
    """Copy a tree's tensors, in order, into one buffer per dtype.

    Tensors may be on any device.

    >>> packed = pack({"w": torch.ones(2), "n": 3})
    >>> packed.num_bytes
    8
    >>> unpack(packed)
    {'w': tensor([1., 1.]), 'n': 3}
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
    buffers = {dtype: bytes_of(_flat(values)) for dtype, values in tensors.items()}
    return Packed(skeleton, buffers)


def unpack(packed: Packed, *, copy: bool = True) -> Tree:
    """Return the tree of a message.

    Its tensors are copies, which may be changed. With `copy=False` they are views of the buffers,
    and must only be read.
    """
    buffers = {
        dtype: _tensor(buffer, getattr(torch, dtype), copy)
        for dtype, buffer in packed.buffers.items()
    }

    def put(leaf: Any) -> Any:
        return within(buffers[leaf.dtype], leaf) if isinstance(leaf, Span) else leaf

    return tree_of((path, put(leaf)) for path, leaf in packed.skeleton)


def _flat(tensors: list[Tensor]) -> Tensor:
    """Concatenate flat tensors; if they are on several devices, on the CPU."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.cat(tensors)


def bytes_of(buffer: Tensor) -> np.ndarray:
    """Return the bytes of a flat tensor, uint8 (bytes,)."""
    return buffer.cpu().view(torch.uint8).numpy()


def within(buffer: Tensor, span: Span) -> Tensor:
    """Return the tensor of a span, as a view of the buffer."""
    end = span.start + math.prod(span.shape)
    return buffer[span.start : end].view(span.shape)


def _tensor(buffer: np.ndarray, dtype: torch.dtype, copy: bool) -> Tensor:
    """Return bytes as a tensor (n,).

    Without a copy it shares the buffer, which in Ray's object store must not be changed.
    """
    if not copy:
        with warnings.catch_warnings():
            # Torch warns that the buffer is read-only.
            warnings.simplefilter("ignore")
            return torch.from_numpy(buffer).view(dtype)
    tensor = torch.empty(buffer.nbytes // dtype.itemsize, dtype=dtype)
    tensor.view(torch.uint8).numpy()[:] = buffer
    return tensor
