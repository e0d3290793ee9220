"""Checkpoints: everything that a run needs to continue, as safetensors, Parquet and JSON, whole or not there at all.

    round-00020.json                    lists the files of the checkpoint, each with its hash; written last
    round-00020.safetensors             the global weights, by name
    round-00020.state.safetensors       the parts' states, and the figures that the next round is measured by
    round-00020.<table>.parquet         the results since the last full such file, which an earlier checkpoint wrote
    round-00020.memories-000.shard      memories of clients that have trained since the checkpoint before
    round-00020.memories.parquet        where the memory of each client lies: in these shards, and in earlier ones

A checkpoint whose .json is there is complete, so a run that is killed at any moment has the checkpoint before. The
newest two are kept, and all files that they name. Random numbers need no place in it: they are a function of seed,
round and client. Checkpoints of versions 1 and 2 have a file for each memory, and all results in each.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

from rayfed.engine import Held, Kind, Round, Workers
from rayfed.errors import InputError, Torn
from rayfed.folder.packing import from_bytes, to_bytes
from rayfed.folder.places import lineage_of
from rayfed.folder.shards import Index, Place, ahead, contents, fill, from_table, settled, to_table
from rayfed.folder.storage import Folder
from rayfed.folder.tables import RESULTS, ROWS, to_parquet
from rayfed.job import Job, differences
from rayfed.local import Evaluation, Site
from rayfed.methods.part import parts_at
from rayfed.trees import first_difference, num_bytes, pack, unpack
from rayfed.weights import Weights, state_of

log = logging.getLogger(__name__)

VERSIONS = (1, 2, 3)  # that can be read; the last is written. Version 1 nested its trees differently
OWN = re.compile(r"(round-\d{5,}(\.[\w-]+)?|client-\d{5,}-round-\d{5,})\.(json|safetensors|parquet|shard)")
PROBE = ".probe"
MANIFEST = re.compile(r"round-(\d{5,})\.json")


@dataclass(frozen=True, eq=False)
class Saved:
    """A whole checkpoint: every file is there, and has the hash that its manifest notes."""

    folder: Folder
    manifest: dict[str, Any]

    @property
    def round(self) -> int:
        return self.manifest["round"]

    @property
    def names(self) -> set[str]:
        """The names of its files."""
        return {f"{stem(self.round)}.json", *self.manifest["files"]}

    def table(self, name: str) -> pa.Table:
        """The results so far."""
        parts = (self._read(f"{stem(last)}.{name}.parquet") for last, _ in self.parts(name))
        return pa.concat_tables(pq.read_table(io.BytesIO(part)) for part in parts)

    def parts(self, name: str) -> list[tuple[int, int]]:
        """The files that hold a table: the last round in each, and its number of rows where that is known."""
        return self.manifest["tables"][name] if "tables" in self.manifest else [(self.round, 0)]

    def index(self) -> Index:
        """Where the memories lie."""
        if "memories" in self.manifest:  # of version 1 or 2
            return {int(client): Place(name, 0, sys.maxsize) for client, name in self.manifest["memories"].items()}
        name = f"{stem(self.round)}.memories.parquet"
        return from_table(pq.read_table(io.BytesIO(self._read(name)))) if name in self.manifest["files"] else {}

    def lends_to(self, folder: Folder) -> bool:
        """Whether the next checkpoint in a folder may name files of this one."""
        return self.manifest["version"] == VERSIONS[-1] and self.folder.place == folder.place

    def restore(self, site: Site, workers: Workers) -> Round:
        """The round as it was, to continue from. Raises `InputError` where it does not fit the site."""
        order = state_of(site.model)
        weights = safetensors.torch.load(self._read(f"{stem(self.round)}.safetensors"))
        if (difference := first_difference(weights, order)) is not None:
            raise InputError(f"the checkpoint of round {self.round} is not of this model: {difference}")
        state = unpack(from_bytes(self._read(f"{stem(self.round)}.state.safetensors")))
        memories = contents(self.index(), self._read)
        parts = {part.slot: part for part in parts_at(site.job.method, self.round)} if self.round else {}
        return Round(
            round=self.round,
            weights={name: weights[name] for name in order},  # in the model's order: sums over names depend on it
            held={slot: Held(parts[slot], held["since"], held["state"]) for slot, held in state["held"].items()},
            memories={client: workers.remember(from_bytes(memory)) for client, memory in memories},
            evaluation=Evaluation(state["confusion"].numpy(), state["loss"]),
            peak=state["peak"].numpy(),
            forgetting=state["forgetting"],
        )

    def check(self) -> Saved:
        """Raises `Torn` where a file is missing or not as it was written."""
        for name in self.manifest["files"]:
            self._read(name)
        return self

    def refuse_another(self, site: Site) -> None:
        """Raises `InputError`, naming the differences, where this is not a checkpoint of the site's job on its data."""
        differing = differences(lineage_of(self.manifest["job"]), site.job.lineage())
        if not differing and self.manifest["data"] != site.federation.hash():
            differing = ["the images or labels have changed since"]
        if differing:
            what = f"the checkpoint of round {self.round} in '{self.folder.place}'"
            raise InputError(f"{what} belongs to another job: {'; '.join(differing)}")

    def other_bits(self, kinds: Sequence[Kind], modules: Mapping[str, str]) -> list[str]:
        """Why the run would continue to other bits: hardware of another kind, or modules with other hashes, in words.

        A checkpoint from before these were noted says nothing.
        """
        known: list[Kind] = self.manifest.get("hardware", kinds)
        found = [differences(known[0], kind) for kind in kinds if known and kind not in known]
        code: dict[str, str] = self.manifest.get("modules", modules)
        changed = [name for name in sorted({*code, *modules}) if code.get(name) != modules.get(name)]
        return [*(line for lines in found for line in lines), *(f"the module {name} has changed" for name in changed)]

    def _read(self, name: str) -> bytes:
        try:
            content = self.folder.read(name)
        except FileNotFoundError:
            raise Torn(f"'{name}' is missing") from None
        if hashlib.sha256(content).hexdigest() != self.manifest["files"].get(name):
            raise Torn(f"'{name}' is not as it was written")
        return content


class Checkpoints:
    """Writes the checkpoints of a run. Call `follow` after each round, so that only changed memories are written.

    `origin` has the hashes of data, partition and modules, as `provenance.environment` gives them; `still_ours`
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

    @property
    def round(self) -> int | None:
        """The round of the newest checkpoint."""
        return self._newest.round if self._newest else None

    def probe(self, weights: Weights) -> None:
        """Raises OSError where there is no room for a file of the weights' size."""
        self._folder.write(PROBE, bytes(num_bytes(weights)))
        self._folder.delete(PROBE)

    def follow(self, round: Round) -> None:
        """The memories of the round's clients have changed."""
        self._changed |= {row.client for row in round.clients}

    def save(self, round: Round, workers: Workers, rows: Callable[[str, int], pa.Table]) -> None:
        """Write the checkpoint of a round, unless it exists; keep the checkpoint before it, and delete older ones.

        `rows` gives the rows of a table after a round. What the checkpoint before has, and still holds, is not written.
        """
        if round.round == self.round:
            return
        self._still_ours()
        beginning, before, state = stem(round.round), self._newest, _state(round)
        lender = before if before and before.lends_to(self._folder) else None
        written = [f"{beginning}.json"]  # first: it is deleted first if writing fails
        files: dict[str, str] = {}  # name -> hash

        def write(name: str, *content: bytes) -> None:
            self._folder.write(name, *content)
            written.append(name)
            digest = hashlib.sha256()
            for piece in content:
                digest.update(piece)
            files[name] = digest.hexdigest()

        try:
            write(f"{beginning}.state.safetensors", to_bytes(pack(state)))
            weights = {name: tensor.contiguous() for name, tensor in round.weights.items()}
            write(f"{beginning}.safetensors", safetensors.torch.save(weights))
            tables, shared = {}, set()  # names of files that are lent
            for name in RESULTS:
                full = [(last, number) for last, number in (lender.parts(name) if lender else ()) if number >= ROWS]
                rest = rows(name, full[-1][0] if full else -1)
                write(f"{beginning}.{name}.parquet", to_parquet(rest))
                tables[name] = [*full, (round.round, rest.num_rows)]
                shared |= {f"{stem(last)}.{name}.parquet" for last, _ in full}
            index = settled(self._index, round.memories.keys() - self._changed)
            shared |= {place.shard for place in index.values()}
            moving = sorted(round.memories.keys() - index.keys())
            memories = ((client, to_bytes(workers.recall(round.memories[client]))) for client in moving)
            for name, pieces, places in ahead(fill(beginning, memories)):
                write(name, *pieces)
                index |= places
            if index:
                write(f"{beginning}.memories.parquet", to_parquet(to_table(index)))
            files |= {name: lender.manifest["files"][name] for name in sorted(shared)} if lender else {}
            manifest = {"version": VERSIONS[-1], "round": round.round, "job": self._job.table()}
            manifest |= {key: self._origin[key] for key in ("data", "partition", "modules")}
            manifest |= {"hardware": list(workers.kinds()), "tables": tables, "files": files}
            sealed = json.dumps({"checkpoint": manifest, "sha256": _digest(manifest)}, indent=1)
            self._folder.write(f"{beginning}.json", f"{sealed}\n".encode())
        except BaseException:  # the pieces of it would only fill the disk
            for name in written:
                with suppress(OSError):
                    self._folder.delete(name)
            raise
        self._newest, self._index, self._changed = Saved(self._folder, manifest), index, set()
        self._still_ours()
        _delete(self._folder, keep=self._newest.names | (before.names if before else set()))


def newest(folder: Folder, before: int | None = None) -> Saved | None:
    """The newest whole checkpoint, of those before a round if one is given; None where there is none at all.

    A torn checkpoint, or one of an unknown version, is passed over with a warning. Raises `InputError` where no other
    checkpoint is left.
    """
    found = sorted((int(match[1]) for name in folder.names() if (match := MANIFEST.fullmatch(name))), reverse=True)
    refused = []
    for number in (number for number in found if before is None or number < before):
        try:
            saved = Saved(folder, _read_manifest(folder, f"{stem(number)}.json")).check()
        except Torn as error:
            refused.append(f"the checkpoint of round {number} cannot be used: {error}")
            continue
        for refusal in refused:
            log.warning("%s; the last good checkpoint is of round %d", refusal, number)
        return saved
    if refused:
        raise InputError("\n".join([*refused, f"'{folder.place}' holds no good checkpoint"]))
    return None


def clear_checkpoints(folder: Folder) -> None:
    """Remove all checkpoints from a folder, and nothing else that is in it."""
    _delete(folder, keep=set())


def stem(round: int) -> str:
    """The beginning of the names of a round's files."""
    return f"round-{round:05d}"


def _delete(folder: Folder, keep: set[str]) -> None:
    names = [name for name in folder.names() if OWN.fullmatch(name) and name not in keep]
    for name in sorted(names, key=lambda name: not name.endswith(".json")):  # first the file that says it is complete
        folder.delete(name)


def _read_manifest(folder: Folder, name: str) -> dict[str, Any]:
    """Raises `Torn`."""
    try:
        sealed = json.loads(folder.read(name))
        manifest, digest = sealed["checkpoint"], sealed["sha256"]
        version = manifest["version"]
    except (ValueError, KeyError, TypeError):
        raise Torn(f"'{name}' is not as it was written") from None
    if version not in VERSIONS:
        raise Torn(f"it has version {version}, and this rayfed reads versions {', '.join(map(str, VERSIONS))}")
    if digest != _digest(manifest):
        raise Torn(f"'{name}' is not as it was written")
    return manifest


def _state(round: Round) -> dict[str, Any]:
    return {
        "held": {slot: {"since": held.since, "state": held.state} for slot, held in round.held.items()},
        "confusion": torch.tensor(round.evaluation.confusion),  # copied: an array that comes from Ray is read-only
        "loss": round.evaluation.loss,
        "peak": torch.tensor(round.peak),
        "forgetting": round.forgetting,
    }


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
