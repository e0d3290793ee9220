"""Keep a Ray's folder closed to the other users of its machine.

Whoever can write into it can run code as the user that runs Ray. Ray gives its folders the mode
0777, so what protects them is a folder above them that other users cannot enter.
"""

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import psutil

from rayfed.base.errors import InputError, Unwritable
from rayfed.base.files import PASSING

# The variable that --trust-this-machine sets: the machine's other users need not be kept out.
TRUST = "RAYFED_TRUST_THIS_MACHINE"
# How to start a Ray that only its user can use: with a token, in a folder that only this user can
# enter. They say `$(id -u)`, as a container may have no USER. The README, the pages on security and
# on clusters have the same lines.
STEPS = (
    "(umask 077 && ray get-auth-token --generate > /dev/null)",
    "export RAY_AUTH_MODE=token",
    "mkdir -m 700 /tmp/ray-$(id -u)",
    "export RAY_TMPDIR=/tmp/ray-$(id -u)",
    "ray start --head --disable-usage-stats",
)
RECIPE = "; ".join(STEPS)
# The same in a message that has a line for each command.
LINES = "\n  ".join(["to start a Ray that stays, type:", *STEPS])
# The most bytes in the path of the folder of our Rays. A socket's path is longer by 68 at most, and
# may have 107.
LONGEST = 39
# The folder where temporary files usually lie.
USUAL = "/tmp"
# The user who owns, as a container sees it, what belongs to users that the container does not have.
NOBODY = 65534


def way_in(place: Path) -> Path | None:
    """Return the folder through which another user could change what is in `place`.

    Return None if there is none, or none is seen. Root is trusted. A folder that other users cannot
    enter closes all that lies in it.
    """
    trusted = {0, os.getuid()}
    # Only Linux has containers that know but some of the machine's users.
    with suppress(OSError):
        users = Path("/proc/self/uid_map").read_text().split()
        if users != ["0", "0", "4294967295"]:
            trusted.add(NOBODY)
    # The first path has the links on the way, and the second one what they lead to.
    for path in (place.absolute(), Path(os.path.realpath(place))):
        with suppress(OSError):
            from_the_root = list(reversed(path.parents))
            from_the_root.append(path)
            for folder in from_the_root:
                status = folder.lstat()
                mode = 0o1777 if stat.S_ISLNK(status.st_mode) else status.st_mode
                if status.st_uid in trusted and not mode & 0o011:
                    break
                if status.st_uid not in trusted or (mode & 0o022 and not mode & stat.S_ISVTX):
                    return folder
    return None


def refuse_open(place: str, ray: str) -> None:
    """Raise `InputError` where another user could write into the folder `place` of a Ray.

    `ray` names that Ray in the message.
    """
    entrance = None if os.environ.get(TRUST) else way_in(Path(place))
    if entrance:
        raise InputError(
            f"{ray}: other users of this machine can change what that Ray runs, in its folder "
            f"'{place}', through '{entrance}'; stop it (`ray stop` ends every Ray of yours on this "
            f"machine), then start it in a folder that only you can enter (`{RECIPE}`); or, if you "
            f"trust them all, give --trust-this-machine (in a script, set {TRUST}=1)"
        )


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a folder for a Ray of this process, closed to other users, and locked.

    Raise `InputError` if there can be none.

    It is removed in the end; after an error it stays, with its logs, until this user's next Ray is
    started: that removes what dead processes have left, and ends what they have left running.
    """
    claimed, lock = _claimed()
    with lock:
        yield claimed
        remove(claimed)


def home() -> Path:
    """Return this user's folder for all Rays of rayfed.

    It is in TMPDIR, or in /tmp where that is too long or open to others. Raise `InputError` where
    neither will do, or `Unwritable` where it may help to try again.
    """
    variable = _named()
    bases = [os.environ[variable], USUAL] if variable else [USUAL]
    for base in bases:
        place = Path(base, f"rayfed.{os.getuid()}").absolute()
        with _with_the_way_on(base), suppress(FileExistsError):
            place.mkdir(mode=0o700)
        is_closed = place.is_dir() and not way_in(place) and not place.stat().st_mode & 0o077
        is_short = len(os.fsencode(place)) <= LONGEST
        if is_short and (is_closed or (place.is_dir() and os.environ.get(TRUST))):
            return place
    raise InputError(
        f"Ray cannot be started here: '{place}' is not a folder that only you can enter; make it "
        "one (`chmod 700`), or let TMPDIR name a folder of yours with a short path"
    )


def _claimed() -> tuple[Path, TextIO]:
    """Return a new folder for a Ray, and its lock, which lasts until it is closed.

    Remove what dead processes have left.
    """
    place = home()
    with _with_the_way_on(str(place.parent)), open(place / "lock", "a") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        for earlier in place.iterdir():
            if not earlier.is_dir():
                continue
            # The lock is taken as long as the earlier folder's process lives.
            with suppress(BlockingIOError), open(earlier / "lock", "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(earlier)
        number = 0
        while (place / str(number)).exists():
            number += 1
        claimed = place / str(number)
        claimed.mkdir()
        lock = open(claimed / "lock", "a")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
    return claimed, lock


def _named() -> str:
    """Return the variable that names the folder for Ray's files; '' if none is set."""
    return next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), "")


@contextmanager
def _with_the_way_on(base: str) -> Iterator[None]:
    """Raise one sentence in place of an OSError.

    It is `Unwritable` where it may help to try again, else `InputError`.
    """
    variable = _named()
    place = f"'{base}'"
    if variable and os.environ[variable] == base:
        place = f"{variable} = {place}"
    try:
        yield
    except OSError as error:
        kind = Unwritable if error.errno in PASSING else InputError
        raise kind(
            f"Ray cannot be started here: {place}: its files cannot be put there "
            f"({error.strerror}); let TMPDIR name a folder of yours that can be written to, on a "
            "local disk, with a short path"
        ) from None


def kill_rays_in(path: Path) -> int:
    """Kill what a Ray has left running in its folder; return how many processes there were."""
    processes = _rays_in(path)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return len(processes)


def is_raylet_in(path: Path) -> bool:
    """Say whether the raylet, the process of a Ray's node, is running in a Ray's folder."""
    for process in _rays_in(path):
        with suppress(psutil.Error):
            if process.cmdline()[0].endswith("/raylet"):
                return True
    return False


def remove(path: Path) -> None:
    """End what a dead Ray has left running, and remove its folder.

    It is removed once no process can write there.
    """
    # Ten seconds: so long may live, on a busy machine, what was just killed, or started.
    for _ in range(500):
        if not kill_rays_in(path):
            break
        time.sleep(0.02)
    shutil.rmtree(path, ignore_errors=True)


def _rays_in(path: Path) -> list[psutil.Process]:
    """Return this user's processes of Ray with a file open below `path`.

    Ray renames its workers and agents once they are up; before, they run files of its package.
    Other processes may read its logs.
    """
    # The import takes a second, and commands without a Ray read this file too.
    import ray

    inside = f"{os.path.realpath(path)}/"
    package = f"{Path(ray.__file__).parent}/"
    processes = []
    for process in psutil.process_iter():
        # The process may be another user's, or have ended.
        with suppress(psutil.Error):
            if process.pid == os.getpid() or process.uids().real != os.getuid():
                continue
            command = " ".join(process.cmdline())
            if not command.startswith("ray") and package not in command:
                continue
            files = [os.path.realpath(file.path) for file in process.open_files()]
            if any(file.startswith(inside) for file in files):
                processes.append(process)
    return processes
