"""A process that sees how a run ends: Ray ends its driver without a word where it loses the node under it.

So the run is a child, in a process group of its own. The parent hands on each signal that it is sent, waits, and ends
as the child did; where the child ended before it could say anything, the parent says what that means.
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from rayfed.exits import Resumable

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN = 0.5  # seconds after which the same signal means something: `timeout` sends two at once, a person one by one


def guarded(arguments: Sequence[str]) -> None:
    """Go on in a child process, which ends with this one. Here it never returns: `arguments` are for its last words."""
    said, say = os.pipe()
    life, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # a terminal's Ctrl-C would reach it twice
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # and it writes to that terminal all the same
        os.close(hold)
        threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
        atexit.register(os.write, say, b".")  # all that ends it without a word passes this over
        return
    os.close(say)
    sent: dict[int, float] = {}

    def hand_on(number: int, frame: object) -> None:
        if time.monotonic() > sent.get(number, 0.0) + AGAIN:
            sent[number] = time.monotonic()
            _send(child, number)

    for number in HANDED_ON:
        signal.signal(number, hand_on)
    signal.signal(signal.SIGTSTP, lambda number, frame: _pause(child))
    _, status = os.waitpid(child, 0)
    _end_as(os.waitstatus_to_exitcode(status), _has_said(said), arguments)


def _end_as(code: int, said: bool, arguments: Sequence[str]) -> NoReturn:
    """End as a child did: `code` is its exit code, or minus the signal that killed it."""
    if sys.stderr.isatty() and not said:
        print("\x1b[?25h", file=sys.stderr)  # a bar has hidden the cursor
    if code < 0:
        if -code not in HANDED_ON:
            name = signal.Signals(-code).name
            why = ", as a system does that has no memory left" if -code == signal.SIGKILL else ""
            print(f"error: the run's process was ended by {name}{why}\n{_to_go_on(arguments)}", file=sys.stderr)
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        sys.exit(128 - code)  # where the signal is ignored here
    if not said:
        print(
            f"error: the run's process has ended without a word, with exit code {code}: Ray ends it when it loses the "
            f"node that it is on, or for a minute the head of its cluster\n{_to_go_on(arguments)}",
            file=sys.stderr,
        )
        code = Resumable.exit_code
    sys.exit(code)


def _to_go_on(arguments: Sequence[str]) -> str:
    """
    >>> _to_go_on(["run", "a.toml", "--force"])
    'to go on from its last checkpoint: rayfed run a.toml --resume'
    """
    words = [word for word in arguments if word != "--force"]
    if words[0] == "run" and "--resume" not in words:
        words.append("--resume")
    return f"to go on from its last checkpoint: rayfed {shlex.join(words)}"


def _has_said(pipe: int) -> bool:
    os.set_blocking(pipe, False)  # processes that outlive it may hold the other end
    with suppress(BlockingIOError):
        return os.read(pipe, 1) != b""
    return False


def _send(child: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(child, number)


def _pause(child: int) -> None:
    """Ctrl-Z, until the shell lets both go on."""
    _send(child, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    _send(child, signal.SIGCONT)


def _end_with_parent(life: int) -> None:
    os.read(life, 1)  # returns when the other end is closed, by the parent's end
    os.kill(os.getpid(), signal.SIGKILL)
