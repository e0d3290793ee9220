"""Masks of a segmentation among images of classes: told by the names of folders and files.

A mask is an image file, and no example of a class: it says which pixels of another image belong to
something. Sets of segmentation have folders `images` and `masks` in each class, or files `1.png`
and `1_mask.png` beside each other.
"""

import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Sequence

WORDS = r"(?:masks?|segmentations?|segs?|ground[-_ ]?truths?|gts?|annotations?)"
FOLDER = re.compile(rf"{WORDS}|[a-z]+[-_ ]{WORDS}", re.IGNORECASE)
# `1_mask.png`, and `1_mask_2.png` where an image has several.
FILE = re.compile(rf"(?P<image>.+?)[-_. ]+{WORDS}(?:[-_. ]*\d+)?", re.IGNORECASE)


def masks_beside(folders: Collection[tuple[str, ...]], container: re.Pattern[str]) -> str:
    """A folder of masks beside one of images, as names from the top; '' if there is none.

    >>> names = [("flu", "images"), ("flu", "masks"), ("well", "images"), ("well", "masks")]
    >>> masks_beside(names, re.compile("images")), masks_beside([("mask",), ("none",)], re.compile("images"))
    ('flu/masks', '')
    """
    siblings = defaultdict(list)
    for folder in folders:
        siblings[folder[:-1]].append(folder[-1])
    for above, names in siblings.items():
        masks = [name for name in names if FOLDER.fullmatch(name)]
        images = [name for name in names if container.fullmatch(name)]
        if masks and images and len(masks) + len(images) == len(names):
            return posixpath.join(*above[-1:], masks[0])
    return ""


def masks_among(files: Sequence[str]) -> list[tuple[str, str]]:
    """Files that are probably masks, each with the image beside it that it is a mask of.

    >>> masks_among(["lump/1.png", "lump/1_mask.png", "lump/2_mask.png"])
    [('lump/1_mask.png', 'lump/1.png')]
    """
    by_stem = {}
    for file in files:
        by_stem[posixpath.splitext(file)[0]] = file
    found = []
    for stem, file in by_stem.items():
        folder, name = posixpath.split(stem)
        if mask := FILE.fullmatch(name):
            image = by_stem.get(posixpath.join(folder, mask["image"]))
            if image is not None:
                found.append((file, image))
    return found
