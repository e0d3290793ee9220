"""A table of numbers as Markdown, as LaTeX, and as comma-separated values; and what its columns of
forgetting are.
"""

import csv
import io
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

# Evaluated rounds, at most, in a mean of the last.
LAST = 10
# What says the least that the accuracy says too, where a run has it, and else what every run has:
# docs/forgetting.md.
HEADLINES = (f"forgetting.local.last_{LAST}", f"forgetting.round.last_{LAST}")
NAMES = ("peak", "round", "continual", "local", "aggregation")
# Begins the key of the accuracy on a domain's test images.
DOMAIN = "domain."
# Of runs that measured confusion matrices.
OF_CLIENTS = ("local", "aggregation")
KEYS = tuple(f"forgetting.{name}{mean}" for name in NAMES for mean in ("", f".last_{LAST}"))
# Of what is unlikely to be chance.
MARKS = {
    "text": "{}*",
    "csv": "{}*",
    "md": "**{}**",
    "latex": r"\textbf{{{}}}",
}
# What Markdown does not take for letters.
IN_NAMES = re.compile(r"\\(?!\|)|[*`<\[~]")
# Begin what a spreadsheet computes.
FORMULA = ("=", "+", "-", "@", "\t", "\r")
TEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
    }
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
)


class Sheet(NamedTuple):
    """A table in words and in numbers."""

    head: list[str]
    # A cell for each column of `head`.
    lines: list[list[str]]
    # To be read with the table.
    notes: list[str]
    # The same as plain numbers, for other programs; None where there is none.
    records: list[dict[str, Any]]


def markdown(sheet: Sheet) -> str:
    """A table in Markdown, and its notes below it."""
    head, *lines = [
        list(map(_in_markdown, line, sheet.head)) for line in (sheet.head, *sheet.lines)
    ]
    rule = ["---", *["---:"] * (len(head) - 1)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))
    return "\n\n".join([table, *map(one_line, sheet.notes)])


def _in_markdown(cell: str, column: str) -> str:
    """A cell on one line, with what ends a cell escaped; in a name, also what would be a mark, a
    link or a tag.
    """
    cell = one_line(cell).replace("|", "\\|")
    return IN_NAMES.sub(r"\\\g<0>", cell) if column in ("run", "from") else cell


def one_line(text: str) -> str:
    """A text with a space for each end of a line, of any system.

    >>> one_line("a\\r\\nb\\n")
    'a b'
    """
    return " ".join(text.splitlines())


def latex(sheet: Sheet) -> str:
    """A table in LaTeX, for the package booktabs, and its notes as comments below it."""
    rows = [" & ".join(map(_tex, line, sheet.head)) + r" \\" for line in (sheet.head, *sheet.lines)]
    # Or the end of the line above would take it.
    rows = [f"{{}}{row}" if row[0] in "[*" else row for row in rows]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(sheet.head) - 1)}}}"
    table = [begin, r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*table, *(f"% {one_line(note)}" for note in sheet.notes)])


def _tex(cell: str, column: str) -> str:
    """A cell with LaTeX's special characters escaped, but for the mark around a number; names have
    none.
    """
    cell = one_line(cell)
    before, after = MARKS["latex"].format("\0").split("\0")
    if column in ("run", "from") or not cell.startswith(before):
        return cell.translate(TEX)
    return MARKS["latex"].format(cell.removeprefix(before).removesuffix(after).translate(TEX))


def as_csv(sheet: Sheet) -> str:
    """Comma-separated values: plain numbers, each in a column of its own, without the notes.

    A name that a spreadsheet would compute as a formula begins with an apostrophe, which
    spreadsheets do not show.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_no_formula, sheet.records[0]))
    for record in sheet.records:
        writer.writerow(map(_no_formula, record.values()))
    return text.getvalue().rstrip("\n")


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def in_words(key: str, of: str = f"mean of last {LAST}") -> str:
    """A column of forgetting or of a domain; `of` says which rounds a mean is of, as `mean_of`
    does.

    >>> in_words("forgetting.round"), in_words("forgetting.round.last_10"), in_words("domain.dslr")
    ('round forgetting (%)', 'round forgetting, mean of last 10 (%)', 'accuracy on dslr (%)')
    """
    if key.startswith(DOMAIN):
        return f"accuracy on {key.removeprefix(DOMAIN)} (%)"
    name, _, mean = key.removeprefix("forgetting.").partition(".")
    return f"{name} forgetting, {of} (%)" if mean else f"{name} forgetting (%)"


def mean_of(counts: Iterable[int]) -> str:
    """Which rounds means are of, from the numbers of rounds that runs have a value of.

    >>> mean_of([60, 10]), mean_of([3, 3]), mean_of([3, 60]), mean_of([1])
    ('mean of last 10', 'mean of all 3', 'mean of last 10 at most', 'mean of 1 round')
    """
    taken = {min(count, LAST) for count in counts}
    if taken <= {LAST}:
        return f"mean of last {LAST}"
    if len(taken) > 1:
        return f"mean of last {LAST} at most"
    (count,) = taken
    return "mean of 1 round" if count == 1 else f"mean of all {count}"
