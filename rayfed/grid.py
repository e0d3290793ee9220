"""A grid: one job file that stands for many runs, and the table of their results.

A `[grid]` table lists seeds, settings (dotted overrides with a name) and methods (with a name, and overrides for this
method alone); each combination is one run, named `<name>/<setting>/<method>/seed-<seed>`. A setting or method that is
not listed is no part of the name.

>>> tables = {"name": "t", "grid": {"seeds": [0, 1], "method": [{"name": "avg", "method": "fedavg"}]}}
>>> [cell.name for cell in expand(tables)]
['t/avg/seed-0', 't/avg/seed-1']
>>> expand(tables, {"train.lr": 0.1})[1].tables
{'name': 't/avg/seed-1', 'method': 'fedavg', 'seed': 1, 'train': {'lr': 0.1}}
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import mean, stdev
from typing import Annotated, Any

from rayfed.errors import InputError
from rayfed.job import NAME, Job, make_job, override
from rayfed.values import Checked, Ge, build

FIGURES = {  # of a grid's table: where each stands in a run's summary
    "best_accuracy": ("best", "test_accuracy"),
    "last_accuracy": ("last", "test_accuracy"),
    "forgetting": ("last", "forgetting"),
}


@dataclass(frozen=True)
class Grid(Checked):
    """The `[grid]` table."""

    seeds: Annotated[list[Annotated[int, Ge(0)]], "seeds of the runs; empty: the job's"] = field(default_factory=list)
    setting: Annotated[list[dict[str, Any]], "each with a name and dotted overrides"] = field(default_factory=list)
    method: Annotated[list[dict[str, Any]], "methods, each with a name, a method and dotted overrides"] = field(
        default_factory=list
    )


@dataclass(frozen=True)
class Cell:
    """One run of a grid: a job's tables, not checked yet, and its coordinates ('' where the grid lists nothing)."""

    tables: dict[str, Any]
    grid: str = ""  # the grid's name; '' for a job without a grid
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
    """The runs that a job file stands for, seed by seed; a single run if it has no `[grid]`.

    `overrides` win over the settings; overrides of the grid itself (`grid.seeds`) change the grid. Raises `InputError`
    where the grid is not well formed; each run is checked by its `job()`.
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
    grid = build(Grid, given, "grid")
    for where, entries in (("grid.setting", grid.setting), ("grid.method", grid.method)):
        for entry in entries:
            name = entry.get("name")
            if not isinstance(name, str) or not NAME.fullmatch(name) or "/" in name:
                raise InputError(f"{where}: name = {name!r}: give each a name of letters, digits and . _ + -")
        _refuse_twins([entry["name"] for entry in entries], where)
    for entry in grid.setting:
        for key, instead in {"seed": "grid.seeds", **({"method": "grid.method"} if grid.method else {})}.items():
            if key in entry:
                text = f"'{entry['name']}' gives a {key}, which {instead} gives to every run"
                raise InputError(f"grid.setting: {text}; leave it out")
    for entry in grid.method:
        if "method" not in entry or "seed" in entry:
            ours = "it takes a name and a method, and keys of the job other than seed"
            raise InputError(f"grid.method: '{entry['name']}' has {', '.join(entry)}; {ours}")
        for setting in grid.setting:
            if both := setting.keys() & entry.keys() - {"name"}:
                text = f"'{entry['name']}' and the setting '{setting['name']}' both give {', '.join(sorted(both))}"
                raise InputError(f"grid.method: {text}; leave it out of one of the two")
    _refuse_twins(grid.seeds, "grid.seeds")
    return grid


def _refuse_twins(names: list[Any], where: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"{where}: {name!r} is listed {count} times")


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and the sample standard deviation; None for a single value."""
    return mean(values), stdev(values) if len(values) > 1 else None


def spread_text(mean: float, deviation: float | None) -> str:
    """
    >>> spread_text(*spread([0.5, 0.7])), spread_text(*spread([0.5]))
    ('0.600 ± 0.141', '0.500')
    """
    return f"{mean:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")


def tabulate(done: Iterable[tuple[Cell, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each setting and method among finished cells, each cell given with its run's summary.

    Over the seeds, `FIGURES` have their mean, and their deviation as `<figure>_spread`.
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell, summary in done:
        found.setdefault((cell.setting, cell.method), []).append(summary)
    rows = []
    for (setting, method), summaries in found.items():
        row: dict[str, Any] = {"setting": setting, "method": method, "seeds": len(summaries)}
        for figure, (when, key) in FIGURES.items():
            row[figure], row[f"{figure}_spread"] = spread([summary[when][key] for summary in summaries])
        rows.append(row)
    return rows


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `tabulate` as comma-separated values."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
