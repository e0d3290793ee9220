"""What a result should be read with: versions, the code's commit, and hashes of all that went in."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from rayfed.data.federation import Federation
from rayfed.job import Job

COMMIT = "RAYFED_COMMIT"


def environment(job: Job, federation: Federation) -> dict[str, Any]:
    """What a result should be read with: versions, the code's commit, and hashes of job, data and partition."""
    packages = ("rayfed-distill", "ray", "torch", "torchvision", "numpy", "pyarrow")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in packages},
        "commit": commit(),
        "job": job.hash(),
        "data": hash_of(federation),
        "partition": federation.partition.hash(),
    }


def hash_of(federation: Federation) -> str:
    """Of all images and labels, training and test."""
    digest = hashlib.sha256()
    for samples in (federation.train, federation.test):
        digest.update(samples.images.data)
        digest.update(samples.labels.data)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the source tree that this package runs from; `+` if the tree has changes, None if there is no tree.

    A submitted package has none with it; who submits it says so in the environment.
    """
    here = Path(__file__).parent
    if not (here.parent / ".git").exists():
        return os.environ.get(COMMIT) or None
    try:
        options = {"cwd": here, "capture_output": True, "text": True, "check": True, "timeout": 10}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **options).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")
