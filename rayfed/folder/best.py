"""`best.safetensors`, beside the checkpoints: the global weights of the best evaluated round so far.

Only rounds that count (`engine.py`) are followed: where a run is extended, the extra evaluation of its old last round
is none of the longer run's. Where that round is the best of the shorter run, its last checkpoint has the weights.

It is written with the next checkpoint, which notes its hash, and before it: until then the weights wait in memory, as a
file in each better round would cost a run's first rounds too much. A run that is killed between the two continues from
the checkpoint before, and plays the better round again, to the same bits.
"""

import logging
from contextlib import suppress
from typing import Any

from rayfed.base.errors import Torn
from rayfed.base.storage import Folder
from rayfed.clients.settings import Training
from rayfed.folder.packing import weights_to_bytes
from rayfed.folder.provenance import hash_of
from rayfed.folder.saved import Saved, weights_of
from rayfed.folder.summary import best_of
from rayfed.rounds.round import Round
from rayfed.tensors.weights import Weights

NAME = "best.safetensors"

log = logging.getLogger(__name__)


class Best:
    """Follows the rounds of a run. `held` is what a checkpoint notes, round and hash of the file; None: no file."""

    def __init__(self, folder: Folder, saved: Saved | None, training: Training) -> None:
        """`saved` is the checkpoint to continue from; its results say which round was the best."""
        self._folder, self.held = folder, None if saved is None else _carried(folder, saved)
        rows = [] if saved is None else saved.table("rounds").to_pylist()
        known = best_of([row for row in rows if training.counts(row["round"])])
        self._accuracy: float = known["test_accuracy"] if known else -1.0
        self._better: Round | None = None  # than what the file holds

    def follow(self, round: Round) -> None:
        """Keep the weights of a round with a better accuracy; the first of several equal ones stays the best."""
        if round.test_accuracy is not None and round.test_accuracy > self._accuracy:
            self._accuracy, self._better = round.test_accuracy, round

    def write(self) -> None:
        """Write what is not yet in the file."""
        if (better := self._better) is not None:
            content = _to_bytes(better.weights, better.round)
            self._folder.write(NAME, content)
            self.held, self._better = {"round": better.round, "sha256": hash_of(content)}, None


def _carried(folder: Folder, saved: Saved) -> dict[str, Any] | None:
    """What a checkpoint to continue from has noted of the file, if the file is so; it moves to a new folder.

    Else it is damaged, or of a later round, which may never be reached again: it is written again where the checkpoint
    of the best round is kept, and deleted where it is not.
    """
    held: dict[str, Any] | None = saved.manifest.get("best")
    if held is None and NAME not in saved.folder.names(odd=True):
        return None
    there, content = folder.place == saved.folder.place, b""
    with suppress(OSError):
        content = saved.folder.read(NAME)
    is_whole = held is not None and hash_of(content) == held["sha256"]
    if held is not None and not is_whole:
        with suppress(Torn):
            content = _to_bytes(weights_of(saved.folder, held["round"]), held["round"])
    if held is None or hash_of(content) != held["sha256"]:
        text = "'%s' is damaged, missing, or of a round after %d: it is not used; the next better round writes it again"
        log.warning(text, NAME, saved.round)
        if there:
            with suppress(OSError):
                folder.delete(NAME)
        return None
    if not there or not is_whole:
        folder.write(NAME, content)
    return held


def _to_bytes(weights: Weights, round: int) -> bytes:
    return weights_to_bytes(weights, {"round": str(round)})
