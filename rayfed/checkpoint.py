"""What a run needs to go on, on disk: safetensors, Parquet and JSON, whole or not there at all.

    round-00020.json                    says what belongs to the checkpoint, with the hash of each file; written last
    round-00020.safetensors             the global weights, by name
    round-00020.state.safetensors       the parts' states, and the figures that the next round is measured by
    round-00020.<table>.parquet         the results so far
    client-00007-round-00013.safetensors  what a client remembers, written once after each time it trained

A checkpoint whose .json is there is complete, so killing a run at any moment leaves the one before. The newest two are
kept. Random numbers need no place in it: they are a function of seed, round and client.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

from rayfed.job import Job
from rayfed.local import Evaluation, Site
from rayfed.methods.part import parts_at
from rayfed.rounds import Held, Round, Workers
from rayfed.storage import Folder
from rayfed.values import InputError
from rayfed.weights import first_difference, state_of
from rayfed.wire import from_bytes, pack, to_bytes, unpack

log = logging.getLogger(__name__)

VERSION = 1
OWN = re.compile(r"(round-\d{5,}(\.\w+)?|client-\d{5,}-round-\d{5,})\.(json|safetensors|parquet)")
MANIFEST = re.compile(r"round-(\d{5,})\.json")


class Torn(ValueError):
    """A checkpoint that cannot be used; the message says why."""


@dataclass(frozen=True, eq=False)
class Saved:
    """A checkpoint that is whole: every file is there, and has the hash that was noted."""

    folder: Folder
    manifest: dict[str, Any]

    @property
    def round(self) -> int:
        return self.manifest["round"]

    @property
    def job(self) -> dict[str, Any]:
        """The tables of the job that it belongs to."""
        return self.manifest["job"]

    def table(self, name: str) -> pa.Table:
        """The results so far."""
        return pq.read_table(io.BytesIO(self._read(f"{stem(self.round)}.{name}.parquet")))

    def restore(self, site: Site, workers: Workers) -> Round:
        """The round as it was: what `rounds` goes on from. Raises `InputError` where it does not fit the site."""
        order = state_of(site.model)
        weights = safetensors.torch.load(self._read(f"{stem(self.round)}.safetensors"))
        if (where := first_difference(weights, order)) is not None:
            raise InputError(f"the checkpoint of round {self.round} is not one of this model: {where}")
        state = unpack(from_bytes(self._read(f"{stem(self.round)}.state.safetensors")))
        parts = {part.slot: part for part in parts_at(site.method, self.round)} if self.round else {}
        return Round(
            round=self.round,
            weights={name: weights[name] for name in order},  # in the model's order: sums over names depend on it
            held={slot: Held(parts[slot], held["since"], held["state"]) for slot, held in state["held"].items()},
            memories={
                int(client): workers.remember(from_bytes(self._read(name)))
                for client, name in self.manifest["memories"].items()
            },
            evaluation=Evaluation(state["confusion"].numpy(), state["loss"]),
            peak=state["peak"].numpy(),
            forgetting=state["forgetting"],
        )

    def _read(self, name: str) -> bytes:
        try:
            content = self.folder.read(name)
        except FileNotFoundError:
            raise Torn(f"'{name}' is missing") from None
        if hashlib.sha256(content).hexdigest() != self.manifest["files"].get(name):
            raise Torn(f"'{name}' is not as it was written")
        return content

    def check(self) -> Saved:
        """Raises `Torn` where a file is missing or not as it was written."""
        for name in self.manifest["files"]:
            self._read(name)
        return self


class Checkpoints:
    """Writes the checkpoints of one run; `follow` is told of each round, so that only new memories are written."""

    def __init__(self, folder: Folder, job: Job, data: str, saved: Saved | None = None) -> None:
        self._folder, self._job, self._data = folder, job, data
        self._memories: dict[int, str] = {}  # client -> the file that holds what it remembers now
        self._hashes: dict[str, str] = {}  # of those files
        self._newest: set[str] = set()  # files of the newest checkpoint
        self._written: list[str] = []  # files of the one that is being written
        self.round: int | None = None  # of the newest checkpoint
        if saved is not None:
            self._memories = {int(client): name for client, name in saved.manifest["memories"].items()}
            self._hashes = {name: saved.manifest["files"][name] for name in self._memories.values()}
            self._newest = {f"{stem(saved.round)}.json", *saved.manifest["files"]}
            self.round = saved.round

    def follow(self, round: Round) -> None:
        """A round is over: what its clients remember is new."""
        for row in round.clients:
            self._memories.pop(row.client, None)

    def save(self, round: Round, workers: Workers, tables: Mapping[str, pa.Table]) -> None:
        """Write the checkpoint of a round, unless it is there; then drop those that are older than the one before."""
        if round.round == self.round:
            return
        memories, hashes, self._written = dict(self._memories), dict(self._hashes), []
        try:
            self._save(round, workers, tables)
        except BaseException:
            if self.round != round.round:  # the pieces of it would only fill the disk
                self._memories, self._hashes = memories, hashes
                with suppress(OSError):
                    for name in self._written:
                        self._folder.delete(name)
            raise

    def _save(self, round: Round, workers: Workers, tables: Mapping[str, pa.Table]) -> None:
        contents = {
            f"{stem(round.round)}.safetensors": safetensors.torch.save(
                {name: tensor.contiguous() for name, tensor in round.weights.items()}
            ),
            f"{stem(round.round)}.state.safetensors": to_bytes(pack(_state(round))),
            **{f"{stem(round.round)}.{name}.parquet": _parquet(table) for name, table in tables.items()},
        }
        hashes = {name: self._write(name, content) for name, content in contents.items()}
        for client in sorted(round.memories.keys() - self._memories.keys()):
            # One at a time: the driver never holds what all clients remember.
            name = f"client-{client:05d}-{stem(round.round)}.safetensors"
            self._hashes[name] = self._write(name, to_bytes(workers.recall(round.memories[client])))
            self._memories[client] = name
        self._memories = {client: self._memories[client] for client in sorted(round.memories)}
        self._hashes = {name: self._hashes[name] for name in self._memories.values()}
        files = {**hashes, **self._hashes}
        manifest = {
            "version": VERSION,
            "round": round.round,
            "job": self._job.table(),
            "matters": lineage(self._job),
            "data": self._data,
            "memories": {str(client): name for client, name in self._memories.items()},
            "files": files,
        }
        self._folder.write(f"{stem(round.round)}.json", _seal(manifest))
        before, self._newest = self._newest, {f"{stem(round.round)}.json", *files}
        self.round = round.round
        _delete(self._folder, keep=before | self._newest)

    def _write(self, name: str, content: bytes) -> str:
        self._folder.write(name, content)
        self._written.append(name)
        return hashlib.sha256(content).hexdigest()


def newest(folder: Folder, before: int | None = None) -> Saved | None:
    """The newest checkpoint that is whole, of those before a round if one is given; None where there is none at all.

    One that is torn, or of a version that is not known, is passed over with a warning; `InputError` where no other is
    left.
    """
    found = sorted((int(match[1]) for name in folder.names() if (match := MANIFEST.fullmatch(name))), reverse=True)
    refused = []
    for number in (number for number in found if before is None or number < before):
        try:
            saved = Saved(folder, read_manifest(folder, f"{stem(number)}.json")).check()
        except Torn as error:
            refused.append(f"the checkpoint of round {number} cannot be used: {error}")
            continue
        for refusal in refused:
            log.warning("%s; the last good one is of round %d", refusal, number)
        return saved
    if refused:
        raise InputError("\n".join([*refused, f"'{folder.place}' holds no good checkpoint"]))
    return None


def clear(folder: Folder) -> None:
    """Remove all checkpoints from a folder, and nothing else that is in it."""
    _delete(folder, keep=set())


def _delete(folder: Folder, keep: set[str]) -> None:
    names = [name for name in folder.names() if OWN.fullmatch(name) and name not in keep]
    for name in sorted(names, key=lambda name: not name.endswith(".json")):  # first what says it is complete
        folder.delete(name)


def refuse_another(saved: Saved, job: Job, data: str) -> None:
    """Raises `InputError`, naming what differs, where a checkpoint is not one of this job on this data."""
    there, here = _flat(saved.manifest["matters"]), _flat(lineage(job))
    differing = [
        f"{key} is {there.get(key, 'not set')} there, {here.get(key, 'not set')} here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]
    if not differing and saved.manifest["data"] != data:
        differing = ["the images or labels have changed since"]
    if differing:
        raise InputError(
            f"the checkpoint of round {saved.round} in '{saved.folder.place}' belongs to another job: "
            + "; ".join(differing)
        )


def read_manifest(folder: Folder, name: str) -> dict[str, Any]:
    """Raises `Torn`."""
    try:
        sealed = json.loads(folder.read(name))
        manifest, digest = sealed["checkpoint"], sealed["sha256"]
        version = manifest["version"]
    except (ValueError, KeyError, TypeError):
        raise Torn(f"'{name}' is not as it was written") from None
    if version != VERSION:
        raise Torn(f"it has version {version}, and this rayfed knows version {VERSION}")
    if digest != _digest(manifest):
        raise Torn(f"'{name}' is not as it was written")
    return manifest


def lineage(job: Job) -> dict[str, Any]:
    """All that the numbers of a round depend on; not how many rounds are to come."""
    matters = job.matters()
    matters["train"].pop("num_rounds")
    return json.loads(json.dumps(matters))


def stem(round: int) -> str:
    return f"round-{round:05d}"


def _state(round: Round) -> dict[str, Any]:
    return {
        "held": {slot: {"since": held.since, "state": held.state} for slot, held in round.held.items()},
        "confusion": torch.tensor(round.evaluation.confusion),  # copied, as what comes from Ray cannot be written to
        "loss": round.evaluation.loss,
        "peak": torch.tensor(round.peak),
        "forgetting": round.forgetting,
    }


def _seal(manifest: dict[str, Any]) -> bytes:
    return (json.dumps({"checkpoint": manifest, "sha256": _digest(manifest)}, indent=1) + "\n").encode()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
