"""Where a job's results and checkpoints go, and whether they may go there."""

import logging
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfed.base.errors import ENDED, InputError
from rayfed.base.storage import Folder, joined
from rayfed.folder.owner import LOCK, OWNER, is_locked, lock
from rayfed.folder.summary import early_end, read_summary
from rayfed.folder.tables import RESULTS, read_table
from rayfed.job import Job, differences, read_job, read_toml

# Everything that a run writes. job.toml, by which a folder is known as a run's, goes last when it is cleared.
FOLDERS = (*(f"{name}.parquet" for name in RESULTS), "checkpoints", "modules", "tensorboard", "wandb", "mlflow")
FILES = ("partition.parquet", "environment.json", "summary.json", "log.txt", "report.html", "job.toml")
OWN = (*FOLDERS, *FILES)
BEFORE_BEGIN = {LOCK, ENDED, "checkpoints", "modules"}  # what a run leaves that ends before it has its job.toml
OTHERWISE = "give --force to replace them, or give the job another name"

log = logging.getLogger(__name__)


def folder_of(job: Job) -> Path:
    """`<output.path>/<name>`, absolute."""
    if "\0" in job.output.path:
        raise InputError(f"output.path = {job.output.path!r}: a path cannot hold NUL")
    if "://" in job.output.path:
        raise InputError(f"output.path = '{job.output.path}': give a folder; a URI can be given as output.checkpoints")
    if taken := {*Path(job.name).parts[1:]} & {*OWN}:
        what = f"in the folder of a run, '{taken.pop()}' is that run's own"
        raise InputError(f"name = '{job.name}': {what}; give the job another name")
    return Path(job.output.path).expanduser().absolute() / job.name


def checkpoints_of(job: Job) -> Folder:
    """The folder of the job's checkpoints: inside its own, or in `output.checkpoints`."""
    inside = folder_of(job) / "checkpoints"
    return Folder(joined(job.output.checkpoints, job.name) if job.output.checkpoints else str(inside))


def refuse_unwritable(job: Job) -> None:
    """Raises `InputError` where results or checkpoints cannot be written to their place, `Locked` by another run."""
    path, checkpoints = folder_of(job), checkpoints_of(job).local
    base = Path(job.output.path).expanduser().resolve()
    if not path.resolve().is_relative_to(base):
        raise InputError(f"'{path}': a link leads out of '{base}' (output.path)")
    for what, place in (("results", path), *([("checkpoints", checkpoints)] if checkpoints else [])):
        nearest = next(folder for folder in (place, *place.parents) if os.path.exists(folder))
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            problem = f"{what} cannot be written to '{place}'"
            raise InputError(f"{problem}: '{nearest}' is not a folder that can be written to")
    for name in (*OWN, LOCK):
        is_own = stat.S_ISDIR if name in FOLDERS else stat.S_ISREG
        if os.path.lexists(path / name) and not is_own(os.lstat(path / name).st_mode):
            kind = "folder" if name in FOLDERS else "file"
            raise InputError(f"'{path / name}' is a link or the like, where a run has a {kind} of its own: remove it")
    for folder, name in ((path, LOCK), (checkpoints, OWNER)):
        if folder and is_locked(folder, name):
            os.close(lock(folder, name))  # it waits, or says who has it


def refuse_overwriting(job: Job, force: bool) -> None:
    """Raises `InputError` where results exist already or, even with `force`, where the folder is not a run's."""
    path = folder_of(job)
    if not force and (place := checkpoints_of(job)).place != str(path / "checkpoints") and place.names():
        what = f"'{place.place}' holds checkpoints of a run of this name"
        raise InputError(f"{what}; {OTHERWISE}, or resume the run: rayfed resume {place.place}")
    if not path.exists() or not {file.name for file in path.iterdir()} - BEFORE_BEGIN:
        return
    if not (path / "job.toml").is_file():
        raise InputError(f"'{path}' exists and is not a rayfed run; give the job another name or output.path")
    if not force:
        raise InputError(f"'{path}' holds the results of a run; {OTHERWISE}, or resume the run: rayfed resume {path}")


def is_done(job: Job) -> bool:
    """Whether the job's results are in its folder, complete. Raises `InputError` where another job's results are."""
    summary = read_summary(path := folder_of(job)) if is_begun(job) else {}
    if summary.get("status") != "done" or summary.get("rounds") == job.train.num_rounds:
        return summary.get("status") == "done"
    try:
        return bool(early_end(job.train, read_table(path, "rounds").to_pylist()))
    except ValueError:  # a damaged table: to resume the run writes it again
        return False


def is_begun(job: Job) -> bool:
    """Whether the job's folder exists, with no more rounds than it asks for. `InputError` if it is another job's.

    Where its job.toml is damaged, only the checkpoints can tell whose they are, and do when they are restored.
    """
    path = folder_of(job)
    if not (path / "job.toml").is_file():
        return False
    try:
        tables = read_toml(path / "job.toml")
    except InputError as error:
        log.warning("%s", error)
        return False
    differing = differences(lineage_of(tables), job.lineage())
    if not differing and read_summary(path).get("rounds", 0) > job.train.num_rounds:
        differing = ["it has more rounds"]
    if differing:
        raise InputError(
            f"'{path}' holds the results of another job of this name ({'; '.join(differing)}); {OTHERWISE}"
        )
    return True


def lineage_of(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The lineage of a saved job."""
    try:
        return read_job(tables).lineage()
    except InputError:  # a method made in Python may have no name that can be imported
        return {**read_job({**tables, "method": "fedavg"}).lineage(), "method": tables["method"]}


def clear_results(path: Path) -> None:
    """Remove an earlier run from a folder, and no other files."""
    for name in OWN:
        if (path / name).is_dir() and not (path / name).is_symlink():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)
