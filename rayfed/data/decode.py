"""Encoded images (PNG, JPEG, ...) as one uint8 array (N, C, H, W), and resized images."""

import io
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps

from rayfed.base.errors import InputError

# Only plain raster formats: Pillow's other plugins start interpreters (EPS) or parse whole documents.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
MAX_PIXELS = 2**24  # of one encoded image; a few bytes can claim to unpack to gigabytes
GREY = {"1": "L", "L": "L", "LA": "L"}
DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # more than 8 bits per channel
BLOCK = 64  # images per task of a thread
BLOCKS = 16  # tasks at a time, so that few bytes wait to be decoded or copied out
T = TypeVar("T")
Read = Callable[[], bytes | None]  # reads the bytes of an image
Locate = Callable[[int], str]  # the place of the n-th example, for messages


def decode(data: bytes, size: int = 0) -> np.ndarray:
    """One encoded image as uint8 (C, H, W): grey stays one channel, anything else becomes RGB; alpha is dropped.

    With `size`, it is scaled (antialiased) and cut at the centre to `size` x `size`. Raises ValueError or OSError.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(
                f"{image.width} x {image.height} pixels, more than the {MAX_PIXELS} allowed"
            )
        if image.mode in DEEP:
            raise ValueError(f"mode {image.mode}; images need 8 bits per channel")
        mode = GREY.get(image.mode, "RGB")
        return _channels_first(_fit(image if image.mode == mode else image.convert(mode), size))


def decode_all(images: Iterable[Read], count: int, place: Locate, size: int = 0) -> np.ndarray:
    """All `count` images as uint8 (count, C, H, W); grey ones among RGB ones become RGB.

    Raises InputError, naming the image, if one cannot be decoded or differs in size.
    """

    def decode_block(block: list[tuple[int, Read]]) -> list[np.ndarray]:
        return [_decoded(read, row, place, size) for row, read in block]

    with ThreadPoolExecutor() as pool:
        groups = _batched(enumerate(images), BLOCK * BLOCKS)
        blocks = (
            block for group in groups for block in pool.map(decode_block, _batched(group, BLOCK))
        )
        decoded = (image for block in blocks for image in block)
        return _gathered(decoded, count, place)


def _gathered(images: Iterable[np.ndarray], count: int, place: Locate) -> np.ndarray:
    """Images as one array of `count` rows, without holding all of them twice."""
    out: np.ndarray = np.empty(0, dtype=np.uint8)
    for row, image in enumerate(images):
        if row == 0:
            out = np.empty((count, *image.shape), dtype=np.uint8)
        if image.shape[1:] != out.shape[2:]:
            size, usual = (
                " x ".join(map(str, shape)) for shape in (image.shape[1:], out.shape[2:])
            )
            raise InputError(
                f"{place(row)}: {size} pixels, where earlier images have {usual}; set data.size (say, size = 32) to "
                "scale all images to one size"
            )
        if len(image) > out.shape[1]:
            out = np.repeat(out, len(image), axis=1)
        out[row] = image  # a grey one is broadcast over three channels
    return out


def resize(images: np.ndarray, size: int) -> np.ndarray:
    """Images (N, C, H, W) scaled and cut at the centre to (N, C, size, size), as `decode` does."""
    if images.shape[2:] == (size, size):
        return images
    planar = images[:, 0] if images.shape[1] == 1 else images.transpose(0, 2, 3, 1)
    fitted = [
        _channels_first(_fit(Image.fromarray(np.ascontiguousarray(image)), size))
        for image in planar
    ]
    return np.ascontiguousarray(np.stack(fitted))


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _decoded(read: Read, row: int, place: Locate, size: int) -> np.ndarray:
    try:
        data = read()
    except OSError as error:
        raise InputError(f"{place(row)}: cannot be read ({error})") from None
    if not data:
        raise InputError(f"{place(row)}: no image bytes")
    try:
        return decode(data, size)
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged bytes
        why = str(error).partition(" <_io.")[0]  # without an address in memory
        raise InputError(f"{place(row)}: cannot be decoded as an image ({why})") from None


def _fit(image: Image.Image, size: int) -> Image.Image:
    if not size or image.size == (size, size):
        return image
    return ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)


def _channels_first(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
