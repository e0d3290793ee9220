"""The numbers of a run by their place, and where they are others than they should be."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
# Round; row, as "clients, client 7"; column, or the name of a note or a tensor.
Key = tuple[int, str, str]
Numbers = dict[Key, Any]
# Test images that may change sides where rounding differs.
FEW = 5
# Time and node say where a run was, not what it computed.
LEFT_OUT = {
    "round",
    "notes",
    "seconds",
    "node",
}


def of_tables(tables: Mapping[str, Iterable[Row]]) -> Numbers:
    """The numbers in rows of tables.

    >>> of_tables({"clients": [{"round": 1, "client": 7, "seconds": 2.0, "notes": [("loss.ce", 0.1)]}]})
    {(1, 'clients, client 7', 'loss.ce'): 0.1}
    """
    numbers: Numbers = {}
    for table, row in ((table, row) for table, rows in tables.items() for row in rows):
        place = place_of(table, row)
        values = {
            column: row[column]
            for column in row
            if column not in LEFT_OUT and not _names(column, row)
        }
        for column, value in (*values.items(), *(row.get("notes") or ())):
            numbers[row["round"], place, column] = value
    return numbers


def place_of(table: str, row: Row) -> str:
    """Which row of a round it is.

    >>> place_of("classes", {"round": 1, "class": "cat", "accuracy": 0.5})
    'classes, class cat'
    """
    return ", ".join([table, *(f"{column} {row[column]}" for column in row if _names(column, row))])


def _names(column: str, row: Row) -> bool:
    """Whether a column says which row it is."""
    return column not in LEFT_OUT and (column == "client" or isinstance(row[column], str))


def differing(recorded: Numbers, right: Numbers, source: str, within: float = 0.0) -> list[str]:
    """Which recorded numbers are not the right ones, in words; `source` says where those come from."""
    faults = []
    for place, number in right.items():
        other = recorded.get(place, "nothing")
        if not same(other, number, within):
            both = "other bits" if isinstance(number, Tensor) else f"{other} recorded, {number}"
            faults.append(f"round {', '.join(map(str, place))}: {both} {source}")
    return faults


def same(first: Any, second: Any, within: float) -> bool:
    """Whether two values have the same bits; or are at most so far apart: of 1, or of their size or
    length if larger.

    >>> same(math.nan, math.nan, 0.0), same(0.5, 0.51, 0.0), same(0.5, 0.51, 0.02), same(70, 80, 0.02)
    (True, False, True, False)
    >>> same(math.inf, math.inf, 0.0), same(math.inf, 1.0, 0.02)
    (True, False)
    >>> same(70, 71, 0.0), same(70, 76, 0.02), same(70.0, 76.0, 0.02)
    (False, True, False)

    Of tensors the bits count: a zero has a sign, and a NaN is the same as itself.

    >>> zero, nan = torch.tensor([0.0]), torch.tensor([math.nan])
    >>> same(zero, zero.clone(), 0.0), same(zero, -zero, 0.0), same(nan, nan.clone(), 0.0)
    (True, False, True)
    >>> same(zero, zero + 0.019, 0.02), same(zero, zero + 0.021, 0.02), same(zero, zero[0], 0.02)
    (True, False, False)
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        bits, other_bits = (
            each.contiguous().flatten().view(torch.uint8) for each in (first, second)
        )
        apart, length = (
            float(each.double().norm()) for each in (first.double() - second.double(), second)
        )
        return torch.equal(bits, other_bits) or (within > 0 and apart <= within * max(1.0, length))
    if isinstance(first, int | float) and isinstance(second, int | float):
        if not (math.isfinite(first) and math.isfinite(second)):
            return first == second or (math.isnan(first) and math.isnan(second))
        few = FEW if within and isinstance(second, int) else 0
        return abs(first - second) <= few + within * max(1.0, abs(first), abs(second))
    return bool(first == second)
