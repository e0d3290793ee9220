"""A Ray's folder, and the other users of its machine: who can write into it can run code as the
user that runs Ray.

Ray gives its folders the mode 0777, so what protects them is a folder above them that other users
cannot enter.
"""

import fcntl
import os
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rayfed.base.errors import InputError, Unwritable
from rayfed.base.files import PASSING

# Set by --trust-this-machine: its other users need not be kept out.
TRUST = "RAYFED_TRUST_THIS_MACHINE"
# How to start a Ray that only its user can use: with a token, in a folder that only this user can
# enter. `$(id -u)`, as a container may have no USER. The README, the pages on security and on
# clusters have the same lines.
STEPS = (
    "(umask 077 && ray get-auth-token --generate > /dev/null)",
    "export RAY_AUTH_MODE=token",
    "mkdir -m 700 /tmp/ray-$(id -u)",
    "export RAY_TMPDIR=/tmp/ray-$(id -u)",
    "ray start --head --disable-usage-stats",
)
RECIPE = "; ".join(STEPS)
# Bytes of the folder of our Rays: a socket's path is longer by 68 at most, and may have 107.
LONGEST = 39
# Where temporary files lie.
USUAL = "/tmp"
# Owns, as a container sees it, what belongs to users that the container does not have.
NOBODY = 65534


def way_in(place: Path) -> Path | None:
    """The folder through which another user could change what is in `place`; None if there is none,
    or none is seen.

    Root is trusted. A folder that other users cannot enter closes all that lies in it.
    """
    everybody = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    trusted = {0, os.getuid(), 0 if everybody else NOBODY}
    # Links on the way, and what they lead to.
    for way in (
        place.absolute(),
        Path(os.path.realpath(place)),
    ):
        with suppress(OSError):
            for folder in (*reversed(way.parents), way):
                status = folder.lstat()
                mode = 0o1777 if stat.S_ISLNK(status.st_mode) else status.st_mode
                if status.st_uid in trusted and not mode & 0o011:
                    break
                if status.st_uid not in trusted or (mode & 0o022 and not mode & stat.S_ISVTX):
                    return folder
    return None


def refuse_open(place: str, ray: str) -> None:
    """Raises `InputError` where another user could write into the folder `place` of the Ray that
    `ray` names.
    """
    way = None if os.environ.get(TRUST) else way_in(Path(place))
    if way:
        raise InputError(
            f"{ray}: other users of this machine can change what that Ray runs, in its folder "
            f"'{place}', through '{way}'; stop it (`ray stop` ends every Ray of yours on this "
            f"machine), then start it in a folder that only you can enter (`{RECIPE}`); or, if you "
            f"trust them all, give --trust-this-machine (in a script, set {TRUST}=1)"
        )


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for a Ray of this process, closed to other users, and locked.

    Raises `InputError` if there can be none.

    It is removed in the end; after an error it stays, with its logs, until this user's next Ray is
    started: that removes what dead processes have left, and ends what they have left running.
    """
    own, lock = _claimed()
    with lock:
        yield own
        remove(own)


def home() -> Path:
    """This user's folder for all Rays of rayfed: in TMPDIR, or in /tmp where that is too long or
    open to others.
    """
    named = _named()
    bases = [os.environ[named], USUAL] if named else [USUAL]
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
    """A new folder for a Ray, and its lock, which lasts until it is closed.

    Removes what dead processes have left.
    """
    place = home()
    with _with_the_way_on(str(place.parent)), open(place / "lock", "a") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        for old in filter(Path.is_dir, place.iterdir()):
            with suppress(BlockingIOError), open(old / "lock", "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(old)
        number = 0
        while (place / str(number)).exists():
            number += 1
        own = place / str(number)
        own.mkdir()
        lock = open(own / "lock", "a")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
    return own, lock


def _named() -> str:
    """The variable that names the folder for Ray's files; '' if none is set."""
    return next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), "")


@contextmanager
def _with_the_way_on(base: str) -> Iterator[None]:
    """Raise one sentence in place of an OSError: `Unwritable` where it may help to try again, else
    `InputError`.
    """
    named = _named()
    place = f"{named} = '{base}'" if named and os.environ[named] == base else f"'{base}'"
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
    """Kill what a Ray has left running in its folder; how many processes there were."""
    left = _rays_in(path)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return len(left)


def is_raylet_in(path: Path) -> bool:
    """Return whether the raylet, the process of a Ray's node, is running in a Ray's folder."""
    for process in _rays_in(path):
        with suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if command.partition(b"\0")[0].endswith(b"/raylet"):
                return True
    return False


def remove(path: Path) -> None:
    """End what a dead Ray has left running, and remove its folder, once none of it can write there."""
    # Ten seconds: what was just killed, or started, on a busy machine.
    for _ in range(500):
        if not kill_rays_in(path):
            break
        time.sleep(0.02)
    shutil.rmtree(path, ignore_errors=True)


def _rays_in(path: Path) -> list[int]:
    """This user's processes of Ray with a file open below `path`.

    Ray renames its workers and agents once they are up; before, they run files of its package.
    Other processes may read its logs.
    """
    # Takes a second, and commands without a Ray read this file too.
    import ray

    inside, package = f"{os.path.realpath(path)}/", os.fsencode(f"{Path(ray.__file__).parent}/")
    found = []
    for process in {*Path("/proc").glob("[1-9]*")} - {Path(f"/proc/{os.getpid()}")}:
        # Another user's, or it has ended.
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            rays = process.stat().st_uid == os.getuid() and (
                command.startswith(b"ray") or package in command
            )
            if rays and any(
                os.path.realpath(file).startswith(inside) for file in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
    return found
