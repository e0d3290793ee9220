"""What is checked of a run's folder, in order: checkpoints, origin, tables, and rounds that are
played again.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from rayfed.base.errors import InputError, RunFailed, Torn
from rayfed.base.isolation import alone
from rayfed.base.storage import Folder
from rayfed.experiment import job_of
from rayfed.folder.checkpoint import BEST, ORIGIN
from rayfed.folder.checkpoint import Checkpoint as Saved
from rayfed.folder.checkpoint import read_checkpoint as read_saved
from rayfed.folder.places import Folders, lineage_of
from rayfed.folder.provenance import environment, hash_of
from rayfed.folder.summary import early_end, read_environment, read_summary, summarise
from rayfed.folder.tables import RESULTS, partition_table, read_table, without_extra
from rayfed.job import Job, differences, other_lineage
from rayfed.report.verify.again import Again, Check, of_checkpoint
from rayfed.report.verify.numbers import Numbers, Row, differing, of_tables, place_of
from rayfed.rounds.setup import Setup, open_setup
from rayfed.runtime.executors import open_executor

# Where bits may differ: docs/verify.md has what was measured.
WITHIN = 0.02
CHECKPOINT = re.compile(r"round-(\d{5,})\.(json|safetensors)")
# Hashes that no resume may change.
FOR_EVER = ("data", "trace", "model")
Facts = dict[str, Any]


@dataclass
class Environment:
    """What is needed of `environment.json`, of a run and of each time that it was resumed."""

    hardware: list[dict[str, Any]]
    packages: dict[str, str | None]
    resumed: list["Environment"] = field(default_factory=list)
    # That a record has; a run's folder does not say.
    checkpoints: list[int] = field(default_factory=list)


@dataclass
class Summary:
    """What is needed of `summary.json`."""

    rounds: int = 0
    best: dict[str, Any] = field(default_factory=dict)


def checks(
    folder: Path, *, every: bool = False, clients: int = 0, quick: bool = False
) -> Iterator[Check]:
    """Check a run's folder, or a record of one, in which nothing is written.

    Raises `InputError` where there is none.

    Plays round 1 and the rounds after checkpoints again, or `every` round, or if `quick` round 1
    alone; with `clients`, so many clients of each.
    """
    job = job_of(folder, None, None)
    if job is None:
        raise InputError(
            f"'{folder}' is neither the folder of a run nor a record of one: it holds no job.toml"
        )
    with alone(f"the check of '{folder}'"):
        yield from _checks(folder, job, every=every, clients=clients, quick=quick)


def _checks(folder: Path, job: Job, *, every: bool, clients: int, quick: bool) -> Iterator[Check]:
    began, summary = read_environment(folder), read_summary(folder)
    _refuse_misshapen(folder / "environment.json", began, Environment)
    _refuse_misshapen(folder / "summary.json", summary, Summary)
    is_record = "checkpoints" in began
    saved, torn = _checkpoints(Folders.of(job).checkpoints, began, summary)
    yield "checkpoints", f"whole, of rounds {[*saved]}" if saved else "there are none", torn
    setup = open_setup(job)
    with open_executor(setup, on_ray=False) as workers:
        here, times = environment(setup, workers), [began, *began.get("resumed", [])]
        if times[-1].get("job") == job.hash(with_paths=True):
            # A record of the time when paths were part of a job's hash.
            here["job"] = times[-1]["job"]
        foreign = _foreign(setup, here, times, saved)
        yield "origin", "job, data, partition, model and modules have the run's hashes", foreign
        if foreign:
            # Every number would be another.
            return
        tables = _tables(folder)
        recorded = of_tables(tables)
        changed = [
            fault for last in [*saved.values()][-1:] for fault in _changed(setup, recorded, last)
        ]
        changed += _odd_rows(tables) + _of_another_partition(folder, setup, is_record)
        also = (
            f"as in the checkpoint of round {max(saved)}" if saved else "no checkpoint has them too"
        )
        yield "tables", also, changed
        if not changed:
            apart = _apart(setup, tables, recorded, summary)
            yield "tables", "accuracies, and the summary, follow from the other numbers", apart
        others = {
            line: ""
            for time in times
            for kind in _bits(time)
            for line in differences(kind, _bits(here)[0])
        }
        loose = (
            f"within {WITHIN:g}, and only after checkpoints, as bits may differ: "
            f"{'; '.join(others)}"
        )
        yield (
            "comparison",
            loose if others else "bit for bit: hardware and versions are the run's",
            [],
        )
        played = [row["round"] for row in tables["rounds"] if row["round"]]
        kept = {number: each.restore(setup, workers) for number, each in saved.items()}
        recorded |= {
            at: number
            for round in kept.values()
            for at, number in of_checkpoint(round, workers).items()
        }
        again = Again(setup, workers, kept, recorded, WITHIN if others else 0.0)
        # Where bits may differ, rounding grows from round to round: then only rounds after a
        # checkpoint can be compared.
        again_played = to_play(played, saved, every=every and not others, quick=quick)
        yield from again.play(again_played, clients)


def to_play(
    rounds: Iterable[int], saved: Collection[int], *, every: bool, quick: bool
) -> list[int]:
    """Of the rounds of a run, those to be played again: round 1 and the rounds after checkpoints,
    all, or round 1.
    """
    trained = [number for number in rounds if number]
    if every:
        return trained
    return [number for number in trained if number == 1 or (number - 1 in saved and not quick)]


def _checkpoints(
    folder: Folder, began: Facts, summary: Facts
) -> tuple[dict[int, Saved], list[str]]:
    """The whole checkpoints by their round, and what is wrong with the others, or with the best
    weights.
    """
    whole: dict[int, Saved] = {}
    torn = []
    there = {int(match[1]) for match in map(CHECKPOINT.fullmatch, folder.names()) if match}
    last = {summary["rounds"]} if summary.get("status") == "done" and "rounds" in summary else set()
    # As a record notes them.
    for number in sorted(there | last | {*began.get("checkpoints", ())}):
        try:
            whole[number] = read_saved(folder, number)
        except Torn as error:
            torn.append(f"the checkpoint of round {number}: {error}")
    # An earlier checkpoint has the hash of earlier weights.
    named = not torn and "checkpoints" not in began
    # Which a record leaves out.
    best = whole[max(whole)].manifest.get("best") if whole and named else None
    content = b""
    with suppress(OSError):
        content = folder.read(BEST)
    if best and hash_of(content) != best["sha256"]:
        torn.append(f"'{BEST}', of round {best['round']}, is missing or not as it was written")
    # Two checkpoints may name the same file.
    return whole, list(dict.fromkeys(torn))


def _foreign(
    setup: Setup, here: Facts, times: Sequence[Facts], saved: Mapping[int, Saved]
) -> list[str]:
    """Which hashes of what went in, in `environment.json` and checkpoints, are others here; and
    jobs of checkpoints.
    """
    origins: list[tuple[str, Facts, Sequence[str]]]
    origins = [("environment.json", time, FOR_EVER) for time in times[:-1]]
    origins += [("environment.json", times[-1], ("job", *ORIGIN))]
    origins += [
        (f"the checkpoint of round {number}", each.manifest, ORIGIN)
        for number, each in saved.items()
    ]
    faults = [
        f"the hash of {line}"
        for name, facts, keys in origins
        for line in differences(_hashes(facts, keys), _hashes(here, keys), f"in {name}")
    ]
    for number, each in saved.items():
        its_job = lineage_of(each.manifest["job"])
        faults += other_lineage(
            its_job, setup.job.lineage(), f"in the checkpoint of round {number}", "in job.toml"
        )
    return faults


def _hashes(facts: Facts, keys: Sequence[str]) -> dict[str, Any]:
    return {key: facts.get(key, "") for key in keys}


def _refuse_misshapen(file: Path, content: Facts, kind: type) -> None:
    """Raises `RunFailed` where a file of JSON is not as a run writes it."""
    try:
        TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, each["loc"])) for each in error.errors())
        raise RunFailed(
            f"'{file}' is missing, or not as a run writes it: see {places} in it"
        ) from None


def _tables(folder: Path) -> dict[str, list[Row]]:
    """The rows of each table. Raises `RunFailed` where one cannot be read."""
    tables = {}
    for name in RESULTS:
        try:
            tables[name] = read_table(folder, name).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise RunFailed(f"the tables in '{folder}' cannot be read: {error}") from None
        if any(row["round"] is None for row in tables[name]):
            raise RunFailed(
                f"the tables in '{folder}' cannot be read: {name} has a row without a round"
            )
    return tables


def _odd_rows(tables: Mapping[str, list[Row]]) -> list[str]:
    """Rows that are there more than once, or of a round that the table of rounds does not have."""
    played = {row["round"] for row in tables["rounds"]}
    places = Counter(
        (row["round"], place_of(name, row)) for name, rows in tables.items() for row in rows
    )
    faults = [
        f"round {number}, {place}: {count} rows"
        for (number, place), count in places.items()
        if count > 1
    ]
    odd = [each for each in places if each[0] not in played]
    return faults + [
        f"round {number}, {place}: a row of a round that is not in rounds" for number, place in odd
    ]


def _of_another_partition(folder: Path, setup: Setup, is_record: bool) -> list[str]:
    """Where the table of the partition does not have the images that the job deals; a record may be
    without it.
    """
    try:
        table = read_table(folder, "partition")
    except (OSError, pa.ArrowException) as error:
        return [f"partition.parquet cannot be read: {error}"]
    if (is_record and not table.num_rows) or table.equals(partition_table(setup.federation)):
        return []
    return [
        "partition.parquet is missing, or has other clients, counts or images than the job deals"
    ]


def _changed(setup: Setup, recorded: Numbers, saved: Saved) -> list[str]:
    """Which numbers are not as a checkpoint has them, or are not in it."""
    tables = {
        name: without_extra(name, saved.table(name), setup.job.train).to_pylist()
        for name in RESULTS
    }
    more = {place: "nothing" for place in recorded if place[0] <= saved.round}
    return differing(recorded, more | of_tables(tables), "in the checkpoint")


def _apart(
    setup: Setup, tables: dict[str, list[Row]], recorded: Numbers, summary: Facts
) -> list[str]:
    """Which accuracies are not those of all classes together, and where the summary is not that of
    the tables.
    """
    data = setup.federation
    images = dict(
        zip(
            data.train.classes,
            np.bincount(data.test.labels, minlength=data.num_classes),
            strict=True,
        )
    )
    # Images that are classified rightly, by round.
    hits: Counter[int] = Counter()
    for row in tables["classes"]:
        hits[row["round"]] += round(
            np.nan_to_num((row["accuracy"] or 0.0) * images.get(row["class"], 0))
        )
    right = {
        (number, "rounds", "test_accuracy"): count / len(data.test)
        for number, count in hits.items()
    }
    whole = summarise(tables["rounds"])
    # A place, which no table has.
    whole.get("best", {})["weights"] = summary.get("best", {}).get("weights", "")
    there = {key: summary.get(key, "") for key in whole}
    faults = differing(recorded, right, "by the classes")
    faults += differences(there, whole, "in summary.json", "in the tables")
    played, wanted = whole["rounds"], setup.job.train.num_rounds
    if (
        summary.get("status") == "done"
        and played < wanted
        and not early_end(setup.job.train, tables["rounds"])
    ):
        faults.append(
            f"status is done in summary.json, with {played} of {wanted} rounds in the tables"
        )
    return faults


def _bits(facts: Facts) -> list[dict[str, str]]:
    """What bits depend on beside the job and rayfed's code, for each kind of hardware."""
    return [
        kind | {name: facts["packages"].get(name) for name in ("torch", "numpy")}
        for kind in facts["hardware"]
    ]
