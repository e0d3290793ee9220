"""The columns of Parquet files as samples: images or other inputs, labels, clients, domains.

Images are encoded bytes, `{bytes, path}` structs (as on the Hugging Face hub) or lists of pixels.
Labels are numbers from 0, or names. Class names come from the schema's metadata: `classes`,
separated by commas, or the hub's ClassLabel.

Shapes: `N` rows, `K` classes, `C` channels, `H` x `W` pixels, `L` tokens after cutting and padding,
`D` features.
"""

import json
import math
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs as pafs
from pyarrow import types

from rayfed.base.errors import InputError, told
from rayfed.base.storage import read_file
from rayfed.data.decode import Read, decode_all
from rayfed.data.labels import read_labels
from rayfed.data.parquet import Table, coded, is_list, is_text
from rayfed.data.samples import PADDING, Samples
from rayfed.data.settings import Data
from rayfed.data.texts import Texts
from rayfed.data.words import number_of, words_of

# The name of a client or a domain has at most that many characters.
LONGEST_NAME = 100


def read_parquet(
    fs: pafs.FileSystem, paths: list[str], data: Data, train: Samples | None
) -> Samples:
    """Return all rows of all files as samples.

    A test set is read with the classes of `train`. Raises InputError for anything wrong with the
    files, and names the place.
    """
    client = "" if train else data.client
    columns = list(data.columns)
    columns.append(data.label)
    columns.extend(filter(None, [client, data.domain]))
    keys = (
        f"(data.{data.in_place_of_images or 'image'}, data.label, data.partition.column, "
        "data.domain)"
    )
    table = Table(fs, paths, columns, keys)
    labels = read_labels(table, data.label, class_names(table.schema, data.label), train)
    inputs = _read_examples(table, data, train)
    groups, group_names = _read_groups(table, client) if client else (None, ())
    domains, domain_names = _read_groups(table, data.domain) if data.domain else (None, ())
    return Samples(
        examples=inputs.examples,
        labels=labels.numbers,
        classes=labels.classes,
        groups=groups,
        domains=domains,
        domain_names=domain_names,
        vocabulary=inputs.vocabulary,
        group_names=group_names,
        numbered=labels.numbered,
        lengths=inputs.lengths,
    )


def class_names(schema: pa.Schema, label: str) -> tuple[str, ...] | None:
    """Return the class names that a schema's metadata gives for the column `label`.

    They are in label order; None if there are none.

    >>> class_names(pa.schema([], metadata={"classes": "cat, dog"}), "label")
    ('cat', 'dog')
    """
    metadata = schema.metadata or {}
    if b"classes" in metadata:
        names = metadata[b"classes"].decode(errors="replace").split(",")
        return tuple(name.strip() for name in names)
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _read_groups(table: Table, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return a column of clients or domains as numbers, int64 (N,), and the sorted names.

    Raises InputError for a row without a name that can be shown.
    """
    column = table.column(name)
    if types.is_nested(column.type):
        raise InputError(
            f"{table.place(0)}: column '{name}' is of type {column.type}; a client, or a domain, "
            "is a number or a name"
        )
    missing = np.flatnonzero(pc.is_null(column, nan_is_null=True))
    if len(missing):
        raise InputError(
            f"{table.place(int(missing[0]))}: NaN in column '{name}'; give each row a number or a "
            "name"
        )
    codes, values = coded(column)
    names = tuple(map(str, values))
    for code, group in enumerate(names):
        # A name of U+200B alone, for example, is not visible.
        is_visible = any(map(str.isprintable, "".join(group.split())))
        if not is_visible or len(group.strip()) > LONGEST_NAME:
            place = table.place(int(np.argmax(codes == code)))
            raise InputError(
                f"{place}: {told(group)} in column '{name}'; a client, or a domain, has 1 to "
                f"{LONGEST_NAME} printable letters"
            )
    return codes, names


class Inputs(NamedTuple):
    """The examples that a model sees, one for each row."""

    examples: np.ndarray
    # Only tokens have a vocabulary.
    vocabulary: int = 0
    # Only tokens have lengths, int64 (N,), from before the lists are cut and padded.
    lengths: np.ndarray | None = None


def _read_examples(table: Table, data: Data, train: Samples | None) -> Inputs:
    """Return the rows' images, tokens or vectors."""
    if data.features:
        return Inputs(read_vectors(table, data.features))
    if data.tokens or data.text:
        return read_tokens(table, data, train)
    return Inputs(read_images(table, data))


def read_images(table: Table, data: Data) -> np.ndarray:
    """Return a column of images as uint8 (N, C, H, W).

    Raises InputError for a column of another type, and for an image that cannot be decoded.
    """
    name = data.image
    kind = table.kind(name)
    if is_list(kind):
        return _pixels(table, name, data.shape)
    is_struct = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    encoded = kind.field("bytes").type if is_struct else kind
    if is_struct and types.is_null(encoded):
        encoded = pa.binary()
    if not (types.is_binary(encoded) or types.is_large_binary(encoded)):
        paths = "; write paths as structs, {bytes: null, path: ...}" if is_text(kind) else ""
        raise InputError(
            f"{table.place(0)}: column '{name}' is of type {kind}; images are encoded bytes, "
            f"{{bytes, path}} structs or lists of pixels{paths}"
        )
    return decode_all(_encoded(table, name), len(table), table.place, data.size)


def _encoded(table: Table, name: str) -> Iterator[Read]:
    """Yield a function for each row, which returns the bytes of its image."""
    row = 0
    for block in table.blocks(name):
        if not types.is_struct(block.type):
            for value in block:
                yield value.as_py
            row += len(block)
            continue
        paths: Iterable[Any] = [None] * len(block)
        if block.type.get_field_index("path") >= 0:
            paths = pc.struct_field(block, "path")
        for value, path in zip(pc.struct_field(block, "bytes"), paths, strict=True):
            has_bytes = value.is_valid and len(value.as_buffer()) > 0
            has_path = path is not None and path.is_valid
            if has_path and not has_bytes:
                yield Beside(table, row, path.as_py()).read
            else:
                yield value.as_py
            row += 1


@dataclass(frozen=True)
class Beside:
    """An image of which a Parquet file has only the path."""

    table: Table
    row: int
    path: str

    def read(self) -> bytes:
        """Return the bytes of the image, whose path is seen from the folder of the Parquet file.

        Raises InputError if the image cannot be read.
        """
        folder = posixpath.dirname(self.table.file(self.row))
        place = posixpath.join(folder, self.path)
        try:
            return read_file(self.table.fs, place)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.table.place(self.row)}: no image bytes, only the path '{self.path}', which "
                f"cannot be read ({error}); copy the images to that place, or write their bytes "
                "into the column"
            ) from None


def _pixels(table: Table, name: str, shape: Sequence[int]) -> np.ndarray:
    """Return lists of pixels, flat or nested, as uint8 (N, C, H, W).

    Without a shape, they are grey squares. Raises InputError for lists that do not fit the shape,
    and for values that are no bytes.
    """
    column = table.column(name).flatten(recursive=True)
    values = column.to_numpy(zero_copy_only=False)
    side = math.isqrt(len(values) // len(table))
    shape = shape or [1, side, side]
    is_shape = len(shape) == 3 and min(shape) > 0 and bool({shape[0], shape[2]} & {1, 3})
    if not is_shape or len(values) != len(table) * math.prod(shape):
        raise InputError(
            f"{table.place(0)}: lists of {len(values) / len(table):g} pixels cannot be images of "
            f"shape {list(shape)}; data.shape must be [C, H, W] or [H, W, C] with C = 1 or 3"
        )
    if not types.is_integer(column.type) or values.min() < 0 or values.max() > 255:
        raise InputError(
            f"{table.place(0)}: pixels of type {column.type}, from {values.min():g} to "
            f"{values.max():g}; they must be whole numbers in 0..255{_way_to_bytes(values)}"
        )
    images = values.astype(np.uint8, copy=False).reshape(-1, *shape)
    if shape[0] not in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images)


def _way_to_bytes(values: np.ndarray) -> str:
    """Say how to make whole numbers in 0..255 of other pixels; '' if their values do not tell."""
    low, high = values.min(), values.max()
    if low >= 0 and high <= 1:
        return "; multiply by 255 and round"
    if low >= -1 and high <= 1:
        return "; add 1, multiply by 127.5 and round"
    if low >= 0 and high <= 255:
        return "; round them"
    if low >= -128 and high <= 127:
        return "; if they are signed bytes, add 128"
    return ""


def read_tokens(table: Table, data: Data, train: Samples | None) -> Inputs:
    """Return a column of tokens as int64 (N, L), its vocabulary, and the lengths of its lists.

    A test set has the length and the vocabulary of `train`. Token 0 pads; in text, no word has it.
    Raises `InputError`, with the row, for a column of another type and for a token that is too
    large.
    """
    name = data.tokens or data.text
    lists = pa.concat_arrays(_token_blocks(table, data, name))
    sizes = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    values = pc.list_flatten(lists).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    # The row of each value.
    rows = np.repeat(np.arange(len(sizes)), sizes)
    if data.vocabulary:
        vocabulary, limit = data.vocabulary, "data.vocabulary"
    else:
        vocabulary = train.vocabulary if train else int(values.max(initial=PADDING)) + 1
        limit = "the training set's largest number, plus 1"
    outside = np.flatnonzero((values < 0) | (values >= vocabulary))
    if len(outside):
        index = outside[0]
        raise InputError(
            f"{table.place(int(rows[index]))}: token {values[index]} in column '{name}'; tokens "
            f"are from 0 to {vocabulary - 1} ({limit})"
        )
    length = train.shape[0] if train else data.length or max(1, int(sizes.max()))
    examples = np.full((len(sizes), length), PADDING)
    # The position of each value in its list.
    positions = np.arange(len(values)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    fits = positions < length
    examples[rows[fits], positions[fits]] = values[fits]
    return Inputs(examples, vocabulary, sizes)


def _token_blocks(table: Table, data: Data, name: str) -> list[pa.Array]:
    """Return a column of tokens or text as blocks of lists of token numbers.

    Raises `InputError` for a column of another type.
    """
    kind = table.kind(name)
    if data.text and not is_text(kind):
        raise InputError(
            f"{table.place(0)}: column '{name}' is of type {kind}; data.text names a column of text"
        )
    if data.tokens and not (is_list(kind) and types.is_integer(kind.value_type)):
        raise InputError(
            f"{table.place(0)}: column '{name}' is of type {kind}; tokens are lists of whole "
            "numbers"
        )
    blocks = []
    texts = Texts(table.place(0), name)
    for block in table.blocks(name):
        if data.text:
            texts.count(block.to_pylist())
            block = _words(block, data.vocabulary)
        blocks.append(block)
    texts.tell()
    return blocks


def _words(block: pa.Array, vocabulary: int) -> pa.Array:
    """Return the token numbers of the words of each text."""

    @cache
    def number(word: str) -> int:
        return number_of(word, vocabulary)

    lists = []
    for text in block.to_pylist():
        lists.append([number(word) for word in words_of(text)])
    return pa.array(lists, pa.list_(pa.int64()))


def read_vectors(table: Table, names: Sequence[str]) -> np.ndarray:
    """Return columns of numbers, or of lists of numbers, side by side: (N, D).

    They are float32 if that holds the numbers, or float64. Raises `InputError`, with the row, for
    anything else, and for a value that is NaN or infinite.
    """
    side_by_side = np.concatenate([_numbers(table, name) for name in names], axis=1)
    return np.ascontiguousarray(side_by_side, np.result_type(side_by_side, np.float32))


def _numbers(table: Table, name: str) -> np.ndarray:
    """Return a column of numbers as (N, 1), or a column of lists of n numbers as (N, n).

    Raises `InputError` for lists of several lengths, and for what is no finite number.
    """
    column = values = table.column(name)
    if is_list(column.type):
        sizes = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        odd = np.flatnonzero((sizes != sizes[0]) | (sizes == 0))
        if len(odd):
            row = int(odd[0])
            raise InputError(
                f"{table.place(row)}: a list of {sizes[row]} numbers in column '{name}', where "
                f"the first has {sizes[0]}; all lists need one length, 1 or more"
            )
        values = pc.list_flatten(column)
    kind = values.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise InputError(
            f"{table.place(0)}: column '{name}' is of type {column.type}; features are numbers, or "
            "lists of numbers; write categories as columns of 0 and 1"
        )
    numbers = values.to_numpy(zero_copy_only=False).reshape(len(table), -1)
    not_finite = np.argwhere(~np.isfinite(numbers))
    if len(not_finite):
        row, position = not_finite[0]
        raise InputError(
            f"{table.place(int(row))}: {numbers[row, position]} in column '{name}'; put a number "
            "there, or leave out the row or the column"
        )
    return numbers
