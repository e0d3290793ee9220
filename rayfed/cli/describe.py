"""The commands that describe: `methods`, `keys`, `data` and `partition`."""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rayfed.base.console import aligned, print_table, shown
from rayfed.base.errors import InputError, harmless, nearest, spelled
from rayfed.cli.options import Overrides, job_argument, read_base, set_option

# Most clients in the table of `partition`.
MOST_CLIENTS = 50
# Most words in a line of `data`.
MOST_WORDS = 20


@click.command()
@click.argument("name", required=False)
def methods(name: str | None) -> None:
    """List the methods, or describe one.

    The description has the paper, and the parameters with their defaults. A job names a method,
    sets its values, or composes several:

    \b
      method = "fedntd"
      method = { name = "fedntd", beta = 0.5 }
      method = ["fedlmd", { name = "proximal", mu = 0.01 }]
      method = "my_module:MyPart"     your own, in the current folder
    """
    # This imports torch, which takes seconds.
    from rayfed.methods.registry import PARTS, RECIPES

    if name is not None:
        describe(spelled(name, [*RECIPES, *PARTS]))
        return
    print("Methods; `rayfed methods NAME` shows a method's parameters\n")
    print_table(["name", "what"], [summary(recipe) for recipe in RECIPES])
    print("\nParts, to compose methods of\n")
    print_table(["name", "what"], [summary(part) for part in PARTS])


def summary(name: str) -> tuple[str, str]:
    """Return the row of a recipe or a part: its name and its first sentence."""
    from rayfed.methods.registry import document

    return name, document(name).partition("\n")[0]


def describe(name: str) -> None:
    """Print the paper and the parameters of a method or a part, and how to set it.

    It may be the user's `package.module:Name`.
    """
    from rayfed.methods.registry import document, parameters

    paper = document(name)
    if paper:
        print(paper, end="\n\n")
    print(f'to use it: -s method={name}, or in a job file: method = "{name}"\n')
    rows = []
    for parameter, default, meaning in parameters(name):
        rows.append((parameter, default_text(default), meaning))
    if rows:
        print_table(["parameter", "default", "what"], rows)


def default_text(value: Any) -> str:
    """Return a default as a job file writes it.

    >>> default_text(0.5), default_text("iid"), default_text(None)
    ('0.5', '"iid"', '(none)')
    """
    if value is inspect.Parameter.empty:
        return "(needed)"
    if value is None:
        return "(none)"
    return json.dumps(value)


@click.command()
@click.argument("prefix", default="")
def keys(prefix: str) -> None:
    """List the keys of a job file, with defaults and meaning.

    With a PREFIX, it lists only the keys that begin with it, or else the keys in whose meaning the
    word stands. Every key can be set from the command line: -s KEY=VALUE.

    \b
    Examples:
      rayfed keys
      rayfed keys ray
      rayfed keys data.partition
      rayfed keys grid
      rayfed keys "learning rate"
    """
    from rayfed.base import values
    from rayfed.grid.cells import Grid
    from rayfed.job import Job

    # The partitions that have a key with this default and meaning.
    rules: dict[tuple[str, str, str], list[str]] = {}
    known = list(values.keys(Job)) + list(values.keys(Grid, "grid"))
    chosen = [key for key in known if key.name.startswith(prefix)]
    near = "" if chosen else values.nearest_key(prefix, known)
    if not chosen and not near:
        chosen = [key for key in known if prefix.lower() in key.sentence.lower()]
    if not chosen:
        rather = f"; did you mean '{near}'?" if near else ";"
        raise InputError(f"no key begins with '{prefix}'{rather} `rayfed keys` lists all")
    for key in chosen:
        row = key.name, default_text(key.default), key.sentence
        rules.setdefault(row, []).extend([key.kind] if key.kind else [])
    rows = []
    for (name, default, meaning), kinds in rules.items():
        rows.append((name, default, f"{', '.join(kinds)}: {meaning}" if kinds else meaning))
    print_table(["key", "default", "what"], rows)


@click.command()
@click.argument("job", required=False, metavar="[JOB|SOURCE]", type=click.Path())
@set_option
def data(job: str | None, overrides: Overrides) -> None:
    """List the sources of data, or describe one, or a job's data.

    A Parquet file or folder, or a tree of image folders, is also a source: -s data.source=PATH.
    """
    from rayfed.data.settings import SOURCES

    if job is None:
        print_table(["source", "what"], list(SOURCES.items()))
        return
    from rayfed.data.federation import federate
    from rayfed.data.partition import Iid
    from rayfed.data.sources import load
    from rayfed.observers.display import clients_text, images_text, partition_text
    from rayfed.rounds.setup import open_data

    is_source = spelled(job, SOURCES) in SOURCES and not Path(job).exists()
    near = nearest(job, SOURCES, cutoff=0.75)
    if near and not is_source and not Path(job).exists():
        raise InputError(f"no data set or job file '{job}'; did you mean '{near}'?")
    read = read_base({"name": "data", "data": {"source": job}} if is_source else job, overrides)
    dataset, fault = load(read.data), ""
    try:
        federation = open_data(read, lambda _: dataset)
    except InputError as error:
        # If the partition is refused, what was read is worth seeing all the same.
        federation = federate(dataset, Iid(num_clients=1))
        fault = str(error)
    classes = federation.train.classes
    beyond_images = bool(read.data.in_place_of_images)
    facts = [
        ("source", read.data.source),
        ("examples" if beyond_images else "images", images_text(federation)),
        ("classes", f"{len(classes)}: {first_ones(classes, ', ')}"),
    ]
    if len(federation.mean):
        # Features have any units, so their numbers may be large or small.
        form = ".4g" if beyond_images else ".4f"
        mean = [f"{value:{form}}" for value in federation.mean]
        deviation = [f"{value:{form}}" for value in federation.std]
        facts.append(("mean", first_ones(mean, " ")))
        facts.append(("deviation", first_ones(deviation, " ")))
    facts.append(("partition", partition_text(read.data.partition)))
    facts.append(("clients", fault or clients_text(federation)))
    domains = federation.test.domain_names
    if domains:
        facts.append(("domains", f"{len(domains)} in the test set: {first_ones(domains, ', ')}"))
    print(aligned(facts))


def first_ones(words: Sequence[str], between: str) -> str:
    """Return words in a line, and dots for the words that are too many.

    >>> first_ones(["cat", "dog"], ", ")
    'cat, dog'
    """
    if len(words) > MOST_WORDS:
        words = [*words[:MOST_WORDS], "..."]
    return between.join(words)


@click.command()
@job_argument
@set_option
@click.option(
    "-o", "--output", help="The picture: .png, .svg or .pdf; NAME.partition.png here if not given."
)
@click.option(
    "--export", help="Also write each client's images to this file: .json, .npz or .parquet."
)
def partition(job: str, overrides: Overrides, output: str | None, export: str | None) -> None:
    """Show how many images of each class each client holds.

    It prints a table, and writes a heat map to a file. For a job with a [grid], it shows the
    partition without the grid's settings.
    """
    import numpy as np

    from rayfed.data.dealt import write_dealt
    from rayfed.data.unevenness import in_words, unevenness
    from rayfed.papers.backend import import_matplotlib

    import_matplotlib()
    from rayfed.observers.display import clients_text
    from rayfed.papers import partition as drawn
    from rayfed.papers.panels import save
    from rayfed.papers.style import PICTURES
    from rayfed.rounds.setup import open_data

    read = read_base(job, overrides)
    path = Path(output or f"{Path(read.name).name}.partition.png")
    if path.suffix not in PICTURES:
        raise InputError(f"--output '{path}': pictures end in {', '.join(PICTURES)}")
    federation = open_data(read)
    if export:
        write_dealt(Path(export), [federation.client(i) for i in range(federation.num_clients)])
    num_clients = federation.num_clients
    classes = [harmless(name) for name in federation.train.classes]
    clients, labels, counts = federation.cells()
    table = np.zeros((min(num_clients, MOST_CLIENTS), len(classes)), dtype=np.int64)
    in_table = clients < MOST_CLIENTS
    table[clients[in_table], labels[in_table]] = counts[in_table]
    rows = [[harmless(federation.called(i)), *cells(row)] for i, row in enumerate(table)]
    if num_clients > MOST_CLIENTS:
        empty = [""] * (len(classes) + 1)
        rows.append([f"{num_clients - MOST_CLIENTS:,} more", *empty])
    rows.append(["total", *cells(np.bincount(labels, counts, len(classes)).astype(np.int64))])
    print_table(["client", *classes, "total"], rows)
    print(f"\nclients: {clients_text(federation)}")
    print(f"unevenness: {in_words(unevenness(clients, labels, counts, num_clients, len(classes)))}")
    held = {"client": clients, "class": labels, "count": counts}
    save(drawn.partition, path, held, classes, num_clients)
    print(f"heat map in {shown(path)}")


def cells(counts: Any) -> list[str]:
    """Return counts as text, with their sum; a dot stands for 0."""
    return [str(count or ".") for count in counts] + [str(counts.sum())]
