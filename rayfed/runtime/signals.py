"""Signals that ask a run to stop."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_asked: list[list[int]] = []  # the signals that came in each of the contexts


def refuse_to_go_on() -> None:
    """Raise KeyboardInterrupt if the run was asked to stop and works on, because Python dropped the first interrupt."""
    if any(_asked):
        raise KeyboardInterrupt


@contextmanager
def stopping(words: str, *, at_the_end: bool = False) -> Iterator[None]:
    """Say `words` at once when such a signal comes, and raise KeyboardInterrupt, so that finished rounds are kept.

    With `at_the_end` it is raised when the context is left, or when a second signal comes.

    Python drops an exception that is raised where a finaliser runs, or C code calls back: see `refuse_to_go_on`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    came: list[int] = []
    if not at_the_end:
        _asked.append(came)

    def stop(number: int, frame: object) -> None:
        came.append(number)
        with suppress(RuntimeError):  # the signal came while a line was being written
            log.info("%s", words)
        if not at_the_end or len(came) > 1:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in STOPS}
    ours = {
        number for number, handler in before.items() if handler is not signal.SIG_IGN
    }  # as `nohup` sets
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    except Exception:
        if came:  # it was to stop; what has failed on the way out says less
            raise KeyboardInterrupt from None
        raise
    finally:
        if not at_the_end:
            _asked.pop()
        for number in ours:
            signal.signal(
                number, before[number] or signal.SIG_DFL
            )  # None: it was not set from Python
    if at_the_end and came:
        raise KeyboardInterrupt
