"""The figure of accuracy by unevenness: what each method loses as the clients' data become more
unlike.

Shapes: `S` settings.
"""

import json
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from rayfed.base.errors import InputError
from rayfed.papers.panels import legend, looks, panels, shortened, span, wide
from rayfed.report.read import Run
from rayfed.report.table import Row, rows
from rayfed.report.words import listed

MEASURES = {
    "hellinger": "Hellinger distance",
    "jensen_shannon": "Jensen-Shannon distance",
    "earth_mover": "earth mover's distance",
    "size_gini": "Gini of sizes",
    "missing_classes": "missing classes per client",
}


def unevenness(runs: Sequence[Run], width: float | None = None) -> Figure:
    """The last accuracy by each measure of unevenness in which the runs' partitions differ: a line
    for each method.

    A point is a setting: over its seeds the mean, and the standard deviation of the accuracy as an
    error bar. Raises `InputError` where no measure differs.
    """
    for run in runs:
        if not len(run.partition["count"]):
            raise InputError(
                f"'{run.folder}' has no partition.parquet, so it is not known how uneven its "
                "clients are"
            )
    settings = rows(runs)
    uneven = {
        name: np.array([np.mean([run.unevenness[name] for run in row.runs]) for row in settings])
        for name in MEASURES
    }
    # Not for rounded sizes.
    varied = [name for name, values in uneven.items() if np.ptp(values) > 1e-3]
    if not varied:
        raise InputError(
            "the clients of all these runs are equally uneven, so there is no axis; give runs of "
            "several partitions, such as those of a grid over data.partition.alpha"
        )
    methods: dict[str, list[int]] = {}
    for number, row in enumerate(settings):
        methods.setdefault(json.dumps(row.runs[0].job["method"]), []).append(number)
    caption = (
        f"Last accuracy by unevenness: n = {span(len(row.runs) for row in settings)} seeds per "
        "point"
    )
    figure, axes = panels(
        caption, 1, len(varied), 3.0, width=width or wide(len(varied)), sharey=True
    )
    for panel, name in zip(axes[0], varied, strict=True):
        for number, held in enumerate(methods.values()):
            ordered = sorted(held, key=uneven[name].__getitem__)
            means, deviations = zip(
                *(settings[each].figures["last"] for each in ordered), strict=True
            )
            errors = None if None in deviations else deviations
            label = _common([settings[each] for each in held])
            panel.errorbar(
                uneven[name][ordered], means, errors, label=label, capsize=2, **looks(number)
            )
        panel.set(xlabel=MEASURES[name])
    axes[0, 0].set_ylabel("accuracy (%)")
    legend(figure, axes[0, 0])
    return figure


def _common(settings: Sequence[Row]) -> str:
    """What the names of a method's settings have in common, such as `fedavg` of
    `dirichlet-0.1/fedavg`; else all.
    """
    steps = [row.name.split("/") for row in settings]
    shared = [step for step in steps[0] if all(step in other for other in steps)]
    return shortened("/".join(shared)) if shared else listed(row.name for row in settings)
