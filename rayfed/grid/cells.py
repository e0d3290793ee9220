"""A grid: one job file that stands for many runs.

A `[grid]` table lists seeds, settings (a name and dotted overrides), methods (a name, a method, and
overrides for this method alone), and values of single keys. Each combination is one run. Its name
is `<name>/<setting>/<method>/<key>-<value>/seed-<seed>`. A list that the grid does not have is no
part of the name, except the seed.

>>> methods = [{"name": "avg", "method": "fedavg"}]
>>> tables = {"name": "t", "grid": {"seeds": [0, 1], "method": methods}}
>>> [cell.name for cell in expand(tables)]
['t/avg/seed-0', 't/avg/seed-1']
>>> expand(tables, {"train.lr": 0.1})[1].tables
{'name': 't/avg/seed-1', 'method': 'fedavg', 'seed': 1, 'train': {'lr': 0.1}}
>>> tables = {"name": "t", "grid": {"train.lr": [0.01, 0.1], "method": ["fedavg"]}}
>>> [cell.name for cell in expand(tables)]
['t/fedavg/lr-0.01/seed-0', 't/fedavg/lr-0.1/seed-0']
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any

from rayfed.base.errors import InputError, told
from rayfed.base.values import Checked, Ge, build
from rayfed.clients.settings import Training
from rayfed.job import NAME, Job, flat, make_job, override

# The keys of the grid itself.
OWN = ("seeds", "setting", "method", "first")
# A grid can change single keys of these tables of a job.
SECTIONS = ("data", "train", "clients", "ray", "output")
# The last step but the seed of the name of a run that comes first.
FIRST = "first"
# What `grid.first` cannot give, and why.
NAMED = f"the run is named {FIRST}, and there is one for each seed"
NOT_FIRST = {
    "name": NAMED,
    "seed": NAMED,
    # The table of the grid lies there too, and comes from all runs.
    "output.path": "the runs of a grid are in one folder; for all of them: -s output.path=FOLDER",
}
# What one list of the grid gives: each entry has a name, and values by dotted key.
Axis = list[dict[str, Any]]


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
    first: Annotated[
        dict[str, Any], "dotted overrides of a run with whose last weights all others begin"
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run of a grid: a job's tables, not checked yet, and its place in the grid."""

    tables: dict[str, Any]
    # The grid's name; '' for a job without a grid.
    grid: str = ""
    # These names are '' if the grid lists no settings or no methods.
    setting: str = ""
    method: str = ""
    # The name of the run with whose last weights this one begins; '' if there is none.
    after: str = ""

    @property
    def name(self) -> str:
        return str(self.tables.get("name", ""))

    def job(self) -> Job:
        """Return the job of the tables. Raises `InputError` if it is not valid."""
        try:
            return make_job(self.tables)
        except InputError as error:
            raise InputError(f"{self.name}: {error}" if self.grid else str(error)) from None


def expand(tables: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> list[Cell]:
    """Return the runs that a job file stands for, seed by seed.

    Without a `[grid]` it is a single run. `overrides` win over the settings, but not over what
    `grid.first` names. Overrides of the grid itself (`grid.seeds`) change the grid. Raises
    `InputError` if the grid is not well formed. Each run is checked later, by its `job()`.
    """
    overrides = overrides or {}
    of_grid = {key: value for key, value in overrides.items() if key.split(".")[0] == "grid"}
    of_job = {key: value for key, value in overrides.items() if key not in of_grid}
    tables = override(tables, of_grid)
    if "grid" not in tables:
        return [Cell(override(tables, of_job))]
    grid_table = tables.pop("grid")
    first = _first(grid_table)
    axes = _axes(grid_table)
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
    # All runs of a seed come before the next seed, but the seed is the last step of a name.
    for seed, *entries in product(seeds, *axes.values()):
        changes: dict[str, Any] = {}
        steps = [grid]
        for entry in [*entries, seed]:
            changes |= entry
            steps.append(entry["name"])
        cell = override(override(tables, changes), of_job) | {"name": "/".join(steps)}
        names = {axis: entry["name"] for axis, entry in zip(axes, entries, strict=True)}
        cells.append(Cell(cell, grid, names.get("setting", ""), names.get("method", "")))
    if first is None:
        return cells
    firsts = []
    for seed in seeds:
        name = f"{grid}/{FIRST}/{seed['name']}"
        # What `grid.first` names is for this run alone: an override of all runs does not reach it.
        changes = first | {"seed": seed["seed"]}
        firsts.append(Cell(override(base, changes) | {"name": name}, grid, method=FIRST))
    return firsts + [_after(cell, firsts) for cell in cells]


def _first(table: Any) -> dict[str, Any] | None:
    """Return the overrides of the run that comes first; None if the grid has no such run.

    Raises `InputError` if they are not a table, or if they give a key of `NOT_FIRST`.
    """
    # `{}` is the default of the key.
    if not isinstance(table, Mapping) or table.get("first", {}) == {}:
        return None
    first = table["first"]
    if not isinstance(first, Mapping):
        raise InputError(
            f"grid.first = {told(first)}: this is a table of dotted keys, such as "
            'first = { "train.num_rounds" = 10 }'
        )
    overrides = _entry(first)
    for key, reason in NOT_FIRST.items():
        if key in overrides:
            raise InputError(f"grid.first: leave '{key}' out; {reason}")
    return overrides


def _after(cell: Cell, firsts: Sequence[Cell]) -> Cell:
    """Return a cell that begins with the last weights of the first run of its seed.

    Raises `InputError` if it has another network, or weights of its own.
    """
    (first,) = [other for other in firsts if other.tables["seed"] == cell.tables["seed"]]
    model, weights = _model(cell)
    # The first run may have weights to begin with.
    first_model, _ = _model(first)
    if model != first_model:
        raise InputError(
            f"grid.first: '{cell.name}' has another network than the first run, whose weights it "
            f"begins with: model = {told(model)} here, {told(first_model)} there; leave the "
            "network out of grid.first and of the grid's lists; for all runs: -s model=NAME"
        )
    if weights:
        raise InputError(
            f"grid.first: '{cell.name}' begins with the weights of the first run; leave "
            "model.weights out, or give them to the first run alone: "
            f'first = {{ "model.weights" = "{weights}", ... }}'
        )
    tables = override(cell.tables, {"model": model | {"weights": _last_weights(first)}})
    return replace(cell, tables=tables, after=first.name)


def _model(cell: Cell) -> tuple[dict[str, Any], Any]:
    """Return the [model] table of a cell without its weights, and the path of these, or ''."""
    model = cell.tables.get("model", "cnn")
    table = {"name": model} if isinstance(model, str) else dict(model)
    return table, table.pop("weights", "")


def _last_weights(first: Cell) -> str:
    """Return the path of the file that will hold the last weights of a first run.

    Raises `InputError` if its checkpoints do not lie in its folder.
    """
    output = first.tables.get("output", {})
    if output.get("checkpoints"):
        raise InputError(
            "grid.first: its weights are read from its folder; leave output.checkpoints out"
        )
    num_rounds = first.tables.get("train", {}).get("num_rounds", Training.num_rounds)
    path = Path(output.get("path", "runs")) / first.name / "checkpoints"
    return str(path / f"round-{num_rounds:05d}.safetensors")


def refuse_same(cells: Sequence[Cell]) -> None:
    """Raise `InputError` if two cells are the same job.

    They can be the same if an override replaces the values in which they differ.
    """
    by_values: dict[str, Cell] = {}
    for cell in cells:
        values = repr(sorted(flat({**cell.tables, "name": ""}).items(), key=str))
        other = by_values.setdefault(values, cell)
        if other is not cell:
            raise InputError(
                f"grid: '{other.name}' and '{cell.name}' are the same job under two names; leave "
                "out what makes them the same, or one of the two"
            )


def matching(cells: list[Cell], pattern: str, option: str) -> list[Cell]:
    """Return the cells whose names, or the ends of whose names, match a pattern.

    `option` is the option that gave the pattern, for messages. Raises `InputError` if no cell
    matches, or if two of them are the same job.
    """
    chosen = [
        cell for cell in cells if fnmatch(cell.name, pattern) or fnmatch(cell.name, f"*/{pattern}")
    ]
    if not chosen:
        raise InputError(
            f"{option} '{pattern}': none of {len(cells)} runs matches, such as '{cells[0].name}'; "
            "see --list"
        )
    # A run that was chosen needs the run before it.
    needed = {cell.after for cell in chosen}
    chosen = [cell for cell in cells if cell in chosen or cell.name in needed]
    refuse_same(chosen)
    return chosen


def _axes(table: Any) -> dict[str, Axis]:
    """Return the lists of a grid: seeds, settings, methods, values of single keys.

    Raises `InputError` if two of them give the same key.
    """
    if not isinstance(table, Mapping):
        raise InputError(f"grid = {table!r}: this is a table, [grid]")
    grid_values, job_values = {}, {}
    for key, value in table.items():
        if key not in OWN or (key != "first" and isinstance(value, Mapping)):
            job_values[key] = value
        elif isinstance(value, list):
            grid_values[key] = [_entry(item) for item in value]
        else:
            grid_values[key] = value
    lists = {}
    for key, value in flat(job_values).items():
        if "." in key or key == "model":
            lists[key] = value
        else:
            # `build` refuses this key.
            grid_values[key] = value
    # This table is no list.
    grid_values.pop("first", None)
    grid = build(Grid, grid_values, "grid")
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
    _refuse_shared_keys(axes)
    return axes


def _refuse_shared_keys(axes: Mapping[str, Axis]) -> None:
    """Raise `InputError` if entries of two lists give the same key, or if an entry gives a seed."""
    with_seeds = {"seeds": _seeds([0]), **axes}
    for axis, other_axis in combinations(with_seeds.values(), 2):
        for entry, other in product(axis, other_axis):
            shared = entry.keys() & other.keys() - {"name"}
            if shared:
                raise InputError(
                    f"grid: '{entry['name']}' and '{other['name']}' both give "
                    f"{', '.join(sorted(shared))}; leave it out of one of the two"
                )


def _seeds(seeds: Sequence[int]) -> Axis:
    """Return the entries of a grid's seeds."""
    return [{"name": f"seed-{seed}", "seed": seed} for seed in seeds]


def _check_names(axis: Axis, where: str) -> None:
    """Raise `InputError` if an entry of a list has no valid name, or the name of another."""
    for entry in axis:
        name = entry.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name) or "/" in name:
            example = ""
            if where == "grid.method":
                example = ', as in { name = "mine", method = "mymethod:Mine" }'
            raise InputError(
                f"{where}: name = {name!r}: give each a name of letters, digits and . _ + "
                f"-{example}"
            )
    _refuse_twins([entry["name"] for entry in axis], where)


def _entry(value: Any) -> Any:
    """Return an entry of a list as a table with dotted keys.

    The name of a method becomes a table. Keys that TOML has read as inner tables are dotted again.
    """
    if isinstance(value, str):
        return {"name": value, "method": value}
    if not isinstance(value, Mapping):
        return value
    entry, inner = {}, {}
    for key, item in value.items():
        if key in SECTIONS and isinstance(item, Mapping):
            inner[key] = item
        else:
            entry[key] = item
    return entry | _dotted(inner)


def _dotted(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted key. A table with a name, such as a partition, is one value.

    `flat` takes such tables apart too.

    >>> _dotted({"train": {"lr": 0.1}, "data": {"partition": {"name": "iid"}}})
    {'train.lr': 0.1, 'data.partition': {'name': 'iid'}}
    """
    values: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping) and "name" not in value:
            values |= _dotted(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _named_values(lists: Mapping[str, Any]) -> dict[str, Axis]:
    """Return the lists of single keys, where each value has a name.

    The name is the last step of the key and the value. If two keys end with the same step, the name
    has the complete key.
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
    """Raise `InputError` if a value is listed twice."""
    # Values are compared, because not every value can be hashed.
    for value in values:
        if values.count(value) > 1:
            raise InputError(f"{where}: {value!r} is listed {values.count(value)} times")
