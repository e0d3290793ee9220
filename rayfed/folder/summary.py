"""How far a run has come and how it ended, in `summary.json`."""

import json
import logging
from pathlib import Path
from typing import Any

from rayfed.folder.owner import is_locked

log = logging.getLogger(__name__)


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Best and last evaluated round of a run, and its cost, from the rows of `rounds.parquet`.

    Papers report best or last.
    """
    if not rounds:
        return {"rounds": 0}
    evaluated = [row for row in rounds if row["test_accuracy"] is not None]
    trained = [row for row in evaluated if row["round"]] or evaluated  # the initial model's accuracy is chance
    best, last = max(trained, key=lambda row: row["test_accuracy"]), evaluated[-1]
    shown = ("round", "test_accuracy", "test_loss", "forgetting")
    return {
        "rounds": rounds[-1]["round"],
        "best": {key: best[key] for key in shown},
        "last": {key: last[key] for key in shown},
        **{key: sum(row[key] for row in rounds) for key in ("seconds", "bytes_down", "bytes_up")},
    }


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
