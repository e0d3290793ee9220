"""Commands that send jobs to a Ray cluster, follow them and stop them: submit, logs, stop."""

from __future__ import annotations

import hashlib
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from rayfed import __version__
from rayfed.cli.options import job_argument
from rayfed.completion import Override
from rayfed.display import aligned, method_text
from rayfed.exits import Resumable, RunFailed, Stopped
from rayfed.values import InputError

if TYPE_CHECKING:
    from rayfed.grid import Cell
    from rayfed.job import Job
    from rayfed.runtime.jobs import Jobs, Submission


class Verbatim(Override):
    """`key.sub=value`, checked, and kept as it was written: it goes on to another command."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)
        return value


address_option = click.option(
    "--address",
    metavar="URL",
    help="The cluster's dashboard; if not given, RAY_API_SERVER_ADDRESS, RAY_ADDRESS or http://127.0.0.1:8265.",
)


@click.command()
@job_argument
@click.option(
    "-s",
    "--set",
    "settings",
    type=Verbatim(),
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the job: -s train.num_rounds=2. May be given often.",
)
@address_option
@click.option("--follow", is_flag=True, help="Show the job's log until it ends; Ctrl-C stops the job.")
@click.option("--force", is_flag=True, help="Replace the results of an earlier run.")
@click.option("--resume", is_flag=True, help="Go on with the run if it was begun; else begin it.")
@click.option(
    "--exclude", "patterns", multiple=True, metavar="PATTERN", help="Files or folders not to send: images, '*.pdf'."
)
def submit(
    job: str,
    settings: tuple[str, ...],
    address: str | None,
    follow: bool,
    force: bool,
    resume: bool,
    patterns: tuple[str, ...],
) -> None:
    """Run a job on a Ray cluster.

    The working folder goes along, without data, results and virtual environments. A job with a [grid] is submitted as
    one job, which runs the grid.

    \b
    Examples:
      rayfed submit jobs/quickstart.toml --follow
      rayfed submit jobs/quickstart.toml --address http://127.0.0.1:8265 -s output.path=/shared/runs
      rayfed submit jobs/comparison/mnist.toml -s grid.seeds=[0] --exclude notes
    """
    from rayfed import package
    from rayfed.grid import expand
    from rayfed.job import read_override, read_table
    from rayfed.record import refuse_overwriting

    cells = expand(read_table(job), dict(map(read_override, settings)))
    jobs = [cell.job() for cell in cells]  # all are checked before anything is sent
    run = cells[0].grid or jobs[0].name
    with speaking_to(address) as cluster:
        cluster.refuse_passing()
        here = cluster.is_here()
        paths = package.anchored(jobs, Path.cwd() if here else None, cluster.address)
        results = Path(paths.get("output.path", jobs[0].output.path)) / run
        refuse_twins(run, cluster.all(), address)
        if here and not cells[0].grid:
            refuse_overwriting(jobs[0], force or resume)
        apart = {Path(path).expanduser() for one in jobs for path in package.places_of(one).values()}
        files, job_file = package.gather(Path.cwd(), Path(job), sorted(apart), patterns)
        settings = (*settings, *(f"{key}={path}" for key, path in paths.items()))
        if any(one.ray.address for one in jobs):
            settings = (*settings, "ray.address=")  # the cluster that it was submitted to is the one to use
        said = f", named by {cluster.named_by}" if cluster.named_by.startswith("RAY") else ""
        lines = [
            ("cluster", cluster.address + said + (", on this machine" if here else "")),
            ("packed", f"{len(files):,} files, {package.mebibytes(package.size_of(files))}"),
            *([("grid", f"{len(jobs)} runs, one after the other in one job")] if cells[0].grid else []),
            *((key, path) for key, path in paths.items() if key != "output.path"),
            ("results", f"{results}" + ("" if here else ", on the cluster's head node")),
        ]
        print(aligned(lines), flush=True)
        # On this machine, `python` need not be the one that has Ray: nobody has to activate an environment.
        command = [sys.executable if here else "python", "-m", "rayfed", "run", job_file]
        command += [word for setting in settings for word in ("-s", setting)]
        command += [*(["--force"] if force else []), *(["--resume"] if resume else [])]
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "working-folder.zip"
            package.write_zip(files, archive)
            submitted = cluster.submit(command, run, archive, described(cells, jobs, results))
        print(f"submitted as {submitted.id}", flush=True)
        if follow:
            conclude(watch(cluster, submitted, address), address)
        else:
            print(f"to watch: {hint('logs -f', run, address)}; to stop: {hint('stop', run, address)}")


@click.command()
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends. Ctrl-C leaves the job alone.")
@address_option
def logs(name: str, follow: bool, address: str | None) -> None:
    """Print what a submitted job has logged.

    NAME is a run's name (of several submissions, the newest) or a submission id.
    """
    from rayfed.runtime.jobs import Log

    with speaking_to(address) as cluster:
        found = cluster.find(name)
        if not follow:
            print(cluster.log(found.id), end="")
            return
        try:
            ended = Log(cluster, found.id, show).follow()
        except KeyboardInterrupt:
            raise Stopped(f"{name} goes on; to stop it: {hint('stop', name, address)}") from None
        conclude(ended, address)


@click.command()
@click.argument("name")
@address_option
def stop(name: str, address: str | None) -> None:
    """Stop a submitted job, and wait for its end.

    NAME is a run's name (of several submissions, the newest) or a submission id. The run keeps what is finished; it
    has a minute for that.
    """
    with speaking_to(address) as cluster:
        found = cluster.find(name)
        if found.over:
            print(f"{name} is {found.status} already")
            return
        print(f"stopping {name}", file=sys.stderr)
        cluster.stop(found.id)
        try:
            ended = cluster.wait(found.id)
        except KeyboardInterrupt:
            raise Stopped(f"{name} is being stopped; how it ended: {hint('status', name, address)}") from None
        if not ended.over:
            leave(f"{name} has not ended yet; later: {hint('status', name, address)}", RunFailed.exit_code)
        print(f"{name} is {ended.status}" + results_of(ended))


def speaking_to(address: str | None) -> AbstractContextManager[Jobs]:
    """The job server of the cluster that is named, or of the Ray on this machine."""
    from rayfed.runtime.jobs import connected  # Ray takes a second to import

    return connected(address)


def refuse_twins(run: str, submissions: Sequence[Submission], address: str | None) -> None:
    """Raises `InputError` where a run of this name goes on: both would write to one folder."""
    for one in submissions:
        if one.run == run and not one.over:
            raise InputError(
                f"'{run}' is {one.status} there already, as {one.id}; give the job another name, or stop that one: "
                + hint("stop", run, address)
            )


def described(cells: Sequence[Cell], jobs: Sequence[Job], results: Path) -> dict[str, str]:
    """What the cluster keeps beside a submission."""
    hashes = [job.hash() for job in jobs]
    return {
        "rayfed_version": __version__,
        "rayfed_method": f"a grid of {len(jobs)} runs" if cells[0].grid else method_text(jobs[0].method),
        "rayfed_job": hashlib.sha256("".join(hashes).encode()).hexdigest() if cells[0].grid else hashes[0],
        "rayfed_results": str(results),
    }


def watch(cluster: Jobs, submitted: Submission, address: str | None) -> Submission:
    """Show a job's log until it ends. Ctrl-C stops the job; another one leaves it to itself."""
    from rayfed.runtime.jobs import Log

    log = Log(cluster, submitted.id, show)
    try:
        return log.follow()
    except KeyboardInterrupt:
        print("\nstopping the job; Ctrl-C again leaves it to itself", file=sys.stderr)
    try:
        cluster.stop(submitted.id)
        return log.follow()
    except KeyboardInterrupt:
        later = hint("status", submitted.run, address)
        raise Stopped(f"{submitted.run} is being stopped; how it ended: {later}") from None


def show(text: str) -> None:
    print(text, end="", flush=True)


def conclude(ended: Submission, address: str | None) -> None:
    """End as the job did: with its exit code, and with a word on what can be done."""
    name = ended.run or ended.id
    if ended.status == "stopped":
        leave(f"{name} is stopped{results_of(ended)}", Stopped.exit_code)
    if ended.status == "failed":
        if ended.exit_code is None:  # it has not come to run the command
            leave(f"error: {name} failed: {ended.message.strip()}", RunFailed.exit_code)
        code = ended.exit_code if ended.exit_code > 0 else 128 - ended.exit_code
        if code == Resumable.exit_code:
            leave(f"{name} can go on: submit it again with --resume{results_of(ended)}", code)
        leave(f"error: {name} failed with exit code {code}; more: {hint('status', name, address)}", code)


def leave(message: str, exit_code: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise click.exceptions.Exit(exit_code)


def results_of(one: Submission) -> str:
    """Where a submission's results are, as the end of a sentence."""
    place = one.metadata.get("rayfed_results")
    return f"; what is finished lies in {place}" if place else ""


def hint(command: str, name: str, address: str | None) -> str:
    """A command of ours, to be typed next.

    >>> hint("logs -f", "quickstart", None)
    '`rayfed logs -f quickstart`'
    """
    return f"`rayfed {command} {shlex.join([name, *(['--address', address] if address else [])])}`"
