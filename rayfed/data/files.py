"""Data sets in files, on any file system that pyarrow reaches: which files there are, and which split each belongs to.

A folder is split by the names in it: `train/...` and `test/...`, or `train-00000.parquet` and `test.parquet`; `val`,
`valid` and `validation` stand in for `test`. Without such names everything in the folder is one set.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pyarrow import fs as pafs

from rayfed.data.decode import SUFFIXES
from rayfed.data.folders import read_tree
from rayfed.data.parquet import read_parquet
from rayfed.data.samples import Samples
from rayfed.storage import locate, reach
from rayfed.values import InputError

if TYPE_CHECKING:
    from rayfed.data.sources import Source

PARQUET = (".parquet", ".pq")
SPLIT = re.compile(r"(train|test|val)(?:id|idation)?(?=[-_./])")


def exists(path: str) -> bool:
    """Whether there is a file or a folder at a local path or URI."""
    fs, place = locate(path)
    return reach(path, lambda: fs.get_file_info(place)).type != pafs.FileType.NotFound


def read_files(source: Source) -> tuple[Samples, Samples | None]:
    """The training set and, if there is one, the test set that `source.source` and `source.test` name."""
    fs, splits = find_splits(source.source)
    train = _read(fs, splits.get("train") or splits[""], source, None)
    if source.test:
        if not exists(source.test):
            raise InputError(f"data.test = '{source.test}': no such file or folder")
        fs, splits = find_splits(source.test)
    held = splits.get("test") or splits.get("val") or (splits[""] if source.test else None)
    return train, _read(fs, held, source, train) if held else None


def find_splits(path: str) -> tuple[pafs.FileSystem, dict[str, list[str]]]:
    """The files at or below `path` by split (`train`, `test`, `val`); or all of them under "", if it has none."""
    fs, root = locate(path)
    files = reach(path, lambda: _list(fs, root))
    splits = defaultdict(list)
    for file in files:
        match = SPLIT.match(file[len(root) :].lstrip("/"))
        splits[match[1] if match else ""].append(file)
    return fs, splits if "train" in splits and "" not in splits else {"": files}


def _list(fs: pafs.FileSystem, root: str) -> list[str]:
    """The Parquet files at or below `root`, or the images if there are none; sorted, hidden ones left out."""
    if fs.get_file_info(root).type == pafs.FileType.File:
        return [root]
    if isinstance(fs, pafs.LocalFileSystem):
        found: Iterable[str] = _walk(root)
    else:
        found = (info.path for info in fs.get_file_info(pafs.FileSelector(root, recursive=True)) if info.is_file)
    visible = sorted(file for file in found if not os.path.basename(file).startswith((".", "_")))
    for suffixes in (PARQUET, SUFFIXES):
        if files := [file for file in visible if file.lower().endswith(suffixes)]:
            return files
    raise InputError(f"'{root}': neither Parquet files ({', '.join(PARQUET)}) nor images ({', '.join(SUFFIXES)}) in it")


def _walk(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """The files below a local folder, through links too; arrow would follow links in circles, for hours."""
    real = os.path.realpath(folder)
    if real in above:
        raise InputError(f"'{folder}': this link leads to a folder that it lies in")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, (*above, real))
            elif entry.is_file():  # no pipes, no devices
                yield entry.path


def _read(fs: pafs.FileSystem, files: list[str], source: Source, train: Samples | None) -> Samples:
    """One split; a test set is read with the classes of its training set."""
    if files[0].lower().endswith(SUFFIXES):
        return read_tree(fs, files, bool(source.client), source.size, train)
    return read_parquet(fs, files, source, train)
