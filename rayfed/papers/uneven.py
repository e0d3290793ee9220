"""The figure of accuracy by unevenness.

It shows what each method loses as the clients' data become more unlike.
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
    """Draw the last accuracy by each measure of unevenness in which the runs' partitions differ.

    There is a line for each method, data set and network. A point is a setting: the mean over its
    seeds, with the standard deviation of the accuracy as an error bar. Raises `InputError` if no
    measure differs, or if a run has no partition.
    """
    for run in runs:
        if not len(run.partition["count"]):
            raise InputError(
                f"'{run.folder}' has no partition.parquet, so it is not known how uneven its "
                "clients are"
            )
    settings = rows(runs)
    uneven = {name: _means(settings, name) for name in MEASURES}
    # Sizes are rounded, so tiny differences are no differences of the settings.
    varied = [name for name, values in uneven.items() if np.ptp(values) > 1e-3]
    if not varied:
        raise InputError(
            "the clients of all these runs are equally uneven, so there is no axis; give runs of "
            "several partitions, such as those of a grid over data.partition.alpha"
        )
    methods: dict[str, list[int]] = {}
    for number, row in enumerate(settings):
        job = row.runs[0].job
        # Settings of other data or networks have another level, so a line would mislead.
        line = json.dumps([job["method"], job["data"]["source"], job["model"]])
        methods.setdefault(line, []).append(number)
    caption = (
        f"Last accuracy by unevenness: n = {span(len(row.runs) for row in settings)} seeds per "
        "point"
    )
    figure, axes = panels(
        caption, 1, len(varied), 3.0, width=width or wide(len(varied)), sharey=True
    )
    for panel, name in zip(axes[0], varied, strict=True):
        for number, places in enumerate(methods.values()):
            ordered = sorted(places, key=uneven[name].__getitem__)
            stats = [settings[place].figures["last"] for place in ordered]
            means = [mean for mean, _ in stats]
            deviations = [deviation for _, deviation in stats]
            errors = None if None in deviations else deviations
            label = common_name([settings[place] for place in places])
            panel.errorbar(
                uneven[name][ordered], means, errors, label=label, capsize=2, **looks(number)
            )
        panel.set(xlabel=MEASURES[name])
    axes[0, 0].set_ylabel("accuracy (%)")
    legend(figure, axes[0, 0])
    return figure


def _means(settings: Sequence[Row], measure: str) -> np.ndarray:
    """Return a measure of unevenness for each setting: the mean over its runs."""
    means = []
    for row in settings:
        means.append(np.mean([run.unevenness[measure] for run in row.runs]))
    return np.array(means)


def common_name(settings: Sequence[Row]) -> str:
    """Return what the names of a method's settings have in common, or else all names.

    For `dirichlet-0.1/fedavg` and `dirichlet-1/fedavg`, this is `fedavg`.
    """
    shared = shared_steps([row.name for row in settings])
    return shortened(shared) if shared else listed(row.name for row in settings)


def shared_steps(names: Sequence[str]) -> str:
    """Return the steps that all names have; '' if there are none.

    >>> shared_steps(["dirichlet-0.1/fedavg", "dirichlet-1/fedavg"]), shared_steps(["a", "b"])
    ('fedavg', '')
    """
    steps = [name.split("/") for name in names]
    shared = steps[0]
    for other in steps[1:]:
        shared = [step for step in shared if step in other]
    return "/".join(shared)
