"""Texts and names that stand for something else: for nothing at all, or for a file."""

import logging
import re
import unicodedata
from collections.abc import Iterable

MISSING = {"nan", "NaN", "NAN", "None", "NONE", "null", "NULL", "<NA>", "N/A", "n/a", "#N/A"}
# From this share of texts on that stand for no text, a warning says so.
MISSING_SHARE = 0.01
# A path or a name of a file has no spaces, and ends in a suffix of letters and digits.
FILE = re.compile(r"\S+\.[A-Za-z][A-Za-z0-9]{1,4}")
log = logging.getLogger(__name__)


def is_missing(name: str) -> bool:
    """Say whether a name is what programs write where there is no label.

    >>> is_missing("NaN"), is_missing(" "), is_missing("cat")
    (True, True, False)
    """
    return not plain(name) or name.strip() in MISSING


def plain(name: str) -> str:
    """Return a name without what the eye does not see.

    It has no capitals, spaces and invisible characters, and one form of Unicode.

    >>> plain("Big Cat")
    'bigcat'
    """
    composed = unicodedata.normalize("NFKC", name).casefold()
    visible = [
        mark for mark in composed if not mark.isspace() and unicodedata.category(mark) != "Cf"
    ]
    return "".join(visible)


class Texts:
    """Counts texts of a column that are probably not meant, block by block."""

    def __init__(self, place: str, column: str) -> None:
        self.place = place
        self.column = column
        self.number = 0
        self.missing = 0
        # An example of a text that stands for no text.
        self.example = ""
        self.files = 0
        # An example of a name of a file.
        self.file = ""

    def count(self, texts: Iterable[str]) -> None:
        """Count more texts of the column."""
        for text in texts:
            self.number += 1
            if text.strip() in MISSING:
                self.missing += 1
                self.example = self.example or text
            elif FILE.fullmatch(text):
                self.files += 1
                self.file = self.file or text

    def tell(self) -> None:
        """Warn of texts that stand for no text, and of a column of names of files."""
        if self.missing and self.missing >= MISSING_SHARE * self.number:
            log.warning(
                "%s: %d of %d texts of column '%s' are '%s', as programs write it where there is "
                "no text; leave them out",
                self.place,
                self.missing,
                self.number,
                self.column,
                self.example,
            )
        if self.files > self.number / 2:
            log.warning(
                "%s: %d of %d texts of column '%s' are names of files, such as '%s', and the names "
                "are trained on; write what is in the files into the column",
                self.place,
                self.files,
                self.number,
                self.column,
                self.file,
            )
