"""Words, tables and log lines on the screen."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rayfed.base.errors import harmless


def in_line(text: str) -> str:
    """A harmless text in which tabs and ends of lines are spelled out too, as a line or a column needs it.

    >>> in_line("a\\tname\\nof two lines")
    'a\\\\tname\\\\nof two lines'
    """
    return harmless(text).replace("\t", r"\t").replace("\n", r"\n")


class StderrHandler(logging.Handler):
    """Looks `sys.stderr` up for each record: while a bar is shown, rich replaces it and prints above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "on_screen", False):
            return
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        print(harmless(prefix + self.format(record)), file=sys.stderr, flush=True)


@contextmanager
def busy(words: str) -> Iterator[None]:
    """Words beside a spinner for as long as the context lasts, on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(words):
        yield


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, such as 0:01:23."""
    return str(timedelta(seconds=int(seconds)))


def shown(path: Path) -> str:
    """A path, relative to the current folder if it lies in it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """Rows of words as lines of columns, without control characters.

    >>> print(aligned([("a", "1"), ("long", "2")]))
    a     1
    long  2
    """
    rows = [[in_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(gap.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: with rules and fitted to its width on a terminal, elsewhere aligned text with a line per row."""
    if not sys.stdout.isatty():
        print(aligned([columns, *rows]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*map(in_line, columns))
    for row in rows:
        table.add_row(*map(in_line, row))
    Console(markup=False, highlight=False).print(table)
