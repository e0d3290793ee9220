"""Stop anywhere, go on, and the bits are those of a run that never stopped; what is torn or another's is refused."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from pyarrow import fs as pafs
from safetensors.torch import load_file

import rayfed
from rayfed import storage
from rayfed.checkpoint import Checkpoints, newest, refuse_another, stem
from rayfed.cli import main
from rayfed.experiment import Silent
from rayfed.job import make_job
from rayfed.methods import RECIPES, Part, compose, fedavg, fedcsd, scaffold, switch
from rayfed.record import Unwritable
from rayfed.replay import replay
from rayfed.rounds import rounds
from rayfed.runtime.here import Here
from rayfed.storage import Folder
from rayfed.values import InputError

JOB = make_job({"name": "any"})
TABLES = {name: pa.table({"round": [0]}) for name in ("rounds", "clients", "classes")}


def save(folder, played, site, number):
    """Follow the rounds up to one, and write its checkpoint."""
    made = Checkpoints(Folder(str(folder)), JOB, "data")
    for round in played[: number + 1]:
        made.follow(round)
    made.save(played[number], Here(site), TABLES)
    return made


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_method_goes_on_from_every_round_with_the_same_bits(name, norm, make_site, play, bits, tmp_path):
    site = make_site(RECIPES[name](), norm=norm, num_rounds=4)
    played = play(site)
    for number in range(4):
        save(tmp_path / str(number), played, site, number)
        fresh = make_site(RECIPES[name](), norm=norm, num_rounds=4)
        last = newest(Folder(str(tmp_path / str(number)))).restore(fresh, Here(fresh))
        on_disk = {key: value for key, value in bits(played[number]).items() if key not in ("clients", "bytes")}
        assert {key: bits(last)[key] for key in on_disk} == on_disk
        assert [bits(r) for r in rounds(fresh, last, Here(fresh))] == [bits(r) for r in played[number + 1 :]]


def test_figures_that_cannot_be_written_to_are_saved_as_well(make_site, play, tmp_path):
    """As those are that come from Ray's store; torch would warn, and a warning is an error here."""
    site = make_site(fedavg())
    played = play(site)
    for round in played:
        round.evaluation.confusion.flags.writeable = round.peak.flags.writeable = False
    save(tmp_path, played, site, 3)
    last = newest(Folder(str(tmp_path))).restore(site, Here(site))
    assert np.array_equal(last.evaluation.confusion, played[3].evaluation.confusion)


def test_a_switch_of_methods_goes_on_on_either_side(make_site, play, bits, tmp_path):
    method = switch(scaffold(), fedcsd(), at=3)
    site = make_site(method, num_rounds=5)
    played = play(site)
    for number in (1, 2, 3, 4):
        save(tmp_path / str(number), played, site, number)
        fresh = make_site(method, num_rounds=5)
        last = newest(Folder(str(tmp_path / str(number)))).restore(fresh, Here(fresh))
        assert [bits(r) for r in rounds(fresh, last, Here(fresh))] == [bits(r) for r in played[number + 1 :]]


def test_the_weights_can_be_used_by_others(make_site, play, tmp_path):
    site = make_site(fedavg())
    played = play(site)
    save(tmp_path, played, site, 3)
    loaded = load_file(tmp_path / "round-00003.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in played[3].weights.items())
    assert loaded.keys() == played[3].weights.keys()


def test_the_newest_two_are_kept_and_nothing_else_is_touched(make_site, play, tmp_path):
    site = make_site(scaffold(), num_rounds=6)
    (tmp_path / "thesis.txt").write_text("three years")
    (tmp_path / "round-00001.csv").write_text("mine")
    made = Checkpoints(Folder(str(tmp_path)), JOB, "data")
    for round in play(site):
        made.follow(round)
        made.save(round, Here(site), TABLES)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"thesis.txt", "round-00001.csv"} <= names
    assert sorted(name for name in names if name.endswith(".json")) == ["round-00005.json", "round-00006.json"]
    listed = [json.loads((tmp_path / f"{stem(n)}.json").read_text())["checkpoint"]["files"] for n in (5, 6)]
    manifests = {"round-00005.json", "round-00006.json"}
    assert names == {"thesis.txt", "round-00001.csv"} | manifests | {*listed[0], *listed[1]}


def test_what_a_client_remembers_is_written_only_when_it_is_new(make_site, play, tmp_path):
    site = make_site(scaffold(), num_rounds=2, clients_per_round=2)
    _, one, two = play(site)
    made = Checkpoints(Folder(str(tmp_path)), JOB, "data")
    made.follow(one)
    made.save(one, Here(site), TABLES)
    kept = {path.name for path in tmp_path.glob("client-*")}
    assert kept == {f"client-{row.client:05d}-round-00001.safetensors" for row in one.clients}

    class Counting(Here):
        recalled = 0

        def recall(self, memory):
            Counting.recalled += 1
            return super().recall(memory)

    made.follow(two)
    made.save(two, Counting(site), TABLES)
    assert Counting.recalled == 2 < len(two.memories)


class Dies(Exception):
    pass


class Mortal(Folder):
    """Dies before its n-th change, as a process that is killed."""

    def __init__(self, place, changes):
        super().__init__(place)
        self.left = changes

    def _step(self):
        self.left -= 1
        if self.left < 0:
            raise Dies

    def write(self, name, content):
        if self.left == 0:  # half of it is on the disk, under the name that it has meanwhile
            Path(self.place).mkdir(exist_ok=True)
            (Path(self.place) / f".{name}.tmp").write_bytes(content[: len(content) // 2])
        self._step()
        super().write(name, content)

    def delete(self, name):
        self._step()
        super().delete(name)


def test_killed_at_any_moment_of_writing_the_one_before_is_whole(make_site, play, bits, tmp_path):
    site = make_site(scaffold(), num_rounds=3)
    played = play(site)
    changes = 0
    for changes in range(200):
        place = tmp_path / str(changes)
        made = save(place, played, site, 1)
        made.follow(played[2])
        made._folder = Mortal(str(place), changes)
        try:
            made.save(played[2], Here(site), TABLES)
        except Dies:
            saved = newest(Folder(str(place)))
            assert saved.round in (1, 2)
            fresh = make_site(scaffold(), num_rounds=3)
            # Go on as a new process would, over what the dead one left.
            again = Checkpoints(Folder(str(place)), JOB, "data", saved)
            for round in rounds(fresh, saved.restore(fresh, Here(fresh)), Here(fresh)):
                again.follow(round)
                again.save(round, Here(fresh), TABLES)
            assert bits(round) == bits(played[3])
            assert newest(Folder(str(place))).round == 3
        else:
            break
    assert changes > 5  # there were so many moments


def test_any_byte_that_changes_is_noticed(make_site, play, tmp_path, caplog):
    site = make_site(scaffold())
    played = play(site)
    whole = tmp_path / "whole"
    made = save(whole, played, site, 1)
    made.follow(played[2])
    made.save(played[2], Here(site), TABLES)
    generator = random.Random(0)
    older = set(json.loads((whole / "round-00001.json").read_text())["checkpoint"]["files"])
    for path in sorted(whole.iterdir()):
        if path.name in older or path.name == "round-00001.json":
            continue
        for tear in ("cut", "flip", "remove"):
            torn = tmp_path / "torn"
            shutil.copytree(whole, torn)
            content = bytearray(path.read_bytes())
            if tear == "remove":
                (torn / path.name).unlink()
            elif tear == "cut":
                (torn / path.name).write_bytes(content[: generator.randrange(len(content) - 2)])
            else:
                content[generator.randrange(len(content) - 2)] ^= 1 << generator.randrange(7)
                (torn / path.name).write_bytes(content)
            caplog.clear()
            assert newest(Folder(str(torn))).round == 1, (path.name, tear)
            if (tear, path.name) != ("remove", "round-00002.json"):  # then nothing says that there was one
                assert "the checkpoint of round 2 cannot be used" in caplog.text
                assert "the last good one is of round 1" in caplog.text
            shutil.rmtree(torn)


def test_an_unknown_version_is_refused_and_where_no_other_is_left_it_is_an_error(make_site, play, tmp_path, caplog):
    site = make_site(fedavg())
    played = play(site)
    made = save(tmp_path, played, site, 1)
    made.save(played[2], Here(site), TABLES)
    for number in (2, 1):
        path = tmp_path / f"{stem(number)}.json"
        path.write_text(path.read_text().replace('"version": 1', '"version": 9'))
        if number == 2:
            assert newest(Folder(str(tmp_path))).round == 1
            assert "it has version 9, and this rayfed knows version 1" in caplog.text
    with pytest.raises(InputError, match=r"(?s)version 9.*version 9.*holds no good checkpoint"):
        newest(Folder(str(tmp_path)))


def test_another_jobs_checkpoint_is_refused_with_what_differs(make_site, play, tmp_path):
    site = make_site(fedavg())
    save(tmp_path, play(site), site, 1)
    saved = newest(Folder(str(tmp_path)))
    longer = replace(JOB, training=replace(JOB.training, num_rounds=99), ray=replace(JOB.ray, mode="off"))
    refuse_another(saved, longer, "data")
    with pytest.raises(
        InputError, match=r"belongs to another job: seed is 0 there, 1 here; train\.lr is 0\.01 there, 0"
    ):
        refuse_another(saved, replace(JOB, seed=1, training=replace(JOB.training, lr=0.5)), "data")
    with pytest.raises(InputError, match="the images or labels have changed since"):
        refuse_another(saved, JOB, "other data")
    with pytest.raises(InputError, match="is not one of this model: "):
        saved.restore(make_site(fedavg(), norm=True), Here(site))


def test_any_file_system_will_do(make_site, play, bits, tmp_path, monkeypatch):
    memory = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory")))
    monkeypatch.setattr(storage, "locate", lambda place: (memory, place.removeprefix("memory://")))
    site = make_site(scaffold())
    played = play(site)
    place = "memory://bucket/runs/one"
    assert newest(Folder(place)) is None
    made = save(place, played, site, 1)
    made.follow(played[2])
    made.save(played[2], Here(site), TABLES)
    made.follow(played[3])
    made.save(played[3], Here(site), TABLES)
    assert sum(name.endswith(".json") for name in Folder(place).names()) == 2
    assert bits(newest(Folder(place)).restore(site, Here(site)))["memories"] == bits(played[3])["memories"]
    assert not list(tmp_path.iterdir())


# Through `rayfed.run` and `rayfed.resume` -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Stops(Part):
    """Ends the run in a round, once; it remembers that in a file."""

    file: str
    round: int
    how: str = "ctrl-c"

    def begin(self, client):
        if client.round == self.round and not Path(self.file).exists():
            Path(self.file).touch()
            raise KeyboardInterrupt if self.how == "ctrl-c" else RuntimeError("as asked")


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setattr("rayfed.experiment._report", lambda path: None)  # the page takes longer than the run
    rng = np.random.default_rng(0)
    for split, rows in (("train", 40), ("test", 10)):
        images = pa.array(list(rng.integers(0, 256, (rows, 784), np.uint8)))
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(pa.table({"image": images, "label": np.arange(rows) % 2}), tmp_path / f"data/{split}.parquet")
    return {
        "name": "run",
        "method": "scaffold",
        "data": {"source": str(tmp_path / "data"), "partition": {"name": "iid", "num_clients": 4}},
        "model": {"name": "lenet"},
        "train": {"num_rounds": 5, "clients_per_round": 2, "lr": 0.1},
        "ray": {"mode": "off"},
        "output": {"path": str(tmp_path / "runs"), "every": 2},
    }


def outcome(result):
    """A run's numbers: all but how long it took."""
    tables = {name: getattr(result, name) for name in ("rounds", "clients", "classes")}
    numbers = {
        name: table.drop_columns([c for c in ("seconds",) if c in table.column_names]).to_pylist()
        for name, table in tables.items()
    }
    return numbers, {name: tensor.numpy().tobytes() for name, tensor in result.weights.items()}


@pytest.mark.parametrize("how", ["ctrl-c", "failure"])
@pytest.mark.parametrize("round", [1, 3, 5])
def test_a_run_that_was_stopped_goes_on_to_the_same_results(tables, tmp_path, round, how):
    whole = outcome(rayfed.run({**tables, "name": "whole"}))
    method = compose(scaffold(), Stops(str(tmp_path / "stopped"), round, how))
    with pytest.raises(BaseException) as stopped:
        rayfed.run(tables, method=method)
    assert isinstance(stopped.value, KeyboardInterrupt if how == "ctrl-c" else rayfed.local.ClientFailed)
    assert f"to go on after round {round - 1}: rayfed resume {tmp_path / 'runs/run'}" in stopped.value.__notes__
    result = rayfed.resume(tmp_path / "runs/run", method=method)
    assert outcome(result) == whole
    summary = json.loads((result.path / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("done", 5)
    resumed = json.loads((result.path / "environment.json").read_text())["resumed"]
    assert [entry["after_round"] for entry in resumed] == [round - 1]


def test_more_rounds_are_added_as_if_they_had_always_been_asked_for(tables, tmp_path):
    whole = outcome(rayfed.run({**tables, "name": "whole"}))
    rayfed.run(tables, {"train.num_rounds": 3})
    assert outcome(rayfed.resume(tmp_path / "runs/run", {"train.num_rounds": 5})) == whole
    assert outcome(rayfed.resume(tmp_path / "runs/run")) == whole  # nothing is left to do


def test_the_same_call_begins_a_run_and_goes_on_with_it(tables, tmp_path):
    whole = outcome(rayfed.run({**tables, "name": "whole"}, resume=True))
    method = compose(scaffold(), Stops(str(tmp_path / "stopped"), 4))
    with pytest.raises(KeyboardInterrupt):
        rayfed.run(tables, method=method, resume=True)
    assert outcome(rayfed.run(tables, method=method, resume=True)) == whole
    with pytest.raises(InputError, match="holds the results of another job of this name"):
        rayfed.run(tables, {"seed": 1}, resume=True)


def test_the_checkpoints_alone_are_enough(tables, tmp_path):
    whole = outcome(rayfed.run({**tables, "name": "whole"}))
    elsewhere = (tmp_path / "elsewhere").as_uri()
    rayfed.run(tables, {"train.num_rounds": 3, "output.checkpoints": elsewhere})
    with pytest.raises(InputError, match="holds checkpoints of a run of this name"):
        rayfed.run(tables, {"output.path": str(tmp_path / "other"), "output.checkpoints": elsewhere})
    shutil.rmtree(tmp_path / "runs/run")
    result = rayfed.resume(f"{elsewhere}/run", {"train.num_rounds": 5})
    assert (result.path, outcome(result)) == (tmp_path / "runs/run", whole)


def test_a_run_that_was_moved_goes_on_where_it_is(tables, tmp_path):
    whole = outcome(rayfed.run({**tables, "name": "whole"}))
    rayfed.run(tables, {"train.num_rounds": 3})
    (tmp_path / "moved").mkdir()
    (tmp_path / "runs/run").rename(tmp_path / "moved/here")
    result = rayfed.resume(tmp_path / "moved/here", {"train.num_rounds": 5})
    assert (result.path, outcome(result)) == (tmp_path / "moved/here", whole)
    assert not (tmp_path / "runs/run").exists()


def test_what_cannot_go_on_is_refused_and_left_as_it_is(tables, tmp_path):
    rayfed.run(tables)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for run, overrides, why in [
        ("nowhere", {}, "is neither the folder of a run nor one of checkpoints"),
        (tmp_path / "data", {}, "is neither the folder of a run nor one of checkpoints"),
        (tmp_path / "runs/run", {"train.lr": 0.5}, r"belongs to another job: train\.lr is 0\.1 there, 0\.5 here"),
        (tmp_path / "runs/run", {"method": "fedavg"}, "belongs to another job: method is"),
        (tmp_path / "runs/run", {"train.lrr": 1}, "unknown key 'lrr'"),
    ]:
        with pytest.raises(InputError, match=why):
            rayfed.resume(run, overrides)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    shutil.rmtree(tmp_path / "runs/run/checkpoints")
    with pytest.raises(InputError, match="holds no checkpoint to go on from; begin anew"):
        rayfed.resume(tmp_path / "runs/run")


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(tables, tmp_path, monkeypatch, caplog):
    def full(self, name, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "write", full)
    result = rayfed.run(tables)
    assert result.rounds.num_rows == 6
    assert "no checkpoint of round 2 was written ([Errno 28] No space left on device); there is none yet" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root to make a small disk")
def test_a_full_disk_costs_the_rounds_since_the_last_checkpoint(tables, tmp_path, caplog):
    """First a checkpoint has no room, and leaves nothing of it; then the results have none."""
    whole = rayfed.run(tables)
    (disk := tmp_path / "disk").mkdir()
    filler = disk / "filler"

    def fill(free=0):
        with suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - free)

    class Filling(Silent):
        def round(self, round):
            if round.round == 4:
                fill(free=2**18)  # for the weights, but not for the state

        def client(self, done, total):
            if filler.exists():
                fill()

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
    try:
        to_disk = {"output.path": str(disk)}
        with pytest.raises(Unwritable, match=r"the results of round 5 cannot be written to .*No space left") as error:
            rayfed.run(tables, to_disk, display=Filling())
        assert error.value.resumable
        assert "rounds up to 4 are recorded in" in error.value.__notes__[0]
        assert "to go on after round 2" in error.value.__notes__[1]
        assert "no checkpoint of round 4 was written" in caplog.text
        assert not list(disk.rglob("checkpoints/*round-00004*")) and not list(disk.rglob(".*.tmp"))
        filler.unlink()
        found = outcome(rayfed.resume(disk / "run", to_disk))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert found == outcome(whole)


def test_a_clients_round_can_be_seen_again(tables, tmp_path):
    result = rayfed.run(tables)
    row = result.clients.to_pylist()[-1]
    assert row["round"] == 5
    again, recorded = replay(result.path, 5, row["client"])
    assert again.train_loss == recorded == row["train_loss"]
    other = ({0, 1, 2, 3} - {r["client"] for r in result.clients.to_pylist() if r["round"] == 5}).pop()
    with pytest.raises(InputError, match=f"--client {other}: not in round 5, which has"):
        replay(result.path, 5, other)
    with pytest.raises(InputError, match="the first round is 1"):
        replay(result.path, 0, 0)


def test_the_commands_say_what_they_do(tables, tmp_path):
    rayfed.run(tables, {"train.num_rounds": 3})
    path = str(tmp_path / "runs/run")
    run = CliRunner().invoke(main, ["resume", path, "-s", "train.num_rounds=5"])
    assert run.exit_code == 0, run.output
    assert [line.split("  ")[0] for line in run.stdout.splitlines()[6:8]] == ["round 4/5", "round 5/5"]
    assert "going on after round 3" in run.stderr
    client = rayfed.experiment.read_table(tmp_path / "runs/run", "clients").to_pylist()[-1]["client"]
    again = CliRunner().invoke(main, ["replay", path, "--round", "5", "--client", str(client)])
    assert again.stdout.startswith(f"client {client}, round 5: 10 images, loss ")
    assert again.stdout.endswith("the run recorded the same loss\n")


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bits(tmp_path):
    """SIGKILL at random moments, of which many fall into the writing of checkpoints."""
    root = Path(__file__).resolve().parents[1]
    job = [str(root / "jobs/quickstart.toml"), "-s", "model.name=lenet", "-s", "method=scaffold", "-s", "ray.mode=off"]
    job += [
        "-s",
        "train.num_rounds=12",
        "-s",
        "train.local_steps=1",
        "-s",
        "output.every=1",
        "-s",
        f"output.path={tmp_path}",
    ]

    def command(*arguments):
        return subprocess.Popen([sys.executable, "-m", "rayfed", *arguments], stdout=subprocess.PIPE, text=True)

    with command("run", *job, "-s", "name=whole") as run:
        run.communicate()
    assert run.returncode == 0
    generator, kills = random.Random(0), 0
    while True:
        with command("run", *job, "-s", "name=killed", "--resume") as run:
            for line in run.stdout:
                if line.startswith("round") and kills < 5:
                    time.sleep(generator.uniform(0, 0.6))
                    run.send_signal(signal.SIGKILL)
                    kills += 1
                    break
        if run.returncode != -signal.SIGKILL:
            break
    assert (run.returncode, kills) == (0, 5)
    name = "checkpoints/round-00012.safetensors"
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
