"""Job files: how they are read, overridden and written."""

import tomllib
from dataclasses import dataclass, replace
from datetime import date, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

import rayfed
from rayfed import Job
from rayfed.base.errors import InputError
from rayfed.base.values import build, keys
from rayfed.cli.options import read_override
from rayfed.clients.settings import Training
from rayfed.data.partition import PARTITIONS
from rayfed.grid.cells import Grid
from rayfed.job import (
    Model,
    Output,
    RayOptions,
    differences,
    other_lineage,
    override,
    read_job,
    read_toml,
)
from rayfed.methods import Part, Proximal, compose, fedavg, fedlmd_tf, fedntd
from rayfed.models.registry import MODELS as BUILDERS
from rayfed.models.settings import MODELS
from rayfed.rounds.setup import open_data

QUICKSTART = Path(__file__).resolve().parents[1] / "jobs" / "quickstart.toml"


def again(job: Job) -> Job:
    """The job, after it was written as TOML and read."""
    return read_job(tomllib.loads(tomli_w.dumps(job.table())))


def test_the_quickstart_file_is_read():
    job = read_job(QUICKSTART)
    assert (job.name, job.seed, job.model) == ("quickstart", 0, Model("cnn"))
    assert job.method == fedntd()
    assert job.data.partition == PARTITIONS["dirichlet"](alpha=0.3, num_clients=20, seed=0)
    assert job.train == Training(
        12, 8, local_epochs=1, batch_size=50, lr=0.03, lr_decay=0.95, momentum=0.9
    )
    assert (job.ray, job.output) == (RayOptions(), Output("runs"))


def test_a_job_needs_only_a_name():
    job = read_job({"name": "n"})
    assert job.method == fedavg()
    assert again(job) == job


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_partition_is_read_back_as_it_was_written(name):
    keys = {"file": {"path": "who.json"}, "shares": {"shares": [[0.5, 0.5]]}}
    needed = keys.get(name, {})
    job = read_job({"name": "n", "data": {"partition": {"name": name, **needed}}})
    assert isinstance(job.data.partition, PARTITIONS[name])
    assert again(job) == job
    if not needed:
        # A string stands for a table.
        assert job == read_job({"name": "n", "data": {"partition": name}})


def test_lists_model_options_and_a_value_of_none_are_read_back():
    job = read_job(
        {
            "name": "n",
            "data": {"shape": [3, 8, 8]},
            "train": {"local_steps": 7},
            "model": {"width": 3},
        }
    )
    assert job.data.shape == [3, 8, 8]
    assert job.model == Model("cnn", {"width": 3})
    assert again(job) == job
    assert read_job({"name": "n", "model": "lenet"}).model == Model("lenet")
    assert "local_steps" not in read_job({"name": "n"}).table()["train"]


def test_the_hash_covers_every_key_that_changes_the_results():
    job = read_job(QUICKSTART)
    of_ray = {"ray.mode": "off"}, {"ray.actors": 3}, {"ray.memory": "auto"}
    for same in ({"name": "other"}, {"output.path": "x"}, *of_ray):
        assert read_job(QUICKSTART, same).hash() == job.hash(), same
    other = {
        "train.precision": "bf16",
        # Forgetting depends on it.
        "train.eval_every": 2,
        "seed": 1,
        "train.lr": 0.1,
        "data.partition.seed": 1,
        "method": "fedavg",
        "ray.num_cpus": 2,
        "train.num_rounds": 3,
        "train.patience": 2,
        "train.clients_per_round": 2,
        "train.local_epochs": 2,
        "train.local_steps": 7,
        "train.clip": 0.5,
        # It decides the order of additions.
        "train.task_images": 7,
        "model.name": "lenet",
        "data.augment.flip": True,
        "data.auxiliary_per_class": 1,
        "data.test_seed": 1,
        "clients.dropout": 0.1,
    }
    for key, value in other.items():
        assert read_job(QUICKSTART, {key: value}).hash() != job.hash(), key


def test_the_end_of_a_run_and_what_is_measured_are_not_of_its_lineage():
    job = read_job(QUICKSTART)
    same = {
        "train.num_rounds": 3,
        "train.patience": 2,
        "data.domain": "label",
        "measure": ["local"],
        "measure_every": 2,
        "measure_images": 7,
        "measure_clients": [1],
        "track": ["tensorboard"],
        "output.every": 3,
    }
    for key, value in same.items():
        assert read_job(QUICKSTART, {key: value}).lineage() == job.lineage(), key
    for key, value in {"train.eval_every": 2, "train.lr": 0.1, "seed": 1}.items():
        assert read_job(QUICKSTART, {key: value}).lineage() != job.lineage(), key


def test_paths_are_no_part_of_a_job_and_names_of_known_sources_are():
    job = read_job(QUICKSTART, {"data.source": "a/b", "clients.trace": "x.parquet"})
    moved = {"data.source": "~/c", "data.test": "t", "data.root": "r", "clients.trace": "y.parquet"}
    other = read_job(QUICKSTART, {**moved})
    assert (other.lineage(), other.hash()) == (job.lineage(), job.hash())
    assert other.hash(with_paths=True) != job.hash(with_paths=True)
    without = read_job(QUICKSTART, {**moved, "clients.trace": ""})
    assert other_lineage(other.lineage(), without.lineage()) == [
        "clients.trace is a file there, not set here"
    ]
    known = [read_job(QUICKSTART, {"data.source": name}).lineage() for name in ("mnist", "cifar10")]
    assert other_lineage(*known) == ["data.source is mnist there, cifar10 here"]
    copied = read_job(QUICKSTART, {"data.source": "folder/mnist"}).lineage()
    assert other_lineage(known[0], copied) == [], "the hash of the images decides"


def test_overrides_replace_single_values_in_a_copy():
    tables = tomllib.loads(QUICKSTART.read_text())
    before = tomli_w.dumps(tables)
    changed = override(tables, {"train.lr": 1.0, "new.deep.key": 2, "data.augment": {"flip": True}})
    assert changed["train"] == {**tables["train"], "lr": 1.0}
    assert changed["new"] == {"deep": {"key": 2}}
    assert changed["data"]["augment"] == {"flip": True}
    assert tomli_w.dumps(tables) == before


def test_another_partition_drops_the_options_of_the_one_before_in_any_order_of_overrides():
    for order in (1, -1):
        changes = dict([("data.partition.name", "shards"), ("data.partition.s", 3)][::order])
        assert read_job(QUICKSTART, changes).data.partition == PARTITIONS["shards"](
            s=3, num_clients=20, seed=0
        )
        changes = dict([("data.partition", "shards"), ("data.partition.num_clients", 9)][::order])
        assert read_job(QUICKSTART, changes).data.partition == PARTITIONS["shards"](num_clients=9)
    assert read_job(QUICKSTART, {"data.partition.name": "dirichlet"}) == read_job(QUICKSTART)


def test_of_a_name_and_its_short_form_the_later_override_counts_and_options_come_after_both():
    names = [("model", "lenet"), ("model.name", "resnet8")]
    for first, last in (names, names[::-1]):
        job = read_job(QUICKSTART, dict([("model.freeze", ["head.bias"]), first, last]))
        assert (
            job.model
            == read_job(QUICKSTART, {"model": last[1], "model.freeze": ["head.bias"]}).model
        )


def test_a_name_stands_for_a_table_in_any_spelling_and_keeps_what_the_new_table_has_too():
    names = {
        "data.partition": "IID",
        "model": "ResNet8",
        "method": "FedLMD-Tf",
        "data.source": "CIFAR10",
    }
    job = read_job(QUICKSTART, names)
    assert job == read_job(
        QUICKSTART, {f"{key}.name": name for key, name in list(names.items())[:2]} | names
    )
    assert job.data.partition == PARTITIONS["iid"](num_clients=20, seed=0)
    assert (job.model, job.method, job.data.source) == (Model("resnet8"), fedlmd_tf(), "cifar10")
    kept = {"data.partition.seed": 7, "data.partition.name": "Dirichlet"}
    assert read_job(QUICKSTART, kept).data.partition == PARTITIONS["dirichlet"](
        alpha=0.3, num_clients=20, seed=7
    )
    for key in ("data.partition", "data.partition.name"):
        assert read_job(QUICKSTART, {key: "natural"}).data.partition == PARTITIONS["natural"]()
    assert tuple(BUILDERS) == MODELS


def test_a_folder_named_like_a_source_in_other_spelling_is_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("MNIST").mkdir()
    assert read_job({"name": "n"}, {"data.source": "MNIST"}).data.source == "MNIST"
    assert read_job({"name": "n"}, {"data.source": "Emnist"}).data.source == "emnist"


def test_a_job_file_in_another_folder_is_named_and_a_file_that_is_none_is_told(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("jobs/mine.toml").write_text('name = "mine"')
    with pytest.raises(
        InputError, match=r"^no job file 'mine.toml'; did you mean 'jobs/mine.toml'\?$"
    ):
        read_toml("mine.toml")
    with pytest.raises(InputError, match=r"^no job file 'yours.toml'; 'quickstart' is an example"):
        read_toml("yours.toml")
    assert read_toml("quickstart")["name"] == "quickstart", "the example in the package"
    for path in ("quickstart.toml", "jobs/quickstart.toml", "./quickstart"):
        with pytest.raises(
            InputError, match=rf"^no job file '{path}'; 'quickstart', without a folder and .toml,"
        ):
            read_toml(path)
    Path("quickstart").write_text('name = "mine"')
    assert read_toml("quickstart") == {"name": "mine"}, "a file of the user comes first"
    Path("test.parquet").write_bytes(b"PAR1\xbc")
    with pytest.raises(InputError, match=r"^'test.parquet' is no job file: that is TOML, in UTF-8"):
        read_toml("test.parquet")


def test_a_byte_order_mark_in_front_of_a_job_is_ignored(tmp_path):
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf" + QUICKSTART.read_bytes())
    assert read_job(tmp_path / "job.toml") == read_job(QUICKSTART)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("k=1", 1),
        ("k=1e-3", 1e-3),
        ("k=true", True),
        ("k=word", "word"),
        ('k="1"', "1"),
        ("k=[1, 2]", [1, 2]),
        ('k={name="fedntd", beta=0.5}', {"name": "fedntd", "beta": 0.5}),
        ("k=a=b", "a=b"),
        ("k=", ""),
        ("k=/some/path with spaces", "/some/path with spaces"),
    ],
)
def test_an_override_is_read_as_toml_or_otherwise_as_text(text, value):
    assert read_override(text) == ("k", value)


def test_every_key_has_a_sentence():
    assert [key.name for key in (*keys(Job), *keys(Grid, "grid")) if not key.sentence] == []


def test_a_method_with_and_one_without_an_auxiliary_set_share_a_dealing():
    """They differ by the images withdrawn; with `data.auxiliary_per_class`, as in the grids, not
    even by these.
    """
    one, other = (
        open_data(read_job(QUICKSTART, {"method": method})) for method in ("fedavg", "fedssd")
    )
    assert one.dealt.hash() == other.dealt.hash()
    for i in range(20):
        assert np.array_equal(other.client(i), np.setdiff1d(one.client(i), other.auxiliary))
    same = open_data(read_job(QUICKSTART, {"method": "fedavg", "data.auxiliary_per_class": 64}))
    assert same.partition.hash() == other.partition.hash()
    assert len(same.auxiliary) == len(other.auxiliary) == 640


@pytest.mark.parametrize(
    "method", [lambda round: fedavg(), (Proximal(),), Proximal(), None, "fedavg"]
)
def test_a_method_that_compose_has_not_made_is_refused(method):
    with pytest.raises(InputError, match=r"method = .*: not a method; make one with compose"):
        Job("x", method=method)


def test_a_setting_that_is_given_as_an_argument_is_refused_with_where_settings_go():
    says = r"^run.. got .* argument 'num_rounds'; .* second argument: {'train\.num_rounds': 3}$"
    with pytest.raises(TypeError, match=says):
        rayfed.run(QUICKSTART, num_rounds=3)
    with pytest.raises(TypeError, match=r"^resume.. got .* argument 'lr'; .*{'train\.lr': 0\.1}$"):
        rayfed.resume("runs/x", lr=0.1)


def test_a_name_in_place_of_a_method_is_refused_with_where_names_go():
    says = r"""'fedavg': not a .* its name in the overrides: run\(JOB, {"method": "fedavg"}\)$"""
    with pytest.raises(InputError, match=says):
        rayfed.run(QUICKSTART, method="fedavg")


def test_the_method_of_a_job_can_be_overridden_and_is_given_once(tmp_path):
    """A job keeps a method made in Python, but for one that the overrides name."""
    few = {
        "model.name": "lenet",
        "train.num_rounds": 1,
        "train.clients_per_round": 1,
        "train.local_steps": 1,
    }
    few |= {"ray.mode": "off", "output.path": str(tmp_path)}
    job = replace(read_job("jobs/quickstart.toml", few), method=fedntd(beta=0.5))

    def played(name, **given):
        rayfed.run(job, {"name": name, **given})
        return read_job(tmp_path / name / "job.toml").method

    assert played("a") == fedntd(beta=0.5)
    assert played("b", method="fedavg") == fedavg()
    assert played("c", **{"method": "fedntd", "method.beta": 0.25}) == fedntd(beta=0.25)
    with pytest.raises(
        InputError, match="the method is given twice, as `method` and as 'method' in `overrides`"
    ):
        rayfed.run(job, {"name": "d", "method": "fedavg"}, method=fedntd())


class Kind(Enum):
    HARD = "hard"
    SOFT = "soft"


@dataclass(frozen=True)
class Holds(Part):
    """A part of the user's own with values of many types."""

    anything: Any = 1
    number: float = 1.0
    count: int = 1
    file: Path = Path("a")
    kind: Kind = Kind.HARD
    scales: tuple[float, ...] = (1.0,)
    perhaps: float | None = None

    def loss(self, batch, local):
        return None


def with_part(part):
    return replace(read_job(QUICKSTART), method=compose(part))


@pytest.mark.parametrize(
    ("field", "value", "held"),
    [
        ("anything", np.float32(0.5), 0.5),
        ("anything", np.int64(3), 3),
        ("anything", np.bool_(True), True),
        ("anything", {"a": [1, "b"]}, {"a": [1, "b"]}),
        ("anything", float("inf"), float("inf")),
        ("number", np.float32(0.5), 0.5),
        ("count", np.int32(4), 4),
        ("file", Path("/b/c"), Path("/b/c")),
        ("kind", Kind.SOFT, Kind.SOFT),
        ("scales", (0.5, 2.0), (0.5, 2.0)),
        ("perhaps", None, None),
    ],
)
def test_a_parts_value_is_the_same_after_the_job_was_written_and_read(field, value, held):
    job = with_part(Holds(**{field: value}))
    (part,) = (part for part in again(job).method if isinstance(part, Holds))
    assert getattr(part, field) == held and type(getattr(part, field)) is type(held)
    assert again(job).hash() == job.hash()


@pytest.mark.parametrize(
    "value",
    [
        *(abs, lambda x: x, torch.ones(2), np.ones(2), Path("x"), Kind.SOFT, {1}, 1j, b"x", None),
        *(date(2026, 1, 1), timedelta(1), {1: 2}, [torch.float32], int, replace),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_a_job_cannot_record_is_refused_with_part_and_field(value):
    with pytest.raises(InputError, match=r"^Holds\.anything"):
        with_part(Holds(value))
    with pytest.raises(InputError, match=r"^model\.(o|n|o\.0) = |^model\.o: the key 1"):
        read_job(QUICKSTART, {"model": {"name": "mine:net", "o": value}})


def test_a_number_that_is_no_number_does_not_make_a_job_another():
    jobs = [
        read_job(
            QUICKSTART, {"model": {"name": "mine:net", "o": [float("nan")], "p": float("nan")}}
        )
        for _ in range(2)
    ]
    assert differences(jobs[0].lineage(), again(jobs[1]).lineage()) == []
    assert differences({"o": float("nan")}, {"o": 1.0}) == ["o is nan there, 1.0 here"]


def test_all_keys_that_are_missing_are_named():
    def maker(*, depth: int, width: int) -> None:
        pass

    with pytest.raises(InputError) as refused:
        build(maker, {}, "model")
    assert str(refused.value) == "model.depth is missing\nmodel.width is missing"


def test_mistakes_of_all_tables_are_told_in_one_message():
    wrong = {
        "name": "mine",
        "zzz": 1,
        "data": {"sorce": "a"},
        "train": {"num_round": 3, "lr": -1},
        "ray": {"seed": 1},
    }
    with pytest.raises(InputError) as refused:
        read_job(wrong)
    told = [line.partition(" (valid")[0] for line in str(refused.value).splitlines()]
    assert told == [
        "the job: unknown key 'zzz'",
        "data: unknown key 'sorce'; did you mean 'data.source'?",
        "train: unknown key 'num_round'; did you mean 'train.num_rounds'?",
        "train.lr = -1: give more than 0",
        "ray: unknown key 'seed'; it stands at the top of a job, not in ray",
    ]


def test_a_mistake_of_the_method_is_told_once_the_tables_are_right():
    """To read a method takes seconds, and mistakes of the tables are known at once."""
    method = {"name": "fedntd", "toa": 3}
    with pytest.raises(InputError) as refused:
        read_job({"name": "mine", "method": method, "train": {"num_round": 3}})
    assert str(refused.value).startswith("train: unknown key 'num_round'")
    with pytest.raises(InputError) as refused:
        read_job({"name": "mine", "method": method})
    assert str(refused.value).startswith("method fedntd: unknown key 'toa'")


def test_mistakes_of_a_table_of_a_table_are_told_with_those_of_others():
    wrong = {"name": "mine", "data": {"augment": {"flips": 1}, "test_seed": -1}, "seed": -1}
    with pytest.raises(InputError) as refused:
        read_job(wrong)
    assert len(str(refused.value).splitlines()) == 3
