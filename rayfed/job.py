"""A job file as nested frozen dataclasses: what to run, on which data, and where.

The dataclasses mirror the file: `train.lr` in the file is `job.train.lr` here. Every key is checked
before anything is loaded or started; an unknown key is refused with the nearest valid key.
"""

import copy
import datetime
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from rayfed.base.errors import InputError, did_you_mean, nearest, refuse_secrets, told
from rayfed.base.files import read_regular
from rayfed.base.values import (
    Checked,
    Form,
    Ge,
    Gt,
    PathMark,
    UnknownKey,
    build,
    keys,
    nearest_key,
    plain_value,
    table,
)
from rayfed.clients.participation import Participation
from rayfed.clients.settings import Training
from rayfed.data.partition import shared_keys
from rayfed.data.settings import SOURCES, Data
from rayfed.models.settings import MODEL, MODEL_TEXT, Model

Auto = Literal["auto"]
DEADLINE_TEXT = (
    "seconds after which a piece of work counts as hung; auto: ten times the longest so far, at "
    "least 300"
)
LABELS_TEXT = (
    "labels of the nodes to work on, as Ray selects them: 'H100', '!H100', 'in(H100,H200)', "
    "'!in(H100)'"
)
TRACK_TEXT = (
    "tensorboard, wandb, mlflow: where to send the curves, too; each an extra of the package"
)
MEASURE_TEXT = (
    "local, drift: notes in clients.parquet and rounds.parquet; confusion: confusions.parquet"
)
# Change no bits.
MEASURE = (
    "measure",
    "measure_every",
    "measure_images",
    "measure_layers",
    "measure_clients",
    "track",
)
# Tables that a name may stand for.
WITH_NAME = (
    "method",
    "model",
    "data.partition",
    "train.schedule",
)
# Stands for a path in a job's lineage.
A_FILE = "a file"
PACKAGE = Path(__file__).parent
# Jobs that come with rayfed: in a wheel they are part of the package, in a clone they lie beside
# it.
EXAMPLES = PACKAGE / "examples" if (PACKAGE / "examples").is_dir() else PACKAGE.parent / "jobs"
# A file's has 255.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}(/[A-Za-z0-9][A-Za-z0-9._+-]{0,199}){0,9}")


@dataclass(frozen=True)
class RayOptions(Checked):
    """Where the clients' work is done."""

    mode: Annotated[Literal["on", "off"], "off: the same work in this process, without Ray"] = "on"
    actors: Annotated[
        Auto | Annotated[int, Ge(1)], "actors; auto: as many as fit, up to the cohort's size"
    ] = "auto"
    address: Annotated[
        str, "of a running Ray (auto: the Ray on this machine); empty: start a Ray here"
    ] = ""
    num_cpus: Annotated[
        float, Gt(0), "CPUs per actor, with a thread for each; at least one thread"
    ] = 1.0
    num_gpus: Annotated[
        Auto | Annotated[float, Ge(0)], "GPUs per actor, at least; auto: measured"
    ] = "auto"
    labels: Annotated[dict[str, str], LABELS_TEXT] = field(default_factory=dict)
    deadline: Annotated[Auto | Annotated[float, Gt(0)], DEADLINE_TEXT] = "auto"
    max_retries: Annotated[int, Ge(0), "how often a lost piece of work is run again"] = 3
    patience: Annotated[float, Gt(0), "seconds without any actor after which the run ends"] = 180.0
    check_repeat: Annotated[
        bool, "serve a first client twice where parts or models are your own, and compare"
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_secrets(f"ray://{self.address.rpartition('://')[2]}", "ray.address")
        for name, wanted in self.labels.items():
            if " " in wanted:
                raise InputError(
                    f"ray.labels: {name} = '{wanted}': to Ray, a space is part of a label; write "
                    "none"
                )
        if self.num_gpus == "auto":
            return
        if 0 < self.num_gpus < 1e-3:
            raise InputError(
                f"ray.num_gpus = {self.num_gpus}: an actor takes at least a thousandth of a GPU, "
                "or none"
            )
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise InputError(
                f"ray.num_gpus = {self.num_gpus}: more than one GPU per actor must be a whole "
                "number"
            )

    @property
    def cluster(self) -> str:
        """The address to join; empty: a Ray is started here.

        Inside a Ray job, the environment names the cluster.

        To Ray, `auto` is the address in the environment too, and `local` a Ray that is started
        here.
        """
        address = self.address
        if address in ("", "auto"):
            address = os.environ.get("RAY_ADDRESS") or address
        return "" if address == "local" else address

    @property
    def cluster_named(self) -> str:
        """The address to join, for a message: with the key or the variable that gives it."""
        name = "ray.address" if self.cluster == self.address else "RAY_ADDRESS"
        return f"{name} = '{self.cluster}'"

    @property
    def threads(self) -> int:
        """Threads that one client computes with, on an actor or in this process."""
        return max(1, int(self.num_cpus))

    @property
    def gpu_share(self) -> float:
        """GPUs per actor as Ray can always place them: whole GPUs, or 1/k; with "auto" 1, until it
        is measured.
        """
        if self.num_gpus == "auto":
            return 1.0
        return (
            self.num_gpus
            if self.num_gpus >= 1 or self.num_gpus == 0
            else 1 / math.floor(1 / self.num_gpus + 1e-9)
        )


@dataclass(frozen=True)
class Output(Checked):
    """Where results go: the folder `<path>/<name>`."""

    path: Annotated[str, PathMark(), "folder of all runs"] = "runs"
    checkpoints: Annotated[
        str, PathMark(), "folder or URI of all checkpoints; empty: in the run's folder"
    ] = ""
    every: Annotated[
        int, Ge(1), "rounds from one checkpoint to the next; the first is after round 1"
    ] = 10
    every_seconds: Annotated[
        float, Gt(0), "seconds after which a checkpoint is written in any case"
    ] = 60.0


def _registry(function: str, *values: Any) -> Any:
    """A function of the methods' registry, imported when used: it brings torch, which a list of
    keys does not need.
    """
    from rayfed.methods import registry

    return getattr(registry, function)(*values)


METHOD = Form(partial(_registry, "read_method"), partial(_registry, "write_method"), "fedavg")


@dataclass(frozen=True)
class Job(Checked):
    """A whole experiment, as data. Raises `InputError`, with a line per mistake.

    >>> job = read_job({"name": "mine", "train": {"num_rounds": 2}})
    >>> job.train.num_rounds, job.data.source, len(job.hash())
    (2, 'fashion-mnist-mini', 64)
    """

    name: Annotated[str, "name of the run, and of its folder; / may divide it into parts"]
    seed: Annotated[
        int, Ge(0), "seed of the model, of the cohorts, and of every draw at a client"
    ] = 0
    method: Annotated[Any, METHOD, "a method, or a list of parts: `rayfed methods`"] = field(
        default_factory=lambda: METHOD.read(METHOD.default)
    )
    data: Data = field(default_factory=Data)
    model: Annotated[Model, MODEL, MODEL_TEXT] = field(default_factory=Model)
    train: Training = field(default_factory=Training)
    clients: Participation = field(default_factory=Participation)
    ray: RayOptions = field(default_factory=RayOptions)
    output: Output = field(default_factory=Output)
    track: Annotated[list[Literal["tensorboard", "wandb", "mlflow"]], TRACK_TEXT] = field(
        default_factory=list
    )
    measure: Annotated[list[Literal["local", "drift", "confusion"]], MEASURE_TEXT] = field(
        default_factory=list
    )
    measure_every: Annotated[int, Ge(1), "rounds from one measure to the next"] = 1
    measure_images: Annotated[
        int, Ge(0), "test images to measure on, drawn once by the seed; 0: all"
    ] = 2000
    measure_layers: Annotated[list[str], "layers that drift aligns; none: features"] = field(
        default_factory=list
    )
    measure_clients: Annotated[
        list[int | str], "clients to measure, by number or name; none: all of a round"
    ] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not NAME.fullmatch(self.name):
            raise InputError(
                f"name = {self.name!r}: a job needs a name that can be a folder's: letters, digits "
                "and . _ + -, beginning with a letter or digit; / may divide it into parts of 200 "
                "at most"
            )
        _registry("check_method", self.method)
        for key in ("measure", "measure_layers", "measure_clients"):
            values = getattr(self, key)
            if len({*values}) < len(values):
                raise InputError(
                    f"{key} = {values}: give each {key.removeprefix('measure_').rstrip('s')} once"
                )
        if self.measure_layers and "drift" not in self.measure:
            raise InputError(
                f"measure_layers = {self.measure_layers}: add 'drift' to measure, which aligns them"
            )
        # Raises where a value, such as an option of a model, cannot be recorded.
        self.table()

    def measures(self, round: int) -> Sequence[str]:
        """What is measured in a round."""
        return () if round % self.measure_every else self.measure

    def table(self) -> dict[str, Any]:
        """The job with every default filled in, as `read_job` reads it.

        Raises `InputError`, with the key, for a value that it cannot record.
        """
        return {key: plain_value(value, key) for key, value in table(self).items()}

    def lineage(self, *, with_paths: bool = False) -> dict[str, Any]:
        """Everything that the numbers of a round depend on: not where work is done or results go,
        nor when it ends.

        Nor, unless `with_paths`, where files lie: what they hold is hashed, and compared beside
        this.
        """
        kept = {
            key: value
            for key, value in self.table().items()
            if key not in ("name", "ray", "output", *MEASURE)
        }
        for key in ("num_rounds", "patience"):
            del kept["train"][key]
        # It is measured, too.
        del kept["data"]["domain"]
        kept["ray.num_cpus (as threads)"] = self.ray.threads
        if not with_paths:
            self._leave_out_paths(kept)
        # As it is read back from a checkpoint.
        return json.loads(json.dumps(kept))

    def _leave_out_paths(self, kept: dict[str, Any]) -> None:
        """Take the paths out of a lineage, in place. What their files hold is compared by hashes.

        The name of a known source stays. Whether there is a file for the model, the trace or the
        partition stays too.
        """
        if self.data.source not in SOURCES:
            del kept["data"]["source"]
        del kept["data"]["root"]
        del kept["data"]["test"]
        for key in self.places():
            *outer, last = key.split(".")
            inner: Any = kept
            for step in outer:
                inner = inner.get(step, {})
            if last in inner:
                inner[last] = A_FILE

    def hash(self, *, with_paths: bool = False) -> str:
        """SHA-256 of everything that the results depend on, except the content of files.

        Records of before 28 November 2026 have the hash `with_paths`.
        """
        whole = [self.lineage(with_paths=with_paths), self.train.num_rounds, self.train.patience]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    def places(self) -> dict[str, str]:
        """The paths in the job, by their dotted keys.

        The name of a known source, or of a function, is not a path.
        """
        values = flat(self.table())
        paths = {key.name: values.get(key.name, "") for key in keys(type(self)) if key.is_path}
        names = {*SOURCES, "", self.data.source if self.data.module else ""}
        return {key: path for key, path in paths.items() if path not in names}


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as a table of dotted keys."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def differences(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    at_first: str = "there",
    at_second: str = "here",
) -> list[str]:
    """What differs between two tables, in words; the last two arguments are the words for there and
    here.

    >>> differences({"train": {"lr": 0.1}, "seed": 0}, {"train": {"lr": 0.2}, "seed": 0})
    ['train.lr is 0.1 there, 0.2 here']
    >>> differences({}, {"seed": 0}), differences({"seed": 0}, {})
    (['seed is not set there, 0 here'], ['seed is 0 there, not set here'])
    """
    first, second = (
        {key: value for key, value in flat(each).items() if value != ""} for each in (there, here)
    )
    return [
        f"{key} is {first.get(key, 'not set')} {at_first}, {second.get(key, 'not set')} {at_second}"
        for key in sorted({*first, *second})
        if not _same(first.get(key), second.get(key))
    ]


def other_lineage(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    at_first: str = "there",
    at_second: str = "here",
) -> list[str]:
    """What differs between the lineages of two jobs, in words, as `differences` gives it.

    Two known sources differ by their names. A known source and a path may hold the same images:
    their hash decides.

    >>> other_lineage({"data": {"source": "mnist"}}, {"data": {}})
    []
    """
    lines = differences(there, here, at_first, at_second)
    if "source" in there["data"] and "source" in here["data"]:
        return lines
    return [line for line in lines if not line.startswith("data.source is ")]


def _same(first: Any, second: Any) -> bool:
    """Whether two values of tables are the same; a number that is not a number (nan) is the same as
    another.
    """
    if isinstance(first, float) and isinstance(second, float):
        return first == second or (math.isnan(first) and math.isnan(second))
    if isinstance(first, list) and isinstance(second, list):
        same_length = len(first) == len(second)
        return same_length and all(_same(*pair) for pair in zip(first, second, strict=True))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        same_keys = first.keys() == second.keys()
        return same_keys and all(_same(first[key], second[key]) for key in first)
    return bool(first == second)


def read_job(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Job:
    """A job from a TOML file, or from a table, with dotted `overrides` on top:
    `{"train.num_rounds": 2}`.

    Raises `InputError` naming the key, the given value and the valid values.

    >>> read_job({"name": "mine"}, {"train.num_round": 2})
    Traceback (most recent call last):
        ...
    rayfed.base.errors.InputError: train: unknown key 'num_round'; did you mean 'train.num_rounds'?
    (valid: ...)
    """
    return make_job(override(read_toml(source), overrides or {}))


def read_toml(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a job file as they stand, unchecked.

    Raises `InputError` where the file cannot be read.
    """
    if isinstance(source, Mapping):
        return dict(source)
    try:
        # Some editors write a mark in front.
        text = read_regular(_found(source)).decode("utf-8-sig")
        return tomllib.loads(text)
    except FileNotFoundError:
        name = Path(source).name
        near = sorted(
            path for path in Path().glob("*/*.toml") if path.name == name and path.is_file()
        )
        if near:
            raise InputError(f"no job file '{source}'; did you mean '{near[0]}'?") from None
        raise InputError(
            f"no job file '{source}'; 'quickstart' is an example that comes with rayfed, and "
            "`rayfed init FOLDER` writes another to begin with"
        ) from None
    except tomllib.TOMLDecodeError as error:
        number = re.search(r"at line (\d+)", str(error))
        line = f": {text.splitlines()[int(number[1]) - 1].strip()[:80]}" if number else ""
        quotes = " (text needs quotes: 'fedntd')" if "Invalid value" in str(error) else ""
        raise InputError(f"job file '{source}' cannot be read: {error}{line}{quotes}") from None
    except UnicodeDecodeError:
        raise InputError(
            f"'{source}' is no job file: that is TOML, in UTF-8; `rayfed init FOLDER` writes one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        # Of a path with a zero byte.
        raise InputError(f"job file '{source}' cannot be read: {error}") from None


def _found(source: str | Path) -> Path:
    """A job file, or where there is none of this name, the example: quickstart, or
    jobs/quickstart.toml.
    """
    example = EXAMPLES / f"{str(source).removeprefix('jobs/').removesuffix('.toml')}.toml"
    return Path(source) if Path(source).exists() or not example.is_file() else example


def override(tables: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with single values replaced: `{"train.num_rounds": 2}`; a value that is a table
    replaces all of it.

    Naming another method, model or partition drops the options of the one before; of a partition,
    `num_clients` and `seed` stay where the new rule has them too.

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
    result: dict[str, Any] = copy.deepcopy(dict(tables))
    # Names come before options.
    for dotted in sorted(overrides, key=lambda dotted: _short(dotted).count(".")):
        *path, last = _short(dotted).split(".")
        outer = result
        for number, step in enumerate(path, start=1):
            if isinstance(outer.get(step), str) and ".".join(path[:number]) in WITH_NAME:
                outer[step] = {"name": outer[step]}
            outer = outer.setdefault(step, {})
            if not isinstance(outer, dict):
                raise InputError(f"'{dotted}' cannot be set: {step} = {told(outer)} is not a table")
        value, before = overrides[dotted], outer.get(last)
        if _short(dotted) in WITH_NAME and isinstance(value, str) and isinstance(before, dict):
            outer[last] = _renamed(
                before, value, shared_keys(value) if last == "partition" else set()
            )
        else:
            outer[last] = value
    for key, value in flat(result).items():
        refuse_secrets(value, key)
    return result


def _short(dotted: str) -> str:
    """The key of an override; `model` for `model.name`, which says the same."""
    table = dotted.removesuffix(".name")
    return table if table in WITH_NAME else dotted


def _renamed(table: Mapping[str, Any], name: str, shared: Set[str]) -> dict[str, Any]:
    """A table with another name: without the options of the one before, but for `shared` ones."""
    if str(table.get("name")).lower() == name.lower():
        return {**table, "name": name}
    return {"name": name} | {option: value for option, value in table.items() if option in shared}


def make_job(tables: Mapping[str, Any]) -> Job:
    """Checked values from a job's tables."""
    if "grid" in tables:
        raise InputError(
            "this job file is a grid of runs: `rayfed run` runs them, `rayfed.grid.cells.expand` "
            "makes its jobs"
        )
    for key, value in flat(tables).items():
        if isinstance(value, datetime.date | datetime.time):
            # Raises: a job has no dates.
            plain_value(value, key)
    if flat(tables).get("data.partition.seed") == "run":
        tables = override(tables, {"data.partition.seed": tables.get("seed", 0)})
    try:
        return build(Job, tables, "")
    except UnknownKey as error:
        where, key, *valid = error.args
        near = nearest(key, valid, 0.75)
        if near and where:
            near = f"{where}.{near}"
        near = near or nearest_key(key, keys(Job))
        # A key of another partition.
        if not near or where.startswith("method ") or near == f"{where}.{key}":
            raise
        if near == key:
            raise InputError(
                f"{where}: unknown key '{key}'; it stands at the top of a job, not in {where}"
            ) from None
        raise InputError(
            f"{where or 'the job'}: unknown key '{key}'{did_you_mean(key, valid, near)}"
        ) from None
