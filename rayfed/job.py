"""A job file, read into typed, checked values: what to run, on which data, where.

Every key is checked before anything is loaded or started; an unknown one is refused with the nearest that exists.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rayfed.data.augment import Augment
from rayfed.data.partition import PARTITIONS, Rule
from rayfed.data.sources import Source
from rayfed.local import Training
from rayfed.methods.part import Method
from rayfed.methods.registry import read_method, write_method
from rayfed.values import Ge, Gt, InputError, build, did_you_mean, table

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}(/[A-Za-z0-9][A-Za-z0-9._+-]{0,199}){0,9}")  # a file's has 255
MAX_BYTES = 2**20  # of a job file; a hundred times the largest grid's
MAX_DEPTH = 20  # tables and lists in one another


@dataclass(frozen=True)
class RayOptions:
    """Where the clients' work is done."""

    mode: Annotated[Literal["on", "off"], "off: the same work in this process, without Ray"] = "on"
    actors: Annotated[
        Literal["auto"] | Annotated[int, Ge(1)], "how many; auto: as many as fit, one a sampled client at most"
    ] = "auto"
    address: Annotated[str, "of a running cluster (auto: the one on this machine); empty: start one here"] = ""
    num_cpus: Annotated[float, Gt(0), "CPUs an actor; it computes with one thread per CPU, and one at least"] = 1.0
    num_gpus: Annotated[
        Literal["auto"] | Annotated[float, Ge(0)],
        "GPUs an actor; a fraction is rounded up to 1/k, so that k fit on one; auto: as a client turns out to need",
    ] = 0.0
    data: Annotated[
        Literal["store", "storage"], "how images come to a node; store: from here; storage: each node reads its own"
    ] = "store"
    deadline: Annotated[
        Literal["auto"] | Annotated[float, Gt(0)],
        "seconds after which a client counts as hung; auto: ten times the longest so far, five minutes at least",
    ] = "auto"
    max_retries: Annotated[int, Ge(0), "times that a client is run again after it was lost with its actor"] = 3
    patience: Annotated[float, Gt(0), "seconds without any actor after which the run ends"] = 180.0

    @property
    def cluster(self) -> str:
        """The address to join; empty: a Ray is started here. Inside a Ray job, the environment names the cluster."""
        return self.address or os.environ.get("RAY_ADDRESS", "")

    @property
    def threads(self) -> int:
        """Threads that one client computes with, on an actor or in this process."""
        return max(1, int(self.num_cpus))

    @property
    def gpu_share(self) -> float:
        """GPUs an actor as Ray can always place them: whole ones, or one k-th; with "auto" one, until it is measured.

        >>> RayOptions(num_gpus=0.3).gpu_share == 1 / 3
        True
        """
        if self.num_gpus == "auto":
            return 1.0
        if 0 < self.num_gpus < 1e-3:
            raise InputError(f"ray.num_gpus = {self.num_gpus}: an actor takes a thousandth of a GPU at least, or none")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise InputError(
                f"ray.num_gpus = {self.num_gpus}: more than one GPU an actor must be a whole number of them"
            )
        return self.num_gpus if self.num_gpus >= 1 or self.num_gpus == 0 else 1 / math.floor(1 / self.num_gpus + 1e-9)


@dataclass(frozen=True)
class Output:
    """Where results go: the folder `<path>/<name>`."""

    path: Annotated[str, "folder of all runs"] = "runs"
    checkpoints: Annotated[str, "folder or URI for the checkpoints of all runs; empty: in the run's folder"] = ""
    every: Annotated[int, Ge(1), "rounds from one checkpoint to the next"] = 10


@dataclass(frozen=True)
class Job:
    """A whole experiment, as data."""

    name: str
    seed: int
    method: Method
    source: Source
    augment: Augment
    partition: Rule
    model: str
    model_options: dict[str, Any] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    ray: RayOptions = field(default_factory=RayOptions)
    output: Output = field(default_factory=Output)

    def table(self) -> dict[str, Any]:
        """The job with every default filled in, as `read_job` reads it back."""
        name = next(name for name, rule in PARTITIONS.items() if rule is type(self.partition))
        return {
            "name": self.name,
            "seed": self.seed,
            "method": write_method(self.method),
            "data": {
                **table(self.source),
                "augment": table(self.augment),
                "partition": {"name": name, **table(self.partition)},
            },
            "model": {"name": self.model, **self.model_options},
            "train": table(self.training),
            "ray": table(self.ray),
            "output": table(self.output),
        }

    def matters(self) -> dict[str, Any]:
        """All that the numbers depend on: not where the work is done, nor where the results go."""
        matters = {key: value for key, value in self.table().items() if key not in ("name", "ray", "output")}
        return {**matters, "threads": self.ray.threads}

    def hash(self) -> str:
        """Of all that the numbers depend on."""
        matters = self.matters()
        return hashlib.sha256(json.dumps(matters, sort_keys=True).encode()).hexdigest()


# Where in a job file which values are, in the order in which they are shown; the partition has one of several rules.
SECTIONS: list[tuple[str, Any]] = [
    ("data", Source),
    ("data.augment", Augment),
    *(("data.partition", rule) for rule in PARTITIONS.values()),
    ("train", Training),
    ("ray", RayOptions),
    ("output", Output),
]


def read_job(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Job:
    """A job from a TOML file, or from a table, with dotted `overrides` on top: `{"train.num_rounds": 2}`.

    Raises `InputError` naming the key, what was given and what would be right.
    """
    return make_job(override(read_table(source), overrides or {}))


def read_table(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a job file as they stand, unchecked."""
    if isinstance(source, Mapping):
        return dict(source)
    try:
        with open(source, encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise InputError(f"job file '{source}' has more than {MAX_BYTES:,} characters; is it one?")
        return _loads(text)
    except FileNotFoundError:
        raise InputError(f"no job file '{source}'; jobs/quickstart.toml is one to start from") from None
    except InputError:
        raise
    except (OSError, ValueError) as error:  # of TOML, of UTF-8, of a path with a zero byte
        raise InputError(f"job file '{source}' cannot be read: {error}") from None


def _loads(text: str) -> dict[str, Any]:
    """TOML, no deeper than what walks through it can follow."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        tables = None
    if tables is None or _deeper(tables, MAX_DEPTH):
        raise InputError(f"tables and lists in one another, more than {MAX_DEPTH} deep: no job has that")
    return tables


def _deeper(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _deeper(item, depth - 1) for item in inner)


def override(tables: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with single values replaced: `{"train.num_rounds": 2}`; a value that is a table replaces all of it.

    Naming another partition or model drops the options of the one before, except those that every partition takes.

    >>> override({"train": {"lr": 0.1}}, {"train.num_rounds": 2})
    {'train': {'lr': 0.1, 'num_rounds': 2}}
    >>> override({"data": {"partition": {"name": "shards", "s": 2, "num_clients": 9}}}, {"data.partition.name": "iid"})
    {'data': {'partition': {'name': 'iid', 'num_clients': 9}}}
    """
    result: dict[str, Any] = copy.deepcopy(dict(tables))
    for dotted in sorted(overrides, key=lambda dotted: not dotted.endswith(".name")):  # names first: they drop options
        *path, last = dotted.split(".")
        inner = result
        for step in path:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                raise InputError(f"'{dotted}' cannot be set: '{step}' is not a table")
        if path and last == "name" and inner.get("name") != overrides[dotted]:
            for option in [key for key in inner if key not in ("name", "num_clients", "seed")]:
                del inner[option]
        inner[last] = overrides[dotted]
    return result


def read_override(text: str) -> tuple[str, Any]:
    """`key.sub=value` from the command line; the value as TOML writes it, quotes around a word may be left out.

    >>> read_override("train.lr=0.1"), read_override("method=fedavg")
    (('train.lr', 0.1), ('method', 'fedavg'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"'{text}': write an override as key.sub=value, such as train.num_rounds=2")
    try:
        return key.strip(), _loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def make_job(tables: Mapping[str, Any]) -> Job:
    """Checked values from a job's tables."""
    known = ("name", "seed", "method", "data", "model", "train", "ray", "output")
    if "grid" in tables:
        raise InputError(
            "this job file is a grid of many runs: `rayfed run` runs them, `rayfed.grid.expand` makes jobs of it"
        )
    for key in tables:
        if key not in known:
            raise InputError(f"unknown key '{key}' in the job{did_you_mean(key, known)}")
    data = _section(tables, "data")
    augment, partition = _section(data, "augment", "data."), _section(data, "partition", "data.")
    model = _section(tables, "model")
    job = Job(
        name=_name(tables.get("name")),
        seed=_seed(tables.get("seed", 0)),
        method=read_method(tables.get("method", "fedavg")),
        source=build(Source, {k: v for k, v in data.items() if k not in ("augment", "partition")}, where="data"),
        augment=build(Augment, augment, where="data.augment"),
        partition=_partition(partition),
        model=_text(model.pop("name", "cnn"), "model.name"),
        model_options=model,
        training=build(Training, _section(tables, "train"), where="train"),
        ray=build(RayOptions, _section(tables, "ray"), where="ray"),
        output=build(Output, _section(tables, "output"), where="output"),
    )
    job.ray.gpu_share  # noqa: B018  (refuses what cannot be a share)
    return job


def _section(tables: Mapping[str, Any], name: str, prefix: str = "") -> dict[str, Any]:
    section = tables.get(name, {})
    if not isinstance(section, Mapping):
        raise InputError(f"{prefix}{name} = {section!r}: this is a table, [{prefix}{name}]")
    return dict(section)


def _partition(values: dict[str, Any]) -> Rule:
    name = _text(values.pop("name", "iid"), "data.partition.name")
    if name not in PARTITIONS:
        raise InputError(f"data.partition.name = '{name}'{did_you_mean(name, PARTITIONS)}")
    return build(PARTITIONS[name], values, where="data.partition")


def _name(given: Any) -> str:
    if not isinstance(given, str) or not NAME.fullmatch(given):
        raise InputError(
            f"name = {given!r}: a job needs a name that can be a folder's: letters, digits and . _ + -, "
            "beginning with a letter or digit; parts, of 200 characters at most, may be divided by /"
        )
    return given


def _seed(given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise InputError(f"seed = {given!r}: give a whole number, 0 or more")
    return given


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str):
        raise InputError(f"{where} = {given!r}: give a name")
    return given
