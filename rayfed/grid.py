"""A grid: one job file that stands for many runs, and the table of their results.

A `[grid]` table lists seeds, settings (dotted overrides with a name) and methods; each combination is one run, named
`<name>/<setting>/<method>/seed-<seed>`. An axis that is left out is no part of the name, except that of the seeds.

>>> tables = {"name": "t", "grid": {"seeds": [0, 1], "method": [{"name": "avg", "method": "fedavg"}]}}
>>> [cell.name for cell in expand(tables)]
['t/avg/seed-0', 't/avg/seed-1']
>>> expand(tables, {"train.lr": 0.1})[1].tables
{'name': 't/avg/seed-1', 'method': 'fedavg', 'seed': 1, 'train': {'lr': 0.1}}
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, product
from statistics import mean, stdev
from typing import Annotated, Any

from rayfed.job import NAME, Job, make_job, override
from rayfed.values import Ge, InputError, build

AXES = {"seed": "grid.seeds", "method": "grid.method"}  # keys of a job that a grid sets itself


@dataclass(frozen=True)
class Grid:
    """The `[grid]` table. The default is one run of the job as it stands."""

    seeds: Annotated[list[Annotated[int, Ge(0)]], "seeds of the runs"] = field(default_factory=list)
    setting: Annotated[list[dict[str, Any]], "a name and dotted overrides each"] = field(default_factory=list)
    method: Annotated[list[dict[str, Any]], "a name and a method each"] = field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    """One run of a grid: a job's tables, unchecked, and its place in the grid ('' where there is no such axis)."""

    tables: dict[str, Any]
    setting: str = ""
    method: str = ""

    @property
    def name(self) -> str:
        return str(self.tables.get("name"))

    def job(self) -> Job:
        """The cell's tables, checked."""
        try:
            return make_job(self.tables)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None


def expand(tables: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> list[Cell]:
    """The runs that a job file stands for, seed by seed; one, if it has no `[grid]`. `overrides` go over all of them.

    Overrides of the grid itself (`grid.seeds`) are applied first. Raises `InputError` for a grid that is not well formed.
    """
    overrides = dict(overrides or {})
    tables = override(tables, {key: overrides.pop(key) for key in list(overrides) if key.split(".")[0] == "grid"})
    if "grid" not in tables:
        return [Cell(override(tables, overrides))]
    grid = _read(tables.pop("grid"), tables.get("seed", 0))
    for key, axis in AXES.items():
        if key in overrides and getattr(grid, axis.removeprefix("grid.")):
            raise InputError(f"'{key}' is set by this job's grid; choose with {axis} or --only")
    name = override(tables, overrides).get("name")
    return [
        _cell(tables, overrides, name, setting, method, seed)
        for seed, setting, method in product(grid.seeds, grid.setting or [{}], grid.method or [{}])
    ]


def _cell(
    tables: dict[str, Any],
    overrides: Mapping[str, Any],
    name: Any,
    setting: dict[str, Any],
    method: dict[str, Any],
    seed: int,
) -> Cell:
    changes = {key: value for key, value in (setting | method).items() if key != "name"}
    tables = override(override(tables, changes | {"seed": seed}), overrides)
    place = [entry["name"] for entry in (setting, method) if entry]
    tables["name"] = "/".join([str(name), *place, f"seed-{seed}"])
    return Cell(tables, setting.get("name", ""), method.get("name", ""))


def _read(given: Any, seed: int) -> Grid:
    if not isinstance(given, Mapping):
        raise InputError(f"grid = {given!r}: this is a table, [grid]")
    grid = build(Grid, given, where="grid")
    for axis, entries in (("setting", grid.setting), ("method", grid.method)):
        for entry in entries:
            name = entry.get("name")
            if not isinstance(name, str) or not NAME.fullmatch(name) or "/" in name:
                raise InputError(f"grid.{axis}: {entry!r} needs a name of letters, digits and . _ + -")
            if axis == "method" and set(entry) != {"name", "method"}:
                raise InputError(f"grid.method: '{name}' has the keys {', '.join(entry)}; it takes name and method")
        _refuse_twins([entry["name"] for entry in entries], f"grid.{axis}")
    _refuse_twins(grid.seeds, "grid.seeds")
    return Grid(grid.seeds or [seed], grid.setting, grid.method)


def _refuse_twins(names: list[Any], where: str) -> None:
    name, count = Counter(names).most_common(1)[0] if names else (None, 0)
    if count > 1:
        raise InputError(f"{where}: {name!r} is there {count} times")


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; the latter None for one seed.

    >>> print(Spread.of([0.5, 0.7]), Spread.of([0.5]))
    0.600 ± 0.141 0.500
    """

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(mean(values), stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.deviation is None else f" ± {self.deviation:.3f}")


@dataclass(frozen=True)
class Row:
    """A setting and a method, over the seeds that are done."""

    setting: str
    method: str
    seeds: int
    best_accuracy: Spread
    last_accuracy: Spread
    forgetting: Spread  # in the last round


def tabulate(done: Iterable[tuple[Cell, Mapping[str, Any]]]) -> list[Row]:
    """A row for each setting and method of some finished cells with their summaries, in their first order."""

    def rows() -> Iterator[Row]:
        listed = list(done)
        order = list(dict.fromkeys(_place(item) for item in listed))
        for (setting, method), items in groupby(sorted(listed, key=lambda i: order.index(_place(i))), key=_place):
            found = [summary for _, summary in items]
            yield Row(
                setting,
                method,
                len(found),
                best_accuracy=Spread.of([summary["best"]["test_accuracy"] for summary in found]),
                last_accuracy=Spread.of([summary["last"]["test_accuracy"] for summary in found]),
                forgetting=Spread.of([summary["last"]["forgetting"] for summary in found]),
            )

    return list(rows())


def _place(item: tuple[Cell, Any]) -> tuple[str, str]:
    return item[0].setting, item[0].method


def as_csv(rows: Iterable[Row]) -> str:
    """The rows as comma-separated values; a spread has a column of its own, empty for one seed."""
    figures = ("best_accuracy", "last_accuracy", "forgetting")
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write(["setting", "method", "seeds", *(name for figure in figures for name in (figure, f"{figure}_spread"))])
    for row in rows:
        spreads = [getattr(row, figure) for figure in figures]
        write([row.setting, row.method, row.seeds, *(value for s in spreads for value in (s.mean, s.deviation))])
    return out.getvalue()
