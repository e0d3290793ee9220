"""A grid: one job file that stands for many runs.

A `[grid]` table lists seeds, settings (a name and dotted overrides), methods (a name, a method, and overrides for that
method alone), and values of single keys. Each combination is one run, named
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
from itertools import product
from typing import Annotated, Any

from rayfed.base.errors import InputError, told
from rayfed.base.values import Checked, Ge, build
from rayfed.job import NAME, Job, flat, make_job, override

OWN = ("seeds", "setting", "method")  # keys of the grid itself
SECTIONS = ("data", "train", "clients", "ray", "output")  # of a job: tables of which a grid changes single keys


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
    grid, values = _read(tables.pop("grid"))
    for key, own in _given(grid, values).items():
        if key in others:
            choose = "choose runs with --only (of a paper's table, with --rows)"
            raise InputError(f"'{key}' is given by this job's grid; use {own}=[...], or {choose}")
    base = override(tables, others)
    if not base.get("name"):
        raise InputError('a grid needs a name, for the folder of its runs: name = "search" at the top of the file')
    cells: list[Cell] = []
    seeds = grid.seeds or [base.get("seed", 0)]
    for seed, *chosen in product(seeds, grid.setting or [{}], grid.method or [{}], *values.values()):
        changes = {key: value for entry in (*chosen, {"seed": seed}) for key, value in entry.items() if key != "name"}
        steps = [str(base["name"]), *(entry["name"] for entry in chosen if entry), f"seed-{seed}"]
        setting, method, *_ = chosen
        cell = override(override(tables, changes), others) | {"name": "/".join(steps)}
        cells.append(Cell(cell, steps[0], setting.get("name", ""), method.get("name", "")))
    return cells


def refuse_same(cells: Sequence[Cell]) -> None:
    """Raise `InputError` where two cells are the same job, as where an override replaces what sets them apart."""
    known: dict[str, Cell] = {}
    for cell in cells:
        other = known.setdefault(repr(sorted(flat({**cell.tables, "name": ""}).items(), key=str)), cell)
        if other is not cell:
            text = "the same job under two names; leave out what makes them the same, or one of the two"
            raise InputError(f"grid: '{other.name}' and '{cell.name}' are {text}")


def matching(cells: list[Cell], pattern: str, option: str) -> list[Cell]:
    """The cells whose names match. Raises `InputError` if none does, or if two of them are the same job."""
    found = [cell for cell in cells if fnmatch(cell.name, pattern) or fnmatch(cell.name, f"*/{pattern}")]
    if not found:
        none = f"none of {len(cells)} runs matches, such as '{cells[0].name}'; see --list"
        raise InputError(f"{option} '{pattern}': {none}")
    refuse_same(found)
    return found


Values = dict[str, list[dict[str, Any]]]  # dotted key -> each of its values as a table, with a name


def _given(grid: Grid, values: Values) -> dict[str, str]:
    """The keys of a job that the grid gives to each run, and the grid's own keys for them."""
    listed = {"seed": grid.seeds, "method": grid.method, **values}
    return {key: "grid.seeds" if key == "seed" else f"grid.{key}" for key, found in listed.items() if found}


def _read(given: Any) -> tuple[Grid, Values]:
    if not isinstance(given, Mapping):
        raise InputError(f"grid = {given!r}: this is a table, [grid]")
    own = {key: _entries(value) for key, value in given.items() if key in OWN and not isinstance(value, Mapping)}
    keys = flat({key: value for key, value in given.items() if key not in own})
    lists = {key: value for key, value in keys.items() if "." in key or key == "model"}
    grid = build(Grid, {**own, **{key: value for key, value in keys.items() if key not in lists}}, "grid")
    values = _named_values(lists)
    for where, entries in (("grid.setting", grid.setting), ("grid.method", grid.method)):
        for entry in entries:
            name = entry.get("name")
            if not isinstance(name, str) or not NAME.fullmatch(name) or "/" in name:
                what = "a table without a name" if name is None else f"name = {name!r}"
                raise InputError(f"{where}: {what}: give each a name of letters, digits and . _ + -")
        _refuse_twins([entry["name"] for entry in entries], where)
    for entry in grid.setting:
        for key, instead in {"seed": "grid.seeds", **_given(grid, values)}.items():
            if key in entry:
                text = f"'{entry['name']}' gives a {key}, which {instead} gives to every run"
                raise InputError(f"grid.setting: {text}; leave it out")
    for entry in grid.method:
        if "method" not in entry or "seed" in entry:
            ours = "it takes a name and a method, and keys of the job other than seed"
            raise InputError(f"grid.method: '{entry['name']}' has {', '.join(entry)}; {ours}")
        others = [(f"the setting '{setting['name']}'", setting) for setting in grid.setting]
        for what, other in (*others, ("the grid's lists of values", values)):
            if both := other.keys() & entry.keys() - {"name"}:
                text = f"'{entry['name']}' and {what} both give {', '.join(sorted(both))}"
                raise InputError(f"grid.method: {text}; leave it out of one of the two")
    _refuse_twins(grid.seeds, "grid.seeds")
    return grid, values


def _entries(listed: Any) -> Any:
    """The entries of a list with the name of a method as a table, and with keys that TOML has read as inner tables."""
    return [_entry(one) for one in listed] if isinstance(listed, list) else listed


def _entry(given: Any) -> Any:
    if isinstance(given, str):
        return {"name": given, "method": given}
    if not isinstance(given, Mapping):
        return given
    inner = {key: value for key, value in given.items() if key in SECTIONS and isinstance(value, Mapping)}
    return {key: value for key, value in given.items() if key not in inner} | _dotted(inner)


def _dotted(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """As `flat`, but a table with a name, such as a partition, stays whole."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        whole = not isinstance(value, Mapping) or "name" in value
        found |= {f"{prefix}{key}": value} if whole else _dotted(value, f"{prefix}{key}.")
    return found


def _named_values(lists: Mapping[str, Any]) -> Values:
    """Each value with a name: the last step of its key, or the whole key if two end alike, and the value."""
    ends = Counter(key.rpartition(".")[2] for key in lists)
    found: Values = {}
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise InputError(
                f"grid: '{key}' = {told(values)}: give a list of values, such as \"train.lr\" = [0.01, 0.1]"
            )
        _refuse_twins(values, f"grid: '{key}'")
        end = key.rpartition(".")[2]
        entries = [{"name": f"{end if ends[end] == 1 else key}-{_text(value)}", key: value} for value in values]
        _refuse_twins([entry["name"] for entry in entries], f"grid: '{key}'")
        for entry in entries:
            if not NAME.fullmatch(entry["name"]) or "/" in entry["name"]:
                text = f"{told(entry[key])} cannot be part of a run's name"
                raise InputError(f"grid: '{key}': {text}; give it as [[grid.setting]], with a name")
        found[key] = entries
    return found


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refuse_twins(names: list[Any], where: str) -> None:
    for name in names:  # not hashed: a value may be anything
        if names.count(name) > 1:
            raise InputError(f"{where}: {name!r} is listed {names.count(name)} times")
