"""Parquet files as samples: columns of images, labels and, if asked for, natural clients.

Images are encoded bytes, `{bytes, path}` structs (the Hugging Face hub's form) or lists of pixels. Labels are numbers
from 0, or names. Class names come from the schema's metadata: `classes`, separated by commas, or the hub's ClassLabel.

Shapes: `N` rows, `C` channels, `H` x `W` pixels, `K` classes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs as pafs
from pyarrow import types

from rayfed.data.decode import Encoded, decode_all, gather
from rayfed.data.samples import Samples, few_enough
from rayfed.values import InputError

if TYPE_CHECKING:
    from rayfed.data.sources import Source

ROWS = 4096  # rows of images read at a time
SMALL = 4096  # bytes of an image below which its decoder hardly leaves the interpreter, and threads only cost time
Place = Callable[[int], str]  # where a row is, of all files' rows: for messages


def read_parquet(fs: pafs.FileSystem, paths: list[str], source: Source, train: Samples | None) -> Samples:
    """All rows of all files. A test set is read with the classes of its `train`. Raises InputError, with the place."""
    clients = "" if train else source.client
    files = [_open(fs, path, [source.image, source.label, *([clients] if clients else [])]) for path in paths]
    sizes = [file.metadata.num_rows for _, file in files]
    if not sum(sizes):
        raise InputError(f"{paths[0]}: it has no rows")
    place = functools.partial(_place, paths, sizes)

    named = class_names(files[0][1].schema_arrow, source.label)
    if train and named and named != train.classes:
        raise InputError(f"{paths[0]}: its classes ({_few(named)}) are not the training set's ({_few(train.classes)})")
    column = _column(files, source.label, place)
    labels, classes = label_codes(column, train.classes if train else named, source.label, place)

    groups, group_names = group_codes(_column(files, clients, place)) if clients else (None, ())
    return Samples(_images(files, sum(sizes), source), labels, classes, groups, group_names)


def class_names(schema: pa.Schema, label: str) -> tuple[str, ...] | None:
    """The class names that a schema's metadata gives for the column `label`, in label order."""
    metadata = schema.metadata or {}
    if b"classes" in metadata:
        return tuple(metadata[b"classes"].decode(errors="replace").split(","))
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tuple(map(str, names)) if isinstance(names, list) else None


def label_codes(
    column: pa.ChunkedArray, names: tuple[str, ...] | None, name: str, place: Place
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as int64 (N,) and the class names. `names` are those known before, if any."""
    if types.is_string(column.type) or types.is_large_string(column.type):
        classes = names or tuple(sorted(column.unique().to_pylist()))
        few_enough(len(classes), f"column '{name}'")
        found = pc.index_in(column, pa.array(classes, column.type))
        if found.null_count:
            row = _first(pc.is_null(found))
            raise InputError(f"{place(row)}: label '{column[row]}' is not one of the classes ({_few(classes)})")
        return found.to_numpy().astype(np.int64), classes
    if not types.is_integer(column.type):
        raise InputError(f"{place(0)}: column '{name}' is of type {column.type}; labels are whole numbers or text")
    labels = column.to_numpy().astype(np.int64)
    few_enough(len(names) if names else int(labels.max()) + 1, f"column '{name}'")
    classes = names or tuple(str(label) for label in range(int(labels.max()) + 1))
    outside = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(outside):
        row = int(outside[0])
        raise InputError(f"{place(row)}: label {labels[row]} is outside 0..{len(classes) - 1} ({_few(classes)})")
    return labels, classes


def group_codes(column: pa.ChunkedArray) -> tuple[np.ndarray, tuple[str, ...]]:
    """A column's values as codes, int64 (N,), and their names, sorted."""
    values = column.unique()
    values = values.take(pc.sort_indices(values))
    return pc.index_in(column, values).to_numpy().astype(np.int64), tuple(map(str, values.to_pylist()))


def pixels(column: pa.Array, shape: tuple[int, ...], where: str) -> np.ndarray:
    """Images stored as lists, flat or nested, as uint8 (N, C, H, W).

    `shape` is [C, H, W] or [H, W, C] (C is 1 or 3); without it nested lists tell, and flat ones must be square.
    """
    if isinstance(column, pa.ExtensionArray):  # pyarrow's fixed-shape tensors
        shape = shape or tuple(getattr(column.type, "shape", ()))
        column = column.storage
    count, nested = len(column), []
    while _is_list(column.type):
        lengths = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            raise InputError(f"{where}: lists of different lengths ({_few(lengths)}); images must all be of one size")
        nested.append(lengths[0])
        column = column.flatten()
    if not types.is_integer(column.type) or column.null_count:
        raise InputError(f"{where}: pixels of type {column.type}; they must be whole numbers in 0..255")
    if not math.prod(nested):
        raise InputError(f"{where}: lists without pixels")
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype != np.uint8 and (values.min() < 0 or values.max() > 255):
        raise InputError(f"{where}: pixels from {values.min()} to {values.max()}; they must be in 0..255")
    shape = shape or (tuple(nested) if len(nested) > 1 else _square(nested[0], where))
    shape = (1, *shape) if len(shape) == 2 else shape
    if len(shape) != 3 or min(shape) < 1 or math.prod(shape) != math.prod(nested) or not {shape[0], shape[2]} & {1, 3}:
        raise InputError(
            f"{where}: lists of {' x '.join(map(str, nested))} pixels cannot be images of shape {list(shape)}; "
            "data.shape must be [C, H, W] or [H, W, C] with C = 1 or 3"
        )
    images = values.astype(np.uint8, copy=False).reshape(count, *shape)
    return images if shape[0] in (1, 3) else images.transpose(0, 3, 1, 2)


def _images(files: list[tuple[str, pq.ParquetFile]], count: int, source: Source) -> np.ndarray:
    kind = files[0][1].schema_arrow.field(source.image).type
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if _is_list(kind):
        return np.ascontiguousarray(gather(_listed(files, source), count))
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if types.is_binary(kind) or types.is_large_binary(kind):
        groups = (file.metadata.row_group(i) for _, file in files for i in range(file.metadata.num_row_groups))
        large = sum(group.total_byte_size for group in groups) > SMALL * count
        return decode_all(_encoded(files, source.image), count, source.size, threads=large)
    raise InputError(
        f"{files[0][0]}: column '{source.image}' is of type {kind}; images are encoded bytes, "
        "{bytes, path} structs or lists of pixels"
    )


def _listed(files: list[tuple[str, pq.ParquetFile]], source: Source) -> Iterator[np.ndarray]:
    for path, file in files:
        for start, column in _chunks(path, file, source.image):
            yield pixels(column, source.shape, f"{path}, rows {start} to {start + len(column) - 1}")


def _encoded(files: list[tuple[str, pq.ParquetFile]], image: str) -> Iterator[Encoded]:
    for path, file in files:
        for start, column in _chunks(path, file, image):
            if types.is_struct(column.type):
                column = pc.struct_field(column, "bytes")
            for row, value in enumerate(column, start):
                yield f"{path}, row {row}", value.as_py


def _chunks(path: str, file: pq.ParquetFile, name: str) -> Iterator[tuple[int, pa.Array]]:
    start = 0
    with _readable(path):
        for batch in file.iter_batches(ROWS, columns=[name]):
            if len(batch):
                yield start, batch.column(0)
            start += len(batch)


def _open(fs: pafs.FileSystem, path: str, columns: list[str]) -> tuple[str, pq.ParquetFile]:
    with _readable(path):
        file = pq.ParquetFile(fs.open_input_file(path), pre_buffer=True)
    for name in columns:
        if name not in file.schema_arrow.names:
            raise InputError(
                f"{path}: no column '{name}'; it has {', '.join(file.schema_arrow.names)} "
                "(data.image, data.label and data.client name the columns)"
            )
    return path, file


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise InputError(f"{path}: cannot be read as a Parquet file ({' '.join(str(error).split())})") from None


def _column(files: list[tuple[str, pq.ParquetFile]], name: str, place: Place) -> pa.ChunkedArray:
    """One column of all files; dictionaries are unpacked, missing values refused."""
    parts = []
    for path, file in files:
        with _readable(path):
            parts.append(file.read(columns=[name]).column(0))
    parts = [part.cast(part.type.value_type) if types.is_dictionary(part.type) else part for part in parts]
    if any(part.type != parts[0].type for part in parts):
        raise InputError(f"column '{name}' has different types in {files[0][0]} and its neighbours")
    column = pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)
    if column.null_count:
        raise InputError(f"{place(_first(pc.is_null(column)))}: no value in column '{name}'")
    return column


def _place(paths: list[str], sizes: list[int], row: int) -> str:
    """Where the `row`-th of all rows is."""
    for path, size in zip(paths, sizes, strict=True):
        if row < size:
            return f"{path}, row {row}"
        row -= size
    raise IndexError(row)


def _first(flags: pa.ChunkedArray) -> int:
    return int(np.flatnonzero(flags.to_numpy())[0])


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _square(length: int, where: str) -> tuple[int, int, int]:
    for channels in (1, 3):
        side = math.isqrt(length // channels)
        if channels * side * side == length:
            return channels, side, side
    raise InputError(f"{where}: {length} pixels make no square image; give data.shape = [C, H, W]")


def _few(names: Sequence[object], limit: int = 10) -> str:
    return ", ".join(map(str, names[:limit])) + (", ..." if len(names) > limit else "")
