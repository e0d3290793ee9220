"""A parent process that sees how a run ends: Ray ends a driver without a message when its node or
the head is lost.

The run is a child, in a process group of its own. The parent sends each signal on to it, waits, and
ends as the child did. Where the child ended without a message, the parent explains. Nothing simpler
can: Ray calls `_exit`, so the run itself reaches no handler, no `finally` and no `atexit`.
"""

import atexit
import ctypes
import io
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from rayfed.base.errors import STOPPED, Resumable, RunFailed
from rayfed.base.noted import STARTING, noted

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AWAITED = (*PASSED_ON, signal.SIGTSTP, signal.SIGCHLD)
# Of linux/prctl.h.
PR_SET_PDEATHSIG = 1
# The exit code with which Ray ends a process whose node is lost.
OF_RAY = 1
# Seconds within which the same signal counts once: `timeout` sends it twice, to the process and its
# group.
AGAIN = 0.5


class Unbroken(io.FileIO):
    """Standard output or error, whose reader may leave, as `head` does: the run continues, and its
    log has the rest.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def guarded(arguments: Sequence[str]) -> None:
    """Continue in a child process, which ends with its parent.

    In the parent, this never returns.
    """
    _keep_streams()
    said, say = os.pipe()
    # They stay pending until `sigwait` takes them: none is missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    child = os.fork()
    if child == 0:
        # It ends with its parent.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # Or a terminal's Ctrl-C would reach it twice.
        os.setpgid(0, 0)
        # It may still write to that terminal.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        # A process that ends without a message does not get here.
        atexit.register(os.write, say, b".")
        return
    os.close(say)
    sent: dict[int, float] = {}
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        number = signal.sigwait(AWAITED)
        # Ctrl-Z: stop both, until the shell continues both.
        if number == signal.SIGTSTP:
            os.kill(child, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(child, signal.SIGCONT)
        elif number in PASSED_ON and time.monotonic() > sent.get(number, 0.0) + AGAIN:
            sent[number] = time.monotonic()
            os.kill(child, number)
    # Processes that outlive the child may hold the other end.
    os.set_blocking(said, False)
    try:
        has_said = os.read(said, 1) != b""
    except BlockingIOError:
        has_said = False
    code = os.waitstatus_to_exitcode(ended[1])
    if -code in sent or (sent and (code == STOPPED or (has_said and code < 0))):
        # It had not begun; or it has said that it is stopped, and crashed on its way out, as a Ray
        # that was just starting may; or it has given such a start up.
        code, has_said = STOPPED, True
    _end_as(code, has_said, arguments, *noted())


def _keep_streams() -> None:
    """Let standard output and error take whatever is written to them, even where they are closed."""
    # Or the next file that is opened would get what is printed.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(spare, True)
    os.close(spare)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw, before = Unbroken(number, "w", closefd=False), getattr(sys, name)
        form = (
            {"encoding": before.encoding, "errors": before.errors}
            if before
            else {"errors": "backslashreplace"}
        )
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                io.BufferedWriter(raw), **form, line_buffering=number == 2 or raw.isatty()
            ),
        )


def _end_as(code: int, has_said: bool, arguments: Sequence[str], run: str, work: str) -> NoReturn:
    """End as a child did, at `work` of a `run`: `code` is its exit code, or minus the signal that
    killed it.
    """
    if sys.stderr.isatty() and not has_said:
        # A bar has hidden the cursor.
        print("\x1b[?25h", file=sys.stderr)
    if code < 0:
        _end_by(-code, _next_step(arguments), work)
    if not has_said:
        code = _explain(code, _next_step(arguments), run, work)
    sys.exit(code)


def _next_step(arguments: Sequence[str]) -> str:
    words = [word for word in arguments if word not in ("--force", "--resume")]
    if words[0] != "run":
        return f"to continue from its last checkpoint: rayfed {shlex.join(words)}"
    again = shlex.join([*words, "--resume"])
    return (
        f"to continue from its last checkpoint, or from the start if there is none: rayfed {again}"
    )


def _end_by(number: int, next_step: str, work: str) -> NoReturn:
    """End by the signal that has killed the child."""
    if number not in PASSED_ON:
        during = f" during {work}" if work else ""
        why = ", as a system does when it has no memory left" if number == signal.SIGKILL else ""
        print(
            f"error: the run's process was ended by {signal.Signals(number).name}{during}{why}",
            file=sys.stderr,
        )
        print(next_step, file=sys.stderr)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    # Where the signal is ignored here.
    sys.exit(128 + number)


def _explain(code: int, next_step: str, run: str, work: str) -> int:
    """Say why a child may have ended without a message; the exit code that this has."""
    ended = f"error: the run's process has ended without a message, with exit code {code}"
    by_ray = (
        "Ray does that when the node of the run is lost, or the head of its cluster for a minute"
    )
    by_code = f"{ended} during {work}: code there may call os._exit"
    if work == STARTING:
        print(
            f"{ended} during {work}: a limit of this machine (`ulimit -a`) or a variable whose "
            "name begins with RAY_ may be the cause; to train without Ray: -s ray.mode=off",
            file=sys.stderr,
        )
        return RunFailed.exit_code
    # Nothing is written yet, and Ray is not started: it would end so again.
    if work and not run:
        print(by_code, file=sys.stderr)
        return RunFailed.exit_code
    if code != OF_RAY:
        print(by_code if work else f"{ended}: your code may call os._exit", file=sys.stderr)
        print(next_step, file=sys.stderr)
        return RunFailed.exit_code
    print(f"{by_code}, or else {by_ray}" if work else f"{ended}: {by_ray}", file=sys.stderr)
    print(next_step, file=sys.stderr)
    return Resumable.exit_code
