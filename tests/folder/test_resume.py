"""A run that was stopped anywhere and resumed has the same results as a run without a stop."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import rayfed
from rayfed import Observer
from rayfed.base.errors import ClientFailed, InputError, RunFailed, Unwritable
from rayfed.base.storage import Folder
from rayfed.cli import main
from rayfed.folder.checkpoint import newest
from rayfed.folder.places import folder_of, is_done
from rayfed.folder.summary import read_summary
from rayfed.folder.tables import read_table
from rayfed.job import make_job
from rayfed.methods import Part, compose, scaffold
from rayfed.rounds.setup import open_data
from rayfed.runtime.this_process import ThisProcess


@dataclass(frozen=True)
class Stops(Part):
    """Stops the run in a round, two times; the length of a file counts them."""

    file: str
    round: int
    how: str = "ctrl-c"

    def begin(self, client):
        if client.round == self.round and len(times := Path(self.file).read_text()) < 2:
            Path(self.file).write_text(times + "x")
            raise KeyboardInterrupt if self.how == "ctrl-c" else RuntimeError("as asked")


@pytest.fixture
def stops(tmp_path):
    (tmp_path / "times").touch()
    return lambda *when: compose(scaffold(), Stops(str(tmp_path / "times"), *when))


@pytest.fixture
def whole(tables):
    """The outcome of a run without a stop."""
    return outcome(rayfed.run({**tables, "name": "whole"}))


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outcome(result):
    """The rows of all tables without durations, and the bytes of the weights."""
    tables = result.rounds, result.clients, result.classes, result.confusions
    rows = [row for table in tables for row in table.to_pylist()]
    numbers = [
        {column: value for column, value in row.items() if column != "seconds"} for row in rows
    ]
    return numbers, {name: tensor.numpy().tobytes() for name, tensor in result.weights.items()}


@pytest.mark.parametrize("how", ["ctrl-c", "failure"])
@pytest.mark.parametrize("round", [1, 4])
def test_a_run_that_was_stopped_continues_to_the_same_results(
    tables, tmp_path, whole, stops, round, how
):
    """The second stop comes before the first new round; all earlier results must still be there."""
    method, path = stops(round, how), tmp_path / "runs/run"
    for train in (
        lambda: rayfed.run(tables, method=method),
        lambda: rayfed.resume(path, method=method),
    ):
        with pytest.raises(KeyboardInterrupt if how == "ctrl-c" else ClientFailed) as stopped:
            train()
        onwards = f"to continue after round {round - 1}: rayfed resume {path}"
        assert stopped.value.__notes__[0] == f"rounds up to {round - 1} are recorded in {path}"
        assert (
            onwards if how == "ctrl-c" else f"or, {onwards} --other-bits"
        ) in stopped.value.__notes__
        assert read_table(path, "rounds").num_rows == round
    result = rayfed.resume(path, method=method)
    assert outcome(result) == whole
    summary = json.loads((result.path / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("done", 5)
    resumed = json.loads((result.path / "environment.json").read_text())["resumed"]
    assert [entry["after_round"] for entry in resumed] == [round - 1] * 2


@pytest.mark.parametrize("source", ["moved", "moved/", "./moved", "link", "~/moved"])
def test_a_run_continues_with_the_same_data_at_another_path(
    tables, tmp_path, monkeypatch, whole, source
):
    """Only what the files hold is part of the job: not the name of their folder, nor how it is
    written.
    """
    path = rayfed.run(tables, {"train.num_rounds": 1}).path
    (tmp_path / "data").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = rayfed.resume(path, {"train.num_rounds": 5, "data.source": source})
    assert outcome(result) == whole
    assert rayfed.read_job(path / "job.toml").data.source == source


def test_files_of_weights_partition_and_trace_may_move_and_their_content_may_not(tables, tmp_path):
    """The test set of the first run lies in its folder; that of its continuation is named by
    `data.test`.
    """
    weights = rayfed.run({**tables, "name": "first"}, {"train.num_rounds": 1}).weights
    files = {
        "model.weights": tmp_path / "weights.safetensors",
        "data.partition.path": tmp_path / "dealt.json",
        "clients.trace": tmp_path / "trace.parquet",
    }
    save_file(weights, files["model.weights"])
    files["data.partition.path"].write_text(json.dumps([[*range(i, 40, 4)] for i in range(4)]))
    pq.write_table(
        pa.table({"round": [1, 1, 2, 2, 3, 3], "client": [0, 1] * 3}), files["clients.trace"]
    )
    tables["data"]["partition"] = {"name": "file"}
    there = {key: str(file) for key, file in files.items()}
    path = rayfed.run(tables, {"train.num_rounds": 1, **there}).path
    here = {}
    for key, file in files.items():
        here[key] = str(file.rename(tmp_path / f"moved-{file.name}"))
    data = tmp_path / "data"
    here["data.source"] = str(data / "train.parquet")
    here["data.test"] = str((data / "test.parquet").rename(tmp_path / "t.parquet"))
    assert rayfed.resume(path, {"train.num_rounds": 2, **here}).rounds.num_rows == 3
    with pytest.raises(
        InputError, match=r"another job: model\.weights is a file there, not set here\n"
    ):
        rayfed.resume(path, {"train.num_rounds": 3, **here, "model.weights": ""})
    save_file({name: tensor + 1 for name, tensor in weights.items()}, here["model.weights"])
    with pytest.raises(InputError, match="another job: the file of the model's weights"):
        rayfed.resume(path, {"train.num_rounds": 3})
    save_file(weights, here["model.weights"])
    Path(here["data.partition.path"]).write_text(
        json.dumps([[*range(10 * i, 10 * i + 10)] for i in range(4)])
    )
    with pytest.raises(InputError, match="to other bits: the partition"):
        rayfed.resume(path, {"train.num_rounds": 3})


def test_other_data_are_refused_with_what_differs_and_where_they_lie(tables, tmp_path):
    """Nothing of the run is changed then, also where it is complete."""
    path = rayfed.run(tables, {"train.num_rounds": 1}).path
    before = files(path)
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    test = pq.read_table(tmp_path / "data/test.parquet")
    pq.write_table(test.slice(1), tmp_path / "other/test.parquet")
    other = str(tmp_path / "other")
    with pytest.raises(InputError) as refused:
        rayfed.resume(path, {"train.num_rounds": 2, "data.source": other})
    message = str(refused.value)
    assert "the test set is 10 of 1x28x28 uint8 (checksum " in message
    assert " there, 9 of 1x28x28 uint8 (checksum " in message
    assert f"data.source is '{tables['data']['source']}' there, '{other}' here" in message
    assert "the training set" not in message
    job = make_job({**tables, "data": {**tables["data"], "source": other}})
    job = replace(job, train=replace(job.train, num_rounds=1))
    assert not is_done(job), "another path may hold other images"
    with pytest.raises(InputError, match="the images or labels have changed since"):
        rayfed.run(job, resume=True)
    assert files(path) == before
    shutil.rmtree(path / "checkpoints")
    with pytest.raises(InputError, match=r"with other files .data\.source is .* and no checkpoint"):
        rayfed.run(job, resume=True)


@pytest.fixture
def seldom(tables):
    """The job of a run that is evaluated after rounds 0, 3, 6, ... and its last."""
    tables["train"]["eval_every"] = 3
    return tables


@pytest.fixture
def measured(seldom):
    """The same, measured in every way; the classes count as domains too."""
    seldom["data"]["domain"] = "label"
    chosen = {"measure_images": 7, "measure_layers": ["features.0"], "measure_clients": [0, 1]}
    return {**seldom, "measure": ["local", "drift", "confusion"], **chosen}


def test_what_is_measured_may_change_when_a_run_is_resumed(measured):
    """Neither the keys of measures nor data.domain are of the run's lineage."""
    keys = {key: value for key, value in measured.items() if key.startswith("measure")}
    plain = {key: value for key, value in measured.items() if key not in keys}
    plain["data"] = {**plain["data"], "domain": ""}
    path = rayfed.run(plain, {"train.num_rounds": 2}).path
    result = rayfed.resume(path, {**keys, "data.domain": "label", "train.num_rounds": 5})
    notes = [dict(notes) for notes in result.rounds.column("notes").to_pylist()]
    assert [bool(found) for found in notes] == [False, False, False, True, True, True]
    assert set(result.confusions.column("round").to_pylist()) == {3, 4, 5}
    assert outcome(result)[1] == outcome(rayfed.run({**plain, "name": "plain"}))[1]


def test_the_numbers_of_a_measured_run_are_counts_of_its_own_data(measured):
    """Of classes, what the clients of the round hold and what is predicted; of confusions, the
    images.
    """
    result = rayfed.run(measured)
    notes = [dict(notes) for notes in result.rounds.column("notes").to_pylist()]
    drift = {
        "drift.gradient_diversity",
        "drift.update_cosine",
        "drift.alignment.features.0",
        "drift.dead.features.0",
    }
    domains = {"domain.0", "domain.1"}
    assert [names.keys() for names in notes] == [
        domains,
        drift,
        drift,
        drift | domains,
        drift,
        drift | domains,
    ]
    for row in result.classes.to_pylist():
        assert row["accuracy"] == notes[row["round"]][f"domain.{row['class']}"]
    federation = open_data(make_job(measured))
    cohorts = {}
    for row in result.clients.to_pylist():
        cohorts.setdefault(row["round"], []).append(row["client"])
    for number in {row["round"] for row in result.classes.to_pylist()}:
        rows = [row for row in result.classes.to_pylist() if row["round"] == number]
        assert sum(row["predicted"] for row in rows) == len(federation.test)
        held = np.zeros(2, dtype=int)
        for client in cohorts.get(number, []):
            held += np.bincount(federation.train.labels[federation.client(client)], minlength=2)
        assert [row["seen"] for row in rows] == held.tolist()
    images = Counter()
    for row in result.confusions.to_pylist():
        images[row["round"], row["client"]] += row["count"]
    clients = {
        (number, client)
        for number, cohort in cohorts.items()
        for client in cohort
        if client in (0, 1)
    }
    assert images == {
        **dict.fromkeys(clients, 7),
        **{(number, None): len(federation.test) for number in (0, 3, 5)},
    }
    predicted = Counter()
    for row in result.confusions.to_pylist():
        if row["client"] is None:
            predicted[row["round"], row["predicted"]] += row["count"]
    assert all(
        predicted[row["round"], row["class"]] == row["predicted"]
        for row in result.classes.to_pylist()
    )


def test_a_round_that_becomes_the_last_is_evaluated_when_the_run_is_resumed(
    seldom, tmp_path, stops
):
    method, path = stops(5), tmp_path / "runs/run"
    with pytest.raises(KeyboardInterrupt):
        rayfed.run(seldom, method=method)
    assert read_summary(path)["last"]["round"] == 3
    short = rayfed.resume(path, {"train.num_rounds": 4}, method=method)
    assert outcome(short) == outcome(rayfed.run(seldom, {"name": "short", "train.num_rounds": 4}))
    assert (read_summary(path)["status"], read_summary(path)["last"]["round"]) == ("done", 4)


def test_a_measured_run_that_is_extended_has_the_rows_of_one_that_never_stopped(measured):
    """Round 4 is evaluated only as the last; what its clients measured themselves stays."""
    short = rayfed.run(measured, {"train.num_rounds": 4})
    assert 4 in short.classes.column("round").to_pylist()
    longer = rayfed.resume(short.path, {"train.num_rounds": 5})
    assert outcome(longer) == outcome(rayfed.run({**measured, "name": "whole"}))
    of_round_4 = [row for row in longer.confusions.to_pylist() if row["round"] == 4]
    assert of_round_4 and None not in {row["client"] for row in of_round_4}


def test_how_often_a_run_is_evaluated_belongs_to_it(seldom):
    """Forgetting depends on it: a table must not hold two kinds."""
    path = rayfed.run(seldom, {"train.num_rounds": 1}).path
    with pytest.raises(
        InputError, match=r"belongs to another job: train\.eval_every is 3 there, 1 here"
    ):
        rayfed.resume(path, {"train.eval_every": 1})


def test_run_with_resume_does_not_continue_another_job(tables, stops):
    method = stops(4)
    with pytest.raises(KeyboardInterrupt):
        rayfed.run(tables, method=method, resume=True)
    with pytest.raises(
        InputError,
        match=r"holds the results of another job of this name \(seed is 0 there, 1 here\)",
    ):
        rayfed.run(tables, {"seed": 1}, method=method, resume=True)
    with pytest.raises(
        InputError, match="force begins the run again, and resume continues it: give one of the two"
    ):
        rayfed.run(tables, force=True, resume=True)


def test_a_method_made_in_a_function_may_be_continued_by_the_same_call(tables, whole):
    """The saved job names it, but it cannot be imported: it is given again."""

    @dataclass(frozen=True)
    class Local(Part):
        def loss(self, batch, local):
            return None

    method = compose(scaffold(), Local())
    rayfed.run(tables, {"train.num_rounds": 2}, method=method)
    assert outcome(rayfed.run(tables, method=method, resume=True)) == whole


def test_a_run_whose_name_has_parts_keeps_its_name_and_checkpoints_when_its_folder_is_moved(
    tables, tmp_path, whole
):
    checkpoints = str(tmp_path / "elsewhere")
    rayfed.run(tables, {"name": "a/b", "train.num_rounds": 3, "output.checkpoints": checkpoints})
    (tmp_path / "runs").rename(tmp_path / "moved")
    result = rayfed.resume(tmp_path / "moved/a/../a/b", {"train.num_rounds": 5})
    assert (result.path, outcome(result)) == (tmp_path / "moved/a/b", whole)


@pytest.mark.parametrize("content", [b'{"status": "runn', b"\xff\x00"])
def test_a_damaged_summary_or_environment_does_not_keep_a_run_from_continuing(
    tables, whole, caplog, content
):
    path = rayfed.run(tables, {"train.num_rounds": 3}).path
    for name in ("summary.json", "environment.json"):
        (path / name).write_bytes(content)
    assert outcome(rayfed.run(tables, resume=True)) == whole
    assert "environment.json' is damaged" in caplog.text
    assert json.loads((path / "summary.json").read_text())["status"] == "done"
    assert "packages" in json.loads((path / "environment.json").read_text())


def test_a_damaged_job_file_is_made_anew_from_the_users(tables, whole):
    file = rayfed.run(tables, {"train.num_rounds": 3}).path / "job.toml"
    file.write_text("[train")
    with pytest.raises(
        InputError, match=r"cannot be read: .*; put it back, or continue .*: rayfed run YOUR.toml"
    ):
        rayfed.resume(file.parent)
    assert outcome(rayfed.run(tables, resume=True)) == whole


@pytest.mark.parametrize("again", [False, True], ids=["resume", "run"])
def test_a_run_continues_from_its_checkpoints_alone(tables, tmp_path, whole, again):
    elsewhere = (tmp_path / "elsewhere").as_uri()
    rayfed.run(tables, {"train.num_rounds": 3, "output.checkpoints": elsewhere})
    with pytest.raises(InputError, match="holds checkpoints of a run of this name"):
        rayfed.run(
            tables, {"output.path": str(tmp_path / "other"), "output.checkpoints": elsewhere}
        )
    shutil.rmtree(tmp_path / "runs/run")
    if again:
        result = rayfed.run(tables, {"output.checkpoints": elsewhere}, resume=True)
        assert "resumed" in (result.path / "environment.json").read_text()
    else:
        result = rayfed.resume(f"{elsewhere}/run", {"train.num_rounds": 5})
    assert (result.path, outcome(result)) == (tmp_path / "runs/run", whole)


def test_a_run_that_cannot_continue_is_refused_and_not_changed(tables, tmp_path):
    rayfed.run(tables)
    before = files(tmp_path)
    for run, overrides, why in [
        (tmp_path / "data", {}, "is neither the folder of a run nor a folder of checkpoints$"),
        (tmp_path / "runs", {}, "nor a folder of checkpoints; runs in it: .*runs/run$"),
        (
            tmp_path / "runs/run",
            {"train.num_rounds": 4},
            "the run already has 5 rounds; give 6 or more to add rounds$",
        ),
        (
            tmp_path / "runs/run",
            {"train.lr": 0.5},
            r"belongs to another job: train\.lr is 0\.1 there, 0\.5 here",
        ),
        (
            tmp_path / "runs/run",
            {"method": "fedavg"},
            r"belongs to another job: method is scaffold there, fedavg here\n.* -s name=NEW$",
        ),
        (tmp_path / "runs/run", {"name": "other"}, "name: a run keeps its name"),
        (tmp_path / "runs/run", {"train.lrr": 1}, "unknown key 'lrr'"),
    ]:
        with pytest.raises(InputError, match=why):
            rayfed.resume(run, overrides)
    assert files(tmp_path) == before
    for manifest in (tmp_path / "runs/run/checkpoints").glob("*.json"):
        manifest.write_text("")
    with pytest.raises(
        InputError,
        match=(
            r"holds no good checkpoint; begin again: rayfed run .*/run/job.toml --force .in Python "
            r"force=True.$"
        ),
    ):
        rayfed.resume(tmp_path / "runs/run")
    shutil.rmtree(tmp_path / "runs/run/checkpoints")
    with pytest.raises(InputError, match="holds no checkpoint; begin again"):
        rayfed.resume(tmp_path / "runs/run")


def test_a_run_goes_on_without_checkpoints_but_is_not_done_before_the_last_is_written(
    tables, monkeypatch, caplog
):
    def full(self, name, *content):
        if re.match("round-0000[2-9]", name):
            raise OSError(28, "No space left on device")
        return write(self, name, *content)

    write = Folder.write
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", full)
        with pytest.raises(
            Unwritable, match=r"no checkpoint of round 5 was written .*No space left"
        ) as error:
            rayfed.run(tables)
    assert error.value.exit_code == 75
    assert (
        "no checkpoint of round 2 was written ([Errno 28] No space left on device); the last is of "
        "round 1" in caplog.text
    )
    job = make_job(tables)
    path = folder_of(job)
    again = f"to continue after round 1: rayfed resume {path}"
    assert error.value.__notes__ == [f"rounds up to 5 are recorded in {path}", again]
    assert (read_summary(path)["status"], is_done(job)) == ("failed", False)
    assert rayfed.run(tables, resume=True).rounds.num_rows == 6
    assert is_done(job)


@pytest.mark.parametrize("begun", [False, True], ids=["run", "resume"])
def test_checkpoints_that_cannot_be_written_are_noticed_before_anything_starts(
    tables, tmp_path, monkeypatch, begun
):
    tables["output"]["checkpoints"] = place = str(tmp_path / "shared")
    Path(place).mkdir()
    if begun:
        rayfed.run(tables, {"train.num_rounds": 1})
    before, access = files(tmp_path), os.access
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "access", lambda folder, mode: place not in str(folder) and access(folder, mode)
        )
        with pytest.raises(InputError, match=f"checkpoints cannot be written to '{place}/run'"):
            rayfed.run(tables, resume=begun)
    assert files(tmp_path) == before

    def full(self, name, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "write", full)
    number = 2 if begun else 0
    why = f"no checkpoint of round {number} was written .*No space left on device"
    with pytest.raises(Unwritable, match=why):
        rayfed.run(tables, resume=begun)


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="needs root to make a small disk"
)
def test_a_full_disk_loses_only_the_rounds_since_the_last_checkpoint(
    tables, tmp_path, whole, caplog
):
    """First a checkpoint does not fit, and leaves no file; then the results do not fit."""
    (disk := tmp_path / "disk").mkdir()
    filler = disk / "filler"

    def fill(free=0):
        with suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - free)

    class Filling(Observer):
        def round(self, round):
            self.last = round.round

        def client(self, done, total):
            if self.last == 3 and done == total:
                # For the round's results, but not for the whole checkpoint.
                fill(free=2**18)
            elif self.last == 4:
                fill()

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], check=True)
    try:
        to_disk = {"output.path": str(disk)}
        with pytest.raises(
            Unwritable, match=r"the results of round 5 cannot be written to .*No space left"
        ) as error:
            rayfed.run(tables, to_disk, observers=[Filling()])
        assert error.value.exit_code == 75, "the run can be resumed"
        assert "rounds up to 4 are recorded in" in error.value.__notes__[0]
        assert "to continue after round 2" in error.value.__notes__[1]
        assert "no checkpoint of round 4 was written" in caplog.text
        assert not list(disk.rglob("checkpoints/*round-00004*")) and not list(disk.rglob(".*.tmp"))
        filler.unlink()
        found = outcome(rayfed.resume(disk / "run", to_disk))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert found == whole


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="needs root to make a small disk"
)
@pytest.mark.parametrize(
    ("size", "finished", "why"),
    [
        (150, 0, "no checkpoint of round 0 was written"),
        (800, 1, "no checkpoint of round 1 was written"),
    ],
)
def test_a_disk_where_no_checkpoint_fits_is_found_at_the_start(
    tables, tmp_path, size, finished, why
):
    """Weights and state are known before round 1, and memories after it."""
    (disk := tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], check=True)
    try:
        with pytest.raises(
            Unwritable, match=rf"{why}.*takes [\d.]+ kB, and [\d.]+ kB are free"
        ) as error:
            rayfed.run(tables, {"output.checkpoints": str(disk)})
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert error.value.exit_code == 75
    assert read_summary(tmp_path / "runs/run")["rounds"] == finished


def test_a_damaged_memory_is_named_and_an_earlier_checkpoint_is_used_if_it_has_another(
    tables, tmp_path, whole, caplog
):
    """Where both checkpoints need the file, the run cannot continue, and the message names it."""
    rayfed.run(tables, {"train.num_rounds": 4})
    files = sorted((tmp_path / "runs/run/checkpoints/memories").iterdir())
    ends = set()
    for file in files:
        shutil.copytree(tmp_path / "runs", tmp_path / "again")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / "again/run/checkpoints/memories" / file.name).write_bytes(content)
        refusal = ""
        try:
            assert outcome(rayfed.resume(tmp_path / "again/run", {"train.num_rounds": 5})) == whole
            ends.add("earlier")
        except InputError as error:
            refusal = str(error)
            ends.add("none")
        if refusal:
            assert f"'{file.name}' is not as it was written" in refusal
        shutil.rmtree(tmp_path / "again")
    assert ends == {"earlier", "none"}


def test_a_clients_round_can_be_replayed(tables):
    result = rayfed.run(tables)
    row = result.clients.to_pylist()[-1]
    assert row["round"] == 5
    again, recorded = rayfed.replay(result.path, 5, row["client"])
    assert again.train_loss == recorded == row["train_loss"]
    other = (
        {0, 1, 2, 3} - {r["client"] for r in result.clients.to_pylist() if r["round"] == 5}
    ).pop()
    with pytest.raises(InputError, match=f"^client {other}: not in round 5, which has"):
        rayfed.replay(result.path, 5, other)
    with pytest.raises(InputError, match="round 7: the run has 5 finished rounds"):
        rayfed.replay(result.path, 7, 0)
    with pytest.raises(InputError, match="the first round is 1"):
        rayfed.replay(result.path, 0, 0)


def test_a_run_without_work_left_starts_no_ray(tables, monkeypatch):
    """It is complete, or it has ended early."""
    early = {"train.num_rounds": 9, "train.patience": 1, "train.lr": 1e-9}
    complete, ended_early = (
        rayfed.run({**tables, "name": name}, changes)
        for name, changes in (("complete", {}), ("early", early))
    )
    assert ended_early.rounds.num_rows < 9
    monkeypatch.setattr("ray.init", None)
    for result in (complete, ended_early):
        again = rayfed.resume(result.path, {"ray.mode": "on"})
        assert outcome(again) == outcome(result)


def paint(file):
    """Change a pixel of the first image."""
    table = pq.read_table(file)
    images = table["image"].to_pylist()
    images[0][0] ^= 1
    pq.write_table(table.set_column(0, "image", pa.array(images, table["image"].type)), file)


def teach(path):
    """Give the run's job another learning rate."""
    text = (path / "job.toml").read_text()
    assert "lr = 0.1\n" in text
    (path / "job.toml").write_text(text.replace("lr = 0.1\n", "lr = 0.2\n"))


OTHERS = {
    "training images": (lambda path, data: paint(data / "train.parquet"), "images or labels"),
    "test images": (lambda path, data: paint(data / "test.parquet"), "images or labels"),
    "job": (lambda path, data: teach(path), "train.lr is 0.1 there, 0.2 here"),
}
CONTINUE = {
    "resume": lambda path: rayfed.resume(path, {"train.num_rounds": 6}),
    "replay": lambda path: rayfed.replay(path, 5, 0),
    "clients": lambda path: rayfed.experiment.own_models(path),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("how", CONTINUE)
def test_nothing_continues_from_a_checkpoint_of_another_job_or_of_other_data(
    tables, tmp_path, how, what
):
    change, says = OTHERS[what]
    # Client 0 is in each round.
    tables["train"]["clients_per_round"] = 4
    path = rayfed.run(tables).path
    CONTINUE[how](shutil.copytree(path, tmp_path / "same/run"))
    change(path, tmp_path / "data")
    before = files(path)
    with pytest.raises(InputError, match=f"belongs to another job: .*{says}"):
        CONTINUE[how](path)
    assert files(path) == before


def test_a_round_after_which_ray_may_end_the_process_has_a_checkpoint_at_once(tables, monkeypatch):
    """None is due after round 3."""
    recorded, there = [], {}
    monkeypatch.setattr(
        ThisProcess, "between_rounds", lambda self, round: recorded.append(round.round)
    )
    monkeypatch.setattr(ThisProcess, "may_end", lambda self: recorded[-1:] == [2])

    class Looks(Observer):
        def round(self, round):
            saved = newest(Folder(str(Path(tables["output"]["path"], "run/checkpoints"))))
            there[round.round] = saved and saved.round

    rayfed.run(tables, observers=[Looks()])
    assert there == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 4}


@dataclass(frozen=True)
class Poison(Part):
    """Reports NaN from every client."""

    def report(self, client, local, fit):
        return torch.tensor(float("nan")), None


def test_a_replay_fails_as_the_round_failed_that_could_not_be_averaged(tables, tmp_path):
    told = r"client (\d), round 1: its summand"
    with pytest.raises(RunFailed, match=told) as failed:
        rayfed.run(tables, method=compose(Poison()))
    client = int(re.search(told, str(failed.value))[1])
    with pytest.raises(RunFailed, match=told):
        rayfed.replay(tmp_path / "runs/run", 1, client, method=compose(Poison()))


def test_the_commands_resume_and_replay_work(tables, tmp_path):
    rayfed.run(tables, {"train.num_rounds": 3})
    path = str(tmp_path / "runs/run")
    run = CliRunner().invoke(main, ["resume", path, "-s", "train.num_rounds=5"])
    assert run.exit_code == 0, run.output
    assert [line.split("  ")[0] for line in run.stdout.splitlines()[6:8]] == [
        "round 4/5",
        "round 5/5",
    ]
    assert "continuing after round 3" in run.stderr
    client = read_table(tmp_path / "runs/run", "clients").to_pylist()[-1]["client"]
    again = CliRunner().invoke(main, ["replay", path, "--round", "5", "--client", str(client)])
    assert again.stdout.startswith(f"client {client}, round 5: 10 images, loss ")
    assert again.stdout.endswith("the run recorded the same loss\n")


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_ends_with_the_same_bits(tmp_path):
    """SIGKILL at random moments, many of them while a checkpoint is written.

    The killed run asks for so many rounds that even a fast machine has not made them when it is
    killed. Afterwards it and a second run that nobody kills end at the same round.
    """
    settings = [
        "model.name=lenet",
        "method=scaffold",
        "ray.mode=off",
        "train.local_steps=1",
        "output.every=1",
        f"output.path={tmp_path}",
    ]

    def run(name, num_rounds, *arguments):
        job = str(Path(__file__).resolve().parents[2] / "jobs/quickstart.toml")
        words = []
        for setting in [*settings, f"name={name}", f"train.num_rounds={num_rounds}"]:
            words += ["-s", setting]
        return subprocess.Popen(
            [sys.executable, "-m", "rayfed", "run", job, *words, *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )

    generator = random.Random(0)
    for _ in range(3):
        with run("killed", 10_000, "--resume") as process:
            for line in process.stdout:
                if line.startswith("round"):
                    break
            time.sleep(generator.uniform(0, 0.6))
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    last_round = 2 + max(
        int(path.name.removeprefix("round-").split(".")[0])
        for path in (tmp_path / "killed/checkpoints").glob("round-*.safetensors")
    )
    for name in ["killed", "whole"]:
        with run(name, last_round, "--resume") as process:
            process.communicate()
        assert process.returncode == 0
    checkpoint = f"checkpoints/round-{last_round:05d}.safetensors"
    killed, whole = ((tmp_path / name / checkpoint).read_bytes() for name in ["killed", "whole"])
    assert killed == whole
