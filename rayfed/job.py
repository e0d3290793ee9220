"""A job file as nested frozen dataclasses: what to run, on which data, and where.

The dataclasses mirror the file: `train.lr` in the file is `job.train.lr` here. Every key is checked
before anything is loaded or started. An unknown key is an error, which names the nearest valid key.
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
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from rayfed.base.errors import InputError, did_you_mean, nearest, refuse_secrets, told
from rayfed.base.values import (
    Checked,
    Form,
    Ge,
    Gt,
    PathMark,
    UnknownKey,
    amended,
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
MEMORY_TEXT = (
    "gigabytes of a node's memory that Ray sets aside per actor; 0: none; auto: measured, and a "
    "quarter more"
)
TRACK_TEXT = (
    "tensorboard, wandb, mlflow: where to send the curves, too; each an extra of the package"
)
MEASURE_TEXT = (
    "what to measure: local, train or epochs (accuracy of clients' models), drift (of weights and "
    "features), gradients, confusion (matrices of clients)"
)
# These keys do not change the results of the training.
MEASURE = (
    "measure",
    "measure_every",
    "measure_images",
    "measure_layers",
    "measure_clients",
    "track",
)
# A name may stand for each of these tables.
WITH_NAME = ("method", "model", "data.partition", "data.skew", "train.schedule", "clients.sampling")
# This text stands for a path in a job's lineage.
A_FILE = "a file"
PACKAGE = Path(__file__).parent
# The jobs that come with rayfed. In a wheel they are part of the package, in a clone they lie next
# to it.
EXAMPLES = PACKAGE / "examples" if (PACKAGE / "examples").is_dir() else PACKAGE.parent / "jobs"
# A part of a name has at most 200 characters, as the name of a file has at most 255.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}(/[A-Za-z0-9][A-Za-z0-9._+-]{0,199}){0,9}")


@dataclass(frozen=True)
class RayOptions(Checked):
    """The place where the clients' work is done."""

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
    memory: Annotated[Auto | Annotated[float, Ge(0)], MEMORY_TEXT] = 0.0
    labels: Annotated[dict[str, str], LABELS_TEXT] = field(default_factory=dict)
    deadline: Annotated[Auto | Annotated[float, Gt(0)], DEADLINE_TEXT] = "auto"
    max_retries: Annotated[int, Ge(0), "how often lost work is run again, once it is alone"] = 3
    patience: Annotated[float, Gt(0), "seconds without any actor after which the run ends"] = 180.0
    check_repeat: Annotated[
        bool,
        "for parts and models of your own: train each process's first client twice, and compare",
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
        """Return the address to join; if it is empty, a Ray is started here.

        Inside a Ray job, the environment names the cluster. For Ray, `auto` is the address in the
        environment as well, and `local` is a Ray that is started here.
        """
        address = self.address
        if address in ("", "auto"):
            address = os.environ.get("RAY_ADDRESS") or address
        return "" if address == "local" else address

    @property
    def cluster_named(self) -> str:
        """Return the address to join for a message, with the key or variable that has it."""
        name = "ray.address" if self.cluster == self.address else "RAY_ADDRESS"
        return f"{name} = '{self.cluster}'"

    @property
    def threads(self) -> int:
        """Return the threads that a client computes with, on an actor or in this process."""
        return max(1, int(self.num_cpus))

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory per actor; 0 if none are asked for.

        With "auto" it is 0, until it is measured.
        """
        return 0 if self.memory == "auto" else round(self.memory * 1e9)

    @property
    def gpu_share(self) -> float:
        """Return the GPUs per actor as Ray can always place them: whole GPUs, or 1/k.

        With "auto" it is 1, until it is measured.

        >>> RayOptions(num_gpus=0.3).gpu_share
        0.3333333333333333
        """
        if self.num_gpus == "auto":
            return 1.0
        if self.num_gpus >= 1 or self.num_gpus == 0:
            return self.num_gpus
        return 1 / math.floor(1 / self.num_gpus + 1e-9)


@dataclass(frozen=True)
class Output(Checked):
    """The place where results go: the folder `<path>/<name>`."""

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
    """Call a function of the methods' registry.

    The registry is imported when it is used: it imports torch, which a list of keys does not need.
    """
    from rayfed.methods import registry

    return getattr(registry, function)(*values)


def _read_method(value: Any) -> Any:
    """Return the method that a value of a job names."""
    return _registry("read_method", value)


def _write_method(method: Any) -> Any:
    """Return a method as a value of a job."""
    return _registry("write_method", method)


METHOD = Form(_read_method, _write_method, "fedavg", imports_torch=True)


@dataclass(frozen=True)
class Job(Checked):
    """A complete experiment as data.

    Raises `InputError`, with a line per mistake.

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
    measure: Annotated[
        list[Literal["local", "train", "epochs", "drift", "gradients", "confusion"]], MEASURE_TEXT
    ] = field(default_factory=list)
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
            fitting = re.sub(r"[^\w.+/-]+", "-", self.name, flags=re.ASCII).strip("-./_+")
            meant = f", such as '{fitting}'" if NAME.fullmatch(fitting) else ""
            raise InputError(
                f"name = {self.name!r}: use letters, digits and . _ + -, without spaces{meant}; "
                "begin with a letter or digit; / makes a folder of at most 200 letters"
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
        # This raises an error if a value, for example an option of a model, cannot be recorded.
        self.table()

    def measures(self, round: int) -> Sequence[str]:
        """Return what is measured in a round."""
        return () if round % self.measure_every else self.measure

    def table(self) -> dict[str, Any]:
        """Return the job with every default filled in, as `read_job` reads it.

        Raises `InputError`, with the key, for a value that it cannot record.
        """
        return {key: plain_value(value, key) for key, value in table(self).items()}

    def lineage(self, *, with_paths: bool = False) -> dict[str, Any]:
        """Return everything that the numbers of a round depend on.

        Where the work is done, where results go, and when the run ends are left out. Unless
        `with_paths`, so are the places of files: what they hold is hashed, and compared next to
        this.
        """
        left_out = ("name", "ray", "output", *MEASURE)
        lineage = {key: value for key, value in self.table().items() if key not in left_out}
        for key in ("num_rounds", "patience"):
            del lineage["train"][key]
        # A job from before there were these keys has the same hash.
        if lineage["clients"]["sampling"] == {"name": "uniform"}:
            del lineage["clients"]["sampling"]
        if lineage["data"]["skew"] == {"name": "none"}:
            del lineage["data"]["skew"]
        if lineage["model"].get("weight_standardisation") == 0:
            del lineage["model"]["weight_standardisation"]
        # The domain is only measured.
        del lineage["data"]["domain"]
        lineage["ray.num_cpus (as threads)"] = self.ray.threads
        if not with_paths:
            self._leave_out_paths(lineage)
        # A checkpoint is read back from JSON, so the lineage must be the same as from JSON.
        return json.loads(json.dumps(lineage))

    def _leave_out_paths(self, lineage: dict[str, Any]) -> None:
        """Take the paths out of a lineage, in place. What their files hold is compared by hashes.

        The name of a known source stays. Whether there is a file for the model, the trace or the
        partition stays as well.
        """
        if self.data.source not in SOURCES:
            del lineage["data"]["source"]
        del lineage["data"]["root"]
        del lineage["data"]["test"]
        for dotted in self.places():
            *path, key = dotted.split(".")
            inner: Any = lineage
            for step in path:
                inner = inner.get(step, {})
            if key in inner:
                inner[key] = A_FILE

    def hash(self, *, with_paths: bool = False) -> str:
        """Return the SHA-256 of everything that results depend on, except the content of files.

        Records of before 28 November 2026 have the hash `with_paths`.
        """
        lineage = self.lineage(with_paths=with_paths)
        everything = [lineage, self.train.num_rounds, self.train.patience]
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()

    def places(self) -> dict[str, str]:
        """Return the paths in the job, by their dotted keys.

        The name of a known source, or of a function, is not a path.
        """
        values = flat(self.table())
        names = {*SOURCES, ""}
        if self.data.module:
            names.add(self.data.source)
        paths = {}
        for key in keys(type(self)):
            path = values.get(key.name, "")
            if key.is_path and path not in names:
                paths[key.name] = path
        return paths


def key_meant(name: str) -> str:
    """Return the key that a name without its table means; '' if there is none.

    >>> key_meant("num_rounds"), key_meant("model"), key_meant("alpha"), key_meant("zzz")
    ('train.num_rounds', 'model', 'data.partition.alpha', '')
    """
    known = set()
    for key in keys(Job):
        # A table of its name alone may be given as that name.
        known |= {key.name, key.name.removesuffix(".name")}
    for place in ("", "train.", "data.", "data.partition.", "ray."):
        if place + name in known:
            return place + name
    return ""


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as a table of dotted keys.

    >>> flat({"seed": 0, "train": {"lr": 0.1}})
    {'seed': 0, 'train.lr': 0.1}
    """
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
    words_there: str = "there",
    words_here: str = "here",
) -> list[str]:
    """Say what differs between two tables.

    The last two arguments are the words for there and here.

    >>> differences({"train": {"lr": 0.1}, "seed": 0}, {"train": {"lr": 0.2}, "seed": 0})
    ['train.lr is 0.1 there, 0.2 here']
    >>> differences({}, {"seed": 0}), differences({"seed": 0}, {})
    (['seed is not set there, 0 here'], ['seed is 0 there, not set here'])
    """
    values_there = {key: value for key, value in flat(there).items() if value != ""}
    values_here = {key: value for key, value in flat(here).items() if value != ""}
    lines = []
    for key in sorted({*values_there, *values_here}):
        if _same(values_there.get(key), values_here.get(key)):
            continue
        old = values_there.get(key, "not set")
        new = values_here.get(key, "not set")
        lines.append(f"{key} is {old} {words_there}, {new} {words_here}")
    return lines


def other_lineage(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    words_there: str = "there",
    words_here: str = "here",
) -> list[str]:
    """Say what differs between the lineages of two jobs, as `differences` does.

    Two known sources differ by their names. A known source and a path may hold the same images:
    their hash decides. Methods differ by their names, if these differ.

    >>> other_lineage({"data": {"source": "mnist"}}, {"data": {}})
    []
    >>> fedavg, fedntd = ({"method": name, "data": {}} for name in ("fedavg", "fedntd"))
    >>> other_lineage(fedavg, fedntd)
    ['method is fedavg there, fedntd here']
    """
    lines = differences(_with_line(there, here), _with_line(here, there), words_there, words_here)
    if "source" in there["data"] and "source" in here["data"]:
        return lines
    return [line for line in lines if not line.startswith("data.source is ")]


def _with_line(lineage: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a lineage whose method is a line, as people know it.

    It stays as it is where the line would be the same as that of the other lineage.
    """
    # To compare is faster than to read a method.
    if lineage.get("method") == other.get("method"):
        return lineage
    line = _method_line(lineage)
    if not line or _method_line(other) in ("", line):
        return lineage
    return {**lineage, "method": line}


def _method_line(lineage: Mapping[str, Any]) -> str:
    """Return the method of a lineage as a line; '' if none, or one that cannot be read here."""
    try:
        return _registry("describe", _read_method(lineage["method"]))
    except (KeyError, InputError):
        # A method made in Python may have no name that can be imported.
        return ""


def _same(value: Any, other: Any) -> bool:
    """Say whether two values of tables are the same; nan is the same as nan."""
    if isinstance(value, float) and isinstance(other, float):
        return value == other or (math.isnan(value) and math.isnan(other))
    if isinstance(value, list) and isinstance(other, list):
        if len(value) != len(other):
            return False
        return all(_same(*pair) for pair in zip(value, other, strict=True))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        if value.keys() != other.keys():
            return False
        return all(_same(value[key], other[key]) for key in value)
    return bool(value == other)


def read_job(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Job:
    """Read a job from a TOML file, or from a table, with dotted `overrides` on top.

    An example of these is `{"train.num_rounds": 2}`. Raises `InputError`, which names the key, the
    given value and the valid values.

    >>> read_job({"name": "mine"}, {"train.num_round": 2})
    Traceback (most recent call last):
        ...
    rayfed.base.errors.InputError: train: unknown key 'num_round'; did you mean 'train.num_rounds'?
    (valid: ...)
    """
    return make_job(override(read_toml(source), overrides or {}))


def read_toml(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a job file as they stand, unchecked.

    Raises `InputError` if the file cannot be read.
    """
    if isinstance(source, Mapping):
        return dict(source)
    try:
        # Some editors write a mark at the beginning, which this encoding skips.
        text = _path_of(source).read_bytes().decode("utf-8-sig")
        return tomllib.loads(text)
    except FileNotFoundError:
        _refuse_missing(source)
    except tomllib.TOMLDecodeError as error:
        number = re.search(r"at line (\d+)", str(error))
        line = f": {text.splitlines()[int(number[1]) - 1].strip()[:80]}" if number else ""
        quotes = " (text needs quotes: 'fedntd')" if "Invalid value" in str(error) else ""
        raise InputError(f"job file '{source}' cannot be read: {error}{line}{quotes}") from None
    except UnicodeDecodeError:
        raise InputError(
            f"'{source}' is no job file: that is TOML, in UTF-8; `rayfed init FOLDER` writes one"
        ) from None
    except IsADirectoryError:
        found = sorted(Path(source).glob("*.toml"))
        such = f", such as '{found[0]}'" if found else ""
        raise InputError(f"'{source}' is a folder; give a job file in it{such}") from None
    except (OSError, ValueError, RecursionError) as error:
        # A path with a zero byte raises a ValueError.
        raise InputError(f"job file '{source}' cannot be read: {error}") from None


def _path_of(source: str | Path) -> Path:
    """Return the path of a job file, or of the example of this name if there is no such file.

    An example is `quickstart`. A path, as `quickstart.toml`, is never taken for an example: its
    file may be the user's, in another folder.
    """
    name = str(source)
    example = EXAMPLES / f"{name}.toml"
    is_name = name == Path(name).name and not name.endswith(".toml")
    return example if is_name and not Path(name).exists() and example.is_file() else Path(source)


def _refuse_missing(source: str | Path) -> NoReturn:
    """Raise `InputError` for a job file that does not exist, with what to type instead."""
    name = Path(source).name
    near = sorted(path for path in Path().glob("*/*.toml") if path.name == name and path.is_file())
    if near:
        raise InputError(f"no job file '{source}'; did you mean '{near[0]}'?") from None
    example = Path(name).stem
    if example != str(source) and (EXAMPLES / f"{example}.toml").is_file():
        raise InputError(
            f"no job file '{source}'; '{example}', without a folder and .toml, is the example that "
            "comes with rayfed"
        ) from None
    raise InputError(
        f"no job file '{source}'; 'quickstart' is an example that comes with rayfed, and "
        "`rayfed init FOLDER` writes another to begin with"
    ) from None


def override(tables: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with single values replaced, for example by `{"train.num_rounds": 2}`.

    A value that is a table replaces the complete table. If another method, model or partition is
    named, the options of the earlier one are dropped. For a partition, `num_clients` and `seed`
    stay if the new rule has them as well. Raises `InputError` for a key below a value.

    >>> override({"train": {"lr": 0.1}}, {"train.num_rounds": 2})
    {'train': {'lr': 0.1, 'num_rounds': 2}}
    >>> shards = {"name": "shards", "s": 2, "num_clients": 9}
    >>> override({"data": {"partition": shards}}, {"data.partition.name": "iid"})
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
        *path, key = _short(dotted).split(".")
        outer = result
        for number, step in enumerate(path, start=1):
            if isinstance(outer.get(step), str) and ".".join(path[:number]) in WITH_NAME:
                outer[step] = {"name": outer[step]}
            outer = outer.setdefault(step, {})
            if not isinstance(outer, dict):
                raise InputError(f"'{dotted}' cannot be set: {step} = {told(outer)} is not a table")
        value = overrides[dotted]
        before = outer.get(key)
        if _short(dotted) in WITH_NAME and isinstance(value, str) and isinstance(before, dict):
            shared = shared_keys(value) if key == "partition" else set()
            value = _renamed(before, value, shared)
        outer[key] = value
    for key, value in flat(result).items():
        refuse_secrets(value, key)
    return result


def _short(dotted: str) -> str:
    """Return the key of an override; `model` for `model.name`, which says the same."""
    table = dotted.removesuffix(".name")
    return table if table in WITH_NAME else dotted


def _renamed(table: Mapping[str, Any], name: str, shared: Set[str]) -> dict[str, Any]:
    """Return a table with another name: of the earlier options, only the `shared` ones stay."""
    if str(table.get("name")).lower() == name.lower():
        return {**table, "name": name}
    return {"name": name} | {option: value for option, value in table.items() if option in shared}


def make_job(tables: Mapping[str, Any]) -> Job:
    """Return the job of a job's tables, after checking its values.

    Raises `InputError` for tables that are not those of a job.
    """
    if "grid" in tables:
        raise InputError(
            "this job file is a grid of runs: `rayfed run` runs them, `rayfed.grid.cells.expand` "
            "makes its jobs"
        )
    for key, value in flat(tables).items():
        if isinstance(value, datetime.date | datetime.time):
            # This raises an error: a job has no dates.
            plain_value(value, key)
    if flat(tables).get("data.partition.seed") == "run":
        tables = override(tables, {"data.partition.seed": tables.get("seed", 0)})
    try:
        return build(Job, tables, "")
    except InputError as error:
        raise amended(error, _with_nearest) from None


def _with_nearest(error: InputError) -> InputError:
    """Return the error of a job's table; for an unknown key with the key that it may mean."""
    if not isinstance(error, UnknownKey):
        return error
    where, key, *valid = error.args
    near = nearest(key, valid, 0.75)
    if near and where:
        near = f"{where}.{near}"
    near = near or nearest_key(key, keys(Job))
    # Here the first error says all, for example that the key is one of another partition.
    if not near or where.startswith("method ") or near == f"{where}.{key}":
        return error
    if near == key:
        return InputError(
            f"{where}: unknown key '{key}'; it stands at the top of a job, not in {where}"
        )
    return InputError(f"{where or 'the job'}: unknown key '{key}'{did_you_mean(key, valid, near)}")
