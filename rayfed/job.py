"""A job file as nested frozen dataclasses: what to run, on which data, and where.

The dataclasses mirror the file: `train.lr` in the file is `job.train.lr` here. Every key is checked before anything is
loaded or started; an unknown key is refused with the nearest valid key.
"""

import copy
import difflib
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from rayfed.base.errors import InputError, did_you_mean, refuse_secrets, told
from rayfed.base.spans import at
from rayfed.base.values import Checked, Form, Ge, Gt, PathMark, UnknownKey, build, keys, nearest, table
from rayfed.clients.participation import Participation
from rayfed.clients.settings import Training
from rayfed.data.partition import shared_keys
from rayfed.data.settings import SOURCES, Data, is_relative
from rayfed.models.settings import MODEL, MODEL_TEXT, Model

Auto = Literal["auto"]
DEADLINE_TEXT = "seconds after which a piece of work counts as hung; auto: ten times the longest so far, at least 300"
TRACK_TEXT = "tensorboard, wandb, mlflow: where to send the curves, too; each an extra of the package"
MEASURE_TEXT = "local, drift: notes in clients.parquet and rounds.parquet; confusion: confusions.parquet"
MEASURE = ("measure", "measure_every", "measure_images", "measure_layers", "measure_clients", "track")  # change no bits
NAMES = {"threads": "ray.num_cpus (as threads)"}  # of what a lineage calls otherwise than the job file
WITH_NAME = ("method", "model", "data.partition", "train.schedule")  # tables that a name may stand for
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}(/[A-Za-z0-9][A-Za-z0-9._+-]{0,199}){0,9}")  # a file's has 255


@dataclass(frozen=True)
class RayOptions(Checked):
    """Where the clients' work is done."""

    mode: Annotated[Literal["on", "off"], "off: the same work in this process, without Ray"] = "on"
    actors: Annotated[Auto | Annotated[int, Ge(1)], "actors; auto: as many as fit, up to the cohort's size"] = "auto"
    address: Annotated[str, "of a running Ray (auto: the Ray on this machine); empty: start a Ray here"] = ""
    num_cpus: Annotated[float, Gt(0), "CPUs per actor, with a thread for each; at least one thread"] = 1.0
    num_gpus: Annotated[Auto | Annotated[float, Ge(0)], "GPUs per actor, rounded up to 1/k; auto: measured"] = 0.0
    data: Annotated[Literal["store", "storage"], "store: the driver sends it; storage: each node reads it"] = "store"
    deadline: Annotated[Auto | Annotated[float, Gt(0)], DEADLINE_TEXT] = "auto"
    max_retries: Annotated[int, Ge(0), "how often a lost piece of work is run again"] = 3
    patience: Annotated[float, Gt(0), "seconds without any actor after which the run ends"] = 180.0
    check_repeat: Annotated[bool, "serve a first client twice where parts or models are your own, and compare"] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_secrets(f"ray://{self.address.rpartition('://')[2]}", "ray.address")
        if self.num_gpus == "auto":
            return
        if 0 < self.num_gpus < 1e-3:
            raise InputError(f"ray.num_gpus = {self.num_gpus}: an actor takes at least a thousandth of a GPU, or none")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise InputError(f"ray.num_gpus = {self.num_gpus}: more than one GPU per actor must be a whole number")

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
        """GPUs per actor as Ray can always place them: whole GPUs, or 1/k; with "auto" 1, until it is measured."""
        if self.num_gpus == "auto":
            return 1.0
        return self.num_gpus if self.num_gpus >= 1 or self.num_gpus == 0 else 1 / math.floor(1 / self.num_gpus + 1e-9)


@dataclass(frozen=True)
class Output(Checked):
    """Where results go: the folder `<path>/<name>`."""

    path: Annotated[str, PathMark(), "folder of all runs"] = "runs"
    checkpoints: Annotated[str, PathMark(), "folder or URI of all checkpoints; empty: in the run's folder"] = ""
    every: Annotated[int, Ge(1), "rounds from one checkpoint to the next; the first is after round 1"] = 10
    every_seconds: Annotated[float, Gt(0), "seconds after which a checkpoint is written in any case"] = 60.0


def _registry(function: str, *values: Any) -> Any:
    """A function of the methods' registry, imported when used: it brings torch, which a list of keys does not need."""
    from rayfed.methods import registry

    return getattr(registry, function)(*values)


METHOD = Form(partial(_registry, "read_method"), partial(_registry, "write_method"), "fedavg")


@dataclass(frozen=True)
class Job(Checked):
    """A whole experiment, as data."""

    name: Annotated[str, "name of the run, and of its folder; / may divide it into parts"]
    seed: Annotated[int, Ge(0), "seed of the model, of the cohorts, and of every draw at a client"] = 0
    method: Annotated[Any, METHOD, "a method, or a list of parts: `rayfed methods`"] = field(
        default_factory=METHOD.made
    )
    data: Data = field(default_factory=Data)
    model: Annotated[Model, MODEL, MODEL_TEXT] = field(default_factory=Model)
    train: Training = field(default_factory=Training)
    clients: Participation = field(default_factory=Participation)
    ray: RayOptions = field(default_factory=RayOptions)
    output: Output = field(default_factory=Output)
    track: Annotated[list[Literal["tensorboard", "wandb", "mlflow"]], TRACK_TEXT] = field(default_factory=list)
    measure: Annotated[list[Literal["local", "drift", "confusion"]], MEASURE_TEXT] = field(default_factory=list)
    measure_every: Annotated[int, Ge(1), "rounds from one measure to the next"] = 1
    measure_images: Annotated[int, Ge(0), "test images to measure on, drawn once by the seed; 0: all"] = 2000
    measure_layers: Annotated[list[str], "layers that drift aligns; none: features"] = field(default_factory=list)
    measure_clients: Annotated[list[int], "clients to measure; none: all of a round"] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not NAME.fullmatch(self.name):
            form = "letters, digits and . _ + -, beginning with a letter or digit; / may divide it into parts"
            raise InputError(f"name = {self.name!r}: a job needs a name that can be a folder's: {form} of 200 at most")
        _registry("check_method", self.method, self.train.optimizer)
        for key in ("measure", "measure_layers", "measure_clients"):
            if len({*(given := getattr(self, key))}) < len(given):
                raise InputError(f"{key} = {given}: give each {key.removeprefix('measure_').rstrip('s')} once")
        if self.measure_layers and "drift" not in self.measure:
            raise InputError(f"measure_layers = {self.measure_layers}: add 'drift' to measure, which aligns them")
        for key, path in self.places().items() if self.ray.data == "storage" else ():
            if not key.startswith("output.") and is_relative(path):
                text = "with ray.data = 'storage' every node reads it, so give an absolute path"
                raise InputError(f"{key} = '{path}': {text}")

    def measures(self, round: int) -> Sequence[str]:
        """What is measured in a round."""
        return () if round % self.measure_every else self.measure

    def table(self) -> dict[str, Any]:
        """The job with every default filled in, as `read_job` reads it."""
        return table(self)

    def lineage(self) -> dict[str, Any]:
        """Everything that the numbers of a round depend on: not where work is done or results go, nor when it ends."""
        kept = {key: value for key, value in self.table().items() if key not in ("name", "ray", "output", *MEASURE)}
        for key in ("num_rounds", "patience"):
            del kept["train"][key]
        del kept["data"]["domain"]  # it is measured, too
        return json.loads(json.dumps({**kept, "threads": self.ray.threads}))  # as it is read back from a checkpoint

    def hash(self) -> str:
        """SHA-256 of everything that the results depend on."""
        ends = [self.train.num_rounds, *([self.train.patience] if self.train.patience else [])]
        return hashlib.sha256(json.dumps([self.lineage(), *ends], sort_keys=True).encode()).hexdigest()

    def places(self) -> dict[str, str]:
        """The paths in the job, by their dotted keys. The name of a known source is not a path."""
        named = flat(self.table())
        found = {key.name: named.get(key.name, "") for key in keys(type(self)) if key.is_path}
        return {key: path for key, path in found.items() if path and path not in SOURCES}


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as a table of dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def differences(there: Mapping[str, Any], here: Mapping[str, Any], *places: str) -> list[str]:
    """What differs between two tables, in words; `places` are the words for there and here.

    >>> differences({"train": {"lr": 0.1}, "seed": 0}, {"train": {"lr": 0.2}, "seed": 0})
    ['train.lr is 0.1 there, 0.2 here']
    """
    before, now = ({key: value for key, value in flat(each).items() if value != ""} for each in (there, here))
    at, at_now = places or ("there", "here")
    return [
        f"{NAMES.get(key, key)} is {before.get(key, 'not set')} {at}, {now.get(key, 'not set')} {at_now}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


def read_job(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Job:
    """A job from a TOML file, or from a table, with dotted `overrides` on top: `{"train.num_rounds": 2}`.

    Raises `InputError` naming the key, the given value and the valid values.
    """
    return make_job(override(read_toml(source), overrides or {}))


def read_toml(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a job file as they stand, unchecked."""
    if isinstance(source, Mapping):
        return dict(source)
    try:
        real = Path(source).resolve()  # of a named pipe; the shell's <(...) has no such path
        if real.is_fifo() or real.is_char_device():  # to read it would wait for a writer, or never end
            raise OSError(f"it is a {'named pipe' if real.is_fifo() else 'device'}; give a file")
        return tomllib.loads(Path(source).read_text(encoding="utf-8-sig"))  # some editors write a mark in front
    except FileNotFoundError:
        raise InputError(f"no job file '{source}'; jobs/quickstart.toml is an example") from None
    except (OSError, ValueError, RecursionError) as error:  # of TOML, of UTF-8, of a path with a zero byte
        raise InputError(f"job file '{source}' cannot be read: {error}") from None


def override(tables: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with single values replaced: `{"train.num_rounds": 2}`; a value that is a table replaces all of it.

    Naming another method, model or partition drops the options of the one before; of a partition, `num_clients` and
    `seed` stay where the new rule has them too.

    >>> override({"train": {"lr": 0.1}}, {"train.num_rounds": 2})
    {'train': {'lr': 0.1, 'num_rounds': 2}}
    >>> override({"data": {"partition": {"name": "shards", "s": 2, "num_clients": 9}}}, {"data.partition.name": "iid"})
    {'data': {'partition': {'name': 'iid', 'num_clients': 9}}}
    >>> override({"model": {"name": "cnn", "width": 3}}, {"model": "resnet8"})
    {'model': {'name': 'resnet8'}}

    Options come after names; of `model` and `model.name`, the later one in `overrides` counts.

    >>> override({}, {"model.width": 3, "model.name": "cnn", "model": "lenet"})
    {'model': {'name': 'lenet', 'width': 3}}
    """
    try:
        result: dict[str, Any] = copy.deepcopy(dict(tables))
    except RecursionError:  # a dotted key in a file may have any number of steps
        raise InputError("the job's tables are nested too deeply") from None
    for dotted in sorted(overrides, key=_rank):  # names drop options
        *path, last = dotted.split(".")
        value, inner = overrides[dotted], result
        for number, step in enumerate(path, start=1):
            if isinstance(inner.get(step), str) and ".".join(path[:number]) in WITH_NAME:
                inner[step] = {"name": inner[step]}  # the short form of such a table
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                raise InputError(f"'{dotted}' cannot be set: {step} = {told(inner)} is not a table")
        place = dotted.removesuffix(".name")
        known = inner if place != dotted else inner.get(last)
        if isinstance(value, str) and place in WITH_NAME and isinstance(known, dict):
            if str(known.get("name")).lower() != value.lower():
                kept = shared_keys(value) if place == "data.partition" else set()
                for option in known.keys() - kept - {"name"}:
                    del known[option]
            known["name"] = value
        else:
            inner[last] = value
    for key, value in flat(result).items():
        refuse_secrets(value, key)
    return result


def _rank(dotted: str) -> tuple[int, bool]:
    """Of an override: outer tables come first, and names before what stands beside them."""
    place = dotted.removesuffix(".name")
    short = place != dotted and place in WITH_NAME  # `model.name = "cnn"` is `model = "cnn"`
    return (place if short else dotted).count("."), not dotted.endswith(".name") and dotted not in WITH_NAME


def make_job(tables: Mapping[str, Any]) -> Job:
    """Checked values from a job's tables."""
    if "grid" in tables:
        raise InputError(
            "this job file is a grid of runs: `rayfed run` runs them, `rayfed.grid.cells.expand` makes its jobs"
        )
    partition = data.get("partition") if isinstance(data := tables.get("data"), Mapping) else None
    if isinstance(partition, Mapping) and partition.get("seed") == "run":
        tables = override(tables, {"data.partition.seed": tables.get("seed", 0)})
    try:
        with at("the reading of the job"):
            return build(Job, tables, "")
    except UnknownKey as error:
        where, key, *valid = error.args
        here = [
            f"{where}.{name}" if where else name for name in difflib.get_close_matches(key, valid, n=1, cutoff=0.75)
        ]
        near = here[0] if here else nearest(key, keys(Job))
        if not near or where.startswith("method ") or near == f"{where}.{key}":  # a key of another partition
            raise
        raise InputError(f"{where or 'the job'}: unknown key '{key}'{did_you_mean(key, valid, near)}") from None
