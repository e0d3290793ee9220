"""Parquet files as one table, read column by column, some rows at a time.

Each row has a place, for messages. Other tools' forms of a type (dictionaries, views, extensions,
large types) are read as the usual form of the type.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
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

# That many rows are read at a time.
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
        """Open the files.

        Raises InputError if a file cannot be read, or lacks one of the `columns`, which the job's
        `keys` name.
        """
        self.fs = fs
        self._files = {path: _open(fs, path) for path in paths}
        self._first_path = paths[0]
        self.schema = self._files[self._first_path].schema_arrow
        for path, file in self._files.items():
            for name in columns:
                _refuse_absent(path, file.schema_arrow.names, name, keys)
        self._kinds = {name: self._common(name) for name in columns}
        self._ends = np.cumsum([file.metadata.num_rows for file in self._files.values()])
        if not len(self):
            raise InputError(f"{self._first_path}: it has no rows")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def file(self, row: int) -> str:
        """Return the file of a row."""
        index = int(np.searchsorted(self._ends, row, side="right"))
        return list(self._files)[index]

    def place(self, row: int) -> str:
        """Return the file of a row, and the row's number there."""
        index = int(np.searchsorted(self._ends, row, side="right"))
        start = self._ends[index - 1] if index else 0
        return f"{self.file(row)}, row {row - start}"

    def kind(self, name: str) -> pa.DataType:
        """Return the type of a column's values, which holds the values of all files."""
        return self._kinds[name]

    def _common(self, name: str) -> pa.DataType:
        """Return the type that holds a column's values of all files.

        Raises InputError if there is none.
        """
        first_kind = _plain(self.schema.field(name).type)
        common = first_kind
        for path, file in self._files.items():
            kind = _plain(file.schema_arrow.field(name).type)
            common = _joint(common, kind)
            if common is None:
                raise InputError(
                    f"column '{name}' is of type {first_kind} in {self._first_path}, and of type "
                    f"{kind} in {path}; write it with one type in all files"
                )
        return common

    def column(self, name: str) -> pa.Array:
        """Return a complete column, as `blocks` gives it."""
        return pa.concat_arrays(list(self.blocks(name)))

    def blocks(self, name: str) -> Iterator[pa.Array]:
        """Yield a column some rows at a time.

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
        """Return a batch's only column, with the type of the complete column."""
        column = batch.column(0)
        # Arrow's cast of list views would make lists whose last offset is missing.
        if "list_view" in str(column.type):
            return pa.array(column.to_pylist(), self.kind(name))
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return column.cast(self.kind(name))

    def _checked(self, block: pa.Array, name: str, start: int) -> pa.Array:
        """Return a block of the column, which begins with row `start`.

        Raises InputError for text that is not UTF-8, and for a value that is missing.
        """
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
    """Return a column's values, numbered in their sorted order, int64 (N,), and the values.

    Each value is unpacked once.

    >>> numbers, values = coded(pa.array(["dog", "cat", "dog"]))
    >>> numbers.tolist(), values
    ([1, 0, 1], ['cat', 'dog'])
    """
    encoded = column.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    order = sorted(range(len(values)), key=values.__getitem__)
    return np.argsort(order)[encoded.indices], [values[index] for index in order]


def is_list(kind: pa.DataType) -> bool:
    """Say whether a type is a list of values."""
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    """Say whether a type is text."""
    return types.is_string(kind) or types.is_large_string(kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the usual form of a type: without dictionaries, extensions and views.

    Types within lists and structs get their usual form too.

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


def _joint(kind: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the smallest type that holds the values of both, or None if there is none.

    An example is int64 for int32 and int64.
    """
    if kind == second:
        return kind
    # Arrow would take text for bytes.
    if is_text(kind) != is_text(second):
        return None
    schemas = [pa.schema([("column", kind)]), pa.schema([("column", second)])]
    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException:
        return None
    return schema.field("column").type


def _open(fs: pafs.FileSystem, path: str) -> pq.ParquetFile:
    """Open a Parquet file; raise InputError if it cannot be read."""
    with _readable(path, fs):
        return pq.ParquetFile(open_file(fs, path), pre_buffer=True)


def _refuse_absent(path: str, names: Sequence[str], name: str, keys: str) -> None:
    """Raise InputError if a file has no column with this name, or several."""
    count = names.count(name)
    if count > 1:
        raise InputError(
            f"{path}: {count} columns have the name '{name}'; give each a name of its own"
        )
    if not count:
        similar = nearest(name, names, 0.6)
        hint = f"; did you mean '{similar}'?" if similar else ""
        raise InputError(f"{path}: no column '{name}'; it has {shortened(names, 30)} {keys}{hint}")


@contextlib.contextmanager
def _readable(path: str, fs: pafs.FileSystem) -> Iterator[None]:
    """Raise InputError, with the cause, if a Parquet file cannot be read in the context."""
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError) as error:
        start = _first_bytes(fs, path)
        kind = "" if start is None else what_it_is(start)
        if kind:
            raise InputError(f"{path}: cannot be read as a Parquet file; it is {kind}") from None
        if path.lower().endswith(".csv"):
            raise InputError(f"{path}: it is a CSV file; {_conversion(path)}") from None
        advice = "" if path.lower().endswith(PARQUET) else f"; {CONVERT}"
        if start and start.startswith(b"PAR1"):
            advice = CUT
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read as a Parquet file ({reason}){advice}") from None


def _conversion(path: str) -> str:
    """Return the command that makes a Parquet file from a CSV file, in the current folder.

    >>> print(_conversion("/data/people.csv"))
    rayfed reads Parquet. Convert it once:
      python -c "import pyarrow.csv as c, pyarrow.parquet as p; \
p.write_table(c.read_csv('/data/people.csv'), 'people.parquet')"
    """
    if re.search(r"['\"\\\\$`]", path):
        # A shell or Python would read it in another way.
        return CONVERT
    made = f"{PurePosixPath(path).stem}.parquet"
    return (
        "rayfed reads Parquet. Convert it once:\n"
        '  python -c "import pyarrow.csv as c, pyarrow.parquet as p; '
        f"p.write_table(c.read_csv('{path}'), '{made}')\""
    )


def _first_bytes(fs: pafs.FileSystem, path: str) -> bytes | None:
    """Return the first bytes of a file, which tell what it is; None if it cannot be read at all."""
    try:
        return read_file(fs, path, limit=FIRST)
    except (pa.ArrowException, OSError):
        return None
