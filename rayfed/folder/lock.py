"""Locks: one writer at a time in a run's folder and in a folder of checkpoints."""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.base.errors import InputError, Locked

if TYPE_CHECKING:
    # This imports pyarrow, which `rayfed status` does not need.
    from rayfed.base.storage import Folder

LOCK, OWNER = ".lock", ".owner"
# A reader may hold the lock for so many seconds to see whether a run has it.
GLANCE = 1.0
# A file system without locks answers so: NFS without a lock server, Lustre without `-o flock`, and
# some file systems of FUSE.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Hold the lock of a folder. Raises `Locked`, with the holder's name, if it is taken.

    It is a lock of `flock`, which the kernel gives back however the process ends. Linux carries it
    to an NFS server as a lock on the complete file, so other machines see it too. On a file system
    without locks nothing is locked, and a warning says so.
    """
    try:
        # Other users must not read the file, because whoever can read it can lock it.
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _cannot_be_locked(folder, error) from None
    try:
        _take(file, folder, name)
        os.ftruncate(file, 0)
        os.pwrite(file, _this_process().encode(), 0)
        yield
    finally:
        os.close(file)


def _take(file: int, folder: Path, name: str) -> None:
    """Lock an open file. Raises `Locked` if another process still holds the lock after `GLANCE`."""
    end = time.monotonic() + GLANCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                break
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise _cannot_be_locked(folder, error) from None
            _warn_of_no_locks(folder, error.strerror)
            return
        time.sleep(0.05)
    try:
        holder = (folder / name).read_bytes().decode(errors="replace") or "another process"
    except OSError:
        holder = "another process"
    raise Locked(f"'{folder}' is being written to by {holder}: wait for it, or stop it")


def _cannot_be_locked(folder: Path, error: OSError) -> InputError:
    """Return the error for a folder that cannot be locked."""
    return InputError(
        f"'{folder}' cannot be locked: {error}; "
        "give another output.path, such as a folder on a local disk"
    )


@functools.cache
def _warn_of_no_locks(folder: Path, error: str) -> None:
    """Warn, once for each folder, that nothing keeps a second run out of it."""
    log.warning(
        "'%s' cannot be locked (%s): its file system has no locks, so that nothing keeps a second "
        "run from writing there; start no other run of this name, or let output.path name a folder "
        "on a local disk",
        folder,
        error,
    )


def is_locked(folder: Path, name: str = LOCK) -> bool:
    """Say whether a process holds the lock of a folder, as far as this machine can see."""
    try:
        file = os.open(folder / name, os.O_RDONLY)
    except PermissionError:
        # The file belongs to another user, whose run may be at work.
        return True
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)


@contextmanager
def owning(folder: Folder) -> Iterator[Callable[[], None]]:
    """Take a folder of checkpoints, and yield a check that it still belongs to this run.

    The check raises `InputError` if another run has taken the folder. A local folder is locked. An
    object store has no locks: there the newest run has the folder, because a run that was killed
    cannot give it back.
    """
    if folder.local is not None:
        folder.local.mkdir(parents=True, exist_ok=True)
        with locked(folder.local, OWNER):
            yield lambda: None
        return
    this_owner = f"{_this_process()}\n{uuid.uuid4()}\n"
    folder.write(OWNER, this_owner.encode())

    def check() -> None:
        try:
            owner = folder.read(OWNER).decode(errors="replace")
        except FileNotFoundError:
            # Somebody has emptied the folder.
            folder.write(OWNER, this_owner.encode())
            return
        if owner != this_owner:
            other = owner.partition("\n")[0]
            raise InputError(
                f"'{folder.place}' is now written to by {other}: runs of one name cannot share "
                "output.checkpoints, give one of them another name"
            )

    yield check


def _this_process() -> str:
    """Return the name by which messages call this process."""
    return f"process {os.getpid()} on {platform.node()}"
