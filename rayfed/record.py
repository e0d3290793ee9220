"""The folder of a run: what is written while it goes on, and read back afterwards.

    runs/<name>/  job.toml  environment.json  partition.parquet  rounds.parquet  clients.parquet  classes.parquet
                  checkpoints/  summary.json  log.txt  report.html

The last three tables are Parquet datasets: each round adds one small file to each, written aside and moved into place
whole, so that what a killed run leaves behind can be read. One process at a time may write.
"""

from __future__ import annotations

import fcntl
import json
import logging
import logging.handlers
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w

from rayfed import checkpoint
from rayfed.checkpoint import Saved
from rayfed.data.federation import Federation
from rayfed.job import Job, read_job
from rayfed.local import RunFailed
from rayfed.provenance import environment
from rayfed.rounds import Round
from rayfed.storage import Folder, whole
from rayfed.values import InputError

SCHEMAS = {
    "rounds": pa.schema(
        [
            ("round", pa.int64()),
            ("test_accuracy", pa.float64()),
            ("test_loss", pa.float64()),
            ("forgetting", pa.float64()),
            ("train_loss", pa.float64()),
            ("seconds", pa.float64()),
            ("bytes_down", pa.int64()),
            ("bytes_up", pa.int64()),
        ]
    ),
    "clients": pa.schema(
        [
            ("round", pa.int64()),
            ("client", pa.int64()),
            ("num_examples", pa.int64()),
            ("train_loss", pa.float64()),
            ("seconds", pa.float64()),
            ("node", pa.string()),
        ]
    ),
    "classes": pa.schema([("round", pa.int64()), ("class", pa.string()), ("accuracy", pa.float64())]),
    "partition": pa.schema([("client", pa.int64()), ("class", pa.string()), ("count", pa.int64())]),
}
RESULTS = ("rounds", "clients", "classes")  # the tables to which each round adds

# What a run writes; job.toml, by which a folder is known as a run's, goes last when it is cleared.
OWN = (
    *(f"{name}.parquet" for name in SCHEMAS),
    *("environment.json", "checkpoints", "summary.json", "log.txt", "report.html", "job.toml"),
)


def folder_of(job: Job) -> Path:
    """`<output.path>/<name>`, absolute."""
    if "\0" in job.output.path:
        raise InputError(f"output.path = {job.output.path!r}: a path cannot hold NUL")
    return Path(job.output.path).expanduser().absolute() / job.name


def checkpoints_of(job: Job) -> Folder:
    """Where the job's checkpoints lie: in its folder, or where `output.checkpoints` says."""
    inside = folder_of(job) / "checkpoints"
    return Folder(f"{job.output.checkpoints.rstrip('/')}/{job.name}" if job.output.checkpoints else str(inside))


def refuse_overwriting(job: Job, force: bool) -> None:
    """Raises `InputError` where results lie already, or, even with `force`, where something else does."""
    path = folder_of(job)
    base = Path(job.output.path).expanduser().resolve()
    if not path.resolve().is_relative_to(base):
        raise InputError(f"'{path}': a link leads out of '{base}' (output.path)")
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"results cannot be written to '{path}': '{there}' is no folder that can be written to")
    if not force and (place := checkpoints_of(job)).place != str(path / "checkpoints") and place.names():
        raise InputError(
            f"'{place.place}' holds checkpoints of a run of this name; go on with it (`rayfed resume {place.place}`), "
            "give --force to replace them, or the job another name"
        )
    if there != path or not any(path.iterdir()):
        return
    if not (path / "job.toml").is_file():
        raise InputError(f"'{path}' exists and is no rayfed run; give the job another name or output.path")
    if not force:
        raise InputError(
            f"'{path}' holds the results of a run; give --force to replace them, the job another name, or go on with "
            f"it: rayfed resume {path}"
        )


def is_done(job: Job) -> bool:
    """Whether the job's results are in its folder, complete. Raises `InputError` where another job's results are."""
    summary = read_summary(folder_of(job)) if is_begun(job) else {}
    return (summary.get("status"), summary.get("rounds")) == ("done", job.training.num_rounds)


def is_begun(job: Job) -> bool:
    """Whether the job's folder is there, with no more rounds than it asks for. `InputError` if it is another job's."""
    path = folder_of(job)
    if not (path / "job.toml").is_file():
        return False
    there = read_job(path / "job.toml")
    further = read_summary(path).get("rounds", 0) > job.training.num_rounds
    if checkpoint.lineage(there) != checkpoint.lineage(job) or further:
        raise InputError(
            f"'{path}' holds the results of another job of this name{' (it has more rounds)' if further else ''}; give "
            "--force to replace them, or the job another name"
        )
    return True


class Unwritable(RunFailed):
    """Results cannot be written. The run is sound, and can go on once they can."""

    resumable = True


class Record:
    """Writes one run's folder: `add` each round as it finishes, and `finish` with how the run ended."""

    def __init__(self, job: Job, federation: Federation, *, force: bool = False, saved: Saved | None = None) -> None:
        """Begin a folder, over another run's with `force`; or go on with one, from the results in a checkpoint."""
        self.path = folder_of(job)
        if saved is None:
            refuse_overwriting(job, force)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _only_writer(self.path)
        self._classes = federation.train.classes
        self._rounds: list[dict[str, Any]] = []
        now = environment(job, federation)
        if saved is None:
            _clear(self.path)
            checkpoint.clear(checkpoints_of(job))
        else:
            for name in RESULTS:
                _replace_parts(self.path / f"{name}.parquet", saved.round, saved.table(name))
            self._rounds = saved.table("rounds").to_pylist()
            began = read_json(self.path / "environment.json") or now
            now = {**began, "resumed": [*began.get("resumed", []), {"after_round": saved.round, **now}]}
        _write(self.path / "job.toml", tomli_w.dumps(job.table()))
        _write(self.path / "environment.json", _json(now))
        pq.write_table(partition_table(federation), self.path / "partition.parquet")
        self._summarise("running")

    def add(self, round: Round) -> None:
        """Write a finished round's rows; said again of the same round, it changes nothing. Raises `Unwritable`."""
        rows = round_rows(round, self._classes)
        try:
            for name, table in rows.items():
                _write_part(self.path / f"{name}.parquet", round.round, pa.Table.from_pylist(table, SCHEMAS[name]))
            self._rounds = [row for row in self._rounds if row["round"] < round.round] + rows["rounds"]
            self._summarise("running")
        except OSError as error:
            raise Unwritable(f"the results of round {round.round} cannot be written to {self.path}: {error}") from None

    @property
    def round(self) -> int | None:
        """The last one that is written; None before the first."""
        return self._rounds[-1]["round"] if self._rounds else None

    def tables(self) -> dict[str, pa.Table]:
        """All results so far."""
        return {name: read_table(self.path, name) for name in RESULTS}

    def finish(self, status: str, error: str | None = None) -> None:
        """Say how the run ended: done, stopped or failed, and why. Raises `Unwritable`."""
        try:
            self._summarise(status, **({"error": error} if error else {}))
        except OSError as why:
            raise Unwritable(f"how the run ended cannot be written to {self.path}: {why}") from None

    def close(self) -> None:
        """Let others write."""
        os.close(self._lock)

    def _summarise(self, status: str, **more: Any) -> None:
        _write(self.path / "summary.json", _json({"status": status, **more, **summary(self._rounds)}))


def round_rows(round: Round, classes: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """The rows that one round adds to each table."""
    row = {
        "round": round.round,
        "test_accuracy": round.test_accuracy,
        "test_loss": round.test_loss,
        "forgetting": round.forgetting,
        "train_loss": round.train_loss,
        "seconds": round.seconds,
        "bytes_down": round.bytes_down,
        "bytes_up": round.bytes_up,
    }
    return {
        "rounds": [row],
        "clients": [{"round": round.round, **asdict(client)} for client in round.clients],
        "classes": [
            {"round": round.round, "class": name, "accuracy": float(accuracy)}
            for name, accuracy in zip(classes, round.class_accuracy, strict=True)
        ],
    }


def partition_table(federation: Federation) -> pa.Table:
    """How many images of each class each client holds. Only what it holds: the table grows with the images alone."""
    partition, num_classes = federation.partition, federation.num_classes
    owners = np.repeat(np.arange(partition.num_clients), partition.sizes)
    cells, counts = np.unique(owners * num_classes + federation.train.labels[partition.indices], return_counts=True)
    names = pa.array(federation.train.classes).take(pa.array(cells % num_classes))
    return pa.table([pa.array(cells // num_classes), names, pa.array(counts)], schema=SCHEMAS["partition"])


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Best and last of a run, and what it cost; papers report one or the other."""
    if not rounds:
        return {"rounds": 0}
    best, last = max(rounds, key=lambda row: row["test_accuracy"]), rounds[-1]
    shown = ("round", "test_accuracy", "test_loss", "forgetting")
    return {
        "rounds": last["round"],
        "best": {key: best[key] for key in shown},
        "last": {key: last[key] for key in shown},
        "seconds": sum(row["seconds"] for row in rounds),
        "bytes_down": sum(row["bytes_down"] for row in rounds),
        "bytes_up": sum(row["bytes_up"] for row in rounds),
    }


def read_table(path: Path, name: str) -> pa.Table:
    """A table of a run's folder by its name in `SCHEMAS`, in the order of the rounds; empty if there is none yet."""
    if not (path / f"{name}.parquet").exists():
        return SCHEMAS[name].empty_table()
    return pq.read_table(path / f"{name}.parquet", schema=SCHEMAS[name]).combine_chunks()


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a run's folder; empty if it has none."""
    return read_json(path / "summary.json")


def is_abandoned(path: Path) -> bool:
    """Whether nobody on this machine writes to a run's folder. Another machine's lock may not be seen from here."""
    try:
        os.close(_only_writer(path))
    except InputError:
        return False
    return True


def read_json(file: Path) -> dict[str, Any]:
    """What a file holds; nothing where there is none."""
    return json.loads(file.read_text()) if file.is_file() else {}


def _clear(path: Path) -> None:
    """Remove an earlier run, and nothing that somebody else has put beside it."""
    for name in OWN:
        if (path / name).is_dir() and not (path / name).is_symlink():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)


def _only_writer(path: Path) -> int:
    """A lock on a folder itself, held until the descriptor is closed or its process ends."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(folder)
        raise InputError(f"'{path}' is being written to by another process: wait for it, or stop it") from None
    return folder


def _replace_parts(folder: Path, round: int, table: pa.Table) -> None:
    """A dataset made anew, in one part up to a round; the checkpoint that it comes from is still there if this dies."""
    if folder.exists():
        shutil.rmtree(folder)
    _write_part(folder, round, table)


def _write_part(folder: Path, round: int, table: pa.Table) -> None:
    if table.num_rows == 0 and folder.exists():
        return
    folder.mkdir(exist_ok=True)
    with whole(folder / f"round-{round:05d}.parquet") as aside:
        pq.write_table(table, aside)


def _write(path: Path, text: str) -> None:
    with whole(path) as aside:
        aside.write_text(text)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


class LogFile(logging.FileHandler):
    """It ends where the disk is full; the run does not, and has said the same elsewhere."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to_file() -> Iterator[Callable[[Path], None]]:
    """Keep the package's log; call what this gives with a run's folder to have it written there, to `log.txt`."""
    log = logging.getLogger("rayfed")
    level, kept = log.level, logging.handlers.MemoryHandler(capacity=0, flushLevel=logging.NOTSET)

    def begin(path: Path) -> None:
        file = LogFile(path / "log.txt")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        kept.setTarget(file)
        kept.flush()

    log.addHandler(kept)
    log.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield begin
    finally:
        log.setLevel(level)
        log.removeHandler(kept)
        if kept.target is not None:
            kept.target.close()
        kept.close()
