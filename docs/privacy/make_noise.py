"""Write the table of docs/privacy.md, which compares methods under noise.

    rayfed run docs/privacy/noise.toml            # some 40 minutes on two cores
    python docs/privacy/make_noise.py runs/privacy-noise

The first argument is the folder of the runs. The numbers of each run go to noise.csv, and the table
comes from there. Without a folder, the table is made of noise.csv as it is.
"""

import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

# For pages.py, in the folder above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from pages import from_shell, put

from rayfed.folder.found import find_runs
from rayfed.folder.tables import read_table
from rayfed.report.read import read_run

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "privacy.md"
RECORDS = HERE / "noise.csv"
METHODS = {"fedavg": "FedAvg", "fedntd": "FedNTD", "fedlmd": "FedLMD"}
# The number of last rounds over which the accuracy is averaged, as in `rayfed table`.
LAST = 10


@dataclass(frozen=True)
class Record:
    """A run: how far it came, and what it reached. A run that diverged has status failed."""

    method: str
    noise: float
    seed: int
    status: str
    rounds: int
    # The mean test accuracy of the last rounds, in percent.
    accuracy: float
    # After the last round; infinite without noise.
    epsilon: float


def record_of(folder: Path) -> Record:
    """Return the record of a run from its folder."""
    run = read_run(folder)
    method, _, noise = folder.parent.name.partition("-noise-")
    notes = dict(read_table(folder, "rounds").to_pylist()[-1]["notes"])
    return Record(
        method,
        float(noise),
        run.job["seed"],
        run.status,
        int(run.rounds["round"][-1]),
        round(100 * float(run.rounds["test_accuracy"][-LAST:].mean()), 2),
        round(notes.get("privacy.epsilon", float("inf")), 2),
    )


def read_records(path: Path) -> list[Record]:
    """Return the records of a CSV file."""
    with path.open() as file:
        return [
            Record(
                row["method"],
                float(row["noise"]),
                int(row["seed"]),
                row["status"],
                int(row["rounds"]),
                float(row["accuracy"]),
                float(row["epsilon"]),
            )
            for row in csv.DictReader(file)
        ]


def write_records(records: Sequence[Record], path: Path) -> None:
    """Write the records to a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=asdict(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(record) for record in records)


def cell(records: Sequence[Record]) -> str:
    """Return the text of a method at a level of noise: mean and deviation over the seeds."""
    done = [record.accuracy for record in records if record.status == "done"]
    lost = len(records) - len(done)
    if len(done) > 1:
        text = f"{mean(done):.1f} ± {stdev(done):.1f}"
    else:
        text = f"{done[0]:.1f}" if done else "-"
    return f"{text}; {lost} of {len(records)} diverged" if lost else text


def table(records: Sequence[Record]) -> str:
    """Return the table: a row for each level of noise, a column for each method."""
    lines = [
        f"| noise | epsilon | {' | '.join(METHODS.values())} |",
        f"|---:|---:|{'---:|' * len(METHODS)}",
    ]
    for noise in sorted({record.noise for record in records}):
        at_level = [record for record in records if record.noise == noise]
        cells = [cell([one for one in at_level if one.method == method]) for method in METHODS]
        # Epsilon depends on the noise and the rounds alone.
        epsilon = max(record.epsilon for record in at_level)
        text = "infinite" if math.isinf(epsilon) else f"{epsilon:,.0f}"
        lines.append(f"| {noise:g} | {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(folder: str = "") -> None:
    """Write noise.csv from a folder of runs, and the table of the page from noise.csv."""
    if folder:
        records = [record_of(path) for path in find_runs(Path(folder))]
        write_records(sorted(records, key=lambda one: (one.noise, one.method, one.seed)), RECORDS)
    made = table(read_records(RECORDS))
    print(made)
    PAGE.write_text(put(PAGE.read_text(), {"noise": made}))


if __name__ == "__main__":
    from_shell(main)
