"""Trees and weights as the content of safetensors files. A tree's skeleton is JSON in the file's metadata."""

import json
from typing import Any

import safetensors.numpy
import safetensors.torch

from rayfed.tensors.trees import KINDS
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed, Span


def to_bytes(packed: Packed) -> bytes:
    """A packed tree as the content of a safetensors file, with the skeleton as JSON in the file's metadata."""
    skeleton = [[path, _to_json(leaf)] for path, leaf in packed.skeleton]
    return safetensors.numpy.save(packed.buffers, metadata={"leaves": json.dumps(skeleton)})


def from_bytes(content: bytes) -> Packed:
    """The packed tree that `to_bytes` wrote. Raises ValueError where the content is something else."""
    try:
        buffers = safetensors.numpy.load(content)
        size = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + size])["__metadata__"]
        skeleton = [(tuple(map(tuple, path)), _from_json(leaf)) for path, leaf in json.loads(metadata["leaves"])]
        return Packed(skeleton, buffers)
    except (safetensors.SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"this is not a packed tree: {error!r}") from error


def weights_to_bytes(weights: Weights, metadata: dict[str, str] | None = None) -> bytes:
    """Weights by name, which need no skeleton; safetensors takes no other memory layout, such as channels-last."""
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, metadata)


def _to_json(leaf: Any) -> Any:
    """A leaf in JSON. A tensor or an empty container becomes a list that begins with its kind."""
    if isinstance(leaf, Span):
        return ["tensor", leaf.dtype, leaf.start, list(leaf.shape)]
    return [type(leaf).__name__] if isinstance(leaf, dict | list | tuple) else leaf


def _from_json(leaf: Any) -> Any:
    if not isinstance(leaf, list):
        return leaf
    kind, *rest = leaf
    return Span(rest[0], rest[1], tuple(rest[2])) if kind == "tensor" else KINDS[kind]()
