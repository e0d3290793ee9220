"""Words, tables and log lines on the screen."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rayfed.base.errors import harmless


def in_line(text: str) -> str:
    """A harmless text in which tabs and ends of lines are spelled out too, as a line or a column
    needs it.

    >>> in_line("a\\tname\\nof two lines")
    'a\\\\tname\\\\nof two lines'
    """
    return harmless(text).replace("\t", r"\t").replace("\n", r"\n")


class StderrHandler(logging.Handler):
    """Looks `sys.stderr` up for each record: while a bar is shown, rich replaces it and prints
    above the bar.
    """

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
    return "\n".join(
        gap.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: with rules on a terminal, elsewhere aligned text with a line per row.

    No cell is cut: columns that do not fit on the terminal follow in tables below, each with the
    first column again.
    """
    if not sys.stdout.isatty():
        print(aligned([columns, *rows]))
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    heads, lines = (
        [in_line(head) for head in columns],
        [[in_line(cell) for cell in row] for row in rows],
    )
    words = [max(map(cell_len, head.split()), default=0) for head in heads]
    widths = [
        max([word, *(cell_len(line[number]) for line in lines)])
        for number, word in enumerate(words)
    ]
    for numbers in side_by_side([width + len(" │ ") for width in widths], console.width - len("│")):
        table = Table()
        for number in numbers:
            table.add_column(
                heads[number], min_width=min(widths[number], console.width // 2), overflow="fold"
            )
        for line in lines:
            table.add_row(*(line[number] for number in numbers))
        console.print(table)


def side_by_side(widths: Sequence[int], room: int) -> list[list[int]]:
    """The numbers of the columns in each of as few tables as have room for them; the first column
    is in all.

    >>> side_by_side([10, 8, 8, 8], room=30)
    [[0, 1, 2], [0, 3]]
    >>> side_by_side([10, 8, 12], room=30)
    [[0, 1, 2]]
    """
    tables: list[list[int]] = []
    left = 0
    for number in range(1, len(widths)):
        if not tables or widths[number] > left:
            tables.append([0])
            left = room - widths[0]
        tables[-1].append(number)
        left -= widths[number]
    return tables or [[0]]
