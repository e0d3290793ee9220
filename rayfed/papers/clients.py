"""Figures of the clients' models before and after their training.

They are drawn from the notes of `measure = ["local", "drift"]`. Each figure is a function of runs,
which raises `InputError` if a run lacks what is to be drawn. Shapes: `M` clients of measured
rounds.
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

# Most rounds that have bars, from the first to the last that was measured.
BARS = 5
# The largest values that are possible.
MOST = {"drift.distribution_distance": 2.0}
# The opacity of the first round's points.
FAINTEST = 0.2
# Most points that are drawn one by one in an SVG. More points become a picture in it.
MOST_PATHS = 300


def local(runs: Sequence[Run], width: float | None = None) -> Figure:
    """Draw the accuracy on all classes before and after local training, by round.

    FedCAD Fig. 1; FedSSD Fig. 2 and 7.
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
    """Draw the accuracy on a client's own and on other classes before and after local training.

    It has a row for each run, in up to five rounds, or in one `round` (FedNTD Fig. 4 and 6).
    """
    groups = apart(runs)
    notes = []
    for when in WHEN:
        notes += [f"local.{when}.{where}" for where in WHERE]
    measured = {name: notes_of(group.runs, "local", *notes) for name, group in groups.items()}
    drawn = {}
    for name, group in groups.items():
        drawn[name] = rounds_of(group, measured[name]["round"], round)
    caption = f"Learnt and forgotten: {of_whom(runs, measured)}"
    if round is None:
        caption += left_out(measured, drawn)
    figure, axes = panels(caption, len(groups), 2, 2.5, width, sharey=True)
    for row, (name, chosen) in zip(axes, drawn.items(), strict=True):
        for panel, (where, words) in zip(row, WHERE.items(), strict=True):
            bars_of(panel, measured[name], where, chosen)
            panel.set_xticks(range(len(chosen)), map(str, chosen))
            panel.set(title=f"{name}\n{words}", ylim=(0, 100))
            panel.grid(False, axis="x")
        row[0].set_ylabel("accuracy (%)")
    for panel in axes[-1]:
        panel.set_xlabel("round")
    legend(figure, axes[0, 0])
    return figure


def bars_of(panel: Axes, columns: Columns, where: str, rounds: np.ndarray) -> None:
    """Draw the bars of an accuracy before and after training in some rounds, side by side."""
    for side, (when, label) in zip((-0.2, 0.2), WHEN.items(), strict=True):
        values = over_clients(columns, f"local.{when}.{where}", 100)
        places = np.searchsorted(values.rounds, rounds)
        low, high = values.band(100)
        ends = np.stack([values.mean - low, high - values.mean])[:, places]
        bars(panel, np.arange(len(rounds)) + side, values.mean[places], ends, when, label)


def left_out(measured: dict[str, Columns], drawn: dict[str, np.ndarray]) -> str:
    """Return the end of a caption: which measured rounds have no bars; '' if all have."""
    rounds: set[int] = set()
    for name, columns in measured.items():
        rounds |= set(np.setdiff1d(columns["round"], drawn[name]).tolist())
    if not rounds:
        return ""
    words = "round" if len(rounds) == 1 else "rounds"
    return f"; not drawn, though measured: {words} {listed(sorted(rounds))}"


def of_whom(runs: Sequence[Run], measured: dict[str, Columns]) -> str:
    """Return the end of a caption: the number of clients per round, and of test examples."""
    of_runs = [np.unique(columns["round"], return_counts=True)[1] for columns in measured.values()]
    counts = np.concatenate(of_runs)
    on = f"on {span(measured_on(run) for run in runs)} test examples"
    if counts.max() == 1:
        return f"n = 1 client per round, {on}"
    return f"mean and standard deviation of n = {span(counts)} clients per round, {on}"


def bars(
    axes: Axes, x: np.ndarray, heights: np.ndarray, ends: np.ndarray, when: str, label: str
) -> None:
    """Draw bars: pale, hatched ones for before the training, full ones for after it.

    `ends` (2, bars) go down and up from the heights.
    """
    look: dict[str, Any] = {"facecolor": COLOURS[1], "edgecolor": COLOURS[1]}
    if when == "before":
        look = {"facecolor": "#a9cbe3", "edgecolor": COLOURS[0], "hatch": "///"}
    # A cap may lie on the edge of the axes, where it would be cut off.
    errors = {"elinewidth": 1.0, "ecolor": INK, "capsize": 2, "clip_on": False}
    # An array with a single bar makes older versions of NumPy warn.
    error = ends.tolist() if ends.any() else None
    axes.bar(x, heights, 0.38, yerr=error, label=label, error_kw=errors, linewidth=0.8, **look)


def rounds_of(group: Group, rounds: np.ndarray, round: int | None) -> np.ndarray:
    """Return the measured rounds to draw: the given one, or up to five from the first to the last.

    Raises `InputError` if the given round was not measured.
    """
    measured = np.unique(rounds)
    if round is None:
        return measured[thinned(len(measured), BARS)]
    if round not in measured:
        raise InputError(
            f"--round {round}: the clients of '{group.runs[0].folder}' were not measured in it; "
            f"{nearest_rounds(measured, round)}"
        )
    return np.array([round])


def nearest_rounds(measured: np.ndarray, round: int) -> str:
    """Say which measured rounds are next to a round.

    >>> nearest_rounds(np.array([3, 6, 9]), 5), nearest_rounds(np.array([3]), 99)
    ('the measured rounds next to it are 3, 6', 'the measured round next to it is 3')
    """
    before, after = measured[measured < round], measured[measured > round]
    near = [*before[-1:].tolist(), *after[:1].tolist()]
    words = "round next to it is" if len(near) == 1 else "rounds next to it are"
    return f"the measured {words} {listed(near)}"


def divergence(runs: Sequence[Run], width: float | None = None) -> Figure:
    """Draw how far clients move in weights, by how far the global model is from their labels.

    There is a panel of points for each run, with their correlation, and both distances by round. A
    point is a client in a round (FedNTD Fig. 8 a-d).
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
        beyond = ""
        if (y > top).any():
            beyond = f"{(y > top).sum()} points are higher, up to {y.max():.3g}"
        panel.set(title=f"{name}\n{correlation(x, y)}", xlabel=beyond, ylim=(0, top))
        for axes, (note, words) in zip(lines, DISTANCES.items(), strict=True):
            values = over_clients(columns, note)
            band = values.band(MOST.get(note, np.inf))
            line(axes, number, values.rounds, values.mean, band, name, len(groups))
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
    """Return the top of an axis, which shows all values unless a few would squeeze the others.

    Then it does not show the largest hundredth of the values.

    >>> outlying(np.array([1.0, 2.0])), outlying(np.array([1.0] * 999 + [100.0]))
    (2.1, 1.3)
    """
    top = 1.3 * float(np.percentile(values, 99))
    if values.max() < 2 * top:
        top = 1.05 * float(values.max())
    return max(top, 1e-9)


def scatter(axes: Axes, number: int, rounds: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Draw points that are the more opaque the later their round."""
    start, end = rounds.min(), rounds.max()
    opacity = np.interp(rounds, [start, end], [FAINTEST, 1.0]) if end > start else 1.0
    look: dict[str, Any] = {
        "color": COLOURS[number],
        "marker": MARKERS[number],
        "s": 14,
        "linewidths": 0,
    }
    axes.scatter(x, y, alpha=opacity, rasterized=len(x) > MOST_PATHS, **look)


def correlation(x: np.ndarray, y: np.ndarray) -> str:
    """Return Spearman's correlation in words.

    It is of ranks, as a few early clients may move a hundred times as far as all others.

    >>> correlation(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0]))
    'rank correlation 0.50'
    >>> one, two, same = np.array([1.0]), np.array([1.0, 2.0]), np.array([7.0, 7.0])
    >>> {correlation(one, one), correlation(two, same), correlation(same, two)}
    {'no correlation known'}
    """
    is_known = len(x) > 1 and np.ptp(x) > 0 and np.ptp(y) > 0
    if not is_known:
        return "no correlation known"
    return f"rank correlation {np.corrcoef(ranks(x), ranks(y))[0, 1]:.2f}"


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks of values from 0 on; equal values have the mean of their ranks.

    >>> ranks(np.array([5.0, 7.0, 5.0, 1.0]))
    array([1.5, 3. , 1.5, 0. ])
    """
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[index]
