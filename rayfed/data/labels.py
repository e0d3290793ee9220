"""Labels of a column as numbers of classes.

A test set's labels get the numbers of the training set's classes.

Labels are whole numbers, which index the class names, or names. Truth values are the classes False
and True. Numbers of a test set mean an index only where those of its training set do: beside names,
a number is looked up as a name.

Shapes: `N` rows, `K` classes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import types

from rayfed.base.errors import InputError, nearest
from rayfed.data.parquet import Table, coded, is_list, is_text
from rayfed.data.samples import Samples, few_classes, shortened

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

    # int64 (N,), 0..K-1.
    numbers: np.ndarray
    # The K names, in the order of the numbers.
    classes: tuple[str, ...]
    # The file says which number is which class, in its column or its metadata.
    numbered: bool


def read_labels(
    table: Table, name: str, named: tuple[str, ...] | None, train: Samples | None
) -> Labels:
    """The labels in the column `name`.

    `named` are the class names that the file's metadata has, if any.

    Raises `InputError`, with the row, for what is no label, and for a test label that none of
    `train`'s classes has.
    """
    if named is not None:
        _refuse_bad_names(named, table)
    column = table.column(name)
    if is_text(column.type):
        return _from_names(table, column, name, named, train)
    return _from_numbers(table, column, name, named, train)


def _from_names(
    table: Table,
    column: pa.Array,
    name: str,
    named: tuple[str, ...] | None,
    train: Samples | None,
) -> Labels:
    codes, used = coded(column)
    for code, label in enumerate(used):
        if not label.strip():
            row = int(np.argmax(codes == code))
            raise InputError(
                f"{table.place(row)}: the text in column '{name}' is empty; give each row a label, "
                "or leave it out"
            )
    if train is not None:
        classes, numbered = train.classes, train.numbered
    else:
        classes, numbered = named or tuple(used), named is not None
    few_classes(len(classes), f"column '{name}'")
    number_of = _Lookup(classes, numbered)
    numbers = np.array([number_of.find(label) for label in used])[codes]
    unknown = np.flatnonzero(numbers < 0)
    if len(unknown):
        row = int(unknown[0])
        label = used[codes[row]]
        near = nearest(label.strip(), classes, 0.75)
        hint = f"; did you mean '{near}'?" if near else ""
        raise InputError(
            f"{table.place(row)}: label '{label}' is not one of the classes "
            f"({shortened(classes)}){hint}"
        )
    return Labels(numbers, classes, numbered)


def _from_numbers(
    table: Table,
    column: pa.Array,
    name: str,
    named: tuple[str, ...] | None,
    train: Samples | None,
) -> Labels:
    numbers = _whole_numbers(table, column, name)
    if train is not None and named is None and not train.numbered:
        return _by_name(table, numbers, name, train)
    classes = named
    if classes is None and train is not None:
        classes = train.classes
    if classes is None and types.is_boolean(column.type):
        classes = TRUTH
    num_classes = len(classes) if classes else int(numbers.max()) + 1
    few_classes(num_classes, f"column '{name}'")
    if classes is None:
        classes = tuple(map(str, range(num_classes)))
    outside = np.flatnonzero((numbers < 0) | (numbers >= num_classes))
    if len(outside):
        row = int(outside[0])
        why = why_negative(numbers)
        raise InputError(
            f"{table.place(row)}: label {numbers[row]} is outside 0..{num_classes - 1} "
            f"({shortened(classes)}){why}"
        )
    if train is None or classes == train.classes:
        return Labels(numbers, classes, True)
    return Labels(_renumbered(table, numbers, classes, train.classes), train.classes, True)


def _whole_numbers(table: Table, column: pa.Array, name: str) -> np.ndarray:
    """A column of whole numbers, of whatever type, as int64 (N,)."""
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
    """Numbers of a test set whose training set has names: each means the class with this number as
    its name.
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
        why = why_negative(numbers)
        raise InputError(
            f"{table.place(row)}: label {numbers[row]} is not one of the classes "
            f"({shortened(classes)}){why}"
        )
    return Labels(labels, classes, True)


def _renumbered(
    table: Table, numbers: np.ndarray, theirs: tuple[str, ...], classes: tuple[str, ...]
) -> np.ndarray:
    """Numbers that index the test file's own names, as numbers that index the training set's."""
    number_of = {label: number for number, label in enumerate(classes)}
    if any(label not in number_of for label in theirs):
        raise InputError(
            f"{table.place(0)}: its classes ({shortened(theirs)}) are not the training set's "
            f"({shortened(classes)}); write the same names into the metadata of both files, or "
            "into neither"
        )
    return np.array([number_of[label] for label in theirs])[numbers]


class _Lookup:
    """Finds the number of a label that is text: by its name, or by the number that the name says."""

    def __init__(self, classes: tuple[str, ...], numbered: bool) -> None:
        self._by_name = {label: number for number, label in enumerate(classes)}
        self._by_number = _numbers_of(classes)
        if self._by_number is None and numbered:
            self._by_number = {number: number for number in range(len(classes))}

    def find(self, label: str) -> int:
        """The number of a label, or -1."""
        if label in self._by_name:
            return self._by_name[label]
        said = number_in(label)
        if self._by_number is None or said is None:
            return -1
        return self._by_number.get(said, -1)


def _numbers_of(classes: Sequence[str]) -> dict[int, int] | None:
    """The class with each number as its name; None where a name is no number, or two say the same."""
    said = [number_in(label) for label in classes]
    numbers = {number: label for label, number in enumerate(said) if number is not None}
    return numbers if len(numbers) == len(classes) else None


def why_negative(labels: np.ndarray) -> str:
    """The end of a message about labels: what those below 0 probably mean, and what to do; '' if
    there are none.
    """
    lowest = int(labels.min())
    if lowest >= 0:
        return ""
    if set(np.unique(labels)) == {-1, 1}:
        return "; of labels -1 and 1, write 0 and 1"
    return f"; {UNLABELLED}" if lowest == -1 else "; labels are numbers from 0"


def number_in(text: str) -> int | None:
    """The whole number that a text says, also as a table writes it that has floats; None of other
    text.

    >>> number_in("07"), number_in("7.0"), number_in("cat")
    (7, 7, None)
    """
    whole, _, rest = text.strip().partition(".")
    sign = whole[:1] == "-"
    digits = whole[1:] if sign else whole
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18 or rest.strip("0"):
        return None
    return -int(digits) if sign else int(digits)


def _refuse_bad_names(named: tuple[str, ...], table: Table) -> None:
    """Raises `InputError` where two classes of a file's metadata have one name."""
    seen: set[str] = set()
    for label in named:
        if label in seen:
            raise InputError(
                f"{table.place(0)}: the metadata name the class '{label}' twice; give each class a "
                "name of its own"
            )
        seen.add(label)
