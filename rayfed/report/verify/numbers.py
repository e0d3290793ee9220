"""The numbers of a run by their place, and where they differ from what they should be."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
# The round; the row, such as "clients, client 7"; the column, or the name of a note or a tensor.
Key = tuple[int, str, str]
Numbers = dict[Key, Any]
# Test images that may change sides where rounding differs.
FEW = 5
# Time and node say where a run was, not what it computed.
LEFT_OUT = {"round", "notes", "seconds", "node"}


def of_tables(tables: Mapping[str, Iterable[Row]]) -> Numbers:
    """Return the numbers in rows of tables by their place.

    >>> row = {"round": 1, "client": 7, "seconds": 2.0, "notes": [("loss.ce", 0.1)]}
    >>> of_tables({"clients": [row]})
    {(1, 'clients, client 7', 'loss.ce'): 0.1}
    """
    numbers: Numbers = {}
    for table, rows in tables.items():
        for row in rows:
            place = place_of(table, row)
            for column, value in row.items():
                if column not in LEFT_OUT and not _names(column, row):
                    numbers[row["round"], place, column] = value
            for name, value in row.get("notes") or ():
                numbers[row["round"], place, name] = value
    return numbers


def place_of(table: str, row: Row) -> str:
    """Say which row of a round it is.

    >>> place_of("classes", {"round": 1, "class": "cat", "accuracy": 0.5})
    'classes, class cat'
    """
    words = [f"{column} {row[column]}" for column in row if _names(column, row)]
    return ", ".join([table, *words])


def _names(column: str, row: Row) -> bool:
    """Say whether a column tells which row it is."""
    return column not in LEFT_OUT and (column == "client" or isinstance(row[column], str))


def differing(recorded: Numbers, right: Numbers, source: str, within: float = 0.0) -> list[str]:
    """Say in words which recorded numbers are not the right ones.

    `source` says where the right ones come from. Numbers may differ by `within`, as in `same`.
    """
    faults = []
    for place, number in right.items():
        old = recorded.get(place, "nothing")
        if not same(old, number, within):
            values = "other bits" if isinstance(number, Tensor) else f"{old} recorded, {number}"
            faults.append(f"round {', '.join(map(str, place))}: {values} {source}")
    return faults


def same(value: Any, other: Any, within: float) -> bool:
    """Say whether two values have the same bits, or differ by at most `within`.

    That is a difference of at most `within` times 1, or times the size or length if this is larger.

    >>> same(math.nan, math.nan, 0.0), same(0.5, 0.51, 0.0), same(0.5, 0.51, 0.02)
    (True, False, True)
    >>> same(math.inf, math.inf, 0.0), same(math.inf, 1.0, 0.02)
    (True, False)
    >>> same(70, 71, 0.0), same(70, 76, 0.02), same(70, 80, 0.02), same(70.0, 76.0, 0.02)
    (False, True, False, False)

    Of tensors the bits count: a zero has a sign, and a NaN is the same as itself.

    >>> zero, nan = torch.tensor([0.0]), torch.tensor([math.nan])
    >>> same(zero, zero.clone(), 0.0), same(zero, -zero, 0.0), same(nan, nan.clone(), 0.0)
    (True, False, True)
    >>> same(zero, zero + 0.019, 0.02), same(zero, zero + 0.021, 0.02), same(zero, zero[0], 0.02)
    (True, False, False)
    """
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return _same_tensors(value, other, within)
    if isinstance(value, int | float) and isinstance(other, int | float):
        if not (math.isfinite(value) and math.isfinite(other)):
            return value == other or (math.isnan(value) and math.isnan(other))
        few = FEW if within and isinstance(other, int) else 0
        return abs(value - other) <= few + within * max(1.0, abs(value), abs(other))
    return bool(value == other)


def _same_tensors(value: Tensor, other: Tensor, within: float) -> bool:
    """Say whether two tensors have the same bits, or a distance of at most `within`."""
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return False
    if torch.equal(_bytes(value), _bytes(other)):
        return True
    distance = float((value.double() - other.double()).norm())
    length = float(other.double().norm())
    return within > 0 and distance <= within * max(1.0, length)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, one after another."""
    return tensor.contiguous().flatten().view(torch.uint8)
