"""The command `report`, and how tables are printed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rayfed.base.console import print_table, shown
from rayfed.base.errors import harmless
from rayfed.cli.options import RUN

if TYPE_CHECKING:
    from rayfed.report.forms import Sheet

FORMS = ("text", "md", "latex", "csv")


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=RUN)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The page; RUN/report.html, or compare.html.",
)
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write the HTML report of a run, or one that compares several runs.

    Every run ends with its page. This command makes it again from the run's folder, also for a
    killed run. With several runs, or the folder of a grid, the runs are compared with FedAvg, or
    with the first run if there is no FedAvg. Runs whose names end in seed-0, seed-1, ... become one
    line, with their mean and their range.

    \b
    Examples:
      rayfed report runs/quickstart
      rayfed report runs/fedavg runs/fedntd -o compare.html
      rayfed report runs/fedntd-table1                     all runs of a grid
    """
    from rayfed.folder.found import find_runs

    unique: dict[Path, None] = {}
    for run in runs:
        unique |= dict.fromkeys(find_runs(run))
    folders = list(unique)
    # This imports torch, which takes seconds. An error about a wrong folder comes before.
    from rayfed.report.page import write_comparison, write_report

    if folders == list(runs[:1]):
        path = write_report(runs[0], output)
    elif output or len(runs) > 1:
        path = write_comparison(folders, output or Path("compare.html"))
    else:
        path = write_comparison(folders, runs[0] / "report.html")
    print(f"page in {shown(path)}")


def print_sheet(sheet: "Sheet", form: str) -> None:
    """Print a table and its notes.

    With comma-separated values, the notes go to standard error.
    """
    from rayfed.report.forms import as_csv, latex, markdown, one_line

    notes = [harmless(note) for note in sheet.notes]
    if form == "csv":
        print(as_csv(sheet))
        for note in notes:
            print(note, file=sys.stderr)
        return
    if form == "text":
        lines = [list(map(one_line, line)) for line in sheet.lines]
        print_table(list(map(one_line, sheet.head)), lines)
        if notes:
            print()
        for note in notes:
            print(note)
        return
    lines = [list(map(harmless, line)) for line in sheet.lines]
    clean = sheet._replace(head=list(map(harmless, sheet.head)), lines=lines, notes=notes)
    print(markdown(clean) if form == "md" else latex(clean))
