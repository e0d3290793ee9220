"""Partition files: who holds which image.

rayfed reads the files of others, and writes files for others to read.

* .json and .txt: the images of each client, `{"0": [7, 2], "1": [0, 5]}` or `[[7, 2], [0, 5]]`, in
  JSON or as Python prints them (`{0: [7, 2], 1: {0, 5}}`, the index files of FedACG, FedRCL and
  FedWSQ)
* .npz: an array of images for each client, named by its number
* .parquet: a row per image, with the columns client and image; or lists in a column images, as in a
  run's partition

Clients are numbered from 0. Images are numbered from 0 too, in the order of the training set. An
image that no client has is the server's (`Data.auxiliary_per_class`).
"""

import ast
import io
import json
from collections.abc import Iterable, Sequence
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
    """Return the client of each of `count` images, int64 (count,), and the number of clients.

    An image without a client has -1. Raises InputError if the file gives an image two clients, or
    is not such a file.
    """
    place = f"data.partition.path = '{path}'"
    if not path.endswith(SUFFIXES):
        raise InputError(f"{place}: a partition file ends in {', '.join(SUFFIXES)}")
    if not exists(path):
        raise InputError(f"{place}: there is no such file")
    fs, fs_path = locate(path)
    if not fs.get_file_info(fs_path).is_file:
        # Opening a pipe would wait for ever.
        raise InputError(f"{place}: this is not a file")
    content = reach(path, lambda: fs.open_input_file(fs_path).read())
    try:
        clients, sizes, images = _lists(content, path)
    except Exception as error:
        # Each format raises errors of its own.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{place}: this does not say which client has which images ({reason})"
        ) from None
    odd = clients[(clients < 0) | (clients >= count)]
    if len(odd) or not len(clients):
        problem = f"client {odd[0]}" if len(odd) else "no client is there"
        raise InputError(
            f"{place}: {problem}; clients are numbered from 0, and there are at most as many as "
            f"images, {count:,}"
        )
    outside = images[(images < 0) | (images >= count)]
    if len(outside):
        raise InputError(
            f"{place}: image {outside[0]} is not one of the training set's, 0 to {count - 1}; is "
            "it of other data?"
        )
    times = np.bincount(images, minlength=count)
    repeated = np.flatnonzero(times > 1)
    if len(repeated):
        image = repeated[0]
        raise InputError(
            f"{place}: image {image} is there {times[image]} times; give each image one client"
        )
    owner_of = np.full(count, -1)
    owner_of[images] = np.repeat(clients, sizes)
    return owner_of, int(clients.max()) + 1


def _lists(content: bytes, path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each list's client and length, int64 (lists,), and the images of all lists, int64."""
    if path.endswith(".parquet"):
        table = pq.read_table(io.BytesIO(content)).combine_chunks()
        clients = _whole(table.column("client"))
        if "image" in table.column_names:
            return clients, np.ones_like(clients), _whole(table.column("image"))
        lists = table.column("images")
        return clients, _whole(pc.list_value_length(lists)), _whole(pc.list_flatten(lists))
    if path.endswith(".npz"):
        with np.load(io.BytesIO(content)) as arrays:
            named_lists = [(name, arrays[name]) for name in arrays.files]
    else:
        named_lists = _named(content.decode("utf-8-sig"))
    clients = _whole([_number(name) for name, _ in named_lists])
    if len(np.unique(clients)) < len(clients):
        raise ValueError("a client is there twice")
    image_lists = [_whole(images) for _, images in named_lists]
    sizes = np.array([len(images) for images in image_lists])
    # Without any list, the images are an empty list.
    image_lists.append(_whole([]))
    return clients, sizes, np.concatenate(image_lists)


def _named(text: str) -> list[tuple[Any, list[Any]]]:
    """Return the clients' names and lists, as they stand in a text.

    A dict would keep only the last of a name's lists, so the text is not evaluated as one.
    """
    body = ast.parse(text.strip(), mode="eval").body
    lists = body.values if isinstance(body, ast.Dict) else getattr(body, "elts", None)
    if lists is None or not all(isinstance(node, ast.List | ast.Tuple | ast.Set) for node in lists):
        raise ValueError("it is no table or list of lists")
    names: Iterable[Any] = range(len(lists))
    if isinstance(body, ast.Dict):
        names = [ast.literal_eval(key) for key in body.keys if key]
    image_lists = [sorted(ast.literal_eval(node)) for node in lists]
    return list(zip(names, image_lists, strict=True))


def _number(name: Any) -> int:
    """Return the number of a client that a name says; raise ValueError for another name."""
    if isinstance(name, str) and name.isascii() and name.isdigit():
        return int(name)
    if type(name) is int:
        return name
    raise ValueError(f"client {name!r} is no number")


def _whole(values: Sequence[int] | np.ndarray | pa.ChunkedArray) -> np.ndarray:
    """Return a list of whole numbers as int64; an empty list may be of any type.

    Raises ValueError for everything else.
    """
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
    images_by_client = {str(i): images for i, images in enumerate(clients)}
    if path.suffix == ".json":
        lists = {client: images.tolist() for client, images in images_by_client.items()}
        path.write_text(json.dumps(lists))
    elif path.suffix == ".npz":
        np.savez(path, **images_by_client)  # type: ignore[arg-type]
    else:
        owners = np.repeat(np.arange(len(clients)), list(map(len, clients)))
        table = pa.table({"client": owners, "image": np.concatenate(clients)})
        pq.write_table(table, path)
