"""The tables and figures of the papers: what each shows, what it needs, how it is drawn.

`jobs/papers/PAPER/items.toml` declares those of a paper. Of a paper without such a file, each job
file is a table.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rayfed.base.errors import InputError, did_you_mean
from rayfed.base.values import Checked, UnknownKey, build
from rayfed.grid.cells import Cell, expand, matching, refuse_same
from rayfed.job import flat, read_toml
from rayfed.papers.cost import shows
from rayfed.papers.kinds import KINDS
from rayfed.papers.tables import ITEMS, grids

# These keys change no number, so a picture does not name them.
WITHOUT_EFFECT = ("name", "ray.", "output.", "track", "data.root")
# What was run of an item, in words of the list of items.
RAN = {
    "full": "run at full size",
    "partly": "partly run at full size",
    "small": "small variant run",
    "no": "job only",
}


@dataclass(frozen=True)
class Runs(Checked):
    """Runs that items share: those of a job file of the paper, with changes."""

    job: Annotated[str, "name of the job file; empty: the name of these runs"] = ""
    set: Annotated[dict[str, Any], "dotted keys of the job that are changed"] = field(
        default_factory=dict
    )
    small: Annotated[dict[str, Any], "keys that the small variant changes as well"] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class Item(Checked):
    """A table or a measured figure of a paper.

    It is a table if it names no kind of figure.
    """

    shows: Annotated[str, "what the paper shows there"]
    runs: Annotated[str, "name of a job file, or of a table in [runs]"]
    rows: Annotated[list[str], "patterns of the runs that it needs; none: all"] = field(
        default_factory=list
    )
    small_rows: Annotated[list[str], "those of the small variant; none: the same"] = field(
        default_factory=list
    )
    figure: Annotated[str, "kind of the figure"] = ""
    options: Annotated[dict[str, Any], "options of the figure"] = field(default_factory=dict)
    reconstructed: Annotated[str, "what the paper does not say, and was chosen"] = ""
    ran: Annotated[Literal["full", "partly", "small", "no"], "what was run of it"] = "no"


@dataclass(frozen=True)
class Declarations(Checked):
    """The file `items.toml` of a paper."""

    paper: Annotated[str, "name of the paper, with authors and venue"]
    items: Annotated[dict[str, dict[str, Any]], "items by name"]
    runs: Annotated[dict[str, dict[str, Any]], "runs by name"] = field(default_factory=dict)
    small: Annotated[dict[str, Any], "keys that every small variant changes"] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class Declared:
    """An item by its name, such as fedntd/fig2a, with the job file of its runs."""

    name: str
    item: Item
    runs: Runs
    file: Path
    # What the small variant changes. It is empty if the paper declares none.
    small: Mapping[str, Any]

    @property
    def table(self) -> str:
        """Return the name of the grid, such as fedntd/table1, that has the paper's numbers."""
        return f"{self.file.parent.name}/{self.file.stem}"

    def changes(self, small: bool = False) -> dict[str, Any]:
        """Return what the item changes in its job file, with a name for runs of its own.

        Raises `InputError` if a small variant is wanted, and there is none.
        """
        changes = dict(self.runs.set)
        if not small:
            own_name = self.item.runs != self.file.stem
            return changes | ({"name": self._run_name} if own_name else {})
        if not self.small:
            raise InputError(
                f"--small: {self.name} has no small variant; make it small with -s, such as "
                "-s train.num_rounds=2 -s name=try"
            )
        return changes | dict(self.small) | {"name": f"{self._run_name}-small"}

    @property
    def _run_name(self) -> str:
        return f"{self.file.parent.name}-{self.item.runs}"

    def cells(
        self, overrides: Mapping[str, Any] | None = None, small: bool = False, rows: str = "*"
    ) -> list[Cell]:
        """Return the cells of the item's runs that match a pattern, in the order of the grid.

        Raises `InputError` if none matches, or if two of them are the same job.
        """
        cells = expand(read_toml(self.file), self.changes(small) | dict(overrides or {}))
        patterns = self.item.rows
        if small:
            patterns = self.item.small_rows or patterns
        names: set[str] = set()
        for pattern in patterns or ["*"]:
            names |= {cell.name for cell in matching(cells, pattern, f"{self.name}: rows")}
        chosen = matching([cell for cell in cells if cell.name in names], rows, "--rows")
        refuse_same(chosen)
        return chosen


def items() -> dict[str, Declared]:
    """Return the tables and figures of all papers by their names, such as fedntd/fig2a.

    Raises `InputError` if a file of declarations has a mistake.
    """
    folders: dict[str, list[Path]] = {}
    for file in grids().values():
        folders.setdefault(file.parent.name, []).append(file)
    declared: dict[str, Declared] = {}
    for paper, files in folders.items():
        declarations = files[0].parent / ITEMS
        found = _read(declarations, files) if declarations.is_file() else map(_table_of, files)
        declared |= {f"{paper}/{of_paper.name}": of_paper for of_paper in found}
    return {name: replace(of_paper, name=name) for name, of_paper in declared.items()}


def item_of(name: str) -> Declared:
    """Return the item of this name. Raises `InputError` if there is none."""
    known = items()
    if name not in known:
        paper = name.partition("/")[0]
        of_paper = [item for item in known if item.startswith(f"{paper}/")]
        lists = f"`rayfed reproduce {paper}`" if of_paper else "`rayfed reproduce`"
        # A name without an item is that of a paper.
        meant = of_paper or (known if "/" in name else {item.partition("/")[0] for item in known})
        raise InputError(
            f"'{name}': there is no such table or figure in jobs/papers"
            f"{did_you_mean(name, meant)}; {lists} lists them"
        )
    return known[name]


def _table_of(file: Path) -> Declared:
    """Return the item of a job file that nothing declares."""
    return Declared(file.stem, Item(shows(file), file.stem), Runs(), file, {})


def _read(path: Path, files: Sequence[Path]) -> Iterator[Declared]:
    """Yield the items of a paper from its declarations.

    Raises `InputError`, which names the file and the entry, for a mistake.
    """
    where = f"jobs/papers/{path.parent.name}/{path.name}"
    jobs = {file.stem: file for file in files}
    paper = _built(Declarations, read_toml(path), where)
    runs = {name: _built(Runs, of, f"{where}: runs.{name}") for name, of in paper.runs.items()}
    for name, of_runs in runs.items():
        _refuse_runs(name, of_runs, jobs, f"{where}: runs.{name}")
    used = set()
    for name, table in paper.items.items():
        place = f"{where}: items.{name}"
        item = _built(Item, table, place)
        if item.runs not in jobs.keys() | runs.keys():
            raise InputError(
                f"{place}: runs = '{item.runs}' is neither a job file of the paper nor in [runs]"
                f"{did_you_mean(item.runs, [*jobs, *runs])}"
            )
        _refuse_figure(item, place)
        used.add(item.runs)
        of_item = runs.get(item.runs, Runs())
        file = jobs[of_item.job or item.runs]
        yield Declared(name, item, of_item, file, paper.small | of_item.small)
    unused = sorted(runs.keys() - used)
    if unused:
        raise InputError(f"{where}: runs.{unused[0]}: no item has these runs; leave them out")


def _built(maker: Any, table: Mapping[str, Any], where: str) -> Any:
    """Return a dataclass of a table; an unknown key is an `InputError` with the valid keys."""
    try:
        return build(maker, table, where)
    except UnknownKey as error:
        _, key, *valid = error.args
        raise InputError(f"{where}: unknown key '{key}'{did_you_mean(key, valid, '')}") from None


def _refuse_runs(name: str, runs: Runs, jobs: Iterable[str], where: str) -> None:
    """Raise `InputError` if runs have no job file, or would overwrite those of a job file."""
    known = list(jobs)
    job = runs.job or name
    if job not in known:
        raise InputError(f"{where}: the paper has no job file '{job}'{did_you_mean(job, known)}")
    if runs.job and name in known:
        raise InputError(f"{where}: '{name}' is a job file as well; give these runs another name")
    if runs.set and not runs.job:
        raise InputError(
            f"{where}: changed runs need a name of their own; give them another name, and "
            f"job = '{job}'"
        )
    if "name" in {*flat(runs.set), *flat(runs.small)}:
        raise InputError(f"{where}: the name of runs is that of their table; leave 'name' out")


def _refuse_figure(item: Item, where: str) -> None:
    """Raise `InputError` for a kind of figure that does not exist, or options that it has not."""
    if not item.figure:
        if item.options:
            raise InputError(f"{where}: options are for a figure, and this is a table")
        return
    if item.figure not in KINDS:
        raise InputError(
            f"{where}: there is no kind of figure '{item.figure}'{did_you_mean(item.figure, KINDS)}"
        )
    takes = {"width", *KINDS[item.figure].takes}
    for option in item.options.keys() - takes:
        raise InputError(
            f"{where}: '{item.figure}' has no option '{option}'; it has {', '.join(sorted(takes))}"
        )


def told_changes(overrides: Mapping[str, Any]) -> str:
    """Return the changes that can change a number, in a line; '' if there are none.

    >>> told_changes({"name": "try", "train.num_rounds": 2, "ray.mode": "off"})
    'train.num_rounds = 2'
    """
    changes = [
        f"{key} = {value}" for key, value in overrides.items() if not key.startswith(WITHOUT_EFFECT)
    ]
    return ", ".join(changes)
