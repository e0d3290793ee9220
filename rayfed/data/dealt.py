"""Partition files: who holds which image, read from others' files and written for others to read.

* .json and .txt: the images of each client, `{"0": [7, 2], "1": [0, 5]}` or `[[7, 2], [0, 5]]`, in
  JSON or as Python
  prints them (`{0: [7, 2], 1: {0, 5}}`, the index files of FedACG, FedRCL and FedWSQ)
* .npz: an array of images for each client, named by its number
* .parquet: a row per image, with the columns client and image; or lists in a column images, as in a
  run's partition

Clients are numbered from 0, and so are images, in the order of the training set. An image that no
client has is the server's (`Data.auxiliary_per_class`).
"""

import ast
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfed.base.errors import InputError
from rayfed.base.storage import exists, locate, reach

SUFFIXES = (".json", ".txt", ".npz", ".parquet")


def read_dealt(path: str, count: int) -> tuple[np.ndarray, int]:
    """The client of each of `count` images, int64 (count,), -1 where it has none; and the number of
    clients.

    Raises InputError where the file gives an image two, or is not such a file.
    """
    place = f"data.partition.path = '{path}'"
    if not path.endswith(SUFFIXES):
        raise InputError(f"{place}: a partition file ends in {', '.join(SUFFIXES)}")
    if not exists(path):
        raise InputError(f"{place}: there is no such file")
    fs, on_it = locate(path)
    if not fs.get_file_info(on_it).is_file:
        # To open a pipe would wait for ever.
        raise InputError(f"{place}: this is not a file")
    content = reach(path, lambda: fs.open_input_file(on_it).read())
    try:
        clients, sizes, images = _lists(content, path)
    except Exception as error:
        # Each format's own.
        why = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{place}: this does not say which client has which images ({why})"
        ) from None
    odd = clients[(clients < 0) | (clients >= count)]
    if len(odd) or not len(clients):
        raise InputError(
            f"{place}: {f'client {odd[0]}' if len(odd) else 'no client is there'}; clients are "
            f"numbered from 0, and there are at most as many as images, {count:,}"
        )
    outside = images[(images < 0) | (images >= count)]
    if len(outside):
        raise InputError(
            f"{place}: image {outside[0]} is not one of the training set's, 0 to {count - 1}; is "
            "it of other data?"
        )
    times = np.bincount(images, minlength=count)
    twice = np.flatnonzero(times > 1)
    if len(twice):
        raise InputError(
            f"{place}: image {twice[0]} is there {times[twice[0]]} times; give each image one "
            "client"
        )
    owner_of = np.full(count, -1)
    owner_of[images] = np.repeat(clients, sizes)
    return owner_of, int(clients.max()) + 1


def _lists(content: bytes, path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each list in the file its client and its length, int64 (lists,); and all their images,
    int64.
    """
    if path.endswith(".parquet"):
        table = pq.read_table(io.BytesIO(content)).combine_chunks()
        clients = _whole(table.column("client"))
        if "image" in table.column_names:
            return clients, np.ones_like(clients), _whole(table.column("image"))
        lists = table.column("images")
        return clients, _whole(pc.list_value_length(lists)), _whole(pc.list_flatten(lists))
    if path.endswith(".npz"):
        with np.load(io.BytesIO(content)) as arrays:
            held = [(name, arrays[name]) for name in arrays.files]
    else:
        held = _named(content.decode("utf-8-sig"))
    clients = _whole([_number(name) for name, _ in held])
    if len(np.unique(clients)) < len(clients):
        raise ValueError("a client is there twice")
    images = [_whole(of_client) for _, of_client in held]
    return (
        clients,
        np.array([len(of_client) for of_client in images]),
        np.concatenate([_whole([]), *images]),
    )


def _named(text: str) -> list[tuple[Any, list[Any]]]:
    """Clients' names and lists: of a table as it stands, as a dict would keep only the last of a
    name's lists.
    """
    body = ast.parse(text.strip(), mode="eval").body
    lists = body.values if isinstance(body, ast.Dict) else getattr(body, "elts", None)
    if lists is None or not all(isinstance(each, ast.List | ast.Tuple | ast.Set) for each in lists):
        raise ValueError("it is no table or list of lists")
    names = (
        [ast.literal_eval(key) for key in body.keys if key]
        if isinstance(body, ast.Dict)
        else range(len(lists))
    )
    return list(zip(names, (sorted(ast.literal_eval(each)) for each in lists), strict=True))


def _number(name: Any) -> int:
    if isinstance(name, str) and name.isascii() and name.isdigit():
        return int(name)
    if type(name) is int:
        return name
    raise ValueError(f"client {name!r} is no number")


def _whole(values: Sequence[int] | np.ndarray | pa.ChunkedArray) -> np.ndarray:
    """A list of whole numbers as int64; an empty list is one, of whatever type."""
    numbers = np.asarray(values)
    if numbers.ndim != 1:
        raise ValueError("lists in lists")
    if len(numbers) and numbers.dtype.kind not in "iu":
        raise ValueError(f"{numbers.dtype} in place of whole numbers")
    if len(numbers) and numbers.max() >= 2**63:
        raise ValueError(f"{numbers.max()} is too large")
    return numbers.astype(np.int64)


def write_dealt(path: Path, clients: Sequence[np.ndarray]) -> None:
    """Write each client's images to a file in the format of its suffix.

    Raises InputError for another suffix.
    """
    if path.suffix not in (".json", ".npz", ".parquet"):
        raise InputError(f"--export '{path}': give a file that ends in .json, .npz or .parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {str(i): images for i, images in enumerate(clients)}
    if path.suffix == ".json":
        path.write_text(json.dumps({client: images.tolist() for client, images in held.items()}))
    elif path.suffix == ".npz":
        np.savez(path, **held)  # type: ignore[arg-type]
    else:
        owners = np.repeat(np.arange(len(clients)), list(map(len, clients)))
        pq.write_table(pa.table({"client": owners, "image": np.concatenate(clients)}), path)
