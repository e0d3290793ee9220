"""Where images come from: the `[data]` table of a job, and `load`, which turns it into arrays.

A source is a known name (`SOURCES`) or the path or URI of a Parquet file, a folder of Parquet files or a tree of
image folders, on a local disk or on anything that pyarrow's file systems reach (s3://, gs://, hdfs://).

>>> data = load(Source("fashion-mnist-mini"))
>>> data.train.images.shape, data.train.images.dtype, data.test.images.shape
((10000, 1, 28, 28), dtype('uint8'), (2000, 1, 28, 28))
>>> data.train.classes[:3]
('T-shirt/top', 'Trouser', 'Pullover')
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from rayfed.data.decode import resize
from rayfed.data.downloads import read_download
from rayfed.data.files import exists, read_files
from rayfed.data.samples import Dataset, Samples, hold_out
from rayfed.values import Ge, InputError, Lt, did_you_mean

__all__ = ["SOURCES", "Dataset", "Samples", "Source", "load"]

AS_TUPLE = BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)  # TOML has only lists
MINI = "fashion-mnist-mini"
SOURCES = {
    MINI: "10,000 + 2,000 grey 28x28, 10 classes of clothing; MIT, Zalando SE; embedded in rayfed",
    "mnist": "60,000 + 10,000 grey 28x28, 10 digits; CC BY-SA 3.0; by torchvision, downloaded once (12 MB)",
    "fashion-mnist": "60,000 + 10,000 grey 28x28, 10 classes of clothing; MIT; by torchvision, downloaded once (31 MB)",
    "emnist": "112,800 + 18,800 grey 28x28, 47 digits and letters (balanced); by torchvision, downloaded once (562 MB)",
    "cifar10": "50,000 + 10,000 RGB 32x32, 10 classes of objects; by torchvision, downloaded once (170 MB)",
    "cifar100": "50,000 + 10,000 RGB 32x32, 100 classes of objects; by torchvision, downloaded once (169 MB)",
}
"""What `rayfed data` lists: the sources with a name, and a line about each."""


@dataclass(frozen=True)
class Source:
    """Which images, and how to read them. The fields from `test` on are for files; known sources need none."""

    source: Annotated[str, "a known name (`rayfed data` lists them), or a path or URI"] = MINI
    root: Annotated[str, "folder of the known sources that are downloaded"] = "~/.cache/rayfed/data"
    split: Annotated[
        Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"], "which split of emnist"
    ] = "balanced"
    auxiliary_per_class: Annotated[
        int, Ge(0), "training images of each class that the server keeps, even if the method asks for fewer"
    ] = 0
    size: Annotated[int, Ge(0), "scale and centre-crop all images to size x size pixels; 0 leaves them"] = 0
    test: Annotated[str, "path or URI of the test set, if it is not part of `source`"] = ""
    test_fraction: Annotated[float, Ge(0), Lt(1), "part of each class held out, if there is no test set"] = 0.0
    test_seed: Annotated[int, Ge(0), "seed of that choice"] = 0
    image: Annotated[str, "column of the images: encoded bytes, {bytes, path} structs or lists of pixels"] = "image"
    label: Annotated[str, "column of the labels: numbers from 0 or names"] = "label"
    client: Annotated[str, "column of the natural clients; in image trees, a name for the folders above classes"] = ""
    shape: Annotated[tuple[int, ...], AS_TUPLE, "shape of images stored as flat lists, [C, H, W] or [H, W, C]"] = ()


def load(source: Source) -> Dataset:
    """Read a source whole, as uint8 arrays. Raises InputError for anything wrong with it, with the place."""
    train: Samples
    test: Samples | None
    if source.test and source.source in SOURCES:
        raise InputError(f"data.test = '{source.test}': the source '{source.source}' has a test set of its own")
    if source.source == MINI:
        train, test = read_files(Source(str(Path(__file__).parent / "fashion_mnist_mini")))
    elif source.source in SOURCES:
        train, test = read_download(source.source, source.root, source.split)
    elif exists(source.source):
        train, test = read_files(source)
    elif any(mark in source.source for mark in "/\\."):
        raise InputError(f"data.source = '{source.source}': no such file or folder")
    else:
        raise InputError(
            f"data.source = '{source.source}': no such source or file{did_you_mean(source.source, SOURCES)}"
        )
    if source.client and train.groups is None:
        raise InputError(f"data.client = '{source.client}': the source '{source.source}' knows no clients")
    if source.test_fraction and test is not None:
        raise InputError(f"data.test_fraction = {source.test_fraction}: there is a test set already; set one of them")
    if test is not None:
        data = Dataset(train, test)
    elif source.test_fraction:
        data = hold_out(train, source.test_fraction, source.test_seed)
    else:
        raise InputError(
            f"data.source = '{source.source}': it has no test set; name one (data.test = \"path\") "
            "or hold out part of it (data.test_fraction = 0.1)"
        )
    return Dataset(_resized(data.train, source.size), _resized(data.test, source.size)) if source.size else data


def _resized(samples: Samples, size: int) -> Samples:
    return replace(samples, images=resize(samples.images, size))
