"""Masks of a segmentation among images of classes, told by names of folders and files.

A mask is an image file, but no example of a class: it says which pixels of another image belong to
something. Sets of segmentation have folders `images` and `masks` in each class, or files `1.png`
and `1_mask.png` next to each other.
"""

import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Sequence

WORDS = r"(?:masks?|segmentations?|segs?|ground[-_ ]?truths?|gts?|annotations?)"
FOLDER = re.compile(rf"{WORDS}|[a-z]+[-_ ]{WORDS}", re.IGNORECASE)
# A mask is called `1_mask.png`, or `1_mask_2.png` if an image has several masks.
FILE = re.compile(rf"(?P<image>.+?)[-_. ]+{WORDS}(?:[-_. ]*\d+)?", re.IGNORECASE)


def masks_beside(folders: Collection[tuple[str, ...]], container: re.Pattern[str]) -> str:
    """Return a folder of masks next to a folder of images, or '' if there is none.

    Folders are names from the top.

    >>> names = [("flu", "images"), ("flu", "masks"), ("well", "images"), ("well", "masks")]
    >>> masks_beside(names, re.compile("images"))
    'flu/masks'
    >>> masks_beside([("mask",), ("none",)], re.compile("images"))
    ''
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
    """Return the files that are probably masks, each with the image that it is a mask of.

    The image lies next to the mask.

    >>> masks_among(["lump/1.png", "lump/1_mask.png", "lump/2_mask.png"])
    [('lump/1_mask.png', 'lump/1.png')]
    """
    by_stem = {}
    for file in files:
        by_stem[posixpath.splitext(file)[0]] = file
    masks = []
    for stem, file in by_stem.items():
        folder, name = posixpath.split(stem)
        match = FILE.fullmatch(name)
        if match is None:
            continue
        image = by_stem.get(posixpath.join(folder, match["image"]))
        if image is not None:
            masks.append((file, image))
    return masks
