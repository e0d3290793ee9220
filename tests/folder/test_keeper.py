"""The folder of a run: its files, what happens when the run ends early, and what is never
touched.
"""

import importlib.metadata
import json
import logging
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from extras import on_linux
from safetensors.torch import load_file
from torch import nn

import rayfed
from rayfed.base import files
from rayfed.base.errors import InputError, KilledActors, Locked, Unwritable
from rayfed.data.federation import federate
from rayfed.data.partition import Iid
from rayfed.data.samples import Dataset, Samples
from rayfed.folder import tables
from rayfed.folder.checkpointer import Checkpointer as Checkpoints
from rayfed.folder.places import folder_of, is_begun, is_done
from rayfed.folder.recorder import Recorder as Keeper
from rayfed.folder.summary import read_summary
from rayfed.folder.tables import SCHEMAS, read_table
from rayfed.job import make_job, read_job
from rayfed.measures.metrics import Evaluation
from rayfed.methods import RECIPES, Part
from rayfed.rounds.round import ClientRow, Round
from rayfed.rounds.setup import Setup
from rayfed.runtime.this_process import ThisProcess

NOTES = {"loss.cross_entropy": 1.5, "loss.tiny": 0.5}


@pytest.fixture
def setup(tmp_path):
    job = make_job(
        {"name": "group/one", "output": {"path": str(tmp_path / "runs")}, "ray": {"mode": "off"}}
    )
    samples = Samples(np.zeros((8, 1, 4, 4), np.uint8), np.arange(8) % 2, ("cat", "dog"))
    federation = federate(Dataset(samples, samples), Iid(num_clients=4))
    return Setup(nn.Linear(1, 1), federation, job, torch.device("cpu"))


def a_round(number: int, right: int | None = 3) -> Round:
    """A round after which `right` of 4 cats and all 4 dogs are recognised; None: it is not
    evaluated.
    """
    evaluation = None if right is None else Evaluation(np.array([[right, 4 - right], [0, 4]]), 8.0)
    clients = (
        (ClientRow(0, 10, 1.0, 0.5, "here"), ClientRow(3, 30, 2.0, 0.5, "there", NOTES))
        if number
        else ()
    )
    costs = {"seconds": 1.5 if number else 0.0, "bytes_down": 100 * number, "bytes_up": 10 * number}
    forgetting = None if right is None else 0.125
    notes = {"drift.update_cosine": 0.5} if number else {}
    weights = {"w": torch.ones(1) * number}
    return Round(
        number, weights, {}, {}, evaluation, np.ones(2), forgetting, clients, **costs, notes=notes
    )


def keep(setup, *rounds, force=False):
    """Keep a run of these rounds; returns its folder."""
    with Keeper(setup, ThisProcess(setup), force=force) as keeper:
        for round in rounds:
            keeper.round(round)
    return keeper.path


def with_job(setup, **changes):
    return replace(setup, job=replace(setup.job, **changes))


def contents(path):
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def test_the_tables_have_a_row_per_round_client_and_class(setup):
    path = keep(setup, *map(a_round, range(3)))
    rounds, clients, classes = (
        read_table(path, name).to_pylist() for name in ("rounds", "clients", "classes")
    )
    assert {name: read_table(path, name).schema for name in SCHEMAS} == SCHEMAS
    measured = {"test_accuracy": 7 / 8, "test_loss": 1.0, "forgetting": 0.125, "train_loss": 1.75}
    measured |= {"macro_f1": pytest.approx(55 / 63), "calibration_error": 0.0}
    costs = {"seconds": 1.5, "bytes_down": 100, "bytes_up": 10}
    assert rounds[1] == {"round": 1, **measured, **costs, "notes": [("drift.update_cosine", 0.5)]}
    assert [row["notes"] for row in rounds[::2]] == [[], [("drift.update_cosine", 0.5)]]
    assert [row["train_loss"] for row in rounds] == [None, 1.75, 1.75]
    assert len(clients) == 4
    assert clients[:2] == [
        {
            "round": 1,
            "client": 0,
            "num_examples": 10,
            "train_loss": 1.0,
            "seconds": 0.5,
            "node": "here",
            "notes": [],
        },
        {
            **{
                "round": 1,
                "client": 3,
                "num_examples": 30,
                "train_loss": 2.0,
                "seconds": 0.5,
                "node": "there",
            },
            "notes": [("loss.cross_entropy", 1.5), ("loss.tiny", 0.5)],
        },
    ]
    held = sum(setup.federation.label_counts(client) for client in (0, 3)).tolist()
    assert sum(held) == 4, "of the clients 0 and 3, two images each"
    assert classes[:4] == [
        {"round": 0, "class": "cat", "accuracy": 0.75, "seen": 0, "predicted": 3},
        {"round": 0, "class": "dog", "accuracy": 1.0, "seen": 0, "predicted": 5},
        {"round": 1, "class": "cat", "accuracy": 0.75, "seen": held[0], "predicted": 3},
        {"round": 1, "class": "dog", "accuracy": 1.0, "seen": held[1], "predicted": 5},
    ]


def test_confusions_have_a_row_per_cell_that_is_not_empty(setup):
    setup = with_job(setup, measure=["confusion"], measure_every=2)
    confusions = {3: np.array([[0, 2], [1, 1]])}
    path = keep(
        setup, a_round(0), a_round(1), replace(a_round(2), confusions=confusions), a_round(4, None)
    )
    table = read_table(path, "confusions")
    assert table.schema == SCHEMAS["confusions"]
    of_the_global = [("cat", "cat", 3), ("cat", "dog", 1), ("dog", "dog", 4)]
    of_client_3 = [("cat", "dog", 2), ("dog", "cat", 1), ("dog", "dog", 1)]
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        *((0, None, *cell) for cell in of_the_global),
        *((2, None, *cell) for cell in of_the_global),
        *((2, 3, *cell) for cell in of_client_3),
    ], "rounds 0 and 2 are measured and evaluated"
    cells = tables.confusions(path, ("cat", "dog"))
    assert tables.matrices(cells, 2, 2)[3].tolist() == confusions[3].tolist()
    assert tables.matrices(cells, 1, 2) == {} and [*tables.matrices(cells, 0, 2)] == [-1]


def test_a_run_without_confusions_has_no_table_of_them(setup):
    path = keep(setup, *map(a_round, range(3)))
    assert (
        not (path / "confusions.parquet").exists() and read_table(path, "confusions").num_rows == 0
    )
    assert not [name for name in contents(path) if "confusions" in name]


def test_a_round_without_evaluation_has_no_figures_and_no_classes(setup):
    path = keep(setup, a_round(0), a_round(1, 4), a_round(2, None), a_round(3, 2), a_round(4, None))
    rounds = read_table(path, "rounds")
    for column in ("test_accuracy", "test_loss", "forgetting"):
        assert [value is None for value in rounds.column(column).to_pylist()] == [
            False,
            False,
            True,
            False,
            True,
        ]
    assert all(
        rounds.column(column).null_count == 0
        for column in ("round", "seconds", "bytes_down", "bytes_up")
    )
    assert rounds.column("train_loss").to_pylist() == [None, *[1.75] * 4]
    assert read_table(path, "classes").column("round").to_pylist() == [0, 0, 1, 1, 3, 3]
    assert read_table(path, "clients").column("round").to_pylist() == [1, 1, 2, 2, 3, 3, 4, 4]
    summary = read_summary(path)
    assert (summary["rounds"], summary["best"]["round"], summary["last"]["round"]) == (4, 1, 3)
    assert summary["last"]["test_accuracy"] == 0.75
    only_first = read_summary(keep(setup, a_round(0), a_round(1, None), force=True))
    assert (only_first["rounds"], only_first["best"]["round"], only_first["last"]["round"]) == (
        1,
        0,
        0,
    )


def test_the_summary_has_best_and_last_round_and_the_costs(setup):
    """The initial model is never the best: it has learnt nothing, and its accuracy is chance."""
    summary = read_summary(keep(setup, a_round(0, 4), a_round(1, 4), a_round(2, 2)))
    assert (summary["status"], summary["rounds"]) == ("done", 2)
    assert (summary["best"]["round"], summary["best"]["test_accuracy"]) == (1, 1.0)
    assert (summary["last"]["round"], summary["last"]["test_accuracy"]) == (2, 0.75)
    assert (summary["seconds"], summary["bytes_down"], summary["bytes_up"]) == (3.0, 300, 30)


def test_a_folder_where_a_file_is_to_be_written_aside_does_not_stop_it(tmp_path):
    (tmp_path / ".summary.json.tmp/inner").mkdir(parents=True)
    files.write_text(tmp_path / "summary.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_summary_of_a_failed_run_says_why(setup):
    with suppress(ZeroDivisionError), Keeper(setup, ThisProcess(setup)):
        raise ZeroDivisionError("so")
    assert read_summary(folder_of(setup.job)) == {
        "status": "failed",
        "error": "ZeroDivisionError: so",
        "rounds": 0,
        "guess": 0.5,
    }


def test_a_run_that_the_same_work_ends_in_the_same_way_again_cannot_be_resumed(setup):
    def end(what, how, last=0):
        error = KilledActors("it died", what, how, 1, 2)
        with suppress(KilledActors), Keeper(setup, ThisProcess(setup), force=True) as keeper:
            for round in map(a_round, range(last + 1)):
                keeper.round(round)
            raise error
        return error.exit_code, any("would not help" in note for note in error.__notes__)

    assert [end("client 1", "died"), end("client 2", "died"), end("client 2", "no answer")] == [
        (75, False)
    ] * 3
    assert [end("client 2", "no answer"), end("client 2", "no answer")] == [(1, True)] * 2
    assert end("client 2", "no answer", last=1) == (75, False), "it came further"


@pytest.mark.parametrize(
    "method", [*RECIPES, [{"until": 3, "method": "fedavg"}, {"method": "fedntd"}]], ids=str
)
def test_the_job_of_a_run_is_read_back_the_same(method, setup, tmp_path):
    job = make_job({"name": "n", "method": method, "output": {"path": str(tmp_path)}})
    assert read_job(keep(replace(setup, job=job)) / "job.toml") == job


def test_the_environment_names_versions_and_hashes(setup):
    found = json.loads((keep(setup) / "environment.json").read_text())
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["job"] == setup.job.hash()
    assert found["data"] == setup.federation.hash()
    assert found["partition"] == setup.federation.dealt.hash()


def test_force_replaces_a_run_and_no_other_files(setup):
    path = keep(setup, a_round(0), a_round(1))
    (path / "own.parquet").write_text("what `rayfed clients` measured of this run")
    (path / "notes.txt").write_text("mine")
    (path / "two").mkdir()
    (path / "two" / "job.toml").write_text("another run")
    before = contents(path)
    with pytest.raises(
        InputError, match=r"holds the results of a run; choose one:\n.*\n.*\(in Python force=True\)"
    ):
        keep(setup)
    assert contents(path) == before

    keep(with_job(setup, seed=1), a_round(0), force=True)
    assert read_table(path, "rounds").num_rows == 1
    assert not (path / "own.parquet").exists()
    assert (path / "notes.txt").read_text() == "mine"
    assert (path / "two" / "job.toml").read_text() == "another run"


def test_nothing_is_written_or_removed_through_a_link(setup, tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "kept.txt").write_text("mine")
    path = keep(setup)
    for name in (
        "clients.parquet",
        "checkpoints",
        "log.txt",
        "partition.parquet",
        "environment.json",
    ):
        place = path / name
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.symlink_to(
            tmp_path / "away" / ("" if "clients" in name or "check" in name else "kept.txt")
        )
        keep(setup, force=True)
        assert not place.is_symlink(), name
    (tmp_path / "runs" / "out").symlink_to(tmp_path / "away", target_is_directory=True)
    with pytest.raises(InputError, match=r"a link leads out of .*output\.path"):
        keep(with_job(setup, name="out/one"))
    assert contents(tmp_path / "away") == {"kept.txt": b"mine"}


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_not_a_run_is_never_replaced(setup, force):
    path = folder_of(setup.job)
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("three years")
    with pytest.raises(InputError, match="exists and is not a rayfed run"):
        keep(setup, force=force)
    assert contents(path) == {"thesis.txt": b"three years"}


def test_checkpoints_are_written_after_round_1_every_few_rounds_and_every_minute(
    setup, monkeypatch
):
    output = replace(setup.job.output, every=5, every_seconds=60)
    written, now = [], [0.0]
    monkeypatch.setattr("rayfed.folder.recorder.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Checkpoints, "save", lambda self, round, *_: written.append(round.round))
    with Keeper(with_job(setup, output=output), ThisProcess(setup)) as keeper:
        for number in range(9):
            now[0] += 25
            keeper.round(a_round(number))
    # The last round always has one.
    assert written == [0, 1, 4, 5, 8, 8]


@pytest.mark.parametrize("name", ["b/rounds.parquet/x", "b/checkpoints", "b/c/job.toml"])
def test_a_name_inside_another_runs_own_files_is_refused(setup, name):
    """To resume run `b` would delete it."""
    with pytest.raises(
        InputError, match=rf"name = '{name}': in the folder of a run, '.*' is that run's own"
    ):
        keep(with_job(setup, name=name))


@on_linux
def test_what_a_power_cut_must_not_take_is_synced(setup, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or sync(file)
    )
    path = keep(setup, a_round(0))
    for name in ("summary.json", "environment.json", "job.toml"):
        assert str(path / f".{name}.tmp") in synced
    assert str(path) in synced


@pytest.mark.parametrize("where", ["/proc/nowhere", "/dev/null/runs"])
def test_a_place_that_cannot_be_written_to_is_one_sentence(setup, where):
    with pytest.raises(InputError, match="cannot be written to") as refused:
        keep(with_job(setup, output=replace(setup.job.output, path=where)))
    assert "\n" not in str(refused.value)


def test_a_disk_that_is_full_before_round_0_is_one_sentence(setup, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_bytes", full)
    with pytest.raises(Unwritable, match=r"cannot be written to: .*No space left on device"):
        keep(setup)


def test_an_empty_folder_is_used(setup):
    folder_of(setup.job).mkdir(parents=True)
    assert keep(setup) == folder_of(setup.job)


def test_a_file_in_place_of_the_folder_is_refused(setup, tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(InputError, match="/runs' is not a folder that can be written to"):
        keep(setup)


def test_a_job_is_done_when_its_own_results_are_complete(setup):
    setup = with_job(setup, train=replace(setup.job.train, num_rounds=1))
    assert not is_done(setup.job)
    with suppress(ZeroDivisionError), Keeper(setup, ThisProcess(setup)) as keeper:
        keeper.round(a_round(0))
        assert not is_done(setup.job)
        raise ZeroDivisionError
    assert not is_done(setup.job)
    keep(setup, a_round(0), a_round(1), force=True)
    assert is_done(setup.job)
    assert is_done(replace(setup.job, ray=replace(setup.job.ray, mode="on"))), (
        "the place where it ran does not matter"
    )
    longer = replace(setup.job, train=replace(setup.job.train, num_rounds=2))
    assert is_begun(longer) and not is_done(longer)
    with pytest.raises(
        InputError,
        match=r"results of another job of this name \(seed is 0 there, 1 here\); choose one:",
    ):
        is_done(replace(setup.job, seed=1))
    more_threads = replace(setup.job, ray=replace(setup.job.ray, num_cpus=2))
    with pytest.raises(InputError, match=r"\(ray\.num_cpus \(as threads\) is 1 there, 2 here\)"):
        is_done(more_threads)
    keep(setup, *map(a_round, range(3)), force=True)
    with pytest.raises(
        InputError, match=r"holds the results of another job of this name \(it has more rounds\)"
    ):
        is_done(setup.job)


def test_only_one_process_at_a_time_can_write(setup):
    with Keeper(setup, ThisProcess(setup)):
        with pytest.raises(Locked, match=f"is being written to by process {os.getpid()} on "):
            keep(setup, force=True)
    keep(setup, force=True)


# Through `rayfed.run`
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Talks(Part):
    """Logs a line each time it begins, and fails in the round `fails`."""

    fails: int = 0

    def begin(self, client):
        logging.getLogger("rayfed.test").info("begin %d", client.round)
        if client.round == self.fails:
            raise RuntimeError("as asked")


@pytest.fixture
def two_rounds(tables):
    """The job with two clients in two rounds."""
    tables["data"]["partition"]["num_clients"] = tables["train"]["num_rounds"] = 2
    return tables


def test_run_prints_nothing_and_logs_to_the_runs_folder(two_rounds, capfd):
    level = logging.getLogger("rayfed").level
    result = rayfed.run(two_rounds, {"ray.check_repeat": False}, method=rayfed.compose(Talks()))
    assert capfd.readouterr() == ("", "")
    lines = (result.path / "log.txt").read_text().splitlines()
    assert [line.split(" INFO ")[1] for line in lines] == ["begin 1"] * 2 + ["begin 2"] * 2
    assert (logging.getLogger("rayfed").level, logging.getLogger("rayfed").handlers) == (level, [])
    assert result.rounds.column("round").to_pylist() == [0, 1, 2]
    assert (result.clients.num_rows, result.classes.num_rows) == (4, 6)
    saved = load_file(result.path / "checkpoints/round-00002.safetensors")
    torch.testing.assert_close(saved, dict(result.weights), rtol=0, atol=0)


def test_warnings_are_shown_once_also_where_python_logs_nothing(two_rounds, monkeypatch, capfd):
    log = logging.getLogger("rayfed")
    # Pytest has handlers of its own.
    monkeypatch.setattr(log, "propagate", False)
    job = {**two_rounds, "method": "ditto"}
    path = rayfed.run(job).path
    out, err = capfd.readouterr()
    assert (
        out == "" and err.count("each client has a model of its own") == len(err.splitlines()) == 1
    )
    assert "each client has a model of its own" in (path / "log.txt").read_text()
    assert log.handlers == []
    with monkeypatch.context() as patch:
        # The user's own, which may leave them out.
        patch.setattr(log, "handlers", [logging.NullHandler()])
        rayfed.run(job, force=True)
    assert capfd.readouterr() == ("", "")


def test_a_failed_run_keeps_its_finished_rounds(two_rounds):
    with pytest.raises(RuntimeError, match="as asked") as failed:
        rayfed.run(two_rounds, method=rayfed.compose(Talks(fails=2)))
    path = folder_of(make_job(two_rounds))
    assert failed.value.__notes__ == [
        f"rounds up to 1 are recorded in {path}",
        f"once the code is mended, begin again: rayfed run {path / 'job.toml'} --force",
        f"or, to continue after round 1: rayfed resume {path} --other-bits",
        f"to see it again, in this process: rayfed replay {path} --round 2 --client 0",
    ]
    assert read_table(path, "rounds").num_rows == 2
    assert read_summary(path)["error"].startswith("ClientFailed: client 0, round 2 failed")
    assert (path / "checkpoints/round-00001.safetensors").is_file()
