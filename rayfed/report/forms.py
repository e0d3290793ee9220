"""A table of numbers as Markdown, as LaTeX, and as comma-separated values.

The keys and the words of its columns of forgetting are here as well.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# Most evaluated rounds in a mean of the last rounds.
LAST = 10
# The forgetting to show first: the measure that is least correlated with the accuracy, and then one
# that every run has. See docs/forgetting.md.
HEADLINES = (f"forgetting.local.last_{LAST}", f"forgetting.round.last_{LAST}")
NAMES = ("peak", "round", "continual", "local", "aggregation")
# The key of the accuracy on a domain's test images begins with this.
DOMAIN = "domain."
# Only runs that measured confusion matrices of clients have these.
OF_CLIENTS = ("local", "aggregation")


def _keys() -> tuple[str, ...]:
    """Return the keys of all columns of forgetting: for each name the last value and the mean."""
    keys = []
    for name in NAMES:
        keys += [f"forgetting.{name}", f"forgetting.{name}.last_{LAST}"]
    return tuple(keys)


KEYS = _keys()
# How each form marks a number that is unlikely to be chance.
MARKS = {
    "text": "{}*",
    "csv": "{}*",
    "md": "**{}**",
    "latex": r"\textbf{{{}}}",
}
# In Markdown, these characters are not letters but marks.
IN_NAMES = re.compile(r"\\(?!\|)|[*`<\[~]")
# A cell that begins with one of these is computed by a spreadsheet.
FORMULA = ("=", "+", "-", "@", "\t", "\r")
TEX = str.maketrans(
    {
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
)


class Sheet(NamedTuple):
    """A table in words and in numbers."""

    head: list[str]
    # Rows with a cell for each column of `head`.
    lines: list[list[str]]
    # What a reader of the table must know.
    notes: list[str]
    # The rows as plain numbers for other programs; None where there is no number.
    records: list[dict[str, Any]]


def markdown(sheet: Sheet) -> str:
    """Return a table in Markdown, with its notes below it."""
    rule = ["---"] + ["---:"] * (len(sheet.head) - 1)
    rows = [_markdown_row(sheet.head, sheet.head), f"| {' | '.join(rule)} |"]
    rows += [_markdown_row(line, sheet.head) for line in sheet.lines]
    blocks = ["\n".join(rows)] + [one_line(note) for note in sheet.notes]
    return "\n\n".join(blocks)


def _markdown_row(cells: Sequence[str], head: Sequence[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(map(_in_markdown, cells, head))} |"


def _in_markdown(cell: str, column: str) -> str:
    """Return a cell on one line, with what ends a cell escaped.

    In a name, what would be a mark, a link or a tag is escaped as well.
    """
    cell = one_line(cell).replace("|", "\\|")
    return IN_NAMES.sub(r"\\\g<0>", cell) if column in ("run", "from") else cell


def one_line(text: str) -> str:
    """Return a text with a space for each end of a line, of any system.

    >>> one_line("a\\r\\nb\\n")
    'a b'
    """
    return " ".join(text.splitlines())


def latex(sheet: Sheet) -> str:
    """Return a table in LaTeX, for the package booktabs, with its notes as comments below it."""
    head, *rows = [_tex_row(line, sheet.head) for line in [sheet.head, *sheet.lines]]
    table = [
        rf"\begin{{tabular}}{{l{'r' * (len(sheet.head) - 1)}}}",
        r"\toprule",
        head,
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    table += [f"% {one_line(note)}" for note in sheet.notes]
    return "\n".join(table)


def _tex_row(cells: Sequence[str], head: Sequence[str]) -> str:
    """Return a row of a table in LaTeX."""
    row = " & ".join(map(_tex, cells, head)) + r" \\"
    # LaTeX would read these characters as arguments of the end of the line above.
    return f"{{}}{row}" if row[0] in "[*" else row


def _tex(cell: str, column: str) -> str:
    """Return a cell with LaTeX's special characters escaped, except for the mark around a number.

    Names have no mark.
    """
    cell = one_line(cell)
    before, after = MARKS["latex"].format("\0").split("\0")
    if column in ("run", "from") or not cell.startswith(before):
        return cell.translate(TEX)
    return MARKS["latex"].format(cell.removeprefix(before).removesuffix(after).translate(TEX))


def as_csv(sheet: Sheet) -> str:
    """Return comma-separated values: plain numbers in separate columns, without the notes.

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
    """Return a value, behind an apostrophe if a spreadsheet would compute it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def in_words(key: str, mean_words: str = f"mean of last {LAST}") -> str:
    """Return the words for a column of forgetting or of a domain.

    `mean_words` say which rounds a mean is of, as `mean_of` does.

    >>> in_words("forgetting.round"), in_words("forgetting.round.last_10"), in_words("domain.dslr")
    ('round forgetting (%)', 'round forgetting, mean of last 10 (%)', 'accuracy on dslr (%)')
    """
    if key.startswith(DOMAIN):
        return f"accuracy on {key.removeprefix(DOMAIN)} (%)"
    name, _, mean = key.removeprefix("forgetting.").partition(".")
    return f"{name} forgetting, {mean_words} (%)" if mean else f"{name} forgetting (%)"


def mean_of(counts: Iterable[int]) -> str:
    """Say which rounds means are of, from the numbers of rounds that runs have a value of.

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
