"""A checkpoint restores a round bit for bit; a damaged checkpoint, or one of another job, is
refused.
"""

import random
import shutil
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import fs as pafs

from rayfed.base import storage
from rayfed.base.errors import InputError
from rayfed.base.storage import Folder
from rayfed.folder import checkpoint
from rayfed.folder.checkpoint import newest, stem
from rayfed.folder.checkpointer import Checkpointer as Checkpoints
from rayfed.folder.provenance import hash_of_model
from rayfed.folder.tables import RESULTS, SCHEMAS
from rayfed.job import RayOptions
from rayfed.methods import RECIPES, fedavg, fedcsd, scaffold, switch
from rayfed.rounds.engine import rounds
from rayfed.runtime.this_process import ThisProcess

# The results so far: a row, but no confusions, which few runs have.
rows = {
    name: pa.Table.from_pylist([{"round": 0}] if name != "confusions" else [], SCHEMAS[name])
    for name in RESULTS
}


METHODS = [
    # States, memories, payloads and surveys.
    pytest.param(switch(scaffold(), fedcsd(), at=3), 5, id="switch"),
    *(
        pytest.param(recipe(), 3, id=name, marks=pytest.mark.slow)
        for name, recipe in RECIPES.items()
    ),
]


def checkpoints(folder, setup, saved=None):
    hashes = {
        "data": setup.federation.hash(),
        "contents": setup.federation.contents(),
        "partition": setup.federation.dealt.hash(),
        "model": hash_of_model(setup),
    }
    origin = {**hashes, "modules": {}}
    return Checkpoints(Folder(str(folder)), setup.job, origin, saved)


def save(folder, played, setup, *numbers):
    """Follow the played rounds, and write the checkpoints of the given numbers."""
    made = checkpoints(folder, setup)
    for round in played:
        if round.round > numbers[-1]:
            break
        made.follow(round)
        if round.round in numbers:
            made.save(round, ThisProcess(setup), rows)
    return made


@pytest.mark.parametrize(("method", "num_rounds"), METHODS)
def test_every_method_continues_from_every_round_with_the_same_bits(
    method, num_rounds, make_setup, play, bits, tmp_path
):
    setup = make_setup(method, norm=True, num_rounds=num_rounds)
    played = play(setup)
    for number in range(num_rounds):
        save(tmp_path / str(number), played, setup, number)
        fresh = make_setup(method, norm=True, num_rounds=num_rounds)
        last = newest(Folder(str(tmp_path / str(number)))).restore(fresh, ThisProcess(fresh))
        on_disk = {
            key: value
            for key, value in bits(played[number]).items()
            if key not in ("clients", "bytes")
        }
        assert {key: bits(last)[key] for key in on_disk} == on_disk
        assert bits(next(rounds(fresh, ThisProcess(fresh), last))) == bits(played[number + 1])


def test_a_round_without_evaluation_is_restored_and_says_what_is_left_to_do(
    make_setup, play, bits, tmp_path
):
    def setup(num_rounds):
        return make_setup(scaffold(), num_rounds=num_rounds, eval_every=3)

    played = play(setup(7))
    save(tmp_path, played, setup(7), 3, 4)
    for number, is_evaluated in ((3, True), (4, False)):
        saved = newest(Folder(str(tmp_path)), before=number + 1)
        last = saved.restore(setup(7), ThisProcess(setup(7)))
        assert (last.evaluation is not None) == is_evaluated
        later = rounds(setup(7), ThisProcess(setup(7)), last)
        assert [bits(round) for round in later] == [bits(round) for round in played[number + 1 :]]
        assert saved.leaves_work(setup(7).job)
        assert saved.leaves_work(setup(number).job) == (not is_evaluated), (
            "its last round is evaluated"
        )


def test_read_only_arrays_are_saved(make_setup, play, tmp_path):
    """Arrays from Ray's store are read-only; torch would warn, and in tests a warning is an
    error.
    """
    setup = make_setup(fedavg())
    played = play(setup)
    for round in played:
        round.evaluation.confusion.flags.writeable = round.peak.flags.writeable = False
    save(tmp_path, played, setup, 3)
    last = newest(Folder(str(tmp_path))).restore(setup, ThisProcess(setup))
    assert np.array_equal(last.evaluation.confusion, played[3].evaluation.confusion)


def test_the_two_newest_are_kept_and_other_files_are_not_touched(make_setup, play, tmp_path):
    setup = make_setup(scaffold(), num_rounds=6)
    (tmp_path / "thesis.txt").write_text("three years")
    (tmp_path / "round-00001.csv").write_text("mine")
    save(tmp_path, play(setup), setup, *range(7))
    (tmp_path / "memories").mkdir(exist_ok=True)
    (tmp_path / "memories/mine.txt").write_text("mine")
    save(tmp_path, play(setup), setup, *range(7))
    names = {path.name for path in tmp_path.rglob("*")}
    kept = newest(Folder(str(tmp_path))).names | newest(Folder(str(tmp_path)), before=6).names
    assert {name[:11] for name in kept if name.startswith("round")} == {
        "round-00005",
        "round-00006",
    }
    assert (
        names
        == {"thesis.txt", "round-00001.csv", "best.safetensors", "memories", "mine.txt"} | kept
    )


def test_a_clients_memory_is_written_only_when_it_is_new(make_setup, play, tmp_path):
    setup = make_setup(scaffold(), num_rounds=2, clients_per_round=2)
    _, one, two = play(setup)
    made = checkpoints(tmp_path, setup)
    made.follow(one)
    made.save(one, ThisProcess(setup), rows)
    files = {file: file.read_bytes() for file in tmp_path.glob("memories/*")}
    assert len(files) == 2

    class Counting(ThisProcess):
        recalled = 0

        def recall(self, memory):
            Counting.recalled += 1
            return super().recall(memory)

    made.follow(two)
    made.save(two, Counting(setup), rows)
    assert Counting.recalled == 2 < len(two.memories)
    assert (
        files.items() <= {file: file.read_bytes() for file in tmp_path.glob("memories/*")}.items()
    )


class Dies(Exception):
    pass


@contextmanager
def mortal(changes):
    """Die before the n-th change of a folder, like a killed process: nothing is changed any
    more.
    """
    write, delete, left = Folder.write, Folder.delete, changes

    def step():
        nonlocal left
        left -= 1
        if left < 0:
            raise Dies

    def written(self, name, *content):
        # Half of the content is on the disk, under its temporary name.
        if left == 0:
            Path(self.place).mkdir(exist_ok=True, parents=True)
            (Path(self.place) / f".{name}.tmp").write_bytes(
                b"".join(content)[: len(b"".join(content)) // 2]
            )
        step()
        write(self, name, *content)

    def deleted(self, name):
        step()
        delete(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "write", written)
        patch.setattr(Folder, "delete", deleted)
        patch.setattr(checkpoint, "THREADS", 1)
        yield


@contextmanager
def full(room):
    """A disk on which only some more files can be written, but every file can be deleted."""
    write, left = Folder.write, room

    def written(self, name, *content):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        write(self, name, *content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "write", written)
        yield


def files_in(place):
    """The content of each file in a folder, but for the best weights."""
    files = [path for path in place.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if path.name != "best.safetensors"}


def test_a_checkpoint_that_cannot_be_written_leaves_no_file_of_its_own(
    make_setup, play, bits, tmp_path
):
    """Its pieces would only fill the disk.

    The checkpoint before it stays, and the next is whole.
    """
    setup = make_setup(scaffold(), num_rounds=3)
    played = play(setup)
    for room in range(100):
        place = tmp_path / str(room)
        made = save(place, played, setup, 1)
        before = files_in(place)
        made.follow(played[2])
        try:
            with full(room):
                made.save(played[2], ThisProcess(setup), rows)
        except OSError:
            assert files_in(place) == before
            assert made.round == newest(Folder(str(place))).round == 1
            made.follow(played[3])
            made.save(played[3], ThisProcess(setup), rows)
            last = newest(Folder(str(place)))
            restored = bits(last.restore(setup, ThisProcess(setup)))
            assert (last.round, restored["memories"]) == (3, bits(played[3])["memories"])
        else:
            assert room > 4
            return
    pytest.fail("it is never written")


def test_a_kill_at_any_change_leaves_a_good_checkpoint(make_setup, play, bits, tmp_path):
    setup = make_setup(scaffold(), num_rounds=3)
    played = play(setup)
    for changes in range(200):
        place = tmp_path / str(changes)
        made = save(place, played, setup, 1)
        made.follow(played[2])
        try:
            with mortal(changes):
                made.save(played[2], ThisProcess(setup), rows)
        except Dies:
            saved = newest(Folder(str(place)))
            assert saved.round in (1, 2)
            assert (
                bits(saved.restore(setup, ThisProcess(setup)))["memories"]
                == bits(played[saved.round])["memories"]
            )
            fresh = make_setup(scaffold(), num_rounds=3)
            # Continue over the files of the dead process, as a new process would.
            again = checkpoints(place, fresh, saved)
            for round in rounds(
                fresh, ThisProcess(fresh), saved.restore(fresh, ThisProcess(fresh))
            ):
                again.follow(round)
                again.save(round, ThisProcess(fresh), rows)
            assert bits(round) == bits(played[3])
            assert newest(Folder(str(place))).round == 3
            kept = newest(Folder(str(place))).names | newest(Folder(str(place)), before=3).names
            there = {
                file.name
                for file in place.rglob("*")
                if file.is_file() and not file.name.startswith(".")
            }
            assert there <= kept | {"best.safetensors"}, "nothing is left of the dead process"
        else:
            break
    # It died at each of these changes.
    assert changes > 9


def test_any_damage_to_a_checkpoint_is_noticed(make_setup, play, tmp_path, caplog):
    setup = make_setup(scaffold())
    whole = tmp_path / "whole"
    save(whole, play(setup), setup, 1, 2)
    generator = random.Random(0)
    older = newest(Folder(str(whole)), before=2).names
    for path in sorted(file for file in whole.rglob("*") if file.is_file()):
        if path.name in older or path.name == "best.safetensors":
            continue
        inside = path.relative_to(whole)
        for tear in ("cut", "flip", "remove"):
            torn = tmp_path / "torn"
            shutil.copytree(whole, torn)
            content = bytearray(path.read_bytes())
            if tear == "remove":
                (torn / inside).unlink()
            elif tear == "cut":
                (torn / inside).write_bytes(content[: generator.randrange(len(content) - 2)])
            else:
                content[generator.randrange(len(content) - 2)] ^= 1 << generator.randrange(7)
                (torn / inside).write_bytes(content)
            caplog.clear()
            assert newest(Folder(str(torn))).round == 1, (path.name, tear)
            assert path.name in caplog.text or (tear, path.suffix) == ("remove", ".json")
            # Without this file, no file names the checkpoint.
            if (tear, path.name) != (
                "remove",
                "round-00002.json",
            ):
                assert "the checkpoint of round 2 cannot be used" in caplog.text
                assert "the last good checkpoint is of round 1" in caplog.text
            shutil.rmtree(torn)


def test_an_unknown_version_is_skipped_and_is_an_error_if_no_other_is_left(
    make_setup, play, tmp_path, caplog
):
    setup = make_setup(fedavg())
    save(tmp_path, play(setup), setup, 1, 2)
    for number in (2, 1):
        path = tmp_path / f"{stem(number)}.json"
        path.write_text(path.read_text().replace('"version": 6', '"version": 99'))
        if number == 2:
            assert newest(Folder(str(tmp_path))).round == 1
            assert "it has version 99, and this rayfed reads version 6 alone" in caplog.text
    with pytest.raises(InputError, match=r"(?s)version 99.*version 99.*holds no good checkpoint"):
        newest(Folder(str(tmp_path)))


def test_another_jobs_checkpoint_is_refused_with_the_differences(make_setup, play, tmp_path):
    setup = make_setup(fedavg())
    save(tmp_path, play(setup), setup, 1)
    saved = newest(Folder(str(tmp_path)))
    saved.refuse_another(make_setup(fedavg(), num_rounds=99, ray=RayOptions(mode="off")))
    differences = r"seed is 0 there, 1 here; train\.lr is 0\.1 there, 0\.5 here\n"
    with pytest.raises(InputError, match=f"belongs to another job: {differences}"):
        saved.refuse_another(make_setup(fedavg(), seed=1, lr=0.5))
    with pytest.raises(
        InputError, match="belongs to another job: the images or labels have changed since"
    ):
        saved.refuse_another(make_setup(fedavg(), counts=[[1, 1, 1, 1]] * 4))
    with pytest.raises(InputError, match="is not of this model: "):
        saved.restore(make_setup(fedavg(), norm=True), ThisProcess(setup))


def test_checkpoints_work_on_another_file_system(make_setup, play, bits, tmp_path, monkeypatch):
    memory = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory")))
    monkeypatch.setattr(storage, "locate", lambda place: (memory, place.removeprefix("memory://")))
    setup = make_setup(scaffold())
    played = play(setup)
    place = "memory://bucket/runs/one"
    assert newest(Folder(place)) is None
    save(place, played, setup, 1, 2, 3)
    assert sum(name.endswith(".json") for name in Folder(place).names()) == 2
    assert (
        bits(newest(Folder(place)).restore(setup, ThisProcess(setup)))["memories"]
        == bits(played[3])["memories"]
    )
    assert not list(tmp_path.iterdir())
