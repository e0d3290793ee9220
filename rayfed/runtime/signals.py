"""Handle signals that ask a run to stop."""

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rayfed.base.errors import STOPPED

log = logging.getLogger(__name__)

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds from a signal in which a start may still come to its end.
GRACE = 3.0


# One list for each context of `stopping`: the signals that came in it.
_asked: list[list[int]] = []


def refuse_to_go_on() -> None:
    """Raise KeyboardInterrupt if the run was asked to stop and works on.

    It does where Python dropped the first interrupt.
    """
    if any(_asked):
        raise KeyboardInterrupt


@contextmanager
def stopping(words: str, *, at_the_end: bool = False) -> Iterator[None]:
    """Say `words` at once when a signal asks to stop, and raise KeyboardInterrupt.

    So finished rounds are kept. With `at_the_end` it is raised when the context is left.

    Python drops an exception that is raised where a finaliser runs, or C code calls back: see
    `refuse_to_go_on`.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may handle signals.
        yield
        return
    came: list[int] = []
    if not at_the_end:
        _asked.append(came)

    def stop(number: int, frame: object) -> None:
        """Note a signal and say so; raise KeyboardInterrupt, unless that is for the end."""
        came.append(number)
        # It fails if the signal came while a line was being written.
        with suppress(RuntimeError):
            log.info("%s", words)
        if not at_the_end:
            raise KeyboardInterrupt

    before = _handle(stop)
    try:
        yield
    except Exception:
        # The run was to stop. What has failed on the way out says less.
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        if not at_the_end:
            _asked.pop()
        for number, handler in before.items():
            # The handler is None if it was not set from Python.
            signal.signal(number, handler or signal.SIG_DFL)
    if at_the_end and came:
        raise KeyboardInterrupt


def _handle(handler: Callable[[int, Any], None]) -> dict[signal.Signals, Any]:
    """Set a handler for the signals that ask to stop; return the handlers that they had before.

    A signal that is ignored, as `nohup` has it, stays ignored, and is not returned.
    """
    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        if before[number] is signal.SIG_IGN:
            del before[number]
    for number in before:
        signal.signal(number, handler)
    return before


@contextmanager
def ending_in_time(end: Callable[[], object]) -> Iterator[None]:
    """End this process where a signal asks it to stop and the work in the context goes on too long.

    It may go on for `GRACE` seconds. A second signal ends it at once. Before, `end` is called. The
    work is a start of Ray: it may wait for a minute in C++, where Python raises nothing, and a Ray
    that is half started cannot be stopped in an orderly way.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may handle signals.
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=[reader, before, over, end], daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        # No signal has this number. It only wakes the watcher.
        os.write(writer, b"\0")
        watcher.join()
        os.close(writer)
        os.close(reader)


def _watch(reader: int, forward: int, over: threading.Event, end: Callable[[], object]) -> None:
    """Wait for the first signal, then for the second one or for `GRACE` seconds; end the process.

    Do nothing more once `over` is set.
    """
    came = 0
    while came < 2:
        ready, _, _ = select.select([reader], [], [], GRACE if came else None)
        numbers = os.read(reader, 1) if ready else b""
        if over.is_set():
            return
        if not ready:
            break
        if forward >= 0:
            with suppress(OSError):
                os.write(forward, numbers)
        if numbers[0] in STOPS:
            came += 1
    with suppress(Exception):
        end()
    with suppress(Exception):
        print("stopped while Ray was starting", file=sys.stderr, flush=True)
    os._exit(STOPPED)
