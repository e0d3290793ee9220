"""How far a run has come and how it ended, in `summary.json`."""

import json
import logging
from pathlib import Path
from typing import Any

from rayfed.clients.settings import Training
from rayfed.folder.owner import is_locked

log = logging.getLogger(__name__)


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Best and last evaluated round of a run, and its cost, from the rows of `rounds.parquet`.

    Papers report best or last.
    """
    if not rounds:
        return {"rounds": 0}
    evaluated = [row for row in rounds if row["test_accuracy"] is not None]
    best, last = best_of(rounds) or evaluated[0], evaluated[-1]
    shown = ("round", "test_accuracy", "test_loss", "forgetting")
    return {
        "rounds": rounds[-1]["round"],
        "best": {key: best[key] for key in shown},
        "last": {key: last[key] for key in shown},
        **{key: sum(row[key] for row in rounds) for key in ("seconds", "bytes_down", "bytes_up")},
    }


def best_of(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first row with the best test accuracy, round 0 aside: the initial model's is chance. None before any."""
    found = [row for row in rounds if row["round"] and row["test_accuracy"] is not None]
    return max(found, key=lambda row: row["test_accuracy"], default=None)


def early_end(training: Training, rounds: list[dict[str, Any]]) -> str:
    """Why a run with these rows of `rounds.parquet` plays no more rounds than these; '' where it does, or has all."""
    if not training.patience or not rounds or rounds[-1]["round"] >= training.num_rounds:
        return ""
    if not training.patience_is_over({row["round"]: row["test_accuracy"] for row in rounds}):
        return ""
    number = training.patience
    return f"no better test accuracy in {number} evaluated round{'s' if number > 1 else ''} (train.patience)"


def read_summary(path: Path) -> dict[str, Any]:
    """The summary in a run's folder; empty if there is none."""
    return read_json(path / "summary.json")


def read_json(file: Path) -> dict[str, Any]:
    """The table in a file; empty if there is none, or if the file is damaged."""
    try:
        return dict(json.loads(file.read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, TypeError, ValueError) as error:  # a machine has lost power; the checkpoints are whole
        log.warning("'%s' is damaged (%s), and counts as missing", file, error)
        return {}


def status_of(path: Path) -> str:
    """How the run in a folder stands: running, done, stopped, failed, or killed before it could write how it ended."""
    status = str(read_summary(path).get("status", "unknown"))
    if status == "running" and not is_locked(path):
        return "killed, or running elsewhere"  # another machine's lock may not be seen from here
    return status
