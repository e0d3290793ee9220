"""The origin of a result: versions, the code's commit, and hashes of everything that went in."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from rayfed.local import Site

COMMIT = "RAYFED_COMMIT"
PACKAGES = ("rayfed-distill", "ray", "torch", "torchvision", "numpy", "pyarrow")


def environment(site: Site) -> dict[str, Any]:
    """Versions, the code's commit, and hashes of job, data and partition."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": commit(),
        "job": site.job.hash(),
        "data": site.federation.hash(),
        "partition": site.federation.partition.hash(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this package's source tree; `+` if the tree has changes, None if there is no tree."""
    here = Path(__file__).parent
    if not (here.parents[1] / ".git").exists():
        return os.environ.get(COMMIT) or None  # set by `rayfed submit`, which sends no tree
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changes.strip() else "")
