"""One writer at a time: a lock on a run's folder, and the owner's name in a folder of checkpoints, which may lie where
no lock exists."""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import platform
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.base.errors import InputError, Locked
from rayfed.base.files import open_regular, read_regular

if TYPE_CHECKING:  # it brings pyarrow, which `rayfed status` does not need
    from rayfed.base.storage import Folder

LOCK, OWNER = ".lock", ".owner"
FLOCK = "hhqqi4x"  # `struct flock` of 64-bit Linux: type, whence, start, length, process
LEASES = (
    180  # seconds: two leases of an NFS server, which keeps the locks of a lost machine for one
)
# How a file system without locks answers: NFS without a lock server, Lustre without `-o flock`, some of FUSE.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
WHOLE_FILE = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

log = logging.getLogger(__name__)


def lock(path: Path, name: str = LOCK, words: str = "") -> int:
    """A lock on a folder, held until the descriptor is closed or its process ends. Raises `InputError` and `Locked`.

    It is a lock of `fcntl` on a file, which NFS carries to its server; a lock of `flock` stays on the client. And it
    belongs to the open file, not to the process as that of `lockf`: a second run in this process is refused too, and
    the lock is not lost when something in this process reads the file. On a file system without locks nothing is
    locked, with a warning.
    """
    try:
        # Closed to other users: whoever can read a file can lock it, and hold the run up.
        file = open_regular(path / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _take(file, path, name)
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        raise InputError(
            f"'{path}' cannot be locked: {error}; give another output.path, such as a folder on a local disk"
        ) from None
    with suppress(OSError):  # a disk without room; the words are only for messages
        os.ftruncate(file, 0)
        os.pwrite(file, (words or _this_process()).encode(), 0)
    return file


def _take(file: int, path: Path, name: str) -> None:
    """Lock an open file. A holder that is not seen from here may be a lost machine's: its lock is waited for."""
    for second in count():
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, WHOLE_FILE)
            return
        except BlockingIOError:
            holder = _first_line(path / name)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _warn_of_no_locks(path, error.strerror)
            return
        number, _, host = holder.removeprefix("process ").partition(" on ")
        if (host == platform.node() and os.path.exists(f"/proc/{number}")) or second == LEASES:
            raise Locked(f"'{path}' is being written to by {holder}: wait for it, or stop it")
        if second == 0:
            log.warning(
                "'%s' is locked by %s, which may be lost: waiting for its lock to end, %d seconds at most",
                path,
                holder,
                LEASES,
            )
        time.sleep(1)


@functools.cache
def _warn_of_no_locks(path: Path, why: str) -> None:
    """Say, once for each folder, that nothing keeps a second run out of it."""
    log.warning(
        "'%s' cannot be locked (%s): its file system has no locks, so that nothing keeps a second run from writing "
        "there; start no other run of this name, or let output.path name a folder on a local disk",
        path,
        why,
    )


def is_locked(path: Path, name: str = LOCK) -> bool:
    """Whether a process holds the lock on a run's folder, as far as can be seen from here."""
    try:
        file = open_regular(path / name, os.O_RDONLY)
    except PermissionError:  # another user's, who may be at work
        return True
    except OSError:
        return False
    try:
        found, *_ = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_OFD_GETLK, WHOLE_FILE))
        return found != fcntl.F_UNLCK
    except OSError:
        return False
    finally:
        os.close(file)


@contextmanager
def owning(folder: Folder) -> Iterator[Callable[[], None]]:
    """Take a folder of checkpoints for this run. Yields a check, which raises `InputError` once another has taken it.

    A local folder is locked for as long as the context lasts. On other file systems the folder belongs to the run that
    took it last, because a run that was killed cannot give it back.
    """
    words = f"{_this_process()}\n{uuid.uuid4()}\n"

    def check() -> None:
        try:
            found = folder.read(OWNER).decode(errors="replace")
        except FileNotFoundError:  # somebody has emptied the folder
            folder.write(OWNER, words.encode())
            return
        if found != words:
            raise InputError(
                f"'{folder.place}' is now written to by {found.partition(chr(10))[0]}: runs of one name cannot share "
                "output.checkpoints, give one of them another name"
            )

    if folder.local is None:
        folder.write(OWNER, words.encode())
        yield check
        return
    folder.local.mkdir(parents=True, exist_ok=True)
    file = lock(folder.local, OWNER, words)
    try:
        yield check
    finally:
        os.close(file)


def _this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _first_line(file: Path) -> str:
    try:
        return read_regular(file).decode(errors="replace").partition("\n")[0] or "another process"
    except OSError:
        return "another process"
