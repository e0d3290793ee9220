"""Signals that ask a run to stop."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stopping(words: str, *, at_the_end: bool = False) -> Iterator[None]:
    """Say `words` at once when such a signal comes, and raise KeyboardInterrupt, so that finished rounds are kept.

    With `at_the_end` it is raised when the context is left, or when a second signal comes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    came: list[int] = []

    def stop(number: int, frame: object) -> None:
        came.append(number)
        with suppress(RuntimeError):  # the signal came while a line was being written
            log.info("%s", words)
        if not at_the_end or len(came) > 1:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in STOPS}
    ours = {number for number, handler in before.items() if handler is not signal.SIG_IGN}  # as `nohup` sets
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)  # None: it was not set from Python
    if at_the_end and came:
        raise KeyboardInterrupt
