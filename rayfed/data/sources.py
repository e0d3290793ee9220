"""The source of the images: `load` turns the [data] table of a job into arrays.

A source is a known name (`SOURCES`), or the path or URI of a Parquet file, a folder of Parquet
files or a tree of image folders. It is on a local disk, on any file system that pyarrow reaches
(s3://, gs://, hdfs://), or at the Hugging Face hub (hf://).

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
from rayfed.data.samples import Dataset, Samples, hold_out, refuse_many_classes, shortened
from rayfed.data.seen import as_seen, upright
from rayfed.data.settings import MINI, SOURCES, Augment, Data
from rayfed.data.skews import NoSkew

# These are torchvision's names of the sets that it downloads.
NAMES = ("MNIST", "FashionMNIST", "EMNIST", "CIFAR10", "CIFAR100")
# The keys are the names of the sources here.
TORCHVISION = {name.replace("nM", "n-M").lower(): name for name in NAMES}
PAIR = (
    "it gives (train, test), test may be None, each a torch Dataset of PIL images or a pair (uint8 "
    "images, labels)"
)
# Each row has code that makes uint8 of images, and the lowest and the highest value of such images.
SCALES = [
    ("(255 * images).round().astype('uint8')", 0, 1),
    ("((images + 1) * 127.5).round().astype('uint8')", -1, 1),
    ("images.round().astype('uint8')", 0, 255),
]
SIXTEEN_BITS = ("(images / 257).round().astype('uint8')", 0, 65535)

log = logging.getLogger(__name__)


class Kept:
    """Reads each source once and keeps it, as the runs of a grid share their data."""

    def __init__(self) -> None:
        self._kept: list[tuple[Data, Dataset]] = []

    def load(self, data: Data) -> Dataset:
        """Return the data set, read if it was not read before."""
        key = _what_is_read(data)
        for kept_key, dataset in self._kept:
            if kept_key == key:
                return dataset
        dataset = load(data)
        self._kept.append((key, dataset))
        return dataset


def _what_is_read(data: Data) -> Data:
    """Return the data without the fields that do not change the arrays that are read."""
    return replace(
        data,
        partition=Natural(data.client),
        augment=Augment(),
        auxiliary_per_class=0,
        skew=NoSkew(),
    )


def load(data: Data) -> Dataset:
    """Read a source completely, images as uint8 arrays.

    Raises InputError for anything wrong with it, and names the place.
    """
    train, test = _read(data)
    if data.client and train.groups is None:
        raise InputError(
            f"data.partition.column = '{data.client}': the source '{data.source}' has no such "
            "column"
        )
    if data.test_fraction:
        # The held-out part is tested on in place of the source's own test set.
        train, test = hold_out(train, data.test_fraction, data.test_seed)
    if test is None:
        raise InputError(
            f"data.source = '{data.source}': it has no test set; name a test set (data.test = "
            '"path"), or hold out a part (data.test_fraction = 0.1)'
        )
    if data.domain and test.domains is None:
        raise InputError(
            f"data.domain = '{data.domain}': the source '{data.source}' has no such column"
        )
    train, test = _of_size(train, data.size), _of_size(test, data.size)
    dataset = Dataset(_as_colourful(train, test), _as_colourful(test, train))
    try:
        findings = examine(dataset)
    except InputError as error:
        raise InputError(f"data.source = '{data.source}': {error}") from None
    for finding in findings:
        log.log(finding.level, "data.source = '%s': %s", data.source, finding.message)
    return Dataset(_with_harmless_names(dataset.train), _with_harmless_names(dataset.test))


def _read(data: Data) -> tuple[Samples, Samples | None]:
    """Return the training set of a source, and its test set if there is one.

    Raises InputError if there is no such source.
    """
    if data.test and (data.module or (data.source in SOURCES and data.source not in HUB)):
        raise InputError(
            f"data.test = '{data.test}': the source '{data.source}' has a test set of its own"
        )
    if data.source == MINI:
        return read_files(Data(str(Path(__file__).parent / "fashion_mnist_mini")))
    if data.source in TORCHVISION:
        return read_download(data.source, data.root, data.split)
    if data.module:
        return read_function(data)
    if data.source in HUB or data.source.startswith("hf://") or exists(data.source):
        return read_files(fetch(data))
    if any(mark in data.source for mark in "/\\."):
        raise InputError(
            f"data.source = '{data.source}': no such file or folder; if the data lie elsewhere "
            "now, give the path: -s data.source=PATH"
        )
    raise InputError(
        f"data.source = '{data.source}': no such source or file{did_you_mean(data.source, SOURCES)}"
    )


def _of_size(samples: Samples, size: int) -> Samples:
    """Return the samples with images of this size; with 0 the images stay as they are."""
    return replace(samples, examples=resize(samples.examples, size)) if size else samples


def _with_harmless_names(samples: Samples) -> Samples:
    """Return the samples with names without control characters."""
    return replace(
        samples,
        classes=tuple(map(harmless, samples.classes)),
        domain_names=tuple(map(harmless, samples.domain_names)),
        group_names=tuple(map(harmless, samples.group_names)),
    )


def _as_colourful(samples: Samples, reference: Samples) -> Samples:
    """Return the samples in colour if the `reference` is: grey images get three equal channels."""
    are_images = len(samples.shape) == len(reference.shape) == 3
    if not are_images or samples.shape[0] >= reference.shape[0]:
        return samples
    return replace(samples, examples=np.repeat(samples.examples, reference.shape[0], axis=1))


def read_download(name: str, root: str, split: str) -> tuple[Samples, Samples]:
    """Return the training and the test set of a source that torchvision downloads.

    Raises InputError if a set is neither in the folder nor can be downloaded.
    """
    folder = Path(root).expanduser()
    options = {"split": split} if name == "emnist" else {}
    train = _samples(_fetch(name, folder, options, train=True))
    test = _samples(_fetch(name, folder, options, train=False))
    return train, test


def _fetch(name: str, folder: Path, options: dict[str, Any], *, train: bool) -> Any:
    """Return torchvision's data set object, from `folder` if it is there, and otherwise downloaded.

    Raises InputError if torchvision cannot be imported, or the download fails.
    """
    try:
        # This import is slow, and actors never need it.
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
    """Return torchvision's data set object as samples."""
    images = np.asarray(dataset.data)
    if type(dataset).__name__ == "EMNIST":
        # Its files hold every image transposed.
        images = images.swapaxes(1, 2)
    # MNIST's names have the form '0 - zero'.
    classes = tuple(name.split(" - ")[0] for name in dataset.classes)
    return Samples(_with_channels(images), np.asarray(dataset.targets, dtype=np.int64), classes)


def _with_channels(images: np.ndarray) -> np.ndarray:
    """Return images (N, H, W), (N, H, W, C) or (N, C, H, W), C = 1 or 3, as (N, C, H, W)."""
    if images.ndim == 3:
        images = images[:, None]
    if images.shape[1] not in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images)


def read_function(data: Data) -> tuple[Samples, Samples | None]:
    """Return the training and the test set that a user's function gives.

    Raises `InputError` if the function fails, or gives something else.
    """
    function: Any = find(data.source, {}, "data.source")
    try:
        result = function()
    except (Exception, SystemExit) as error:
        # The first frame is this function, and the second is the user's.
        frames = extract_tb(error.__traceback__)[1:2]
        line = "".join(f", line {frame.lineno} of '{frame.filename}'" for frame in frames)
        raise InputError(
            f"data.source = '{data.source}' fails{line}: {type(error).__name__}: {error}"
        ) from error
    try:
        train_pair, test_pair = result
        train = _of_user(train_pair, None)
        test = None if test_pair is None else _of_user(test_pair, train.classes)
    except Exception as error:
        reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        raise InputError(f"data.source = '{data.source}': {reason}; {PAIR}") from error
    return train, test


def _of_user(pair: Any, classes: tuple[str, ...] | None) -> Samples:
    """Return a user's data set as samples.

    `classes` are the training set's, if this is the test set. Raises InputError if the labels are
    not labels of these classes, and for images that have no usual form.
    """
    if isinstance(pair, tuple):
        images, labels = pair
    else:
        images, labels = zip(*(pair[i] for i in range(len(pair))), strict=True)
    examples = _stacked(images)
    codes = _codes(np.asarray(labels), len(examples))
    given_names = getattr(pair, "classes", None)
    refuse_many_classes(codes.max() + 1, "it")
    if given_names is not None:
        names = tuple(map(str, given_names))
    else:
        names = classes or tuple(map(str, range(codes.max() + 1)))
    if (classes and names != classes) or len(set(names)) < len(names):
        raise InputError(
            f"classes are {shortened(names)}; the test set's must be the training set's, each "
            "named once"
        )
    if codes.min() < 0 or codes.max() >= len(names):
        split = "test" if classes else "training"
        raise InputError(
            f"labels of the {split} set are {codes.min()} to {codes.max()}, and must be whole "
            f"numbers from 0, below the number of classes, {len(names)}{why_negative(codes)}"
        )
    return Samples(examples, codes.astype(np.int64), names)


def _array(image: Any) -> np.ndarray:
    """Return a user's image as an array; a Pillow image as one sees it, (H, W) or (H, W, 3)."""
    if not isinstance(image, Image.Image):
        return np.asarray(image)
    # Whoever made an image RGB has decided what its transparent parts show.
    is_plain = image.mode in ("L", "RGB")
    return np.asarray(upright(image) if is_plain else as_seen(image))


def _in_colour(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return images, of which the grey ones (H, W) become (H, W, 3) if others have that form."""
    if {array.ndim for array in arrays} != {2, 3}:
        return arrays
    in_colour = []
    for array in arrays:
        if array.ndim == 2:
            array = np.repeat(array[:, :, None], 3, axis=2)
        in_colour.append(array)
    return in_colour


def _codes(labels: np.ndarray, count: int) -> np.ndarray:
    """Return a user's labels as whole numbers (count,).

    Raises InputError for other labels, and says how to make whole numbers of them.
    """
    is_float = labels.dtype.kind == "f"
    is_whole = is_float and bool(np.isfinite(labels).all() and (labels == np.round(labels)).all())
    if labels.shape == (count,) and (labels.dtype.kind in "iub" or is_whole):
        return labels.astype(np.int64)
    advice = ""
    if labels.shape == (count, 1):
        advice = "; give labels.ravel()"
    elif labels.ndim == 2 and len(labels) == count:
        advice = "; of lists of 0 and 1, give labels.argmax(axis=1)"
    elif labels.shape == (count,) and labels.dtype.kind in "US":
        # Numbered by its own names, a test set that lacks a name would have other numbers.
        advice = "; of names, give numpy.searchsorted(numpy.unique(labels_to_train_on), labels)"
    raise InputError(
        f"labels are {labels.dtype} of shape {labels.shape}: each of {count} images needs one, a "
        f"whole number from 0{advice}"
    )


def _way_to_channels(shape: tuple[int, ...]) -> str:
    """Say how to make images with 1 or 3 channels of images of another shape.

    Returns '' if the shape does not tell.
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
    """Return a user's images as uint8 (N, C, H, W).

    Raises InputError for images of several shapes, and for images that are not uint8.
    """
    arrays = _in_colour([_array(image) for image in images])
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1:
        raise InputError(
            f"{len(arrays)} images of {len(shapes)} shapes: give one image or more, all of one "
            "shape"
        )
    pixels = np.stack(arrays)
    if pixels.dtype != np.uint8:
        scales = list(SCALES)
        if pixels.dtype == np.uint16:
            scales.append(SIXTEEN_BITS)
        lowest, highest = pixels.min(), pixels.max()
        advice = "as they were before they were normalised"
        for code, low, high in scales:
            if low <= lowest and highest <= high:
                advice = f"as {code} makes of them"
                break
        raise InputError(
            f"images are {pixels.dtype} from {lowest} to {highest}, and must be uint8 from 0 to "
            f"255, {advice}"
        )
    has_channels = pixels.ndim == 4 and bool({pixels.shape[1], pixels.shape[3]} & {1, 3})
    if pixels.ndim != 3 and not has_channels:
        advice = _way_to_channels(pixels.shape[1:])
        raise InputError(
            f"images have the shape {shapes.pop()}, and must be (H, W), (H, W, C) or (C, H, W), C "
            f"1 or 3{advice}"
        )
    return _with_channels(pixels)
