"""The command `figure`: the papers' figures of runs, one kind each."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rayfed.base.console import aligned, busy, shown
from rayfed.base.errors import InputError, did_you_mean, harmless
from rayfed.cli.options import RUN, Labels, label_option, starting
from rayfed.papers.backend import import_matplotlib
from rayfed.papers.kinds import KINDS
from rayfed.papers.style import PICTURES

if TYPE_CHECKING:
    from rayfed.report.read import Run

# What other programs call our kinds.
MEANT = {
    "accuracy": "curves",
    "test_accuracy": "curves",
    "loss": "curves --of test_loss",
    "tsne": "t-sne",
    "embedding": "t-sne",
}


@click.command()
@click.argument("kind", required=False, shell_complete=lambda *at: starting(at[-1], [*KINDS]))
@click.argument("runs", nargs=-1, metavar="RUN...", type=RUN)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The picture: .svg, .png or .pdf; KIND.svg here.",
)
@click.option(
    "--of",
    metavar="NUMBER",
    help=(
        "The number to draw: a column of rounds.parquet, forgetting.round, a note, ... Of curves "
        "several, with commas between."
    ),
)
@click.option(
    "--round",
    type=int,
    help=(
        "A measured round, of in-out, epochs, confusion and client; any round, of figures of "
        "models. If not given: the last; of in-out, up to five rounds."
    ),
)
@click.option(
    "--x", metavar="KEY", help="The axis: of sweep a key of the job, of scatter a number."
)
@click.option(
    "--client",
    type=int,
    help="Of classes: also the model that this client has trained. Of client: its number.",
)
@click.option(
    "--outside",
    is_flag=True,
    default=None,
    help="Of partition: also the distribution outside a client's data.",
)
@click.option(
    "--clients",
    metavar="0,1,...",
    help="Of t-sne, neurons and circle: the clients whose local models are drawn, or none.",
)
@click.option(
    "--images",
    type=click.IntRange(1),
    help="Of figures of models: how many test images.",
)
@click.option(
    "--grid", type=click.IntRange(2), help="Of landscape: how many points along each eigenvector."
)
@click.option(
    "--normalised", is_flag=True, default=None, help="Of classes: a round's accuracies add up to 1."
)
@click.option(
    "--by-setting",
    is_flag=True,
    default=None,
    help="Of curves and bars: a panel for each setting; its runs differ in their method alone.",
)
@click.option(
    "--by-round", is_flag=True, default=None, help="Of scatter: a point is a round of a run."
)
@label_option
@click.option("--width", type=float, help="Inches, such as 3.3 for a column of a page.")
def figure(
    kind: str | None, runs: tuple[Path, ...], output: Path | None, labels: Labels, **given: Any
) -> None:
    """Draw a number by round, or a figure as in the papers.

    Without a KIND, this lists the kinds, each with the paper's figure that it redraws. Several
    runs, or the folder of a grid, stand side by side. In forgetting and confusion there is one run
    per panel. In the other kinds, runs whose names end in seed-0, seed-1, ... are one. The command
    prints what the figure's caption should say.

    \b
    Examples:
      rayfed figure
      rayfed figure curves runs/four --of forgetting.round --label fedntd 'FedNTD (ours)' --width
      3.3 -o curves.pdf
      rayfed figure local runs/fedavg runs/fedntd
      rayfed figure confusion runs/fedavg --round 20 -o confusion.pdf
    """
    if kind is None:
        rows = [("kind", "what", "redraws")]
        for name, of_kind in KINDS.items():
            rows.append((name, of_kind.what, of_kind.papers))
        print(aligned(rows))
        return
    if kind not in KINDS and Path(kind).exists():
        given_words = [kind, *map(str, runs)]
        meant_kind = next((word for word in given_words if word in KINDS), "curves")
        places = [word for word in given_words if word not in KINDS]
        raise InputError(
            "rayfed figure KIND RUN...: name the kind of figure before the runs, such as: rayfed "
            f"figure {meant_kind} {shlex.join(places)}; `rayfed figure` lists the kinds"
        )
    if kind not in KINDS:
        meant = MEANT.get(kind, "")
        message = (
            "rayfed figure KIND RUN...: there is no kind of figure "
            f"'{kind}'{did_you_mean(kind, KINDS, meant.partition(' ')[0])}"
        )
        if meant:
            given_runs = shlex.join(map(str, runs)) or "RUN"
            message += f"\nto draw {kind}, type: rayfed figure {meant} {given_runs}"
        raise InputError(message)
    if not runs:
        raise InputError(f"rayfed figure {kind}: name the folder of a run, or several")
    path = output or Path(f"{kind}.svg")
    if path.suffix.lower() not in PICTURES:
        raise InputError(f"--output '{path}': pictures end in {', '.join(PICTURES)}")
    options = {name: value for name, value in given.items() if value is not None}
    if not 1 <= options.get("width", 1) <= 40:
        raise InputError(
            f"--width {options['width']:g}: give inches from 1 to 40, such as 3.3 for a column of "
            "a page"
        )
    for name in options.keys() - {"width", *KINDS[kind].takes}:
        takers = " and ".join(other for other, of_kind in KINDS.items() if name in of_kind.takes)
        option = name.replace("_", "-")
        raise InputError(f"--{option}: '{kind}' has no use for it; it is for {takers}")
    draw(kind, runs, path, dict(labels), **options)


def draw(
    kind: str, runs: Sequence[Path], path: Path, labels: Mapping[str, str], **options: Any
) -> None:
    """Draw a kind of figure of runs, and print where it is and what its caption should say.

    `options` are those of the kind, and a `remark` to stand above the figure.
    """
    import_matplotlib()
    from rayfed.papers.panels import save
    from rayfed.report.runs import labelled, legible, read_runs

    module, _, function = KINDS[kind].drawn_by.partition(":")
    drawn_by = getattr(import_module(f"rayfed.papers.{module}"), function)
    with busy("drawing"), legible(*runs, otherwise="leave this run out"):
        shown_runs = without_first(read_runs(runs), KINDS[kind].needs)
        caption = save(drawn_by, path, labelled(shown_runs, labels), **options)
    print(f"figure in {shown(path)}\n{harmless(caption)}")


def without_first(runs: Sequence[Run], measure: str) -> list[Run]:
    """Leave out runs that lack a measure, and with whose weights other runs of these begin.

    So the folder of a grid with `grid.first` can be drawn. No `measure` leaves all runs in.
    """
    from rayfed.report.read import comes_first

    kept = []
    for run in runs:
        lacks_measure = measure and measure not in run.job["measure"]
        if not (lacks_measure and comes_first(run, runs)):
            kept.append(run)
    return kept
