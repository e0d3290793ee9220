"""What a run left, read back from its folder to be shown: nothing here needs the run, its data or its method.

A run that was killed has left less; what is missing is empty. Shapes: `T` rounds, `C` classes, `N` clients.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.record import read_summary, read_table, summary
from rayfed.values import InputError

__all__ = ["ClassLoss", "Run", "forgotten", "read_run"]

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
    rounds: Columns  # a value for each round, round 0 first: (T + 1,)
    clients: Columns  # a value for each client of each round
    classes: tuple[str, ...]
    class_accuracy: np.ndarray  # (T + 1, C)
    partition: Columns  # a value for each client and class that it holds images of; `class` is an index
    num_clients: int

    @property
    def name(self) -> str:
        return self.job["name"]


@dataclass(frozen=True)
class ClassLoss:
    """What became of a class."""

    name: str
    peak_round: int
    peak: float  # its best accuracy before the last round
    last: float

    @property
    def lost(self) -> float:
        return self.peak - self.last


def read_run(folder: Path) -> Run:
    """Raises `InputError` where no run has been."""
    if not (folder / "job.toml").is_file():
        raise InputError(f"'{folder}' is no folder of a run: it holds no job.toml")
    job_text = (folder / "job.toml").read_text()
    job = tomllib.loads(job_text)
    environment, written = folder / "environment.json", read_summary(folder)
    rounds, classes = _columns(folder, "rounds"), _columns(folder, "classes")
    num_classes = int((classes["round"] == 0).sum())
    partition = _columns(folder, "partition")
    names = tuple(dict.fromkeys([*classes["class"][:num_classes], *partition["class"]]))
    number = {name: i for i, name in enumerate(names)}
    partition["class"] = np.array([number[name] for name in partition["class"]], dtype=np.int64)
    return Run(
        job=job,
        job_text=job_text,
        status=written.get("status", "unknown"),
        error=written.get("error", ""),
        environment=json.loads(environment.read_text()) if environment.is_file() else {},
        summary=summary(_rows(rounds)),
        rounds=rounds,
        clients=_columns(folder, "clients"),
        classes=names,
        class_accuracy=classes["accuracy"].reshape(-1, max(num_classes, 1)),
        partition=partition,
        # Those at the end may hold nothing, and a partition by a column of the data has no number in the job.
        num_clients=max(job["data"]["partition"].get("num_clients", 0), partition["client"].max(initial=-1) + 1),
    )


def forgotten(run: Run) -> list[ClassLoss]:
    """Each class's best accuracy before the last round, and its last; what lost most comes first.

    Their mean loss is the run's forgetting (`metrics.forgetting`). Empty before there are two rounds of training.
    """
    earlier, last = run.class_accuracy[1:-1], run.class_accuracy[-1:]
    if not len(earlier):
        return []
    best = np.where(np.isnan(earlier), -np.inf, earlier).argmax(axis=0)
    losses = [
        ClassLoss(name, int(row) + 1, float(earlier[row, c]), float(last[0, c]))
        for c, (name, row) in enumerate(zip(run.classes, best, strict=True))
    ]
    return sorted(losses, key=lambda loss: -np.nan_to_num(loss.lost, nan=-np.inf))


def _columns(folder: Path, name: str) -> Columns:
    """A table's columns; of one that was never written, with nothing in them."""
    table = read_table(folder, name)
    return {column: table.column(column).to_numpy() for column in table.column_names}


def _rows(columns: Columns) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
