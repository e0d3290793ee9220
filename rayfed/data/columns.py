"""Columns of token numbers or of text as lists of one length, and columns of numbers as vectors of features.

Shapes: `N` examples, `L` tokens of each after cutting and padding, `D` features.
"""

import logging
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayfed.base.errors import InputError
from rayfed.data.samples import PADDING, Samples
from rayfed.data.settings import Data

log = logging.getLogger(__name__)
WORD = re.compile(r"\w+")
Locate = Callable[[int], str]  # the file and row of the n-th row of all files, for messages


def read_tokens(blocks: Iterable[pa.Array], data: Data, train: Samples | None, place: Locate) -> tuple[np.ndarray, int]:
    """A column as int64 (N, L), and its vocabulary. Raises `InputError`, with the row.

    A test set has the length and the vocabulary of `train`. Token 0 pads; in text, no word has it.
    """
    name = data.tokens or data.text
    sizes_of_blocks, values_of_blocks = [], []
    start = 0
    for block in blocks:
        refuse_missing(block, name, start, place)
        lists = _words(block, name, data.vocabulary, place(start)) if data.text else _lists(block, name, place(start))
        sizes_of_blocks.append(pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64))
        values_of_blocks.append(pc.list_flatten(lists).to_numpy(zero_copy_only=False).astype(np.int64, copy=False))
        start += len(block)
    sizes, values = np.concatenate(sizes_of_blocks), np.concatenate(values_of_blocks)
    rows = np.repeat(np.arange(len(sizes)), sizes)  # the row of each value
    vocabulary = data.vocabulary or (train.vocabulary if train else int(values.max(initial=PADDING)) + 1)
    wrong = np.flatnonzero((values < 0) | (values >= vocabulary))
    if len(wrong):
        token, row = values[wrong[0]], int(rows[wrong[0]])
        limit = "data.vocabulary" if data.vocabulary else "the training set's largest number, plus 1"
        largest = int(values.max())
        hint = f"; with data.vocabulary = {largest + 1} there is room for all" if largest >= vocabulary else ""
        raise InputError(
            f"{place(row)}: token {token} in column '{name}'; tokens are from 0 to {vocabulary - 1} ({limit}){hint}"
        )
    length = train.shape[0] if train else data.length or max(1, int(sizes.max()))
    out = np.full((len(sizes), length), PADDING)
    position = np.arange(len(values)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each value in its list
    kept = position < length
    out[rows[kept], position[kept]] = values[kept]
    inner = int(((out[:, :-1] == PADDING) & (out[:, 1:] != PADDING)).any(axis=1).sum())
    if inner and not train:
        log.warning(
            "column '%s': in %d lists, token 0 stands before other tokens; 0 is padding and counts as no token, so "
            "number the tokens from 1 if 0 is one of them",
            name,
            inner,
        )
    return out, vocabulary


def number_of(word: str, vocabulary: int) -> int:
    """The token number of a word, 1 to `vocabulary` - 1: the same in every process and on every machine.

    >>> number_of("goal", 20_000)
    8686
    """
    return zlib.crc32(word.encode()) % (vocabulary - 1) + 1


def _words(block: pa.Array, name: str, vocabulary: int, place: str) -> pa.Array:
    """The numbers of the words of each text: runs of letters and digits, in lower case."""
    kind = block.type.value_type if types.is_dictionary(block.type) else block.type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise InputError(f"{place}: column '{name}' is of type {kind}; data.text names a column of text")
    number = cache(lambda word: number_of(word, vocabulary))
    try:
        texts = block.to_pylist()
    except UnicodeDecodeError:
        raise InputError(f"{place}: column '{name}' has text that is not UTF-8; write it as UTF-8") from None
    lists = [[number(word) for word in WORD.findall(text.lower())] for text in texts]
    return pa.array(lists, pa.list_(pa.int64()))


def _lists(block: pa.Array, name: str, place: str) -> pa.Array:
    """The lists of numbers as they are, checked."""
    if not is_list(block.type) or not types.is_integer(block.type.value_type):
        is_text = types.is_string(block.type) or types.is_large_string(block.type) or types.is_dictionary(block.type)
        hint = f"; data.text = '{name}' makes tokens of the words of text" if is_text else ""
        raise InputError(f"{place}: column '{name}' is of type {block.type}; tokens are lists of whole numbers{hint}")
    return block


def read_vectors(columns: Mapping[str, Iterable[pa.Array]], place: Locate) -> np.ndarray:
    """Columns, each of numbers or of lists of numbers, side by side: (N, D), float32 where that holds them, or float64.

    Raises `InputError`, with the row, for anything else, and for a value that is missing, NaN or infinite.
    """
    side_by_side = np.concatenate([_numbers(name, blocks, place) for name, blocks in columns.items()], axis=1)
    return np.ascontiguousarray(side_by_side, np.result_type(side_by_side, np.float32))


def _numbers(name: str, blocks: Iterable[pa.Array], place: Locate) -> np.ndarray:
    """A column, (N, 1), or (N, n) where it has lists of n numbers."""
    read: list[np.ndarray] = []
    start = 0
    for block in blocks:
        values = refuse_missing(block, name, start, place)
        if is_list(block.type):
            sizes = pc.list_value_length(block).to_numpy(zero_copy_only=False)
            width = read[0].shape[1] if read else int(sizes[0])
            other = np.flatnonzero((sizes != width) | (sizes == 0))
            if len(other):
                raise InputError(
                    f"{place(start + int(other[0]))}: a list of {sizes[other[0]]} numbers in column '{name}', where "
                    f"the first has {width}; all lists need one length, 1 or more"
                )
            values = pc.list_flatten(block)
        kind = values.type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            raise InputError(
                f"{place(start)}: column '{name}' is of type {block.type}; features are numbers, or lists of numbers; "
                "write categories as columns of 0 and 1"
            )
        numbers = values.to_numpy(zero_copy_only=False).reshape(len(block), -1)
        wrong = np.argwhere(~np.isfinite(numbers))
        if len(wrong):
            row, column = wrong[0]
            raise InputError(
                f"{place(start + int(row))}: {numbers[row, column]} in column '{name}'; put a number there, or leave "
                "out the row or the column"
            )
        if read and numbers.shape[1] != read[0].shape[1]:
            raise InputError(f"{place(start)}: a number in column '{name}', where the first file has lists; give lists")
        read.append(numbers)
        start += len(block)
    return np.concatenate(read)


def refuse_missing(block: pa.Array, name: str, start: int, place: Locate) -> pa.Array:
    """The block; raises `InputError` for a row without a value, or with a list that lacks one."""
    missing = np.flatnonzero(block.is_null().to_numpy(zero_copy_only=False))
    if not len(missing) and is_list(block.type) and (values := pc.list_flatten(block)).null_count:
        first = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[:1]
        missing = pc.list_parent_indices(block).to_numpy(zero_copy_only=False)[first]
    if len(missing):
        raise InputError(f"{place(start + int(missing[0]))}: no value in column '{name}'")
    return block


def is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
