"""Choose where a job's results and checkpoints go, and refuse places where they may not go."""

from __future__ import annotations

import logging
import os
import shlex
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

# Everything that a run writes.
TABLES = tuple(f"{name}.parquet" for name in RESULTS)
FOLDERS = ("checkpoints", "modules", "tensorboard", "wandb", "mlflow")
# The last one to be cleared is job.toml, because it says that the folder is a run's.
FILES = (
    "own.parquet",
    "partition.parquet",
    "environment.json",
    "summary.json",
    "log.txt",
    "report.html",
    "job.toml",
)
OWN = TABLES + FOLDERS + FILES
# A run that ends before it has its job.toml leaves these.
BEFORE_BEGIN = {LOCK, "checkpoints", "modules"}
FORCE = "--force (in Python force=True)"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Folders:
    """The places of a job's results: the run's folder and the folder of its checkpoints."""

    path: Path
    # This may be a URI.
    checkpoints: Folder
    # The run's folder lies in this folder.
    output_path: Path

    @classmethod
    def of(cls, job: Job) -> Folders:
        """Return the folders of a job."""
        output_path = Path(job.output.path).expanduser().resolve()
        return cls(folder_of(job), checkpoints_of(job), output_path)

    def refuse_unwritable(self) -> None:
        """Raise `InputError` if results or checkpoints cannot be written here.

        Raises `Locked` if another run is writing here.
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
        """Raise `InputError` if results exist already.

        With `force` results may exist, but a folder that is not a run's is refused. `resume` says
        how the run is resumed, if not by the command.
        """
        place = self.checkpoints.place
        if not force and place != str(self.path / "checkpoints") and self.checkpoints.names():
            raise InputError(
                f"'{place}' holds checkpoints of a run of this name; "
                f"{choices(resume or f'rayfed resume {shlex.quote(place)}')}"
            )
        if not self.path.exists():
            return
        names = {file.name for file in self.path.iterdir()}
        if names <= BEFORE_BEGIN:
            return
        if not (self.path / "job.toml").is_file():
            raise InputError(
                f"'{self.path}' exists and is not a rayfed run; give the job another name or "
                "output.path"
            )
        if not force:
            raise InputError(
                f"'{self.path}' holds the results of a run; "
                f"{choices(resume or f'rayfed resume {shlex.quote(str(self.path))}')}"
            )

    def clear(self) -> None:
        """Remove an earlier run from the folder, and no other files."""
        for name in OWN:
            if (self.path / name).is_dir() and not (self.path / name).is_symlink():
                shutil.rmtree(self.path / name)
            else:
                (self.path / name).unlink(missing_ok=True)


def choices(resume: str = "") -> str:
    """Return what the user may do about results that exist, a line for each way.

    `resume` is the command that continues them, if that may be done.

    >>> print(choices())
    choose one:
      keep them, and give the job another name: -s name=NEW
      replace them: --force (in Python force=True)
    """
    ways = ["keep them, and give the job another name: -s name=NEW", f"replace them: {FORCE}"]
    if resume:
        ways.append(f"continue the run: {resume} (in Python resume=True)")
    return "\n  ".join(["choose one:", *ways])


def folder_of(job: Job) -> Path:
    """Return the absolute path of `<output.path>/<name>`.

    Raises `InputError` if a run cannot have this path or this name.
    """
    if "\0" in job.output.path:
        raise InputError(f"output.path = {job.output.path!r}: a path cannot hold NUL")
    if "://" in job.output.path:
        raise InputError(
            f"output.path = '{job.output.path}': give a folder; a URI can be given as "
            "output.checkpoints"
        )
    taken = sorted(set(Path(job.name).parts[1:]) & set(OWN))
    if taken:
        raise InputError(
            f"name = '{job.name}': in the folder of a run, '{taken[0]}' is that run's own; give "
            "the job another name"
        )
    return Path(job.output.path).expanduser().absolute() / job.name


def checkpoints_of(job: Job) -> Folder:
    """Return the folder of the job's checkpoints: in its own folder or in `output.checkpoints`."""
    if job.output.checkpoints:
        return Folder(joined(job.output.checkpoints, job.name))
    return Folder(str(folder_of(job) / "checkpoints"))


def _refuse_read_only(content: str, place: Path) -> None:
    """Raise `InputError` if the nearest existing folder of a place cannot be written to."""
    folders = [place, *place.parents]
    nearest = next(folder for folder in folders if os.path.exists(folder))
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


def is_checkpoint_of(weights: str, name: str) -> bool:
    """Say whether a path of weights is a checkpoint in the folder of the run with a name.

    The path is compared by its end, because the folder of all runs may have been moved since.

    >>> is_checkpoint_of("runs/g/first/checkpoints/round-00002.safetensors", "g/first")
    True
    >>> is_checkpoint_of("", "g/first")
    False
    """
    return Path(weights).parent.match(f"{name}/checkpoints")


def is_done(job: Job) -> bool:
    """Say whether the job's complete results are in its folder.

    If the job's files are at other paths than before, the answer is no: only a run that reads them
    can tell whether they are the same. Raises `InputError` if the folder has another job's results.
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
        # The table is damaged. A run that is resumed writes it again.
        return False


def is_begun(job: Job) -> bool:
    """Say whether the job's folder has a run of this job.

    If its job.toml is damaged, the answer is no: only the checkpoints can tell whose they are, and
    they do so when they are restored. Raises `InputError` if the run is another job's, or has more
    rounds than this job.
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
            f"{choices()}"
        )
    return True


def refuse_other_paths(job: Job) -> None:
    """Raise `InputError` if the run in the job's folder had its files at other paths."""
    differing = other_paths(job)
    if differing:
        raise InputError(
            f"'{folder_of(job)}' holds the results of a job of this name with other files "
            f"({'; '.join(differing)}), and no checkpoint, which could tell whether they hold the "
            f"same; {choices()}"
        )


def other_paths(job: Job) -> list[str]:
    """Say in words which files the run in the job's folder had at other paths than the job."""
    try:
        tables = flat(read_toml(folder_of(job) / "job.toml"))
    except InputError:
        return []
    job_tables = flat(job.table())
    keys = [key for key in job.places() if not key.startswith("output.")]
    keys += [key for key in ("data.source", "data.test") if key not in keys]
    old_paths, new_paths = {}, {}
    for key in keys:
        old_path, new_path = str(tables.get(key, "")), job_tables.get(key, "")
        if _real(old_path) != _real(str(new_path)):
            old_paths[key] = old_path
            new_paths[key] = new_path
    return differences(old_paths, new_paths)


def _real(path: str) -> str:
    """Return a local path as the disk has it: absolute, without links.

    A URI or an empty path stays as it is.
    """
    if not path or "://" in path:
        return path
    return os.path.realpath(os.path.expanduser(path))


def lineage_of(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lineage of a job that was saved as tables."""
    try:
        return read_job(tables).lineage()
    except InputError:
        # A method made in Python may have no name that can be imported.
        return {**read_job({**tables, "method": "fedavg"}).lineage(), "method": tables["method"]}
