"""The command status: the jobs submitted to a cluster and the runs of this folder."""

import os
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import click

from rayfed.base.console import aligned, duration, print_table, shown
from rayfed.base.errors import InputError, NoRay, NoToken, Resumable, harmless
from rayfed.base.files import read_regular
from rayfed.cli.options import RUNS, complete_name
from rayfed.cli.submit import address_option, hint
from rayfed.folder.summary import read_summary, status_of
from rayfed.runtime.address import VARIABLES, job_server
from rayfed.runtime.jobs import Jobs, Submission
from rayfed.submit.local import unknown_run

RUN = ("run", "status", "round", "best accuracy", "last written")
# Rows of a table.
MOST = 30
# Of a log, for one submission.
LAST_LINES = 10


@click.command()
@click.argument("name", required=False, shell_complete=complete_name)
@address_option
def status(name: str | None, address: str | None) -> None:
    """List submitted jobs and this folder's runs.

    Or describe one: NAME is a run's name in this folder's runs, a run's name on the cluster (of
    several submissions, the newest), or a submission id.
    """
    if name is not None:
        here = next((row for row in runs_in(RUNS) if row[0] == name), None)
        if here:
            print(aligned(list(zip(RUN, here, strict=True))))
            if here[1] not in ("done", "running"):
                print(f"to continue it: rayfed resume {shown(Path('runs') / name)}")
            if here[1] == "running":
                print(
                    f"its log: {hint('logs -f', name, None)}; to stop it: "
                    f"{hint('stop', name, None)}"
                )
        try:
            with job_server(address) as cluster:
                submission = cluster.find(name)
                if here:
                    print(f"\nsubmitted to {cluster.address}:")
                describe(cluster, submission, address)
        except InputError as error:
            # Else it need not be submitted.
            if not here:
                raise unknown_run(name, RUNS, error) from None
        return
    list_runs(RUNS)
    try:
        with job_server(address) as cluster:
            list_submissions(cluster)
    except NoRay:
        print("\nno Ray answers on this machine, so there are no submitted jobs")
    except NoToken as error:
        if address or any(os.environ.get(name) for name in VARIABLES):
            raise
        # The usual address may be another user's Ray, of which this user need not know anything.
        print(f"\nnote: submitted jobs are not listed: {error}")


def describe(cluster: Jobs, one: Submission, address: str | None) -> None:
    """Print everything about a submission, with the last lines of its log."""
    print(aligned([fact for fact in facts(one).items() if fact[1]]))
    # The command was not run.
    if one.status == "pending" or (one.status == "failed" and one.exit_code is None):
        print(f"\n{harmless(one.message.strip())}")
    lines = cluster.log(one.id).rstrip().splitlines()
    if lines:
        print(
            f"\nthe last lines of its log; all of it: {hint('logs', one.run or one.id, address)}\n"
        )
        print(harmless("\n".join(lines[-LAST_LINES:])))


def list_submissions(cluster: Jobs) -> None:
    """Print a table of rayfed's submissions, the newest first."""
    ours = [one for one in cluster.submissions() if one.run]
    number = f"{len(ours):,}" if ours else "nothing yet, by rayfed"
    print(f"\nsubmitted to {cluster.address}: {number}")
    columns = ["run", "status", "started", "took", "submission"]
    newest = [facts(one) for one in ours[:MOST]]
    print_newest(columns, [[one[column] for column in columns] for one in newest], len(ours))


def facts(one: Submission) -> dict[str, str]:
    """A submission's facts by name; '' where a fact is not known."""
    return {
        "run": one.run,
        "status": "can be resumed" if one.exit_code == Resumable.exit_code else one.status,
        "method": one.metadata.get("rayfed_method", ""),
        "started": time_text(one.started),
        "took": duration(one.took.total_seconds()) if one.took else "",
        "results": one.metadata.get("rayfed_results", ""),
        "submission": one.id,
    }


def list_runs(root: Path) -> None:
    """Print a table of the runs in a folder, the last written first."""
    rows = runs_in(root)
    print(f"runs in {shown(root.absolute())}: " + (f"{len(rows):,}" if rows else "none"))
    print_newest(RUN, rows[:MOST], len(rows))


def print_newest(columns: Sequence[str], rows: Sequence[Sequence[str]], count: int) -> None:
    """Print a table of the newest of `count` rows."""
    if rows:
        print_table(columns, rows)
    if count > len(rows):
        print(f"... and {count - len(rows):,} older ones")


def runs_in(root: Path) -> list[tuple[str, str, str, str, str]]:
    """Name, status, round, best accuracy and time of the last change of each run in a folder."""
    runs = []
    for file in root.rglob("summary.json"):
        # Incomplete, or another program's.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            summary = read_summary(file.parent)
            job = tomllib.loads(read_regular(file.parent / "job.toml").decode())
            best = summary.get("best")
            row = (
                file.parent.relative_to(root).as_posix(),
                status_of(file.parent),
                f"{summary['rounds']}/{job['train']['num_rounds']}",
                f"{best['test_accuracy']:.1%}" if best else "",
            )
            runs.append((file.stat().st_mtime, row))
    runs.sort(reverse=True)
    return [(*row, time_text(datetime.fromtimestamp(written, UTC))) for written, row in runs]


def time_text(time: datetime | None) -> str:
    """To the second, in local time."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}" if time else ""
