"""The checks of a run's folder.

In order, these are its checkpoints, its origin, its tables, and rounds that are played again.
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
from rayfed.folder.checkpoint import BEST, ORIGIN, Checkpoint, read_checkpoint
from rayfed.folder.places import Folders, lineage_of
from rayfed.folder.provenance import environment, hash_of
from rayfed.folder.summary import early_end, read_environment, read_summary, summarise
from rayfed.folder.tables import RESULTS, partition_table, read_table, without_extra
from rayfed.job import Job, differences, other_lineage
from rayfed.report.verify.again import Again, Check, of_checkpoint
from rayfed.report.verify.numbers import Numbers, Row, differing, of_tables, place_of
from rayfed.rounds.setup import Setup, open_setup
from rayfed.runtime.executors import open_executor

# How much numbers may differ where bits may differ. docs/verify.md says what was measured.
WITHIN = 0.02
CHECKPOINT = re.compile(r"round-(\d{5,})\.(json|safetensors)")
# The hashes that no resume may change.
FOR_EVER = ("data", "trace", "model")
Facts = dict[str, Any]


@dataclass
class Environment:
    """The part of `environment.json` that is needed, of a run and of each time it was resumed."""

    hardware: list[dict[str, Any]]
    packages: dict[str, str | None]
    resumed: list["Environment"] = field(default_factory=list)
    # The rounds of the checkpoints that a record has. A run's folder does not list them.
    checkpoints: list[int] = field(default_factory=list)


@dataclass
class Summary:
    """The part of `summary.json` that is needed."""

    rounds: int = 0
    best: dict[str, Any] = field(default_factory=dict)


def checks(
    folder: Path, *, every: bool = False, clients: int = 0, quick: bool = False
) -> Iterator[Check]:
    """Check a run's folder, or a record of one, without writing into it.

    It plays round 1 and the rounds after checkpoints again, or `every` round, or if `quick` only
    round 1. With `clients`, it trains so many clients of each round. Raises `InputError` if the
    folder is neither.
    """
    job = job_of(folder, None, None)
    if job is None:
        raise InputError(
            f"'{folder}' is neither the folder of a run nor a record of one: it holds no job.toml"
        )
    with alone(f"the check of '{folder}'"):
        yield from _checks(folder, job, every=every, clients=clients, quick=quick)


def _checks(folder: Path, job: Job, *, every: bool, clients: int, quick: bool) -> Iterator[Check]:
    """Yield the checks of a run's folder, one after another."""
    began = read_environment(folder)
    summary = read_summary(folder)
    _refuse_misshapen(folder / "environment.json", began, Environment)
    _refuse_misshapen(folder / "summary.json", summary, Summary)
    saved, torn = _checkpoints(Folders.of(job).checkpoints, began, summary)
    yield "checkpoints", f"whole, of rounds {[*saved]}" if saved else "there are none", torn
    setup = open_setup(job)
    with open_executor(setup, on_ray=False) as workers:
        here = environment(setup, workers)
        # The environment of the run's beginning, and of each time that it was resumed.
        resumed = began.get("resumed", [])
        times = [began, *resumed]
        if times[-1].get("job") == job.hash(with_paths=True):
            # Older records have the hash of a job with its paths.
            here["job"] = times[-1]["job"]
        foreign = _foreign(setup, here, times, saved)
        yield "origin", "job, data, partition, model and modules have the run's hashes", foreign
        if foreign:
            # Every number would be another one.
            return
        tables = _tables(folder)
        recorded = of_tables(tables)
        yield from _table_checks(folder, setup, tables, recorded, saved, began, summary)
        other_hardware = _other_hardware(times, here)
        yield "comparison", _how_compared(other_hardware), []
        if tables["rounds"] and dict(tables["rounds"][-1]["notes"]).get("privacy.simulation") == 0:
            yield "noise", "of a secret, and drawn anew in each run: no round is played again", []
            return
        restored = {number: held.restore(setup, workers) for number, held in saved.items()}
        for round in restored.values():
            recorded |= of_checkpoint(round, workers)
        again = Again(setup, workers, restored, recorded, WITHIN if other_hardware else 0.0)
        # Where bits may differ, rounding grows from round to round: then only rounds after a
        # checkpoint can be compared.
        played = [row["round"] for row in tables["rounds"] if row["round"]]
        rounds = to_play(played, saved, every=every and not other_hardware, quick=quick)
        yield from again.play(rounds, clients)


def _table_checks(
    folder: Path,
    setup: Setup,
    tables: dict[str, list[Row]],
    recorded: Numbers,
    saved: Mapping[int, Checkpoint],
    began: Facts,
    summary: Facts,
) -> Iterator[Check]:
    """Yield the checks of the tables: by the last checkpoint, by the job, and among themselves."""
    changed: list[str] = []
    source = "no checkpoint has them too"
    if saved:
        changed += _changed(setup, recorded, list(saved.values())[-1])
        source = f"as in the checkpoint of round {max(saved)}"
    changed += _odd_rows(tables)
    changed += _of_another_partition(folder, setup, is_record="checkpoints" in began)
    yield "tables", source, changed
    if not changed:
        apart = _apart(setup, tables, recorded, summary)
        yield "tables", "accuracies, and the summary, follow from the other numbers", apart


def _other_hardware(times: Sequence[Facts], here: Facts) -> list[str]:
    """Say in what the run's hardware and versions differ from those here; each difference once."""
    ours = _bits(here)[0]
    others: dict[str, None] = {}
    for time in times:
        for kind in _bits(time):
            others |= dict.fromkeys(differences(kind, ours))
    return list(others)


def _how_compared(other_hardware: Sequence[str]) -> str:
    """Say how closely numbers are compared, and why."""
    if not other_hardware:
        return "bit for bit: hardware and versions are the run's"
    return (
        f"within {WITHIN:g}, and only after checkpoints, as bits may differ: "
        f"{'; '.join(other_hardware)}"
    )


def to_play(
    rounds: Iterable[int], saved: Collection[int], *, every: bool, quick: bool
) -> list[int]:
    """Return the rounds of a run that are played again.

    These are round 1 and the rounds after checkpoints, or every round, or only round 1.

    >>> to_play(range(6), {3}, every=False, quick=False)
    [1, 4]
    """
    trained = [number for number in rounds if number]
    if every:
        return trained
    return [number for number in trained if number == 1 or (number - 1 in saved and not quick)]


def _checkpoints(
    folder: Folder, began: Facts, summary: Facts
) -> tuple[dict[int, Checkpoint], list[str]]:
    """Return the complete checkpoints by their round, and what is wrong with the others.

    What is wrong with the best weights is there as well.
    """
    whole: dict[int, Checkpoint] = {}
    torn = []
    expected = {int(match[1]) for match in map(CHECKPOINT.fullmatch, folder.names()) if match}
    # A run that is done has a checkpoint of its last round.
    if summary.get("status") == "done" and "rounds" in summary:
        expected.add(summary["rounds"])
    # A record lists its checkpoints.
    expected |= set(began.get("checkpoints", ()))
    for number in sorted(expected):
        try:
            whole[number] = read_checkpoint(folder, number)
        except Torn as error:
            torn.append(f"the checkpoint of round {number}: {error}")
    # Only the last checkpoint has the hash of the final best weights. A record leaves these weights
    # out.
    best = None
    if whole and not torn and "checkpoints" not in began:
        best = whole[max(whole)].manifest.get("best")
    content = b""
    with suppress(OSError):
        content = folder.read(BEST)
    if best and hash_of(content) != best["sha256"]:
        torn.append(f"'{BEST}', of round {best['round']}, is missing or not as it was written")
    # Two checkpoints may name the same file.
    return whole, list(dict.fromkeys(torn))


def _foreign(
    setup: Setup, here: Facts, times: Sequence[Facts], saved: Mapping[int, Checkpoint]
) -> list[str]:
    """Say which hashes of what went in, and which jobs of checkpoints, are different here.

    The hashes are those in `environment.json` and in checkpoints.
    """
    origins: list[tuple[str, Facts, Sequence[str]]]
    origins = [("environment.json", time, FOR_EVER) for time in times[:-1]]
    origins.append(("environment.json", times[-1], ("job", *ORIGIN)))
    for number, held in saved.items():
        origins.append((f"the checkpoint of round {number}", held.manifest, ORIGIN))
    faults = []
    for name, facts, keys in origins:
        other = differences(_hashes(facts, keys), _hashes(here, keys), f"in {name}")
        faults += [f"the hash of {line}" for line in other]
    for number, held in saved.items():
        its_job = lineage_of(held.manifest["job"])
        faults += other_lineage(
            its_job, setup.job.lineage(), f"in the checkpoint of round {number}", "in job.toml"
        )
    return faults


def _hashes(facts: Facts, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of these keys; '' where there is none."""
    return {key: facts.get(key, "") for key in keys}


def _refuse_misshapen(file: Path, content: Facts, kind: type) -> None:
    """Raise `RunFailed` if a file of JSON is not as a run writes it."""
    try:
        TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        places = [".".join(map(str, fault["loc"])) for fault in error.errors()]
        raise RunFailed(
            f"'{file}' is missing, or not as a run writes it: see {', '.join(places)} in it"
        ) from None


def _tables(folder: Path) -> dict[str, list[Row]]:
    """Return the rows of each table.

    Raises `RunFailed` if one cannot be read.
    """
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
    """Say which rows are there more than once, or of a round that the table of rounds lacks."""
    played = {row["round"] for row in tables["rounds"]}
    places: Counter[tuple[int, str]] = Counter()
    for name, rows in tables.items():
        places.update((row["round"], place_of(name, row)) for row in rows)
    repeated, odd = [], []
    for (number, place), count in places.items():
        if count > 1:
            repeated.append(f"round {number}, {place}: {count} rows")
        if number not in played:
            odd.append(f"round {number}, {place}: a row of a round that is not in rounds")
    return repeated + odd


def _of_another_partition(folder: Path, setup: Setup, is_record: bool) -> list[str]:
    """Say if the table of the partition does not have the images that the job gives to clients.

    A record may be without this table.
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


def _changed(setup: Setup, recorded: Numbers, saved: Checkpoint) -> list[str]:
    """Say which numbers are not as a checkpoint has them, or are not in it."""
    tables = {}
    for name in RESULTS:
        table = without_extra(name, saved.table(name), setup.job.train)
        tables[name] = table.to_pylist()
    # A recorded number that the checkpoint lacks should not be there.
    right: Numbers = {place: "nothing" for place in recorded if place[0] <= saved.round}
    return differing(recorded, right | of_tables(tables), "in the checkpoint")


def _apart(
    setup: Setup, tables: dict[str, list[Row]], recorded: Numbers, summary: Facts
) -> list[str]:
    """Say which accuracies are not those of all classes together.

    It also says where the summary is not that of the tables.
    """
    data = setup.federation
    counts = np.bincount(data.test.labels, minlength=data.num_classes)
    images = dict(zip(data.train.classes, counts, strict=True))
    # By round, how many images are classified rightly.
    hits: Counter[int] = Counter()
    for row in tables["classes"]:
        right_images = (row["accuracy"] or 0.0) * images.get(row["class"], 0)
        hits[row["round"]] += round(np.nan_to_num(right_images))
    right = {}
    for number, count in hits.items():
        right[number, "rounds", "test_accuracy"] = count / len(data.test)
    expected = summarise(tables["rounds"])
    # The path of the best weights is in the summary only, so it cannot be checked.
    expected.get("best", {})["weights"] = summary.get("best", {}).get("weights", "")
    recorded_summary = {key: summary.get(key, "") for key in expected}
    faults = differing(recorded, right, "by the classes")
    faults += differences(recorded_summary, expected, "in summary.json", "in the tables")
    played = expected["rounds"]
    wanted = setup.job.train.num_rounds
    is_short = played < wanted and not early_end(setup.job.train, tables["rounds"])
    if summary.get("status") == "done" and is_short:
        faults.append(
            f"status is done in summary.json, with {played} of {wanted} rounds in the tables"
        )
    return faults


def _bits(facts: Facts) -> list[dict[str, str]]:
    """Return what bits depend on besides the job and rayfed's code, for each kind of hardware."""
    packages = {name: facts["packages"].get(name) for name in ("torch", "numpy")}
    return [kind | packages for kind in facts["hardware"]]
