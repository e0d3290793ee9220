"""Trees of tensors as one flat numpy buffer per dtype, which is how they travel.

Ray moves a numpy array through its object store without a copy, and a torch tensor by pickling it; one large buffer
costs one message, a dict of small tensors costs many. So the wire is numpy, and torch is at both ends.

On disk a packed tree is a safetensors file: its buffers, and its skeleton as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor

from rayfed.weights import Scaled, Tree


@dataclass(frozen=True, eq=False)
class Packed:
    """A tree taken apart: its skeleton, with a `Place` where a tensor was, and the bytes of all tensors of a dtype."""

    skeleton: Any
    buffers: dict[str, np.ndarray]  # dtype name -> uint8 (bytes,)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors; the skeleton's are a few dozen a tensor."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the buffer of its dtype; `start` counts elements."""

    dtype: str
    start: int
    shape: tuple[int, ...]


def pack(tree: Tree) -> Packed:
    """Copy a tree's tensors, in order, into one buffer per dtype. Tensors may live on any device."""
    found: dict[str, list[Tensor]] = {}
    sizes: dict[str, int] = {}

    def take(node: Tree) -> Any:
        if isinstance(node, Tensor):
            dtype = str(node.dtype).removeprefix("torch.")
            place = Place(dtype, sizes.get(dtype, 0), tuple(node.shape))
            found.setdefault(dtype, []).append(node.detach().reshape(-1))
            sizes[dtype] = place.start + node.numel()
            return place
        return _rebuild(node, take)

    return Packed(take(tree), {dtype: _joined(tensors).view(torch.uint8).numpy() for dtype, tensors in found.items()})


def unpack(packed: Packed) -> Tree:
    """The tree again, in fresh memory: whoever gets it may change it, and nobody else will notice."""
    buffers = {dtype: _tensor(buffer, getattr(torch, dtype)) for dtype, buffer in packed.buffers.items()}

    def put(node: Any) -> Tree:
        if isinstance(node, Place):
            count = int(np.prod(node.shape, dtype=np.int64))
            return buffers[node.dtype][node.start : node.start + count].view(node.shape)
        return _rebuild(node, put)

    return put(packed.skeleton)


def to_bytes(packed: Packed) -> bytes:
    """A packed tree as the content of a safetensors file."""
    return safetensors.numpy.save(packed.buffers, metadata={"tree": json.dumps(_plain(packed.skeleton))})


def from_bytes(content: bytes) -> Packed:
    """The packed tree that `to_bytes` wrote. Raises ValueError where the content is something else."""
    try:
        buffers = safetensors.numpy.load(content)
        size = int.from_bytes(content[:8], "little")
        tree = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["tree"])
        return Packed(_tree(tree), buffers)
    except (safetensors.SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"this is no packed tree: {error!r}") from error


def _plain(node: Any) -> Any:
    """A skeleton in what JSON knows: whatever is neither a list nor a plain value is a table that names its kind."""
    if isinstance(node, Place):
        return {"tensor": [node.dtype, node.start, list(node.shape)]}
    if isinstance(node, Scaled):
        return {"scaled": [node.weight, _plain(node.values)]}
    if isinstance(node, Mapping):
        return {"dict": [[key, _plain(item)] for key, item in node.items()]}
    if isinstance(node, tuple):
        return {"tuple": [_plain(item) for item in node]}
    return [_plain(item) for item in node] if isinstance(node, list) else node


def _tree(plain: Any) -> Any:
    """The skeleton again."""
    if isinstance(plain, list):
        return [_tree(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == "tensor":
        return Place(value[0], value[1], tuple(value[2]))
    if kind == "scaled":
        return Scaled(value[0], _tree(value[1]))
    return {key: _tree(item) for key, item in value} if kind == "dict" else tuple(_tree(item) for item in value)


def _joined(tensors: list[Tensor]) -> Tensor:
    """Flat tensors one after the other, on the CPU; from one device they cross the bus once, not once a tensor."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.cat(tensors).cpu()


def _tensor(buffer: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Bytes as a tensor (n,), copied: a buffer in the object store is shared, and may not be written to."""
    tensor = torch.empty(buffer.nbytes // dtype.itemsize, dtype=dtype)
    tensor.view(torch.uint8).numpy()[:] = buffer
    return tensor


def _rebuild(node: Any, function: Any) -> Any:
    if isinstance(node, Scaled):
        return Scaled(node.weight, function(node.values))
    if isinstance(node, Mapping):
        return {key: function(item) for key, item in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(function(item) for item in node)
    return node
