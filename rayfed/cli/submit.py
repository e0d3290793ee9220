"""Commands that send jobs to a Ray cluster, follow them and stop them: submit, logs, stop."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rayfed.base.console import aligned, shown
from rayfed.base.errors import STOPPED, InputError, Resumable
from rayfed.cli.exits import Failure
from rayfed.cli.options import (
    RUNS,
    complete_name,
    job_argument,
    read_override,
    settings_option,
    trust_option,
)
from rayfed.runtime.address import are_here, job_server, nodes_of
from rayfed.runtime.jobs import Jobs, Log, Submission
from rayfed.submit.driver import BYTES, LABEL, NUMBER, PACKAGE, VARIABLE, distinct, places
from rayfed.submit.local import LocalRun, local_run, unknown_run

if TYPE_CHECKING:
    from rayfed.grid.cells import Cell
    from rayfed.job import Job
    from rayfed.submit.package import Chosen

ENV = (
    "A variable for the job's processes, seen by all who see the cluster's jobs. May be given "
    "often."
)
WITH = (
    "A package for the job's processes, such as timm==1.0.31, which pip installs. May be given "
    "often."
)
CPUS = (
    "CPUs for the job's driver, which then runs on any node that has them; else on the head node."
)
MEMORY = "Memory for the driver, in bytes."
LABELS = "A label of the driver's node, as Ray selects it: disk=fast, gpu=!A10. May be given often."
address_option = click.option(
    "--address",
    metavar="URL",
    help=(
        "The cluster's dashboard; if not given, RAY_API_SERVER_ADDRESS, RAY_ADDRESS or "
        "http://127.0.0.1:8265."
    ),
)


def show(text: str) -> None:
    """Print a part of a log at once."""
    print(text, end="", flush=True)


@dataclass(frozen=True)
class Driver:
    """The place where the driver of a submitted job will run."""

    # It runs on this machine.
    is_here: bool
    # No node has what it asks for.
    waits: bool
    # It asks for CPUs, memory or a label.
    asks: bool


@click.command()
@job_argument
@settings_option
@address_option
@click.option(
    "--follow", is_flag=True, help="Show the job's log until it ends; Ctrl-C stops the job."
)
@click.option("--force", is_flag=True, help="Replace the results of an earlier run.")
@click.option("--resume", is_flag=True, help="Continue the run if it was begun; else begin it.")
@click.option(
    "--exclude",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Files not to send: images, '*.pdf'.",
)
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Files to send although they look like secrets.",
)
@click.option("--env", "variables", multiple=True, type=VARIABLE, callback=distinct, help=ENV)
@click.option("--with", "packages", multiple=True, type=PACKAGE, help=WITH)
@click.option("--entrypoint-num-cpus", type=NUMBER, help=CPUS)
@click.option("--entrypoint-memory", type=BYTES, help=MEMORY)
@click.option(
    "--entrypoint-label",
    "entrypoint_label_selector",
    multiple=True,
    type=LABEL,
    callback=distinct,
    help=LABELS,
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="List the files that would be sent, and what would stay; send nothing.",
)
@trust_option
def submit(
    job: str,
    settings: tuple[str, ...],
    address: str | None,
    follow: bool,
    force: bool,
    resume: bool,
    patterns: tuple[str, ...],
    include: tuple[str, ...],
    variables: dict[str, str],
    packages: tuple[str, ...],
    dry_run: bool,
    **entrypoint: Any,
) -> None:
    """Run a job on a Ray cluster.

    The working folder is sent, without data, results, virtual environments and files that are named
    like a secret. A job with a [grid] is submitted as a single job, which runs the grid.

    \b
    Examples:
      rayfed submit jobs/quickstart.toml --follow
      rayfed submit jobs/quickstart.toml --address http://head:8265 --resume
      rayfed submit jobs/quickstart.toml -s output.path=/shared/runs
      rayfed submit jobs/comparison/mnist-shards-2.toml --exclude notes
      rayfed submit jobs/quickstart.toml --with timm==1.0.31 --env HF_HOME=/shared/hub
    """
    from rayfed.folder.places import Folders
    from rayfed.folder.provenance import COMMIT, commit
    from rayfed.grid.cells import expand, refuse_same
    from rayfed.job import read_toml
    from rayfed.submit import package

    root = Path.cwd()
    if not Path(job).resolve().is_relative_to(root.resolve()):
        raise InputError(
            f"'{job}' lies outside this folder, which is sent to the cluster; submit from its own "
            "folder"
        )
    cells = expand(read_toml(job), dict(map(read_override, settings)))
    refuse_same(cells)
    asked = {name: value for name, value in entrypoint.items() if value}
    if "entrypoint_label_selector" in asked:
        # This imports Ray, which takes a second.
        from rayfed.runtime.versions import refuse_label_of_driver

        refuse_label_of_driver()
    # All jobs are checked before anything is sent.
    jobs = [cell.job() for cell in cells]
    run = cells[0].grid or jobs[0].name
    files = package.chosen(root, own_paths(jobs), patterns, include)
    if dry_run:
        print(aligned(files.all_lines()), aligned(files.lines()), sep="\n\n")
        return
    place = place_in(root, job, files)
    with job_server(address) as cluster:
        cluster.refuse_temporary()
        driver, elsewhere = driver_of(cluster, asked)
        if driver.is_here and not packages:
            cluster.refuse_another_ray()
        paths = package.anchored(jobs, root if driver.is_here else None, elsewhere)
        results = Path(paths.get("output.path", jobs[0].output.path)) / run
        refuse_twins(run, cluster.submissions(), address)
        if driver.is_here and not cells[0].grid:
            Folders.of(jobs[0]).refuse_overwriting(
                force or resume, "the same command, with --resume"
            )
        print(aligned(about(cluster, driver, files, cells, paths, results)), flush=True)
        command = ["-m", "rayfed", "run", place]
        for setting in list(settings) + changes(jobs, paths):
            command += ["-s", setting]
        flags = {"--force": force, "--resume": resume}
        command += [flag for flag, is_given in flags.items() if is_given]
        # On this machine, `python` may be a Python without Ray: the user need not activate an
        # environment. With packages, the job has an environment where `python` is the right one.
        python = sys.executable if driver.is_here and not packages else "python"
        with package.staged(root, files.sent) as code:
            environment = {**code, "env_vars": {**variables, COMMIT: commit() or ""}}
            if packages:
                environment["pip"] = list(packages)
            submitted = cluster.submit(
                [python, *command], run, environment, described(cells, jobs, results), **asked
            )
        print(f"submitted as {submitted.id}", flush=True)
        if follow:
            conclude(watch(cluster, submitted, address), address)
        else:
            print(
                f"to watch: {hint('logs -f', run, address)}; to stop: {hint('stop', run, address)}"
            )


def own_paths(jobs: Sequence[Job]) -> list[Path]:
    """Return the paths in jobs that are on this machine, each once."""
    paths = set()
    for job in jobs:
        paths |= {Path(path) for path in job.places().values() if "://" not in path}
    return sorted(paths)


def place_in(root: Path, job: str, files: Chosen) -> str:
    """Return the path of a job file in the folder that is sent.

    Raises `InputError` if the job file is not sent.
    """
    if not Path(job).is_file():
        # The job is an example that comes with rayfed, on the cluster as well.
        return job
    place = Path(job).resolve().relative_to(root.resolve()).as_posix()
    if place not in files.sent:
        reason = files.stays.get(place, "or its folder is left out, or git ignores it")
        raise InputError(f"'{job}' would not be sent: it {reason}")
    return place


def driver_of(cluster: Jobs, asked: Mapping[str, Any]) -> tuple[Driver, str]:
    """Return where the driver of a job will run, and words for a place that is not this machine."""
    known = nodes_of(cluster)
    nodes = places(known, asked)
    driver = Driver(
        is_here=are_here(cluster, nodes),
        waits=bool(asked and known and not nodes),
        asks=bool(asked),
    )
    elsewhere = "another machine"
    if driver.waits:
        elsewhere = "a node with what it asks for, and none has it,"
    return driver, f"{elsewhere} (of {cluster.address})"


def about(
    cluster: Jobs,
    driver: Driver,
    files: Chosen,
    cells: Sequence[Cell],
    paths: Mapping[str, str],
    results: Path,
) -> list[tuple[str, str]]:
    """Return what a user should know of a submission, in lines."""
    named_by = f", named by {cluster.named_by}" if cluster.named_by.startswith("RAY") else ""
    on_this_machine = ", on this machine" if driver.is_here else ""
    lines = [("cluster", f"{cluster.address}{named_by}{on_this_machine}")]
    lines += files.lines()
    if cells[0].grid:
        lines.append(("grid", f"{len(cells)} runs in one job"))
    lines += [(key, path) for key, path in paths.items() if key != "output.path"]
    if driver.waits:
        lines.append(("driver", "no node has what it asks for, so the job waits for one"))
    node = "driver's" if driver.asks else "head"
    on_a_node = "" if driver.is_here else f", on the cluster's {node} node"
    lines.append(("results", f"{results}{on_a_node}"))
    return lines


def changes(jobs: Sequence[Job], paths: Mapping[str, str]) -> list[str]:
    """Return the settings of a job that a submission changes."""
    settings = [f"{key}={path}" for key, path in paths.items()]
    if any(job.ray.address for job in jobs):
        # The job runs on the cluster that gets it.
        settings.append("ray.address=")
    return settings


@click.command()
@click.argument("name", shell_complete=complete_name)
@click.option(
    "-f", "--follow", is_flag=True, help="Continue until the job ends. Ctrl-C leaves the job alone."
)
@address_option
def logs(name: str, follow: bool, address: str | None) -> None:
    """Print the log of a submitted job, or of a run of this folder.

    NAME is a run's name (of several submissions, the newest) or a submission id.
    """
    here = local_run(name, RUNS) if address is None else None
    with _submission_or(here, name, address) as submitted:
        if here and submitted is None:
            print(f"log: {shown(here.path / 'log.txt')}", file=sys.stderr)
            if follow:
                here.follow(show)
            else:
                show(here.log())
            return
        assert submitted is not None
        cluster, submission = submitted
        if not follow:
            print(cluster.log(submission.id), end="")
            return
        try:
            ended = Log(cluster, submission.id, show).follow()
        except KeyboardInterrupt:
            raise Failure(
                f"{name} continues; to stop it: {hint('stop', name, address)}", STOPPED
            ) from None
        conclude(ended, address)


@click.command()
@click.argument("name", shell_complete=complete_name)
@address_option
def stop(name: str, address: str | None) -> None:
    """Stop a run, and wait for its end.

    NAME is the name of a run that was submitted (of several, the newest), the name of a run of this
    folder, or the id of a submission. The run has a minute to keep its finished rounds.
    """
    here = local_run(name, RUNS) if address is None else None
    with _submission_or(here, name, address) as submitted:
        if here and submitted is None:
            stop_here(here)
            return
        assert submitted is not None
        cluster, submission = submitted
        if submission.over:
            print(f"{name} is {submission.status} already")
            return
        pending = ""
        if submission.status == "pending":
            pending = ", which has not begun: Ray stops a job only then"
        print(f"stopping {name}{pending}", file=sys.stderr)
        cluster.stop(submission.id)
        try:
            ended = cluster.wait(submission.id)
        except KeyboardInterrupt:
            later = hint("status", name, address)
            raise Failure(f"{name} is being stopped; how it ended: {later}", STOPPED) from None
        if not ended.over:
            raise Failure(f"{name} has not ended yet; later: {hint('status', name, address)}", 1)
        print(f"{name} is {ended.status}" + results_of(ended))


@contextmanager
def _submission_or(
    here: LocalRun | None, name: str, address: str | None
) -> Iterator[tuple[Jobs, Submission] | None]:
    """Yield the newest submission of a run, behind its cluster.

    It is None for a run of this folder that no cluster runs. Raises `InputError` for a name that
    neither this folder nor the cluster knows.
    """
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(job_server(address))
            submission = cluster.find(name)
        except InputError as error:
            if here is None:
                raise unknown_run(name, RUNS, error) from None
            yield None
            return
        # An earlier submission of this name may be over, while a run that was started here
        # continues.
        if here and here.is_running and submission.over:
            yield None
        else:
            yield cluster, submission


def stop_here(run: LocalRun) -> None:
    """Stop a run that works on this machine, and say how to continue it."""
    again = f"to continue it: rayfed resume {shown(run.path)}"
    if not run.is_running:
        status = run.status
        print(f"{run.name} is {status}" + ("" if status == "done" else f"; {again}"))
        return
    number = run.process()
    print(f"stopping {run.name}, process {number}", file=sys.stderr)
    if not run.stop():
        raise Failure(f"{run.name} has not ended yet; `kill {number}` asks it again", 1)
    print(f"{run.name} is {run.status}; {again}")


def refuse_twins(run: str, submissions: Sequence[Submission], address: str | None) -> None:
    """Raise `InputError` if a run of this name has not ended: both would write to one folder."""
    for submission in submissions:
        if submission.run == run and not submission.over:
            raise InputError(
                f"'{run}' is {submission.status} there already, as {submission.id}; give the job "
                f"another name, or stop that run: {hint('stop', run, address)}"
            )


def described(cells: Sequence[Cell], jobs: Sequence[Job], results: Path) -> dict[str, str]:
    """Return the description that the cluster keeps with a submission."""
    from rayfed.methods.registry import describe

    method = f"a grid of {len(jobs)} runs" if cells[0].grid else describe(jobs[0].method)
    return {"rayfed_method": method, "rayfed_results": str(results)}


def watch(cluster: Jobs, submitted: Submission, address: str | None) -> Submission:
    """Show a job's log until it ends.

    Ctrl-C stops the job; a second Ctrl-C does not wait for its end.
    """
    log = Log(cluster, submitted.id, show)
    try:
        return log.follow()
    except KeyboardInterrupt:
        print("\nstopping the job; Ctrl-C again: do not wait for its end", file=sys.stderr)
    try:
        cluster.stop(submitted.id)
        return log.follow()
    except KeyboardInterrupt:
        later = hint("status", submitted.run, address)
        raise Failure(f"{submitted.run} is being stopped; how it ended: {later}", STOPPED) from None


def conclude(ended: Submission, address: str | None) -> None:
    """End as the job has ended: with its exit code, and with the next step."""
    name = ended.run or ended.id
    if ended.status == "stopped":
        raise Failure(f"{name} is stopped{results_of(ended)}", STOPPED)
    if ended.status == "failed":
        # Without an exit code, the command was never run.
        if ended.exit_code is None:
            raise Failure(f"error: {name} failed: {ended.message.strip()}", 1)
        code = ended.exit_code if ended.exit_code > 0 else 128 - ended.exit_code
        if code == Resumable.exit_code:
            raise Failure(
                f"{name} can continue: submit it again with --resume{results_of(ended)}", code
            )
        raise Failure(
            f"error: {name} failed with exit code {code}; more: {hint('status', name, address)}",
            code,
        )


def results_of(submission: Submission) -> str:
    """Say where a submission's results are, as the end of a sentence."""
    place = submission.metadata.get("rayfed_results")
    return f"; its finished rounds lie in {place}" if place else ""


def hint(command: str, name: str, address: str | None) -> str:
    """Return a command to be typed next.

    >>> hint("stop", "mine", None)
    '`rayfed stop mine`'
    """
    words = [name, "--address", address] if address else [name]
    return f"`rayfed {command} {shlex.join(words)}`"
