"""The trace of a profile: a file in the Trace Event Format, which ui.perfetto.dev and chrome://tracing draw."""

import json
import logging
import os
from pathlib import Path
from typing import Any

MOST = 1_000_000  # events in the file, some 100 MB: those after them are left out
AT_ONCE = 1000  # events that may wait to be written

log = logging.getLogger(__name__)


class Timeline:
    """Events in rows, one row per actor or thread. They are kept until there is a file, and then written to it."""

    def __init__(self, began: float) -> None:
        self._began = began  # on the monotonic clock, as all times here are
        self.path: Path | None = None
        self._rows: dict[str | int, int] = {}  # row's name or thread -> its number in the file
        self._lines: list[str] = []  # not yet written
        self._count = 0

    def write_to(self, path: Path) -> None:
        """The file is there from now on."""
        self.path = path
        self._write('[\n{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "rayfed"}}', "w")
        self.flush()

    def span(self, row: str | int, name: str, category: str, start: float, seconds: float) -> None:
        self._event({"name": name, "cat": category, "ph": "X", "dur": round(seconds * 1e6, 3)}, start, row)

    def moment(self, row: str, name: str, at: float) -> None:
        """A line across all rows."""
        self._event({"name": name, "ph": "i", "s": "g"}, at, row)

    def flush(self) -> None:
        """Write whole lines: the file of a killed run lacks the last bracket, but has no half of an event."""
        if self.path is not None:
            self._write("".join(f",\n{line}" for line in self._lines))
            self._lines.clear()

    def close(self) -> None:
        self.flush()
        self._write("\n]\n")

    def _event(self, event: dict[str, Any], at: float, row: str | int) -> None:
        """Add an event, with its time in microseconds from the beginning on."""
        if self._count >= MOST:
            return
        if row not in self._rows:
            self._rows[row] = len(self._rows) + 1
            name = row if isinstance(row, str) else "another thread"
            self._event({"name": "thread_name", "ph": "M", "args": {"name": name}}, at, row)
        place = {"ts": round((at - self._began) * 1e6, 3), "pid": 1, "tid": self._rows[row]}
        self._lines.append(json.dumps({**event, **place}))
        self._count += 1
        if len(self._lines) >= AT_ONCE:
            self.flush()

    def _write(self, text: str, mode: str = "a") -> None:
        try:
            if self.path is not None:
                # Nothing is written through a link that somebody has put there.
                with open(
                    self.path, mode, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666)
                ) as file:
                    file.write(text)
        except OSError as error:
            log.warning("the trace ends here, as %s cannot be written: %s", self.path, error)
            self._count = MOST
