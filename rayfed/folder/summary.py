"""How far a run has come and how it ended, in `summary.json`; and the lock that tells whether it is still running."""

import fcntl
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayfed.errors import InputError

log = logging.getLogger(__name__)


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Best and last round of a run, and its cost, from the rows of `rounds.parquet`; papers report best or last."""
    if not rounds:
        return {"rounds": 0}
    trained = [row for row in rounds if row["round"]] or rounds  # the initial model's accuracy is chance
    best, last = max(trained, key=lambda row: row["test_accuracy"]), rounds[-1]
    shown = ("round", "test_accuracy", "test_loss", "forgetting")
    return {
        "rounds": last["round"],
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
    if status == "running":
        with suppress(InputError):
            os.close(lock(path))  # another machine's lock may not be seen from here
            return "killed, or running elsewhere"
    return status


def lock(path: Path) -> int:
    """A lock on a run's folder, held until the descriptor is closed or its process ends. Raises `InputError`."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(folder)
        held = isinstance(error, BlockingIOError)
        why = "is being written to by another process: wait for it, or stop it" if held else f"has no locks: {error}"
        raise InputError(f"'{path}' {why}") from None
    return folder
