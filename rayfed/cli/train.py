"""The commands that train: `run`, `resume` and `replay`."""

from __future__ import annotations

import pdb  # noqa: T100
from pathlib import Path

import click

from rayfed.base.console import busy
from rayfed.base.errors import InputError, RunFailed, harmless
from rayfed.cli.options import (
    RUN,
    Overrides,
    RunPath,
    job_argument,
    other_bits_option,
    set_option,
    trust_option,
)


@click.command()
@job_argument
@set_option
@click.option("--force", is_flag=True, help="Replace the results of an earlier run.")
@click.option("--resume", is_flag=True, help="Continue the run if it was begun; else begin it.")
@other_bits_option
@trust_option
@click.option(
    "--only",
    metavar="PATTERN",
    default="*",
    help="Of a grid, the runs whose names match: '*/fedntd/*'.",
)
@click.option("--list", "listed", is_flag=True, help="List the runs and do nothing.")
def run(
    job: str,
    overrides: Overrides,
    force: bool,
    resume: bool,
    other_bits: bool,
    only: str,
    listed: bool,
) -> None:
    """Train the federation of a job file.

    JOB is a TOML file, or `quickstart`. -s KEY=VALUE changes any setting; `rayfed keys` lists them.

    A job with a [grid] is many runs. Several run at a time, with a line for each, and a table comes
    last. If a run fails, the others continue. Repeat the command to continue the grid: finished
    runs are skipped.

    \b
    Examples:
      rayfed run quickstart -s method=fedavg -s name=first
      rayfed run jobs/quickstart.toml --force
      rayfed run jobs/papers/fedntd/table1.toml --list
      rayfed run jobs/papers/fedntd/table1.toml --only 'cifar10-*/fedntd/*'
      rayfed run jobs/papers/fedntd/table1.toml -s 'grid.seeds=[0]'
    """
    if force and resume:
        raise InputError(
            "--force begins the run again, and --resume continues it: give one of the two"
        )
    with busy(f"reading {job}"):
        from rayfed.grid.cells import expand, matching
        from rayfed.job import read_toml

        cells = expand(read_toml(job), dict(overrides))
        chosen = matching(cells, only, "--only")
        # The first job imports torch, which takes seconds.
        jobs = [cell.job() for cell in chosen]
    if listed:
        print("\n".join(job.name for job in jobs))
    elif chosen[0].grid:
        from rayfed.cli.grid import run_grid

        run_grid(cells, jobs, force, other_bits)
    else:
        from rayfed import api
        from rayfed.observers.display import on_screen

        on_screen(api.run, jobs[0], force=force, resume=resume, other_bits=other_bits)


@click.command()
@click.argument("run", metavar="RUN", type=RunPath())
@set_option
@other_bits_option
@trust_option
def resume(run: str, overrides: Overrides, other_bits: bool) -> None:
    """Continue a run that was stopped, or killed.

    It continues from the newest complete checkpoint up to train.num_rounds. The results are
    bit-identical to those of a run that never stopped. RUN is the run's folder, or the folder or
    URI of its checkpoints. Options may change where the work is done (ray.*), where results go
    (output.*), the number of rounds, and what is measured at clients.

    \b
    Examples:
      rayfed resume runs/quickstart
      rayfed resume runs/quickstart -s train.num_rounds=50
      rayfed resume runs/quickstart -s ray.mode=off
    """
    with busy(f"reading {run}"):
        from rayfed import api
        from rayfed.observers.display import on_screen

    on_screen(api.resume, run, dict(overrides), other_bits=other_bits)


@click.command()
@click.argument("run", metavar="RUN", type=RUN)
@click.option("--round", type=int, required=True, help="The round, from 1 on.")
@click.option("--client", required=True, help="A client that was in it, by its number or name.")
@click.option("--debug", is_flag=True, help="Open Python's debugger where the client fails.")
def replay(run: Path, round: int, client: str, debug: bool) -> None:
    """Train one client of a run's round again.

    This shows what the client did, or why it failed. First, the rounds since the checkpoint before
    that round are played again. Then the client trains in this process, without Ray, from the same
    weights and with the same random numbers.

    If a client's name in the data is another client's number, give number:2 or name:2.

    \b
    Example:
      rayfed replay runs/quickstart --round 7 --client 10
    """
    from rayfed import experiment
    from rayfed.folder.provenance import other_versions, versions_of
    from rayfed.folder.tables import read_table
    from rayfed.report.verify.numbers import same

    try:
        row, recorded = experiment.replay(run, round, client)
    except Exception as error:
        if debug and isinstance(error, RunFailed):
            pdb.post_mortem((error.__cause__ or error).__traceback__)
        raise
    table = read_table(run, "partition").to_pydict()
    name = dict(zip(table["client"], table["name"], strict=True)).get(row.client)
    named = "" if name is None else f" (named '{harmless(name)}')"
    print(
        f"client {row.client}{named}, round {round}: {row.num_examples} images, loss "
        f"{row.train_loss:.4f}, {row.seconds:.1f} s"
    )
    if recorded is None:
        return
    # The loss of a client that has diverged may be NaN.
    if same(recorded, row.train_loss, 0.0):
        print("the run recorded the same loss")
        return
    distance = abs(recorded - row.train_loss)
    print(f"the run recorded {recorded:.4f}, which is {distance:.1g} apart")
    for line in other_versions(versions_of(run)):
        print(line)
