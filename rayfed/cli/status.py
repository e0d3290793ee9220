"""The command `status`: the jobs submitted to a cluster, and the runs of this folder."""

import os
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import click

from rayfed.base.console import aligned, duration, print_table, shown
from rayfed.base.errors import InputError, NoRay, NoToken, Resumable, harmless
from rayfed.cli.options import RUNS, complete_name
from rayfed.cli.submit import address_option, hint
from rayfed.folder.summary import read_summary, status_of
from rayfed.runtime.address import VARIABLES, job_server
from rayfed.runtime.jobs import Jobs, Submission
from rayfed.submit.local import unknown_run

RUN = ("run", "status", "round", "best accuracy", "last written")
# Most rows of a table.
MOST = 30
# The lines of its log that the description of a submission ends with.
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
        describe_one(name, address)
        return
    list_runs(RUNS)
    try:
        with job_server(address) as cluster:
            list_submissions(cluster)
    except NoRay:
        print("\nno Ray answers on this machine, so there are no submitted jobs")
    except NoToken as error:
        if address or any(os.environ.get(variable) for variable in VARIABLES):
            raise
        # The usual address may be the Ray of another user, which is none of this user's business.
        print(f"\nnote: submitted jobs are not listed: {error}")


def describe_one(name: str, address: str | None) -> None:
    """Print everything about a run of this folder, or a submission, or both.

    Raises `InputError` if there is neither.
    """
    rows = [row for row in runs_in(RUNS) if row[0] == name]
    for row in rows[:1]:
        print(aligned(list(zip(RUN, row, strict=True))))
        run_status = row[1]
        if run_status == "running":
            watch = hint("logs -f", name, None)
            stop = hint("stop", name, None)
            print(f"its log: {watch}; to stop it: {stop}")
        elif run_status != "done":
            print(f"to continue it: rayfed resume {shown(Path('runs') / name)}")
    try:
        with job_server(address) as cluster:
            submission = cluster.find(name)
            if rows:
                print(f"\nsubmitted to {cluster.address}:")
            describe(cluster, submission, address)
    except InputError as error:
        # A run of this folder need not be submitted.
        if not rows:
            raise unknown_run(name, RUNS, error) from None


def describe(cluster: Jobs, submission: Submission, address: str | None) -> None:
    """Print everything about a submission, with the last lines of its log."""
    print(aligned([fact for fact in facts(submission).items() if fact[1]]))
    has_failed_early = submission.status == "failed" and submission.exit_code is None
    # If the command was not run, the message says why.
    if submission.status == "pending" or has_failed_early:
        print(f"\n{harmless(submission.message.strip())}")
    lines = cluster.log(submission.id).rstrip().splitlines()
    if lines:
        whole = hint("logs", submission.run or submission.id, address)
        print(f"\nthe last lines of its log; all of it: {whole}\n")
        print(harmless("\n".join(lines[-LAST_LINES:])))


def list_submissions(cluster: Jobs) -> None:
    """Print a table of rayfed's submissions, the newest first."""
    ours = [submission for submission in cluster.submissions() if submission.run]
    number = f"{len(ours):,}" if ours else "nothing yet, by rayfed"
    print(f"\nsubmitted to {cluster.address}: {number}")
    columns = ["run", "status", "started", "took", "submission"]
    rows = []
    for submission in ours[:MOST]:
        known = facts(submission)
        rows.append([known[column] for column in columns])
    print_newest(columns, rows, len(ours))


def facts(submission: Submission) -> dict[str, str]:
    """Return a submission's facts by name; '' where a fact is not known."""
    can_be_resumed = submission.exit_code == Resumable.exit_code
    return {
        "run": submission.run,
        "status": "can be resumed" if can_be_resumed else submission.status,
        "method": submission.metadata.get("rayfed_method", ""),
        "started": time_text(submission.started),
        "took": duration(submission.took.total_seconds()) if submission.took else "",
        "results": submission.metadata.get("rayfed_results", ""),
        "submission": submission.id,
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
    """Return the runs in a folder, the last changed first.

    A row has name, status, round, best accuracy, and time of the last change.
    """
    runs = []
    for file in root.rglob("summary.json"):
        # A file may be incomplete, or that of another program.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            summary = read_summary(file.parent)
            job = tomllib.loads((file.parent / "job.toml").read_bytes().decode())
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
    """Return a time to the second, in local time; '' for no time."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}" if time else ""
