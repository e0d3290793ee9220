"""Figures of the clients' models before and after their training, from the notes of `measure =
["local", "drift"]`.

Each is a function of runs. Raises `InputError` where a run lacks what is to be drawn. `M` clients
of measured rounds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rayfed.base.errors import InputError
from rayfed.folder.tables import Columns
from rayfed.papers.panels import MARKERS, apart, legend, line, panels, span, wide
from rayfed.papers.style import COLOURS, INK
from rayfed.report.charts import thinned
from rayfed.report.measured import (
    DISTANCES,
    WHEN,
    WHERE,
    drifts,
    measured_on,
    notes_of,
    over_clients,
)
from rayfed.report.read import Group, Run
from rayfed.report.words import listed

# Rounds, from the first to the last that was measured.
BARS = 5
# That there can be.
MOST = {"drift.distribution_distance": 2.0}
# Opacity of the first round's points.
FAINTEST = 0.2
# Points that are drawn one by one in an SVG; more become a picture in it.
MOST_PATHS = 300


def local(runs: Sequence[Run], width: float | None = None) -> Figure:
    """The accuracy on all classes before and after local training, by round (FedCAD Fig. 1, FedSSD
    Fig. 2 and 7).
    """
    groups = apart(runs)
    notes = [f"local.{when}.accuracy" for when in WHEN]
    measured = {name: notes_of(group.runs, "local", *notes) for name, group in groups.items()}
    caption = f"Local models: {of_whom(runs, measured)}"
    figure, axes = panels(
        caption, 1, len(groups), 3.0, width or wide(len(groups)), sharex=True, sharey=True
    )
    for panel, (name, columns) in zip(axes[0], measured.items(), strict=True):
        for number, (when, words) in enumerate(WHEN.items()):
            values = over_clients(columns, f"local.{when}.accuracy", 100)
            line(panel, number, values.rounds, values.mean, values.band(100), words)
        panel.set(title=name, xlabel="round", ylim=(0, 100))
    axes[0, 0].set_ylabel("accuracy, all classes (%)")
    legend(figure, axes[0, 0])
    return figure


def in_out(runs: Sequence[Run], round: int | None = None, width: float | None = None) -> Figure:
    """The accuracy on a client's own and on other classes before and after local training (FedNTD
    Fig. 4 and 6).

    In up to five rounds, or in one `round`; a row for each run.
    """
    groups = apart(runs)
    notes = [f"local.{when}.{where}" for when in WHEN for where in WHERE]
    measured = {name: notes_of(group.runs, "local", *notes) for name, group in groups.items()}
    drawn = {
        name: rounds_of(group, measured[name]["round"], round) for name, group in groups.items()
    }
    caption = f"Learnt and forgotten: {of_whom(runs, measured)}"
    if round is None:
        caption += left_out(measured, drawn)
    figure, axes = panels(caption, len(groups), 2, 2.5, width, sharey=True)
    for row, (name, chosen) in zip(axes, drawn.items(), strict=True):
        for panel, (where, words) in zip(row, WHERE.items(), strict=True):
            for side, (when, label) in zip((-0.2, 0.2), WHEN.items(), strict=True):
                values = over_clients(measured[name], f"local.{when}.{where}", 100)
                rows = np.searchsorted(values.rounds, chosen)
                low, high = values.band(100)
                ends = np.stack([values.mean - low, high - values.mean])[:, rows]
                bars(panel, np.arange(len(chosen)) + side, values.mean[rows], ends, when, label)
            panel.set_xticks(range(len(chosen)), map(str, chosen))
            panel.set(title=f"{name}\n{words}", ylim=(0, 100))
            panel.grid(False, axis="x")
        row[0].set_ylabel("accuracy (%)")
    for panel in axes[-1]:
        panel.set_xlabel("round")
    legend(figure, axes[0, 0])
    return figure


def left_out(measured: dict[str, Columns], drawn: dict[str, np.ndarray]) -> str:
    """The end of a caption: which measured rounds have no bars; '' where all have."""
    rounds: set[int] = set()
    for name, columns in measured.items():
        rounds |= set(np.setdiff1d(columns["round"], drawn[name]).tolist())
    if not rounds:
        return ""
    words = "round" if len(rounds) == 1 else "rounds"
    return f"; not drawn, though measured: {words} {listed(sorted(rounds))}"


def of_whom(runs: Sequence[Run], measured: dict[str, Columns]) -> str:
    """The end of a caption: of how many clients a round's numbers are, and on how many test
    examples.
    """
    counts = np.concatenate(
        [np.unique(columns["round"], return_counts=True)[1] for columns in measured.values()]
    )
    on = f"on {span(measured_on(run) for run in runs)} test examples"
    if counts.max() == 1:
        return f"n = 1 client per round, {on}"
    return f"mean and standard deviation of n = {span(counts)} clients per round, {on}"


def bars(
    axes: Axes, x: np.ndarray, heights: np.ndarray, ends: np.ndarray, when: str, label: str
) -> None:
    """Pale, hatched bars of before; full ones of after.

    `ends` (2, bars) go down and up from the heights.
    """
    look: dict[str, Any] = (
        {"facecolor": "#a9cbe3", "edgecolor": COLOURS[0], "hatch": "///"}
        if when == "before"
        else {"facecolor": COLOURS[1], "edgecolor": COLOURS[1]}
    )
    # A cap may lie on the axes' edge.
    errors = {
        "elinewidth": 1.0,
        "ecolor": INK,
        "capsize": 2,
        "clip_on": False,
    }
    # An array of a single bar makes older NumPy warn.
    error = ends.tolist() if ends.any() else None
    axes.bar(x, heights, 0.38, yerr=error, label=label, error_kw=errors, linewidth=0.8, **look)


def rounds_of(group: Group, rounds: np.ndarray, round: int | None) -> np.ndarray:
    """The measured rounds to draw: the given one, or up to five from the first to the last."""
    there = np.unique(rounds)
    if round is None:
        return there[thinned(len(there), BARS)]
    if round not in there:
        last = (
            f"; the measured round before it is {there[there < round].max()}"
            if (there < round).any()
            else ""
        )
        raise InputError(
            f"--round {round}: the clients of '{group.runs[0].folder}' were not measured in "
            f"it{last}"
        )
    return np.array([round])


def divergence(runs: Sequence[Run], width: float | None = None) -> Figure:
    """How far clients move in weights, against how far the global model is from their labels
    (FedNTD Fig. 8 a-d).

    A panel of points for each run, with their correlation, and both distances by round. A point is
    a client in a round.
    """
    groups = apart(runs)
    measured = {name: drifts(group) for name, group in groups.items()}
    caption = f"Drift of the local models: {of_whom(runs, measured)}"
    figure = Figure(figsize=(width or wide(len(groups)), 6.9), label=caption)
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    scatters = above.subplots(1, len(groups), squeeze=False, sharex=True, sharey=True)[0]
    lines = below.subplots(1, 2)
    top = outlying(np.concatenate([columns["drift.divergence"] for columns in measured.values()]))
    for number, (panel, (name, columns)) in enumerate(zip(scatters, measured.items(), strict=True)):
        x, y = (columns[note] for note in DISTANCES)
        scatter(panel, number, columns["round"], x, y)
        beyond = (
            f"{(y > top).sum()} points are higher, up to {y.max():.3g}" if (y > top).any() else ""
        )
        panel.set(title=f"{name}\n{correlation(x, y)}", xlabel=beyond, ylim=(0, top))
        for axes, (note, words) in zip(lines, DISTANCES.items(), strict=True):
            values = over_clients(columns, note)
            line(
                axes,
                number,
                values.rounds,
                values.mean,
                values.band(MOST.get(note, np.inf)),
                name,
                len(groups),
            )
            axes.set(title=words.partition(" (")[0].capitalize(), xlabel="round", ylabel=words)
    for axes in lines:
        axes.set_ylim(bottom=0)
    above.supxlabel(
        f"{DISTANCES['drift.distribution_distance']}; the darker a point, the later its round",
        fontsize="medium",
    )
    scatters[0].set_ylabel(DISTANCES["drift.divergence"])
    legend(below, lines[0])
    return figure


def outlying(values: np.ndarray) -> float:
    """The top of an axis: all values, or where a hundredth of them would squeeze the others
    together, without those.

    >>> outlying(np.array([1.0, 2.0])), outlying(np.array([1.0] * 999 + [100.0]))
    (2.1, 1.3)
    """
    usual = 1.3 * float(np.percentile(values, 99))
    return max(1.05 * float(values.max()) if values.max() < 2 * usual else usual, 1e-9)


def scatter(axes: Axes, number: int, rounds: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Points that are the more opaque the later their round."""
    first, last = rounds.min(), rounds.max()
    opacity = np.interp(rounds, [first, last], [FAINTEST, 1.0]) if last > first else 1.0
    look: dict[str, Any] = {
        "color": COLOURS[number],
        "marker": MARKERS[number],
        "s": 14,
        "linewidths": 0,
    }
    axes.scatter(x, y, alpha=opacity, rasterized=len(x) > MOST_PATHS, **look)


def correlation(x: np.ndarray, y: np.ndarray) -> str:
    """Spearman's, in words: of ranks, as a few early clients may move a hundred times as far as all
    others.

    >>> correlation(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0]))
    'rank correlation 0.50'
    >>> one, two, same = np.array([1.0]), np.array([1.0, 2.0]), np.array([7.0, 7.0])
    >>> {correlation(one, one), correlation(two, same), correlation(same, two)}
    {'no correlation known'}
    """
    known = len(x) > 1 and np.ptp(x) > 0 and np.ptp(y) > 0
    return (
        f"rank correlation {np.corrcoef(ranks(x), ranks(y))[0, 1]:.2f}"
        if known
        else "no correlation known"
    )


def ranks(values: np.ndarray) -> np.ndarray:
    """
    >>> ranks(np.array([5.0, 7.0, 5.0, 1.0]))
    array([1.5, 3. , 1.5, 0. ])
    """
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[index]
