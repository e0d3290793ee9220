"""The figure of a number by round: a line for each method, the mean over its seeds, in a band
around them.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from rayfed.base.errors import InputError, did_you_mean
from rayfed.papers.panels import MARKERS, apart, legend, line, panels, span
from rayfed.papers.style import COLOURS
from rayfed.report.forgetting import Series
from rayfed.report.forms import DOMAIN, NAMES, in_words
from rayfed.report.plots import over_runs
from rayfed.report.read import Run
from rayfed.report.table import lacking

# In percent.
SHARES = ("test_accuracy", "forgetting", "macro_f1", "calibration_error")


def curves(runs: Sequence[Run], of: str = "test_accuracy", width: float | None = None) -> Figure:
    """A number by round, as `series` has it: the mean over seeds, in a band from the lowest seed to
    the highest.
    """
    groups = apart(runs, most=len(MARKERS) * len(COLOURS))
    words = (
        in_words(of)
        if of.startswith(("forgetting.", DOMAIN))
        else of.replace("_", " ") + " (%)" * (of in SHARES)
    )
    caption = f"{words[:1].upper()}{words[1:]} by round"
    if any(len(group.runs) > 1 for group in groups.values()):
        seeds = span(len(group.runs) for group in groups.values())
        caption += f": means of n = {seeds} seeds, in bands from the lowest seed to the highest"
    behind = [str(run.folder) for group in groups.values() for run in group.behind]
    if behind:
        caption += f"; not drawn, as other seeds have more rounds: {', '.join(behind)}"
    width = width or 5.5
    figure, axes = panels(caption, 1, 1, 0.65 * width, width=width)
    for number, (name, group) in enumerate(groups.items()):
        drawn = over_runs(name, number, [series(run, of) for run in group.runs])
        low, high = (drawn.y if end is None else end for end in (drawn.low, drawn.high))
        scale = 100 if words.endswith("(%)") else 1
        line(
            axes[0, 0],
            number,
            drawn.x,
            scale * drawn.y,
            (scale * low, scale * high),
            name,
            len(groups),
        )
    axes[0, 0].set(xlabel="round", ylabel=words)
    # In the order of the runs, as in tables.
    legend(figure, axes[0, 0], axes[0, 0].lines)
    return figure


def series(run: Run, of: str) -> Series:
    """A column of `rounds.parquet`, `forgetting.NAME`, or a note of clients or rounds: the rounds
    that have it.
    """
    known = {
        name: (run.rounds["round"], values)
        for name, values in run.rounds.items()
        if name != "round"
    }
    known |= {f"forgetting.{name}": each for name, each in run.forgetting.items()}
    known |= run.round_notes | run.notes
    if of not in known and of.startswith("forgetting.") and of.removeprefix("forgetting.") in NAMES:
        raise lacking(run, of)
    if of not in known:
        raise InputError(
            f"--of {of}: '{run.folder}' has no such number by round{did_you_mean(of, known)}"
        )
    rounds, values = known[of]
    there = np.isfinite(values)
    return rounds[there], values[there]
