"""The commands `table` and `reproduce`, which print numbers of runs as papers print them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rayfed.base.console import busy
from rayfed.base.errors import InputError
from rayfed.base.files import write_text
from rayfed.cli.options import (
    RUN,
    Labels,
    Overrides,
    label_option,
    other_bits_option,
    set_option,
    starting,
    trust_option,
)
from rayfed.cli.report import FORMS, print_sheet
from rayfed.report.forms import KEYS

if TYPE_CHECKING:
    from rayfed.grid.cells import Cell
    from rayfed.job import Job
    from rayfed.papers.items import Declared

BY_ROUND = ("last", "best", "last_10")
SUFFIXES = {".txt": "text", ".md": "md", ".tex": "latex", ".csv": "csv"}
OF = [*BY_ROUND, "personalised", *KEYS]
OF_TEXT = (
    "What to compare: last (if not given), best, last_10, personalised, forgetting.round, "
    "domain.NAME and others."
)


def complete_item(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the papers' tables and figures that complete what a user has typed."""
    from rayfed.papers.items import items

    return starting(incomplete, list(items()))


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=RUN)
@click.option(
    "--paper", metavar="PAPER/TABLE", help="Beside a paper's numbers, such as fedntd/table1."
)
@click.option(
    "--of",
    "figure",
    metavar="WHAT",
    default="last",
    # `figure` calls it so, after the column of rounds.parquet.
    callback=lambda *at: "last" if at[-1] == "test_accuracy" else at[-1],
    help=OF_TEXT,
    shell_complete=lambda *at: starting(at[-1], OF),
)
@click.option(
    "--from",
    "reference",
    metavar="NAME",
    default="",
    help="The run to compare with. If not given: fedavg, or the first.",
)
@click.option(
    "--target",
    type=float,
    help="Also the rounds to this accuracy, such as 0.5 (50 %), and the speed-up.",
)
@click.option(
    "--columns", metavar="NAME,...", help="Columns beside the run: seeds,best. If not given: all."
)
@click.option(
    "--sort",
    metavar="NAME",
    default="",
    help="The rows by this column, the best first. If not given: in the order of the runs.",
)
@label_option
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMS),
    help="Form of the table; text, or by the end of FILE.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write it to a .txt, .md, .tex or .csv.",
)
def table(
    runs: tuple[Path, ...],
    paper: str | None,
    labels: Labels,
    form: str | None,
    output: Path | None,
    **options: Any,
) -> None:
    """Print the numbers of runs as a table.

    It has means over seeds, and differences from FedAvg. If there is no FedAvg, they are from the
    first run; --from names another one. A difference is the mean over pairs of runs with the same
    data, partition, seed and number of rounds. It has a 95 % interval by Student's t, and a mark if
    the interval excludes 0. A run without such a pair begins a separate group, and the table says
    in what it differs. With --paper, each number of the paper's table in jobs/papers has a line,
    with our number next to it, and notes say what our runs did differently.

    \b
    Examples:
      rayfed table runs/comparison-mnist --from fedavg      all runs of a grid
      rayfed table runs/four --columns seeds,best,last --label fedntd 'FedNTD (ours)' -o table.tex
      rayfed table runs/fedavg runs/fedntd --target 0.5     rounds to 50 %
      rayfed table runs/search --sort best                  the best row first
      rayfed table runs/fedavg runs/ditto --of personalised
      rayfed table runs/fedavg runs/fedntd --of forgetting.round
      rayfed table runs/fedntd-table1 --paper fedntd/table1
    """
    from rayfed.report.runs import labelled, read_runs

    suffix = output.suffix if output else ".txt"
    if suffix not in SUFFIXES:
        raise InputError(
            f"--output: the names of tables end in {', '.join(SUFFIXES)}; this one in '{suffix}'"
        )
    form = form or SUFFIXES[suffix]
    figure = options["figure"]
    target = options["target"]
    columns = options["columns"]
    if columns is not None and form == "csv":
        raise InputError("--columns is for tables that are read by eye: csv has all columns")
    if target is not None and not 0 < target <= 1:
        raise InputError(
            f"--target {target:g}: give an accuracy as a fraction of 1, such as 0.5 for 50 %"
        )
    not_of_papers = {
        "of": figure not in BY_ROUND,
        "from": options["reference"],
        "target": target,
        "label": labels,
    }
    not_of_papers["columns"] = columns is not None
    not_of_papers["sort"] = options["sort"]
    for name, is_given in not_of_papers.items():
        if paper is not None and is_given:
            raise InputError(
                f"--{name} is for a table without --paper: a paper's table says what it has"
            )
    read = read_runs(runs) if paper is None else []
    # This imports torch, which takes seconds. An error about a wrong folder comes before.
    from rayfed.report.table import sheet

    text = StringIO()
    with redirect_stdout(text if output else sys.stdout):
        if paper is not None:
            print_paper(runs, paper, form, figure)
        else:
            print_sheet(sheet(labelled(read, dict(labels)), form, **options), form)
    if output:
        try:
            write_text(output, text.getvalue())
        except OSError as error:
            raise InputError(f"the table cannot be written: {error}") from None
        print(f"table in {output}")


def print_paper(runs: Iterable[Path], name: str, form: str = "text", figure: str = "last") -> None:
    """Print a paper's table, such as fedntd/table1, next to the runs in these folders.

    `form` is one of `FORMS`.
    """
    from rayfed.papers.tables import read_paper, sheet
    from rayfed.report.runs import read_runs

    paper = read_paper(name)
    print_sheet(sheet(read_runs(runs), paper, figure), form)


def show_beside(declared: Declared, cells: list[Cell]) -> None:
    """Print a paper's table next to the finished cells.

    If the paper has no number for them, only the table of the cells is printed.
    """
    from rayfed.cli.grid import finished, show_results
    from rayfed.folder.places import folder_of
    from rayfed.papers.tables import plain, read_paper

    paper = read_paper(declared.table)
    # The numbers of a table say nothing about runs that a figure changes.
    is_other = bool(declared.item.figure and declared.runs.set)
    if is_other or not any(paper.numbers.get(plain(cell.name)) for cell in cells):
        show_results(cells)
        if not declared.item.figure:
            runs = "this run" if len(cells) == 1 else "these runs"
            print(f"\nresults.csv has no number for {runs}")
        return
    done = finished(cells)
    if done:
        print()
        print_paper(map(folder_of, done), declared.table)


def list_items(declared: Mapping[str, Declared]) -> None:
    """Print what each of these tables and figures shows, and what it costs."""
    from rayfed.papers.cost import HOW, cost_of

    print("the papers' tables and figures, to give one of:")
    for name, of_paper in declared.items():
        print(f"\n{name}\n    {of_paper.item.shows}\n    {cost_of(of_paper.cells()).in_words()}")
    print(f"\n({HOW})")


def list_runs(cells: Sequence[Cell], jobs: Sequence[Job]) -> None:
    """Print the names of runs, and what they cost to standard error."""
    from rayfed.papers.cost import HOW, cost_of

    print(f"{cost_of(cells).in_words()}\n({HOW})", file=sys.stderr)
    print("\n".join(job.name for job in jobs))


def draw_item(declared: Declared, jobs: Sequence[Job], path: Path, remark: str) -> None:
    """Draw a figure of a paper from its runs, which are done."""
    from rayfed.folder.places import folder_of
    from rayfed.papers.figure import draw

    folders = list(map(folder_of, jobs))
    draw(declared.item.figure, folders, path, {}, remark=remark, **declared.item.options)


def remark_of(
    declared: Declared,
    small: bool,
    overrides: Mapping[str, Any],
    shown: Sequence[Job],
    num_runs: int,
) -> str:
    """Return what must stand above a figure that is not the paper's; '' if nothing must.

    The figure has the runs `shown`, of `num_runs` that it should have.
    """
    from rayfed.papers.items import told_changes

    changes = told_changes(overrides)
    parts = [f"small variant ({size_of(shown)})"] if small else []
    if changes:
        parts.append(f"changed: {changes}")
    if len(shown) < num_runs:
        parts.append(f"{len(shown)} of {num_runs} runs")
    return f"{declared.name}, not as in the paper: {'; '.join(parts)}" if parts else ""


def size_of(jobs: Sequence[Job]) -> str:
    """Return the data, networks and rounds of runs in words, as names of runs may promise others.

    An example is `fashion-mnist-mini, lenet, 6 rounds`.
    """
    from rayfed.report.words import listed

    parts = [
        listed(dict.fromkeys(job.data.source for job in jobs)),
        listed(dict.fromkeys(job.model.name for job in jobs)),
    ]
    rounds = dict.fromkeys(job.train.num_rounds for job in jobs)
    word = "round" if [*rounds] == [1] else "rounds"
    return ", ".join([*parts, f"{listed(rounds)} {word}"])


def refuse_undrawable(declared: Declared, jobs: Sequence[Job], path: Path) -> None:
    """Raise `InputError` before the runs if their figure could not be drawn or written after them.

    The runs may lack the measure that the figure shows.
    """
    from rayfed.base.files import refuse_unwritable
    from rayfed.papers.kinds import KINDS

    needs = KINDS[declared.item.figure].needs
    for job in jobs:
        if needs and needs not in job.measure:
            raise InputError(
                f"{declared.name} shows numbers of the measure '{needs}', and '{job.name}' has "
                f"measure = {list(job.measure)}: leave out -s measure=..., or add '{needs}' to it"
            )
    refuse_unwritable(path)


def picture_of(declared: Declared, output: Path | None, small: bool) -> Path:
    """Return the path of an item's picture.

    Raises `InputError` for a table, and for a file that is no picture.
    """
    from rayfed.papers.style import PICTURES

    if output and not declared.item.figure:
        raise InputError(
            f"--output: {declared.name} is a table, which is printed; `rayfed table RUN... --paper "
            f"{declared.table} -o FILE` writes it"
        )
    end = "-small" if small else ""
    path = output or Path(f"{declared.name.replace('/', '-')}{end}.svg")
    if path.suffix.lower() not in PICTURES:
        raise InputError(f"--output '{path}': pictures end in {', '.join(PICTURES)}")
    return path


@click.command()
@click.argument("item", required=False, metavar="[PAPER[/ITEM]]", shell_complete=complete_item)
@set_option
@click.option(
    "--rows",
    metavar="PATTERN",
    default="*",
    help="The runs whose names match: 'cifar10-shards-2/*'.",
)
@click.option("--small", is_flag=True, help="A small variant, which takes minutes.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The picture of a figure: .svg, .png or .pdf; PAPER-ITEM.svg here.",
)
@click.option(
    "--force", is_flag=True, help="Begin the runs again, in place of their earlier results."
)
@other_bits_option
@trust_option
@click.option("--list", "listed", is_flag=True, help="List the runs and do nothing.")
def reproduce(
    item: str | None,
    overrides: Overrides,
    rows: str,
    small: bool,
    output: Path | None,
    force: bool,
    other_bits: bool,
    listed: bool,
) -> None:
    """Run what a paper's table or figure needs, and show it.

    A table is printed next to the paper's numbers, a figure is drawn. Without a name, or with a
    paper's name alone, it lists the tables and figures: what each shows, its runs, its data and a
    rough cost. The runs are those of a grid in jobs/papers, in the paper's protocol. There are up
    to hundreds at full size, so see --list, and choose with --rows. Runs that are done are not run
    again, and runs that were begun continue. So you can stop the command and give it again. Below
    the table, or in the picture, stands what -s changes in the protocol.

    \b
    Examples:
      rayfed reproduce fedntd
      rayfed reproduce fedntd/fig2a --small
      rayfed reproduce fedntd/table1 --list
      rayfed reproduce fedntd/table1 --rows 'cifar10-shards-2/fed*/seed-0'
      rayfed reproduce fedntd/table1 --rows 'mnist-shards-2/*' \\
        -s name=try -s 'grid.seeds=[0]' -s train.num_rounds=2
    """
    with busy(f"reading {item}"):
        from rayfed.papers.items import item_of, items

        known = items()
        item = item.rstrip("/") if item else item
        of_paper = {name: of for name, of in known.items() if name.startswith(f"{item}/")}
        if item is None or of_paper:
            list_items(of_paper or known)
            return
        declared = item_of(item)
        path = picture_of(declared, output, small)
        chosen = declared.cells(dict(overrides), small, rows)
        jobs = [cell.job() for cell in chosen]
    if listed:
        list_runs(chosen, jobs)
        return
    if declared.item.figure:
        every = declared.cells(dict(overrides), small)
        # Runs that others begin with are not in the figure.
        before = {cell.after for cell in every}
        in_figure = [job for job in jobs if job.name not in before]
        if not in_figure:
            raise InputError(
                f"--rows '{rows}': {declared.name} shows the runs that begin with these, and not "
                f"these; without --rows it has all; `rayfed reproduce {item} --list` lists them"
            )
        refuse_undrawable(declared, in_figure, path)
    from rayfed.cli.grid import run_grid

    def show(cells: list[Cell]) -> None:
        show_beside(declared, cells)

    run_grid(chosen, jobs, force, other_bits, show)
    if declared.item.figure:
        num_runs = sum(cell.name not in before for cell in every)
        remark = remark_of(declared, small, dict(overrides), in_figure, num_runs)
        draw_item(declared, in_figure, path, remark)
