"""Data sets in files: which files a path has, the split of each file, and images in folders.

Names tell the split: `train/...` and `test/...`, or `train-00000.parquet` and `test.parquet`; `val`, `valid` and
`validation` stand in for `test`. Without such names, everything in the folder is one set.

An image's class is the folder that holds it, its client or domain the folder above that. Examples: `train/cat/1.png`
(CINIC-10) and `amazon/backpack/1.jpg` (Office-Caltech-10, whose clients are its domains).
"""

import functools
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from pyarrow import fs as pafs

from rayfed.base.errors import InputError
from rayfed.base.storage import exists, locate, reach
from rayfed.data.columns import read_parquet
from rayfed.data.decode import SUFFIXES, decode_all
from rayfed.data.parquet import PARQUET
from rayfed.data.samples import Samples, few_classes, shortened
from rayfed.data.settings import Data

SPLIT = re.compile(r"(train|test|val)(?:id|idation)?(?=[-_./])")


def read_files(data: Data) -> tuple[Samples, Samples | None]:
    """The training set and, if there is one, the test set, from `data.source` and `data.test`."""
    fs, splits = find_splits(data.source)
    files = splits.get("train") or splits[""]
    test_fs = fs
    if data.test:
        if not exists(data.test):
            raise InputError(f"data.test = '{data.test}': no such file or folder")
        test_fs, splits = find_splits(data.test)
    test_files = splits.get("test") or splits.get("val") or (splits[""] if data.test else None)
    if not test_files:
        return _read(fs, files, data, None), None
    train = _read(fs, files, replace(data, domain=""), None)  # domains are of test images
    return train, _read(test_fs, test_files, data, train)


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
        paths: Iterable[str] = _walk(root)
    else:
        paths = (
            info.path
            for info in fs.get_file_info(pafs.FileSelector(root, recursive=True))
            if info.is_file
        )
    visible = sorted(path for path in paths if not os.path.basename(path).startswith((".", "_")))
    for suffixes in (PARQUET, SUFFIXES):
        if files := [file for file in visible if file.lower().endswith(suffixes)]:
            return files
    raise InputError(
        f"'{root}': neither Parquet files ({', '.join(PARQUET)}) nor images ({', '.join(SUFFIXES)}) in it"
    )


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
            raise InputError(
                f"data.{key} names columns of Parquet files, and '{files[0]}' is an image"
            )
        return read_tree(fs, files, data, train)
    return read_parquet(fs, files, data, train)


def read_tree(fs: pafs.FileSystem, files: list[str], data: Data, train: Samples | None) -> Samples:
    """Image files as samples, with clients and domains if asked for. A test set's classes must be among `train`'s."""
    folders = [posixpath.dirname(file) for file in files]
    names = [posixpath.basename(folder) for folder in folders]
    classes = train.classes if train else tuple(sorted(set(names)))
    few_classes(len(classes), f"folders such as '{folders[0]}'")
    code = {name: label for label, name in enumerate(classes)}
    for file, name in zip(files, names, strict=True):
        if name not in code:
            raise InputError(
                f"{file}: its folder '{name}' is not one of the training set's classes ({shortened(classes)}); "
                "if another split is the labelled one, name its folder with data.test"
            )
    above = [posixpath.basename(posixpath.dirname(folder)) for folder in folders]
    groups, codes = np.unique(above, return_inverse=True)
    images = decode_all(
        (functools.partial(_bytes, fs, file) for file in files),
        len(files),
        files.__getitem__,
        data.size,
    )
    if len(classes) == 1 and not train:
        raise InputError(
            f"'{folders[0]}': all images lie in one folder, and so have one class, '{classes[0]}'; put the images of "
            "each class in a folder of its own, such as train/cat/1.png and train/dog/1.png"
        )
    labels = np.array([code[name] for name in names], dtype=np.int64)
    sorted_above = tuple(map(str, groups))
    samples = Samples(images, labels, classes)
    if data.client and not train:
        samples = replace(samples, groups=codes, group_names=sorted_above)
    return replace(samples, domains=codes, domain_names=sorted_above) if data.domain else samples


def _bytes(fs: pafs.FileSystem, path: str) -> bytes:
    with fs.open_input_file(path) as file:
        return file.read()
