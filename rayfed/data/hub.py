"""Data sets at the Hugging Face hub: a place there is downloaded once, and read as the folder or file that it then is.

A place is `hf://datasets/OWNER/NAME/PATH`; PATH is a Parquet file or a folder, and may be left out. `NAME@REVISION` is
a branch, a tag or a commit, else `main`. The copies have the hub's own layout, so revisions lie side by side.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rayfed.base.errors import InputError
from rayfed.data.files import PARQUET, SPLIT
from rayfed.data.samples import shortened
from rayfed.data.settings import Data

HUB = {  # our name: the place, and its column of labels
    "cinic10": ("hf://datasets/flwrlabs/cinic10", "label"),
    "tiny-imagenet": ("hf://datasets/zh-plus/tiny-imagenet", "label"),
    "femnist": ("hf://datasets/flwrlabs/femnist", "character"),
}
PLACE = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*?))?/*")


def is_at_hub(source: str) -> bool:
    return source in HUB or source.startswith("hf://")


def is_downloaded(name: str, root: str) -> bool:
    """Whether a set of `HUB` lies in `root`."""
    match = PLACE.fullmatch(HUB[name][0])
    return match is not None and (_cache(root) / f"datasets--{match[1].replace('/', '--')}" / "snapshots").is_dir()


def fetch(data: Data) -> Data:
    """The same data with local paths in place of the hub's, and the column of labels that a named set has.

    A job's own `data.label` wins. Raises InputError where a place is neither in `data.root` nor can be downloaded.
    """
    place, label = HUB.get(data.source, (data.source, data.label))
    label = label if data.label == Data.label else data.label
    prefix = "" if place == data.source else f"data.source = '{data.source}': "
    source, test = _fetch(place, data.root, prefix), _fetch(data.test, data.root)
    return replace(data, source=source, test=test, label=label)


def _fetch(place: str, root: str, prefix: str = "") -> str:
    """The local path of a place, downloaded if it is not in `root`; a path that is not at the hub stays as it is.

    Messages begin with `prefix`.
    """
    if not place.startswith("hf://"):
        return place
    match = PLACE.fullmatch(place)
    if not match:
        raise InputError(
            f"'{place}': a data set at the Hugging Face hub is written as hf://datasets/OWNER/NAME or "
            "hf://datasets/OWNER/NAME/PATH, with NAME@REVISION for another one than main"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError(
            f"{prefix}'{place}' needs huggingface_hub, which cannot be imported ({error}): "
            "pip install 'rayfed-distill[hf]'"
        ) from None
    repository, revision, path = match[1], unquote(match[2] or "main"), match[3] or ""
    patterns = [path] if path.endswith(PARQUET) else [f"{path}/*{end}".removeprefix("/") for end in PARQUET]
    selection: dict[str, Any] = {"revision": revision, "allow_patterns": patterns, "cache_dir": _cache(root)}
    for offline in (True, False):  # as with torchvision, what is here is not asked for again, even if main moves on
        try:
            folder = snapshot_download(repository, repo_type="dataset", local_files_only=offline, **selection)
        except Exception as error:  # the hub's, its HTTP client's, and those of the disk
            reason = " ".join(str(error).split()) or type(error).__name__
        else:
            files = sorted(file for pattern in patterns for file in Path(folder).glob(_deep(pattern)))
            if files:
                return _common(place, files)
            reason = "there is no Parquet file at that place"
    raise InputError(
        f"{prefix}'{place}': {_cache(root)} has no copy, and the download failed ({reason}). Either run once where "
        "there is a network and copy that folder here, or give the path of Parquet files that you have"
    )


def _cache(root: str) -> Path:
    return Path(root).expanduser() / "hub"


def _deep(pattern: str) -> str:
    """The hub's `*`, which crosses folders, as pathlib writes it."""
    return pattern.replace("*", "**/*")


def _common(place: str, files: list[Path]) -> str:
    """The file, or the folder that has all of them and in which their names tell the split."""
    if len(files) == 1:
        return str(files[0])
    folder = Path(os.path.commonpath([file.parent for file in files]))
    names = [file.relative_to(folder).as_posix() for file in files]
    inner = sorted({name.partition("/")[0] for name in names if "/" in name})
    if inner and not all(SPLIT.match(name) for name in names):
        raise InputError(f"'{place}': its Parquet files lie in several folders ({shortened(inner)}); name one of them")
    return str(folder)
