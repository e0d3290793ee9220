"""The command `report`, and how tables are printed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rayfed.base.console import print_table, shown
from rayfed.base.errors import harmless

if TYPE_CHECKING:
    from rayfed.report.forms import Sheet

FORMS = ("text", "md", "latex", "csv")


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The page; RUN/report.html, or compare.html.",
)
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Make the page of a run, or a page that compares several.

    Every run ends with its page; this command makes it again from the run's folder, also for a
    killed run. With several runs, or the folder of a grid, the others are compared with FedAvg's,
    or with the first if there is no such run; runs whose names end in seed-0, seed-1, ... become
    one line, with their mean and their range.

    \b
    Examples:
      rayfed report runs/quickstart
      rayfed report runs/fedavg runs/fedntd -o compare.html
      rayfed report runs/fedntd-table1                     all runs of a grid
    """
    from rayfed.folder.found import find_runs

    folders = list(dict.fromkeys(folder for run in runs for folder in find_runs(run)))
    # This imports torch, which takes seconds. A wrong folder is told before.
    from rayfed.report.page import write_comparison, write_report

    if folders == list(runs[:1]):
        path = write_report(runs[0], output)
    else:
        path = write_comparison(
            folders, output or (Path("compare.html") if len(runs) > 1 else runs[0] / "report.html")
        )
    print(f"page in {shown(path)}")


def print_sheet(sheet: "Sheet", form: str) -> None:
    """Print a table and its notes; beside comma-separated values, the notes go to standard error."""
    from rayfed.report.forms import as_csv, latex, markdown, one_line

    notes = [harmless(note) for note in sheet.notes]
    if form == "csv":
        print(as_csv(sheet))
        for note in notes:
            print(note, file=sys.stderr)
    elif form == "text":
        lines = [[one_line(cell) for cell in line] for line in sheet.lines]
        print_table([one_line(cell) for cell in sheet.head], lines)
        for note in ["", *notes] if notes else []:
            print(note)
    else:
        head, *lines = [[harmless(cell) for cell in line] for line in (sheet.head, *sheet.lines)]
        clean = sheet._replace(head=head, lines=lines, notes=notes)
        print(markdown(clean) if form == "md" else latex(clean))
