"""Checkpoints: all that a run needs to continue, complete or absent. `checkpointer.py` writes them.

    round-00020.json                 the manifest: every file with its hash; written last
    round-00020.safetensors          the global weights, by name
    round-00020.state.safetensors    the parts' states and the last evaluation
    round-00020.<table>.parquet      the results so far
    memories/client-00007.round-00018.safetensors    what client 7 has kept since round 18
    best.safetensors                 the weights of the best round; no checkpoint needs it

A memory does not change until its client trains again, so both kept checkpoints may name its file.
Random numbers are not saved: they are a function of seed, purpose, round and client.
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

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch

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
from rayfed.rounds.round import Kind, Memory, Round
from rayfed.rounds.setup import Setup
from rayfed.tensors.trees import first_difference
from rayfed.tensors.weights import Weights, other_names, state_of
from rayfed.tensors.wire import unpack

# The only version that is written and read.
VERSION = 6
BEST = "best.safetensors"
# Hashes of what went in, which a manifest has where there are such.
ORIGIN = ("data", "partition", "model", "trace", "modules")
# What a manifest says beside them, for messages and comparisons.
NOTED = ("contents", "versions")
MANIFEST = re.compile(r"round-(\d{5,})\.json")
# A local disk and an object store both take several small files at a time much faster.
THREADS = 8

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A complete checkpoint: each of its files is there, with the hash that the manifest notes."""

    folder: Folder
    manifest: dict[str, Any]

    @property
    def round(self) -> int:
        return self.manifest["round"]

    @property
    def files(self) -> dict[str, str]:
        """Hashes by name of the files of this checkpoint alone."""
        return self.manifest["files"]

    @property
    def memories(self) -> dict[int, tuple[int, str]]:
        """By client: the round in which its memory was written, and the file's hash."""
        found = {}
        for client, (round, digest) in self.manifest["memories"].items():
            found[int(client)] = (round, digest)
        return found

    @property
    def names(self) -> set[str]:
        """The names of all files, in `folder` and in its folder of memories."""
        own = {f"{stem(self.round)}.json", *self.files}
        return own | {memory_name(client, round) for client, (round, _) in self.memories.items()}

    def table(self, name: str) -> pa.Table:
        """Read the results so far."""
        file = f"{stem(self.round)}.{name}.parquet"
        if file not in self.files:
            # Not every run has every table.
            return SCHEMAS[name].empty_table()
        return pq.read_table(io.BytesIO(self._read(file)), schema=SCHEMAS[name])

    def leaves_work(self, job: Job) -> bool:
        """Return whether the job has later rounds, or still needs the evaluation of this round."""
        if job.train.patience and early_end(job.train, self.table("rounds").to_pylist()):
            return False
        return self.round < job.train.num_rounds or not self.manifest["evaluated"]

    def restore(self, setup: Setup, executor: Executor) -> Round:
        """Build the round as it was. Raises `InputError` if it does not fit the setup."""
        content = self._read(f"{stem(self.round)}.state.safetensors")
        state: dict[str, Any] = unpack(tree_from_bytes(content))
        # Round 0 is before the first part is in force.
        parts = parts_at(setup.job.method, self.round) if self.round else ()
        by_slot = {part.slot: part for part in parts}
        held = {}
        for slot, kept in state["held"].items():
            held[slot] = Held(by_slot[slot], kept["since"], kept["state"])
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
        )

    def weights(self, setup: Setup) -> Weights:
        """Read the global weights. Raises `InputError` if they are not of the setup's model."""
        order = state_of(setup.model)
        weights = safetensors.torch.load(self._read(f"{stem(self.round)}.safetensors"))
        # The file has a tensor that is shared under each of its names, the model under the first.
        for name in other_names(setup.model):
            weights.pop(name, None)
        difference = first_difference(weights, order)
        if difference is not None:
            raise InputError(
                f"the checkpoint of round {self.round} is not of this model: {difference}"
            )
        # In the model's order, because sums over names depend on it.
        return {name: weights[name] for name in order}

    def remember_memories(self, executor: Executor) -> dict[int, Memory]:
        """Read each client's memory and give it to the executor."""
        folder = memories_of(self.folder)

        # The executor gets it in the same thread, so that no more than a few are held here.
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
                f"belongs to another job: {'; '.join(differing)}"
            )

    def _other_data(self, setup: Setup) -> str:
        """Say what the setup's data have that this checkpoint's had not."""
        lines = differences(self.manifest["contents"], setup.federation.contents())
        before, now = flat(self.manifest["job"]), flat(setup.job.table())
        for key in ("data.source", "data.test", "data.root"):
            if before.get(key, "") != now[key]:
                lines.append(f"{key} is '{before.get(key, '')}' there, '{now[key]}' here")
        said = f" ({'; '.join(lines)})" if lines else ""
        return f"the images or labels have changed since{said}"

    def other_bits(self, kinds: Sequence[Kind], modules: Mapping[str, str]) -> list[str]:
        """Say why the run would continue with other bits: hardware, versions, changed modules."""
        known, code = self.manifest["hardware"], self.manifest["modules"]
        reasons = []
        for kind in kinds:
            if known and kind not in known:
                reasons += differences(known[0], kind)
        reasons += other_versions(self.manifest["versions"])
        for name in sorted({*code, *modules}):
            if code.get(name) != modules.get(name):
                reasons.append(f"the module {name} has changed since the run began")
        return reasons

    def _read(self, name: str) -> bytes:
        return read_whole(self.folder, name, self.files.get(name))


def newest(folder: Folder, before: int | None = None) -> Checkpoint | None:
    """Find the newest complete checkpoint, before a round if one is given; None if there is none.

    Damaged checkpoints are skipped with a warning. If all are damaged, raises `InputError`, or
    `Resumable` if the disk did not answer and may do so the next time.
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
            found = read_checkpoint(folder, number)
        except Torn as error:
            refused.append(f"the checkpoint of round {number} cannot be used: {error}")
            if getattr(error.__cause__, "errno", None) in PASSING:
                kind = Resumable
            continue
        for refusal in refused:
            log.warning("%s; the last good checkpoint is of round %d", refusal, number)
        return found
    if refused:
        raise kind("\n".join([*refused, f"'{folder.place}' holds no good checkpoint"]))
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
    found = Checkpoint(folder, manifest)
    for error in found.damaged():
        raise error
    return found


def read_whole(folder: Folder, name: str, digest: str | None = None) -> bytes:
    """Read a file, and compare its hash if one is given. Raises `Torn`."""
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
    """Call a function for each item, several at a time. Results come in the order of the items."""
    threads = ThreadPoolExecutor(THREADS)
    try:
        yield from threads.map(function, items)
    finally:
        # An error, or Ctrl-C, must not wait for thousands of files.
        threads.shutdown(cancel_futures=True)


def stem(round: int) -> str:
    """The beginning of the names of a checkpoint's own files."""
    return f"round-{round:05d}"


def memory_name(client: int, round: int) -> str:
    """The file of a client's memory, which is written in the checkpoint of this round."""
    return f"client-{client:05d}.{stem(round)}.safetensors"


def memories_of(folder: Folder) -> Folder:
    """The folder of memories in a folder of checkpoints."""
    return Folder(joined(folder.place, "memories"))


def digest_of(manifest: dict[str, Any]) -> str:
    """The hash of a manifest. It is the one file whose hash no other file notes."""
    return hash_of(json.dumps(manifest, sort_keys=True).encode())
