"""The command `clients`: each client's own model, measured after a run."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from statistics import mean, pstdev
from typing import TYPE_CHECKING

import click

from rayfed.base.console import busy, print_table, shown
from rayfed.base.errors import InputError
from rayfed.cli.options import RUN

if TYPE_CHECKING:
    from rayfed.rounds.own import OwnRow

# Most named clients of a group that have a line.
MOST_NAMED = 50
HEAD_NAMED = ["run", "clients", "client", "name", "own labels", "all labels", "own labels, tuned"]
HEAD = ["run", "clients", "number", "own labels", "deviation", "worst tenth", "all labels"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=RUN)
@click.option(
    "--tune",
    type=click.Choice(["head", "all"]),
    help="Also measure each model after training these layers.",
)
@click.option("--epochs", type=float, help="Epochs of --tune at each client; 1.")
def clients(runs: tuple[Path, ...], tune: str | None, epochs: float | None) -> None:
    """Measure every client's own model after a run.

    A client's own model is the global model with what stays at the client (fedper, fedrep, fedbn,
    local), or the model that the client keeps (ditto, fedrod). With other methods it is the global
    model. It is measured on all test images. 'own labels' is the accuracy weighted as the client's
    labels are. 'all labels' is the accuracy on the test images as they are. 'worst tenth' is the
    mean of 'own labels' over the tenth of the clients with the lowest accuracy. Clients that have
    trained in no round have no own model: they have separate lines, like clients that
    clients.held_out kept out of the training. RUN/own.parquet has the rows of the last time.

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
    tuning = None
    if tune is not None:
        tuning = Tuning(1.0 if epochs is None else epochs, "head" if tune == "head" else "all")
    folders: dict[Path, None] = {}
    for run in runs:
        folders |= dict.fromkeys(find_runs(run))
    lines, of_named = [], []
    for folder in folders:
        with busy(f"measuring {shown(folder)}"):
            rows = experiment.own_models(folder, tuning)
        trained = set(read_table(folder, "clients").column("client").unique().to_pylist())
        for group, of_group in grouped(rows, trained).items():
            lines += lines_of(shown(folder), group, of_group)
            for row in of_group[:MOST_NAMED]:
                if row.name is not None:
                    of_named.append(named_line(shown(folder), group, row))
    print_table(HEAD, lines)
    if of_named:
        print_table(HEAD_NAMED[: len(of_named[0])], of_named)


def grouped(rows: Sequence[OwnRow], trained: Set[int]) -> dict[str, list[OwnRow]]:
    """Return the clients' rows in three groups; `trained` are the clients that a round has had."""
    groups: dict[str, list[OwnRow]] = {"trained": [], "never trained": [], "held out": []}
    for row in rows:
        if row.held_out:
            groups["held out"].append(row)
        elif row.client in trained:
            groups["trained"].append(row)
        else:
            groups["never trained"].append(row)
    return groups


def named_line(run: str, group: str, row: OwnRow) -> list[str]:
    """Return the line of a client that has a name, with its accuracies in percent."""
    line = [run, group, str(row.client), str(row.name)]
    for accuracy in (row.in_local, row.accuracy, row.tuned_in_local):
        if accuracy is not None:
            line.append(f"{100 * accuracy:.1f}")
    return line


def lines_of(run: str, group: str, rows: Sequence[OwnRow]) -> list[list[str]]:
    """Return a line of the table for some clients, and a line after tuning, in percent.

    Without clients there is no line.
    """
    if not rows:
        return []
    accuracies = numbers([row.in_local for row in rows], [row.accuracy for row in rows])
    lines = [[run, group, str(len(rows)), *accuracies]]
    in_local, accuracy = [], []
    for row in rows:
        if row.tuned_in_local is not None and row.tuned_accuracy is not None:
            in_local.append(row.tuned_in_local)
            accuracy.append(row.tuned_accuracy)
    if in_local:
        tuned = numbers(in_local, accuracy)
        lines.append([run, f"{group}, tuned", str(len(rows)), *tuned])
    return lines


def numbers(in_local: Sequence[float], accuracy: Sequence[float]) -> list[str]:
    """Return the mean, the deviation and the mean of the worst tenth on the clients' own labels.

    The mean on all labels follows. All are in percent.

    >>> numbers([0.5, 1.0], [0.25, 0.75])
    ['75.0', '25.0', '50.0', '50.0']
    """
    lowest = sorted(in_local)[: -(-len(in_local) // 10)]
    values = (mean(in_local), pstdev(in_local), mean(lowest), mean(accuracy))
    return [f"{100 * value:.1f}" for value in values]
