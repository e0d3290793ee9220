"""Client memories in a folder of checkpoints: many in a file, and an index that says where each one lies.

    round-00020.memories-000.shard    memories one after the other, each as a safetensors file
    round-00020.memories.parquet      the index: client, shard, and the bytes in it from `start` to `stop`

A shard is never changed, and has a twin, as both kept checkpoints may need it. A memory stays where it is until its
client has trained again, so a checkpoint writes only new memories, and a shard is deleted with the last checkpoint
whose index names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, groupby
from typing import NamedTuple, TypeVar

import pyarrow as pa

SHARD = 2**25  # bytes: two are in memory at a time, and a hundred hold the memories of 20,000 clients
THIN = 16  # shards less than half full that may stay; so a disk holds twice what is in use, and half a GiB, at most
T = TypeVar("T")
SCHEMA = pa.schema([("client", pa.int64()), ("shard", pa.string()), ("start", pa.int64()), ("stop", pa.int64())])


class Place(NamedTuple):
    """Where a memory lies: `content[start:stop]` of a file."""

    shard: str
    start: int
    stop: int


Index = dict[int, Place]  # by client


def twin_of(name: str) -> str:
    """The name of the second copy of a file that several checkpoints need."""
    beginning, _, kind = name.rpartition(".")
    return f"{beginning}-twin.{kind}"


def settled(index: Index, unchanged: Collection[int]) -> Index:
    """The memories that stay where they are: unchanged ones, unless there are too many shards with little in them."""
    stay = {client: place for client, place in index.items() if client in unchanged}
    used: Counter[str] = Counter()
    for shard, start, stop in stay.values():
        used[shard] += stop - start
    thin = {shard for shard, size in used.items() if size < SHARD // 2}
    return {client: place for client, place in stay.items() if len(thin) <= THIN or place.shard not in thin}


def fill(beginning: str, memories: Iterable[tuple[int, bytes]]) -> Iterator[tuple[str, list[bytes], Index]]:
    """Shards from the memories of clients, each with its name, content in pieces, and index."""
    left = iter(memories)
    for number in count():
        name, size, pieces, index = f"{beginning}.memories-{number:03d}.shard", 0, list[bytes](), Index()
        while size < SHARD and (found := next(left, None)):
            client, memory = found
            index[client] = Place(name, size, size := size + len(memory))
            pieces.append(memory)
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


def contents(index: Index, read: Callable[[str], bytes]) -> Iterator[tuple[int, bytes]]:
    """Each client in an index with its memory. Each file is read once, and held until the next is read."""
    for shard, clients in groupby(sorted(index, key=index.__getitem__), lambda client: index[client].shard):
        content = read(shard)
        for client in clients:
            yield client, content[index[client].start : index[client].stop]


def to_table(index: Index) -> pa.Table:
    """The index as a table, by client."""
    rows = [(client, *place) for client, place in sorted(index.items())]
    columns = zip(*rows, strict=True) if rows else [[]] * len(SCHEMA)
    return pa.table([pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)], SCHEMA)


def from_table(table: pa.Table) -> Index:
    """The inverse of `to_table`."""
    columns = [table.column(name).to_pylist() for name in SCHEMA.names]
    return {client: Place(*place) for client, *place in zip(*columns, strict=True)}
