"""A grid: one job file that stands for many runs.

A `[grid]` table lists seeds, settings (a name and dotted overrides), methods (a name, a method, and
overrides for that method alone), and values of single keys. Each combination is one run, named
`<name>/<setting>/<method>/<key>-<value>/seed-<seed>`; what is not listed is no part of the name.

>>> tables = {"name": "t", "grid": {"seeds": [0, 1], "method": [{"name": "avg", "method": "fedavg"}]}}
>>> [cell.name for cell in expand(tables)]
['t/avg/seed-0', 't/avg/seed-1']
>>> expand(tables, {"train.lr": 0.1})[1].tables
{'name': 't/avg/seed-1', 'method': 'fedavg', 'seed': 1, 'train': {'lr': 0.1}}
>>> [cell.name for cell in expand({"name": "t", "grid": {"train.lr": [0.01, 0.1], "method": ["fedavg"]}})]
['t/fedavg/lr-0.01/seed-0', 't/fedavg/lr-0.1/seed-0']
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import combinations, product
from typing import Annotated, Any

from rayfed.base.errors import InputError, told
from rayfed.base.values import Checked, Ge, build
from rayfed.job import NAME, Job, flat, make_job, override

# Keys of the grid itself.
OWN = ("seeds", "setting", "method")
# Of a job: tables of which a grid changes single keys.
SECTIONS = (
    "data",
    "train",
    "clients",
    "ray",
    "output",
)


@dataclass(frozen=True)
class Grid(Checked):
    """The `[grid]` table."""

    seeds: Annotated[list[Annotated[int, Ge(0)]], "seeds of the runs; empty: the job's"] = field(
        default_factory=list
    )
    setting: Annotated[list[dict[str, Any]], "each with a name and dotted overrides"] = field(
        default_factory=list
    )
    method: Annotated[
        list[dict[str, Any]], "methods, each with a name, a method and dotted overrides"
    ] = field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    """One run of a grid: a job's tables, not checked yet, and its coordinates ('' where the grid
    lists nothing).
    """

    tables: dict[str, Any]
    # The grid's name; '' for a job without a grid.
    grid: str = ""
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

    `overrides` win over the settings; overrides of the grid itself (`grid.seeds`) change the grid.
    Raises `InputError` where the grid is not well formed; each run is checked by its `job()`.
    """
    overrides = overrides or {}
    of_grid = {key: value for key, value in overrides.items() if key.split(".")[0] == "grid"}
    of_job = {key: value for key, value in overrides.items() if key not in of_grid}
    tables = override(tables, of_grid)
    if "grid" not in tables:
        return [Cell(override(tables, of_job))]
    axes = _axes(tables.pop("grid"))
    for axis in axes:
        key = "seed" if axis == "seeds" else axis
        if key in of_job:
            raise InputError(
                f"'{key}' is given by this job's grid; use grid.{axis}=[...], or choose runs with "
                "--only (of a paper's table, with --rows)"
            )
    base = override(tables, of_job)
    if not base.get("name"):
        raise InputError(
            'a grid needs a name, for the folder of its runs: name = "search" at the top of the '
            "file"
        )
    grid = str(base["name"])
    seeds = axes.pop("seeds", None) or _seeds([base.get("seed", 0)])
    cells: list[Cell] = []
    for combination in product(seeds, *axes.values()):
        # The seed changes last, and is the last step of the name.
        entries = combination[1:] + combination[:1]
        changes: dict[str, Any] = {}
        for entry in entries:
            changes |= entry
        name = "/".join([grid, *(entry["name"] for entry in entries)])
        cell = override(override(tables, changes), of_job) | {"name": name}
        names = {axis: entry["name"] for axis, entry in zip(axes, combination[1:], strict=True)}
        cells.append(Cell(cell, grid, names.get("setting", ""), names.get("method", "")))
    return cells


def refuse_same(cells: Sequence[Cell]) -> None:
    """Raise `InputError` where two cells are the same job, as where an override replaces what sets
    them apart.
    """
    first: dict[str, Cell] = {}
    for cell in cells:
        values = repr(sorted(flat({**cell.tables, "name": ""}).items(), key=str))
        other = first.setdefault(values, cell)
        if other is not cell:
            raise InputError(
                f"grid: '{other.name}' and '{cell.name}' are the same job under two names; leave "
                "out what makes them the same, or one of the two"
            )


def matching(cells: list[Cell], pattern: str, option: str) -> list[Cell]:
    """The cells whose names match.

    Raises `InputError` if none does, or if two of them are the same job.
    """
    chosen = [
        cell for cell in cells if fnmatch(cell.name, pattern) or fnmatch(cell.name, f"*/{pattern}")
    ]
    if not chosen:
        raise InputError(
            f"{option} '{pattern}': none of {len(cells)} runs matches, such as '{cells[0].name}'; "
            "see --list"
        )
    refuse_same(chosen)
    return chosen


# What one list of the grid gives: each entry has a name, and values by dotted key.
Axis = list[dict[str, Any]]


def _axes(table: Any) -> dict[str, Axis]:
    """The lists of a grid: seeds, settings, methods, values of single keys.

    No two of them give the same key.
    """
    if not isinstance(table, Mapping):
        raise InputError(f"grid = {table!r}: this is a table, [grid]")
    own = {
        key: value for key, value in table.items() if key in OWN and not isinstance(value, Mapping)
    }
    keys = flat({key: value for key, value in table.items() if key not in own})
    lists = {key: value for key, value in keys.items() if "." in key or key == "model"}
    unknown = {key: value for key, value in keys.items() if key not in lists}
    entries = {
        key: list(map(_entry, value)) if isinstance(value, list) else value
        for key, value in own.items()
    }
    grid = build(Grid, {**entries, **unknown}, "grid")
    _refuse_twins(grid.seeds, "grid.seeds")
    axes = {
        "seeds": _seeds(grid.seeds),
        "setting": grid.setting,
        "method": grid.method,
        **_named_values(lists),
    }
    axes = {name: axis for name, axis in axes.items() if axis}
    for name, axis in axes.items():
        _check_names(axis, f"grid.{name}")
    for entry in grid.method:
        if "method" not in entry:
            raise InputError(
                f"grid.method: '{entry['name']}' has {', '.join(entry)}; it takes a name and a "
                "method, and keys of the job other than seed"
            )
    for first, second in combinations({"seeds": _seeds([0]), **axes}.values(), 2):
        for one, other in product(first, second):
            both = one.keys() & other.keys() - {"name"}
            if both:
                raise InputError(
                    f"grid: '{one['name']}' and '{other['name']}' both give "
                    f"{', '.join(sorted(both))}; leave it out of one of the two"
                )
    return axes


def _seeds(seeds: Sequence[int]) -> Axis:
    return [{"name": f"seed-{seed}", "seed": seed} for seed in seeds]


def _check_names(axis: Axis, where: str) -> None:
    for entry in axis:
        name = entry.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name) or "/" in name:
            example = (
                ', as in { name = "mine", method = "mymethod:Mine" }'
                if where == "grid.method"
                else ""
            )
            raise InputError(
                f"{where}: name = {name!r}: give each a name of letters, digits and . _ + "
                f"-{example}"
            )
    _refuse_twins([entry["name"] for entry in axis], where)


def _entry(value: Any) -> Any:
    """A list's entry: a method's name as a table, and the keys that TOML has read as inner tables,
    dotted again.
    """
    if isinstance(value, str):
        return {"name": value, "method": value}
    if not isinstance(value, Mapping):
        return value
    inner = {
        key: table for key, table in value.items() if key in SECTIONS and isinstance(table, Mapping)
    }
    return {key: one for key, one in value.items() if key not in inner} | _dotted(inner)


def _dotted(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """As `flat`, but a table with a name, such as a partition, stays whole."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping) and "name" not in value:
            values |= _dotted(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _named_values(lists: Mapping[str, Any]) -> dict[str, Axis]:
    """Each value with a name: the last step of its key, or the whole key if two end alike, and the
    value.
    """
    ends = Counter(key.rpartition(".")[2] for key in lists)
    named: dict[str, Axis] = {}
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise InputError(
                f"grid: '{key}' = {told(values)}: give a list of values, such as \"train.lr\" = "
                "[0.01, 0.1]"
            )
        end = key.rpartition(".")[2]
        short = end if ends[end] == 1 else key
        named[key] = []
        for value in values:
            name = f"{short}-{str(value).lower() if isinstance(value, bool) else value}"
            if not NAME.fullmatch(name) or "/" in name:
                raise InputError(
                    f"grid: '{key}': {told(value)} cannot be part of a run's name; give it as "
                    "[[grid.setting]], with a name"
                )
            named[key].append({"name": name, key: value})
    return named


def _refuse_twins(values: list[Any], where: str) -> None:
    # Not hashed: a value may be anything.
    for value in values:
        if values.count(value) > 1:
            raise InputError(f"{where}: {value!r} is listed {values.count(value)} times")
