"""The command status: what was submitted to a cluster and how far it has come, and the runs of this folder."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rayfed.cli.cluster import address_option, hint, speaking_to
from rayfed.display import aligned, duration, print_table, shown
from rayfed.exits import Resumable

if TYPE_CHECKING:
    from rayfed.runtime.jobs import Jobs, Submission

ROUND = re.compile(r"^round +(\d+)/(\d+)  accuracy ([\d.]+)", re.MULTILINE)  # a line of `rayfed.display.Lines`
OF_GRID = re.compile(r"^run (\d+ of \d+)$", re.MULTILINE)
MOST = 30  # rows of a table
LAST_LINES = 10  # of a log, for one submission


@click.command()
@click.argument("name", required=False)
@address_option
def status(name: str | None, address: str | None) -> None:
    """List submitted jobs and this folder's runs.

    Or describe one submission: NAME is a run's name (of several submissions, the newest) or a submission id.
    """
    from rayfed.runtime.jobs import NoRay

    if name is not None:
        with speaking_to(address) as cluster:
            describe(cluster, cluster.find(name), address)
        return
    list_runs(Path("runs"))
    try:
        with speaking_to(address) as cluster:
            list_submissions(cluster)
    except NoRay:
        print("\nno Ray answers on this machine, so nothing is submitted to it")


def describe(cluster: Jobs, one: Submission, address: str | None) -> None:
    """Print all about a submission, with the last lines of its log."""
    log = cluster.log(one.id)
    round, accuracy = progress(log)
    rows = [
        ("run", one.run),
        ("status", status_text(one)),
        ("round", round),
        ("accuracy", accuracy),
        ("method", one.metadata.get("rayfed_method", "")),
        ("started", time_text(one.started)),
        ("took", took_text(one)),
        ("results", one.metadata.get("rayfed_results", "")),
        ("submission", one.id),
        ("rayfed", one.metadata.get("rayfed_version", "")),
        ("job", one.metadata.get("rayfed_job", "")),
    ]
    print(aligned([row for row in rows if row[1]]))
    if one.status == "pending" or (one.status == "failed" and one.exit_code is None):  # the command was not run
        print(f"\n{one.message.strip()}")
    if lines := log.rstrip().splitlines():
        print(f"\nthe last lines of its log; all of it: {hint('logs', one.run or one.id, address)}\n")
        print("\n".join(lines[-LAST_LINES:]))


def list_submissions(cluster: Jobs) -> None:
    """Print a table of rayfed's submissions, the newest first."""
    found = [one for one in cluster.all() if one.run]
    print(f"\nsubmitted to {cluster.address}: " + (f"{len(found):,}" if found else "nothing yet, by rayfed"))
    if found:
        print_table(
            ["run", "status", "round", "accuracy", "started", "took", "submission"],
            [
                (
                    one.run,
                    status_text(one),
                    *progress(cluster.log(one.id)),
                    time_text(one.started),
                    took_text(one),
                    one.id,
                )
                for one in found[:MOST]
            ],
        )
    if len(found) > MOST:
        print(f"... and {len(found) - MOST:,} older ones")


def list_runs(root: Path) -> None:
    """Print a table of the runs in a folder, those that were written to last first."""
    rows = runs_in(root)
    print(f"runs in {shown(root.absolute())}: " + (f"{len(rows):,}" if rows else "none"))
    if rows:
        print_table(["run", "status", "round", "best accuracy", "last written"], rows[:MOST])
    if len(rows) > MOST:
        print(f"... and {len(rows) - MOST:,} older ones")


def runs_in(root: Path) -> list[tuple[str, str, str, str, str]]:
    """Of each run in a folder: name, status, round, best accuracy, and when something was written last."""
    from rayfed.record import is_abandoned

    found = []
    for file in root.rglob("summary.json"):
        with suppress(OSError, ValueError, KeyError):  # half of a run, or somebody else's file
            summary = json.loads(file.read_text())
            job = tomllib.loads((file.parent / "job.toml").read_text())
            best = summary.get("best")
            status = str(summary["status"])
            if status == "running" and is_abandoned(file.parent):
                status = "killed, or running elsewhere"
            row = (
                file.parent.relative_to(root).as_posix(),
                status,
                f"{summary['rounds']}/{job['train']['num_rounds']}",
                f"{best['test_accuracy']:.3f}" if best else "",
            )
            found.append((file.stat().st_mtime, row))
    found.sort(reverse=True)
    return [(*row, time_text(datetime.fromtimestamp(written, UTC))) for written, row in found]


def progress(log: str) -> tuple[str, str]:
    """How far a run has come by its log: the last round, and the accuracy after it; of a grid, of the run under way.

    >>> progress("run 2 of 9\\nround  4/12  accuracy 0.512  forgetting 0.100\\n")
    ('4/12, run 2 of 9', '0.512')
    """
    rounds, runs = ROUND.findall(log), OF_GRID.findall(log)
    if not rounds:
        return "", ""
    round, total, accuracy = rounds[-1]
    return ", ".join([f"{round}/{total}", *(f"run {run}" for run in runs[-1:])]), accuracy


def status_text(one: Submission) -> str:
    return "can be resumed" if one.exit_code == Resumable.exit_code else one.status


def time_text(time: datetime | None) -> str:
    """To the second, as the clock here shows it."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}" if time else ""


def took_text(one: Submission) -> str:
    return duration(one.took.total_seconds()) if one.took else ""
