"""Reading checkpoints: `checkpoint.py` writes them, and says which files they have."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch

from rayfed.base.errors import InputError, Resumable, Torn
from rayfed.base.files import PASSING
from rayfed.base.storage import Folder
from rayfed.folder.packing import Index, from_bytes, index_from_table, memories_in, twin_of
from rayfed.folder.places import lineage_of
from rayfed.folder.provenance import hash_of, hash_of_model, other_versions
from rayfed.folder.summary import early_end
from rayfed.folder.tables import SCHEMAS
from rayfed.job import Job, differences, flat, other_lineage
from rayfed.losses.metrics import Evaluation
from rayfed.methods.part import Held, parts_at
from rayfed.rounds.round import Kind, Round
from rayfed.rounds.site import Site
from rayfed.rounds.workers import Workers
from rayfed.tensors.trees import first_difference
from rayfed.tensors.weights import Weights, identical, other_names, state_of
from rayfed.tensors.wire import unpack

log = logging.getLogger(__name__)

VERSION = 5  # that is written, and alone can be read
MANIFEST = re.compile(r"round-(\d{5,})\.json")


@dataclass(frozen=True, eq=False)
class Saved:
    """A whole checkpoint: every file, or its twin, is there, and has the hash that its manifest notes."""

    folder: Folder
    manifest: dict[str, Any]

    @property
    def round(self) -> int:
        return self.manifest["round"]

    @property
    def names(self) -> set[str]:
        return {f"{stem(self.round)}.json", *self.manifest["files"]}

    def table(self, name: str) -> pa.Table:
        """The results so far."""
        parts = (self._read(f"{stem(last)}.{name}.parquet") for last, _ in self.parts(name))
        tables = [SCHEMAS[name].empty_table(), *(pq.read_table(io.BytesIO(part)) for part in parts)]
        return pa.concat_tables(tables, promote_options="default")

    def parts(self, name: str) -> list[tuple[int, int]]:
        """The files that hold a table: the last round in each, and its number of rows."""
        return self.manifest["tables"].get(name, [])

    def index(self) -> Index:
        """Where the memories lie."""
        name = f"{stem(self.round)}.memories.parquet"
        if name not in self.manifest["files"]:
            return {}
        return index_from_table(pq.read_table(io.BytesIO(self._read(name))))

    def leaves_work(self, job: Job) -> bool:
        """Whether anything of a job is left to do: later rounds, or the evaluation of this one, its last."""
        if job.train.patience and early_end(job.train, self.table("rounds").to_pylist()):
            return False
        return self.round < job.train.num_rounds or not self.manifest["evaluated"]

    def lends_to(self, folder: Folder) -> bool:
        """Whether the next checkpoint in a folder may name files of this one."""
        return self.folder.place == folder.place

    def restore(self, site: Site, workers: Workers) -> Round:
        """The round as it was, to continue from. Raises `InputError` where it does not fit the site."""
        state: dict[str, Any] = unpack(
            from_bytes(self._read(f"{stem(self.round)}.state.safetensors"))
        )
        memories = memories_in(self.index(), self._read)
        evaluation = None  # a round may be without one
        if state["confusion"] is not None:
            over = state["overconfidence"].numpy()
            evaluation = Evaluation(state["confusion"].numpy(), state["loss"], overconfidence=over)
        parts = (
            {part.slot: part for part in parts_at(site.job.method, self.round)}
            if self.round
            else {}
        )
        lost = state["forgetting"]
        if not site.job.train.can_forget(self.round):
            lost = None  # earlier versions wrote 0.0 before anything could be forgotten
        return Round(
            round=self.round,
            weights=self.weights(site),
            held={
                slot: Held(parts[slot], held["since"], held["state"])
                for slot, held in state["held"].items()
            },
            memories={client: workers.remember(from_bytes(memory)) for client, memory in memories},
            evaluation=evaluation,
            peak=state["peak"].numpy(),
            forgetting=lost,
            shown=state.get("shown"),
        )

    def weights(self, site: Site) -> Weights:
        """The global model's weights. Raises `InputError` where they do not fit the site's model."""
        order = state_of(site.model)
        weights = safetensors.torch.load(self._read(f"{stem(self.round)}.safetensors"))
        for name, first in other_names(site.model).items():
            copied = weights.pop(name, None)
            if copied is not None and first in weights and not identical(copied, weights[first]):
                raise InputError(
                    f"the checkpoint of round {self.round} has '{first}' and '{name}' apart, and in the model they are "
                    "one tensor: an older rayfed wrote it; begin the run again"
                )
        if (difference := first_difference(weights, order)) is not None:
            raise InputError(
                f"the checkpoint of round {self.round} is not of this model: {difference}"
            )
        return {
            name: weights[name] for name in order
        }  # in the model's order: sums over names depend on it

    def check(self) -> None:
        """Raises `Torn` where a file is missing or not as it was written, and so is its twin, if it has one."""
        files = self.manifest["files"]
        for name in files.keys() - set(map(twin_of, files)):
            self._read(name)

    def damaged(self) -> list[str]:
        """Which files are missing or not as they were written, in words: also those whose twins are whole."""
        faults = []
        for name in self.manifest["files"]:
            try:
                self._read_alone(name)
            except Torn as error:
                faults.append(str(error))
        return faults

    def refuse_another(self, site: Site) -> None:
        """Raises `InputError`, naming the differences, where this is not a checkpoint of the site's job on its data."""
        differing = other_lineage(lineage_of(self.manifest["job"]), site.job.lineage())
        if not differing and self.manifest["data"] != site.federation.hash():
            differing = [self._other_data(site)]
        if not differing and site.trace and self.manifest.get("trace") != site.trace.hash():
            differing = ["the trace of the clients has changed since"]
        if not differing and self.manifest["model"] != hash_of_model(site):
            differing = [
                "the file of the model's weights, or what is frozen in the model, has changed since"
            ]
        if differing:
            raise InputError(
                f"the checkpoint of round {self.round} in '{self.folder.place}' belongs to another job: "
                f"{'; '.join(differing)}"
            )

    def _other_data(self, site: Site) -> str:
        """What the site's data have that this checkpoint's had not, in words."""
        there = self.manifest.get("contents", {})  # earlier checkpoints have none
        lines = differences(there, site.federation.contents()) if there else []
        before, now = flat(self.manifest["job"]), flat(site.job.table())
        for key in ("data.source", "data.test", "data.root"):
            if before.get(key, "") != now[key]:
                lines.append(f"{key} is '{before.get(key, '')}' there, '{now[key]}' here")
        said = f" ({'; '.join(lines)})" if lines else ""
        return f"the images or labels have changed since{said}"

    def other_bits(
        self, kinds: Sequence[Kind], modules: Mapping[str, str], noted: Mapping[str, str | None]
    ) -> list[str]:
        """Why the run would continue to other bits, in words: other hardware, versions, or modules with other hashes.

        `noted` are the versions in `environment.json`, for a checkpoint that has none.
        """
        known, code = self.manifest["hardware"], self.manifest["modules"]
        other = [
            line
            for kind in kinds
            if known and kind not in known
            for line in differences(known[0], kind)
        ]
        changed = [
            name for name in sorted({*code, *modules}) if code.get(name) != modules.get(name)
        ]
        other += other_versions(self.manifest.get("versions", noted))
        return [*other, *(f"the module {name} has changed since the run began" for name in changed)]

    def _read(self, name: str) -> bytes:
        """The content of a file, or of its twin. Raises `Torn`."""
        try:
            return self._read_alone(name)
        except Torn as error:
            if twin_of(name) not in self.manifest["files"]:
                raise
            log.warning("%s: its second copy is read", error)
            return self._read_alone(twin_of(name))

    def _read_alone(self, name: str) -> bytes:
        """The content of a file. Raises `Torn`."""
        content = _content(self.folder, name)
        if hash_of(content) != self.manifest["files"].get(name):
            raise Torn(f"'{name}' is not as it was written")
        return content


def newest(folder: Folder, before: int | None = None) -> Saved | None:
    """The newest whole checkpoint, of those before a round if one is given; None where there is none at all.

    A torn checkpoint, or one of an unknown version, is passed over with a warning. Where no other checkpoint is left,
    raises `InputError`; or `Resumable`, if a disk that did not answer may answer the next time.
    """
    matches = (MANIFEST.fullmatch(name) for name in folder.names(odd=True))
    found = sorted((int(match[1]) for match in matches if match), reverse=True)
    refused: list[str] = []
    kind: type[Exception] = InputError
    for number in (number for number in found if before is None or number < before):
        try:
            saved = read_saved(folder, number)
        except Torn as error:
            refused.append(f"the checkpoint of round {number} cannot be used: {error}")
            if getattr(error.__cause__, "errno", None) in PASSING:
                kind = Resumable
            continue
        for refusal in refused:
            log.warning("%s; the last good checkpoint is of round %d", refusal, number)
        return saved
    if refused:
        raise kind("\n".join([*refused, f"'{folder.place}' holds no good checkpoint"]))
    return None


def read_saved(folder: Folder, round: int) -> Saved:
    """The checkpoint of a round. Raises `Torn` where it is not whole."""
    name = f"{stem(round)}.json"
    content = _content(folder, name)
    try:
        sealed = json.loads(content)
        manifest, digest = sealed["checkpoint"], sealed["sha256"]
        version, whole = (
            manifest["version"],
            digest == digest_of(manifest) and manifest["round"] == round,
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Torn(f"'{name}' is not as it was written") from None
    if isinstance(version, int) and version != VERSION:
        raise Torn(f"it has version {version}, and this rayfed reads version {VERSION} alone")
    if not whole:
        raise Torn(f"'{name}' is not as it was written")
    saved = Saved(folder, manifest)
    saved.check()
    return saved


def stem(round: int) -> str:
    """The beginning of the names of a round's files."""
    return f"round-{round:05d}"


def _content(folder: Folder, name: str) -> bytes:
    """Raises `Torn`."""
    try:
        return folder.read(name)
    except FileNotFoundError:
        raise Torn(f"'{name}' is missing") from None
    except OSError as error:
        raise Torn(f"'{name}' cannot be read: {error}") from error


def digest_of(manifest: dict[str, Any]) -> str:
    """The SHA-256 that a manifest is sealed with."""
    return hash_of(json.dumps(manifest, sort_keys=True).encode())
