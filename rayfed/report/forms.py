"""A table of numbers as Markdown, as LaTeX, and as comma-separated values; and what its columns of forgetting are."""

import csv
import io
from typing import Any, NamedTuple

LAST = 10  # evaluated rounds, at most, in a mean of the last
# What says the least that the accuracy says too, where a run has it, and else what every run has: docs/forgetting.md.
HEADLINES = (f"forgetting.local.last_{LAST}", f"forgetting.round.last_{LAST}")
NAMES = ("peak", "round", "continual", "local", "aggregation")
OF_CLIENTS = ("local", "aggregation")  # of runs that measured confusion matrices
KEYS = tuple(f"forgetting.{name}{mean}" for name in NAMES for mean in ("", f".last_{LAST}"))
MARKS = {"text": "{}*", "csv": "{}*", "md": "**{}**", "latex": r"\textbf{{{}}}"}  # of what is unlikely to be chance
TEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
)


class Sheet(NamedTuple):
    """A table in words and in numbers."""

    head: list[str]
    lines: list[list[str]]  # a cell for each column of `head`
    notes: list[str]  # to be read with the table
    records: list[dict[str, Any]]  # the same as plain numbers, for other programs; None where there is none


def markdown(sheet: Sheet) -> str:
    """A table in Markdown, and its notes below it."""
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in sheet.lines]
    rule = ["---", *["---:"] * (len(sheet.head) - 1)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (sheet.head, rule, *escaped))
    return "\n\n".join([table, *sheet.notes])


def latex(sheet: Sheet) -> str:
    """A table in LaTeX, for the package booktabs, and its notes as comments below it."""
    rows = [" & ".join(map(_tex, line)) + r" \\" for line in (sheet.head, *sheet.lines)]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(sheet.head) - 1)}}}"
    table = [begin, r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*table, *(f"% {note}" for note in sheet.notes)])


def _tex(cell: str) -> str:
    """A cell with LaTeX's special characters escaped, but for the mark around it."""
    before, after = MARKS["latex"].format("\0").split("\0")
    marked = cell.startswith(before) and cell.endswith(after)
    text = cell.removeprefix(before).removesuffix(after) if marked else cell
    return MARKS["latex"].format(text.translate(TEX)) if marked else text.translate(TEX)


def as_csv(sheet: Sheet) -> str:
    """Comma-separated values: plain numbers, each in a column of its own, without the notes."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(sheet.records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(sheet.records)
    return text.getvalue().rstrip("\n")


def in_words(key: str) -> str:
    """
    >>> in_words("forgetting.round"), in_words("forgetting.round.last_10")
    ('round forgetting (%)', 'round forgetting, mean of last 10 (%)')
    """
    name, _, mean = key.removeprefix("forgetting.").partition(".")
    return f"{name} forgetting, mean of last {LAST} (%)" if mean else f"{name} forgetting (%)"
