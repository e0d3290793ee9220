"""Checkpoints: everything that a run needs to continue, as safetensors, Parquet and JSON, whole or not there at all.

    round-00020.json                    lists the files of the checkpoint, each with its hash; written last
    round-00020.safetensors             the global weights, by name
    round-00020.state.safetensors       the parts' states, and the last evaluation, and the peak of each class
    round-00020.<table>.parquet         the results since the last full such file, which an earlier checkpoint wrote
    round-00020.memories-000.shard      memories of clients that have trained since the checkpoint before
    round-00020.memories-000-twin.shard the same again, as later checkpoints need it too; results have it when full
    round-00020.memories.parquet        where the memory of each client lies: in these shards, and in earlier ones
    best.safetensors                    the global weights of the best round, whichever that is; no checkpoint's own

A checkpoint whose .json is there is complete, so a run that is killed at any moment has the checkpoint before. The
newest two are kept, and all files that they name. A checkpoint need not hold random numbers: they are a function of
seed, round and client. `saved.py` reads checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa
import torch

from rayfed.base.errors import InputError
from rayfed.base.files import writing_to
from rayfed.base.storage import Folder, joined
from rayfed.clients.settings import Training
from rayfed.folder.owner import lock
from rayfed.folder.packing import (
    Index,
    ahead,
    index_to_table,
    shards_of,
    to_bytes,
    twin_of,
    unmoved,
    weights_to_bytes,
)
from rayfed.folder.places import Folders
from rayfed.folder.provenance import hash_of
from rayfed.folder.saved import VERSION, Saved, digest_of, stem
from rayfed.folder.summary import best_of
from rayfed.folder.tables import RESULTS, ROWS, to_parquet
from rayfed.job import Job
from rayfed.rounds.round import Round
from rayfed.rounds.workers import Workers
from rayfed.tensors.trees import num_bytes
from rayfed.tensors.weights import Weights
from rayfed.tensors.wire import pack

BEST = "best.safetensors"
OWN = re.compile(r"(round-\d{5,}(\.[\w-]+)?|best)\.(json|safetensors|parquet|shard)")
PROBE = ".probe"
VERSIONS = "versions"  # of packages that change bits, also in a manifest
ORIGIN = (
    "data",
    "partition",
    "model",
    "trace",
    "modules",
)  # hashes that a manifest has, where there are such

log = logging.getLogger(__name__)


class Checkpoints:
    """Writes the checkpoints of a run. Call `follow` after each round, so that only changed memories are written.

    `origin` has the hashes of what went in, as `provenance.environment` gives them, and in `about` what each file of
    weights says of itself; `still_ours` raises an error where the folder has become another run's: nothing of that
    run's is touched. `all_names` gives the weights under all the names that files have them under.
    """

    def __init__(
        self,
        folder: Folder,
        job: Job,
        origin: Mapping[str, Any],
        saved: Saved | None = None,
        still_ours: Callable[[], None] = lambda: None,
        *,
        all_names: Callable[[Weights], Weights] = dict,
    ) -> None:
        self._folder, self._job, self._origin, self._still_ours = folder, job, origin, still_ours
        self._newest = saved
        self._index = saved.index() if saved and saved.lends_to(folder) else {}
        self._changed: set[int] = set()  # clients that have trained since the newest checkpoint
        self._about = origin.get("about", {})
        self._all_names = all_names
        self._best = Best(folder, saved, job.train, self._about, all_names)

    @property
    def round(self) -> int | None:
        """The round of the newest checkpoint."""
        return self._newest.round if self._newest else None

    def place_of_best(self, round: int) -> str | None:
        """The file that holds the weights of the best round; None where there is none."""
        if self._best.held is not None and self._best.held["round"] == round:
            return joined(self._folder.place, BEST)
        is_extra = round == self.round and not self._job.train.counts(round)
        return joined(self._folder.place, f"{stem(round)}.safetensors") if is_extra else None

    def probe(self, round: Round) -> None:
        """Raises `Unwritable` where there is no room for the round's weights and state, and the best weights."""
        size = num_bytes(round.weights) + len(to_bytes(pack(_state(round))))
        if not self._best.held:
            size += num_bytes(round.weights)
        with writing_to(self._folder.place):
            try:
                self._folder.write(PROBE, bytes(size))
            finally:
                with suppress(OSError):
                    self._folder.delete(PROBE)

    def follow(self, round: Round) -> None:
        """The memories of the round's clients have changed, and it may be the best round."""
        self._changed |= {row.client for row in round.clients}
        if self._job.train.counts(round.round):
            self._best.follow(round)

    def save(self, round: Round, workers: Workers, rows: Callable[[str, int], pa.Table]) -> None:
        """Write the weights of a better round, then the checkpoint of a round, unless it exists.

        The checkpoint before it is kept, and older ones are deleted.
        `rows` gives the rows of a table after a round. What the checkpoint before has, and still holds, is not written.
        """
        self._still_ours()
        self._best.write()
        if round.round == self.round:
            return
        before = self._newest
        lender = before if before and before.lends_to(self._folder) else None
        files = Files(self._folder, round.round)
        try:
            files.write("state.safetensors", to_bytes(pack(_state(round))))
            files.write(
                "safetensors",
                weights_to_bytes(
                    self._all_names(round.weights), {"round": round.round, **self._about}
                ),
            )
            tables = _write_tables(files, round.round, lender, rows)
            index = self._write_memories(files, round, workers)
            if lender:
                named = {
                    f"{stem(last)}.{name}.parquet"
                    for name, parts in tables.items()
                    for last, _ in parts
                }
                named |= {extent.shard for extent in index.values()}
                files.borrow(lender, named)
            manifest = self._manifest(round, workers, tables, files.hashes)
            seal = files.write_manifest(manifest)
        except BaseException:  # the pieces of it would only fill the disk
            files.delete()
            raise
        self._take_back_if_another_owns(f"{stem(round.round)}.json", seal)
        self._newest, self._index, self._changed = Saved(self._folder, manifest), index, set()
        kept = {BEST} | self._newest.names
        if before:
            kept |= before.names
        delete_checkpoints(self._folder, kept)

    def _write_memories(self, files: Files, round: Round, workers: Workers) -> Index:
        """Write the memories that have changed, or lie in shards with little else; gives where each memory lies."""
        index = unmoved(self._index, round.memories.keys() - self._changed)
        moving = sorted(round.memories.keys() - index.keys())
        memories = ((client, to_bytes(workers.recall(round.memories[client]))) for client in moving)
        for name, pieces, extents in ahead(shards_of(files.beginning, memories)):
            files.write(name.removeprefix(f"{files.beginning}."), *pieces, twice=True)
            index |= extents
        if index:
            files.write("memories.parquet", to_parquet(index_to_table(index)))
        return index

    def _manifest(
        self,
        round: Round,
        workers: Workers,
        tables: dict[str, list[tuple[int, int]]],
        files: dict[str, str],
    ) -> dict[str, Any]:
        noted = ("contents", *ORIGIN)
        origin = {key: self._origin[key] for key in noted if key in self._origin}
        best = {"best": self._best.held} if self._best.held else {}
        return {
            "version": VERSION,
            "round": round.round,
            "job": self._job.table(),
            "evaluated": round.evaluation is not None,
            "hardware": list(workers.kinds()),
            "tables": tables,
            "files": files,
            **origin,
            **best,
        }

    def _take_back_if_another_owns(self, name: str, seal: bytes) -> None:
        """Raises `InputError` where the folder is another run's now. Nobody shall continue from this manifest then.

        The owner's next checkpoint deletes our other files.
        """
        try:
            self._still_ours()
        except InputError:
            if self._folder.read(name) == seal:
                self._folder.delete(name)
            raise


class Files:
    """The files of a checkpoint that is being written. `hashes` has the SHA-256 of each by its name."""

    def __init__(self, folder: Folder, round: int) -> None:
        self.beginning = stem(round)
        self.hashes: dict[str, str] = {}
        self._folder = folder
        self._written = [f"{self.beginning}.json"]  # first: it is deleted first if writing fails

    def write(self, ending: str, *content: bytes, twice: bool = False) -> None:
        """Write a file, its content in pieces; and its twin if later checkpoints need it too."""
        digest = hashlib.sha256()
        for piece in content:
            digest.update(piece)
        name = f"{self.beginning}.{ending}"
        for copy in [name, twin_of(name)] if twice else [name]:
            self._folder.write(copy, *content)
            self._written.append(copy)
            self.hashes[copy] = digest.hexdigest()

    def borrow(self, lender: Saved, names: Iterable[str]) -> None:
        """Name files, with their twins, that an earlier checkpoint has written; not those of this checkpoint."""
        earlier = {name for name in names if name not in self.hashes}
        for name in sorted(earlier | {twin_of(name) for name in earlier}):
            self.hashes[name] = lender.manifest["files"][name]

    def write_manifest(self, manifest: dict[str, Any]) -> bytes:
        """Write the file that says that the checkpoint is complete; gives its content."""
        sealed = json.dumps({"checkpoint": manifest, "sha256": digest_of(manifest)}, indent=1)
        content = f"{sealed}\n".encode()
        self._folder.write(f"{self.beginning}.json", content)
        return content

    def delete(self) -> None:
        for name in self._written:
            with suppress(OSError):
                self._folder.delete(name)


def _write_tables(
    files: Files, round: int, lender: Saved | None, rows: Callable[[str, int], pa.Table]
) -> dict[str, list[tuple[int, int]]]:
    """Write the rows of each table that no full file of the lender has.

    Gives the files that hold each table, as `Saved.parts` does: the last round in each, and its number of rows.
    """
    tables = {}
    for name in RESULTS:
        full = [
            (last, number)
            for last, number in (lender.parts(name) if lender else ())
            if number >= ROWS
        ]
        rest = rows(name, full[-1][0] if full else -1)
        if not rest.num_rows and not full:
            continue  # a table that not all runs have
        files.write(f"{name}.parquet", to_parquet(rest), twice=rest.num_rows >= ROWS)
        tables[name] = [*full, (round, rest.num_rows)]
    return tables


class Best:
    """`best.safetensors`: the global weights of the best evaluated round so far.

    Only rounds that count (`engine.py`) are followed: where a run is extended, the extra evaluation of its old last
    round is none of the longer run's. Where that round is the best of the shorter run, its last checkpoint has the
    weights.

    The file is written with the next checkpoint, which notes its hash, and before it: until then the weights wait in
    memory, as a file in each better round would cost a run's first rounds too much. A run that is killed between the
    two continues from the checkpoint before, and plays the better round again, to the same bits.

    `held` is what a checkpoint notes, round and hash of the file; None: no file.
    """

    def __init__(
        self,
        folder: Folder,
        saved: Saved | None,
        training: Training,
        about: Mapping[str, Any],
        all_names: Callable[[Weights], Weights],
    ) -> None:
        """`saved` is the checkpoint to continue from; its results say which round was the best."""
        self.held: dict[str, Any] | None = None
        self._folder, self._about, self._all_names = folder, about, all_names
        self._accuracy = -1.0
        self._better: Round | None = None  # than what the file holds
        if saved is None:
            return
        self.held = _carried(folder, saved)
        counting = [
            row for row in saved.table("rounds").to_pylist() if training.counts(row["round"])
        ]
        best_row = best_of(counting)
        if best_row:
            self._accuracy = best_row["test_accuracy"]

    def follow(self, round: Round) -> None:
        """Keep the weights of a round with a better accuracy; the first of several equal ones stays the best."""
        if round.test_accuracy is not None and round.test_accuracy > self._accuracy:
            self._accuracy, self._better = round.test_accuracy, round

    def write(self) -> None:
        """Write what is not yet in the file."""
        if self._better is None:
            return
        content = weights_to_bytes(
            self._all_names(self._better.evaluated),
            {"round": self._better.round, **self._about},
        )
        self._folder.write(BEST, content)
        self.held, self._better = {"round": self._better.round, "sha256": hash_of(content)}, None


def _carried(folder: Folder, saved: Saved) -> dict[str, Any] | None:
    """What a checkpoint to continue from has noted of the best weights, if the file is so; it moves to a new folder.

    Else it is damaged, or of a later round, which may never be reached again, and is deleted.
    """
    held: dict[str, Any] | None = saved.manifest.get("best")
    if held is None and BEST not in saved.folder.names(odd=True):
        return None
    stays_here = saved.lends_to(folder)
    content = b""
    with suppress(OSError):
        content = saved.folder.read(BEST)
    if held is not None and hash_of(content) == held["sha256"]:
        if not stays_here:
            folder.write(BEST, content)
        return held
    log.warning(
        "'%s' is damaged, missing, or of a round after %d: it is not used; the next better round writes it again",
        BEST,
        saved.round,
    )
    if stays_here:
        with suppress(OSError):
            folder.delete(BEST)
    return None


def delete_checkpoints(folder: Folder, kept: Collection[str] = ()) -> None:
    """Delete the files of checkpoints in a folder, but for those to be kept, and nothing else that is in it."""
    names = [name for name in folder.names() if OWN.fullmatch(name) and name not in kept]
    names.sort(
        key=lambda name: not name.endswith(".json")
    )  # first the files that say that a checkpoint is complete
    for name in names:
        folder.delete(name)


def start_over(job: Job) -> None:
    """Remove what an earlier run has left. Raises `InputError` where another job's files are, or a run goes on."""
    folders = Folders.of(job)
    folders.refuse_unwritable()
    folders.refuse_overwriting(force=True)
    if not folders.path.exists():
        return
    file = lock(folders.path)
    try:
        delete_checkpoints(folders.checkpoints)
        folders.clear()
    finally:
        os.close(file)


def _state(round: Round) -> dict[str, Any]:
    evaluation = round.evaluation
    return {
        "held": {
            slot: {"since": held.since, "state": held.state} for slot, held in round.held.items()
        },
        # Copied, as an array from Ray is read-only.
        "confusion": torch.tensor(evaluation.confusion) if evaluation else None,
        "loss": evaluation.loss if evaluation else None,
        "overconfidence": torch.tensor(evaluation.overconfidence) if evaluation else None,
        "peak": torch.tensor(round.peak),
        "forgetting": round.forgetting,
        "shown": round.shown,
    }
