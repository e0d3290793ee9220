"""Parquet files as one table, read column by column, some rows at a time. Each row has a place, for messages."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs as pafs
from pyarrow import types

from rayfed.base.errors import InputError, nearest
from rayfed.data.samples import shortened

ROWS = 2048  # rows read at a time
PARQUET = (".parquet", ".pq")
CONVERT = "rayfed reads Parquet and folders of images; pyarrow.csv.read_csv, pyarrow.parquet.write_table convert a CSV"


class Table:
    """The rows of all files, one file after the other."""

    def __init__(
        self, fs: pafs.FileSystem, paths: Sequence[str], columns: Sequence[str], keys: str
    ) -> None:
        """Raises InputError where a file cannot be read, or lacks one of the `columns`, which the job's `keys` name."""
        self._files = {path: _open(fs, path) for path in paths}
        self._first = paths[0]
        self.schema = self._files[self._first].schema_arrow
        for path, file in self._files.items():
            for name in columns:
                _refuse_absent(path, file.schema_arrow.names, name, keys)
                if _plain(file.schema_arrow.field(name).type) != self.kind(name):
                    raise InputError(
                        f"column '{name}' has different types in {self._first} and in {path}"
                    )
        self._ends = np.cumsum([file.metadata.num_rows for file in self._files.values()])
        if not len(self):
            raise InputError(f"{self._first}: it has no rows")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, row: int) -> str:
        """The file of a row, and its number there."""
        index = int(np.searchsorted(self._ends, row, side="right"))
        start = self._ends[index - 1] if index else 0
        return f"{list(self._files)[index]}, row {row - start}"

    def kind(self, name: str) -> pa.DataType:
        """The type of a column's values."""
        return _plain(self.schema.field(name).type)

    def column(self, name: str) -> pa.Array:
        """A whole column, as `blocks` gives it."""
        return pa.concat_arrays(list(self.blocks(name)))

    def blocks(self, name: str) -> Iterator[pa.Array]:
        """A column some rows at a time. Raises InputError for a row without a value, or with a list that lacks one."""
        start = 0
        for path, file in self._files.items():
            with _readable(path):
                for batch in file.iter_batches(ROWS, columns=[name]):
                    if len(batch):
                        yield self._checked(batch.column(0).cast(self.kind(name)), name, start)
                    start += len(batch)

    def _checked(self, block: pa.Array, name: str, start: int) -> pa.Array:
        try:
            block.validate(full=True)
        except pa.ArrowInvalid:
            raise InputError(
                f"{self.place(start)}: column '{name}' has text that is not UTF-8; write it as UTF-8"
            ) from None
        missing = np.flatnonzero(block.is_null().to_numpy(zero_copy_only=False))
        if not len(missing) and is_list(block.type):
            inner = np.flatnonzero(pc.list_flatten(block).is_null().to_numpy(zero_copy_only=False))
            missing = pc.list_parent_indices(block).to_numpy(zero_copy_only=False)[inner]
        if len(missing):
            raise InputError(f"{self.place(start + int(missing[0]))}: no value in column '{name}'")
        return block


def is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type without Arrow's dictionaries and extensions."""
    if types.is_dictionary(kind):
        return kind.value_type
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _open(fs: pafs.FileSystem, path: str) -> pq.ParquetFile:
    with _readable(path):
        return pq.ParquetFile(fs.open_input_file(path), pre_buffer=True)


def _refuse_absent(path: str, names: Sequence[str], name: str, keys: str) -> None:
    many = names.count(name)
    if many > 1:
        raise InputError(
            f"{path}: {many} columns have the name '{name}'; give each a name of its own"
        )
    if not many:
        near = nearest(name, names, 0.6)
        hint = f"; did you mean '{near}'?" if near else ""
        raise InputError(f"{path}: no column '{name}'; it has {shortened(names, 30)} {keys}{hint}")


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError) as error:
        rather = "" if path.lower().endswith(PARQUET) else f"; {CONVERT}"
        raise InputError(
            f"{path}: cannot be read as a Parquet file ({' '.join(str(error).split())}){rather}"
        ) from None
