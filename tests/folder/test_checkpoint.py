"""A checkpoint restores a round bit for bit; a damaged checkpoint, or one of another job, is refused."""

import json
import random
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import fs as pafs

from rayfed.base import storage
from rayfed.base.errors import InputError
from rayfed.base.storage import Folder
from rayfed.folder import checkpoint, packing
from rayfed.folder.checkpoint import Checkpoints
from rayfed.folder.provenance import hash_of_model
from rayfed.folder.saved import newest, stem
from rayfed.folder.tables import SCHEMAS
from rayfed.job import RayOptions
from rayfed.methods import RECIPES, fedavg, fedcsd, scaffold, switch
from rayfed.rounds.engine import rounds
from rayfed.runtime.this_process import ThisProcess


def rows(name, after):
    """The results so far: a row, but no confusions, which few runs have."""
    return pa.Table.from_pylist([{"round": 0}] if name != "confusions" else [], SCHEMAS[name])


METHODS = [
    pytest.param(
        switch(scaffold(), fedcsd(), at=3), 5, id="switch"
    ),  # states, memories, payloads and surveys
    *(
        pytest.param(recipe(), 3, id=name, marks=pytest.mark.slow)
        for name, recipe in RECIPES.items()
    ),
]


def checkpoints(folder, site, saved=None):
    hashes = {
        "data": site.federation.hash(),
        "partition": site.federation.dealt.hash(),
        "model": hash_of_model(site),
    }
    origin = {**hashes, "modules": {}}
    return Checkpoints(Folder(str(folder)), site.job, origin, saved)


def save(folder, played, site, *numbers):
    """Follow the played rounds, and write the checkpoints of the given numbers."""
    made = checkpoints(folder, site)
    for round in played:
        if round.round > numbers[-1]:
            break
        made.follow(round)
        if round.round in numbers:
            made.save(round, ThisProcess(site), rows)
    return made


@pytest.mark.parametrize(("method", "num_rounds"), METHODS)
def test_every_method_continues_from_every_round_with_the_same_bits(
    method, num_rounds, make_site, play, bits, tmp_path
):
    site = make_site(method, norm=True, num_rounds=num_rounds)
    played = play(site)
    for number in range(num_rounds):
        save(tmp_path / str(number), played, site, number)
        fresh = make_site(method, norm=True, num_rounds=num_rounds)
        last = newest(Folder(str(tmp_path / str(number)))).restore(fresh, ThisProcess(fresh))
        on_disk = {
            key: value
            for key, value in bits(played[number]).items()
            if key not in ("clients", "bytes")
        }
        assert {key: bits(last)[key] for key in on_disk} == on_disk
        assert bits(next(rounds(fresh, ThisProcess(fresh), last))) == bits(played[number + 1])


def test_a_round_without_evaluation_is_restored_and_says_what_is_left_to_do(
    make_site, play, bits, tmp_path
):
    def site(num_rounds):
        return make_site(scaffold(), num_rounds=num_rounds, eval_every=3)

    played = play(site(7))
    save(tmp_path, played, site(7), 3, 4)
    for number, is_evaluated in ((3, True), (4, False)):
        saved = newest(Folder(str(tmp_path)), before=number + 1)
        last = saved.restore(site(7), ThisProcess(site(7)))
        assert (last.evaluation is not None) == is_evaluated
        later = rounds(site(7), ThisProcess(site(7)), last)
        assert [bits(round) for round in later] == [bits(round) for round in played[number + 1 :]]
        assert saved.leaves_work(site(7).job)
        assert saved.leaves_work(site(number).job) == (not is_evaluated), (
            "its last round is evaluated"
        )


def test_read_only_arrays_are_saved(make_site, play, tmp_path):
    """Arrays from Ray's store are read-only; torch would warn, and in tests a warning is an error."""
    site = make_site(fedavg())
    played = play(site)
    for round in played:
        round.evaluation.confusion.flags.writeable = round.peak.flags.writeable = False
    save(tmp_path, played, site, 3)
    last = newest(Folder(str(tmp_path))).restore(site, ThisProcess(site))
    assert np.array_equal(last.evaluation.confusion, played[3].evaluation.confusion)


def test_the_two_newest_are_kept_and_other_files_are_not_touched(make_site, play, tmp_path):
    site = make_site(scaffold(), num_rounds=6)
    (tmp_path / "thesis.txt").write_text("three years")
    (tmp_path / "round-00001.csv").write_text("mine")
    save(tmp_path, play(site), site, *range(7))
    names = {path.name for path in tmp_path.iterdir()}
    manifests = {"round-00005.json", "round-00006.json"}
    listed = [
        json.loads((tmp_path / name).read_text())["checkpoint"]["files"] for name in manifests
    ]
    assert names == {"thesis.txt", "round-00001.csv", "best.safetensors"} | manifests | {
        *listed[0],
        *listed[1],
    }


def test_a_clients_memory_is_written_only_when_it_is_new(make_site, play, tmp_path):
    site = make_site(scaffold(), num_rounds=2, clients_per_round=2)
    _, one, two = play(site)
    made = checkpoints(tmp_path, site)
    made.follow(one)
    made.save(one, ThisProcess(site), rows)
    shard, twin = sorted(tmp_path.glob("*.shard"), reverse=True)
    assert twin.read_bytes() == shard.read_bytes()
    content = shard.read_bytes()

    class Counting(ThisProcess):
        recalled = 0

        def recall(self, memory):
            Counting.recalled += 1
            return super().recall(memory)

    made.follow(two)
    made.save(two, Counting(site), rows)
    assert Counting.recalled == 2 < len(two.memories)
    assert shard.read_bytes() == content
    assert set(newest(Folder(str(tmp_path))).names) >= {
        shard.name,
        "round-00002.memories-000.shard",
    }


class Dies(Exception):
    pass


class Mortal(Folder):
    """Dies before its n-th change, like a killed process."""

    def __init__(self, place, changes):
        super().__init__(place)
        self.left = changes

    def _step(self):
        self.left -= 1
        if self.left < 0:
            raise Dies

    def write(self, name, *content):
        if self.left == 0:  # half of the content is on the disk, under its temporary name
            Path(self.place).mkdir(exist_ok=True)
            (Path(self.place) / f".{name}.tmp").write_bytes(
                b"".join(content)[: len(b"".join(content)) // 2]
            )
        self._step()
        super().write(name, *content)

    def delete(self, name):
        self._step()
        super().delete(name)


class Full(Folder):
    """A disk on which only some more files can be written, but every file can be deleted."""

    def __init__(self, place, room):
        super().__init__(place)
        self.room = room

    def write(self, name, *content):
        self.room -= 1
        if self.room < 0:
            raise OSError(28, "No space left on device")
        super().write(name, *content)


def test_a_checkpoint_that_cannot_be_written_leaves_no_file_of_its_own(
    make_site, play, bits, tmp_path
):
    """Its pieces would only fill the disk. The checkpoint before it stays, and the next one is whole."""
    site = make_site(scaffold(), num_rounds=3)
    played = play(site)
    for room in range(100):
        place = tmp_path / str(room)
        made = save(place, played, site, 1)
        before = {path.name: path.read_bytes() for path in place.iterdir()}
        made.follow(played[2])
        made._folder = Full(str(place), room)
        try:
            made.save(played[2], ThisProcess(site), rows)
        except OSError:
            after = {path.name: path.read_bytes() for path in place.iterdir()}
            del before["best.safetensors"], after["best.safetensors"]
            assert after == before
            assert made.round == newest(Folder(str(place))).round == 1
            made._folder = Folder(str(place))
            made.follow(played[3])
            made.save(played[3], ThisProcess(site), rows)
            last = newest(Folder(str(place)))
            restored = bits(last.restore(site, ThisProcess(site)))
            assert (last.round, restored["memories"]) == (3, bits(played[3])["memories"])
        else:
            assert room > 4
            return
    pytest.fail("it is never written")


@pytest.mark.parametrize("size", ["usual", "small"])
def test_a_kill_at_any_change_leaves_a_good_checkpoint(
    make_site, play, bits, tmp_path, monkeypatch, size
):
    """With small shards and none that may be thin, each memory has a shard, or is moved to another."""
    if size == "small":
        monkeypatch.setattr(packing, "SHARD", 2000)
        monkeypatch.setattr(packing, "THIN", 0)
    site = make_site(scaffold(), num_rounds=3)
    played = play(site)
    for changes in range(200):
        place = tmp_path / str(changes)
        made = save(place, played, site, 1)
        made.follow(played[2])
        made._folder = Mortal(str(place), changes)
        try:
            made.save(played[2], ThisProcess(site), rows)
        except Dies:
            saved = newest(Folder(str(place)))
            assert saved.round in (1, 2)
            assert (
                bits(saved.restore(site, ThisProcess(site)))["memories"]
                == bits(played[saved.round])["memories"]
            )
            fresh = make_site(scaffold(), num_rounds=3)
            # Continue over the files of the dead process, as a new process would.
            again = checkpoints(place, fresh, saved)
            for round in rounds(
                fresh, ThisProcess(fresh), saved.restore(fresh, ThisProcess(fresh))
            ):
                again.follow(round)
                again.save(round, ThisProcess(fresh), rows)
            assert bits(round) == bits(played[3])
            assert newest(Folder(str(place))).round == 3
        else:
            break
    assert changes > 5  # it died at each of these changes


def test_memories_move_only_from_shards_less_than_half_full_of_which_there_are_too_many(
    monkeypatch,
):
    monkeypatch.setattr(packing, "SHARD", 100)
    monkeypatch.setattr(packing, "THIN", 2)
    half, thin, thinner = (
        packing.Extent("half", 0, 50),
        packing.Extent("thin", 0, 49),
        packing.Extent("thinner", 40, 50),
    )
    index = {0: half, 1: thin, 2: thinner, 3: packing.Extent("last", 0, 1)}
    assert packing.unmoved(index, {0, 1, 2}) == {0: half, 1: thin, 2: thinner}
    assert packing.unmoved(index, {0, 1, 2, 3}) == {0: half}


def test_there_are_few_shards_however_many_rounds_wrote_some(
    make_site, play, bits, tmp_path, monkeypatch
):
    """A shard of which little is in use is not kept for the sake of it; what is in use is kept."""
    monkeypatch.setattr(packing, "THIN", 2)
    site = make_site(scaffold(), num_rounds=12, clients_per_round=1)
    played, made = play(site), checkpoints(tmp_path, site)
    for number, round in enumerate(played):
        made.follow(round)
        made.save(round, ThisProcess(site), rows)
        saved = newest(Folder(str(tmp_path)))
        assert bits(saved.restore(site, ThisProcess(site)))["memories"] == bits(round)["memories"]
        assert len([name for name in saved.names if name.endswith(".shard")]) <= 2 * (2 + 1)
        if number % 3 == 2:  # as a new process would continue
            made = checkpoints(tmp_path, site, saved)
    assert len(round.memories) > 3, "so many shards there would be"
    assert len(list(tmp_path.glob("*.shard"))) <= 4 * (2 + 1)


def test_results_are_written_once(make_site, play, tmp_path, monkeypatch):
    """A checkpoint adds to the full files of those before; a kill, or a file that is gone, is noticed as ever."""
    monkeypatch.setattr(checkpoint, "ROWS", 3)
    site = make_site(fedavg(), num_rounds=11)
    everything = pa.table({"round": range(12)}, pa.schema([("round", pa.int64())]))
    asked = []

    def rows(name, after):
        asked.append((name, after))
        return everything.filter((pc.field("round") > after) & (pc.field("round") <= made.latest))

    made = checkpoints(tmp_path, site)
    for round in play(site):
        made.latest = round.round
        made.save(round, ThisProcess(site), rows)
        saved = newest(Folder(str(tmp_path)))
        assert saved.table("clients").column("round").to_pylist() == list(range(round.round + 1))
    assert asked[-1] == ("confusions", 8)
    assert [last for last, _ in saved.parts("rounds")] == [2, 5, 8, 11]
    assert {file.name for file in tmp_path.iterdir()} == saved.names | newest(
        Folder(str(tmp_path)), before=11
    ).names
    (tmp_path / "round-00005.clients.parquet").unlink()
    assert newest(Folder(str(tmp_path))).round == 11, "it has a twin"
    (tmp_path / "round-00005.clients-twin.parquet").unlink()
    with pytest.raises(
        InputError, match=r"(?s)round 11.*'round-00005.clients-twin.parquet' is missing.*round 10"
    ):
        newest(Folder(str(tmp_path)))


def test_any_damage_to_a_checkpoint_is_noticed(make_site, play, tmp_path, caplog):
    site = make_site(scaffold())
    whole = tmp_path / "whole"
    save(whole, play(site), site, 1, 2)
    generator = random.Random(0)
    older = set(json.loads((whole / "round-00001.json").read_text())["checkpoint"]["files"])
    for path in sorted(whole.iterdir()):
        if (
            path.name in older
            or path.name in ("round-00001.json", "best.safetensors")
            or path.suffix == ".shard"
        ):
            continue  # a shard has a twin
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
            assert path.name in caplog.text or (tear, path.suffix) == ("remove", ".json")
            if (tear, path.name) != (
                "remove",
                "round-00002.json",
            ):  # without this file, no file names the checkpoint
                assert "the checkpoint of round 2 cannot be used" in caplog.text
                assert "the last good checkpoint is of round 1" in caplog.text
            shutil.rmtree(torn)


def test_an_unknown_version_is_skipped_and_is_an_error_if_no_other_is_left(
    make_site, play, tmp_path, caplog
):
    site = make_site(fedavg())
    save(tmp_path, play(site), site, 1, 2)
    for number in (2, 1):
        path = tmp_path / f"{stem(number)}.json"
        path.write_text(path.read_text().replace('"version": 5', '"version": 99'))
        if number == 2:
            assert newest(Folder(str(tmp_path))).round == 1
            assert "it has version 99, and this rayfed reads version 5 alone" in caplog.text
    with pytest.raises(InputError, match=r"(?s)version 99.*version 99.*holds no good checkpoint"):
        newest(Folder(str(tmp_path)))


def test_another_jobs_checkpoint_is_refused_with_the_differences(make_site, play, tmp_path):
    site = make_site(fedavg())
    save(tmp_path, play(site), site, 1)
    saved = newest(Folder(str(tmp_path)))
    saved.refuse_another(make_site(fedavg(), num_rounds=99, ray=RayOptions(mode="off")))
    differences = r"seed is 0 there, 1 here; train\.lr is 0\.1 there, 0\.5 here$"
    with pytest.raises(InputError, match=f"belongs to another job: {differences}"):
        saved.refuse_another(make_site(fedavg(), seed=1, lr=0.5))
    with pytest.raises(
        InputError, match="belongs to another job: the images or labels have changed since"
    ):
        saved.refuse_another(make_site(fedavg(), counts=[[1, 1, 1, 1]] * 4))
    with pytest.raises(InputError, match="is not of this model: "):
        saved.restore(make_site(fedavg(), norm=True), ThisProcess(site))


def test_checkpoints_work_on_another_file_system(make_site, play, bits, tmp_path, monkeypatch):
    memory = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory")))
    monkeypatch.setattr(storage, "locate", lambda place: (memory, place.removeprefix("memory://")))
    site = make_site(scaffold())
    played = play(site)
    place = "memory://bucket/runs/one"
    assert newest(Folder(place)) is None
    save(place, played, site, 1, 2, 3)
    assert sum(name.endswith(".json") for name in Folder(place).names()) == 2
    assert (
        bits(newest(Folder(place)).restore(site, ThisProcess(site)))["memories"]
        == bits(played[3])["memories"]
    )
    assert not list(tmp_path.iterdir())
