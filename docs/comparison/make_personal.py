"""The comparison of the clients' own models on MNIST: from finished runs to the job file and table.

    python docs/comparison/make_personal.py best runs
    python docs/comparison/make_personal.py page runs
    python docs/comparison/make_personal.py page

The first takes the best values from runs of mnist-personal-tune.toml into mnist-personal.toml. The
second makes docs/comparison/personal.csv and the page's table from runs of that. The third makes
the table alone, from personal.csv.

Methods are compared by personalised accuracy: a client's model on test images that are distributed
as the client's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import make_comparison as comparison

from rayfed.report.measured import personalised
from rayfed.report.read import Run
from rayfed.report.table import LAST

# For pages.py, in the folder above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from pages import from_shell, put

TUNING = comparison.ROOT / "jobs/comparison/mnist-personal-tune.toml"
REPORTED = comparison.ROOT / "jobs/comparison/mnist-personal.toml"
RESULTS = comparison.ROOT / "docs/comparison/personal.csv"
PAGE = comparison.PAGE
MEASURES = {"after": "personalised accuracy", "before": "before the training"}


class Record(NamedTuple):
    """A run's personalised accuracies in percent; None where it diverged."""

    setting: str
    method: str
    seed: int
    after: float | None
    before: float | None


def record(setting: str, method: str, seed: int, run: Run | None) -> Record:
    return Record(
        setting,
        method,
        seed,
        *(personalised(run, LAST, when) if run else None for when in MEASURES),
    )


def chosen(job_file: Path, runs: Path) -> list[str]:
    """The lines of `grid.method` with the best try of each method, by its mean accuracy over the
    settings.
    """
    return comparison.chosen(job_file, runs, lambda run: personalised(run, LAST), together=True)[
        "all settings"
    ]


def put_tables(page: str, records: Sequence[Record]) -> str:
    """The page with its tables of personalised accuracy made anew."""
    lost = ["", comparison.LOST] if any(each.after is None for each in records) else []
    text = "\n".join([*comparison.side_by_side(records, MEASURES), *lost]).strip()
    return put(page, {"personal": text})


def main(command: str = "", runs: str = "") -> None:
    folder = Path(runs).expanduser()
    if command == "best" and runs:
        methods = chosen(TUNING, folder)
        REPORTED.write_text(comparison.put_methods(REPORTED.read_text(), methods))
        print("\n".join(methods))
    elif command == "page":
        if runs:
            cells = comparison.played(REPORTED, folder)
            found = [
                record(cell.setting, cell.method, cell.tables["seed"], run) for cell, run in cells
            ]
            comparison.write_records(found, RESULTS)
        PAGE.write_text(put_tables(PAGE.read_text(), comparison.read_records(RESULTS, Record)))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    from_shell(main)
