"""Commands that show: methods, keys, data, partition, report."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rayfed.cli.options import Overrides, job_argument, read_base, set_option
from rayfed.completion import JobFile, MethodName
from rayfed.display import aligned, brief, clients_text, images_text, print_table, shown
from rayfed.values import InputError

if TYPE_CHECKING:
    from rayfed.cost import Cost

MOST_CLIENTS = 50  # that `partition` prints; of more, the first ones
PICTURES = (".png", ".svg", ".pdf")


@click.command()
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

    >>> [default_text(value) for value in (0.5, "kl", True, None)]
    ['0.5', '"kl"', 'true', '(none)']
    """
    return "(needed)" if value is inspect.Parameter.empty else "(none)" if value is None else json.dumps(value)


@click.command()
@click.argument("prefix", default="")
def keys(prefix: str) -> None:
    """List what a job file can say: keys, defaults, meaning.

    With a PREFIX, the keys that begin with it. Any of them is also set from the command line: -s KEY=VALUE.

    \b
    Examples:
      rayfed keys
      rayfed keys ray
      rayfed keys data.partition
    """
    rows = [row for row in key_rows() if row[0].startswith(prefix)]
    if not rows:
        raise InputError(f"no key begins with '{prefix}'; `rayfed keys` lists all")
    print_table(["key", "default", "what"], rows)


def key_rows() -> list[tuple[str, str, str]]:
    """Each key with its default and its meaning; one of a partition with the rules that take it."""
    from rayfed.data.partition import PARTITIONS
    from rayfed.job import SECTIONS
    from rayfed.models.registry import MODELS
    from rayfed.values import sentence

    of: dict[tuple[str, str, str], list[str]] = {}
    for section, cls in SECTIONS:
        for field in fields(cls):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            row = f"{section}.{field.name}", default_text(default), sentence(cls, field.name)
            of.setdefault(row, []).extend(name for name, rule in PARTITIONS.items() if rule is cls)
    return [
        ("name", "(needed)", "of the run, and of its folder; parts may be divided by /"),
        ("seed", "0", "of the model, of the cohorts, and of all that clients draw"),
        ("method", '"fedavg"', "a method, or a list of parts: `rayfed methods` lists them"),
        ("model.name", '"cnn"', f"{', '.join(MODELS)}, or package.module:function; the rest of [model] is for it"),
        ("data.partition.name", '"iid"', f"who holds what: {', '.join(PARTITIONS)}"),
        *(
            (key, default, f"{', '.join(names)}: {what}" if names else what)
            for (key, default, what), names in of.items()
        ),
    ]


@click.command()
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


@click.command()
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


@click.command()
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
