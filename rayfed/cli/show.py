"""Commands that show: methods, keys, data, partition, report, table."""

import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rayfed.cli.options import Overrides, catalogue, complete_job, complete_method, job_argument, read_base, set_option
from rayfed.cli.text import aligned, print_table, shown
from rayfed.errors import InputError, harmless, spelled

if TYPE_CHECKING:
    from rayfed.report.forms import Sheet
    from rayfed.report.read import Run

FORMS = ("text", "md", "latex", "csv")
OF = ("last", "best", "last_10", "personalised")
MOST_CLIENTS = 50  # in the table of `partition`
PICTURES = (".png", ".svg", ".pdf")


@click.command()
@click.argument("name", required=False, shell_complete=complete_method)
def methods(name: str | None) -> None:
    """List the methods, or describe one.

    With the paper, and the parameters with their defaults. A job names a method, sets its values, or composes several:

    \b
      method = "fedntd"
      method = { name = "fedntd", beta = 0.5 }
      method = ["fedlmd", { name = "proximal", mu = 0.01 }]
      method = "my_module:MyPart"     your own, in the current folder
    """
    if name is not None:
        describe(name)
        return
    entries = catalogue()
    recipes = [entry for entry in entries if entry["kind"] == "recipe"]
    print("Methods; down and up: bytes to and from a client in a round, in models\n")
    rows = [(e["name"], values(e), e["down"], e["up"], e["doc"].partition("\n")[0]) for e in recipes]
    print_table(["name", "parameters", "down", "up", "what"], rows)
    print("\nParts, to compose methods of\n")
    parts = [(e["name"], values(e), e["doc"].partition("\n")[0]) for e in entries if e["kind"] == "part"]
    print_table(["name", "parameters", "what"], parts)


def describe(name: str) -> None:
    """Print the paper and the parameters of a method, of a part, or of a user's `package.module:Name`."""
    name = spelled(name, [entry["name"] for entry in catalogue()])
    entry = next((entry for entry in catalogue() if entry["name"] == name), None)
    if entry is None:
        from rayfed.methods.registry import document, parameters  # brings torch

        if text := document(name):
            print(text, end="\n\n")
        taken = [(parameter, default_text(default), text) for parameter, default, text in parameters(name)]
        print_table(["parameter", "default", "what"], taken)
        return
    print(entry["doc"], end="\n\n")
    print_table(["parameter", "default", "what"], entry["parameters"])
    if entry["kind"] == "recipe":
        print(f"\nA client gets {entry['down']} and sends {entry['up']} times the model's size in a round.")


def values(entry: dict[str, Any]) -> str:
    return " ".join(f"{parameter}={default}" for parameter, default, _ in entry["parameters"])


def default_text(value: Any) -> str:
    """A default as a job file writes it."""
    return "(needed)" if value is inspect.Parameter.empty else "(none)" if value is None else json.dumps(value)


@click.command()
@click.argument("prefix", default="")
def keys(prefix: str) -> None:
    """List the keys of a job file, with defaults and meaning.

    With a PREFIX, only the keys that begin with it. Every key can be set from the command line: -s KEY=VALUE.

    \b
    Examples:
      rayfed keys
      rayfed keys ray
      rayfed keys data.partition
      rayfed keys grid
    """
    from rayfed import values
    from rayfed.grid import Grid
    from rayfed.job import Job

    rules: dict[tuple[str, str, str], list[str]] = {}  # key, default and meaning: the partitions that have it
    known = [*values.keys(Job), *values.keys(Grid, "grid")]
    for key in known:
        if key.name.startswith(prefix):
            row = key.name, default_text(key.default), key.sentence
            rules.setdefault(row, []).extend([key.kind] if key.kind else [])
    if not rules:
        near = values.nearest(prefix, known)
        rather = f"; did you mean '{near}'?" if near else ";"
        raise InputError(f"no key begins with '{prefix}'{rather} `rayfed keys` lists all")
    rows = [(*row[:2], f"{', '.join(kinds)}: {row[2]}" if kinds else row[2]) for row, kinds in rules.items()]
    print_table(["key", "default", "what"], rows)


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@set_option
def data(job: str | None, overrides: Overrides) -> None:
    """List the sources of data, or describe a job's data.

    A Parquet file or folder, or a tree of image folders, is a source too: -s data.source=PATH.
    """
    from rayfed.data.settings import SOURCES, Data
    from rayfed.data.sources import is_here

    if job is None:
        root = dict(overrides).get("data.root", Data.root)
        rows = [(name, "yes" if is_here(name, root) else "no", what) for name, what in SOURCES.items()]
        print_table(["source", "here", "what"], rows)
        return
    from rayfed.cli.display import clients_text, images_text, partition_text
    from rayfed.local import open_data

    read = read_base(job, overrides)
    federation = open_data(read)
    classes = federation.train.classes
    form = ".4g" if read.data.in_place_of_images else ".4f"  # features have units of their own
    mean, deviation = (
        " ".join([*(f"{value:{form}}" for value in each[:20]), *["..."][: len(each) > 20]])
        for each in (federation.mean, federation.std)
    )
    facts = {
        "source": read.data.source,
        "examples" if read.data.in_place_of_images else "images": images_text(federation),
        "classes": f"{len(classes)}: {', '.join(classes[:20])}{', ...' if len(classes) > 20 else ''}",
        **({"mean": mean, "deviation": deviation} if mean else {}),
        "partition": partition_text(read.data.partition),
        "clients": clients_text(federation),
    }
    if names := federation.test.domain_names:
        facts["domains"] = f"{len(names)} in the test set: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
    print(aligned(list(facts.items())))


@click.command()
@job_argument
@set_option
@click.option("-o", "--output", help="The picture: .png, .svg or .pdf; NAME.partition.png here if not given.")
def partition(job: str, overrides: Overrides, output: str | None) -> None:
    """Show how many images of each class each client holds.

    As a table, and as a heat map in a file. For a job with a [grid], the partition without the grid's settings.
    """
    import numpy as np

    from rayfed.cli.display import clients_text
    from rayfed.local import open_data
    from rayfed.report.partition import save_partition

    read = read_base(job, overrides)
    path = Path(output or f"{Path(read.name).name}.partition.png")
    if path.suffix not in PICTURES:
        raise InputError(f"--output '{path}': pictures end in {', '.join(PICTURES)}")
    federation = open_data(read)
    classes, num_clients = tuple(map(harmless, federation.train.classes)), federation.num_clients
    clients, labels, counts = federation.cells()
    table = np.zeros((min(num_clients, MOST_CLIENTS), len(classes)), dtype=np.int64)
    first = clients < MOST_CLIENTS
    table[clients[first], labels[first]] = counts[first]
    rows = [[str(i), *cells(row)] for i, row in enumerate(table)]
    if num_clients > MOST_CLIENTS:
        rows.append([f"{num_clients - MOST_CLIENTS:,} more", *[""] * (len(classes) + 1)])
    rows.append(["total", *cells(np.bincount(labels, counts, len(classes)).astype(np.int64))])
    print_table(["client", *classes, "total"], rows)
    print(f"\nclients: {clients_text(federation)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_partition({"client": clients, "class": labels, "count": counts}, classes, num_clients, path)
    print(f"heat map in {shown(path)}")


def cells(counts: Any) -> list[str]:
    """Counts as text, with their sum; a dot stands for 0."""
    return [str(count or ".") for count in counts] + [str(counts.sum())]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page; RUN/report.html, or compare.html.")
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Make the page of a run, or a page that compares several.

    Every run ends with its page; this command makes it again from the run's folder, also for a killed run. With several
    runs, or the folder of a grid, the others are compared with the first; runs whose names end in seed-0, seed-1, ...
    become one line, with their mean and their range.

    \b
    Examples:
      rayfed report runs/quickstart
      rayfed report runs/fedavg runs/fedntd -o compare.html
      rayfed report runs/fedntd-table1                     all runs of a grid
    """
    from rayfed.report.page import write_comparison, write_report
    from rayfed.report.read import find_runs

    folders = list(dict.fromkeys(folder for run in runs for folder in find_runs(run)))
    if folders == list(runs[:1]):
        path = write_report(runs[0], output)
    else:
        path = write_comparison(folders, output or (Path("compare.html") if len(runs) > 1 else runs[0] / "report.html"))
    print(f"page in {shown(path)}")


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--paper", metavar="PAPER/TABLE", help="Beside a paper's numbers, such as fedntd/table1.")
@click.option("--of", type=click.Choice(OF), default="last", help="Accuracy to compare; last.")
@click.option("--from", "first", metavar="NAME", default="", help="The run to compare with, such as fedavg; the first.")
@click.option("--target", type=float, help="Also the rounds to this accuracy, such as 0.5, and the speed-up.")
@click.option("--format", "form", type=click.Choice(FORMS), default="text", help="Form of the table; text.")
def table(runs: tuple[Path, ...], paper: str | None, of: str, first: str, target: float | None, form: str) -> None:
    """Print the numbers of runs as a table.

    As papers do: means over seeds, and differences from the first run, or from those that --from names. A difference is
    the mean over pairs of runs with the same data, partition, seed and number of rounds; it has a 95 % interval by
    Student's t, and is marked where that leaves 0 out. A run without such a pair is the first of its own, and the table
    says what it has other than the first run. With --paper, each number of the paper's table in jobs/papers has a line
    of its own, with ours beside it, and notes say what our runs did otherwise.

    \b
    Examples:
      rayfed table runs/comparison-mnist --from fedavg      all runs of a grid
      rayfed table runs/fedavg runs/fedntd --of best --format latex
      rayfed table runs/fedavg runs/fedntd --target 0.5     rounds to 50 %
      rayfed table runs/fedavg runs/ditto --of personalised    of runs that measured `local`
      rayfed table runs/fedntd-table1 --paper fedntd/table1
    """
    from rayfed.report.table import sheet

    if paper is not None and of == "personalised":
        raise InputError("--of personalised is for a table without --paper: a paper's numbers say what they are")
    if paper is not None and (target is not None or first):
        name, own = ("--from", "FedAvg") if target is None else ("--target", "the paper's target")
        raise InputError(f"{name} is for a table without --paper: a paper's numbers have {own}")
    if target is not None and not 0 < target <= 1:
        raise InputError(f"--target {target:g}: give an accuracy as a fraction of 1, such as 0.5 for 50 %")
    if paper is not None:
        print_paper(runs, paper, form, of)
    else:
        print_sheet(sheet(read_runs(runs), form, of, target, first), form)


def print_paper(runs: Iterable[Path], name: str, form: str = "text", of: str = "last") -> None:
    """Print a paper's table, such as fedntd/table1, beside the runs in these folders; `form` is one of `FORMS`."""
    from rayfed.report.papers import read_paper, sheet

    paper = read_paper(name)
    print_sheet(sheet(read_runs(runs), paper, of), form)


def read_runs(folders: Iterable[Path]) -> "list[Run]":
    """The runs in these folders, each once. Raises `InputError` for a run with a damaged file."""
    from rayfed.report.read import find_runs, read_run

    found = {path.resolve(): path for folder in folders for path in find_runs(folder)}
    runs = []
    for path in found.values():
        try:
            runs.append(read_run(path))
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            what = f"'{path}' cannot be read, as a file in it is not as a run wrote it: {error!r}"
            raise InputError(f"{what}; put that file back, or leave this run out") from error
    return runs


def print_sheet(sheet: "Sheet", form: str) -> None:
    """Print a table and its notes; beside comma-separated values, the notes go to standard error."""
    from rayfed.report import forms

    if form == "csv":
        print(forms.as_csv(sheet))
        print(*map(harmless, sheet.notes), sep="\n", end="\n" if sheet.notes else "", file=sys.stderr)
    elif form == "text":
        print_table(sheet.head, sheet.lines)
        print(*map(harmless, ["", *sheet.notes] if sheet.notes else []), sep="\n", end="\n" if sheet.notes else "")
    else:
        clean = sheet._replace(lines=[[harmless(cell) for cell in line] for line in sheet.lines])
        print((forms.markdown if form == "md" else forms.latex)(clean._replace(notes=[*map(harmless, sheet.notes)])))
