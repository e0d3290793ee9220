"""The cost of a paper's table: runs, rounds, data, and a rough estimate of the computation."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rayfed.data.here import is_here
from rayfed.data.settings import Data
from rayfed.grid.cells import Cell

# The milliseconds of one core per training image of 32x32 (forward, backward). They were measured
# with batches of 16 on a server's CPU in November 2026, and grow with the number of pixels.
MILLISECONDS = {
    "lenet": 0.25,
    "cnn": 2.0,
    "resnet8": 2.2,
    "mobilenet": 12.0,
    "resnet10": 25.0,
    "resnet18": 55.0,
    "resnet50": 140.0,
    "resnet56": 19.0,
}
# The number of training images, the number of test images, and their height.
IMAGES = {
    "fashion-mnist-mini": (10_000, 2_000, 28),
    "mnist": (60_000, 10_000, 28),
    "fashion-mnist": (60_000, 10_000, 28),
    "emnist": (112_800, 18_800, 28),
    "cifar10": (50_000, 10_000, 32),
    "cifar100": (50_000, 10_000, 32),
    "cinic10": (90_000, 90_000, 32),
    "tiny-imagenet": (100_000, 10_000, 64),
}
# A test image costs this share of a training image: it needs only the forward pass.
TEST_SHARE = 1 / 3
HOW = (
    "core-hours are rough: rounds x clients x images x the measured cost of a FedAvg step on one "
    "CPU core; a method with a teacher takes up to twice as much, a GPU far less; for data that "
    "are not here, -s data.root=FOLDER says where you have them"
)
SENTENCE = re.compile(r"(.+?(?<!Trans)(?<!Fig)(?<!al))[.:] (?=[A-Z0-9])")
# Most characters of the text that says what a table shows.
LONGEST = 110


class Cost(NamedTuple):
    """The cost of all runs of a grid."""

    methods: int
    settings: int
    runs: int
    # The fewest and the most of a run.
    rounds: tuple[int, int]
    # The data sets, and whether they are on this machine.
    sources: dict[str, bool]
    # None if the cost of a model or data set was not measured.
    core_hours: float | None

    def in_words(self) -> str:
        """Return the cost in a line."""
        fewest, most = self.rounds
        rounds = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        counts = [_counted(self.methods, "method"), _counted(self.settings, "setting")]
        names = [name if here else f"{name} (not here)" for name, here in self.sources.items()]
        data = ", ".join(names)
        hours = "cost not known" if self.core_hours is None else _work(self.core_hours)
        runs = _counted(self.runs, "run")
        word = "round" if most == 1 else "rounds"
        return f"{' x '.join(counts)}, {runs} of {rounds} {word}; {data}; {hours}"


def shows(file: Path) -> str:
    """Return what a job file says that its table shows.

    This is the first sentence after the command in its first comment.
    """
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    text = " ".join(lines).strip()
    if len(text) <= LONGEST:
        return text.rstrip(".")
    sentence = SENTENCE.match(text)
    if sentence and len(sentence[1]) <= LONGEST:
        return sentence[1]
    return text[:LONGEST].rpartition(" ")[0] + " ..."


def cost_of(cells: Sequence[Cell]) -> Cost:
    """Return the cost of the cells of a grid, from the jobs' tables alone."""
    rounds = [int(_value(cell, "train", "num_rounds", 20)) for cell in cells]
    sources: dict[str, bool] = {}
    for cell in cells:
        source = str(_value(cell, "data", "source", "fashion-mnist-mini"))
        sources[source] = is_here(source, str(_value(cell, "data", "root", Data.root)))
    seconds = [_seconds(cell) for cell in cells]
    known = [of_cell for of_cell in seconds if of_cell is not None]
    # A run with which others begin has a method and a setting of its own.
    first = {cell.after for cell in cells}
    compared = [cell for cell in cells if cell.name not in first] or cells
    return Cost(
        methods=len({cell.method for cell in compared}),
        settings=len({cell.setting for cell in compared}),
        runs=len(cells),
        rounds=(min(rounds), max(rounds)),
        sources=sources,
        core_hours=sum(known) / 3600 if len(known) == len(seconds) else None,
    )


def _seconds(cell: Cell) -> float | None:
    """Return the seconds of one core that a run takes.

    They are None if the cost of its model or data was not measured.
    """
    model = cell.tables.get("model", "cnn")
    name = model if isinstance(model, str) else model.get("name", "cnn")
    of_data = IMAGES.get(str(_value(cell, "data", "source", "fashion-mnist-mini")))
    if name not in MILLISECONDS or of_data is None:
        return None
    num_train, num_test, height = of_data
    height = int(_value(cell, "data", "size", 0)) or height
    per_image = MILLISECONDS[name] / 1000 * (height / 32) ** 2
    partition = _value(cell, "data", "partition", {})
    num_clients = partition.get("num_clients", 10) if isinstance(partition, dict) else 10
    cohort = int(_value(cell, "train", "clients_per_round", 5))
    steps = _value(cell, "train", "local_steps", None)
    if steps is None:
        images = num_train / num_clients * float(_value(cell, "train", "local_epochs", 1))
    else:
        images = steps * int(_value(cell, "train", "batch_size", 50))
    rounds = int(_value(cell, "train", "num_rounds", 20))
    tests = rounds / int(_value(cell, "train", "eval_every", 1)) * num_test * TEST_SHARE
    return (rounds * cohort * images + tests) * per_image


def _value(cell: Cell, table: str, key: str, default: Any) -> Any:
    """Return a value of a job's table, or the default."""
    return cell.tables.get(table, {}).get(key, default)


def _counted(count: int, word: str) -> str:
    """Return a count with its word, in the plural unless it is 1.

    >>> _counted(1, "run"), _counted(1200, "run")
    ('1 run', '1,200 runs')
    """
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _work(hours: float) -> str:
    """Return the time of one core in words, with one digit: more digits would be a promise.

    >>> _work(0.01), _work(0.034)
    ('less than a core-minute', 'about 2 core-minutes')
    >>> _work(7.7), _work(1234.5)
    ('about 8 core-hours', 'about 1,000 core-hours')
    """
    minutes = 60 * hours
    if minutes < 1:
        return "less than a core-minute"
    amount, unit = (minutes, "minute") if hours < 1 else (hours, "hour")
    number = float(f"{amount:.1g}")
    return f"about {number:,.0f} core-{unit}{'' if number == 1 else 's'}"
