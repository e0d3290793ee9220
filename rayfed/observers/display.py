"""The display of a run on the screen.

On a terminal it is a bar, on standard error. Elsewhere it is a line per round, on standard output.
"""

import logging
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
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
    """Return a display for `rayfed.run`, for as long as the context lasts."""
    # A bar is for somebody who watches.
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield Lines()
        return
    progress = bar_on(Console(stderr=True))
    display = Bar(progress)
    try:
        yield display
    finally:
        progress.stop()


def on_screen(train: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call `train`, which returns a `Result`, and show its progress and its results."""
    result = train(*args, **options, progress=True)
    print(result_text(result.path, read_summary(result.path)))


class Lines(Observer):
    """Prints a header, then a line for each round; if `quiet`, they are in the log only."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def started(self, run: Run) -> None:
        self._num_rounds = run.setup.job.train.num_rounds
        self._say(header(run.setup))

    def round(self, round: Round) -> None:
        self._say(round_line(round, self._num_rounds))

    def _say(self, text: str) -> None:
        """Log a text, and print it unless the display is quiet."""
        to_log(text)
        if not self._quiet:
            print(text, flush=True)


def quiet_lines() -> Lines:
    """Return a display that writes a run's rounds to its log only."""
    return Lines(quiet=True)


class Bar(Observer):
    """Prints a header, then a bar that moves with each client."""

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
        # The work of the server counts as that of another client.
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
        """Stop the bar at the round that the run has reached, which may not be its last."""
        # There is no task if the run has not started.
        for task in self._progress.task_ids:
            self._progress.update(task, round=self._round, total=self._round, completed=self._round)

    def _finished(self, round: Round) -> None:
        """Show the results of a round, and that the next round begins."""
        self._round = round.round
        # Only the first call starts the task: the time counts from the end of the first round.
        self._progress.start_task(self._task)
        figures = self._evaluated
        if round.test_accuracy is not None:
            figures = figures_text(round)
            self._evaluated = f"accuracy {round.test_accuracy:.1%} in round {round.round}"
        next_round = min(round.round + 1, self._total)
        self._show(round.round, round=next_round, clients="", figures=figures)

    def _show(self, completed: float, **fields: Any) -> None:
        """Move the bar, and fill in the fields of its line."""
        self._progress.update(self._task, completed=completed, refresh=True, **fields)


def to_log(text: str) -> None:
    """Log a text that is on the screen, as the screen may be closed before the run ends."""
    log.info("%s", text, extra={"on_screen": True})


def bar_on(console: Console) -> Progress:
    """Return an empty bar, with the columns that `Bar` fills."""
    return Progress(
        SpinnerColumn(finished_text=""),
        TextColumn("{task.description} round {task.fields[round]}/{task.fields[rounds]}"),
        # The bar takes what the words leave of the line.
        BarColumn(bar_width=None),
        TextColumn("{task.fields[clients]}"),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        expand=True,
        # Clients answer in bursts, so only the mean speed predicts the end.
        speed_estimate_period=math.inf,
    )


def header(setup: Setup) -> str:
    """Describe the run that is about to start, in a few lines."""
    job = setup.job
    federation = setup.federation
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
    """Return the number of images, or other examples, to train and to test on, and their shape."""
    return f"{len(federation.train):,} + {len(federation.test):,} of {federation.inputs.size}"


def clients_text(federation: Federation) -> str:
    """Return the number of clients, and how many images, or other examples, they hold."""
    sizes = federation.partition.sizes
    least, most = sizes.min(), sizes.max()
    held = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    unit = "images" if isinstance(federation.inputs, Images) else "examples"
    return f"{len(sizes):,} with {held} {unit} each"


def partition_text(rule: Rule) -> str:
    """Return a partition rule in words, with its keys as in a job file, without most defaults."""
    values = write_rule(rule)
    words = [values.pop("name")]
    defaults = {field.name: field.default for field in fields(rule)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key in ALWAYS_SHOWN or value != defaults[key]:
            words.append(f"{key} = {value!r}")
    return ", ".join(words)


def model_text(model: Model) -> str:
    """Return a model in words, with the options that a job gives it, as in a job file.

    >>> model_text(Model("resnet18", {"norm": "group"}, Adapt(freeze=["head.*"])))
    "resnet18, norm = 'group', freeze = ['head.*']"
    """
    words = [model.name] + [f"{key} = {value!r}" for key, value in model.options.items()]
    defaults = table(Adapt())
    for key, value in table(model.adapt).items():
        if value == defaults[key]:
            continue
        if isinstance(value, dict):
            words += [f"{key}.{name} = {option!r}" for name, option in value.items()]
        else:
            words.append(f"{key} = {value!r}")
    return ", ".join(words)


def ray_text(job: Job) -> str:
    """Say where the work will be done."""
    if job.ray.mode == "off":
        return "off: in this process"
    at = f"at {job.ray.cluster}" if job.ray.cluster else "started here"
    if job.ray.num_gpus == "auto":
        gpus = "its part of a GPU, if there are GPUs"
    else:
        gpus = f"{job.ray.gpu_share:g} GPU"
    memory = ""
    if job.ray.memory == "auto":
        memory = ", and the memory that is measured"
    elif job.ray.memory:
        memory = f", and {decimal(job.ray.memory_bytes)} of memory"
    return f"{at}; actors: {job.ray.actors}, each with {job.ray.num_cpus:g} CPU and {gpus}{memory}"


def result_text(path: Path, summary: dict[str, Any]) -> str:
    """Say how a run ended, and where its report is."""
    rows = []
    for name in ("best", "last"):
        of_round = summary[name]
        words = [f"accuracy {of_round['test_accuracy']:.1%}"]
        words += forgetting_text(of_round)
        words.append(f"in round {of_round['round']}")
        rows.append((name, "  ".join(words)))
    if any((summary[name]["forgetting"] or 0) < 0 for name in ("best", "last")):
        rows.append(("", f"({BELOW_ZERO})"))
    if summary.get("no_better_than_a_guess"):
        rows.append(("note", summary["no_better_than_a_guess"]))
    if summary.get("ended_early"):
        rows.append(("ended", f"after round {summary['rounds']}: {summary['ended_early']}"))
    report = path / "report.html"
    rows.append(("report", shown(report)) if report.is_file() else ("results", shown(path)))
    if _is_alone(path):
        table = f"rayfed table {shlex.quote(shown(path))} runs/OTHER"
        rows.append(("next", f"compare it with another run: {table}"))
    return aligned(rows)


def _is_alone(path: Path) -> bool:
    """Say whether no other run lies next to a run: it is probably the user's first."""
    return [file.parent for file in path.parent.glob("*/job.toml")] == [path]


def round_line(round: Round, num_rounds: int) -> str:
    """Return the line of a round: its number, its results, and its seconds."""
    words = [f"round {round.round:{len(str(num_rounds))}}/{num_rounds}", figures_text(round)]
    if round.train_loss is not None:
        words.append(f"loss {round.train_loss:.3f}")
    if round.round:
        words.append(f"{round.seconds:.1f} s")
    return "  ".join(words)


def figures_text(round: Round) -> str:
    """Return the accuracy and the forgetting of a round, or that it was not evaluated."""
    if round.test_accuracy is None:
        return "not evaluated"
    words = f"accuracy {round.test_accuracy:5.1%}"
    return words if round.forgetting is None else f"{words}  forgetting {round.forgetting:5.1%}"


def cell_text(summary: dict[str, Any]) -> str:
    """Say how a run of a grid ended; `run 2/9  NAME` stands before it."""
    last_round = summary["last"]
    words = [
        f"best {summary['best']['test_accuracy']:.1%}",
        f"last {last_round['test_accuracy']:.1%}",
    ]
    words += forgetting_text(last_round)
    return "  ".join(words)


def forgetting_text(of_round: Mapping[str, Any]) -> list[str]:
    """Return the forgetting of an evaluated round in words, as a list.

    The list is empty if nothing could be forgotten yet.
    """
    lost = of_round["forgetting"]
    return [] if lost is None else [f"forgetting {lost:.1%}"]
