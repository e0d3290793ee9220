"""The runs of this folder that work on this machine.

For each there is its process, a way to follow it and a way to stop it.
"""

import os
import platform
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rayfed.base.errors import InputError, NoRay, nearest
from rayfed.folder.lock import LOCK, is_locked
from rayfed.folder.summary import status_of
from rayfed.runtime.address import ELSEWHERE

HOLDER = re.compile(r"process (\d+) on (.+)")
# The seconds between two looks at a run.
POLL = 0.2
# The seconds that a run has to keep its finished rounds.
STOP_LIMIT = 90.0


@dataclass(frozen=True)
class LocalRun:
    """A run's folder, and the name that the user gave."""

    name: str
    path: Path

    @property
    def is_running(self) -> bool:
        """Say whether a process writes to the folder, as far as can be seen from here."""
        return is_locked(self.path)

    @property
    def status(self) -> str:
        """Return the status of the run, as `rayfed status` says it."""
        return status_of(self.path)

    def process(self) -> int:
        """Return the number of the process that writes to the folder.

        The lock's file names the process, which must have that file open: the number alone may by
        now be another process, or one of another machine or container. Raises `InputError` if it is
        not a process of this machine and user.
        """
        lock = self.path / LOCK
        try:
            words = lock.read_bytes().decode(errors="replace").partition("\n")[0]
        except OSError as error:
            raise InputError(f"'{lock}' cannot be read: {error}") from None
        match = HOLDER.fullmatch(words)
        if match is None:
            raise InputError(f"'{lock}' does not say which process runs {self.name}")
        number, host = int(match[1]), match[2]
        if host != platform.node():
            raise InputError(
                f"{self.name} runs on {host}, as process {number}: stop it there, with `kill "
                f"{number}`"
            )
        if not _has_open(number, lock):
            raise InputError(
                f"{self.name} is written to by process {number}, which is another user's, or of "
                "another container: stop it where it was started"
            )
        return number

    def follow(self, show: Callable[[str], None]) -> None:
        """Show the log, and what is added to it until the run ends."""
        shown = 0
        while True:
            # This is asked before the log is read, as the log grows until the run has ended.
            running = self.is_running
            text = self.log()
            show(text[shown:])
            shown = len(text)
            if not running:
                return
            time.sleep(POLL)

    def log(self) -> str:
        """Return everything in the run's log so far.

        Raises `InputError` if it cannot be read.
        """
        try:
            return (self.path / "log.txt").read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise InputError(f"'{self.path / 'log.txt'}' cannot be read: {error}") from None

    def stop(self) -> bool:
        """Ask the run to stop, wait until it has kept its finished rounds, and say if it has ended.

        Raises `InputError` if its process is not of this machine and user, or works for a Ray.
        """
        number = self.process()
        if _command(number).startswith("ray::"):
            raise InputError(
                f"{self.name} is a run of a grid, which Ray would begin again: stop the whole "
                "grid, by Ctrl-C or `kill` of its command `rayfed run`"
            )
        try:
            os.kill(number, signal.SIGTERM)
        except PermissionError:
            raise InputError(
                f"{self.name} runs as process {number} of another user, who alone can stop it"
            ) from None
        except ProcessLookupError:
            # The process has just ended.
            pass
        end = time.monotonic() + STOP_LIMIT
        while self.is_running and _has_open(number, self.path / LOCK) and time.monotonic() < end:
            time.sleep(POLL)
        return not _has_open(number, self.path / LOCK)


def local_run(name: str, root: Path) -> LocalRun | None:
    """Return the run below `root` that has this name, or the run in the folder of this path.

    If there is none, it is None.
    """
    for path in (root / name, Path(name)):
        # An error is a name that no path can have.
        with suppress(OSError, ValueError):
            if any((path / file).is_file() for file in ("summary.json", "log.txt")):
                return LocalRun(name, path)
    return None


def unknown_run(name: str, root: Path, error: InputError) -> InputError:
    """Return the error for a name that is no run below `root`, and that no cluster has.

    `error` says why no cluster has it. The new error names the run below `root` that was probably
    meant. A run of this name there was not looked for if the user named a cluster: then `error`
    says all.
    """
    runs = [file.parent.relative_to(root).as_posix() for file in root.rglob("summary.json")]
    if name in runs:
        return error
    near = nearest(name, runs, 0.6)
    meant = f" (did you mean '{near}'?)" if near else ""
    # This error says that no Ray answers, and the user has named no cluster.
    if isinstance(error, NoRay):
        return InputError(
            f"'{name}': no run of this name in {root}{meant}, and no Ray cluster answers on this "
            f"machine\n`rayfed status` lists the runs of this folder\n{ELSEWHERE}"
        )
    return InputError(f"'{name}': no run of this name in {root}{meant}; {error}")


def _has_open(number: int, file: Path) -> bool:
    """Say whether a process has a file open.

    The answer is no for a process of another user, or of another container.
    """
    try:
        every = psutil.Process(number).open_files()
    except (OSError, psutil.Error):
        return False
    for opened in every:
        # A file that the process had open may be gone by now, as the temporary ones of tables are.
        with suppress(OSError):
            if os.path.samefile(opened.path, file):
                return True
    return False


def _command(number: int) -> str:
    """Return what a process calls itself; '' if it has ended."""
    with suppress(psutil.Error):
        return " ".join(psutil.Process(number).cmdline())
    return ""
