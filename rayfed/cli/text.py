"""Words, tables and log lines on the screen."""

import logging
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path


class StderrHandler(logging.Handler):
    """Looks `sys.stderr` up for each record: while a bar is shown, rich replaces it and prints above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "on_screen", False):
            return
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        print(prefix + self.format(record), file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, such as 0:01:23."""
    return str(timedelta(seconds=int(seconds)))


def shown(path: Path) -> str:
    """A path, relative to the current folder if it lies in it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """Rows of words as lines of columns.

    >>> print(aligned([("a", "1"), ("long", "2")]))
    a     1
    long  2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(gap.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: with rules and fitted to its width on a terminal, elsewhere aligned text with a line per row."""
    if not sys.stdout.isatty():
        print(aligned([columns, *rows]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
