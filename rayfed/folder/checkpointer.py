"""Write checkpoints. `checkpoint.py` says which files they have, and reads them.

The way of one: `Recorder.round` (recorder.py) calls `Checkpointer.save` here when one is due. Its
folder is that of `checkpoints_of` (places.py): `<output.path>/<name>/checkpoints`, or
`<output.checkpoints>/<name>`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa
import torch

from rayfed.base.storage import Folder, joined
from rayfed.folder.checkpoint import (
    BEST,
    NOTED,
    ORIGIN,
    VERSION,
    Checkpoint,
    digest_of,
    in_threads,
    memories_of,
    memory_name,
    stem,
)
from rayfed.folder.provenance import hash_of
from rayfed.folder.summary import best_of
from rayfed.folder.tables import to_parquet
from rayfed.folder.tensorfile import tree_to_bytes, weights_to_bytes
from rayfed.job import Job
from rayfed.rounds.executor import Executor
from rayfed.rounds.round import Round
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import pack

OURS = re.compile(
    r"round-\d{5,}(\.[\w-]+)?\.(json|safetensors|parquet)"
    r"|client-\d{5,}\.round-\d{5,}\.safetensors"
    r"|best\.safetensors"
)

log = logging.getLogger(__name__)


class Checkpointer:
    """Writes the checkpoints of a run, and the weights of its best round.

    Call `follow` after each round, and `save` when a checkpoint is due.
    """

    def __init__(
        self,
        folder: Folder,
        job: Job,
        origin: Mapping[str, Any],
        saved: Checkpoint | None = None,
        still_ours: Callable[[], None] = lambda: None,
        *,
        all_names: Callable[[Weights], Weights] = dict,
    ) -> None:
        """Continue after `saved`, if there is one.

        `origin` has the hashes of what went in. Its entry `about` is written into each file of
        weights. `still_ours` raises an error if another run has taken the folder. `all_names`
        returns weights under all the names that they have in a file.
        """
        self._all_names = all_names
        self._folder, self._job, self._origin, self._still_ours = folder, job, origin, still_ours
        self._newest = saved
        # The file of each client's newest memory. A client that trains again is removed.
        self._memories: dict[int, tuple[int, str]] = {}
        if saved is not None and saved.folder.place == folder.place:
            self._memories = saved.memories
        self._best = BestWeights(folder, job, origin.get("about", {}), saved, all_names)

    @property
    def round(self) -> int | None:
        """Return the round of the newest checkpoint."""
        return self._newest.round if self._newest else None

    def place_of_best(self, round: int) -> str | None:
        """Return the file with the weights of this round, the best so far; None if it is absent."""
        if self._best.held is not None and self._best.held["round"] == round:
            return joined(self._folder.place, BEST)
        # The extra evaluation after a run's last round does not count as the best. The last
        # checkpoint has its weights.
        if round and round == self.round and not self._job.train.counts(round):
            return joined(self._folder.place, f"{stem(round)}.safetensors")
        return None

    def follow(self, round: Round) -> None:
        """Note a finished round: its clients' memories have changed, and it may be the best."""
        for row in round.clients:
            self._memories.pop(row.client, None)
        self._best.follow(round)

    def save(self, round: Round, executor: Executor, tables: Mapping[str, pa.Table]) -> None:
        """Write a checkpoint of a round and the results so far. Keep the newest two."""
        self._still_ours()
        self._best.write()
        if round.round == self.round:
            return
        previous = self._newest
        try:
            files = {}
            for ending, content in self._own_files(round, tables):
                name = f"{stem(round.round)}.{ending}"
                self._folder.write(name, content)
                files[name] = hash_of(content)
            memories = self._write_memories(round, executor)
            manifest = self._manifest(round, executor, files, memories)
            sealed = {"checkpoint": manifest, "sha256": digest_of(manifest)}
            self._folder.write(f"{stem(round.round)}.json", json.dumps(sealed, indent=1).encode())
        except BaseException:
            # The files of a checkpoint that is not complete would only fill the disk.
            with suppress(OSError):
                delete_files(self._folder, lambda name: f"{stem(round.round)}." in name)
            raise
        # Only now, because a checkpoint that fails leaves no files of memories.
        self._memories = memories
        self._newest = Checkpoint(self._folder, manifest)
        needed = self._newest.names
        if previous is not None:
            needed |= previous.names
        self._still_ours()
        delete_files(self._folder, lambda name: name not in needed and name != BEST)

    def _own_files(self, round: Round, tables: Mapping[str, pa.Table]) -> list[tuple[str, bytes]]:
        """Return the files that no other checkpoint needs: weights, state and results.

        Each file is the ending of its name and its content.
        """
        about = {"round": round.round, **self._origin.get("about", {})}
        files = [
            ("safetensors", weights_to_bytes(self._all_names(round.weights), about)),
            ("state.safetensors", tree_to_bytes(pack(_state(round)))),
        ]
        for name, table in tables.items():
            if table.num_rows:
                files.append((f"{name}.parquet", to_parquet(table)))
        return files

    def _write_memories(self, round: Round, executor: Executor) -> dict[int, tuple[int, str]]:
        """Write the memories that have changed. Return the round and hash of each client's file."""
        folder = memories_of(self._folder)

        def write(client: int) -> tuple[int, str]:
            content = tree_to_bytes(executor.recall(round.memories[client]))
            folder.write(memory_name(client, round.round), content)
            return client, hash_of(content)

        changed = sorted(round.memories.keys() - self._memories.keys())
        memories = dict(self._memories)
        for client, digest in in_threads(write, changed):
            memories[client] = (round.round, digest)
        return memories

    def _manifest(
        self,
        round: Round,
        executor: Executor,
        files: Mapping[str, str],
        memories: Mapping[int, tuple[int, str]],
    ) -> dict[str, Any]:
        """Return the manifest of a round's checkpoint with these `files` and `memories`."""
        manifest = {
            "version": VERSION,
            "round": round.round,
            "job": self._job.table(),
            "evaluated": round.evaluation is not None,
            "hardware": list(executor.kinds()),
            "files": files,
            "memories": {str(client): list(memories[client]) for client in sorted(memories)},
        }
        for key in ORIGIN + NOTED:
            if key in self._origin:
                manifest[key] = self._origin[key]
        if self._best.held:
            manifest["best"] = self._best.held
        return manifest


class BestWeights:
    """Writes the weights of the best evaluated round to `best.safetensors`.

    They are written with the next checkpoint, and wait in memory until then: in its first rounds a
    run gets better almost every time. A run that is killed in between plays the round again, with
    bit-identical weights.
    """

    def __init__(
        self,
        folder: Folder,
        job: Job,
        about: Mapping[str, Any],
        saved: Checkpoint | None,
        all_names: Callable[[Weights], Weights],
    ) -> None:
        self._folder, self._job, self._about = folder, job, about
        self._all_names = all_names
        # The round and the hash of the file, as the next checkpoint notes them.
        self.held: dict[str, Any] | None = None
        self._accuracy = -1.0
        self._better: Round | None = None
        if saved is None:
            return
        self._carry_over(saved)
        rows = saved.table("rounds").to_pylist()
        best = best_of([row for row in rows if job.train.counts(row["round"])])
        if best is not None:
            self._accuracy = best["test_accuracy"]

    def follow(self, round: Round) -> None:
        """Keep the weights of a round if it is better than all before.

        The extra evaluation after a run's last round does not count, so that an extended run has
        the same best round as a run that never stopped.
        """
        if not self._job.train.counts(round.round) or round.test_accuracy is None:
            return
        if round.test_accuracy > self._accuracy:
            self._accuracy, self._better = round.test_accuracy, round

    def write(self) -> None:
        """Write the weights that wait in memory, if there are any."""
        if self._better is None:
            return
        about = {"round": self._better.round, **self._about}
        content = weights_to_bytes(self._all_names(self._better.evaluated), about)
        self._folder.write(BEST, content)
        self.held = {"round": self._better.round, "sha256": hash_of(content)}
        self._better = None

    def _carry_over(self, saved: Checkpoint) -> None:
        """Keep the file that a checkpoint notes, and copy it if the run has a new folder.

        A file with another hash is deleted. It is damaged, or of a later round that may never be
        played again.
        """
        noted = saved.manifest.get("best")
        if noted is None and BEST not in saved.folder.names(odd=True):
            return
        content = b""
        with suppress(OSError):
            content = saved.folder.read(BEST)
        stays = saved.folder.place == self._folder.place
        if noted is not None and hash_of(content) == noted["sha256"]:
            if not stays:
                self._folder.write(BEST, content)
            self.held = noted
            return
        log.warning(
            "'%s' is damaged, missing, or of a round after %d: it is not used; "
            "the next better round writes it again",
            BEST,
            saved.round,
        )
        if stays:
            with suppress(OSError):
                self._folder.delete(BEST)


def delete_checkpoints(folder: Folder) -> None:
    """Delete all checkpoints and the best weights, and nothing else in the folder."""
    delete_files(folder, lambda name: True)


def delete_files(folder: Folder, wanted: Callable[[str], bool]) -> None:
    """Delete files of checkpoints by name."""
    # The manifests go first, so that no checkpoint seems complete while its files are deleted.
    for place, ending in ((folder, ".json"), (folder, ""), (memories_of(folder), "")):
        names = []
        for name in place.names():
            if OURS.fullmatch(name) and name.endswith(ending) and wanted(name):
                names.append(name)
        for _ in in_threads(place.delete, names):
            pass


def _state(round: Round) -> dict[str, Any]:
    """Return what the next round needs, except weights and memories."""
    evaluation = round.evaluation
    held = {}
    for slot, entry in round.held.items():
        held[slot] = {"since": entry.since, "state": entry.state}
    sampling = {name: torch.tensor(array) for name, array in (round.sampling or {}).items()}
    # `torch.tensor` copies, because an array from Ray is read-only.
    return {
        "held": held,
        "confusion": torch.tensor(evaluation.confusion) if evaluation else None,
        "loss": evaluation.loss if evaluation else None,
        "overconfidence": torch.tensor(evaluation.overconfidence) if evaluation else None,
        "peak": torch.tensor(round.peak),
        "forgetting": round.forgetting,
        "shown": round.shown,
        "sampling": sampling or None,
    }
