"""A run, read back from its folder to be shown.

A run that was killed has left less. Whatever is missing is empty. Shapes: `T` rounds without round
0, `E` of them evaluated; `C` classes, `N` clients.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfed.data.unevenness import unevenness
from rayfed.folder.places import is_checkpoint_of
from rayfed.folder.summary import read_environment, read_summary, status_of, summarise
from rayfed.folder.tables import (
    Columns,
    columns_of,
    confusions,
    read_table,
    without_early_forgetting,
)
from rayfed.job import read_toml
from rayfed.report.forgetting import Series, by_round, client_accuracies, series_of

# Most columns of a picture of a partition. If there are more clients, several share a column.
MOST_ACROSS = 400
SEED = re.compile(r"[/._+-]?seed-?\d+$")


@dataclass(frozen=True, eq=False)
class Run:
    """The contents of a run's folder in memory."""

    folder: Path
    job: dict[str, Any]
    # The text of job.toml.
    job_text: str
    status: str
    # The error that ended the run, or why it ended early.
    error: str
    environment: dict[str, Any]
    # The summary of the rounds that are there.
    summary: dict[str, Any]
    # A value per round, round 0 first: (T + 1,); nan where it was not evaluated.
    rounds: Columns
    evaluated: np.ndarray  # (T + 1,) whether a round was evaluated
    # A value per client of each round.
    clients: Columns
    classes: tuple[str, ...]
    class_rounds: np.ndarray  # (E + 1,) the rounds of `class_accuracy`
    class_accuracy: np.ndarray  # (E + 1, C)
    class_seen: np.ndarray  # (E + 1, C) the examples that the round's clients hold
    # A value per client and class that the client holds; `class` is an index.
    partition: Columns
    # The names of natural clients.
    client_names: dict[int, str]
    num_clients: int
    # What tables and figures call the run. If it is empty, they use the run's name.
    label: str = ""

    @cached_property
    def notes(self) -> dict[str, Series]:
        """Return the clients' notes by their names, as `mean_notes` does."""
        return mean_notes(self.folder)

    @cached_property
    def round_notes(self) -> dict[str, Series]:
        """Return the rounds that have a note, and its values, by the note's name.

        A name is for example `domain.NAME`.
        """
        pairs: dict[str, list[tuple[int, float]]] = {}
        for row in read_table(self.folder, "rounds").to_pylist():
            for name, value in row["notes"]:
                pairs.setdefault(name, []).append((row["round"], value))
        return {name: series_of(of_name) for name, of_name in pairs.items()}

    @cached_property
    def forgetting(self) -> dict[str, Series]:
        """Return the forgetting by each definition, as `report.forgetting.by_round` does."""
        clients = client_accuracies(confusions(self.folder, self.classes), len(self.classes))
        return by_round(
            self.class_rounds, self.class_accuracy, self.class_seen, self.eval_every, clients
        )

    @cached_property
    def unevenness(self) -> dict[str, float]:
        """Return the same as environment.json has, also where that file is lost."""
        cells = self.partition["client"], self.partition["class"], self.partition["count"]
        return unevenness(*cells, self.num_clients, len(self.classes))

    def called(self, client: int) -> str:
        """Return a client's number, and its name if it has one."""
        if client in self.client_names:
            return f"{client} {self.client_names[client]}"
        return str(client)

    @property
    def name(self) -> str:
        return self.job["name"]

    @property
    def eval_every(self) -> int:
        return self.job["train"]["eval_every"]


class Group(NamedTuple):
    """Runs whose names are equal except for the `seed-N` at their end."""

    name: str
    # The runs with the most rounds, so that their numbers have a mean.
    runs: list[Run]
    # The runs with fewer rounds.
    behind: list[Run]

    @property
    def counted(self) -> list[Run]:
        """Return the runs that have played all that their jobs ask for.

        A run that ended early belongs to them, in however few rounds.
        """
        return self.runs + [run for run in self.behind if run.summary.get("ended_early")]

    @property
    def left_out(self) -> list[Run]:
        """Return the runs that do not count, since others have played more rounds."""
        return [run for run in self.behind if not run.summary.get("ended_early")]


class ClassLoss(NamedTuple):
    """How much of a class was forgotten.

    The mean of `lost` is the run's forgetting (`forgetting.peak`).
    """

    name: str
    # The class's best accuracy in the earlier rounds that count (`engine.py`).
    peak: float
    peak_round: int
    # The accuracy in the last evaluated round.
    last: float
    lost: float


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Return the runs in groups: runs whose folders and names differ only in the seed at their end.

    Other runs stand alone.
    """
    together: dict[tuple[object, str], list[Run]] = {}
    for number, run in enumerate(runs):
        name = SEED.sub("", run.name) or run.name
        place = number if name == run.name else SEED.sub("", str(run.folder))
        together.setdefault((place, name), []).append(run)
    names = [name for _, name in together]
    groups = []
    for (_, name), members in together.items():
        # Groups of one name in several folders are told apart by their folders.
        title = f"{name} ({members[0].folder.parent})" if names.count(name) > 1 else name
        most = max(len(run.rounds["round"]) for run in members)
        furthest = [run for run in members if len(run.rounds["round"]) == most]
        behind = [run for run in members if len(run.rounds["round"]) < most]
        groups.append(Group(title, furthest, behind))
    return groups


def comes_first(run: Run, others: Iterable[Run]) -> bool:
    """Say whether other runs begin with the weights of a run, as in a grid with `grid.first`."""
    for other in others:
        if is_checkpoint_of(other.job["model"].get("weights", ""), run.name):
            return True
    return False


def shorten(groups: Sequence[Group]) -> list[str]:
    """Return the groups' labels, or their shortened names."""
    names = short([group.name for group in groups])
    return [group.runs[0].label or name for group, name in zip(groups, names, strict=True)]


def short(full: Iterable[str]) -> list[str]:
    """Return names without the folders that all of them are in, or go through at the same depth.

    >>> short(["a/shards/fedavg", "b/shards/fedntd"])
    ['a/fedavg', 'b/fedntd']
    """
    names = [name.split("/") for name in full]
    apart = [len(set(steps)) > 1 for steps in zip(*names, strict=False)]
    if len(set(map(len, names))) == 1 and any(apart):
        names = [list(compress(name, apart)) for name in names]
    while len(names) > 1 and len({name[0] for name in names}) == 1 and min(map(len, names)) > 1:
        names = [name[1:] for name in names]
    return ["/".join(name) for name in names]


def read_run(folder: Path) -> Run:
    """Read a run from its folder.

    Raises `InputError` if the folder is not a run's.
    """
    job = read_toml(folder / "job.toml")
    ended = read_summary(folder)
    early = ended.get("ended_early", "")
    error = ended.get("error", "")
    if early and not error:
        error = f"Ended after round {ended['rounds']} of {job['train']['num_rounds']}: {early}"
    job_text = (folder / "job.toml").read_text()
    rounds = without_early_forgetting(
        read_table(folder, "rounds"), job.get("train", {}).get("eval_every", 1)
    )
    by_class = classes_of(folder)
    classes, partition, client_names = _partition_of(folder, by_class.names)
    return Run(
        folder=folder,
        job=job,
        job_text=job_text,
        status=status_of(folder),
        error=error,
        environment=read_environment(folder),
        summary=summarise(rounds.to_pylist()) | {"ended_early": early} | _of_guess(ended),
        rounds=columns_of(rounds),
        evaluated=rounds["test_accuracy"].is_valid().to_numpy(),
        clients=columns_of(read_table(folder, "clients")),
        classes=classes,
        class_rounds=by_class.rounds,
        class_accuracy=by_class.accuracy,
        class_seen=by_class.seen,
        partition=partition,
        client_names=client_names,
        # The last clients may hold nothing, and a partition by a column of the data has no number
        # in the job.
        num_clients=max(
            job["data"]["partition"].get("num_clients", 0), partition["client"].max(initial=-1) + 1
        ),
    )


def _partition_of(
    folder: Path, classes: Sequence[str]
) -> tuple[tuple[str, ...], Columns, dict[int, str]]:
    """Return all classes, what each client holds of them, and the names of clients.

    The classes are the given ones, then those that only the partition has.
    """
    cells = read_table(folder, "partition")
    # The names stay in Arrow, as a million names in Python would take 60 MB.
    held = cells.column("class")
    names = tuple(dict.fromkeys(list(classes) + pc.unique(held).to_pylist()))
    codes = pc.index_in(held, pa.array(names, pa.string()))
    columns = {"client": cells.column("client"), "class": codes, "count": cells.column("count")}
    partition = {name: column.cast(pa.int32()).to_numpy() for name, column in columns.items()}
    named = cells.filter(cells.column("name").is_valid())
    clients = named.column("client").to_pylist()
    client_names = dict(zip(clients, named.column("name").to_pylist(), strict=True))
    return names, partition, client_names


def _of_guess(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accuracy of a guess, and the warning that the run is no better, if it has them."""
    keys = ("guess", "no_better_than_a_guess")
    return {key: summary[key] for key in keys if key in summary}


class Classes(NamedTuple):
    """The contents of `classes.parquet`, round 0 first."""

    names: tuple[str, ...]  # (C,)
    rounds: np.ndarray  # (E + 1,)
    accuracy: np.ndarray  # (E + 1, C)
    seen: np.ndarray  # (E + 1, C) the examples that the round's clients hold


def classes_of(folder: Path) -> Classes:
    """Return the classes in the evaluated rounds of a run."""
    columns = columns_of(read_table(folder, "classes"))
    number = int((columns["round"] == 0).sum())
    # A row for each round, a column for each class.
    shape = -1, max(number, 1)
    rounds = columns["round"].reshape(shape)[:, 0]
    accuracy = columns["accuracy"].reshape(shape)
    seen = columns["seen"].reshape(shape)
    return Classes(tuple(columns["class"][:number]), rounds, accuracy, seen)


def forgotten(run: Run) -> list[ClassLoss]:
    """Return the accuracy that each class has lost, the largest loss first.

    The list is empty if no earlier round counts.
    """
    before = run.class_rounds[:-1]
    counting = np.flatnonzero((before > 0) & (before % run.eval_every == 0))
    earlier = run.class_accuracy[counting]
    now = run.class_accuracy[-1:]
    if not len(earlier):
        return []
    best = np.where(np.isnan(earlier), -np.inf, earlier).argmax(axis=0)
    peaks = np.take_along_axis(earlier, best[None], axis=0)
    losses = map(
        ClassLoss,
        run.classes,
        peaks.ravel().tolist(),
        before[counting[best]].tolist(),
        now.ravel().tolist(),
        (peaks - now).ravel().tolist(),
    )
    return sorted(losses, key=lambda loss: -np.nan_to_num(loss.lost, nan=-np.inf))


def mean_notes(folder: Path) -> dict[str, Series]:
    """Return the rounds that have a note of clients, and its means, by the note's name.

    A mean is over the round's clients, weighted by their examples. A NaN, of a class without test
    examples, does not count.
    """
    # The notes stay in Arrow: in Python a million clients would take 0.8 GB.
    tables = [_weighted_notes(batch) for batch in read_table(folder, "clients").to_batches()]
    if not tables:
        return {}
    groups = pa.concat_tables(tables).group_by(["name", "round"], use_threads=False)
    pairs: dict[str, list[tuple[int, float]]] = {}
    for row in groups.aggregate([("sum", "sum"), ("images", "sum")]).to_pylist():
        mean = row["sum_sum"] / row["images_sum"] if row["images_sum"] else np.nan
        pairs.setdefault(row["name"], []).append((row["round"], mean))
    return {name: series_of(of_name) for name, of_name in pairs.items()}


def _weighted_notes(batch: pa.RecordBatch) -> pa.Table:
    """Return a row for each note of each client: its name, round, weight, and weighted value."""
    notes = batch["notes"]
    images = batch["num_examples"].to_numpy()
    ends = notes.offsets.to_numpy()
    rows = np.repeat(np.arange(len(notes)), np.diff(ends))
    values = notes.items.to_numpy()[ends[0] : ends[-1]]
    known = images[rows] * ~np.isnan(values)
    columns = {
        "name": notes.keys.slice(ends[0], ends[-1] - ends[0]),
        "round": batch["round"].to_numpy()[rows],
        "images": known,
        "sum": np.where(known, values, 0.0) * known,
    }
    return pa.table(columns)


def of_clients(folder: Path, *names: str) -> Columns:
    """Return the notes of these names, with round and client, of the clients that have all of them.

    Each column has a value per client of each round.
    """
    rows = read_table(folder, "clients")
    table = rows.select(["round", "client"])
    for name in names:
        table = table.append_column(name, pc.map_lookup(rows["notes"], name, "first"))
    return columns_of(table.drop_null())


def dealt(
    cells: Columns, num_classes: int, num_clients: int, most: int = MOST_ACROSS
) -> tuple[np.ndarray, int]:
    """Return the examples of each class (C, columns), and how many clients share a column.

    There are at most `most` columns. A column that several clients share holds their mean.
    """
    together = -(-num_clients // most)
    columns = -(-num_clients // together)
    index = cells["class"] * columns + cells["client"] // together
    counts = np.bincount(index, cells["count"], num_classes * columns)
    return counts.reshape(-1, columns) / together, together
