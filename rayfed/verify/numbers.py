"""The numbers of a run by their place, and where they are others than they should be."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
Key = tuple[int, str, str]  # round; row, as "clients, client 7"; column, or the name of a note or a tensor
Numbers = dict[Key, Any]
FEW = 5  # test images that may change sides where rounding differs
LEFT_OUT = {"round", "notes", "seconds", "node"}  # time and node say where a run was, not what it computed


def of_tables(tables: Mapping[str, Iterable[Row]]) -> Numbers:
    """The numbers in rows of tables.

    >>> of_tables({"clients": [{"round": 1, "client": 7, "seconds": 2.0, "notes": [("loss.ce", 0.1)]}]})
    {(1, 'clients, client 7', 'loss.ce'): 0.1}
    """
    numbers: Numbers = {}
    for table, row in ((table, row) for table, rows in tables.items() for row in rows):
        columns = {column: value for column, value in row.items() if column not in LEFT_OUT}
        keys = [column for column, value in columns.items() if column == "client" or isinstance(value, str)]
        place = ", ".join([table, *(f"{key} {columns.pop(key)}" for key in keys)])
        for column, value in (*columns.items(), *(row.get("notes") or ())):
            numbers[row["round"], place, column] = value
    return numbers


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
    """Whether two values have the same bits; or are at most so far apart: of 1, or of their size or length if larger.

    >>> same(math.nan, math.nan, 0.0), same(0.5, 0.51, 0.0), same(0.5, 0.51, 0.02), same(70, 80, 0.02)
    (True, False, True, False)
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        bits, other_bits = (each.contiguous().flatten().view(torch.uint8) for each in (first, second))
        apart, length = (float(each.double().norm()) for each in (first.double() - second.double(), second))
        return torch.equal(bits, other_bits) or (within > 0 and apart <= within * max(1.0, length))
    if isinstance(first, int | float) and isinstance(second, int | float):
        few = FEW if within and isinstance(second, int) else 0
        both_nan = math.isnan(first) and math.isnan(second)
        return both_nan or abs(first - second) <= few + within * max(1.0, abs(first), abs(second))
    return bool(first == second)
