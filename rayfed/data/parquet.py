"""Parquet files as samples: columns of images or other inputs, of labels and, if asked for, of natural clients.

Images are encoded bytes, `{bytes, path}` structs (as on the Hugging Face hub) or lists of pixels. Labels are numbers
from 0, or names. Class names come from the schema's metadata: `classes`, separated by commas, or the hub's ClassLabel.

Shapes: `N` rows, `C` channels, `H` x `W` pixels, `K` classes.
"""

import contextlib
import json
import math
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs as pafs
from pyarrow import types

from rayfed.base.errors import InputError, harmless, nearest
from rayfed.data.columns import Locate, is_list, read_tokens, read_vectors
from rayfed.data.decode import Encoded, decode_all, gather
from rayfed.data.samples import Samples, few_classes, shortened
from rayfed.data.settings import Data

ROWS = 4096  # rows read at a time
VALUES = 2**24  # values read at a time, where a row has many
SMALL = 4096  # bytes; the decoder of a smaller image hardly releases the interpreter, so threads only cost time
Files = dict[str, pq.ParquetFile]  # by path


def read_parquet(fs: pafs.FileSystem, paths: list[str], data: Data, train: Samples | None) -> Samples:
    """All rows of all files. A test set is read with the classes of `train`. Raises InputError, with the place."""
    clients = "" if train else data.client
    columns = [*filter(None, dict.fromkeys([data.label, clients, data.domain]))]
    files = {path: _open(fs, path, data, columns) for path in paths}
    ends = np.cumsum([file.metadata.num_rows for file in files.values()])
    if not ends[-1]:
        raise InputError(f"{paths[0]}: it has no rows")

    def place(row: int) -> str:
        index = int(np.searchsorted(ends, row, side="right"))
        return f"{paths[index]}, row {row - (ends[index - 1] if index else 0)}"

    named = class_names(files[paths[0]].schema_arrow, data.label)
    if train and named and named != train.classes:
        ours, theirs = shortened(named), shortened(train.classes)
        raise InputError(f"{paths[0]}: its classes ({ours}) are not the training set's ({theirs})")
    column = _column(files, data.label, place)
    labels, classes = label_codes(column, train.classes if train else named, data.label, place)
    groups = _group_codes(_column(files, clients, place), clients, place)[0] if clients else None
    domains, names = _group_codes(_column(files, data.domain, place), data.domain, place) if data.domain else (None, ())
    names = tuple(map(harmless, names))
    inputs, vocabulary = _inputs(files, int(ends[-1]), data, train, place)
    return Samples(inputs, labels, classes, groups, domains, names, vocabulary)


def class_names(schema: pa.Schema, label: str) -> tuple[str, ...] | None:
    """The class names that a schema's metadata gives for the column `label`, in label order."""
    metadata = schema.metadata or {}
    if b"classes" in metadata:
        return tuple(map(harmless, metadata[b"classes"].decode(errors="replace").split(",")))
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tuple(harmless(str(name)) for name in names) if isinstance(names, list) else None


def label_codes(
    column: pa.ChunkedArray, names: tuple[str, ...] | None, name: str, place: Locate
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as int64 (N,) and the class names. `names` are the names known before, if any."""
    if types.is_dictionary(column.type):
        codes, used = _name_codes(column)
        few_classes(len(used), f"column '{name}'")
        used = tuple(map(harmless, used))
        classes = names or used
        label_of = {label: number for number, label in enumerate(classes)}
        labels = np.array([label_of.get(label, -1) for label in used])[codes]
        unknown = np.flatnonzero(labels < 0)
        if len(unknown):
            row = int(unknown[0])
            label = used[codes[row]]
            raise InputError(f"{place(row)}: label '{label}' is not one of the classes ({shortened(classes)})")
        return labels, classes
    if not types.is_integer(column.type):
        raise InputError(f"{place(0)}: column '{name}' is of type {column.type}; labels are whole numbers or text")
    labels = column.to_numpy().astype(np.int64)
    num_classes = len(names) if names else int(labels.max()) + 1
    few_classes(num_classes, f"column '{name}'")
    classes = names or tuple(map(str, range(num_classes)))
    outside = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(outside):
        row = int(outside[0])
        raise InputError(f"{place(row)}: label {labels[row]} is outside 0..{num_classes - 1} ({shortened(classes)})")
    return labels, classes


def _name_codes(column: pa.ChunkedArray) -> tuple[np.ndarray, tuple[str, ...]]:
    """A column of names as codes, int64 (N,), and the names, sorted. No name is unpacked more than once."""
    column = column.unify_dictionaries()
    names = column.chunk(0).dictionary.to_pylist()
    indices = np.concatenate([chunk.indices.to_numpy() for chunk in column.chunks])
    used = sorted(np.unique(indices), key=names.__getitem__)
    code_of = np.zeros(len(names), dtype=np.int64)
    code_of[used] = np.arange(len(used))
    return code_of[indices], tuple(names[index] for index in used)


def _group_codes(column: pa.ChunkedArray, name: str, place: Locate) -> tuple[np.ndarray, tuple[str, ...]]:
    """A column's values, numbered in their sorted order, int64 (N,), and their names."""
    if types.is_dictionary(column.type):
        return _name_codes(column)
    if types.is_nested(column.type):
        raise InputError(
            f"{place(0)}: column '{name}' is of type {column.type}; a client, or a domain, is a number or a name"
        )
    values = column.to_numpy()
    if types.is_floating(column.type) and np.isnan(values).any():
        row = int(np.flatnonzero(np.isnan(values))[0])
        raise InputError(f"{place(row)}: NaN in column '{name}'; give each row a number or a name")
    names, codes = np.unique(values, return_inverse=True)
    return codes, tuple(map(str, names))


def pixels(column: pa.Array, shape: tuple[int, ...], place: str) -> np.ndarray:
    """Images stored as lists, flat or nested, as uint8 (N, C, H, W).

    `shape` is [C, H, W] or [H, W, C] (C is 1 or 3). Without it, nested lists have their own shape, flat lists a square.
    """
    if isinstance(column, pa.ExtensionArray):  # pyarrow's fixed-shape tensors
        shape = shape or tuple(getattr(column.type, "shape", ()))
        column = column.storage
    count, nested = len(column), []
    while is_list(column.type):
        lengths = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            raise InputError(f"{place}: lists of different lengths ({shortened(lengths)}); all images need one size")
        nested.append(lengths[0])
        column = column.flatten()
    if not types.is_integer(column.type) or column.null_count:
        raise InputError(f"{place}: pixels of type {column.type}; they must be whole numbers in 0..255")
    if not math.prod(nested):
        raise InputError(f"{place}: lists without pixels")
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype != np.uint8 and (values.min() < 0 or values.max() > 255):
        raise InputError(f"{place}: pixels from {values.min()} to {values.max()}; they must be in 0..255")
    shape = shape or (tuple(nested) if len(nested) > 1 else _square(nested[0], place))
    shape = (1, *shape) if len(shape) == 2 else shape
    if len(shape) != 3 or min(shape) < 1 or math.prod(shape) != math.prod(nested) or not {shape[0], shape[2]} & {1, 3}:
        lengths = " x ".join(map(str, nested))
        raise InputError(
            f"{place}: lists of {lengths} pixels cannot be images of shape {list(shape)}; data.shape must be [C, H, W] "
            "or [H, W, C] with C = 1 or 3"
        )
    images = values.astype(np.uint8, copy=False).reshape(count, *shape)
    return images if shape[0] in (1, 3) else images.transpose(0, 3, 1, 2)


def _inputs(files: Files, count: int, data: Data, train: Samples | None, place: Locate) -> tuple[np.ndarray, int]:
    """The rows' images, tokens or vectors, and the vocabulary of tokens; 0 of others."""

    def blocks(name: str) -> Iterator[pa.Array]:
        return (block for _, _, block in _chunks(files, name))

    if data.features:
        return read_vectors({name: blocks(name) for name in data.features}, place), 0
    if name := data.tokens or data.text:
        return read_tokens(blocks(name), data, train, place)
    return _images(files, count, data), 0


def _images(files: Files, count: int, data: Data) -> np.ndarray:
    path, first = next(iter(files.items()))
    kind = first.schema_arrow.field(data.image).type
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if is_list(kind):
        blocks = (pixels(column, tuple(data.shape), place) for _, place, column in _chunks(files, data.image))
        return np.ascontiguousarray(gather(blocks, count))
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if types.is_binary(kind) or types.is_large_binary(kind):
        groups = (file.metadata.row_group(i) for file in files.values() for i in range(file.metadata.num_row_groups))
        large = sum(group.total_byte_size for group in groups) > SMALL * count
        return decode_all(_encoded(files, data.image), count, data.size, threads=large)
    images = "images are encoded bytes, {bytes, path} structs or lists of pixels"
    raise InputError(f"{path}: column '{data.image}' is of type {kind}; {images}")


def _encoded(files: Files, image: str) -> Iterator[Encoded]:
    for start, place, column in _chunks(files, image):
        values = pc.struct_field(column, "bytes") if types.is_struct(column.type) else column
        for row, value in enumerate(values, start):
            yield f"{place.partition(', rows ')[0]}, row {row}", value.as_py


def _chunks(files: Files, name: str) -> Iterator[tuple[int, str, pa.Array]]:
    """A column some rows at a time: the first row in its file, the rows' place for messages, the values."""
    for path, file in files.items():
        start = 0
        with _readable(path):
            for batch in file.iter_batches(_rows(file, name), columns=[name]):
                if len(batch):
                    yield start, f"{path}, rows {start} to {start + len(batch) - 1}", batch.column(0)
                start += len(batch)


def _rows(file: pq.ParquetFile, name: str) -> int:
    """Rows of a column to read at a time: fewer where each of them has many values."""
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    values = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] == name)
    per_row = max(1, values // max(1, file.metadata.num_rows))
    return max(1, min(ROWS, VALUES // per_row))


def _open(fs: pafs.FileSystem, path: str, data: Data, names: list[str]) -> pq.ParquetFile:
    with _readable(path):
        source = fs.open_input_file(path)
        file = pq.ParquetFile(source)
    schema = file.schema_arrow
    for name in [*data.columns, *names]:
        if name not in schema.names:
            near = nearest(name, schema.names, 0.6)
            hint = f"; did you mean '{near}'?" if near else ""
            keys = f"(data.{data.in_place_of_images or 'image'}, data.label, data.client, data.domain)"
            raise InputError(f"{path}: no column '{name}'; it has {shortened(schema.names, 30)} {keys}{hint}")
        many = schema.names.count(name)
        if many > 1:
            raise InputError(f"{path}: {many} columns have the name '{name}'; give each a name of its own")
    texts = [name for name in names if types.is_dictionary(_kind(schema.field(name).type))]
    return pq.ParquetFile(source, metadata=file.metadata, pre_buffer=True, read_dictionary=texts)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise InputError(f"{path}: cannot be read as a Parquet file ({' '.join(str(error).split())})") from None


def _column(files: Files, name: str, place: Locate) -> pa.ChunkedArray:
    """One column of all files, names as dictionaries; missing values are refused."""
    parts = []
    for path, file in files.items():
        with _readable(path):
            part = file.read(columns=[name]).column(0)
            parts.append(part.cast(_kind(part.type)))
        try:
            parts[-1].validate(full=True)
        except pa.ArrowInvalid:
            raise InputError(f"{path}: column '{name}' has text that is not UTF-8; write it as UTF-8") from None
    if any(part.type != parts[0].type for part in parts):
        raise InputError(f"column '{name}' has different types in {next(iter(files))} and in the other files")
    column = pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)
    if column.null_count:
        raise InputError(f"{place(_first(pc.is_null(column)))}: no value in column '{name}'")
    return column


def _kind(kind: pa.DataType) -> pa.DataType:
    """The type in which a column is read: dictionaries of text, and the values of other dictionaries."""
    value = kind.value_type if types.is_dictionary(kind) else kind
    return pa.dictionary(pa.int32(), pa.string()) if types.is_string(value) or types.is_large_string(value) else value


def _first(flags: pa.ChunkedArray) -> int:
    return int(np.flatnonzero(flags.to_numpy())[0])


def _square(length: int, place: str) -> tuple[int, int, int]:
    for channels in (1, 3):
        side = math.isqrt(length // channels)
        if channels * side * side == length:
            return channels, side, side
    raise InputError(f"{place}: {length} pixels make no square image; give data.shape = [C, H, W]")
