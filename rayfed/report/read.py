"""A run, read back from its folder to be shown.

A run that was killed has left less; whatever is missing is empty. Shapes: `T` rounds, `C` classes, `N` clients.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rayfed.errors import InputError
from rayfed.folder.summary import read_json, read_summary, status_of, summarise
from rayfed.folder.tables import read_table

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Run:
    """A run's folder, in memory."""

    job: dict[str, Any]
    job_text: str  # job.toml as it stands
    status: str
    error: str
    environment: dict[str, Any]
    summary: dict[str, Any]  # of the rounds that are there
    rounds: Columns  # a value per round, round 0 first: (T + 1,)
    clients: Columns  # a value per client of each round
    classes: tuple[str, ...]
    class_accuracy: np.ndarray  # (T + 1, C)
    partition: Columns  # a value per client and class that the client holds; `class` is an index
    num_clients: int

    @property
    def name(self) -> str:
        return self.job["name"]


class ClassLoss(NamedTuple):
    """How much of a class was forgotten. The mean of `lost` is the run's forgetting (`metrics.forgetting`)."""

    name: str
    peak: float  # its best accuracy before the last round
    peak_round: int
    last: float
    lost: float


def read_run(folder: Path) -> Run:
    """Raises `InputError` where the folder is not a run's."""
    if not (folder / "job.toml").is_file():
        raise InputError(f"'{folder}' is not the folder of a run: it holds no job.toml")
    job_text = (folder / "job.toml").read_text()
    job = tomllib.loads(job_text)
    rounds, classes = read_table(folder, "rounds"), _columns(folder, "classes")
    num_classes = int((classes["round"] == 0).sum())
    partition = _columns(folder, "partition")
    names = tuple(dict.fromkeys([*classes["class"][:num_classes], *partition["class"]]))
    number = {name: i for i, name in enumerate(names)}
    partition["class"] = np.array([number[name] for name in partition["class"]], dtype=np.int64)
    return Run(
        job=job,
        job_text=job_text,
        status=status_of(folder),
        error=read_summary(folder).get("error", ""),
        environment=read_json(folder / "environment.json"),
        summary=summarise(rounds.to_pylist()),
        rounds=_columns(folder, "rounds"),
        clients=_columns(folder, "clients"),
        classes=names,
        class_accuracy=classes["accuracy"].reshape(-1, max(num_classes, 1)),
        partition=partition,
        # The last clients may hold nothing, and a partition by a column of the data has no number in the job.
        num_clients=max(job["data"]["partition"].get("num_clients", 0), partition["client"].max(initial=-1) + 1),
    )


def forgotten(run: Run) -> list[ClassLoss]:
    """The accuracy that each class has lost, the largest loss first; empty before there are two rounds of training."""
    earlier, last = run.class_accuracy[1:-1], run.class_accuracy[-1:]
    if not len(earlier):
        return []
    best = np.where(np.isnan(earlier), -np.inf, earlier).argmax(axis=0)
    peaks = np.take_along_axis(earlier, best[None], axis=0)
    columns = (values.ravel().tolist() for values in (peaks, best + 1, last, peaks - last))
    losses = map(ClassLoss, run.classes, *columns)
    return sorted(losses, key=lambda loss: -np.nan_to_num(loss.lost, nan=-np.inf))


def _columns(folder: Path, name: str) -> Columns:
    """A table's columns; empty columns of a table that was never written."""
    table = read_table(folder, name)
    return {column: table.column(column).to_numpy() for column in table.column_names}
