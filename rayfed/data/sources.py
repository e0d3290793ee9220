"""The source of the images: `load` turns the [data] table of a job into arrays.

A source is a known name (`SOURCES`) or the path or URI of a Parquet file, a folder of Parquet files
or a tree of image folders, on a local disk, on any file system that pyarrow reaches (s3://, gs://,
hdfs://), or at the Hugging Face hub (hf://).

>>> data = load(Data("fashion-mnist-mini"))
>>> data.train.examples.shape, data.train.examples.dtype, data.test.examples.shape
((10000, 1, 28, 28), dtype('uint8'), (2000, 1, 28, 28))
>>> data.train.classes[:3]
('T-shirt/top', 'Trouser', 'Pullover')
"""

import logging
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
from PIL import Image

from rayfed.base.errors import InputError, did_you_mean, harmless
from rayfed.base.storage import exists
from rayfed.base.values import find
from rayfed.data.decode import resize
from rayfed.data.examine import examine
from rayfed.data.files import read_files
from rayfed.data.hub import HUB, fetch
from rayfed.data.labels import why_negative
from rayfed.data.partition import Natural
from rayfed.data.samples import Dataset, Samples, few_classes, hold_out, shortened
from rayfed.data.seen import as_seen, upright
from rayfed.data.settings import MINI, SOURCES, Augment, Data

# Torchvision's
NAMES = ("MNIST", "FashionMNIST", "EMNIST", "CIFAR10", "CIFAR100")
# By our name.
TORCHVISION = {name.replace("nM", "n-M").lower(): name for name in NAMES}
PAIR = (
    "it gives (train, test), test may be None, each a torch Dataset of PIL images or a pair (uint8 "
    "images, labels)"
)
# How to make uint8 of images from the lowest to the highest value.
SCALES = [
    ("(255 * images).round().astype('uint8')", 0, 1),
    ("((images + 1) * 127.5).round().astype('uint8')", -1, 1),
    ("images.round().astype('uint8')", 0, 255),
]
SIXTEEN_BITS = ("(images / 257).round().astype('uint8')", 0, 65535)

log = logging.getLogger(__name__)


class Kept:
    """Reads each source once, and keeps it: the runs of a grid share their data."""

    def __init__(self) -> None:
        self._kept: list[tuple[Data, Dataset]] = []

    def load(self, data: Data) -> Dataset:
        wanted = _what_is_read(data)
        for other, dataset in self._kept:
            if other == wanted:
                return dataset
        self._kept.append((wanted, load(data)))
        return self._kept[-1][1]


def _what_is_read(data: Data) -> Data:
    """The data without what does not change the arrays that are read."""
    return replace(data, partition=Natural(data.client), augment=Augment(), auxiliary_per_class=0)


def load(data: Data) -> Dataset:
    """Read a source whole, as uint8 arrays.

    Raises InputError for anything wrong with it, with the place.
    """
    train: Samples
    test: Samples | None
    if data.test and (data.module or (data.source in SOURCES and data.source not in HUB)):
        raise InputError(
            f"data.test = '{data.test}': the source '{data.source}' has a test set of its own"
        )
    if data.source == MINI:
        train, test = read_files(Data(str(Path(__file__).parent / "fashion_mnist_mini")))
    elif data.source in TORCHVISION:
        train, test = read_download(data.source, data.root, data.split)
    elif data.module:
        train, test = read_function(data)
    elif data.source in HUB or data.source.startswith("hf://") or exists(data.source):
        train, test = read_files(fetch(data))
    elif any(mark in data.source for mark in "/\\."):
        raise InputError(
            f"data.source = '{data.source}': no such file or folder; if the data lie elsewhere "
            "now, give the path: -s data.source=PATH"
        )
    else:
        raise InputError(
            f"data.source = '{data.source}': no such source or "
            f"file{did_you_mean(data.source, SOURCES)}"
        )
    if data.client and train.groups is None:
        raise InputError(
            f"data.partition.column = '{data.client}': the source '{data.source}' has no such "
            "column"
        )
    # A test set is left alone.
    if data.test_fraction:
        train, test = hold_out(train, data.test_fraction, data.test_seed)
    if test is None:
        ways = 'name a test set (data.test = "path"), or hold out a part (data.test_fraction = 0.1)'
        raise InputError(f"data.source = '{data.source}': it has no test set; {ways}")
    if data.domain and test.domains is None:
        raise InputError(
            f"data.domain = '{data.domain}': the source '{data.source}' has no such column"
        )
    dataset = Dataset(*_alike(_of_size(train, data.size), _of_size(test, data.size)))
    try:
        findings = examine(dataset)
    except InputError as error:
        raise InputError(f"data.source = '{data.source}': {error}") from None
    for finding in findings:
        log.log(finding.level, "data.source = '%s': %s", data.source, finding.message)
    return Dataset(_with_harmless_names(dataset.train), _with_harmless_names(dataset.test))


def _of_size(samples: Samples, size: int) -> Samples:
    """The samples with images of this size, or with 0 as they are."""
    return replace(samples, examples=resize(samples.examples, size)) if size else samples


def _with_harmless_names(samples: Samples) -> Samples:
    """The samples with names without control characters."""
    names = samples.classes, samples.domain_names, samples.group_names
    classes, domains, groups = (tuple(map(harmless, each)) for each in names)
    return replace(samples, classes=classes, domain_names=domains, group_names=groups)


def _alike(train: Samples, test: Samples) -> tuple[Samples, Samples]:
    """Both sets, in colour if one of them is: a grey one gets three equal channels."""
    return _as_colourful(train, test), _as_colourful(test, train)


def _as_colourful(samples: Samples, other: Samples) -> Samples:
    grey_among_colours = len(samples.shape) == len(other.shape) == 3 and (
        samples.shape[0] < other.shape[0]
    )
    if not grey_among_colours:
        return samples
    return replace(samples, examples=np.repeat(samples.examples, other.shape[0], axis=1))


def read_download(name: str, root: str, split: str) -> tuple[Samples, Samples]:
    """The training and the test set.

    Raises InputError if a set is neither in the folder nor can be downloaded.
    """
    folder = Path(root).expanduser()
    options = {"split": split} if name == "emnist" else {}
    return _samples(_fetch(name, folder, options, train=True)), _samples(
        _fetch(name, folder, options, train=False)
    )


def _fetch(name: str, folder: Path, options: dict[str, Any], *, train: bool) -> Any:
    """torchvision's data set object, from `folder` if it is there, else downloaded."""
    try:
        # Slow, and actors never need it.
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"data.source = '{name}': it needs torchvision, which cannot be imported ({error}); "
            "install the one that belongs to torch here, by its release and by CUDA or CPU"
        ) from None
    cls = getattr(datasets, TORCHVISION[name])
    for download in (False, True):
        try:
            return cls(str(folder), train=train, download=download, **options)
        except Exception as error:
            # Torchvision's readers raise nearly anything on damaged files.
            reason = " ".join(str(error).split()) or type(error).__name__
    raise InputError(
        f"data.source = '{name}': {folder} has no intact copy, and the download failed ({reason}). "
        "Either run once where there is a network and copy that folder here, or set data.root to a "
        "folder that has the set (source = 'fashion-mnist-mini' needs neither)"
    )


def _samples(dataset: Any) -> Samples:
    """torchvision's data set object as samples."""
    images = np.asarray(dataset.data)
    if type(dataset).__name__ == "EMNIST":
        # Its files hold every image transposed.
        images = images.swapaxes(1, 2)
    # MNIST's are '0 - zero'.
    classes = tuple(name.split(" - ")[0] for name in dataset.classes)
    return Samples(_with_channels(images), np.asarray(dataset.targets, dtype=np.int64), classes)


def _with_channels(images: np.ndarray) -> np.ndarray:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), C = 1 or 3, as (N, C, H, W)."""
    images = images[:, None] if images.ndim == 3 else images
    return np.ascontiguousarray(
        images if images.shape[1] in (1, 3) else images.transpose(0, 3, 1, 2)
    )


def read_function(data: Data) -> tuple[Samples, Samples | None]:
    """What a function of the user's gives. Raises `InputError`."""
    function: Any = find(data.source, {}, "data.source")
    try:
        made = function()
    except (Exception, SystemExit) as error:
        _, *users = extract_tb(error.__traceback__)
        at = "".join(f", line {frame.lineno} of '{frame.filename}'" for frame in users[:1])
        raise InputError(
            f"data.source = '{data.source}' fails{at}: {type(error).__name__}: {error}"
        ) from error
    try:
        for_training, for_test = made
        train = _of_user(for_training, None)
        return train, None if for_test is None else _of_user(for_test, train.classes)
    except Exception as error:
        why = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        raise InputError(f"data.source = '{data.source}': {why}; {PAIR}") from error


def _of_user(pair: Any, classes: tuple[str, ...] | None) -> Samples:
    """A data set of the user's; its labels must be those of the `classes`, if they are known."""
    images, labels = (
        pair if isinstance(pair, tuple) else zip(*(pair[i] for i in range(len(pair))), strict=True)
    )
    examples = _stacked(images)
    codes = _codes(np.asarray(labels), len(examples))
    named = getattr(pair, "classes", None)
    few_classes(codes.max() + 1, "it")
    own = (
        classes or tuple(map(str, range(codes.max() + 1)))
        if named is None
        else tuple(map(str, named))
    )
    if (classes and own != classes) or len(set(own)) < len(own):
        raise InputError(
            f"classes are {shortened(own)}; the test set's must be the training set's, each named "
            "once"
        )
    if codes.min() < 0 or codes.max() >= len(own):
        which = "test" if classes else "training"
        raise InputError(
            f"labels of the {which} set are {codes.min()} to {codes.max()}, and must be whole "
            f"numbers from 0, below the number of classes, {len(own)}{why_negative(codes)}"
        )
    return Samples(examples, codes.astype(np.int64), own)


def _array(image: Any) -> np.ndarray:
    """A user's image as an array; a Pillow image as one sees it, (H, W) or (H, W, 3)."""
    if not isinstance(image, Image.Image):
        return np.asarray(image)
    # Whoever made it RGB has decided on what its transparent parts show.
    is_plain = image.mode in ("L", "RGB")
    return np.asarray(upright(image) if is_plain else as_seen(image))


def _in_colour(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Images, of which the grey ones (H, W) become (H, W, 3) if others have that form."""
    if {array.ndim for array in arrays} != {2, 3}:
        return arrays
    return [
        np.repeat(array[:, :, None], 3, axis=2) if array.ndim == 2 else array for array in arrays
    ]


def _codes(labels: np.ndarray, count: int) -> np.ndarray:
    """A user's labels as whole numbers (count,).

    Raises InputError, with how to make them of other labels.
    """
    is_float = labels.dtype.kind == "f"
    is_whole = is_float and bool(np.isfinite(labels).all() and (labels == np.round(labels)).all())
    if labels.shape == (count,) and (labels.dtype.kind in "iub" or is_whole):
        return labels.astype(np.int64)
    way = ""
    if labels.shape == (count, 1):
        way = "; give labels.ravel()"
    elif labels.ndim == 2 and len(labels) == count:
        way = "; of lists of 0 and 1, give labels.argmax(axis=1)"
    elif labels.shape == (count,) and labels.dtype.kind in "US":
        # Numbered by its own names, a test set that lacks one would have other numbers.
        way = "; of names, give numpy.searchsorted(numpy.unique(labels_to_train_on), labels)"
    each = f"each of {count} images needs one, a whole number from 0{way}"
    raise InputError(f"labels are {labels.dtype} of shape {labels.shape}: {each}")


def _way_to_channels(shape: tuple[int, ...]) -> str:
    """How to make images with 1 or 3 channels of images of another shape; '' if the shape does not
    tell.
    """
    if len(shape) != 3:
        return ""
    if shape[2] in (2, 4):
        return f"; to leave out transparency, give images[..., :{shape[2] - 1}]"
    if shape[0] in (2, 4):
        return f"; to leave out transparency, give images[:, :{shape[0] - 1}]"
    if shape[1] in (1, 3):
        return (
            "; if the images are counted by the last axis, as in .mat files, give "
            "numpy.moveaxis(images, -1, 0)"
        )
    return ""


def _stacked(images: Any) -> np.ndarray:
    """A user's images as uint8 (N, C, H, W)."""
    arrays = _in_colour([_array(image) for image in images])
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1:
        raise InputError(
            f"{len(arrays)} images of {len(shapes)} shapes: give one image or more, all of one "
            "shape"
        )
    pixels = np.stack(arrays)
    if pixels.dtype != np.uint8:
        scales = [*SCALES, SIXTEEN_BITS] if pixels.dtype == np.uint16 else SCALES
        fits = [made for made, low, high in scales if low <= pixels.min() and pixels.max() <= high]
        made = f"as {fits[0]} makes of them" if fits else "as they were before they were normalised"
        raise InputError(
            f"images are {pixels.dtype} from {pixels.min()} to {pixels.max()}, and must be uint8 "
            f"from 0 to 255, {made}"
        )
    if pixels.ndim != 3 and not (pixels.ndim == 4 and {pixels.shape[1], pixels.shape[3]} & {1, 3}):
        way = _way_to_channels(pixels.shape[1:])
        raise InputError(
            f"images have the shape {shapes.pop()}, and must be (H, W), (H, W, C) or (C, H, W), C "
            f"1 or 3{way}"
        )
    return _with_channels(pixels)
