"""A run on the screen: a bar on a terminal (standard error), elsewhere a line per round (standard output)."""

import dataclasses
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rayfed.cli.text import aligned, shown
from rayfed.data.federation import Federation
from rayfed.engine import Round
from rayfed.experiment import Display
from rayfed.job import Job, Training
from rayfed.local import Site
from rayfed.methods.part import Method, Switch

log = logging.getLogger(__name__)


@contextmanager
def follow() -> Iterator[Display]:
    """A display for `rayfed.run`, for as long as the context lasts."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        with bar_on(Console(stderr=True)) as progress:
            yield Bar(progress)
    else:
        yield Lines()


class Lines(Display):
    """A header, then a line for each round."""

    def start(self, site: Site) -> None:
        self._training = site.job.train
        print(noted(header(site)), flush=True)

    def round(self, round: Round) -> None:
        print(noted(round_line(round, self._training)), flush=True)


class Bar(Display):
    """A header, then a bar that moves with each client."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, site: Site) -> None:
        print(noted(header(site)), flush=True)
        self._training = site.job.train
        self._total, self._round = self._training.num_rounds, 0
        empty: dict[str, Any] = {"round": 0, "clients": "", "figures": "starting"}
        self._task = self._progress.add_task("", start=False, total=self._total, **empty)

    def client(self, done: int, total: int) -> None:
        self._show(self._round + done / (total + 1), clients=f"clients {done}/{total}")  # + 1 for the server's work

    def round(self, round: Round) -> None:
        self._round = round.round
        noted(round_line(round, self._training))
        self._progress.start_task(self._task)  # the first time only: the time counts from the end of round 0
        figures = f"accuracy {round.test_accuracy:.3f}  forgetting {round.forgetting:.3f}"
        self._show(round.round, round=min(round.round + 1, self._total), clients="", figures=figures)

    def _show(self, completed: float, **fields: Any) -> None:
        self._progress.update(self._task, completed=completed, refresh=True, **fields)


def noted(text: str) -> str:
    """The text, once it is in the run's log: the screen may be closed before the run ends."""
    log.info("%s", text, extra={"on_screen": True})
    return text


def bar_on(console: Console, **options: Any) -> Progress:
    """An empty bar, with the columns that `Bar` fills."""
    return Progress(
        TextColumn("round {task.fields[round]}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.fields[clients]}"),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        speed_estimate_period=math.inf,  # clients come in bursts: only the mean speed predicts the end
        **options,
    )


def header(site: Site) -> str:
    """The run that is about to start, in a few lines."""
    job, federation = site.job, site.federation
    parameters = sum(parameter.numel() for parameter in site.model.parameters())
    lines = {
        "name": job.name,
        "method": method_text(job.method),
        "data": f"{job.data.source}: {images_text(federation)}; {brief(job.data.partition)}",
        "clients": f"{clients_text(federation)}; {job.train.clients_per_round} per round",
        "model": f"{job.model.name}, {parameters:,} parameters",
        "ray": ray_text(job),
    }
    return aligned(list(lines.items()))


def images_text(federation: Federation) -> str:
    """The number of images for training and for testing, and their shape."""
    shape = "x".join(map(str, federation.image_shape))
    return f"{len(federation.train):,} + {len(federation.test):,} of {shape}"


def clients_text(federation: Federation) -> str:
    """The number of clients, and how many images they hold."""
    sizes = federation.partition.sizes
    return f"{len(sizes):,} with {sizes.min():,} to {sizes.max():,} images each"


def ray_text(job: Job) -> str:
    """Where the work will be done."""
    if job.ray.mode == "off":
        return "off: in this process"
    at = f"at {job.ray.cluster}" if job.ray.cluster else "started here"
    gpus = "the part of a GPU that it needs" if job.ray.num_gpus == "auto" else f"{job.ray.gpu_share:g} GPU"
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
    line = "accuracy {test_accuracy:.3f}  forgetting {forgetting:.3f}  in round {round}"
    return aligned([*((which, line.format(**summary[which])) for which in ("best", "last")), ("results", shown(path))])


def method_text(method: Method) -> str:
    """A method in a line: its parts, with the values that are not defaults."""
    if isinstance(method, tuple):
        return " + ".join(brief(part) for part in method)
    if isinstance(method, Switch):
        return f"{method_text(method.before)}; from round {method.at} on: {method_text(method.after)}"
    return repr(method)


def brief(value: Any) -> str:
    """A dataclass with its values that are not defaults: Shards(s=5)."""
    changed = [
        f"{field.name}={getattr(value, field.name)!r}"
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    ]
    return type(value).__name__ + (f"({', '.join(changed)})" if changed else "")
