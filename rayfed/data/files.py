"""Data sets in files: which files a path has, and the split of each file.

Names tell the split: `train/...` and `test/...`, or `train-00000.parquet` and `test.parquet`; `val`, `valid` and
`validation` stand in for `test`. Without such names, everything in the folder is one set.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pyarrow import fs as pafs

from rayfed.base.errors import InputError
from rayfed.base.storage import exists, locate, reach
from rayfed.data.decode import SUFFIXES
from rayfed.data.folders import read_tree
from rayfed.data.parquet import read_parquet
from rayfed.data.samples import Samples
from rayfed.data.settings import Data

PARQUET = (".parquet", ".pq")
SPLIT = re.compile(r"(train|test|val)(?:id|idation)?(?=[-_./])")


def read_files(data: Data) -> tuple[Samples, Samples | None]:
    """The training set and, if there is one, the test set, from `data.source` and `data.test`."""
    fs, splits = find_splits(data.source)
    files = splits.get("train") or splits[""]
    there = fs
    if data.test:
        if not exists(data.test):
            raise InputError(f"data.test = '{data.test}': no such file or folder")
        there, splits = find_splits(data.test)
    held = splits.get("test") or splits.get("val") or (splits[""] if data.test else None)
    # Domains are of test images, of which the training set has some only where part of it is held out.
    train = _read(fs, files, replace(data, domain="") if held else data, None)
    return train, _read(there, held, data, train) if held else None


def find_splits(path: str) -> tuple[pafs.FileSystem, dict[str, list[str]]]:
    """The files at or below `path` by split (`train`, `test`, `val`); or all under "", if it has no splits."""
    fs, root = locate(path)
    files = reach(path, lambda: _list(fs, root))
    splits = defaultdict(list)
    for file in files:
        match = SPLIT.match(file[len(root) :].lstrip("/"))
        splits[match[1] if match else ""].append(file)
    return fs, splits if "train" in splits and "" not in splits else {"": files}


def _list(fs: pafs.FileSystem, root: str) -> list[str]:
    """The Parquet files at or below `root`, or else the images; sorted, without hidden files."""
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
    """The files below a local folder, also through links. (Arrow's own walk follows links in circles, for hours.)"""
    real = os.path.realpath(folder)
    if real in above:
        raise InputError(f"'{folder}': this link leads to a folder above it")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, (*above, real))
            elif entry.is_file():  # no pipes, no devices
                yield entry.path


def _read(fs: pafs.FileSystem, files: list[str], data: Data, train: Samples | None) -> Samples:
    """One split. A test set is read with the classes of its training set."""
    if files[0].lower().endswith(SUFFIXES):
        if key := data.in_place_of_images:
            raise InputError(f"data.{key} names columns of Parquet files, and '{files[0]}' is an image")
        return read_tree(fs, files, data, train)
    return read_parquet(fs, files, data, train)
