"""Data sets at the Hugging Face hub.

A place there is downloaded once, and read as the folder or file that it then is. A place is
`hf://datasets/OWNER/NAME/PATH`. PATH is a Parquet file or a folder, and may be left out.
`NAME@REVISION` is a branch, a tag or a commit; without it, the branch is `main`. The copies have
the hub's own layout, so revisions lie side by side.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

from rayfed.base.errors import InputError
from rayfed.data.samples import shortened
from rayfed.data.settings import Data
from rayfed.data.splits import split_of_file

# Each named source has a place at the hub, and a column of labels.
HUB = {
    "cinic10": ("hf://datasets/flwrlabs/cinic10", "label"),
    "tiny-imagenet": ("hf://datasets/zh-plus/tiny-imagenet", "label"),
    "femnist": ("hf://datasets/flwrlabs/femnist", "character"),
}
PLACE = re.compile(
    r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*?))?/*"
)


def fetch(data: Data) -> Data:
    """Return the same data with local paths in place of the hub's.

    They also have the column of labels that a named set has, but a job's own `data.label` wins.
    Raises InputError if a place is neither in `data.root` nor can be downloaded.
    """
    place, label = HUB.get(data.source, (data.source, data.label))
    label = label if data.label == Data.label else data.label
    source = _fetch(place, data.root)
    test = _fetch(data.test, data.root)
    return replace(data, source=source, test=test, label=label)


def _fetch(place: str, root: str) -> str:
    """Return the local path of a place, downloaded if it is not in `root`.

    A path that is not at the hub stays as it is. Raises InputError if it cannot be downloaded.
    """
    if not place.startswith("hf://"):
        return place
    match = PLACE.fullmatch(place)
    if not match:
        raise InputError(
            f"'{place}': a data set at the Hugging Face hub is written as hf://datasets/OWNER/NAME "
            "or hf://datasets/OWNER/NAME/PATH, with NAME@REVISION for another one than main"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError(
            f"'{place}' needs huggingface_hub, which cannot be imported ({error}): pip install "
            "'rayfed-distill[hf]'"
        ) from None
    repository, revision, path = match[1], match[2] or "main", match[3] or ""
    pattern = path if path.endswith(".parquet") else f"{path}/*.parquet".removeprefix("/")
    cache = Path(root).expanduser() / "hub"
    # The copy here is tried before the hub, even if main moves on, as with torchvision.
    for offline in (True, False):
        try:
            folder = snapshot_download(
                repository,
                repo_type="dataset",
                revision=revision,
                allow_patterns=pattern,
                cache_dir=cache,
                local_files_only=offline,
            )
        except Exception as error:
            # The hub, its HTTP client and the disk raise errors of their own.
            reason = " ".join(str(error).split()) or type(error).__name__
        else:
            # At the hub, * in a pattern crosses folders.
            files = sorted(Path(folder).glob(pattern.replace("*", "**/*")))
            if files:
                return _common(place, files)
            reason = "there is no Parquet file at that place"
    raise InputError(
        f"'{place}': {cache} has no copy, and the download failed ({reason}). Either run once "
        "where there is a network and copy that folder here, or give the path of Parquet files "
        "that you have"
    )


def _common(place: str, files: list[Path]) -> str:
    """Return the only file, or the folder that has all files.

    Raises InputError if the files lie in several folders whose names tell no split.
    """
    if len(files) == 1:
        return str(files[0])
    folder = Path(os.path.commonpath([file.parent for file in files]))
    names = [file.relative_to(folder).as_posix() for file in files]
    inner = sorted({name.partition("/")[0] for name in names if "/" in name})
    if inner and not all(split_of_file(name.partition("/")[0]) for name in names):
        raise InputError(
            f"'{place}': its Parquet files lie in several folders ({shortened(inner)}); name one "
            "of them"
        )
    return str(folder)
