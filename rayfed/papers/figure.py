"""The command `figure`: the papers' figures of runs, one kind each."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click

from rayfed.base.errors import InputError
from rayfed.papers.style import PICTURES
from rayfed.screen.options import starting
from rayfed.screen.text import aligned, busy, shown


class Kind(NamedTuple):
    """A kind of figure: the function in `rayfed.papers` that draws it, a sentence, and the figures that it redraws."""

    drawn_by: str
    what: str
    papers: str
    takes_round: bool = False


KINDS = {
    "forgetting": Kind("global_model:forgetting", "accuracy that each class has lost, by round", "FedNTD 2"),
    "local": Kind("clients:local", "accuracy before and after local training", "FedCAD 1, FedSSD 2 and 7"),
    "in-out": Kind("clients:in_out", "the same on a client's own and on other classes", "FedNTD 4 and 6", True),
    "divergence": Kind("clients:divergence", "distances of weights and of label distributions", "FedNTD 8"),
    "confusion": Kind("global_model:confusion", "confusion matrices, global and clients'", "FedSSD 4, FedCAD 2", True),
    "unevenness": Kind("uneven:unevenness", "last accuracy by how uneven the clients' data are", ""),
}


def complete_kind(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return starting(incomplete, [*KINDS])


@click.command()
@click.argument("kind", required=False, shell_complete=complete_kind)
@click.argument("runs", nargs=-1, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The picture: .svg, .png or .pdf; KIND.svg here.")
@click.option(
    "--round",
    type=int,
    help="A measured round, of in-out and confusion. If not given: the last; of in-out, up to five rounds.",
)
def figure(kind: str | None, runs: tuple[Path, ...], output: Path | None, round: int | None) -> None:
    """Draw a figure as the papers have it.

    Without a KIND, lists the kinds, each with the paper's figure that it redraws. Several runs, or the folder of a
    grid, stand side by side. In local, in-out, divergence and unevenness, runs whose names end in seed-0, seed-1, ...
    are one; the other kinds draw one run per panel, and refuse several seeds of it.

    \b
    Examples:
      rayfed figure
      rayfed figure local runs/fedavg runs/fedntd
      rayfed figure confusion runs/fedavg --round 20 -o confusion.pdf
    """
    if kind is None:
        rows = [("kind", "what", "redraws"), *((name, each.what, each.papers) for name, each in KINDS.items())]
        print(aligned(rows))
        return
    if kind not in KINDS:
        valid = f"(valid: {', '.join(KINDS)})"
        if not Path(kind).is_dir():
            raise InputError(f"no kind of figure '{kind}' {valid}")
        words = [kind, *map(str, runs)]
        meant = next((word for word in words if word in KINDS), "local")
        folders = " ".join(word for word in words if word not in KINDS)
        raise InputError(f"no kind of figure '{kind}'; the kind comes first: rayfed figure {meant} {folders} {valid}")
    if not runs:
        raise InputError(f"rayfed figure {kind}: name the folder of a run, or several")
    path = output or Path(f"{kind}.svg")
    if path.suffix not in PICTURES:
        raise InputError(f"--output '{path}': pictures end in {', '.join(PICTURES)}")
    options: dict[str, Any] = {}
    if round is not None:
        options["round"] = round
        if not KINDS[kind].takes_round:
            raise InputError(f"--round: '{kind}' has no use for it; in-out and confusion have")
    draw_figure(KINDS[kind], runs, path, options)
    print(f"figure in {shown(path)}")


def draw_figure(kind: Kind, runs: Sequence[Path], path: Path, options: dict[str, Any]) -> None:
    from rayfed.folder.read import find_runs, read_run
    from rayfed.papers.panels import save
    from rayfed.report.runs import legible

    folders = list(dict.fromkeys(folder for run in runs for folder in find_runs(run)))
    module, _, function = kind.drawn_by.partition(":")
    draw = getattr(import_module(f"rayfed.papers.{module}"), function)
    with busy("drawing"), legible(*folders):
        save(draw, path, [read_run(folder) for folder in folders], **options)
