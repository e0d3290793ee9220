"""How far a run has come and how it ended, in `summary.json`."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.base.files import read_regular
from rayfed.clients.settings import Training
from rayfed.folder.lock import is_locked

if TYPE_CHECKING:
    from rayfed.job import Job

log = logging.getLogger(__name__)

# Of the best and the last round.
SHOWN = ("round", "test_accuracy", "test_loss", "forgetting")


@dataclass(frozen=True)
class Ended:
    """How a run ended: the exit code and the message that its command would have ended with."""

    job: Job
    exit_code: int = 0
    message: str = ""


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Best and last evaluated round of a run, and its cost, from the rows of `rounds.parquet`.

    Papers report best or last.
    """
    if not rounds:
        return {"rounds": 0}
    evaluated = [row for row in rounds if row["test_accuracy"] is not None]
    best, last = best_of(rounds) or evaluated[0], evaluated[-1]
    return {
        "rounds": rounds[-1]["round"],
        "best": {key: best[key] for key in SHOWN},
        "last": {key: last[key] for key in SHOWN},
        **{key: sum(row[key] for row in rounds) for key in ("seconds", "bytes_down", "bytes_up")},
    }


def best_of(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first row with the best test accuracy, round 0 aside: the initial model's is chance.

    None before any.
    """
    found = [row for row in rounds if row["round"] and row["test_accuracy"] is not None]
    return max(found, key=lambda row: row["test_accuracy"], default=None)


def early_end(training: Training, rounds: list[dict[str, Any]]) -> str:
    """Why a run with these rows of `rounds.parquet` plays no more rounds than these; '' where it
    does, or has all.
    """
    if not training.patience or not rounds or rounds[-1]["round"] >= training.num_rounds:
        return ""
    if not training.patience_is_over({row["round"]: row["test_accuracy"] for row in rounds}):
        return ""
    number = training.patience
    return (
        f"no better test accuracy in {number} evaluated round{'s' if number > 1 else ''} "
        "(train.patience)"
    )


def read_summary(path: Path) -> dict[str, Any]:
    """The summary in a run's folder; empty if there is none, or if it is damaged."""
    return read_json(path / "summary.json")


def read_environment(path: Path) -> dict[str, Any]:
    """What a run's results come from, as `provenance.environment` found it; empty if it is missing
    or damaged.
    """
    return read_json(path / "environment.json")


def read_json(file: Path) -> dict[str, Any]:
    """The table in a file; empty if there is none, or if the file is damaged, as after a power cut."""
    try:
        return dict(json.loads(read_regular(file).decode()))
    except FileNotFoundError:
        return {}
    except (OSError, RecursionError, TypeError, ValueError) as error:
        log.warning("'%s' is damaged (%r), and counts as missing", file, error)
        return {}


def status_of(path: Path) -> str:
    """How the run in a folder stands: running, done, stopped, failed, or killed before it could
    write how it ended.
    """
    status = str(read_summary(path).get("status", "unknown"))
    if status == "running" and not is_locked(path):
        # Another machine's lock may not be seen from here.
        return "killed, or running elsewhere"
    return status
