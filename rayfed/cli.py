"""The command `rayfed`.

Bad input ends with exit code 2 and one message, a run that failed with 1, Ctrl-C with 130. Everything heavy is imported
by the command that needs it, so that help and completion answer at once.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import get_completion_class

from rayfed import __version__
from rayfed.completion import JobFile, MethodName, Override
from rayfed.display import (
    aligned,
    brief,
    clients_text,
    follow,
    images_text,
    log_to_stderr,
    print_table,
    result_text,
    shown,
)
from rayfed.exits import Commands, RunFailed, failures
from rayfed.values import InputError

if TYPE_CHECKING:
    from rayfed.cost import Cost
    from rayfed.grid import Cell
    from rayfed.job import Job

MOST_CLIENTS = 50  # that `partition` prints; of more, the first ones
PICTURES = (".png", ".svg", ".pdf")

Overrides = tuple[tuple[str, Any], ...]


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Results lie in runs/NAME: report.html, tables as Parquet, the last weights, summary.json.",
)
@click.version_option(__version__)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Federated learning on Ray: experiments as job files.

    \b
    Examples:
      rayfed run jobs/quickstart.toml                      train, on this machine
      rayfed run jobs/quickstart.toml -s train.num_rounds=2 -s ray.mode=off
      rayfed run jobs/quickstart.toml -s method=fedavg -s name=quickstart-fedavg
      rayfed run jobs/quickstart.toml -s ray.address=auto  on the Ray cluster that runs here
      rayfed partition jobs/quickstart.toml                who holds how much of which class
      rayfed report runs/fedavg runs/fedntd                compare runs on a page
      rayfed methods fedntd                                a method's paper and parameters
      rayfed completion bash >> ~/.bashrc                  complete job files, keys and methods
    """
    if (here := os.getcwd()) not in sys.path:  # for a method or model of one's own; Ray tells its workers
        sys.path.insert(0, here)
    ctx.with_resource(log_to_stderr())


job_argument = click.argument("job", type=JobFile())
set_option = click.option(
    "-s",
    "--set",
    "overrides",
    type=Override(),
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the job: -s train.num_rounds=2. May be given often.",
)


@main.command()
@job_argument
@set_option
@click.option("--force", is_flag=True, help="Replace the results of an earlier run.")
@click.option("--only", metavar="PATTERN", default="*", help="Of a grid, the runs whose names match: '*/fedntd/*'.")
@click.option("--list", "listed", is_flag=True, help="List the runs and do nothing.")
def run(job: str, overrides: Overrides, force: bool, only: str, listed: bool) -> None:
    """Train what a job file says.

    A job with a [grid] stands for many runs. They go one after the other; those that are done already are passed over,
    and one that fails does not hold up the others. At the end comes a table of settings and methods.

    \b
    Examples:
      rayfed run jobs/quickstart.toml --force
      rayfed run jobs/papers/fedntd/table1.toml --list
      rayfed run jobs/papers/fedntd/table1.toml --only 'cifar10-shards-2/fed*/seed-0'
      rayfed run jobs/papers/fedntd/table1.toml -s grid.seeds=[0] -s train.num_rounds=50
    """
    from rayfed.grid import expand
    from rayfed.job import read_table

    cells = expand(read_table(job), dict(overrides))
    chosen = [cell for cell in cells if fnmatch(cell.name, only) or fnmatch(cell.name, f"*/{only}")]
    if not chosen:
        raise InputError(f"--only '{only}': none of {len(cells)} runs matches, such as '{cells[0].name}'; see --list")
    if listed:
        print("\n".join(cell.name for cell in chosen))
    elif chosen[0].grid:
        run_grid(cells, chosen, force)
    else:
        run_one(chosen[0].job(), force)


def run_one(job: Job, force: bool) -> None:
    """Run a job, showing how it goes and what came of it."""
    from rayfed.experiment import run
    from rayfed.record import read_summary

    with follow() as display:
        result = run(job, force=force, display=display)
    print(result_text(result.path, read_summary(result.path)))


def run_grid(cells: list[Cell], chosen: list[Cell], force: bool) -> None:
    """Run the chosen cells that are not done; then show the results of all that are."""
    from rayfed.record import is_done

    jobs = [cell.job() for cell in chosen]
    todo = [job for job in jobs if force or not is_done(job)]
    if len(todo) < len(jobs):
        print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are done already")
    failed = []
    try:
        for number, job in enumerate(todo, start=1):
            print(f"\nrun {number} of {len(todo)}", flush=True)
            try:
                with failures():
                    run_one(job, force=True)  # over what an unfinished run left
            except RunFailed as failure:
                failure.show()
                failed.append(job.name)
    finally:
        show_results(cells)
    if failed:
        raise RunFailed("\n".join([f"error: {len(failed)} of {len(todo)} runs failed:", *failed]))


def show_results(cells: list[Cell]) -> None:
    """Print the table of a grid's finished cells, and write it beside them."""
    from rayfed.grid import as_csv, tabulate
    from rayfed.record import folder_of, is_done, read_summary

    done = []
    for cell in cells:
        with suppress(InputError):  # of a cell that was not chosen, and cannot run
            if is_done(job := cell.job()):
                done.append((cell, read_summary(folder_of(job))))
    if not done:
        return
    rows = tabulate(done)
    path = folder_of(replace(done[0][0].job(), name=cells[0].grid)) / "table.csv"
    path.write_text(as_csv(rows))
    print(f"\n{len(done)} of {len(cells)} runs are done; mean ± deviation over seeds, in {shown(path)}:")
    columns = [field.name for field in fields(rows[0])]
    print_table([name.replace("_", " ") for name in columns], [[str(getattr(row, c)) for c in columns] for row in rows])


@main.command()
@click.argument("name", required=False, type=MethodName())
def methods(name: str | None) -> None:
    """List the methods, or describe one.

    With the paper, and the parameters with their defaults. A job names a method, gives it values, or composes several:

    \b
      method = "fedntd"
      method = { name = "fedntd", beta = 0.5 }
      method = ["fedlmd", { name = "proximal", mu = 0.01 }]
      method = "my_module:MyPart"     one of your own, found from the current folder
    """
    from rayfed.cost import cost
    from rayfed.methods.registry import PARTS, RECIPES, parameters

    def values(name: str) -> str:
        return " ".join(f"{parameter}={default_text(default)}" for parameter, default, _ in parameters(name))

    if name is None:
        print("Methods; down and up: what a client gets and sends in a round, in models\n")
        rows = [(name, values(name), *costs(cost(maker())), first_line(maker)) for name, maker in RECIPES.items()]
        print_table(["name", "parameters", "down", "up", "what"], rows)
        print("\nParts, to compose methods of\n")
        print_table(["name", "parameters", "what"], [(n, values(n), first_line(part)) for n, part in PARTS.items()])
        return
    taken = parameters(name)
    if maker := {**RECIPES, **PARTS}.get(name):
        print(inspect.getdoc(maker), end="\n\n")
    print_table(["parameter", "default", "what"], [(p, default_text(d), text) for p, d, text in taken])
    if name in RECIPES:
        down, up = costs(cost(RECIPES[name]()))
        print(f"\nA client gets {down} and sends {up} times the model's size in a round.")


def costs(cost: Cost) -> tuple[str, str]:
    return f"{cost.down:.1f}", f"{cost.up:.1f}"


def first_line(maker: Callable[..., Any]) -> str:
    return (inspect.getdoc(maker) or "").partition("\n")[0]


def default_text(value: Any) -> str:
    """A default as a job file writes it.

    >>> [default_text(value) for value in (0.5, "kl", True)]
    ['0.5', '"kl"', 'true']
    """
    return "(needed)" if value is inspect.Parameter.empty else json.dumps(value)


@main.command()
@click.argument("job", required=False, type=JobFile())
@set_option
def data(job: str | None, overrides: Overrides) -> None:
    """List the sources of data, or describe a job's data.

    Any Parquet file or folder, or tree of image folders, is a source as well: -s data.source=PATH.
    """
    from rayfed.data.downloads import is_here
    from rayfed.data.sources import SOURCES, Source

    if job is None:
        root = dict(overrides).get("data.root", Source.root)
        print_table(
            ["source", "here", "what"],
            [(name, "yes" if is_here(name, root) else "no", what) for name, what in SOURCES.items()],
        )
        return
    from rayfed.experiment import open_data

    read = read_base(job, overrides)
    federation = open_data(read)
    classes = federation.train.classes
    print(
        aligned(
            [
                ("source", read.source.source),
                ("images", images_text(federation)),
                ("classes", f"{len(classes)}: {', '.join(classes[:20])}{', ...' if len(classes) > 20 else ''}"),
                ("mean", " ".join(f"{value:.4f}" for value in federation.mean)),
                ("deviation", " ".join(f"{value:.4f}" for value in federation.std)),
                ("partition", brief(read.partition)),
                ("clients", clients_text(federation)),
            ]
        )
    )


@main.command()
@job_argument
@set_option
@click.option("-o", "--output", help="The picture: .png, .svg or .pdf; runs/NAME.partition.png if not given.")
def partition(job: str, overrides: Overrides, output: str | None) -> None:
    """Show who holds how much of which class.

    As a table, and as a heat map in a file. Of a job with a [grid], it is the partition of the job without it.
    """
    from rayfed.experiment import open_data
    from rayfed.record import folder_of
    from rayfed.report.partition import draw_partition, table_text

    read = read_base(job, overrides)
    path = Path(output) if output else folder_of(read).with_name(f"{Path(read.name).name}.partition.png")
    if path.suffix not in PICTURES:
        raise InputError(f"--output '{path}': pictures end in {', '.join(PICTURES)}")
    federation = open_data(read)
    table, classes = federation.label_table(), federation.train.classes
    lines = table_text(table[:MOST_CLIENTS], classes).splitlines()
    print("\n".join(lines if len(table) <= MOST_CLIENTS else lines[:-1]))
    if len(table) > MOST_CLIENTS:
        print(f"... and {len(table) - MOST_CLIENTS:,} more clients")
    print(f"\nclients: {clients_text(federation)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_partition(table, classes, path, f"{read.source.source}, {brief(read.partition)}")
    print(f"heat map in {shown(path)}")


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page; RUN/report.html, or compare.html.")
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Make the page of a run, or one that compares several.

    Every run ends with the first; this makes it anew from the run's folder, of a run that was killed, too. Of several
    runs, the first is what the others are measured by.

    \b
    Examples:
      rayfed report runs/quickstart
      rayfed report runs/fedavg runs/fedntd -o compare.html
    """
    from rayfed.report.page import write_comparison, write_report

    one = len(runs) == 1
    path = write_report(runs[0], output) if one else write_comparison(runs, output or Path("compare.html"))
    print(f"page in {shown(path)}")


def read_base(job: str, overrides: Overrides) -> Job:
    """A job, or the job over which a grid is laid."""
    from rayfed.job import read_job, read_table

    return read_job({key: value for key, value in read_table(job).items() if key != "grid"}, dict(overrides))


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes this command.

    \b
    Once, for every shell to come:
      rayfed completion bash >> ~/.bashrc
      rayfed completion zsh >> ~/.zshrc
      rayfed completion fish > ~/.config/fish/completions/rayfed.fish
    """
    if script := get_completion_class(shell):
        print(script(main, {}, "rayfed", "_RAYFED_COMPLETE").source())
