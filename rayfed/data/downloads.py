"""The public sets that torchvision knows, from a folder where they already are, or downloaded into it.

torchvision is imported only here, and only when one of its sets is asked for: the import is slow, and actors never
need it.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.data.samples import Samples
from rayfed.values import InputError

TORCHVISION = {  # our name: torchvision's class
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "emnist": "EMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
IDX = {"mnist": tuple("0123456789"), "fashion-mnist": FASHION}  # sets of four idx files, read without torchvision


def read_download(name: str, root: str, split: str) -> tuple[Samples, Samples]:
    """Training and test set of one of torchvision's sets. Raises InputError if it can be had neither way."""
    folder = Path(root).expanduser()
    for place in (folder, folder / TORCHVISION[name] / "raw"):
        if name in IDX and all(_idx_path(place, stem) for part in ("train", "t10k") for stem in _stems(part)):
            return read_idx(place, "train", IDX[name]), read_idx(place, "t10k", IDX[name])
    options = {"split": split} if name == "emnist" else {}
    return _samples(_fetch(name, folder, options, train=True)), _samples(_fetch(name, folder, options, train=False))


def is_here(name: str, root: str) -> bool:
    """Whether a set lies in `root` where torchvision puts it; others than torchvision's are always here."""
    if name not in TORCHVISION:
        return True
    folders = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
    return (Path(root).expanduser() / folders.get(name, f"{TORCHVISION[name]}/raw")).is_dir()


def read_idx(folder: Path, part: str, classes: tuple[str, ...]) -> Samples:
    """The idx files of `part` (`train` or `t10k`) in `folder`, plain or gzipped, as samples of grey images."""
    images, labels = (_idx_array(_idx_path(folder, stem)) for stem in _stems(part))
    return Samples(images[:, None], labels.astype(np.int64), classes)


def _stems(part: str) -> tuple[str, str]:
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


def _idx_path(folder: Path, stem: str) -> Path | None:
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def _idx_array(path: Path | None) -> np.ndarray:
    """An idx file: two zero bytes, the type (8: bytes), the number of dimensions, each as four bytes, the values."""
    try:
        if path is None:
            raise ValueError("it is missing")
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        if data[:3] != b"\0\0\x08":
            raise ValueError("its first bytes are not 0, 0, 8")
        ends = 4 + 4 * data[3]
        return np.frombuffer(data, np.uint8, offset=ends).reshape(np.frombuffer(data[4:ends], ">i4")).copy()
    except (ValueError, OSError, EOFError, IndexError) as error:
        raise InputError(f"{path}: not a whole idx file of bytes ({error})") from None


def _fetch(name: str, folder: Path, options: dict[str, Any], *, train: bool) -> Any:
    """torchvision's data set object, from `folder` if it is there, else downloaded."""
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:
        raise InputError(f"data.source = '{name}': it needs torchvision, which cannot be imported ({error})") from None
    cls = TORCHVISION[name]
    try:
        return getattr(datasets, cls)(str(folder), train=train, download=False, **options)
    except RuntimeError:
        pass  # not there
    try:
        return getattr(datasets, cls)(str(folder), train=train, download=True, **options)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"data.source = '{name}': it is not in {folder}, and could not be downloaded ({reason}). Either run once "
            "where there is a network and bring that folder here, or set data.root to a folder that has the set "
            "(source = 'fashion-mnist-mini' needs neither)"
        ) from None


def _samples(dataset: Any) -> Samples:
    """torchvision's data set object as samples."""
    images = np.asarray(dataset.data)
    if type(dataset).__name__ == "EMNIST":
        images = images.swapaxes(1, 2)  # its files hold every image transposed
    images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    classes = tuple(name.split(" - ")[0] for name in dataset.classes)  # MNIST's are '0 - zero'
    return Samples(np.ascontiguousarray(images), np.asarray(dataset.targets, dtype=np.int64), classes)
