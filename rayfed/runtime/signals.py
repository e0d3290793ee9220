"""Signals that ask a run to stop."""

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rayfed.base.errors import STOPPED

log = logging.getLogger(__name__)

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds from a signal in which a start may still come to its end.
GRACE = 3.0


# The signals that came in each of the contexts.
_asked: list[list[int]] = []


def refuse_to_go_on() -> None:
    """Raise KeyboardInterrupt if the run was asked to stop and works on, because Python dropped the
    first interrupt.
    """
    if any(_asked):
        raise KeyboardInterrupt


@contextmanager
def stopping(words: str, *, at_the_end: bool = False) -> Iterator[None]:
    """Say `words` at once when such a signal comes, and raise KeyboardInterrupt, so that finished
    rounds are kept.

    With `at_the_end` it is raised when the context is left.

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
        came.append(number)
        # The signal came while a line was being written.
        with suppress(RuntimeError):
            log.info("%s", words)
        if not at_the_end:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in STOPS}
    # As `nohup` sets.
    ours = {number for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    except Exception:
        # It was to stop; what has failed on the way out says less.
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        if not at_the_end:
            _asked.pop()
        for number in ours:
            # None: it was not set from Python.
            signal.signal(number, before[number] or signal.SIG_DFL)
    if at_the_end and came:
        raise KeyboardInterrupt


@contextmanager
def ending_in_time(end: Callable[[], object]) -> Iterator[None]:
    """End this process where a signal asks it to stop and the work in the context has not ended
    `GRACE` seconds later.

    A second signal ends it at once. Before, `end` is called. The work is a start of Ray: it may
    wait for a minute in C++, where Python raises nothing, and a Ray that is half started cannot be
    stopped in an orderly way.
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
        # No signal has this number: the watcher looks up.
        os.write(writer, b"\0")
        watcher.join()
        os.close(writer)
        os.close(reader)


def _watch(reader: int, forward: int, over: threading.Event, end: Callable[[], object]) -> None:
    """Wait for the first signal, then for the second one or for `GRACE` seconds, and end the
    process.
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
