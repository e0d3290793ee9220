"""A parent process for a run: it passes signals on, and says what happened if the run cannot.

The run is a child, in a process group of its own. So a signal to the group, as `timeout` and a
closed terminal send it, does not end the processes of Ray too, before the run has written its
checkpoint. The parent sends each signal on to the child alone, waits, and ends as the child did.

Ray ends a driver by `_exit` when its node or the head is lost: the run itself then reaches no
handler and no `finally`. The parent says so, and has the exit code for "try again".
"""

import atexit
import io
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from threading import Thread
from typing import Any, NoReturn

from rayfed.base.errors import STOPPED, Resumable, RunFailed

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AWAITED = (*PASSED_ON, signal.SIGTSTP, signal.SIGCHLD)
# The exit code with which Ray ends a process whose node is lost.
OF_RAY = 1
# Seconds within which the same signal counts once: `timeout` sends it twice, to the process and its
# group.
AGAIN = 0.5


class Unbroken(io.FileIO):
    """Standard output or error, whose reader may leave, as `head` does.

    The run continues, and its log has the rest.
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
    parent_lives, live = os.pipe()
    # They stay pending until `sigwait` takes them: none is missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    child = os.fork()
    if child == 0:
        os.close(live)
        Thread(target=_end_with_parent, args=[parent_lives], daemon=True).start()
        # Or a terminal's Ctrl-C would reach it twice.
        os.setpgid(0, 0)
        # It may still write to that terminal.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        # A process that ends without a message does not get here.
        atexit.register(os.write, say, b".")
        return
    os.close(say)
    os.close(parent_lives)
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
    _end_as(code, has_said, arguments)


def _end_with_parent(parent_lives: int) -> None:
    """Kill this process once its parent has ended: then nobody holds the pipe's other end."""
    os.read(parent_lives, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _keep_streams() -> None:
    """Let standard output and error take whatever is written to them, even if they are closed."""
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


def _end_as(code: int, has_said: bool, arguments: Sequence[str]) -> NoReturn:
    """End as a child did: `code` is its exit code, or minus the signal that killed it."""
    if sys.stderr.isatty() and not has_said:
        # A bar has hidden the cursor.
        print("\x1b[?25h", file=sys.stderr)
    if code < 0:
        _end_by(-code, _next_step(arguments))
    if not has_said:
        code = _explain(code, _next_step(arguments))
    sys.exit(code)


def _next_step(arguments: Sequence[str]) -> str:
    words = [word for word in arguments if word not in ("--force", "--resume")]
    if words[0] != "run":
        return f"to continue from its last checkpoint: rayfed {shlex.join(words)}"
    again = shlex.join([*words, "--resume"])
    return (
        f"to continue from its last checkpoint, or from the start if there is none: rayfed {again}"
    )


def _end_by(number: int, next_step: str) -> NoReturn:
    """End by the signal that has killed the child."""
    if number not in PASSED_ON:
        why = ", as a system does when it has no memory left" if number == signal.SIGKILL else ""
        print(
            f"error: the run's process was ended by {signal.Signals(number).name}{why}",
            file=sys.stderr,
        )
        print(next_step, file=sys.stderr)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    # Where the signal is ignored here.
    sys.exit(128 + number)


def _explain(code: int, next_step: str) -> int:
    """Say why a child may have ended without a message, and return the exit code for it."""
    ended = f"error: the run's process has ended without a message, with exit code {code}"
    if code == OF_RAY:
        print(
            f"{ended}: Ray does that when the node of the run is lost, or the head of its cluster "
            "for a minute; or code of yours has called os._exit",
            file=sys.stderr,
        )
        exit_code = Resumable.exit_code
    else:
        print(f"{ended}: code of yours may have called os._exit", file=sys.stderr)
        exit_code = RunFailed.exit_code
    print(next_step, file=sys.stderr)
    return exit_code
