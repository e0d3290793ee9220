"""A run on the screen: a bar on a terminal (standard error), elsewhere a line per round (standard
output).
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from rayfed.base.console import aligned, shown
from rayfed.base.values import table
from rayfed.data.federation import Federation
from rayfed.data.inputs import Images
from rayfed.data.partition import ALWAYS_SHOWN, Rule, write_rule
from rayfed.folder.summary import read_summary
from rayfed.job import Job
from rayfed.methods.registry import describe
from rayfed.models.settings import Adapt, Model
from rayfed.rounds.observer import Observer, Outcome, Run
from rayfed.rounds.round import Round
from rayfed.rounds.setup import Setup
from rayfed.tensors.weights import parameters_of

BELOW_ZERO = (
    "a negative forgetting: on average, a class is better now than in any evaluated round before"
)

log = logging.getLogger(__name__)


@contextmanager
def follow() -> Iterator[Observer]:
    """A display for `rayfed.run`, for as long as the context lasts."""
    # Nobody watches.
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield Lines()
        return
    progress = bar_on(Console(stderr=True))
    display = Bar(progress)
    try:
        yield display
    finally:
        progress.stop()


def on_screen(train: Callable[..., Any]) -> None:
    """`train`, which gives a `Result`, with its progress shown, and its results."""
    result = train(progress=True)
    print(result_text(result.path, read_summary(result.path)))


class Lines(Observer):
    """A header, then a line for each round; with `quiet` in the log only."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def started(self, run: Run) -> None:
        self._num_rounds = run.setup.job.train.num_rounds
        self._say(header(run.setup))

    def round(self, round: Round) -> None:
        self._say(round_line(round, self._num_rounds))

    def _say(self, text: str) -> None:
        to_log(text)
        if not self._quiet:
            print(text, flush=True)


class Bar(Observer):
    """A header, then a bar that moves with each client."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def started(self, run: Run) -> None:
        self._progress.start()
        text = header(run.setup)
        to_log(text)
        print(text, flush=True)
        self._total = run.setup.job.train.num_rounds
        self._round = 0
        self._evaluated = "not evaluated"
        empty: dict[str, Any] = {
            "round": 0,
            "rounds": self._total,
            "clients": "",
            "figures": "reading the checkpoint" if run.resumed else "starting the workers",
        }
        self._task = self._progress.add_task("", start=False, total=self._total, **empty)

    def client(self, done: int, total: int) -> None:
        # + 1 for the server's work.
        self._show(self._round + done / (total + 1), clients=f"clients {done}/{total}")

    def restored(self, round: Round | None) -> None:
        if round is None:
            self._show(0, figures="evaluating the initial model")
        else:
            self._finished(round)

    def round(self, round: Round) -> None:
        to_log(round_line(round, self._total))
        self._finished(round)

    def ended(self, outcome: Outcome) -> None:
        """The run has ended, maybe before its last round: nothing turns any more."""
        # None where the run has not started.
        for task in self._progress.task_ids:
            self._progress.update(task, round=self._round, total=self._round, completed=self._round)

    def _finished(self, round: Round) -> None:
        self._round = round.round
        # The first time only: the time counts from its end.
        self._progress.start_task(self._task)
        figures = self._evaluated
        if round.test_accuracy is not None:
            figures = figures_text(round)
            self._evaluated = f"accuracy {round.test_accuracy:.1%} in round {round.round}"
        self._show(
            round.round, round=min(round.round + 1, self._total), clients="", figures=figures
        )

    def _show(self, completed: float, **fields: Any) -> None:
        self._progress.update(self._task, completed=completed, refresh=True, **fields)


def to_log(text: str) -> None:
    """What is on the screen is in the run's log too: the screen may be closed before the run ends."""
    log.info("%s", text, extra={"on_screen": True})


def bar_on(console: Console) -> Progress:
    """An empty bar, with the columns that `Bar` fills."""
    return Progress(
        SpinnerColumn(finished_text=""),
        TextColumn("{task.description} round {task.fields[round]}/{task.fields[rounds]}"),
        # What the words leave of the line.
        BarColumn(bar_width=None),
        TextColumn("{task.fields[clients]}"),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        expand=True,
        # Clients come in bursts: only the mean speed predicts the end.
        speed_estimate_period=math.inf,
    )


def header(setup: Setup) -> str:
    """The run that is about to start, in a few lines."""
    job, federation = setup.job, setup.federation
    parameters = sum(parameter.numel() for parameter in setup.model.parameters())
    training = sum(parameter.numel() for parameter in parameters_of(setup.model).values())
    frozen = f", of which {training:,} train" if training < parameters else ""
    lines = {
        "name": job.name,
        "method": describe(job.method),
        "data": (
            f"{job.data.source}: {images_text(federation)}; {partition_text(job.data.partition)}"
        ),
        "clients": f"{clients_text(federation)}; {job.train.clients_per_round} per round",
        "model": f"{model_text(job.model)}; {parameters:,} parameters{frozen}",
        "ray": ray_text(job),
    }
    return aligned(list(lines.items()))


def images_text(federation: Federation) -> str:
    """The number of images, or other examples, for training and for testing, and their shape."""
    return f"{len(federation.train):,} + {len(federation.test):,} of {federation.inputs.size}"


def clients_text(federation: Federation) -> str:
    """The number of clients, and how many images, or other examples, they hold."""
    sizes = federation.partition.sizes
    least, most = (f"{size:,}" for size in (sizes.min(), sizes.max()))
    what = "images" if isinstance(federation.inputs, Images) else "examples"
    return f"{len(sizes):,} with {least if least == most else f'{least} to {most}'} {what} each"


def partition_text(rule: Rule) -> str:
    """Returns a partition rule in words, with its keys as in a job file, without most defaults."""
    values = write_rule(rule)
    words = [values.pop("name")]
    defaults = {field.name: field.default for field in fields(rule)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key in ALWAYS_SHOWN or value != defaults[key]:
            words.append(f"{key} = {value!r}")
    return ", ".join(words)


def model_text(model: Model) -> str:
    """Returns a model in words, with the options that a job gives it, as in a job file.

    >>> model_text(Model("resnet18", {"norm": "group"}, Adapt(freeze=["head.*"])))
    "resnet18, norm = 'group', freeze = ['head.*']"
    """
    words = [model.name, *(f"{key} = {value!r}" for key, value in model.options.items())]
    defaults = table(Adapt())
    for key, value in table(model.adapt).items():
        if value == defaults[key]:
            continue
        if isinstance(value, dict):
            words += [f"{key}.{name} = {each!r}" for name, each in value.items()]
        else:
            words.append(f"{key} = {value!r}")
    return ", ".join(words)


def ray_text(job: Job) -> str:
    """Where the work will be done."""
    if job.ray.mode == "off":
        return "off: in this process"
    at = f"at {job.ray.cluster}" if job.ray.cluster else "started here"
    gpus = (
        "its part of a GPU, if there are GPUs"
        if job.ray.num_gpus == "auto"
        else f"{job.ray.gpu_share:g} GPU"
    )
    return f"{at}; actors: {job.ray.actors}, each with {job.ray.num_cpus:g} CPU and {gpus}"


def result_text(path: Path, summary: dict[str, Any]) -> str:
    """How a run ended, and where its results are."""
    rows = []
    for which in ("best", "last"):
        of_round = summary[which]
        words = [f"accuracy {of_round['test_accuracy']:.1%}", *forgetting_text(of_round)]
        rows.append((which, "  ".join([*words, f"in round {of_round['round']}"])))
    if any((summary[which]["forgetting"] or 0) < 0 for which in ("best", "last")):
        rows.append(("", f"({BELOW_ZERO})"))
    if summary.get("no_better_than_a_guess"):
        rows.append(("note", summary["no_better_than_a_guess"]))
    if summary.get("ended_early"):
        rows.append(("ended", f"after round {summary['rounds']}: {summary['ended_early']}"))
    return aligned([*rows, ("results", shown(path))])


def round_line(round: Round, num_rounds: int) -> str:
    words = [f"round {round.round:{len(str(num_rounds))}}/{num_rounds}", figures_text(round)]
    if round.train_loss is not None:
        words.append(f"loss {round.train_loss:.3f}")
    if round.round:
        words.append(f"{round.seconds:.1f} s")
    return "  ".join(words)


def figures_text(round: Round) -> str:
    if round.test_accuracy is None:
        return "not evaluated"
    words = f"accuracy {round.test_accuracy:5.1%}"
    return words if round.forgetting is None else f"{words}  forgetting {round.forgetting:5.1%}"


def cell_text(summary: dict[str, Any]) -> str:
    """How a run of a grid ended; `run 2/9  NAME` stands before it."""
    best, last = summary["best"], summary["last"]
    words = [f"best {best['test_accuracy']:.1%}", f"last {last['test_accuracy']:.1%}"]
    return "  ".join([*words, *forgetting_text(last)])


def forgetting_text(of_round: Mapping[str, Any]) -> list[str]:
    """The forgetting of an evaluated round, as a list; empty where nothing could be forgotten yet."""
    lost = of_round["forgetting"]
    return [] if lost is None else [f"forgetting {lost:.1%}"]
