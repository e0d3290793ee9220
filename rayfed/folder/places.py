"""Where a job's results and checkpoints go, and whether they may go there."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfed.base.errors import InputError
from rayfed.base.storage import Folder, joined
from rayfed.folder.lock import LOCK, OWNER, is_locked, locked
from rayfed.folder.summary import early_end, read_summary
from rayfed.folder.tables import RESULTS, read_table
from rayfed.job import Job, differences, flat, other_lineage, read_job, read_toml

# Everything that a run writes. job.toml, by which a folder is known as a run's, goes last when it
# is cleared.
FOLDERS = (
    *(f"{name}.parquet" for name in RESULTS),
    "checkpoints",
    "modules",
    "tensorboard",
    "wandb",
    "mlflow",
)
FILES = (
    "own.parquet",
    "partition.parquet",
    "environment.json",
    "summary.json",
    "log.txt",
    "report.html",
    "job.toml",
)
OWN = (*FOLDERS, *FILES)
# What a run leaves that ends before it has its job.toml.
BEFORE_BEGIN = {
    LOCK,
    "checkpoints",
    "modules",
}
OTHERWISE = "give --force (in Python force=True) to replace them, or give the job another name"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Folders:
    """Where a job's results go: the run's folder, and the folder of its checkpoints, which may be a
    URI.
    """

    path: Path
    checkpoints: Folder
    # The run's folder lies in it.
    output_path: Path

    @classmethod
    def of(cls, job: Job) -> Folders:
        return cls(
            folder_of(job), checkpoints_of(job), Path(job.output.path).expanduser().resolve()
        )

    def refuse_unwritable(self) -> None:
        """Raises `InputError` where results or checkpoints cannot be written here, `Locked` by
        another run.
        """
        local_checkpoints = self.checkpoints.local
        if not self.path.resolve().is_relative_to(self.output_path):
            raise InputError(
                f"'{self.path}': a link leads out of '{self.output_path}' (output.path)"
            )
        _refuse_read_only("results", self.path)
        if local_checkpoints is not None:
            _refuse_read_only("checkpoints", local_checkpoints)
        _refuse_locked(self.path, LOCK)
        if local_checkpoints is not None:
            _refuse_locked(local_checkpoints, OWNER)

    def refuse_overwriting(self, force: bool, resume: str = "") -> None:
        """Raises `InputError` where results exist already or, even with `force`, where the folder
        is not a run's.

        `resume` says how the run is resumed, if not by the command.
        """
        place = self.checkpoints.place
        if not force and place != str(self.path / "checkpoints") and self.checkpoints.names():
            raise InputError(
                f"'{place}' holds checkpoints of a run of this name; {OTHERWISE}, "
                f"or resume the run (in Python resume=True): {resume or f'rayfed resume {place}'}"
            )
        if not self.path.exists() or not {file.name for file in self.path.iterdir()} - BEFORE_BEGIN:
            return
        if not (self.path / "job.toml").is_file():
            raise InputError(
                f"'{self.path}' exists and is not a rayfed run; give the job another name or "
                "output.path"
            )
        if not force:
            raise InputError(
                f"'{self.path}' holds the results of a run; {OTHERWISE}, or resume the run (in "
                f"Python resume=True): {resume or f'rayfed resume {self.path}'}"
            )

    def clear(self) -> None:
        """Remove an earlier run from the folder, and no other files."""
        for name in OWN:
            if (self.path / name).is_dir() and not (self.path / name).is_symlink():
                shutil.rmtree(self.path / name)
            else:
                (self.path / name).unlink(missing_ok=True)


def folder_of(job: Job) -> Path:
    """`<output.path>/<name>`, absolute."""
    if "\0" in job.output.path:
        raise InputError(f"output.path = {job.output.path!r}: a path cannot hold NUL")
    if "://" in job.output.path:
        raise InputError(
            f"output.path = '{job.output.path}': give a folder; a URI can be given as "
            "output.checkpoints"
        )
    taken = sorted({*Path(job.name).parts[1:]} & {*OWN})
    if taken:
        raise InputError(
            f"name = '{job.name}': in the folder of a run, '{taken[0]}' is that run's own; give "
            "the job another name"
        )
    return Path(job.output.path).expanduser().absolute() / job.name


def checkpoints_of(job: Job) -> Folder:
    """The folder of the job's checkpoints: inside its own, or in `output.checkpoints`."""
    if job.output.checkpoints:
        return Folder(joined(job.output.checkpoints, job.name))
    return Folder(str(folder_of(job) / "checkpoints"))


def _refuse_read_only(content: str, place: Path) -> None:
    nearest = next(folder for folder in (place, *place.parents) if os.path.exists(folder))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise InputError(
            f"{content} cannot be written to '{place}': '{nearest}' is not a folder that can be "
            "written to"
        )


def _refuse_locked(folder: Path, name: str) -> None:
    """Raise `Locked` if another process holds the lock, before anything is read or started."""
    if is_locked(folder, name):
        with locked(folder, name):
            pass


def is_done(job: Job) -> bool:
    """Whether the job's results are in its folder, complete.

    Raises `InputError` where another job's results are.

    With its files at other paths the job is not known to be done: only to read them shows whether
    they are the same.
    """
    if not is_begun(job) or other_paths(job):
        return False
    path = folder_of(job)
    summary = read_summary(path)
    if summary.get("status") != "done":
        return False
    if summary.get("rounds") == job.train.num_rounds:
        return True
    try:
        return bool(early_end(job.train, read_table(path, "rounds").to_pylist()))
    except ValueError:
        # A damaged table: to resume the run writes it again.
        return False


def is_begun(job: Job) -> bool:
    """Whether the job's folder exists, with no more rounds than it asks for.

    `InputError` if it is another job's.

    Where its job.toml is damaged, only the checkpoints can tell whose they are, and do when they
    are restored.
    """
    path = folder_of(job)
    if not (path / "job.toml").is_file():
        return False
    try:
        tables = read_toml(path / "job.toml")
    except InputError as error:
        log.warning("%s", error)
        return False
    differing = other_lineage(lineage_of(tables), job.lineage())
    if not differing and read_summary(path).get("rounds", 0) > job.train.num_rounds:
        differing = ["it has more rounds"]
    if differing:
        raise InputError(
            f"'{path}' holds the results of another job of this name ({'; '.join(differing)}); "
            f"{OTHERWISE}"
        )
    return True


def refuse_other_paths(job: Job) -> None:
    """Raises `InputError` where the run in the job's folder had its files at other paths."""
    if differing := other_paths(job):
        raise InputError(
            f"'{folder_of(job)}' holds the results of a job of this name with other files "
            f"({'; '.join(differing)}), and no checkpoint, which could tell whether they hold the "
            f"same; {OTHERWISE}"
        )


def other_paths(job: Job) -> list[str]:
    """Where the run in the job's folder had its files, if elsewhere than the job has them, in
    words.
    """
    try:
        tables = flat(read_toml(folder_of(job) / "job.toml"))
    except InputError:
        return []
    here = flat(job.table())
    keys = [key for key in job.places() if not key.startswith("output.")]
    keys += [key for key in ("data.source", "data.test") if key not in keys]
    there = {key: str(tables.get(key, "")) for key in keys}
    moved = {key for key in keys if _real(there[key]) != _real(str(here.get(key, "")))}
    return differences(
        {key: there[key] for key in moved}, {key: here.get(key, "") for key in moved}
    )


def _real(path: str) -> str:
    """A local path as the disk has it: absolute, without links.

    A URI, or no path, stays as it is.
    """
    if not path or "://" in path:
        return path
    return os.path.realpath(os.path.expanduser(path))


def lineage_of(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The lineage of a saved job."""
    try:
        return read_job(tables).lineage()
    except InputError:
        # A method made in Python may have no name that can be imported.
        return {**read_job({**tables, "method": "fedavg"}).lineage(), "method": tables["method"]}
