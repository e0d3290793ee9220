"""Partition files: who holds which image, read from others' files and written for others to read.

* .json and .txt: the images of each client, `{"0": [7, 2], "1": [0, 5]}` or `[[7, 2], [0, 5]]`, in JSON or as Python
  prints them (`{0: [7, 2], 1: {0, 5}}`, the index files of FedACG, FedRCL and FedWSQ)
* .npz: an array of images for each client, named by its number
* .parquet: a row per image, with the columns client and image; or lists in a column images, as in a run's partition

Clients are numbered from 0, and so are images, in the order of the training set. An image that no client has is the
server's (`Data.auxiliary_per_class`).
"""

import ast
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfed.base.errors import InputError
from rayfed.base.storage import exists, locate, reach

SUFFIXES = (".json", ".txt", ".npz", ".parquet")


def read_dealt(path: str, count: int) -> np.ndarray:
    """The client of each of `count` images, int64 (count,); -1 where it has none.

    Raises InputError where the file gives an image two, or is not such a file.
    """
    place = f"data.partition.path = '{path}'"
    if not path.endswith(SUFFIXES):
        raise InputError(f"{place}: a partition file ends in {', '.join(SUFFIXES)}")
    if not exists(path):
        raise InputError(f"{place}: there is no such file")
    fs, on_it = locate(path)
    content = reach(path, lambda: fs.open_input_file(on_it).read())
    try:
        owners, images = _pairs(content, path)
    except Exception as error:  # each format's own
        why = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{place}: this does not say which client has which images ({why})") from None
    outside = images[(images < 0) | (images >= count)]
    if len(outside):
        raise InputError(
            f"{place}: image {outside[0]} is not one of the training set's, 0 to {count - 1}; is it of other data?"
        )
    times = np.bincount(images, minlength=count)
    twice = np.flatnonzero(times > 1)
    if len(twice):
        raise InputError(f"{place}: image {twice[0]} is there {times[twice[0]]} times; give each image one client")
    owner_of = np.full(count, -1)
    owner_of[images] = owners
    return owner_of


def _pairs(content: bytes, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Clients and their images, int64 (pairs,) each."""
    if path.endswith(".parquet"):
        table = pq.read_table(io.BytesIO(content)).combine_chunks()
        clients = _whole(table.column("client"))
        if "image" in table.column_names:
            return clients, _whole(table.column("image"))
        lists = table.column("images")
        return np.repeat(clients, pc.list_value_length(lists)), _whole(pc.list_flatten(lists))
    if path.endswith(".npz"):
        with np.load(io.BytesIO(content)) as arrays:
            held = {int(name): arrays[name] for name in arrays.files}
    else:
        read = ast.literal_eval(content.decode())
        named = read.items() if isinstance(read, dict) else enumerate(read)
        held = {int(client): sorted(images) for client, images in named}
    return np.repeat(list(held), [len(images) for images in held.values()]), _whole(np.concatenate(list(held.values())))


def _whole(values: Sequence[int] | pa.ChunkedArray) -> np.ndarray:
    found = np.asarray(values)
    if found.dtype.kind not in "iu":
        raise ValueError(f"{found.dtype} in place of whole numbers")
    return found.astype(np.int64)


def write_dealt(path: Path, clients: Sequence[np.ndarray]) -> None:
    """Write each client's images to a file in the format of its suffix. Raises InputError for another suffix."""
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
