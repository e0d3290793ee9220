"""Encoded images (PNG, JPEG, ...) as one uint8 array (N, C, H, W), and resized images."""

import io
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError, features

from rayfed.base.errors import InputError
from rayfed.data.contents import what_it_is
from rayfed.data.seen import PLAIN, as_seen, levels

# Only plain raster formats are read: Pillow's other plugins start interpreters (EPS) or parse
# complete documents.
FORMATS: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES: tuple[str, ...] = (
    ".png",
    ".jpg",
    ".jpeg",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)
# These are other suffixes of the same formats.
SUFFIXES += (".apng", ".jfif", ".jpe", ".pjpeg", ".pjp", ".dib", ".pbm", ".pnm")
# Pillow has AVIF since 11.3, unless it was built without. A list of formats may name only what it
# has. An older Pillow does not know the name, and would warn of it.
if "avif" in features.modules and features.check("avif"):
    FORMATS += ("AVIF",)
    SUFFIXES += (".avif",)
# An encoded image may have that many pixels: a few bytes can claim to unpack to gigabytes.
MAX_PIXELS = 2**24
# An image that is scaled down may have that many pixels. Pillow takes a larger one for an attack.
LARGEST = 89_478_485
# Large images are decoded one at a time, or they would fill the memory.
ONE_LARGE = threading.Lock()
# A task of a thread has that many images.
BLOCK = 64
# There are that many tasks at a time, so that few bytes wait to be decoded or copied out.
BLOCKS = 16
# If no value of 16 bits reaches this one, fewer than 64 of the 256 values of 8 bits are used.
DARK = 2**14
T = TypeVar("T")
# A function that reads the bytes of an image.
Read = Callable[[], bytes | None]
# A function that returns the place of the n-th example, for messages.
Locate = Callable[[int], str]
log = logging.getLogger(__name__)


class Picture(NamedTuple):
    """A decoded image, and what its file has besides."""

    # The pixels are uint8 (C, H, W).
    pixels: np.ndarray
    # The number of pages of a TIFF, or of frames of an animation. The pixels are of the first.
    pages: int = 1
    # The highest value, if the values had 16 bits.
    highest: int = 0


def decode(data: bytes, size: int = 0) -> np.ndarray:
    """Return an encoded image as uint8 (C, H, W), as one sees it.

    A grey image has one channel, and any other becomes RGB. It is turned by EXIF, and laid on white
    if it is transparent. With `size`, it is scaled (antialiased) and cut at the centre to `size` x
    `size`. Raises ValueError or OSError.
    """
    return _picture(data, size).pixels


def _picture(data: bytes, size: int) -> Picture:
    """Return a decoded image, and what its file has besides.

    Raises InputError for an image that is too large, and Pillow's errors for damaged bytes.
    """
    try:
        opened = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise InputError(f"far more than the {LARGEST:,} pixels allowed{SMALLER}") from None
    with opened as image:
        if image.width * image.height > MAX_PIXELS:
            _refuse_too_large(image, size)
            with ONE_LARGE:
                pixels = _channels_first(_fit(_reduced(image, size), size))
        else:
            pixels = _channels_first(_fit(as_seen(image), size))
        highest = 0
        if image.mode not in PLAIN:
            values = levels(image)
            highest = 0 if values is None else int(values.max())
        return Picture(pixels, _pages(image), highest)


SMALLER = "; scale it down before, say with Pillow's Image.thumbnail((1024, 1024)), or leave it out"


def _refuse_too_large(image: Image.Image, size: int) -> None:
    """Raise InputError if a large image is not to be scaled down, or is too large for that."""
    pixels = f"{image.width} x {image.height} pixels, more than the"
    if image.width * image.height > LARGEST:
        raise InputError(f"{pixels} {LARGEST:,} allowed{SMALLER}")
    if not size:
        raise InputError(
            f"{pixels} {MAX_PIXELS:,} allowed without data.size; set it (say, size = 224) to scale "
            "all images down"
        )


def _reduced(image: Image.Image, size: int) -> Image.Image:
    """Return a large image as one sees it, but smaller.

    At least four times `size` remains, so that it can still be scaled well.
    """
    # JPEG can be unpacked at 1/2, 1/4 or 1/8 of its size.
    image.draft(None, (4 * size, 4 * size))
    upright = as_seen(image)
    factor = min(upright.size) // (4 * size)
    return upright.reduce(factor) if factor > 1 else upright


def _pages(image: Image.Image) -> int:
    """Return the number of pages or frames of an image's file."""
    try:
        # A phone's JPEG with a second, smaller picture in it is one photograph.
        if not getattr(image, "is_animated", False) or image.format == "MPO":
            return 1
        return int(getattr(image, "n_frames", 1))
    except Exception:
        # The file is damaged after the first page, which alone is read.
        return 1


def decode_all(images: Iterable[Read], count: int, place: Locate, size: int = 0) -> np.ndarray:
    """Return all `count` images as uint8 (count, C, H, W); grey ones among RGB ones become RGB.

    Raises InputError, naming the image, if one cannot be decoded or differs in size. Warns of pages
    that are left out.
    """

    def decode_block(block: list[tuple[int, Read]]) -> list[Picture]:
        return [_decoded(read, row, place, size) for row, read in block]

    def pictures(pool: ThreadPoolExecutor) -> Iterator[Picture]:
        for group in _batched(enumerate(images), BLOCK * BLOCKS):
            for block in pool.map(decode_block, _batched(group, BLOCK)):
                yield from block

    doubts = Doubts(count, place)
    with ThreadPoolExecutor() as pool:
        gathered = _gathered(doubts.noted(pictures(pool)), count, place)
    doubts.tell()
    return gathered


@dataclass
class Doubts:
    """Counts what a user may not know of a set's images, and warns of it."""

    count: int
    place: Locate
    with_pages: int = 0
    example: str = ""
    num_deep: int = 0
    highest: int = 0

    def noted(self, pictures: Iterable[Picture]) -> Iterator[np.ndarray]:
        """Yield the pixels of the pictures, which are counted on the way."""
        for row, picture in enumerate(pictures):
            if picture.pages > 1:
                self.with_pages += 1
                self.example = self.example or f"{self.place(row)} with {picture.pages}"
            if picture.highest:
                self.num_deep += 1
                self.highest = max(self.highest, picture.highest)
            yield picture.pixels

    def tell(self) -> None:
        """Warn of pages and frames that are left out, and of images with 16 bits that are dark.

        Of such images only few values of 8 bits remain.
        """
        if self.with_pages:
            log.warning(
                "%d of %d images have several pages or frames, such as %s: only the first is read; "
                "to use all, save each as an image of its own",
                self.with_pages,
                self.count,
                self.example,
            )
        if self.highest and self.highest < DARK:
            log.warning(
                "%d of %d images have 16 bits, of which the highest value is %d: of the 256 values "
                "of 8 bits, %d remain; scale them to 0..65535 before",
                self.num_deep,
                self.count,
                self.highest,
                self.highest // 257 + 1,
            )


def _gathered(images: Iterable[np.ndarray], count: int, place: Locate) -> np.ndarray:
    """Return images as one array of `count` rows, without holding all of them twice.

    Raises InputError if one differs in size.
    """
    gathered: np.ndarray = np.empty(0, dtype=np.uint8)
    for row, image in enumerate(images):
        if row == 0:
            gathered = np.empty((count, *image.shape), dtype=np.uint8)
        if image.shape[1:] != gathered.shape[2:]:
            size = " x ".join(map(str, image.shape[1:]))
            usual_size = " x ".join(map(str, gathered.shape[2:]))
            raise InputError(
                f"{place(row)}: {size} pixels, where earlier images have {usual_size}; set "
                "data.size (say, size = 32) to scale all images to one size"
            )
        if len(image) > gathered.shape[1]:
            gathered = np.repeat(gathered, len(image), axis=1)
        # A grey image among RGB ones is broadcast over three channels.
        gathered[row] = image
    return gathered


def resize(images: np.ndarray, size: int) -> np.ndarray:
    """Return images (N, C, H, W), scaled and cut at the centre to (N, C, size, size).

    They are scaled as by `decode`.
    """
    if images.shape[2:] == (size, size):
        return images
    # Pillow takes grey images (H, W), and images in colour (H, W, C).
    pillow_arrays = images[:, 0] if images.shape[1] == 1 else images.transpose(0, 2, 3, 1)
    resized = []
    for array in pillow_arrays:
        image = Image.fromarray(np.ascontiguousarray(array))
        resized.append(_channels_first(_fit(image, size)))
    return np.ascontiguousarray(np.stack(resized))


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items; the last list may be shorter."""
    iterator = iter(items)
    while True:
        batch = list(islice(iterator, size))
        if not batch:
            return
        yield batch


def _decoded(read: Read, row: int, place: Locate, size: int) -> Picture:
    """Read and decode the image of a row; raise InputError, with the place, if that fails."""
    try:
        data = read()
    except OSError as error:
        raise InputError(f"{place(row)}: cannot be read ({error})") from None
    if not data:
        raise InputError(f"{place(row)}: no image bytes; put an image there, or leave it out")
    try:
        return _picture(data, size)
    except InputError as error:
        raise InputError(f"{place(row)}: {error}") from None
    except Exception as error:
        # Pillow's decoders raise nearly anything on damaged bytes.
        raise InputError(
            f"{place(row)}: cannot be decoded as an image{_why(data, error)}"
        ) from None


def _why(data: bytes, error: Exception) -> str:
    """Say why bytes are no image, and what to do."""
    kind = what_it_is(data)
    if kind:
        return f"; it is {kind}"
    if isinstance(error, UnidentifiedImageError):
        return f"; it is none of {', '.join(FORMATS)}: convert it to PNG, or leave it out"
    # The rest of Pillow's message is an address in memory.
    reason = str(error).partition(" <_io.")[0]
    return f" ({reason}); it may be cut off: copy or download it again, or leave it out"


def _fit(image: Image.Image, size: int) -> Image.Image:
    """Return an image scaled and cut at the centre to `size`; with 0 it stays as it is."""
    if not size or image.size == (size, size):
        return image
    return ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)


def _channels_first(image: Image.Image) -> np.ndarray:
    """Return the pixels of an image as (C, H, W)."""
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
