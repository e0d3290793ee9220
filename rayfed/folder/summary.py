"""Make and read `summary.json`: how far a run has come and how it ended."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.clients.settings import Training
from rayfed.folder.lock import is_locked

if TYPE_CHECKING:
    from rayfed.job import Job

log = logging.getLogger(__name__)

# The summary has these columns of the best and the last round.
SHOWN = ("round", "test_accuracy", "test_loss", "forgetting")
# The summary has the sums of these columns over all rounds.
COSTS = ("seconds", "bytes_down", "bytes_up")


@dataclass(frozen=True)
class Ended:
    """How a run ended: the exit code and the message with which its command would have ended."""

    job: Job
    exit_code: int = 0
    message: str = ""


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best and the last evaluated round of a run, and its cost.

    `rounds` are the rows of `rounds.parquet`. Some papers report the best round, others the last.

    >>> summarise([])
    {'rounds': 0}
    """
    if not rounds:
        return {"rounds": 0}
    evaluated = [row for row in rounds if row["test_accuracy"] is not None]
    best, newest = best_of(rounds) or evaluated[0], evaluated[-1]
    summary = {
        "rounds": rounds[-1]["round"],
        "best": {column: best[column] for column in SHOWN},
        "last": {column: newest[column] for column in SHOWN},
    }
    for column in COSTS:
        summary[column] = sum(row[column] for row in rounds)
    return summary


def best_of(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first row with the best test accuracy; None if no round is evaluated.

    Round 0 does not count, because the accuracy of the initial model is chance.
    """
    evaluated = [row for row in rounds if row["round"] and row["test_accuracy"] is not None]
    return max(evaluated, key=lambda row: row["test_accuracy"], default=None)


def early_end(training: Training, rounds: list[dict[str, Any]]) -> str:
    """Say why a run ends early after these rows of `rounds.parquet`; '' if it does not.

    Returns '' also if the run has all its rounds.
    """
    if not training.patience or not rounds or rounds[-1]["round"] >= training.num_rounds:
        return ""
    accuracies = {row["round"]: row["test_accuracy"] for row in rounds}
    if not training.patience_is_over(accuracies):
        return ""
    number = training.patience
    return (
        f"no better test accuracy in {number} evaluated round{'s' if number > 1 else ''} "
        "(train.patience)"
    )


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary in a run's folder; empty if it is missing or damaged."""
    return read_json(path / "summary.json")


def read_environment(path: Path) -> dict[str, Any]:
    """Return what `provenance.environment` found when a run began; empty if missing or damaged."""
    return read_json(path / "environment.json")


def read_json(file: Path) -> dict[str, Any]:
    """Return the table in a JSON file; empty if the file is missing or damaged.

    A file can be damaged by a power cut. A warning in the log says so.
    """
    try:
        return dict(json.loads(file.read_bytes().decode()))
    except FileNotFoundError:
        return {}
    except (OSError, RecursionError, TypeError, ValueError) as error:
        log.warning("'%s' is damaged (%r), and counts as missing", file, error)
        return {}


def status_of(path: Path) -> str:
    """Return the status of the run in a folder: running, done, stopped, failed, or killed.

    A run is killed if it ends before it can write how it ended. A folder without a summary has the
    status `unknown`.
    """
    status = str(read_summary(path).get("status", "unknown"))
    if status == "running" and not is_locked(path):
        # The lock of a run on another machine may not be seen from here.
        return "killed, or running elsewhere"
    return status
