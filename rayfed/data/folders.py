"""A tree of image folders: an image's class is the folder that holds it, its client or domain the folder above that.

Examples: `train/cat/1.png` (CINIC-10), `train/n01443537/images/1.JPEG` (Tiny-ImageNet; a folder called `images` is
skipped) and `amazon/backpack/1.jpg` (Office-Caltech-10, whose clients are its domains).
"""

import functools
import posixpath

import numpy as np
from pyarrow import fs as pafs

from rayfed.base.errors import InputError, harmless
from rayfed.data.decode import decode_all
from rayfed.data.samples import Samples, few_classes, shortened
from rayfed.data.settings import Data

ANNOTATIONS = "val_annotations.txt"  # Tiny-ImageNet's classes of its `val` images, which lie in one folder


def read_tree(fs: pafs.FileSystem, files: list[str], data: Data, train: Samples | None) -> Samples:
    """Image files as samples, with clients and domains if asked for. A test set's classes must be among `train`'s."""
    folders = [posixpath.dirname(file).removesuffix("/images") for file in files]
    names = [harmless(posixpath.basename(folder)) for folder in folders]
    for folder in sorted(set(folders)):
        if notes := _annotations(fs, folder):
            names = [
                notes.get(posixpath.basename(file), name) if at == folder else name
                for file, name, at in zip(files, names, folders, strict=True)
            ]
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
    found, codes = np.unique(above, return_inverse=True)
    domains, domain_names = (codes, tuple(map(harmless, found))) if data.domain else (None, ())
    images = decode_all(((file, functools.partial(_bytes, fs, file)) for file in files), len(files), data.size)
    labels = np.array([code[name] for name in names], dtype=np.int64)
    return Samples(images, labels, classes, codes if data.client and not train else None, domains, domain_names)


def _annotations(fs: pafs.FileSystem, folder: str) -> dict[str, str]:
    """File name to class, from the lines `name <tab> class <tab> ...` of a folder's annotation file, if it has one."""
    path = posixpath.join(folder, ANNOTATIONS)
    if not fs.get_file_info(path).is_file:
        return {}
    rows = (line.split("\t") for line in _bytes(fs, path).decode(errors="replace").splitlines())
    return {row[0]: harmless(row[1]) for row in rows if len(row) > 1}


def _bytes(fs: pafs.FileSystem, path: str) -> bytes:
    with fs.open_input_file(path) as file:
        return file.read()
