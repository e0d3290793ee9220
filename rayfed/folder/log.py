"""Collect the package's log until the run's folder exists, and write it to its `log.txt`."""

import logging
import logging.handlers
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rayfed.base.errors import cut, harmless

# An error is cut to so many characters. The screen shows fewer.
IN_LOG = 1_000_000


class LogFile(logging.FileHandler):
    """A log file that raises nothing if the disk is full.

    The run continues, and the screen shows the same log.
    """

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        # The file may not even open. `handleError` sees the errors of writing only.
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Give the package's log, from INFO on, to a handler."""
    log = logging.getLogger("rayfed")
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


@contextmanager
def logging_to_file() -> Iterator[Callable[[Path], None]]:
    """Collect the package's log, and yield a function that writes it to a run's folder.

    If no handler shows the log, warnings are also shown on standard error by `logging.lastResort`,
    as Python shows warnings without a handler.
    """
    has_handlers, last_resort = logging.getLogger("rayfed").hasHandlers(), logging.lastResort
    memory = logging.handlers.MemoryHandler(capacity=0, flushLevel=logging.NOTSET)

    def begin(path: Path) -> None:
        # Opened with the first line, where a full disk raises no error.
        file = LogFile(path / "log.txt", delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        memory.setTarget(file)
        memory.flush()

    try:
        with ExitStack() as handlers:
            if last_resort is not None and not has_handlers:
                handlers.enter_context(logging_to(last_resort))
            handlers.enter_context(logging_to(memory))
            yield begin
    except Exception as error:
        text = cut(f"{type(error).__name__}: {error}", IN_LOG)
        facts = {"levelno": logging.ERROR, "levelname": "ERROR", "msg": text}
        memory.handle(logging.makeLogRecord(facts))
        raise
    finally:
        if memory.target is not None:
            memory.target.close()
        memory.close()
