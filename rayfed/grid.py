"""A grid: one job file that stands for many runs, and the table of their results.

A `[grid]` table lists seeds, settings (dotted overrides with a name) and methods; each combination is one run, named
`<name>/<setting>/<method>/seed-<seed>`. A setting or method that is not listed is no part of the name.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from statistics import mean, stdev
from typing import Annotated, Any

from rayfed.job import NAME, Job, make_job, override
from rayfed.values import Ge, InputError, build


@dataclass(frozen=True)
class Grid:
    """The `[grid]` table."""

    seeds: Annotated[list[Annotated[int, Ge(0)]], "seeds of the runs; none: the job's"] = field(default_factory=list)
    setting: Annotated[list[dict[str, Any]], "each a name, and dotted overrides"] = field(default_factory=list)
    method: Annotated[list[dict[str, Any]], "each a name, and a method"] = field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    """One run of a grid: a job's tables, not checked yet, and its place ('' where the grid lists nothing)."""

    tables: dict[str, Any]
    grid: str = ""  # the grid's name; '' for a job that is no grid
    setting: str = ""
    method: str = ""

    @property
    def name(self) -> str:
        return str(self.tables.get("name", ""))

    def job(self) -> Job:
        """The tables, checked."""
        try:
            return make_job(self.tables)
        except InputError as error:
            raise InputError(f"{self.name}: {error}" if self.grid else str(error)) from None


def expand(tables: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> list[Cell]:
    """The runs that a job file stands for, seed by seed; one, if it has no `[grid]`.

    `overrides` go over the settings, except those of the grid itself (`grid.seeds`). Raises `InputError` where the grid
    is not well formed; each run is checked by its `job()`.
    """
    of_grid = {key: value for key, value in (overrides or {}).items() if key.split(".")[0] == "grid"}
    others = {key: value for key, value in (overrides or {}).items() if key not in of_grid}
    tables = override(tables, of_grid)
    if "grid" not in tables:
        return [Cell(override(tables, others))]
    grid = _read(tables.pop("grid"))
    for key, listed in (("seed", grid.seeds), ("method", grid.method)):
        if listed and key in others:
            raise InputError(f"'{key}' is given by this job's grid; use grid.seeds=[...], or choose runs with --only")
    base = override(tables, others)
    cells = []
    for seed, setting, method in product(
        grid.seeds or [base.get("seed", 0)], grid.setting or [{}], grid.method or [{}]
    ):
        changes = {key: value for key, value in (setting | method | {"seed": seed}).items() if key != "name"}
        steps = [str(base.get("name", "")), *(entry["name"] for entry in (setting, method) if entry), f"seed-{seed}"]
        cell = override(override(tables, changes), others) | {"name": "/".join(steps)}
        cells.append(Cell(cell, steps[0], setting.get("name", ""), method.get("name", "")))
    return cells


def _read(given: Any) -> Grid:
    if not isinstance(given, Mapping):
        raise InputError(f"grid = {given!r}: this is a table, [grid]")
    grid = build(Grid, given, where="grid")
    for where, entries in (("grid.setting", grid.setting), ("grid.method", grid.method)):
        for entry in entries:
            name = entry.get("name")
            if not isinstance(name, str) or not NAME.fullmatch(name) or "/" in name:
                raise InputError(f"{where}: name = {name!r}: give each a name of letters, digits and . _ + -")
        _refuse_twins([entry["name"] for entry in entries], where)
    for entry in grid.method:
        if set(entry) != {"name", "method"}:
            raise InputError(f"grid.method: '{entry['name']}' has {', '.join(entry)}; it takes a name and a method")
    _refuse_twins(grid.seeds, "grid.seeds")
    return grid


def _refuse_twins(names: list[Any], where: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"{where}: {name!r} is there {count} times")


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; of one seed, no deviation.

    >>> print(Spread.of([0.5, 0.7]), Spread.of([0.5]), sep=", ")
    0.600 ± 0.141, 0.500
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
    """A setting and a method, over those of its seeds that are done."""

    setting: str
    method: str
    seeds: int
    best_accuracy: Spread
    last_accuracy: Spread
    forgetting: Spread  # in the last round


def tabulate(done: Iterable[tuple[Cell, Mapping[str, Any]]]) -> list[Row]:
    """A row for each setting and method among finished cells, which are given with their summaries."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell, summary in done:
        found.setdefault((cell.setting, cell.method), []).append(summary)
    return [
        Row(
            setting,
            method,
            seeds=len(summaries),
            best_accuracy=Spread.of([summary["best"]["test_accuracy"] for summary in summaries]),
            last_accuracy=Spread.of([summary["last"]["test_accuracy"] for summary in summaries]),
            forgetting=Spread.of([summary["last"]["forgetting"] for summary in summaries]),
        )
        for (setting, method), summaries in found.items()
    ]


def as_csv(rows: Iterable[Row]) -> str:
    """The rows as comma-separated values; each spread has a column of its own, empty for one seed."""
    figures = ("best_accuracy", "last_accuracy", "forgetting")
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    write(["setting", "method", "seeds", *(name for figure in figures for name in (figure, f"{figure}_spread"))])
    for row in rows:
        spreads = [getattr(row, figure) for figure in figures]
        write([row.setting, row.method, row.seeds, *(value for s in spreads for value in (s.mean, s.deviation))])
    return text.getvalue()
