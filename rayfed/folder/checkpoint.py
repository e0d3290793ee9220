"""Checkpoints: everything that a run needs to continue, as safetensors, Parquet and JSON, whole or not there at all.

    round-00020.json                    lists the files of the checkpoint, each with its hash; written last
    round-00020.safetensors             the global weights, by name
    round-00020.state.safetensors       the parts' states, and the figures that the next round is measured by
    round-00020.<table>.parquet         the results since the last full such file, which an earlier checkpoint wrote
    round-00020.memories-000.shard      memories of clients that have trained since the checkpoint before
    round-00020.memories-000-twin.shard the same again, as later checkpoints need it too; results have it when full
    round-00020.memories.parquet        where the memory of each client lies: in these shards, and in earlier ones
    best.safetensors                    the global weights of the best round, whichever that is; no checkpoint's own

A checkpoint whose .json is there is complete, so a run that is killed at any moment has the checkpoint before. The
newest two are kept, and all files that they name. Random numbers need no place in it: they are a function of seed,
round and client.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa
import torch

from rayfed.base.errors import InputError
from rayfed.base.files import writing_to
from rayfed.base.storage import Folder, joined
from rayfed.folder import best
from rayfed.folder.owner import lock
from rayfed.folder.packing import to_bytes, weights_to_bytes
from rayfed.folder.places import Place
from rayfed.folder.saved import VERSION, Saved, digest_of, stem
from rayfed.folder.shards import ahead, fill, settled, to_table, twin_of
from rayfed.folder.tables import RESULTS, ROWS, to_parquet
from rayfed.job import Job
from rayfed.rounds.round import Round
from rayfed.rounds.workers import Workers
from rayfed.tensors.trees import num_bytes
from rayfed.tensors.wire import pack

OWN = re.compile(r"(round-\d{5,}(\.[\w-]+)?|best)\.(json|safetensors|parquet|shard)")
PROBE = ".probe"


class Checkpoints:
    """Writes the checkpoints of a run. Call `follow` after each round, so that only changed memories are written.

    `origin` has the hashes of what went in, as `provenance.environment` gives them; `still_ours`
    raises an error where the folder has become another run's: nothing of that run's is touched.
    """

    def __init__(
        self,
        folder: Folder,
        job: Job,
        origin: Mapping[str, Any],
        saved: Saved | None = None,
        still_ours: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._job, self._origin, self._still_ours = folder, job, origin, still_ours
        self._newest = saved
        self._index = saved.index() if saved and saved.lends_to(folder) else {}
        self._changed: set[int] = set()  # clients that have trained since the newest checkpoint
        self._best = best.Best(folder, saved, job.train)

    @property
    def round(self) -> int | None:
        """The round of the newest checkpoint."""
        return self._newest.round if self._newest else None

    def place_of_best(self, round: int) -> str | None:
        """The file that holds the weights of the best round; None where there is none."""
        if self._best.held is not None and self._best.held["round"] == round:
            return joined(self._folder.place, best.NAME)
        is_extra = round == self.round and not self._job.train.counts(round)
        return joined(self._folder.place, f"{stem(round)}.safetensors") if is_extra else None

    def probe(self, round: Round) -> None:
        """Raises `Unwritable` where there is no room for the round's weights and state, and the best weights."""
        sizes = dict(enumerate([num_bytes(round.weights), len(to_bytes(pack(_state(round))))]))
        sizes |= {} if self._best.held else {2: sizes[0]}
        with writing_to(self._folder.place):
            try:
                for number, size in sizes.items():
                    self._folder.write(f"{PROBE}-{number}", bytes(size))
            finally:
                for number in sizes:
                    with suppress(OSError):
                        self._folder.delete(f"{PROBE}-{number}")

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
        beginning, before, state = stem(round.round), self._newest, _state(round)
        lender = before if before and before.lends_to(self._folder) else None
        written = [f"{beginning}.json"]  # first: it is deleted first if writing fails
        files: dict[str, str] = {}  # name -> hash

        def write(name: str, *content: bytes, twice: bool = False) -> None:
            digest = hashlib.sha256()
            for piece in content:
                digest.update(piece)
            for copy in [name, twin_of(name)] if twice else [name]:
                self._folder.write(copy, *content)
                written.append(copy)
                files[copy] = digest.hexdigest()

        try:
            write(f"{beginning}.state.safetensors", to_bytes(pack(state)))
            write(f"{beginning}.safetensors", weights_to_bytes(round.weights))
            tables, shared = {}, set()  # names of files that are lent
            for name in RESULTS:
                full = [(last, number) for last, number in (lender.parts(name) if lender else ()) if number >= ROWS]
                rest = rows(name, full[-1][0] if full else -1)
                if not rest.num_rows and not full:
                    continue  # a table that not all runs have
                write(f"{beginning}.{name}.parquet", to_parquet(rest), twice=rest.num_rows >= ROWS)
                tables[name] = [*full, (round.round, rest.num_rows)]
                shared |= {f"{stem(last)}.{name}.parquet" for last, _ in full}
            index = settled(self._index, round.memories.keys() - self._changed)
            shared |= {place.shard for place in index.values()}
            moving = sorted(round.memories.keys() - index.keys())
            memories = ((client, to_bytes(workers.recall(round.memories[client]))) for client in moving)
            for name, pieces, places in ahead(fill(beginning, memories)):
                write(name, *pieces, twice=True)
                index |= places
            if index:
                write(f"{beginning}.memories.parquet", to_parquet(to_table(index)))
            lent = sorted({*shared, *map(twin_of, shared)})
            files |= {name: lender.manifest["files"][name] for name in lent} if lender else {}
            manifest = {"version": VERSION, "round": round.round, "job": self._job.table()}
            manifest |= {"evaluated": round.evaluation is not None}
            origin = ("data", "partition", "model", "trace", "modules")
            manifest |= {key: self._origin[key] for key in origin if key in self._origin}
            manifest |= {"best": self._best.held} if self._best.held else {}
            manifest |= {"hardware": list(workers.kinds()), "tables": tables, "files": files}
            text = json.dumps({"checkpoint": manifest, "sha256": digest_of(manifest)}, indent=1)
            self._folder.write(f"{beginning}.json", sealed := f"{text}\n".encode())
        except BaseException:  # the pieces of it would only fill the disk
            for name in written:
                with suppress(OSError):
                    self._folder.delete(name)
            raise
        try:
            self._still_ours()
        except InputError:  # nobody shall continue from it; the owner's next checkpoint deletes our other files
            if self._folder.read(f"{beginning}.json") == sealed:
                self._folder.delete(f"{beginning}.json")
            raise
        self._newest, self._index, self._changed = Saved(self._folder, manifest), index, set()
        _delete(self._folder, keep={best.NAME} | self._newest.names | (before.names if before else set()))


def clear_checkpoints(folder: Folder) -> None:
    """Remove all checkpoints from a folder, and nothing else that is in it."""
    _delete(folder, keep=set())


def start_over(job: Job) -> None:
    """Remove what an earlier run has left. Raises `InputError` where another job's files are, or a run goes on."""
    place = Place.of(job)
    place.refuse_unwritable()
    place.refuse_overwriting(force=True)
    if not place.path.exists():
        return
    file = lock(place.path)
    try:
        clear_checkpoints(place.checkpoints)
        place.clear()
    finally:
        os.close(file)


def _delete(folder: Folder, keep: set[str]) -> None:
    names = [name for name in folder.names() if OWN.fullmatch(name) and name not in keep]
    for name in sorted(names, key=lambda name: not name.endswith(".json")):  # first the file that says it is complete
        folder.delete(name)


def _state(round: Round) -> dict[str, Any]:
    found = round.evaluation
    return {
        "held": {slot: {"since": held.since, "state": held.state} for slot, held in round.held.items()},
        "confusion": torch.tensor(found.confusion) if found else None,  # copied: an array from Ray is read-only
        "loss": found.loss if found else None,
        "peak": torch.tensor(round.peak),
        "forgetting": round.forgetting,
    }
