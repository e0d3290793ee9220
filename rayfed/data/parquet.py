"""Parquet files as one table, read column by column, some rows at a time.

Each row has a place, for messages. Other tools' forms of a type (dictionaries, views, extensions,
large types) are read as its usual form.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs as pafs
from pyarrow import types

from rayfed.base.errors import InputError, nearest
from rayfed.base.storage import open_file, read_file
from rayfed.data.contents import FIRST, what_it_is
from rayfed.data.samples import shortened

# Rows read at a time.
ROWS = 2048
PARQUET = (".parquet", ".pq")
CUT = "; the file is damaged or was cut off: copy or download it again"
CONVERT = (
    "rayfed reads Parquet and folders of images; pyarrow.csv.read_csv, pyarrow.parquet.write_table "
    "convert a CSV"
)


class Table:
    """The rows of all files, one file after the other."""

    def __init__(
        self, fs: pafs.FileSystem, paths: Sequence[str], columns: Sequence[str], keys: str
    ) -> None:
        """Raises InputError where a file cannot be read, or lacks one of the `columns`, which the
        job's `keys` name.
        """
        self.fs = fs
        self._files = {path: _open(fs, path) for path in paths}
        self._first = paths[0]
        self.schema = self._files[self._first].schema_arrow
        for path, file in self._files.items():
            for name in columns:
                _refuse_absent(path, file.schema_arrow.names, name, keys)
        self._kinds = {name: self._common(name) for name in columns}
        self._ends = np.cumsum([file.metadata.num_rows for file in self._files.values()])
        if not len(self):
            raise InputError(f"{self._first}: it has no rows")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def file(self, row: int) -> str:
        """The file of a row."""
        index = int(np.searchsorted(self._ends, row, side="right"))
        return list(self._files)[index]

    def place(self, row: int) -> str:
        """The file of a row, and its number there."""
        index = int(np.searchsorted(self._ends, row, side="right"))
        start = self._ends[index - 1] if index else 0
        return f"{self.file(row)}, row {row - start}"

    def kind(self, name: str) -> pa.DataType:
        """The type of a column's values, which holds those of all files."""
        return self._kinds[name]

    def _common(self, name: str) -> pa.DataType:
        """The type that holds a column's values of all files.

        Raises InputError where there is none.
        """
        first = _plain(self.schema.field(name).type)
        common = first
        for path, file in self._files.items():
            other = _plain(file.schema_arrow.field(name).type)
            common = _joint(common, other)
            if common is None:
                raise InputError(
                    f"column '{name}' is of type {first} in {self._first}, and of type {other} in "
                    f"{path}; write it with one type in all files"
                )
        return common

    def column(self, name: str) -> pa.Array:
        """A whole column, as `blocks` gives it."""
        return pa.concat_arrays(list(self.blocks(name)))

    def blocks(self, name: str) -> Iterator[pa.Array]:
        """A column some rows at a time.

        Raises InputError for a row without a value, or with a list that lacks one.
        """
        start = 0
        for path, file in self._files.items():
            with _readable(path, self.fs):
                for batch in file.iter_batches(ROWS, columns=[name]):
                    if len(batch):
                        yield self._checked(self._plainly(batch, name), name, start)
                    start += len(batch)

    def _plainly(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """A batch's only column, with the type of the whole column."""
        column = batch.column(0)
        # Arrow's cast of list views makes lists whose last offset is missing.
        if "list_view" in str(column.type):
            return pa.array(column.to_pylist(), self.kind(name))
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return column.cast(self.kind(name))

    def _checked(self, block: pa.Array, name: str, start: int) -> pa.Array:
        try:
            block.validate(full=True)
        except pa.ArrowInvalid:
            raise InputError(
                f"{self.place(start)}: column '{name}' has text that is not UTF-8; write it as "
                "UTF-8"
            ) from None
        missing = np.flatnonzero(block.is_null().to_numpy(zero_copy_only=False))
        if not len(missing) and is_list(block.type):
            inner = np.flatnonzero(pc.list_flatten(block).is_null().to_numpy(zero_copy_only=False))
            missing = pc.list_parent_indices(block).to_numpy(zero_copy_only=False)[inner]
        if len(missing):
            raise InputError(f"{self.place(start + int(missing[0]))}: no value in column '{name}'")
        return block


def coded(column: pa.Array) -> tuple[np.ndarray, list[Any]]:
    """A column's values, numbered in their sorted order, int64 (N,), and the values.

    Each is unpacked once.
    """
    encoded = column.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    order = sorted(range(len(values)), key=values.__getitem__)
    return np.argsort(order)[encoded.indices], [values[index] for index in order]


def is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The usual form of a type: without dictionaries, extensions and views, also within lists and
    structs.

    >>> _plain(pa.list_view(pa.string_view())), _plain(pa.dictionary(pa.int8(), pa.large_string()))
    (ListType(list<item: string>), DataType(large_string))
    """
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    if types.is_list(kind) or types.is_list_view(kind):
        return pa.list_(_plain(kind.value_type))
    if types.is_large_list(kind) or types.is_large_list_view(kind):
        return pa.large_list(_plain(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind])
    return kind


def _joint(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The smallest type that holds the values of both, such as int64 of int32 and int64; None if
    there is none.
    """
    if one == other:
        return one
    # Arrow would take text for bytes.
    if is_text(one) != is_text(other):
        return None
    schemas = [pa.schema([("column", kind)]) for kind in (one, other)]
    try:
        both = pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException:
        return None
    return both.field("column").type


def _open(fs: pafs.FileSystem, path: str) -> pq.ParquetFile:
    with _readable(path, fs):
        return pq.ParquetFile(open_file(fs, path), pre_buffer=True)


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
def _readable(path: str, fs: pafs.FileSystem) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError) as error:
        start = _first_bytes(fs, path)
        found = "" if start is None else what_it_is(start)
        if found:
            raise InputError(f"{path}: cannot be read as a Parquet file; it is {found}") from None
        rather = "" if path.lower().endswith(PARQUET) else f"; {CONVERT}"
        if start and start.startswith(b"PAR1"):
            rather = CUT
        raise InputError(
            f"{path}: cannot be read as a Parquet file ({' '.join(str(error).split())}){rather}"
        ) from None


def _first_bytes(fs: pafs.FileSystem, path: str) -> bytes | None:
    """The first bytes of a file, which tell what it is; None if it cannot be read at all."""
    try:
        return read_file(fs, path, limit=FIRST)
    except (pa.ArrowException, OSError):
        return None
