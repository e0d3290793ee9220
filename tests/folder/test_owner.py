"""One writer at a time: in a run's folder by a lock, in a folder of checkpoints also where no lock exists."""

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
from rayfed.base import storage
from rayfed.base.errors import InputError, Locked
from rayfed.base.storage import Folder
from rayfed.experiment import Display
from rayfed.folder import owner
from rayfed.folder.owner import is_locked, lock

THIS = re.escape(f"process {os.getpid()} on {platform.node()}")
LOCKF = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def in_memory(files):
    """Places at memory:// on this file system, and all others where they are."""
    usual = storage.locate
    return lambda place: (
        (files, place.removeprefix("memory://")) if "://" in place else usual(place)
    )


def locked_for_others(path):
    """Whether `lockf` in another process, as on another client of an NFS, finds the folder locked."""
    done = subprocess.run(
        [sys.executable, "-c", LOCKF, path / ".lock"], capture_output=True, text=True
    )
    return done.returncode != 0 and "BlockingIOError" in done.stderr


def test_the_lock_is_one_that_nfs_carries_and_lasts_until_it_is_given_back(tmp_path):
    """Neither a reader nor a forked child in between takes it away, as each would take a lock of `lockf`."""
    held = lock(tmp_path)
    assert (tmp_path / ".lock").stat().st_mode & 0o077 == 0, "who can read it can lock it"
    shutil.copytree(tmp_path, tmp_path / "copy")
    if (child := os.fork()) == 0:
        os.close(held)
        os._exit(0)
    os.waitpid(child, 0)
    assert locked_for_others(tmp_path) and is_locked(tmp_path)
    with pytest.raises(Locked, match=f"is being written to by {THIS}: wait for it, or stop it"):
        lock(tmp_path)
    os.close(held)
    assert not locked_for_others(tmp_path) and not is_locked(tmp_path)
    assert not is_locked(tmp_path / "copy")


HOLD = """
import sys, pathlib, rayfed.folder.owner as owner
held = owner.lock(pathlib.Path(sys.argv[1]), words=sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ends", [True, False])
def test_the_lock_of_a_lost_machine_is_waited_for_and_a_run_may_be_begun_again(
    tmp_path, monkeypatch, caplog, ends
):
    """On NFS it ends after a while; where it does not, the exit code says that it may help to try again."""
    monkeypatch.setattr(owner, "LEASES", 2)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path, "process 1 on lost"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        if ends:
            monkeypatch.setattr(owner.time, "sleep", lambda seconds: holder.communicate())
            os.close(lock(tmp_path))
        else:
            with pytest.raises(
                Locked, match="is being written to by process 1 on lost: wait for it"
            ) as refused:
                lock(tmp_path)
            assert refused.value.exit_code == 75
            holder.communicate()
    assert (
        caplog.text.count("is locked by process 1 on lost, which may be lost: waiting for its lock")
        == 1
    )


@pytest.mark.parametrize("writes", ["before", "after"], ids=["whole", "replaced"])
def test_a_run_whose_folder_is_taken_while_it_writes_its_manifest_takes_the_manifest_back(
    tables, tmp_path, monkeypatch, writes
):
    """Where no lock exists, as on S3; a manifest that the new owner has put in its place stays."""
    files = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory")))
    monkeypatch.setattr(storage, "locate", in_memory(files))
    tables["output"]["checkpoints"] = place = f"memory://{tmp_path}"
    write = Folder.write

    def taken(self, name, *content):
        write(self, name, *content)
        if name == "round-00002.json":
            write(self, owner.OWNER, b"process 1 on another\n")
            if writes == "after":
                write(self, name, b"the new owner's")

    monkeypatch.setattr(Folder, "write", taken)
    with pytest.raises(
        InputError, match="is now written to by process 1 on another: runs of one name cannot share"
    ):
        rayfed.run(tables)
    manifests = {name for name in Folder(f"{place}/run").names() if name.endswith(".json")}
    assert manifests == {"round-00001.json"} | (
        {"round-00002.json"} if writes == "after" else set()
    )


def test_an_error_that_is_no_other_holder_is_reported_as_itself(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(InputError, match=r"cannot be locked: \[Errno 21\] Is a directory"):
        lock(tmp_path)


@pytest.mark.parametrize("number", owner.NO_LOCKS)
def test_a_run_on_a_file_system_without_locks_goes_on_with_one_warning(
    tables, tmp_path, monkeypatch, caplog, number
):
    lock_file = owner.fcntl.fcntl

    def without(file, command, *rest):
        if command in (owner.fcntl.F_OFD_SETLK, owner.fcntl.F_OFD_GETLK):
            raise OSError(number, os.strerror(number))
        return lock_file(file, command, *rest)

    monkeypatch.setattr(owner.fcntl, "fcntl", without)
    result = rayfed.run(tables)
    assert result.path.is_dir() and not is_locked(result.path)
    warned = (
        f"'{result.path}' cannot be locked ({os.strerror(number)}): its file system has no locks"
    )
    assert caplog.text.count(warned) == 1 and "let output.path name" in caplog.text


@pytest.fixture(params=["local", "elsewhere"])
def shared(request, tmp_path, monkeypatch, tables):
    """A place of checkpoints for all runs: a local folder, or on a file system that has no locks."""
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
    """The second begins in the midst of the first: a lock refuses it; without locks, the first gives way to it."""
    # The second stands for a run of another process, which this one would not let begin.
    monkeypatch.setattr("rayfed.experiment.alone", lambda name: nullcontext())
    other = {"seed": 1, "output.path": str(tmp_path / "other")}

    class Second(Display):
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
        assert rayfed.run(tables, display=display).rounds.num_rows == 6
        assert re.search(f"shared/run' is being written to by {THIS}: wait for it", display.ended)
        winner = tmp_path / "runs/run"
    else:
        with pytest.raises(
            InputError, match=f"is now written to by {THIS}: runs of one name cannot share"
        ) as given_up:
            rayfed.run(tables, display=display)
        assert "rounds up to 2 are recorded" in given_up.value.__notes__[0]
        winner = display.ended
        assert winner == tmp_path / "other/run"
    resumed = rayfed.resume(winner, {"train.num_rounds": 6})
    assert resumed.rounds.num_rows == 7
