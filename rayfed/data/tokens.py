"""A column of token numbers, or of text, as lists of one length.

Shapes: `N` examples, `L` tokens of each after cutting and padding.
"""

import logging
import re
import zlib
from collections.abc import Callable, Iterable
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
    name, lengths, found, start = data.tokens or data.text, [], [], 0
    for block in blocks:
        refuse_missing(block, name, start, place)
        numbers = _words(block, name, data.vocabulary, place(start)) if data.text else _lists(block, name, place(start))
        lengths.append(pc.list_value_length(numbers).to_numpy(zero_copy_only=False).astype(np.int64))
        found.append(pc.list_flatten(numbers).to_numpy(zero_copy_only=False).astype(np.int64, copy=False))
        start += len(block)
    sizes, values = np.concatenate(lengths), np.concatenate(found)
    rows = np.repeat(np.arange(len(sizes)), sizes)
    vocabulary = data.vocabulary or (train.vocabulary if train else int(values.max(initial=PADDING)) + 1)
    if len(wrong := np.flatnonzero((values < 0) | (values >= vocabulary))):
        whose = "data.vocabulary" if data.vocabulary else "the training set's largest number, plus 1"
        largest = int(values.max())
        enough = f"; with data.vocabulary = {largest + 1} there is room for all" if largest >= vocabulary else ""
        text = f"token {values[wrong[0]]} in column '{name}'; tokens are from 0 to {vocabulary - 1} ({whose}){enough}"
        raise InputError(f"{place(int(rows[wrong[0]]))}: {text}")
    length = train.shape[0] if train else data.length or max(1, int(sizes.max()))
    out = np.full((len(sizes), length), PADDING)
    at = np.arange(len(values)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # in its list
    out[rows[at < length], at[at < length]] = values[at < length]
    if not train and (inner := int(((out[:, :-1] == PADDING) & (out[:, 1:] != PADDING)).any(axis=1).sum())):
        log.warning(
            "column '%s': in %d lists, token 0 stands before other tokens; 0 is padding and counts as no token, so "
            "number the tokens from 1 if 0 is one of them",
            *(name, inner),
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
        of_text = types.is_string(block.type) or types.is_large_string(block.type) or types.is_dictionary(block.type)
        rather = f"; data.text = '{name}' makes tokens of the words of text" if of_text else ""
        what = f"column '{name}' is of type {block.type}; tokens are lists of whole numbers{rather}"
        raise InputError(f"{place}: {what}")
    return block


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
