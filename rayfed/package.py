"""What a submitted job takes along: the working folder without what no cluster needs, and this package, as one zip.

Left out are whatever git ignores, hidden files, caches, virtual environments, Parquet files and weights, the folders of
runs, and what the job reads and writes by its own paths. `rayfed/` is always the package that is running here, so that
the code which runs on the cluster is the code that has checked the job.
"""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import rayfed
from rayfed.data.sources import SOURCES
from rayfed.job import Job
from rayfed.values import InputError

PLACES = ("output.path", "output.checkpoints", "data.source", "data.test", "data.root")  # paths in a job
LIMIT = 100 * 2**20  # bytes; above it Ray refuses an upload without saying why
PACKAGE = Path(rayfed.__file__).parent
CACHES = ("__pycache__", "*.egg-info", "node_modules", "*.pyc", "*.pyo")
DATA = ("*.parquet", "*.pq", "*.safetensors", "*.pt", "*.pth", "*.ckpt", "*.zip", "*.tar", "*.tar.gz", "*.tgz")
MARKS = (("pyvenv.cfg",), ("conda-meta",), ("job.toml", "environment.json"))  # of environments, and of a run's folder

Files = dict[str, Path]  # where a file lies in the package, and where it lies here


def gather(root: Path, job_file: Path, without: Sequence[Path] = (), patterns: Sequence[str] = ()) -> tuple[Files, str]:
    """The files of the package, and the job file's place among them.

    `without` are folders and files that are left out; so is what matches one of `patterns`, or lies in a folder that
    does: `images`, `notes/*.pdf`. Raises `InputError` where the files have more than 100 MiB together.
    """
    older = root / PACKAGE.name  # this package, or another version of it
    skipped = {path.resolve() for path in (*without, *([older] if (older / "__init__.py").is_file() else []))}
    here = {
        path.relative_to(root).as_posix(): path
        for path in _walk(root, skipped | _ignored_by_git(root), (*CACHES, *DATA))
    }
    files = {place: path for place, path in here.items() if not _matches(place, patterns)}
    files |= {f"{PACKAGE.name}/{path.relative_to(PACKAGE)}": path for path in _walk(PACKAGE, set(), CACHES)}
    inside = job_file.resolve().is_relative_to(root.resolve())
    place = job_file.resolve().relative_to(root.resolve()).as_posix() if inside else f"submitted/{job_file.name}"
    files[place] = job_file
    _refuse_large(files)
    return dict(sorted(files.items())), place


def size_of(files: Files) -> int:
    """Bytes in all files together."""
    return sum(path.stat().st_size for path in files.values())


def mebibytes(num_bytes: int) -> str:
    """
    >>> mebibytes(3 * 2**19)
    '1.5 MiB'
    """
    return f"{num_bytes / 2**20:.1f} MiB"


def write_zip(files: Files, target: Path) -> None:
    """Write the package; the same files give the same bytes, so that Ray uploads them once."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, path in files.items():
            entry = zipfile.ZipInfo(place)  # dated 1980, whenever the file was written
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if os.access(path, os.X_OK) else 0o644) << 16
            archive.writestr(entry, path.read_bytes())


def _walk(root: Path, skipped: set[Path], patterns: Iterable[str]) -> Iterator[Path]:
    """The regular files below a folder; links to folders are not followed."""
    for place, folders, names in os.walk(root):
        folder = Path(place)
        folders[:] = [
            name
            for name in folders
            if not _passed_over(folder / name, skipped, patterns)
            and not any(all((folder / name / mark).exists() for mark in marks) for marks in MARKS)
        ]
        for name in names:
            if not _passed_over(folder / name, skipped, patterns) and (folder / name).is_file():
                yield folder / name


def _passed_over(path: Path, skipped: set[Path], patterns: Iterable[str]) -> bool:
    return path.name.startswith(".") or any(fnmatch(path.name, p) for p in patterns) or path.resolve() in skipped


def _matches(place: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits a file's place, or a folder's that it lies in.

    >>> [_matches("notes/old/a.pdf", [pattern]) for pattern in ("notes", "notes/*/*.pdf", "*.pdf", "old")]
    [True, True, True, False]
    """
    return any(fnmatch(place, pattern) or fnmatch(place, f"{pattern.rstrip('/')}/*") for pattern in patterns)


def _ignored_by_git(root: Path) -> set[Path]:
    """What git ignores, if the folder lies in a repository; nothing where that is the folder itself."""
    listing = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z"]
    try:
        listed = subprocess.run(listing, cwd=root, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return set()
    return {(root / os.fsdecode(name)).resolve() for name in listed.split(b"\0") if name} - {root.resolve()}


def _refuse_large(files: Files) -> None:
    total = size_of(files)
    if total <= LIMIT:
        return
    sizes: Counter[str] = Counter()
    for place, path in files.items():
        sizes[place] = path.stat().st_size
        if "/" in place:  # many small files are found by their folder
            sizes[place.partition("/")[0] + "/"] += path.stat().st_size
    raise InputError(
        f"the working folder has {mebibytes(total)} in {len(files):,} files, and {mebibytes(LIMIT)} can be sent; "
        "leave out what the job does not need with --exclude PATTERN, or name it in .gitignore; the largest:\n"
        + "\n".join(f"{mebibytes(size):>12}  {place}" for place, size in sizes.most_common(6))
    )


def places_of(job: Job) -> dict[str, str]:
    """The paths in a job, by their keys; the name of a known source is none."""
    table = job.table()
    found = {key: table[section].get(name) for key in PLACES for section, name in [key.split(".")]}
    return {key: path for key, path in found.items() if path and path not in SOURCES}


def anchored(jobs: Sequence[Job], base: Path | None, cluster: str) -> dict[str, str]:
    """The relative paths of jobs, made absolute from `base`: the job will not run where its user stands.

    Raises `InputError` where there is no base, because the cluster is elsewhere, or where the jobs of a grid differ.
    """
    found: dict[str, set[str]] = {}
    for job in jobs:
        for key, path in places_of(job).items():
            found.setdefault(key, set()).add(path)
    relative = {key: paths for key, paths in found.items() if any(map(is_relative, paths))}
    for key, paths in relative.items():
        shown = ", ".join(f"'{path}'" for path in sorted(paths))
        if base is None:
            raise InputError(
                f"{key} = {shown}: the head node of {cluster} is another machine, where a relative path leads into a "
                f"folder that is deleted with the job; give an absolute one that is good there: -s {key}=/shared/..."
            )
        if len(paths) > 1:
            raise InputError(f"{key} = {shown}: these runs of a grid differ; give absolute paths in the job file")
    return {key: str(base / path) for key, paths in relative.items() for path in paths if base}


def is_relative(path: str) -> bool:
    """Whether a path means something else in another folder.

    >>> [is_relative(path) for path in ("runs", "/runs", "~/runs", "s3://bucket/runs")]
    [True, False, False, False]
    """
    return "://" not in path and not path.startswith(("/", "~"))
