"""Labels of a column as numbers of classes.

Labels are whole numbers, which index the class names, or names. Truth values are the classes False
and True. A test set's labels get the numbers of the training set's classes. Numbers of a test set
are an index only if numbers of its training set are. If the training set has names, a number is
looked up as a name.

Shapes: `N` rows, `K` classes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import types

from rayfed.base.errors import InputError, nearest
from rayfed.data.parquet import Table, coded, is_list, is_text
from rayfed.data.samples import Samples, refuse_many_classes, shortened

TRUTH = ("False", "True")
UNLABELLED = (
    "-1 often marks rows without a label, as in test sets of the hub; leave them out, or give a "
    "labelled test set"
)
ONE_HOT = (
    "each row needs one class; of lists of 0 and 1, take the position of the 1: "
    "numpy.argmax(labels, axis=1)"
)


class Labels(NamedTuple):
    """The labels of a set."""

    # The labels are int64 (N,), 0..K-1.
    numbers: np.ndarray
    # The K names are in the order of the numbers.
    classes: tuple[str, ...]
    # The file says which number is which class, in its column or its metadata.
    numbered: bool


def read_labels(
    table: Table, name: str, listed: tuple[str, ...] | None, train: Samples | None
) -> Labels:
    """Return the labels in the column `name`.

    `listed` are the class names that the file's metadata has, if any. Raises `InputError`, with the
    row, for what is no label, and for a test label that none of `train`'s classes has.
    """
    if listed is not None:
        _refuse_bad_names(listed, table)
    column = table.column(name)
    if is_text(column.type):
        return _from_names(table, column, name, listed, train)
    return _from_numbers(table, column, name, listed, train)


def _from_names(
    table: Table,
    column: pa.Array,
    name: str,
    listed: tuple[str, ...] | None,
    train: Samples | None,
) -> Labels:
    """Return the labels of a column of text.

    Raises `InputError`, with the row, for an empty text, and for a test label of no class.
    """
    codes, used = coded(column)
    for code, label in enumerate(used):
        if not label.strip():
            row = int(np.argmax(codes == code))
            raise InputError(
                f"{table.place(row)}: the text in column '{name}' is empty; give each row a label, "
                "or leave it out"
            )
    if train is not None:
        classes = train.classes
        numbered = train.numbered
    else:
        classes = listed or tuple(used)
        numbered = listed is not None
    refuse_many_classes(len(classes), f"column '{name}'")
    lookup = _Lookup(classes, numbered)
    numbers = np.array([lookup.find(label) for label in used])[codes]
    unknown = np.flatnonzero(numbers < 0)
    if len(unknown):
        row = int(unknown[0])
        label = used[codes[row]]
        similar = nearest(label.strip(), classes, 0.75)
        hint = f"; did you mean '{similar}'?" if similar else ""
        raise InputError(
            f"{table.place(row)}: label '{label}' is not one of the classes "
            f"({shortened(classes)}){hint}"
        )
    return Labels(numbers, classes, numbered)


def _from_numbers(
    table: Table,
    column: pa.Array,
    name: str,
    listed: tuple[str, ...] | None,
    train: Samples | None,
) -> Labels:
    """Return the labels of a column of numbers.

    Raises `InputError`, with the row, for a number of no class.
    """
    numbers = _whole_numbers(table, column, name)
    if train is not None and listed is None and not train.numbered:
        return _by_name(table, numbers, name, train)
    classes = listed
    if classes is None and train is not None:
        classes = train.classes
    if classes is None and types.is_boolean(column.type):
        classes = TRUTH
    num_classes = len(classes) if classes else int(numbers.max()) + 1
    refuse_many_classes(num_classes, f"column '{name}'")
    if classes is None:
        classes = tuple(map(str, range(num_classes)))
    outside = np.flatnonzero((numbers < 0) | (numbers >= num_classes))
    if len(outside):
        row = int(outside[0])
        raise InputError(
            f"{table.place(row)}: label {numbers[row]} is outside 0..{num_classes - 1} "
            f"({shortened(classes)}){why_negative(numbers)}"
        )
    if train is None or classes == train.classes:
        return Labels(numbers, classes, True)
    return Labels(_renumbered(table, numbers, classes, train.classes), train.classes, True)


def _whole_numbers(table: Table, column: pa.Array, name: str) -> np.ndarray:
    """Return a column of whole numbers, of whatever type, as int64 (N,).

    Raises `InputError` for what is no whole number.
    """
    kind = column.type
    place = f"{table.place(0)}: column '{name}' is of type {kind}"
    if is_list(kind):
        raise InputError(f"{place}; {ONE_HOT}")
    if types.is_binary(kind) or types.is_large_binary(kind):
        raise InputError(f"{place}; write it as text: column.cast('string')")
    if types.is_integer(kind) or types.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False).astype(np.int64)
    if not (types.is_floating(kind) or types.is_decimal(kind)):
        raise InputError(f"{place}; labels are whole numbers or text")
    values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    odd = np.flatnonzero(~np.isfinite(values) | (values != np.round(values)))
    if len(odd):
        row = int(odd[0])
        remedy = "leave out rows without a label"
        if np.isfinite(values[row]):
            remedy = "divide a quantity into classes first, such as with numpy.digitize"
        raise InputError(
            f"{table.place(row)}: {values[row]:g} in column '{name}', which is of type {kind}; "
            f"labels are whole numbers or text; {remedy}"
        )
    return values.astype(np.int64)


def _by_name(table: Table, numbers: np.ndarray, name: str, train: Samples) -> Labels:
    """Return the labels of a test set that has numbers, while its training set has names.

    Each number means the class with this number as its name. Raises `InputError` if the names are
    no numbers, and for a number of no class.
    """
    classes = train.classes
    by_number = _numbers_of(classes)
    if by_number is None:
        raise InputError(
            f"{table.place(0)}: column '{name}' has numbers, and the training set's classes are "
            f"names ({shortened(classes)}); write the names in both, or add them to the test "
            "file's metadata as 'classes', in the order of its numbers"
        )
    used, codes = np.unique(numbers, return_inverse=True)
    labels = np.array([by_number.get(int(number), -1) for number in used])[codes]
    unknown = np.flatnonzero(labels < 0)
    if len(unknown):
        row = int(unknown[0])
        raise InputError(
            f"{table.place(row)}: label {numbers[row]} is not one of the classes "
            f"({shortened(classes)}){why_negative(numbers)}"
        )
    return Labels(labels, classes, True)


def _renumbered(
    table: Table, numbers: np.ndarray, test_classes: tuple[str, ...], classes: tuple[str, ...]
) -> np.ndarray:
    """Return numbers that index a test file's classes as numbers that index the training set's.

    Raises `InputError` for a class that the training set does not have.
    """
    number_of = {label: number for number, label in enumerate(classes)}
    if any(label not in number_of for label in test_classes):
        raise InputError(
            f"{table.place(0)}: its classes ({shortened(test_classes)}) are not the training set's "
            f"({shortened(classes)}); write the same names into the metadata of both files, or "
            "into neither"
        )
    return np.array([number_of[label] for label in test_classes])[numbers]


class _Lookup:
    """Finds the number of a label that is text, by its name or by the number that the name says."""

    def __init__(self, classes: tuple[str, ...], numbered: bool) -> None:
        self._by_name = {label: number for number, label in enumerate(classes)}
        self._by_number = _numbers_of(classes)
        if self._by_number is None and numbered:
            self._by_number = {number: number for number in range(len(classes))}

    def find(self, label: str) -> int:
        """Return the number of a label, or -1."""
        if label in self._by_name:
            return self._by_name[label]
        number = number_in(label)
        if self._by_number is None or number is None:
            return -1
        return self._by_number.get(number, -1)


def _numbers_of(classes: Sequence[str]) -> dict[int, int] | None:
    """Return the class of each number that a name says.

    Returns None if a name is no number, or if two names say the same number.

    >>> _numbers_of(["01", "0"]), _numbers_of(["1", "01"]), _numbers_of(["cat"])
    ({1: 0, 0: 1}, None, None)
    """
    numbers = {}
    for label, name in enumerate(classes):
        number = number_in(name)
        if number is not None:
            numbers[number] = label
    return numbers if len(numbers) == len(classes) else None


def why_negative(labels: np.ndarray) -> str:
    """Say what labels below 0 probably mean, and what to do, as the end of a message.

    Returns '' if there are none.
    """
    lowest = int(labels.min())
    if lowest >= 0:
        return ""
    if set(np.unique(labels)) == {-1, 1}:
        return "; of labels -1 and 1, write 0 and 1"
    if lowest == -1:
        return f"; {UNLABELLED}"
    return "; labels are numbers from 0"


def number_in(text: str) -> int | None:
    """Return the whole number that a text says, or None if it says none.

    The text may have the form in which a table of floats writes the number.

    >>> number_in("07"), number_in("7.0"), number_in("cat")
    (7, 7, None)
    """
    integer_part, _, decimals = text.strip().partition(".")
    is_negative = integer_part.startswith("-")
    digits = integer_part[1:] if is_negative else integer_part
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18 or decimals.strip("0"):
        return None
    return -int(digits) if is_negative else int(digits)


def _refuse_bad_names(listed: tuple[str, ...], table: Table) -> None:
    """Raise `InputError` if two classes of a file's metadata have one name."""
    labels: set[str] = set()
    for label in listed:
        if label in labels:
            raise InputError(
                f"{table.place(0)}: the metadata name the class '{label}' twice; give each class a "
                "name of its own"
            )
        labels.add(label)
