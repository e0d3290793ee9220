"""What a checkpoint holds as the content of files: trees and weights as safetensors, clients' memories as shards.

    round-00020.memories-000.shard    memories one after the other, each as a safetensors file
    round-00020.memories.parquet      the index: client, shard, and the bytes in it from `start` to `stop`

A tree's skeleton is JSON in its file's metadata. A shard is never changed, and has a twin, as both kept checkpoints may
need it. A memory stays where it is until its client has trained again, so a checkpoint writes only new memories, and a
shard is deleted with the last checkpoint whose index names it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count, groupby
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import safetensors.numpy
import safetensors.torch

from rayfed.tensors.trees import KINDS
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import Packed, Span

T = TypeVar("T")
SHARD = (
    2**25
)  # bytes: two are in memory at a time, and a hundred hold the memories of 20,000 clients
THIN = 16  # shards less than half full that may stay; so a disk holds twice what is in use, and half a GiB, at most
SCHEMA = pa.schema(
    [("client", pa.int64()), ("shard", pa.string()), ("start", pa.int64()), ("stop", pa.int64())]
)


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
        skeleton = [
            (tuple(map(tuple, path)), _from_json(leaf))
            for path, leaf in json.loads(metadata["leaves"])
        ]
        return Packed(skeleton, buffers)
    except (safetensors.SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"this is not a packed tree: {error!r}") from error


def weights_to_bytes(weights: Weights, about: Mapping[str, Any]) -> bytes:
    """Weights by name, which need no skeleton; safetensors takes no other memory layout, such as channels-last.

    What there is to know `about` them is JSON under a single key, as safetensors writes several in any order.
    """
    plain = {name: tensor.contiguous() for name, tensor in weights.items()}
    return safetensors.torch.save(plain, {"rayfed": json.dumps(about)})


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


class Extent(NamedTuple):
    """Where a memory lies: `content[start:stop]` of a file."""

    shard: str
    start: int
    stop: int


Index = dict[int, Extent]  # by client


def twin_of(name: str) -> str:
    """The name of the second copy of a file that several checkpoints need."""
    beginning, _, kind = name.rpartition(".")
    return f"{beginning}-twin.{kind}"


def unmoved(index: Index, unchanged: Collection[int]) -> Index:
    """The memories that stay where they are: unchanged ones, unless there are too many shards with little in them."""
    stay = {client: extent for client, extent in index.items() if client in unchanged}
    used: Counter[str] = Counter()
    for extent in stay.values():
        used[extent.shard] += extent.stop - extent.start
    thin = {shard for shard, size in used.items() if size < SHARD // 2}
    if len(thin) <= THIN:
        return stay
    return {client: extent for client, extent in stay.items() if extent.shard not in thin}


def shards_of(
    beginning: str, memories: Iterable[tuple[int, bytes]]
) -> Iterator[tuple[str, list[bytes], Index]]:
    """Shards from the memories of clients, each with its name, content in pieces, and index."""
    left = iter(memories)
    for number in count():
        name = f"{beginning}.memories-{number:03d}.shard"
        size = 0
        pieces: list[bytes] = []
        index: Index = {}
        for client, memory in left:
            index[client] = Extent(name, size, size + len(memory))
            pieces.append(memory)
            size += len(memory)
            if size >= SHARD:
                break
        if not pieces:
            return
        yield name, pieces, index


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The items, each made in a thread while the one before is in use: the disk does not wait for the processor."""
    with ThreadPoolExecutor(1) as maker:
        making = maker.submit(next, items, None)
        while (item := making.result()) is not None:
            making = maker.submit(next, items, None)
            yield item


def memories_in(index: Index, read: Callable[[str], bytes]) -> Iterator[tuple[int, bytes]]:
    """Each client in an index with its memory. Each file is read once, and held until the next is read."""
    for shard, clients in groupby(
        sorted(index, key=index.__getitem__), lambda client: index[client].shard
    ):
        content = read(shard)
        for client in clients:
            yield client, content[index[client].start : index[client].stop]


def index_to_table(index: Index) -> pa.Table:
    rows = [{"client": client, **extent._asdict()} for client, extent in sorted(index.items())]
    return pa.Table.from_pylist(rows, SCHEMA)


def index_from_table(table: pa.Table) -> Index:
    return {
        row["client"]: Extent(row["shard"], row["start"], row["stop"]) for row in table.to_pylist()
    }
