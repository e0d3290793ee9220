"""How much of the accuracy each definition of forgetting repeats: the table of docs/forgetting.md.

rayfed run jobs/comparison/mnist-forgetting.toml      # some 15 minutes on one core
python docs/make_forgetting.py runs/mnist-forgetting

Given is a folder of runs. No number of the table is typed by hand.
"""

import sys
from pathlib import Path

import numpy as np
from pages import put

from rayfed.folder.found import find_runs
from rayfed.report.forms import LAST, NAMES
from rayfed.report.read import Run, read_run

PAGE = Path(__file__).resolve().parent / "forgetting.md"
HEAD = ("definition", "lowest to highest (%)", "with the last accuracy", "from round to round")


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; nan where one of the two does not vary."""
    return (
        float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0 else np.nan
    )


def last_accuracy(run: Run, last: int) -> float:
    return float(run.rounds["test_accuracy"][run.evaluated][-last:].mean())


def row(runs: list[Run], name: str, last: int) -> list[str]:
    """A definition's line: of the mean of its last values, beside the mean of as many last
    accuracies.
    """
    series = [run.forgetting[name] for run in runs]
    values = np.array([values[-last:].mean() for _, values in series])
    over_runs = correlation(values, np.array([last_accuracy(run, last) for run in runs]))
    within = [
        correlation(values, run.rounds["test_accuracy"][rounds])
        for run, (rounds, values) in zip(runs, series, strict=True)
    ]
    words = f"`{name}`" if last == 1 else f"`{name}`, mean of last {last}"
    mean = f"{np.nanmean(within):+.2f}" if last == 1 else ""
    return [
        words,
        f"{100 * values.min():.1f} to {100 * values.max():.1f}",
        f"{over_runs:+.2f}",
        mean,
    ]


def table(runs: list[Run]) -> str:
    lines = [row(runs, name, last) for name in NAMES for last in (1, LAST)]
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (HEAD, ["---", "---:", "---:", "---:"], *lines)
    )


if __name__ == "__main__":
    every = [read_run(folder) for folder in find_runs(Path(sys.argv[1]))]
    played = [run for run in every if run.status == "done"]
    made = table(played)
    print(made)
    PAGE.write_text(put(PAGE.read_text(), {"definitions": made}))
