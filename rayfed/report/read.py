"""A run, read back from its folder to be shown.

A run that was killed has left less; whatever is missing is empty. Shapes: `T` rounds, `E` of them
evaluated, beside round 0; `C` classes, `N` clients.
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
from rayfed.folder.summary import read_environment, read_summary, status_of, summarise
from rayfed.folder.tables import (
    Columns,
    columns_of,
    confusions,
    read_table,
    without_early_forgetting,
)
from rayfed.job import read_toml
from rayfed.report.forgetting import Series, by_round, client_accuracies

MOST_ACROSS = (
    # Columns of a picture of a partition; if there are more clients, several share one.
    400
)
SEED = re.compile(r"[/._+-]?seed-?\d+$")


@dataclass(frozen=True, eq=False)
class Run:
    """A run's folder, in memory."""

    folder: Path
    job: dict[str, Any]
    # job.toml as it stands.
    job_text: str
    status: str
    # Or why it ended early.
    error: str
    environment: dict[str, Any]
    # Of the rounds that are there.
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
    # Of natural clients.
    client_names: dict[int, str]
    num_clients: int
    # What tables and figures call it; if empty, by its name.
    label: str = ""

    @cached_property
    def notes(self) -> dict[str, Series]:
        """By name of a note of clients, as `mean_notes` has it."""
        return mean_notes(self.folder)

    @cached_property
    def round_notes(self) -> dict[str, Series]:
        """By name of a note of rounds, such as `domain.NAME`: the rounds that have it, and its
        values.
        """
        found: dict[str, list[tuple[int, float]]] = {}
        for row in read_table(self.folder, "rounds").to_pylist():
            for name, value in row["notes"]:
                found.setdefault(name, []).append((row["round"], value))
        return {
            name: (np.array([r for r, _ in rows]), np.array([v for _, v in rows]))
            for name, rows in found.items()
        }

    @cached_property
    def forgetting(self) -> dict[str, Series]:
        """By name of a definition, as `report.forgetting.by_round` has it."""
        clients = client_accuracies(confusions(self.folder, self.classes), len(self.classes))
        return by_round(
            self.class_rounds, self.class_accuracy, self.class_seen, self.eval_every, clients
        )

    @cached_property
    def unevenness(self) -> dict[str, float]:
        """As environment.json has it, also where that is lost."""
        cells = self.partition["client"], self.partition["class"], self.partition["count"]
        return unevenness(*cells, self.num_clients, len(self.classes))

    def called(self, client: int) -> str:
        """A client's number, and its name where it has one."""
        return (
            f"{client} {self.client_names[client]}" if client in self.client_names else str(client)
        )

    @property
    def name(self) -> str:
        return self.job["name"]

    @property
    def eval_every(self) -> int:
        return self.job["train"]["eval_every"]


class Group(NamedTuple):
    """Runs of one name, but for the `seed-N` at its end."""

    name: str
    # Those with the most rounds, so that their numbers have a mean.
    runs: list[Run]
    # The others.
    behind: list[Run]

    @property
    def counted(self) -> list[Run]:
        """The runs that have played all that their jobs ask for: also those that ended early, in
        however few rounds.
        """
        return [*self.runs, *(run for run in self.behind if run.summary.get("ended_early"))]

    @property
    def left_out(self) -> list[Run]:
        """The runs that do not count, since others have played more rounds."""
        return [run for run in self.behind if not run.summary.get("ended_early")]


class ClassLoss(NamedTuple):
    """How much of a class was forgotten.

    The mean of `lost` is the run's forgetting (`forgetting.peak`).
    """

    name: str
    # Its best accuracy in the rounds before that count (`engine.py`).
    peak: float
    peak_round: int
    # In the last evaluated round.
    last: float
    lost: float


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs whose folders and names differ only in the seed at their end, together.

    Other runs stand alone.
    """
    found: dict[tuple[object, str], list[Run]] = {}
    for number, run in enumerate(runs):
        name = SEED.sub("", run.name) or run.name
        place = number if name == run.name else SEED.sub("", str(run.folder))
        found.setdefault((place, name), []).append(run)
    names = [name for _, name in found]
    places = [f"{name} ({of[0].folder.parent})" for (_, name), of in found.items()]
    groups = []
    for name, place, of in zip(names, places, found.values(), strict=True):
        most = max(len(run.rounds["round"]) for run in of)
        runs = [run for run in of if len(run.rounds["round"]) == most]
        behind = [run for run in of if len(run.rounds["round"]) < most]
        groups.append(Group(place if names.count(name) > 1 else name, runs, behind))
    return groups


def shorten(groups: Sequence[Group]) -> list[str]:
    """The groups' labels, or their names, shortened."""
    names = short([group.name for group in groups])
    return [group.runs[0].label or name for group, name in zip(groups, names, strict=True)]


def short(full: Iterable[str]) -> list[str]:
    """Names without the folders that all of them are in, or go through at the same depth.

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
    """Raises `InputError` where the folder is not a run's."""
    job, ended = read_toml(folder / "job.toml"), read_summary(folder)
    early, error = ended.get("ended_early", ""), ended.get("error", "")
    if early and not error:
        error = f"Ended after round {ended['rounds']} of {job['train']['num_rounds']}: {early}"
    job_text = (folder / "job.toml").read_text()
    rounds = without_early_forgetting(
        read_table(folder, "rounds"), job.get("train", {}).get("eval_every", 1)
    )
    by_class = classes_of(folder)
    dealt = read_table(folder, "partition")
    # In Arrow, as a million names in Python would take 60 MB
    held = dealt.column("class")
    names = tuple(dict.fromkeys([*by_class.names, *pc.unique(held).to_pylist()]))
    codes = pc.index_in(held, pa.array(names, pa.string()))
    columns = {"client": dealt.column("client"), "class": codes, "count": dealt.column("count")}
    partition = {name: column.cast(pa.int32()).to_numpy() for name, column in columns.items()}
    named = dealt.filter(dealt.column("name").is_valid())
    client_names = dict(
        zip(named.column("client").to_pylist(), named.column("name").to_pylist(), strict=True)
    )
    del dealt, held, codes, columns, named
    return Run(
        folder=folder,
        job=job,
        job_text=job_text,
        status=status_of(folder),
        error=error,
        environment=read_environment(folder),
        summary={**summarise(rounds.to_pylist()), "ended_early": early, **_of_guess(ended)},
        rounds=columns_of(rounds),
        evaluated=rounds["test_accuracy"].is_valid().to_numpy(),
        clients=columns_of(read_table(folder, "clients")),
        classes=names,
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


def _of_guess(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The accuracy of a guess, and whether the run is no better, as the run has noted them."""
    keys = ("guess", "no_better_than_a_guess")
    return {key: summary[key] for key in keys if key in summary}


class Classes(NamedTuple):
    """What `classes.parquet` holds, round 0 first."""

    # C of them.
    names: tuple[str, ...]
    rounds: np.ndarray  # (E + 1,)
    accuracy: np.ndarray  # (E + 1, C)
    seen: np.ndarray  # (E + 1, C) the examples that the round's clients hold


def classes_of(folder: Path) -> Classes:
    """The classes in the evaluated rounds of a run."""
    columns = columns_of(read_table(folder, "classes"))
    number = int((columns["round"] == 0).sum())
    shape = -1, max(number, 1)
    rounds, accuracy, seen = (
        columns[name].reshape(shape) for name in ("round", "accuracy", "seen")
    )
    return Classes(tuple(columns["class"][:number]), rounds[:, 0], accuracy, seen)


def forgotten(run: Run) -> list[ClassLoss]:
    """The accuracy that each class has lost, the largest loss first; empty where no earlier round
    counts.
    """
    before = run.class_rounds[:-1]
    counting = np.flatnonzero((before > 0) & (before % run.eval_every == 0))
    earlier, last = run.class_accuracy[counting], run.class_accuracy[-1:]
    if not len(earlier):
        return []
    best = np.where(np.isnan(earlier), -np.inf, earlier).argmax(axis=0)
    peaks = np.take_along_axis(earlier, best[None], axis=0)
    columns = (
        values.ravel().tolist() for values in (peaks, before[counting[best]], last, peaks - last)
    )
    losses = map(ClassLoss, run.classes, *columns)
    return sorted(losses, key=lambda loss: -np.nan_to_num(loss.lost, nan=-np.inf))


def mean_notes(folder: Path) -> dict[str, Series]:
    """By the name of a note: the rounds that have it, and its mean over their clients, weighted by
    their examples.

    A NaN, of a class without test examples, does not count.
    """
    tables = []
    # In Arrow: in Python a million clients would take 0.8 GB
    for batch in read_table(folder, "clients").to_batches():
        notes, images = batch["notes"], batch["num_examples"].to_numpy()
        ends = notes.offsets.to_numpy()
        rows = np.repeat(np.arange(len(notes)), np.diff(ends))
        values = notes.items.to_numpy()[ends[0] : ends[-1]]
        known = images[rows] * ~np.isnan(values)
        of_rows = {
            "round": batch["round"].to_numpy()[rows],
            "images": known,
            "sum": np.where(known, values, 0.0) * known,
        }
        tables.append(pa.table({"name": notes.keys.slice(ends[0], ends[-1] - ends[0]), **of_rows}))
    if not tables:
        return {}
    by = pa.concat_tables(tables).group_by(["name", "round"], use_threads=False)
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in by.aggregate([("sum", "sum"), ("images", "sum")]).to_pylist():
        rounds, means = found.setdefault(row["name"], ([], []))
        rounds.append(row["round"])
        means.append(row["sum_sum"] / row["images_sum"] if row["images_sum"] else np.nan)
    return {name: (np.array(rounds), np.array(means)) for name, (rounds, means) in found.items()}


def of_clients(folder: Path, *names: str) -> Columns:
    """The notes of these names with round and client: a value per client of each round that has all
    of them.
    """
    rows = read_table(folder, "clients")
    table = rows.select(["round", "client"])
    for name in names:
        table = table.append_column(name, pc.map_lookup(rows["notes"], name, "first"))
    return columns_of(table.drop_null())


def dealt(
    cells: Columns, num_classes: int, num_clients: int, most: int = MOST_ACROSS
) -> tuple[np.ndarray, int]:
    """The examples of each class (C, columns) in at most `most` columns, means of so many clients,
    and how many.
    """
    together = -(-num_clients // most)
    columns = -(-num_clients // together)
    index = cells["class"] * columns + cells["client"] // together
    return np.bincount(index, cells["count"], num_classes * columns).reshape(
        -1, columns
    ) / together, together
