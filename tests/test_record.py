"""The folder of a run: what is in it, what it survives, and what it never touches."""

import importlib.metadata
import json
import logging
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import rayfed
from rayfed import storage
from rayfed.data.federation import federate
from rayfed.data.partition import Iid
from rayfed.data.samples import Dataset, Samples
from rayfed.job import make_job, read_job
from rayfed.local import Evaluation
from rayfed.methods import RECIPES, Part
from rayfed.provenance import hash_of
from rayfed.record import SCHEMAS, Record, folder_of, is_begun, is_done, read_summary, read_table
from rayfed.rounds import ClientRow, Round
from rayfed.values import InputError

CLASSES = ("cat", "dog")


@pytest.fixture
def job(tmp_path):
    return make_job({"name": "group/one", "output": {"path": str(tmp_path / "runs")}, "ray": {"mode": "off"}})


@pytest.fixture
def federation():
    samples = Samples(np.zeros((8, 1, 4, 4), np.uint8), np.arange(8) % 2, CLASSES)
    return federate(Dataset(samples, samples), Iid(num_clients=2))


def a_round(number: int, right: int = 3) -> Round:
    """A round after which `right` of 4 cats, and all dogs, are recognised."""
    return Round(
        round=number,
        weights={"w": torch.tensor([float(number)])},
        held={},
        memories={},
        evaluation=Evaluation(np.array([[right, 4 - right], [0, 4]]), 8.0),
        peak=np.array([1.0, 1.0]),
        forgetting=0.125,
        clients=(ClientRow(0, 10, 1.0, 0.5, "here"), ClientRow(3, 30, 2.0, 0.5, "there")) if number else (),
        seconds=1.5 if number else 0.0,
        bytes_down=100 * number,
        bytes_up=10 * number,
    )


def contents(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_the_tables_have_their_columns_and_a_row_for_each_round_client_and_class(job, federation):
    made = Record(job, federation)
    for number in range(3):
        made.add(a_round(number))
    path = folder_of(job)
    assert {name: read_table(path, name).schema for name in SCHEMAS} == SCHEMAS
    assert read_table(path, "rounds").to_pylist()[1] == {
        "round": 1,
        "test_accuracy": 7 / 8,
        "test_loss": 1.0,
        "forgetting": 0.125,
        "train_loss": 1.75,
        "seconds": 1.5,
        "bytes_down": 100,
        "bytes_up": 10,
    }
    assert read_table(path, "rounds").column("train_loss").to_pylist() == [None, 1.75, 1.75]
    assert read_table(path, "clients").select(["round", "client", "num_examples", "node"]).to_pylist()[:2] == [
        {"round": 1, "client": 0, "num_examples": 10, "node": "here"},
        {"round": 1, "client": 3, "num_examples": 30, "node": "there"},
    ]
    assert len(read_table(path, "clients")) == 4
    assert read_table(path, "classes").to_pylist()[:2] == [
        {"round": 0, "class": "cat", "accuracy": 0.75},
        {"round": 0, "class": "dog", "accuracy": 1.0},
    ]


def test_rounds_are_read_in_their_order_and_as_any_parquet_dataset(job, federation):
    made = Record(job, federation)
    for number in (0, 1, 2, 9, 10, 11, 100):
        made.add(a_round(number))
    path = folder_of(job) / "rounds.parquet"
    assert pq.read_table(path).column("round").to_pylist() == [0, 1, 2, 9, 10, 11, 100]


def test_no_clients_can_be_read_before_the_first_round(job, federation):
    Record(job, federation).add(a_round(0))
    assert read_table(folder_of(job), "clients").num_rows == 0


def test_what_a_killed_run_left_half_written_is_passed_over(job, federation, monkeypatch):
    made = Record(job, federation)
    made.add(a_round(0))

    def die(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "replace", die)
        patch.setattr(storage.Path, "unlink", lambda self, missing_ok: None)  # who is killed does not tidy up
        with pytest.raises(KeyboardInterrupt):
            made.add(a_round(1))
    path = folder_of(job)
    assert [file.name for file in (path / "rounds.parquet").iterdir() if file.name.startswith(".")]
    assert read_table(path, "rounds").column("round").to_pylist() == [0]
    assert read_summary(path)["status"] == "running"


def test_the_summary_has_best_and_last_and_what_it_took(job, federation):
    made = Record(job, federation)
    for number, right in enumerate([0, 4, 2]):
        made.add(a_round(number, right))
    made.finish("done")
    summary = read_summary(folder_of(job))
    assert (summary["status"], summary["rounds"]) == ("done", 2)
    assert (summary["best"]["round"], summary["best"]["test_accuracy"]) == (1, 1.0)
    assert (summary["last"]["round"], summary["last"]["test_accuracy"]) == (2, 0.75)
    assert (summary["seconds"], summary["bytes_down"], summary["bytes_up"]) == (3.0, 300, 30)


def test_the_summary_of_a_failed_run_says_why(job, federation):
    made = Record(job, federation)
    made.finish("failed", "ValueError: so")
    assert read_summary(folder_of(job)) == {"status": "failed", "error": "ValueError: so", "rounds": 0}


@pytest.mark.parametrize("method", [*RECIPES, [{"until": 3, "method": "fedavg"}, {"method": "fedntd"}]], ids=str)
def test_the_job_of_a_run_is_read_back_as_it_was(method, federation, tmp_path):
    job = make_job({"name": "n", "method": method, "output": {"path": str(tmp_path)}})
    assert read_job(Record(job, federation).path / "job.toml") == job


def test_the_environment_names_versions_and_hashes(job, federation):
    found = json.loads((Record(job, federation).path / "environment.json").read_text())
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["job"] == job.hash()
    assert found["data"] == hash_of(federation)
    assert found["partition"] == federation.partition.hash()


def test_force_replaces_a_run_and_nothing_beside_it(job, federation):
    made = Record(job, federation)
    made.add(a_round(0))
    made.add(a_round(1))
    made.finish("done")
    path = folder_of(job)
    (path / "notes.txt").write_text("mine")
    (path / "two").mkdir()
    (path / "two" / "job.toml").write_text("another run")
    before = contents(path)
    with pytest.raises(InputError, match="holds the results of a run; give --force"):
        Record(job, federation)
    assert contents(path) == before

    made.close()
    Record(replace(job, seed=1), federation, force=True).add(a_round(0))
    assert read_table(path, "rounds").num_rows == 1
    assert (path / "notes.txt").read_text() == "mine"
    assert (path / "two" / "job.toml").read_text() == "another run"


def test_nothing_is_written_or_removed_through_a_link(job, federation, tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "kept.txt").write_text("mine")
    Record(job, federation).close()
    path = folder_of(job)
    (path / "clients.parquet").symlink_to(tmp_path / "away", target_is_directory=True)
    Record(job, federation, force=True).close()
    assert not (path / "clients.parquet").exists()
    (tmp_path / "runs" / "out").symlink_to(tmp_path / "away", target_is_directory=True)
    with pytest.raises(InputError, match=r"a link leads out of .*output\.path"):
        Record(replace(job, name="out/one"), federation)
    assert contents(tmp_path / "away") == {"kept.txt": b"mine"}


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_run_is_never_replaced(job, federation, force):
    path = folder_of(job)
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("three years")
    with pytest.raises(InputError, match="exists and is no rayfed run"):
        Record(job, federation, force=force)
    assert contents(path) == {"thesis.txt": b"three years"}


def test_an_empty_folder_is_taken(job, federation):
    folder_of(job).mkdir(parents=True)
    assert Record(job, federation).path == folder_of(job)


def test_a_file_in_the_way_is_said_so(job, federation, tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(InputError, match="is no folder that can be written to"):
        Record(job, federation)


def test_a_job_is_done_when_its_own_results_are_complete(job, federation):
    job = replace(job, training=replace(job.training, num_rounds=1))
    assert not is_done(job)
    made = Record(job, federation)
    made.add(a_round(0))
    assert not is_done(job)
    made.finish("failed")
    assert not is_done(job)
    made.add(a_round(1))
    made.finish("done")
    assert is_done(job)
    assert is_done(replace(job, ray=replace(job.ray, mode="on"))), "where it ran does not matter"
    longer = replace(job, training=replace(job.training, num_rounds=2))
    assert is_begun(longer) and not is_done(longer)
    with pytest.raises(InputError, match="holds the results of another job of this name; give"):
        is_done(replace(job, seed=1))
    made.add(a_round(2))
    with pytest.raises(InputError, match=r"holds the results of another job of this name \(it has more rounds\)"):
        is_done(job)


def test_one_process_at_a_time_writes(job, federation):
    made = Record(job, federation)
    with pytest.raises(InputError, match="is being written to by another process"):
        Record(job, federation, force=True)
    made.close()
    Record(job, federation, force=True).close()


# Through `rayfed.run` ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Talks(Part):
    """Says something in the log each time it begins, and fails in a round."""

    fails: int = 0

    def begin(self, client):
        logging.getLogger("rayfed.test").info("begin %d", client.round)
        if client.round == self.fails:
            raise RuntimeError("as asked")


@pytest.fixture
def tables(tmp_path):
    rng = np.random.default_rng(0)
    for split, rows in (("train", 20), ("test", 10)):
        images = pa.array(list(rng.integers(0, 256, (rows, 784), np.uint8)))
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(pa.table({"image": images, "label": np.arange(rows) % 2}), tmp_path / f"data/{split}.parquet")
    return {
        "name": "run",
        "data": {"source": str(tmp_path / "data"), "partition": {"name": "iid", "num_clients": 2}},
        "model": {"name": "lenet"},
        "train": {"num_rounds": 2, "clients_per_round": 2},
        "ray": {"mode": "off"},
        "output": {"path": str(tmp_path / "runs")},
    }


def test_run_prints_nothing_and_logs_to_the_runs_folder(tables, capfd):
    level = logging.getLogger("rayfed").level
    result = rayfed.run(tables, method=rayfed.compose(Talks()))
    assert capfd.readouterr() == ("", "")
    lines = (result.path / "log.txt").read_text().splitlines()
    assert [line.split(" INFO ")[1] for line in lines] == ["begin 1"] * 2 + ["begin 2"] * 2
    assert (logging.getLogger("rayfed").level, logging.getLogger("rayfed").handlers) == (level, [])
    assert result.rounds.column("round").to_pylist() == [0, 1, 2]
    assert (result.clients.num_rows, result.classes.num_rows) == (4, 6)
    saved = load_file(result.path / "checkpoints/round-00002.safetensors")
    assert all(torch.equal(saved[name], result.weights[name]) for name in saved)


def test_a_failed_run_keeps_what_it_finished(tables):
    method = rayfed.compose(Talks(fails=2))
    with pytest.raises(RuntimeError, match="as asked") as failed:
        rayfed.run(tables, method=method)
    path = folder_of(make_job(tables))
    assert failed.value.__notes__ == [
        f"rounds up to 1 are recorded in {path}",
        f"to go on after round 1: rayfed resume {path}",
        f"to see it again, in this process: rayfed replay {path} --round 2 --client 0",
    ]
    assert read_table(path, "rounds").num_rows == 2
    assert read_summary(path)["error"].startswith("ClientFailed: client 0, round 2 failed")
    assert (path / "checkpoints/round-00001.safetensors").is_file()
