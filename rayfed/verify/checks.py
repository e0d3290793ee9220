"""What is checked of a run's folder, in order: checkpoints, origin, tables, and rounds that are played again."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.base.errors import InputError, RunFailed, Torn
from rayfed.base.storage import Folder
from rayfed.experiment import job_of
from rayfed.folder.checkpoint import BEST, ORIGIN
from rayfed.folder.places import Folders
from rayfed.folder.provenance import environment, hash_of
from rayfed.folder.saved import Saved, read_saved
from rayfed.folder.summary import read_environment, read_summary, summarise
from rayfed.folder.tables import RESULTS, read_table, without_extra
from rayfed.job import differences
from rayfed.rounds.site import Site, open_site
from rayfed.runtime.workers import open_workers
from rayfed.verify.again import Again, Check, of_checkpoint
from rayfed.verify.numbers import Numbers, Row, differing, of_tables

WITHIN = 0.02  # where bits may differ: docs/verify.md has what was measured
CHECKPOINT = re.compile(r"round-(\d{5,})\.(json|safetensors)")
Facts = dict[str, Any]


def checks(folder: Path, *, every: bool = False, clients: int = 0) -> Iterator[Check]:
    """Check a run's folder, or a record of one, in which nothing is written. Raises `InputError` where there is none.

    Plays round 1 and the rounds after checkpoints again, or `every` round; with `clients`, so many clients of each.
    """
    job = job_of(folder, None, None)
    if job is None:
        raise InputError(f"'{folder}' is neither the folder of a run nor a record of one: it holds no job.toml")
    began, summary = read_environment(folder), read_summary(folder)
    saved, torn = _checkpoints(Folders.of(job).checkpoints, began, summary)
    yield "checkpoints", f"whole, of rounds {[*saved]}", torn
    site = open_site(job)
    with open_workers(site, on_ray=False) as workers:
        here, times = environment(site, workers), [began, *began.get("resumed", [])]
        hashes = {key: here.get(key, "") for key in ("job", *ORIGIN)}
        origins = {"environment.json": times[-1]}
        origins |= {f"the checkpoint of round {n}": each.manifest | {"job": here["job"]} for n, each in saved.items()}
        foreign = [
            f"the hash of {line}"
            for name, facts in origins.items()
            for line in differences({key: facts.get(key, "") for key in hashes}, hashes, f"in {name}")
        ]
        yield "origin", "job, data, partition, model and modules have the run's hashes", foreign
        if foreign:
            return  # every number would be another
        try:
            tables = {name: read_table(folder, name).to_pylist() for name in RESULTS}
        except (OSError, ValueError) as error:  # of Arrow
            raise RunFailed(f"the tables in '{folder}' cannot be read: {error}") from None
        recorded = of_tables(tables)
        changed = [fault for last in [*saved.values()][-1:] for fault in _changed(site, recorded, last)]
        yield "tables", f"as in the checkpoint of round {max(saved, default='')}", changed
        if not changed:
            apart = _apart(site, tables, recorded, summary)
            yield "tables", "accuracies, and the summary, follow from the other numbers", apart
        others = {line: "" for time in times for kind in _bits(time) for line in differences(kind, _bits(here)[0])}
        loose = f"within {WITHIN:g}, and only after checkpoints, as bits may differ: {'; '.join(others)}"
        yield "comparison", loose if others else "bit for bit: hardware and versions are the run's", []
        played = [row["round"] for row in tables["rounds"] if row["round"]]
        near = [number for number in played if number - 1 in {0, *saved}]  # rounding grows from round to round
        kept = {number: each.restore(site, workers) for number, each in saved.items()}
        recorded |= {at: number for round in kept.values() for at, number in of_checkpoint(round, workers).items()}
        again = Again(site, workers, kept, recorded, WITHIN if others else 0.0)
        yield from again.play(played if every and not others else near, clients)


def _checkpoints(folder: Folder, began: Facts, summary: Facts) -> tuple[dict[int, Saved], list[str]]:
    """The whole checkpoints by their round, and what is wrong with the others, or with the best weights."""
    whole: dict[int, Saved] = {}
    torn = []
    there = {int(match[1]) for match in map(CHECKPOINT.fullmatch, folder.names()) if match}
    last = {summary["rounds"]} if summary.get("status") == "done" else set()
    for number in sorted(there | last | {*began.get("checkpoints", ())}):  # as a record notes them
        try:
            whole[number] = read_saved(folder, number)
        except Torn as error:
            torn.append(f"the checkpoint of round {number}: {error}")
    named = "weights" in summary.get("best", {}) and not torn  # an earlier checkpoint has the hash of earlier weights
    best = whole[max(whole)].manifest.get("best") if whole and named else None
    content = b""
    with suppress(OSError):
        content = folder.read(BEST)
    if best and hash_of(content) != best["sha256"]:
        torn.append(f"'{BEST}', of round {best['round']}, is missing or not as it was written")
    return whole, torn


def _changed(site: Site, recorded: Numbers, saved: Saved) -> list[str]:
    """Which numbers are not as a checkpoint has them, or are not in it."""
    tables = {name: without_extra(name, saved.table(name), site.job.train).to_pylist() for name in RESULTS}
    more = {place: "nothing" for place in recorded if place[0] <= saved.round}
    return differing(recorded, more | of_tables(tables), "in the checkpoint")


def _apart(site: Site, tables: dict[str, list[Row]], recorded: Numbers, summary: Facts) -> list[str]:
    """Which accuracies are not those of all classes together, and where the summary is not that of the tables."""
    data = site.federation
    images = dict(zip(data.train.classes, np.bincount(data.test.labels, minlength=data.num_classes), strict=True))
    hits: Counter[int] = Counter()  # images that are classified rightly, by round
    for row in tables["classes"]:
        hits[row["round"]] += round(np.nan_to_num(row["accuracy"] * images[row["class"]]))
    right = {(number, "rounds", "test_accuracy"): count / len(data.test) for number, count in hits.items()}
    whole = summarise(tables["rounds"])
    whole.get("best", {})["weights"] = summary.get("best", {}).get("weights", "")  # a place, which no table has
    there = {key: summary.get(key, "") for key in whole}
    return differing(recorded, right, "by the classes") + differences(there, whole, "in summary.json", "in the tables")


def _bits(facts: Facts) -> list[dict[str, str]]:
    """What bits depend on beside the job and rayfed's code, for each kind of hardware."""
    return [kind | {name: facts["packages"].get(name) for name in ("torch", "numpy")} for kind in facts["hardware"]]
