"""Job files: what is read, how it is overridden, and that it is written back as it was."""

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import tomli_w

from rayfed import Job, compose, switch
from rayfed.data.partition import PARTITIONS
from rayfed.experiment import open_data
from rayfed.job import Output, RayOptions, make_job, override, read_job, read_override
from rayfed.local import Training
from rayfed.methods import PARTS, RECIPES
from rayfed.methods.recipes import fedavg, fedlmd, fedlmd_tf, fedntd
from rayfed.values import InputError

QUICKSTART = Path(__file__).resolve().parents[1] / "jobs" / "quickstart.toml"


def again(job: Job) -> Job:
    """A job, written as TOML and read."""
    return read_job(tomllib.loads(tomli_w.dumps(job.table())))


def test_the_quickstart_is_what_it_says():
    job = read_job(QUICKSTART)
    assert (job.name, job.seed, job.model) == ("quickstart", 0, "cnn")
    assert job.method == fedntd()
    assert job.partition == PARTITIONS["dirichlet"](alpha=0.3, num_clients=20, seed=0)
    assert job.training == Training(12, 8, local_epochs=1, batch_size=50, lr=0.03, lr_decay=0.95, momentum=0.9)
    assert (job.ray, job.output) == (RayOptions(), Output("runs"))


def test_a_name_is_all_that_a_job_needs():
    job = read_job({"name": "n"})
    assert job.method == fedavg()
    assert again(job) == job


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_read_back_as_it_was_written(name):
    job = read_job({"name": "n", "method": name})
    assert job.method == RECIPES[name]()
    assert again(job) == job
    assert again(job).hash() == job.hash()


def test_a_switch_is_read_back_as_it_was_written():
    later = [
        {"until": 50, "method": "fedlmd_tf"},
        {"until": 70, "method": ["fedlmd", {"name": "proximal", "mu": 0.1}]},
        {"method": {"name": "fedlmd", "beta": 2.0}},
    ]
    job = read_job({"name": "n", "method": later})
    middle = compose(fedlmd(), PARTS["proximal"](mu=0.1))
    assert job.method == switch(fedlmd_tf(), switch(middle, fedlmd(beta=2.0), at=71), at=51)
    assert again(job) == job


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_partition_is_read_back_as_it_was_written(name):
    job = read_job({"name": "n", "data": {"partition": {"name": name}}})
    assert isinstance(job.partition, PARTITIONS[name])
    assert again(job) == job


def test_lists_and_values_that_are_not_there_are_read_back():
    job = read_job({"name": "n", "data": {"shape": [3, 8, 8]}, "train": {"local_steps": 7}, "model": {"width": 3}})
    assert job.source.shape == (3, 8, 8)
    assert job.model_options == {"width": 3}
    assert again(job) == job
    assert "local_steps" not in read_job({"name": "n"}).table()["train"]


def test_the_hash_is_of_what_the_numbers_depend_on():
    job = read_job(QUICKSTART)
    for same in ({"name": "other"}, {"output.path": "x"}, {"ray.mode": "off"}, {"ray.actors": 3}):
        assert read_job(QUICKSTART, same).hash() == job.hash(), same
    other = {"seed": 1, "train.lr": 0.1, "data.partition.seed": 1, "method": "fedavg", "ray.num_cpus": 2}
    for key, value in other.items():
        assert read_job(QUICKSTART, {key: value}).hash() != job.hash(), key


def test_overrides_replace_single_values_and_leave_what_they_are_given_alone():
    tables = tomllib.loads(QUICKSTART.read_text())
    before = tomli_w.dumps(tables)
    changed = override(tables, {"train.lr": 1.0, "new.deep.key": 2, "data.augment": {"flip": True}})
    assert changed["train"] == {**tables["train"], "lr": 1.0}
    assert changed["new"] == {"deep": {"key": 2}}
    assert changed["data"]["augment"] == {"flip": True}
    assert tomli_w.dumps(tables) == before


def test_naming_another_partition_drops_the_options_of_the_one_before_whatever_the_order():
    for order in (1, -1):
        changes = dict([("data.partition.name", "shards"), ("data.partition.s", 3)][::order])
        assert read_job(QUICKSTART, changes).partition == PARTITIONS["shards"](s=3, num_clients=20, seed=0)
    assert read_job(QUICKSTART, {"data.partition.name": "dirichlet"}) == read_job(QUICKSTART)


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
def test_an_override_is_read_as_toml_or_as_a_word(text, value):
    assert read_override(text) == ("k", value)


@pytest.mark.parametrize("text", ["k", "=1", ""])
def test_an_override_without_key_or_value_is_refused(text):
    with pytest.raises(InputError, match=r"write an override as key\.sub=value"):
        read_override(text)


@pytest.mark.parametrize("name", ["a", "a/b", "A.b_c-d+1/2", "fedntd-table1/cifar10/fedavg/seed-0"])
def test_names_that_can_be_folders(name):
    assert make_job({"name": name}).name == name


@pytest.mark.parametrize("name", ["", ".", "../x", "a/../b", "/a", "a/", "a//b", ".hidden", "a b", "a\n", "ä", 3, None])
def test_names_that_cannot(name):
    with pytest.raises(InputError, match="a job needs a name that can be a folder's"):
        make_job({"name": name})


@pytest.mark.parametrize("seed", [-1, 1.5, "1", True])
def test_seeds_are_whole_numbers(seed):
    with pytest.raises(InputError, match=r"seed = .*: give a whole number, 0 or more"):
        make_job({"name": "n", "seed": seed})


@pytest.mark.parametrize(
    ("num_gpus", "share"),
    [(0.0, 0), (1.0, 1), (3.0, 3), (0.5, 1 / 2), (0.3, 1 / 3), (0.34, 1 / 2), (0.9, 1), (0.1, 0.1)],
)
def test_a_share_of_a_gpu_is_rounded_up_so_that_whole_actors_fit(num_gpus, share):
    assert RayOptions(num_gpus=num_gpus).gpu_share == share


def test_one_and_a_half_gpus_are_refused():
    with pytest.raises(InputError, match=r"ray\.num_gpus = 1\.5: more than one GPU an actor must be a whole number"):
        read_job(QUICKSTART, {"ray.num_gpus": 1.5})


@pytest.mark.parametrize("share", [5e-324, 0.0009])
def test_the_share_of_a_gpu_has_a_least(share):
    with pytest.raises(InputError, match=r"ray\.num_gpus = .*: an actor takes a thousandth of a GPU at least, or none"):
        read_job(QUICKSTART, {"ray.num_gpus": share})


def test_a_grid_is_no_job():
    with pytest.raises(InputError, match="this job file is a grid of many runs"):
        make_job({"name": "n", "grid": {"seeds": [0]}})


def test_every_option_has_a_sentence():
    from rayfed.data.augment import Augment
    from rayfed.data.sources import Source
    from rayfed.values import sentence

    for cls in (Training, RayOptions, Output, Source, Augment, *PARTITIONS.values()):
        for field in fields(cls):
            assert sentence(cls, field.name), f"{cls.__name__}.{field.name}"


def test_methods_share_a_partition_with_one_that_needs_an_auxiliary_set():
    """Taking the set out deals the rest to other clients; so a comparison lets the server keep one in every run."""
    jobs = [read_job(QUICKSTART, {"method": m, "data.auxiliary_per_class": 64}) for m in ("fedavg", "fedssd")]
    one, other = map(open_data, jobs)
    assert one.partition.hash() == other.partition.hash()
    assert len(one.auxiliary) == len(other.auxiliary) == 640
