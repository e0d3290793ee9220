"""What a person sees of a run: a live bar on a terminal, and one plain line a round elsewhere.

The plain lines go to standard output; the bar and the package's log go to standard error.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # these import torch; who only shows help should not wait for it
    from rayfed.data.federation import Federation
    from rayfed.experiment import Display
    from rayfed.job import Job
    from rayfed.local import Site, Training
    from rayfed.methods.part import Method
    from rayfed.rounds import Round


@contextmanager
def follow() -> Iterator[Display]:
    """A display for `rayfed.run`, for as long as the context lasts."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        with bar_on(Console(stderr=True)) as progress:
            yield Bar(progress)
    else:
        yield Lines()


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Show the package's log, from INFO on."""
    log, handler = logging.getLogger("rayfed"), _ToStderr()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


class _ToStderr(logging.Handler):
    """Looks `sys.stderr` up for each record: while a bar is shown, rich stands in for it and prints above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        print(prefix + self.format(record), file=sys.stderr, flush=True)


class Lines:
    """A header, then a line for each round."""

    def start(self, job: Job, site: Site) -> None:
        self._training = job.training
        print(header(job, site), flush=True)

    def client(self, done: int, total: int) -> None:
        pass

    def round(self, round: Round) -> None:
        print(round_line(round, self._training), flush=True)


class Bar:
    """A header, then a bar that moves with each client."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, job: Job, site: Site) -> None:
        self._training = job.training
        print(header(job, site), flush=True)
        total, self._round = job.training.num_rounds, 0
        self._task = self._progress.add_task("", start=False, total=total, round=0, clients="", figures="starting")

    def client(self, done: int, total: int) -> None:
        self._show(self._round + done / (total + 1), clients=f"clients {done}/{total}")  # + 1: the server's work

    def round(self, round: Round) -> None:
        self._round = round.round
        self._progress.start_task(self._task)  # no more than once: the time of training counts, not that of starting
        figures = f"accuracy {round.test_accuracy:.3f}  forgetting {round.forgetting:.3f}"
        self._show(round.round, round=min(round.round + 1, self._training.num_rounds), clients="", figures=figures)

    def _show(self, completed: float, **fields: Any) -> None:
        self._progress.update(self._task, completed=completed, refresh=True, **fields)


def bar_on(console: Console) -> Progress:
    """An empty bar, with the columns that `Bar` fills."""
    return Progress(
        TextColumn("round {task.fields[round]}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.fields[clients]}"),
        TextColumn("{task.fields[figures]}"),
        TimeLeft(),
        console=console,
    )


class TimeLeft(ProgressColumn):
    """As long as it has taken so far, in proportion; rich's own looks only at the last steps, which come in bursts."""

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"{duration(task.finished_time or 0)} taken")
        if not task.elapsed or not task.completed or not task.total:
            return Text()
        return Text(f"{duration(task.elapsed * (task.total / task.completed - 1))} left")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(83.4)
    '0:01:23'
    """
    return str(timedelta(seconds=int(seconds)))


def header(job: Job, site: Site) -> str:
    """What is about to run, in a few lines."""
    parameters = sum(parameter.numel() for parameter in site.model.parameters())
    return aligned(
        [
            ("name", job.name),
            ("method", method_text(job.method)),
            ("data", f"{job.source.source}: {images_text(site.federation)}; {brief(job.partition)}"),
            ("clients", f"{clients_text(site.federation)}; {job.training.clients_per_round} a round"),
            ("model", f"{job.model}, {parameters:,} parameters"),
            ("ray", ray_text(job)),
        ]
    )


def images_text(federation: Federation) -> str:
    """How many images to train on and to test with, and their shape."""
    shape = "x".join(map(str, federation.image_shape))
    return f"{len(federation.train):,} + {len(federation.test):,} of {shape}"


def clients_text(federation: Federation) -> str:
    """How many clients, and what they hold."""
    sizes = federation.partition.sizes
    return f"{len(sizes):,} with {sizes.min():,} to {sizes.max():,} images each"


def ray_text(job: Job) -> str:
    """Where the work will be done; how many actors came up, and where the dashboard is, the log says."""
    if job.ray.mode == "off":
        return "off: in this process"
    at = f"at {job.ray.cluster}" if job.ray.cluster else "started here"
    gpus = "as much GPU as it needs" if job.ray.num_gpus == "auto" else f"{job.ray.gpu_share:g} GPU"
    return f"{at}; actors: {job.ray.actors}, each with {job.ray.num_cpus:g} CPU and {gpus}"


def round_line(round: Round, training: Training) -> str:
    """A finished round as a line of text."""
    total, loss = training.num_rounds, round.train_loss
    words = [
        f"round {round.round:{len(str(total))}}/{total}",
        f"accuracy {round.test_accuracy:.3f}",
        f"forgetting {round.forgetting:.3f}",
        *([f"loss {loss:.3f}"] if loss is not None else []),
        *([f"{round.seconds:.1f} s"] if round.round else []),
    ]
    return "  ".join(words)


def result_text(path: Path, summary: dict[str, Any]) -> str:
    """How a run ended, and where its results are."""
    figures = [
        (which, f"accuracy {row['test_accuracy']:.3f}  forgetting {row['forgetting']:.3f}  in round {row['round']}")
        for which in ("best", "last")
        for row in [summary[which]]
    ]
    return aligned([*figures, ("results", shown(path))])


def method_text(method: Method) -> str:
    """A method in a line: its parts, each with the values that are not the defaults."""
    from rayfed.methods.part import Switch

    if isinstance(method, tuple):
        return " + ".join(brief(part) for part in method)
    if isinstance(method, Switch):
        return f"{method_text(method.before)}; from round {method.at} on: {method_text(method.after)}"
    return repr(method)


def brief(value: Any) -> str:
    """A dataclass with the values that are not its defaults.

    >>> from rayfed.data.partition import Shards
    >>> brief(Shards(num_clients=10))
    'Shards'
    """
    changed = [
        f"{field.name}={getattr(value, field.name)!r}"
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    ]
    return type(value).__name__ + (f"({', '.join(changed)})" if changed else "")


def shown(path: Path) -> str:
    """A path as short as it can be said."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """Rows of words as lines of columns.

    >>> print(aligned([("a", "1"), ("long", "2")]))
    a     1
    long  2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(gap.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: with lines, and fitted to its width, on a terminal; aligned text, a row a line, elsewhere."""
    if not sys.stdout.isatty():
        print(aligned([columns, *rows]))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
