"""`best.safetensors`, beside the checkpoints: the global weights of the best evaluated round so far.

It is written with the next checkpoint, which notes its hash, and before it: until then the weights wait in memory, as a
file in each better round would cost a run's first rounds too much. A run that is killed between the two continues from
the checkpoint before, and plays the better round again, to the same bits.
"""

import logging
from typing import Any

from rayfed.folder.packing import weights_to_bytes
from rayfed.folder.provenance import hash_of
from rayfed.folder.saved import Saved
from rayfed.folder.storage import Folder
from rayfed.folder.summary import best_of
from rayfed.round import Round

NAME = "best.safetensors"

log = logging.getLogger(__name__)


class Best:
    """Follows the rounds of a run. `held` is what a checkpoint notes, round and hash of the file; None: no file."""

    def __init__(self, folder: Folder, saved: Saved | None) -> None:
        """`saved` is the checkpoint to continue from; its results say which round was the best."""
        self._folder, self.held = folder, None if saved is None else _carried(folder, saved)
        known = None if saved is None else best_of(saved.table("rounds").to_pylist())
        self._accuracy: float = known["test_accuracy"] if known else -1.0
        self._better: Round | None = None  # than what the file holds

    def follow(self, round: Round) -> None:
        """Keep the weights of a round with a better accuracy; the first of several equal ones stays the best."""
        if round.round and round.test_accuracy is not None and round.test_accuracy > self._accuracy:
            self._accuracy, self._better = round.test_accuracy, round

    def write(self) -> None:
        """Write what is not yet in the file."""
        if (better := self._better) is not None:
            content = weights_to_bytes(better.weights, {"round": str(better.round)})
            self._folder.write(NAME, content)
            self.held, self._better = {"round": better.round, "sha256": hash_of(content)}, None


def _carried(folder: Folder, saved: Saved) -> dict[str, Any] | None:
    """What a checkpoint to continue from has noted of the file, if the file is so; it moves to a new folder.

    Else it is deleted: it is damaged, or of a later round, which may never be reached again.
    """
    held: dict[str, Any] | None = saved.manifest.get("best")
    if NAME not in saved.folder.names():
        return None
    content = saved.folder.read(NAME)
    there = folder.place == saved.folder.place
    if held is None or hash_of(content) != held["sha256"]:
        text = "'%s' is damaged, or of a round after %d: it is not used; the next better round writes it again"
        log.warning(text, NAME, saved.round)
        if there:
            folder.delete(NAME)
        return None
    if not there:
        folder.write(NAME, content)
    return held
