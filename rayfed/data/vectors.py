"""Columns of numbers as vectors of features.

Shapes: `N` examples, `D` features.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayfed.base.errors import InputError
from rayfed.data.tokens import Locate, is_list, refuse_missing


def read_vectors(columns: Mapping[str, Iterable[pa.Array]], place: Locate) -> np.ndarray:
    """Columns, each of numbers or of lists of numbers, side by side: (N, D), float32 where that holds them, or float64.

    Raises `InputError`, with the row, for anything else, and for a value that is missing, NaN or infinite.
    """
    side_by_side = np.concatenate([_read(name, blocks, place) for name, blocks in columns.items()], axis=1)
    return np.ascontiguousarray(side_by_side, np.result_type(side_by_side, np.float32))


def _read(name: str, blocks: Iterable[pa.Array], place: Locate) -> np.ndarray:
    """A column, (N, 1), or (N, n) where it has lists of n numbers."""
    found: list[np.ndarray] = []
    start = 0
    for block in blocks:
        values = refuse_missing(block, name, start, place)
        if is_list(block.type):
            sizes = pc.list_value_length(block).to_numpy(zero_copy_only=False)
            width = found[0].shape[1] if found else int(sizes[0])
            if len(other := np.flatnonzero((sizes != width) | (sizes == 0))):
                what = f"a list of {sizes[other[0]]} numbers in column '{name}', where the first has {width}"
                raise InputError(f"{place(start + int(other[0]))}: {what}; all lists need one length, 1 or more")
            values = pc.list_flatten(block)
        kind = values.type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            what = f"column '{name}' is of type {block.type}; features are numbers, or lists of numbers"
            raise InputError(f"{place(start)}: {what}; write categories as columns of 0 and 1")
        numbers = values.to_numpy(zero_copy_only=False).reshape(len(block), -1)
        if len(bad := np.argwhere(~np.isfinite(numbers))):
            row, column = bad[0]
            what = f"{numbers[row, column]} in column '{name}'; put a number there, or leave out the row or the column"
            raise InputError(f"{place(start + int(row))}: {what}")
        if found and numbers.shape[1] != found[0].shape[1]:
            raise InputError(f"{place(start)}: a number in column '{name}', where the first file has lists; give lists")
        found.append(numbers)
        start += len(block)
    return np.concatenate(found)
