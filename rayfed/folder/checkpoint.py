"""Checkpoints: all that a run needs to continue, complete or absent.

This module says which files they have, and reads them. `checkpointer.py` writes them, `recorder.py`
says when, and `places.py` where.

    round-00020.json                 the manifest: every file with its hash; written last
    round-00020.safetensors          the global weights, by name
    round-00020.state.safetensors    the parts' states, the last evaluation, the peaks of classes
    round-00020.<table>.parquet      the results so far
    memories/client-00007.round-00018.safetensors    what client 7 has kept since round 18
    best.safetensors                 the weights of the best round; no checkpoint needs it

A memory does not change until its client trains again, so both kept checkpoints may name its file.
Random numbers are not saved: they are a function of the seed, the purpose and the place.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
from torch import Tensor

from rayfed.base.errors import InputError, Resumable, Torn
from rayfed.base.files import PASSING
from rayfed.base.storage import Folder, joined
from rayfed.folder.places import lineage_of
from rayfed.folder.provenance import hash_of, hash_of_model, other_versions
from rayfed.folder.summary import early_end
from rayfed.folder.tables import SCHEMAS
from rayfed.folder.tensorfile import tree_from_bytes
from rayfed.job import Job, differences, flat, other_lineage
from rayfed.measures.metrics import Evaluation
from rayfed.methods.part import Held, parts_at
from rayfed.rounds.executor import Executor
from rayfed.rounds.round import HardwareKind, Memory, Round
from rayfed.rounds.setup import Setup
from rayfed.tensors.trees import first_difference
from rayfed.tensors.weights import Weights, other_names, state_of
from rayfed.tensors.wire import unpack

# The only version that this rayfed writes and reads.
VERSION = 6
BEST = "best.safetensors"
# A manifest has these hashes of what went in, if the run has such a thing.
ORIGIN = ("data", "partition", "model", "trace", "modules")
# A manifest has these facts for messages and comparisons.
NOTED = ("contents", "versions")
MANIFEST = re.compile(r"round-(\d{5,})\.json")
# A local disk and an object store both take several small files at a time much faster.
THREADS = 8

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A complete checkpoint: each file is there, with the hash that the manifest notes."""

    folder: Folder
    manifest: dict[str, Any]

    @property
    def round(self) -> int:
        return self.manifest["round"]

    @property
    def files(self) -> dict[str, str]:
        """Return the hash of each file that only this checkpoint has, by the file's name."""
        return self.manifest["files"]

    @property
    def memories(self) -> dict[int, tuple[int, str]]:
        """For each client: the round in which its memory was written, and the file's hash."""
        memories = {}
        for client, (round, digest) in self.manifest["memories"].items():
            memories[int(client)] = (round, digest)
        return memories

    @property
    def names(self) -> set[str]:
        """Return the names of all files, in `folder` and in its folder of memories."""
        names = set(self.files)
        names.add(f"{stem(self.round)}.json")
        for client, (round, _) in self.memories.items():
            names.add(memory_name(client, round))
        return names

    def table(self, name: str) -> pa.Table:
        """Read a table of the results so far; empty if the run has no such table."""
        file = f"{stem(self.round)}.{name}.parquet"
        if file not in self.files:
            # Not every run has every table.
            return SCHEMAS[name].empty_table()
        return pq.read_table(io.BytesIO(self._read(file)), schema=SCHEMAS[name])

    def leaves_work(self, job: Job) -> bool:
        """Say whether the job has later rounds, or still needs the evaluation of this round."""
        if job.train.patience and early_end(job.train, self.table("rounds").to_pylist()):
            return False
        return self.round < job.train.num_rounds or not self.manifest["evaluated"]

    def restore(self, setup: Setup, executor: Executor) -> Round:
        """Return all of the round that the next one needs.

        Raises `InputError` if it does not fit the setup.
        """
        content = self._read(f"{stem(self.round)}.state.safetensors")
        state: dict[str, Any] = unpack(tree_from_bytes(content))
        # No part is in force in round 0.
        parts = parts_at(setup.job.method, self.round) if self.round else ()
        by_slot = {part.slot: part for part in parts}
        held = {}
        for slot, saved in state["held"].items():
            held[slot] = Held(by_slot[slot], saved["since"], saved["state"])
        evaluation = None
        if state["confusion"] is not None:
            evaluation = Evaluation(
                state["confusion"].numpy(),
                state["loss"],
                overconfidence=state["overconfidence"].numpy(),
            )
        return Round(
            round=self.round,
            weights=self.weights(setup),
            held=held,
            memories=self.remember_memories(executor),
            evaluation=evaluation,
            peak=state["peak"].numpy(),
            forgetting=state["forgetting"],
            shown=state["shown"],
            sampling=_arrays(state.get("sampling")),
        )

    def weights(self, setup: Setup) -> Weights:
        """Read the global weights. Raises `InputError` if they are not of the setup's model."""
        order = state_of(setup.model)
        weights = safetensors.torch.load(self._read(f"{stem(self.round)}.safetensors"))
        # A shared tensor is in the file under each of its names. The model has it under the first.
        for name in other_names(setup.model):
            weights.pop(name, None)
        difference = first_difference(weights, order)
        if difference is not None:
            raise InputError(
                f"the checkpoint of round {self.round} is not of this model: {difference}"
            )
        # The model's order, because sums over names depend on it.
        return {name: weights[name] for name in order}

    def remember_memories(self, executor: Executor) -> dict[int, Memory]:
        """Read each client's memory and give it to the executor."""
        folder = memories_of(self.folder)

        # A memory goes to the executor in the same thread, so that only a few are held here.
        def remember(entry: tuple[int, tuple[int, str]]) -> tuple[int, Memory]:
            client, (round, digest) = entry
            content = read_whole(folder, memory_name(client, round), digest)
            return client, executor.remember(tree_from_bytes(content))

        return dict(in_threads(remember, self.memories.items()))

    def damaged(self) -> list[Torn]:
        """List what is wrong with the files: missing, or not as they were written."""
        faults = []
        memories = memories_of(self.folder)
        files = [(self.folder, name, digest) for name, digest in self.files.items()]
        for client, (round, digest) in self.memories.items():
            files.append((memories, memory_name(client, round), digest))

        def fault(file: tuple[Folder, str, str]) -> Torn | None:
            try:
                read_whole(*file)
            except Torn as error:
                return error
            return None

        for error in in_threads(fault, files):
            if error is not None:
                faults.append(error)
        return faults

    def refuse_another(self, setup: Setup) -> None:
        """Raise `InputError` with the differences if this is of another job, or of other data."""
        differing = other_lineage(lineage_of(self.manifest["job"]), setup.job.lineage())
        if not differing and self.manifest["data"] != setup.federation.hash():
            differing = [self._other_data(setup)]
        if not differing and setup.trace and self.manifest.get("trace") != setup.trace.hash():
            differing = ["the trace of the clients has changed since"]
        if not differing and self.manifest["model"] != hash_of_model(setup):
            differing = [
                "the file of the model's weights, or what is frozen in the model, has changed since"
            ]
        if differing:
            raise InputError(
                f"the checkpoint of round {self.round} in '{self.folder.place}' "
                f"belongs to another job: {'; '.join(differing)}\n"
                "a run that was begun cannot change this; begin a new run: "
                "rayfed run JOB.toml -s name=NEW"
            )

    def _other_data(self, setup: Setup) -> str:
        """Say in what the setup's data differ from the data of this checkpoint."""
        lines = differences(self.manifest["contents"], setup.federation.contents())
        saved_job, job = flat(self.manifest["job"]), flat(setup.job.table())
        for key in ("data.source", "data.test", "data.root"):
            saved_value = saved_job.get(key, "")
            if saved_value != job[key]:
                lines.append(f"{key} is '{saved_value}' there, '{job[key]}' here")
        details = f" ({'; '.join(lines)})" if lines else ""
        return f"the images or labels have changed since{details}"

    def other_bits(self, kinds: Sequence[HardwareKind], modules: Mapping[str, str]) -> list[str]:
        """List why the results would change: other hardware, versions or modules.

        `kinds` are the kinds of hardware, `modules` the hashes of the user's modules by name.
        """
        known_kinds, known_modules = self.manifest["hardware"], self.manifest["modules"]
        reasons = []
        for kind in kinds:
            if known_kinds and kind not in known_kinds:
                reasons += differences(known_kinds[0], kind)
        reasons += other_versions(self.manifest["versions"])
        for name in sorted(known_modules.keys() | modules.keys()):
            if known_modules.get(name) != modules.get(name):
                reasons.append(f"the module {name} has changed since the run began")
        return reasons

    def _read(self, name: str) -> bytes:
        """Return the content of one of the files. Raises `Torn`."""
        return read_whole(self.folder, name, self.files.get(name))


def _arrays(tensors: Mapping[str, Tensor] | None) -> dict[str, np.ndarray] | None:
    """Return tensors as arrays; None stays None."""
    if tensors is None:
        return None
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def newest(folder: Folder, before: int | None = None) -> Checkpoint | None:
    """Return the newest complete checkpoint; None if there is no checkpoint.

    With `before`, only checkpoints of earlier rounds count. Damaged checkpoints are skipped with a
    warning. If all are damaged, raises `InputError`, or `Resumable` if the disk did not answer and
    may do so the next time.
    """
    numbers = []
    for name in folder.names(odd=True):
        match = MANIFEST.fullmatch(name)
        if match and (before is None or int(match[1]) < before):
            numbers.append(int(match[1]))
    refused: list[str] = []
    kind: type[Exception] = InputError
    for number in sorted(numbers, reverse=True):
        try:
            checkpoint = read_checkpoint(folder, number)
        except Torn as error:
            refused.append(f"the checkpoint of round {number} cannot be used: {error}")
            if getattr(error.__cause__, "errno", None) in PASSING:
                kind = Resumable
            continue
        for refusal in refused:
            log.warning("%s; the last good checkpoint is of round %d", refusal, number)
        return checkpoint
    if refused:
        refused.append(f"'{folder.place}' holds no good checkpoint")
        raise kind("\n".join(refused))
    return None


def read_checkpoint(folder: Folder, round: int) -> Checkpoint:
    """Read the checkpoint of a round. Raises `Torn` if it is not complete."""
    name = f"{stem(round)}.json"
    try:
        content = json.loads(read_whole(folder, name))
        manifest, digest = content["checkpoint"], content["sha256"]
        version, number = manifest["version"], manifest["round"]
    except Torn:
        raise
    except (ValueError, LookupError, TypeError, RecursionError):
        raise Torn(f"'{name}' is not as it was written") from None
    if isinstance(version, int) and version != VERSION:
        raise Torn(
            f"it has version {version}, and this rayfed reads version {VERSION} alone: "
            "continue with the rayfed that environment.json names, or begin the run again"
        )
    if digest != digest_of(manifest) or number != round:
        raise Torn(f"'{name}' is not as it was written")
    checkpoint = Checkpoint(folder, manifest)
    for error in checkpoint.damaged():
        raise error
    return checkpoint


def read_whole(folder: Folder, name: str, digest: str | None = None) -> bytes:
    """Return a file's content. Raises `Torn` if it is missing or does not match the hash."""
    try:
        content = folder.read(name)
    except FileNotFoundError:
        raise Torn(f"'{name}' is missing") from None
    except OSError as error:
        raise Torn(f"'{name}' cannot be read: {error}") from error
    if digest is not None and hash_of(content) != digest:
        raise Torn(f"'{name}' is not as it was written")
    return content


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Call a function for each item in threads, and yield the results in the items' order."""
    threads = ThreadPoolExecutor(THREADS)
    try:
        yield from threads.map(function, items)
    finally:
        # An error, or Ctrl-C, must not wait for thousands of files.
        threads.shutdown(cancel_futures=True)


def stem(round: int) -> str:
    """Return the beginning of the names of a checkpoint's own files.

    >>> stem(20)
    'round-00020'
    """
    return f"round-{round:05d}"


def memory_name(client: int, round: int) -> str:
    """Return the name of the file with a client's memory, as the checkpoint of a round writes it.

    >>> memory_name(7, 18)
    'client-00007.round-00018.safetensors'
    """
    return f"client-{client:05d}.{stem(round)}.safetensors"


def memories_of(folder: Folder) -> Folder:
    """Return the folder of memories in a folder of checkpoints."""
    return Folder(joined(folder.place, "memories"))


def digest_of(manifest: dict[str, Any]) -> str:
    """Return the hash of a manifest, the only file whose hash no other file notes."""
    return hash_of(json.dumps(manifest, sort_keys=True).encode())
