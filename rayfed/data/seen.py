"""Pillow images as one sees them: upright, opaque, in colours or grey, 8 bits per channel."""

import numpy as np
from PIL import ExifTags, Image

from rayfed.base.errors import InputError

# Images of these modes are as one sees them.
PLAIN = ("L", "RGB")
GREY = {"1": "L", "L": "L", "LA": "LA", "La": "LA"}
WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
# Under these keys of `Image.info` a file may say how its camera was held.
NOTES = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF's orientations, and what turns such an image upright."""


def as_seen(image: Image.Image) -> Image.Image:
    """Return the image as one sees it: in mode L if it is grey, and otherwise in RGB.

    It is turned by EXIF, and laid on white if it is transparent. Raises InputError if its values
    have no known range.
    """
    # Some notes stand behind the pixels in a file.
    image.load()
    if not image.info and image.mode in PLAIN:
        return image
    image = upright(image)
    if image.mode in PLAIN and "transparency" not in image.info:
        return image
    if image.mode in SIXTEEN_BITS or image.mode in ("I", "F"):
        return _with_8_bits(image)
    if image.mode in WITH_ALPHA or ("transparency" in image.info and image.mode != "1"):
        return _on_white(image)
    return image.convert(GREY.get(image.mode, "RGB"))


def upright(image: Image.Image) -> Image.Image:
    """Return the image, turned as its EXIF or XMP says, as every viewer shows it."""
    if image.info.keys().isdisjoint(NOTES):
        return image
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        # A damaged note says nothing, but the pixels are complete.
        return image
    turn = TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)


def levels(image: Image.Image) -> np.ndarray | None:
    """Return the values 0 to 65535 of an image of 16 bits, (H, W).

    Returns None if its values have no such range.
    """
    is_read_from_16_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    has_16_bits = image.mode in SIXTEEN_BITS or is_read_from_16_bits
    return np.asarray(image) if has_16_bits else None


def _with_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 8 bits per pixel from an image of more bits.

    Raises InputError if its values have no known range.
    """
    values = levels(image)
    if values is None:
        raise InputError(
            f"mode {image.mode}: values of 32 bits have no known range; scale them to 0..255 and "
            "save them with 8 bits per channel"
        )
    # 65535 is white, and becomes 255.
    grey = (values.astype(np.uint32) + 128) // 257
    return Image.fromarray(grey.astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    """Return a transparent image as a page shows it, on white.

    What it has below its transparent parts is never seen.
    """
    with_alpha = image.convert("LA" if image.mode in ("L", "LA", "La") else "RGBA")
    opaque = with_alpha.convert("L" if with_alpha.mode == "LA" else "RGB")
    alpha = with_alpha.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return opaque
    white = Image.new(opaque.mode, opaque.size, "white")
    return Image.composite(opaque, white, alpha)
