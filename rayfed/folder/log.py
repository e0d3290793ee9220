"""The package's log, kept until the run's folder exists and then written to its `log.txt`."""

import logging
import logging.handlers
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rayfed.base.errors import cut, harmless
from rayfed.base.files import open_regular

# Characters of an error; the screen shows fewer.
IN_LOG = 1_000_000


class LogFile(logging.FileHandler):
    """A log file.

    It is silent where the disk is full: the run continues, and the screen has the same log.
    """

    def _open(self) -> Any:
        return open(
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            errors=self.errors,
            opener=open_regular,
        )

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        # It cannot even be opened.
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
    """Collect the package's log.

    Call the yielded function with a run's folder to write all of it there.

    Warnings are shown, too, as Python shows those that no handler takes: by `logging.lastResort`,
    on standard error.
    """
    known, last = logging.getLogger("rayfed").hasHandlers(), logging.lastResort
    kept = logging.handlers.MemoryHandler(capacity=0, flushLevel=logging.NOTSET)

    def begin(path: Path) -> None:
        # A disk may be full before its first line.
        file = LogFile(path / "log.txt", delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        kept.setTarget(file)
        kept.flush()

    try:
        with nullcontext() if known or last is None else logging_to(last), logging_to(kept):
            yield begin
    except Exception as error:
        text = cut(f"{type(error).__name__}: {error}", IN_LOG)
        kept.handle(
            logging.makeLogRecord({"levelno": logging.ERROR, "levelname": "ERROR", "msg": text})
        )
        raise
    finally:
        if kept.target is not None:
            kept.target.close()
        kept.close()
