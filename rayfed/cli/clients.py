"""The command `clients`: each client's own model, measured after a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import TYPE_CHECKING

import click

from rayfed.base.console import busy, print_table, shown
from rayfed.base.errors import InputError

if TYPE_CHECKING:
    from rayfed.rounds.own import OwnRow

MOST_NAMED = 50
HEAD_NAMED = ["run", "clients", "client", "name", "own labels", "all labels", "own labels, tuned"]
HEAD = ["run", "clients", "number", "own labels", "deviation", "worst tenth", "all labels"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--tune",
    type=click.Choice(["head", "all"]),
    help="Also measure each model after training these layers.",
)
@click.option("--epochs", type=float, help="Epochs of --tune at each client; 1.")
def clients(runs: tuple[Path, ...], tune: str | None, epochs: float | None) -> None:
    """Measure every client's own model after a run.

    It is measured on all test images. A client's own model is the global model with what stays
    at the client (fedper, fedrep, fedbn, local) or the model that it keeps (ditto, fedrod);
    with other methods it is the global model. 'own labels' is the accuracy weighted as the
    client's labels are, 'all labels' that on the test images as they are, 'worst tenth' the
    mean of 'own labels' over the tenth of the clients with the lowest. Clients that have
    trained in no round, and so have no model of their own, and clients that clients.held_out
    kept out of the training have lines of their own. RUN/own.parquet has the rows of the last
    time.

    \b
    Examples:
      rayfed clients runs/fedper
      rayfed clients runs/fedbabu --tune head --epochs 5
    """
    from rayfed import experiment
    from rayfed.folder.found import find_runs
    from rayfed.folder.tables import read_table
    from rayfed.rounds.own import Tuning

    if epochs is not None and not 0 < epochs < float("inf"):
        raise InputError(f"--epochs {epochs:g}: give a number above 0")
    if epochs is not None and tune is None:
        raise InputError(f"--epochs {epochs:g} is of --tune: give --tune head or --tune all, too")
    tuning = (
        Tuning(1.0 if epochs is None else epochs, "head" if tune == "head" else "all")
        if tune
        else None
    )
    lines, of_named = [], []
    for folder in dict.fromkeys(folder for run in runs for folder in find_runs(run)):
        with busy(f"measuring {shown(folder)}"):
            rows = experiment.own_models(folder, tuning)
        with_a_row = {*read_table(folder, "clients").column("client").unique().to_pylist()}
        by_group: dict[str, list[OwnRow]] = {"trained": [], "never trained": [], "held out": []}
        for row in rows:
            which = "trained" if row.client in with_a_row else "never trained"
            by_group["held out" if row.held_out else which].append(row)
        for which, of_group in by_group.items():
            lines += lines_of(shown(folder), which, of_group)
            for row in of_group[:MOST_NAMED]:
                each = [
                    value
                    for value in (row.in_local, row.accuracy, row.tuned_in_local)
                    if value is not None
                ]
                if row.name is not None:
                    of_named.append(
                        [
                            shown(folder),
                            which,
                            str(row.client),
                            row.name,
                            *(f"{100 * value:.1f}" for value in each),
                        ]
                    )
    print_table(HEAD, lines)
    if of_named:
        print_table(HEAD_NAMED[: len(of_named[0])], of_named)


def lines_of(run: str, which: str, rows: Sequence[OwnRow]) -> list[list[str]]:
    """A line of the table for some clients, and a line after tuning, in percent; none without
    clients.
    """
    if not rows:
        return []
    lines = [
        [
            run,
            which,
            str(len(rows)),
            *numbers([row.in_local for row in rows], [row.accuracy for row in rows]),
        ]
    ]
    tuned = [
        (row.tuned_in_local, row.tuned_accuracy) for row in rows if row.tuned_in_local is not None
    ]
    if tuned:
        lines.append([run, f"{which}, tuned", str(len(rows)), *numbers(*zip(*tuned, strict=True))])
    return lines


def numbers(in_local: Sequence[float], accuracy: Sequence[float]) -> list[str]:
    """Mean, deviation and mean of the worst tenth over clients, of their own labels; the mean over
    all labels.
    """
    lowest = sorted(in_local)[: -(-len(in_local) // 10)]
    values = (mean(in_local), pstdev(in_local), mean(lowest), mean(accuracy))
    return [f"{100 * value:.1f}" for value in values]
