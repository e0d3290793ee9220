"""Show words, tables and log lines on the screen."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rayfed.base.errors import harmless

# A column in which a cell has so many words holds sentences, not numbers.
LEAST_WORDS = 6
# Sentences are not wrapped to fewer characters.
LEAST_OF_SENTENCES = 16


def in_line(text: str) -> str:
    """Return a harmless text as one line: tabs and ends of lines are spelled out.

    >>> in_line("a\\tname\\nof two lines")
    'a\\\\tname\\\\nof two lines'
    """
    return harmless(text).replace("\t", r"\t").replace("\n", r"\n")


class StderrHandler(logging.Handler):
    """Prints log records on `sys.stderr`, which is looked up for each record.

    While a progress bar is shown, rich replaces `sys.stderr` and prints above the bar.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "on_screen", False):
            return
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        print(harmless(prefix + self.format(record)), file=sys.stderr, flush=True)


@contextmanager
def busy(words: str) -> Iterator[None]:
    """Show words next to a spinner for as long as the context lasts, on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(words):
        yield


def duration(seconds: float) -> str:
    """Return a duration in hours, minutes and seconds.

    >>> duration(83.4)
    '0:01:23'
    """
    return str(timedelta(seconds=int(seconds)))


def shown(path: Path) -> str:
    """Return a path, relative to the current folder if it lies in it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """Return rows of words as lines of columns, without control characters.

    >>> print(aligned([("a", "1"), ("long", "2")]))
    a     1
    long  2
    """
    rows = _in_lines(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(gap.join(cells).rstrip())
    return "\n".join(lines)


def _in_lines(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows of a table, where each cell is one line."""
    cleaned = []
    for row in rows:
        cleaned.append([in_line(cell) for cell in row])
    return cleaned


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: with rules on a terminal, elsewhere aligned text with a line per row.

    No cell is cut. Sentences in the last column are wrapped, next to their row's first cells.
    Columns of numbers that do not fit on the terminal follow in tables below, each with the first
    column again.
    """
    if not sys.stdout.isatty():
        print(aligned([columns, *rows]))
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    heads = [in_line(head) for head in columns]
    lines = _in_lines(rows)
    # A head may be wrapped at its spaces, a cell is not wrapped if there is room.
    widths = []
    for number, head in enumerate(heads):
        texts = head.split() + [line[number] for line in lines]
        widths.append(max(map(cell_len, texts), default=0))
    if _are_sentences([line[-1] for line in lines]):
        before = sum(widths[:-1]) + len(" │ ") * len(widths) + len("│")
        widths[-1] = min(widths[-1], max(LEAST_OF_SENTENCES, console.width - before))
    needed = [width + len(" │ ") for width in widths]
    for numbers in side_by_side(needed, console.width - len("│")):
        table = Table()
        for number in numbers:
            width = min(widths[number], console.width // 2)
            table.add_column(heads[number], min_width=width, overflow="fold")
        for line in lines:
            table.add_row(*[line[number] for number in numbers])
        console.print(table)


def _are_sentences(cells: Sequence[str]) -> bool:
    """Say whether the cells of a column are words, of which some have many."""
    return any(cell.count(" ") >= LEAST_WORDS - 1 for cell in cells)


def side_by_side(widths: Sequence[int], room: int) -> list[list[int]]:
    """Return the numbers of the columns in each table, in as few tables as have room for them.

    The first column is in all tables. `widths` and `room` are in characters.

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
