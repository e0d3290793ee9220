"""One writer at a time: in a run's folder by a lock, in a folder of checkpoints also where no lock
exists.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext

import fsspec
import pytest
from pyarrow import fs as pafs

import rayfed
from rayfed import Observer
from rayfed.base import storage
from rayfed.base.errors import InputError, Locked
from rayfed.folder import lock
from rayfed.folder.lock import is_locked, locked

THIS = re.escape(f"process {os.getpid()} on {platform.node()}")
FLOCK = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def in_memory(files):
    """Places at memory:// on this file system, and all others where they are."""
    usual = storage.locate
    return lambda place: (
        (files, place.removeprefix("memory://")) if "://" in place else usual(place)
    )


def locked_for_others(path):
    """Whether another process finds the folder locked."""
    done = subprocess.run(
        [sys.executable, "-c", FLOCK, path / ".lock"], capture_output=True, text=True
    )
    return done.returncode != 0 and "BlockingIOError" in done.stderr


def test_the_lock_lasts_until_it_is_given_back(tmp_path):
    """Neither a reader nor a forked child in between takes it away."""
    with locked(tmp_path):
        assert (tmp_path / ".lock").stat().st_mode & 0o077 == 0, "who can read it can lock it"
        shutil.copytree(tmp_path, tmp_path / "copy")
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert locked_for_others(tmp_path) and is_locked(tmp_path)
        with pytest.raises(
            Locked, match=f"is being written to by {THIS}: wait for it, or stop it"
        ) as refused:
            with locked(tmp_path):
                pass
        assert refused.value.exit_code == 75
    assert not locked_for_others(tmp_path) and not is_locked(tmp_path)
    assert not is_locked(tmp_path / "copy")


HOLD = """
import sys, pathlib, rayfed.folder.lock as lock
with lock.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lock_of_a_killed_process_is_gone_at_once(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as it:
        assert it.stdout.readline() == b"held\n" and is_locked(tmp_path)
        with pytest.raises(Locked, match=f"is being written to by process {it.pid} on "):
            with locked(tmp_path):
                pass
        it.kill()
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        pass


def test_an_error_that_is_no_other_holder_is_reported_as_itself(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(InputError, match=r"cannot be locked: \[Errno 21\] Is a directory"):
        with locked(tmp_path):
            pass


@pytest.mark.parametrize("number", lock.NO_LOCKS)
def test_a_run_on_a_file_system_without_locks_goes_on_with_one_warning(
    tables, tmp_path, monkeypatch, caplog, number
):
    def without(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", without)
    result = rayfed.run(tables)
    assert result.path.is_dir() and not is_locked(result.path)
    warned = (
        f"'{result.path}' cannot be locked ({os.strerror(number)}): its file system has no locks"
    )
    assert caplog.text.count(warned) == 1 and "let output.path name" in caplog.text


@pytest.fixture(params=["local", "elsewhere"])
def shared(request, tmp_path, monkeypatch, tables):
    """A place of checkpoints for all runs: a local folder, or on a file system that has no
    locks.
    """
    if request.param == "elsewhere":
        files = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory")))
        monkeypatch.setattr(storage, "locate", in_memory(files))
    tables["output"]["checkpoints"] = (
        str(tmp_path / "shared") if request.param == "local" else f"memory://{tmp_path}"
    )
    return request.param


def test_two_runs_of_one_name_do_not_delete_each_others_checkpoints(
    tables, tmp_path, shared, monkeypatch
):
    """The second begins in the midst of the first: a lock refuses it; without locks, the first
    gives way to it.
    """
    # The second stands for a run of another process, which this one would not let begin.
    monkeypatch.setattr("rayfed.experiment.alone", lambda name: nullcontext())
    other = {"seed": 1, "output.path": str(tmp_path / "other")}

    class Second(Observer):
        def round(self, round):
            if round.round == 1:
                self.ended = Second.attempt()

        @staticmethod
        def attempt():
            try:
                return rayfed.run(tables, other, force=True).path
            except Locked as error:
                return str(error)

    display = Second()
    if shared == "local":
        assert rayfed.run(tables, observers=[display]).rounds.num_rows == 6
        assert re.search(f"shared/run' is being written to by {THIS}: wait for it", display.ended)
        winner = tmp_path / "runs/run"
    else:
        with pytest.raises(
            InputError, match=f"is now written to by {THIS}: runs of one name cannot share"
        ) as given_up:
            rayfed.run(tables, observers=[display])
        assert "rounds up to 2 are recorded" in given_up.value.__notes__[0]
        winner = display.ended
        assert winner == tmp_path / "other/run"
    resumed = rayfed.resume(winner, {"train.num_rounds": 6})
    assert resumed.rounds.num_rows == 7
