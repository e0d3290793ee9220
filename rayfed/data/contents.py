"""What a file is that was taken for something else, told by its first bytes.

The words say what to do.
"""

import re

POINTER = (
    "only a pointer of Git LFS to the file; fetch the file: git lfs install, then git lfs pull"
)
PAGE = "a web page (HTML), as a download that failed leaves it; download the file again"

# That many bytes at the beginning of a file tell what it is.
FIRST = 512

IMAGE = rb"\x89PNG\r\n|\xff\xd8\xff|GIF8|RIFF....WEBP|II\*\x00|MM\x00\*"

# Each pattern of the first bytes of a file has words for what the file is.
KINDS = (
    (rb"version https://git-lfs", POINTER),
    (
        rb"[./]*(?:\.git/)?annex/objects/",
        "only a pointer of git-annex; fetch the file: git annex get",
    ),
    (rb"\s*<(?:!doctype\s+html|html|head|body)\b", PAGE),
    (
        rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*(?:<!doctype svg[^>]*>\s*)?<svg\b",
        "an SVG drawing; export it as PNG",
    ),
    (rb"\s*<\?xml", "an XML document"),
    (
        rb"....ftyp(?:heic|heix|heim|heis|hevc|mif1|msf1)",
        "a HEIC photograph; convert it to JPEG or PNG",
    ),
    (rb"....ftypavif", "an AVIF image, which this Pillow does not read; convert it to PNG"),
    (rb"(?:\x00\x00\x00\x0cJXL |\xff\x0a)", "a JPEG XL image; convert it to PNG"),
    (rb"(?:\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51)", "a JPEG 2000 image; convert it to PNG"),
    (rb"%PDF-", "a PDF document; export its pages as PNG"),
    (rb"%!PS", "a PostScript document; export it as PNG"),
    (rb"8BPS", "a Photoshop document; export it as PNG"),
    (rb"PK\x03\x04", "a ZIP archive; unpack it"),
    (rb"\x1f\x8b", "compressed with gzip; unpack it"),
    (rb"BZh", "compressed with bzip2; unpack it"),
    (rb"\xfd7zXZ", "compressed with xz; unpack it"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd; unpack it"),
    (rb"7z\xbc\xaf", "a 7z archive; unpack it"),
    (rb"Rar!", "a RAR archive; unpack it"),
    (rb"ARROW1", "an Arrow (Feather) file; pyarrow.feather.read_table reads it"),
    (
        rb"\x89HDF",
        'an HDF5 file; read it in a function of your own (data.source = "module:function")',
    ),
    (
        rb"\x93NUMPY",
        'a NumPy file; read it in a function of your own (data.source = "module:function")',
    ),
    (rb"SQLite format 3", "an SQLite database; pandas.read_sql reads it"),
)


def is_image(data: bytes) -> bool:
    """Say whether the first bytes are the beginning of a PNG, JPEG, GIF, WebP or TIFF image.

    Such an image is read whatever its name.
    """
    return re.match(IMAGE, data, re.DOTALL) is not None


def what_it_is(data: bytes) -> str:
    """Return what the first bytes say a file is, and what to do; '' if unknown.

    An example is 'a ZIP archive; unpack it'.

    >>> what_it_is(b"<!DOCTYPE html><html>404")[:18], what_it_is(b"abc")
    ('a web page (HTML),', '')
    """
    if not data:
        return "an empty file (0 bytes); copy or download it again"
    start = data[:FIRST].removeprefix(b"\xef\xbb\xbf")
    if not start.strip(b"\x00"):
        return "a file of zeros, as a copy that was cut off leaves it; copy or download it again"
    for pattern, words in KINDS:
        if re.match(pattern, start, re.IGNORECASE | re.DOTALL):
            return words
    return ""
