"""Trackers: a run's curves in TensorBoard, Weights & Biases and MLflow.

A tracker follows the tables in the run's folder: when a round is recorded there, the tracker is
sent the rows that it does not have yet. So its curves are those of the tables, and a run that is
resumed also sends what was missed before. Each tracker has a separate thread. Only the end of the
run waits for it, for a limited time. If a tracker fails or hangs, it gets no more, and the run
continues.
"""

import importlib.util
import json
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from rayfed.base.aside import aside
from rayfed.base.errors import InputError, cut
from rayfed.base.files import write_text
from rayfed.folder.places import folder_of
from rayfed.folder.summary import read_json, read_summary
from rayfed.folder.tables import confusions, read_table
from rayfed.job import Job, flat
from rayfed.report.forgetting import by_round, client_accuracies
from rayfed.report.read import classes_of
from rayfed.rounds.observer import Observer, Outcome
from rayfed.rounds.round import Round

# The seconds that the end of a run waits for a tracker.
PATIENCE = 30.0

log = logging.getLogger(__name__)


class Tracker(NamedTuple):
    """A run at a tracker."""

    # By this, the tracker knows the run when it is resumed.
    id: str | None
    # The last round that the tracker has; -1 for none.
    sent: int
    # Sends the numbers of a round.
    log: Callable[[int, dict[str, float]], None]
    # Sends the rest, with the run's status.
    close: Callable[[str], None]


def tensorboard(job: Job, path: Path, id: str | None) -> Tracker:
    """Begin event files for TensorBoard in the run's folder.

    They are written anew when a run is resumed, since no event can be replaced.
    """
    from torch.utils.tensorboard import SummaryWriter

    for file in (path / "tensorboard").glob("events.out.*"):
        file.unlink()
    # With this step, a TensorBoard that is open forgets the earlier events as well.
    writer = SummaryWriter(str(path / "tensorboard"), purge_step=0)
    writer.add_text("job", json.dumps(config(job), indent=1))

    def log(round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            # In the old style the values would be doubles, which the page of TensorBoard drops.
            writer.add_scalar(name, value, round, new_style=True)
        writer.flush()

    return Tracker(None, -1, log, lambda status: writer.close())


def wandb(job: Job, path: Path, id: str | None) -> Tracker:
    """Begin a run at Weights & Biases, or with WANDB_MODE=offline in the run's folder.

    Offline files are written anew when a run is resumed, since those of a killed run lack their
    last block.
    """
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise RuntimeError(
            "nobody is logged in: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
        )
    for folder in path.glob(f"wandb/offline-run-*-{id}"):
        shutil.rmtree(folder)
    run = wandb.init(
        id=id,
        resume="allow",
        project=os.environ.get("WANDB_PROJECT", "rayfed"),
        # In a grid, the seeds of a run are a group.
        group=os.environ.get("WANDB_RUN_GROUP", job.name.rpartition("/")[0] or None),
        name=job.name,
        dir=path,
        config=config(job),
        # This leaves a run that the user has begun alone.
        reinit="create_new",
        settings=wandb.Settings(console="off", silent=True),
    )

    def log(round: int, values: dict[str, float]) -> None:
        run.log(values, step=round, commit=True)

    def close(status: str) -> None:
        run.finish(exit_code=int(status != "done"))

    return Tracker(run.id, run.starting_step - 1, log, close)


def mlflow(job: Job, path: Path, id: str | None) -> Tracker:
    """Begin a run on the tracking server that MLFLOW_TRACKING_URI names."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    client, sent = MlflowClient(), -1
    if id is None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rayfed")
        # The experiment may be there already: another run may have made it just now.
        with suppress(MlflowException):
            client.create_experiment(name)
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None, "it has just been made"
        id = client.create_run(experiment.experiment_id, run_name=job.name).info.run_id
        for key, value in config(job).items():
            client.log_param(id, key, value)
    else:
        client.update_run(id, status="RUNNING")
        steps = [metric.step for metric in client.get_metric_history(id, "seconds")]
        sent = max(steps, default=-1)

    def log(round: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, round) for name, value in values.items()]
        # A request may have 1000 metrics.
        for start in range(0, len(metrics), 1000):
            client.log_batch(id, metrics=metrics[start : start + 1000])

    def close(status: str) -> None:
        client.set_terminated(id, {"done": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))

    return Tracker(id, sent, log, close)


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


class Tracking(Observer):
    """Sends a run's curves to a tracker in a thread, for which only the end of the run waits."""

    def __init__(self, name: str, job: Job) -> None:
        """Raise `InputError`, with the command that helps, if the package is not installed."""
        package = importlib.util.find_spec(name)
        # A folder of this name, such as W&B makes, is found as well, but it has no origin.
        if package is None or package.origin is None:
            raise InputError(
                f"track: {name} is not installed here, where the run is driven: "
                f"pip install 'rayfed-distill[{name}]'"
            )
        self._name, self._job = name, job
        # The numbers of rounds that are recorded. None says that no more will come.
        self._news: SimpleQueue[int | None] = SimpleQueue()
        self._follower: Future[None] | None = None

    def round(self, round: Round) -> None:
        self._send(round.round)

    def ended(self, outcome: Outcome) -> None:
        if self._follower is None and outcome.error is None:
            # No round was left to play: send what was missed before.
            self._send(read_summary(folder_of(self._job)).get("rounds", 0))
        self._news.put(None)
        if self._follower is not None:
            wait([self._follower], PATIENCE)
            if not self._follower.done():
                reason = f"it did not answer within {PATIENCE:g} seconds after the last round"
                _give_up(self._name, self._job, reason)

    def _send(self, number: int) -> None:
        """Tell the thread that a round is recorded, and start the thread if it is the first."""
        # So a run that is refused before its first round is at no tracker.
        if self._follower is None:
            self._follower = aside(_follow, self._name, self._job, self._news)
        self._news.put(number)


def _follow(name: str, job: Job, news: SimpleQueue[int | None]) -> None:
    """Send a tracker what the folder has and the tracker has not.

    `<tracker>/run.json` has the run's id.
    """
    path = folder_of(job)
    note = path / name / "run.json"
    try:
        tracker = TRACKERS[name](job, path, read_json(note).get("id"))
        try:
            write_text(note, json.dumps({"id": tracker.id}) + "\n")
            sent = tracker.sent
            for number in iter(news.get, None):
                for round, values in curves(path, job.train.eval_every, sent, number):
                    tracker.log(round, values)
                    sent = round
        finally:
            # The tracker keeps what it has.
            tracker.close(read_summary(path).get("status", ""))
    except BaseException as error:
        # A library may even exit, so every exception is caught.
        _give_up(name, job, cut(f"{type(error).__name__}: {error}", 1000))


def _give_up(name: str, job: Job, reason: str) -> None:
    """Warn that a tracker gets no more, and say how to send the rest."""
    log.warning(
        "track: %s gets no more of %s (%s); the run goes on without; `rayfed resume %s` sends what "
        "is missing",
        name,
        job.name,
        reason,
        folder_of(job),
    )


def curves(
    path: Path, eval_every: int, after: int = -1, end: float = float("inf")
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the rounds of a run after a round, up to `end`, each with its numbers by name.

    These are all numbers that the tables have of a round. A column of `rounds.parquet` has its
    name. Others are `notes/<name>`; `class/<number> <name>` for the accuracy of a class, as two
    classes may have one plain name; and `forgetting.<definition>`, of which `peak` is the table's
    forgetting.
    """
    rounds = [row for row in read_table(path, "rounds", after).to_pylist() if row["round"] <= end]
    if not rounds:
        return
    evaluated = _evaluated(path, eval_every, after)
    for row in rounds:
        round = row["round"]
        values = {}
        for name, value in row.items():
            if name not in ("round", "notes", "forgetting"):
                values[name] = value
        for name, value in row["notes"]:
            values[f"notes/{plain_name(name)}"] = value
        values |= evaluated[round]
        known = {name: float(value) for name, value in values.items() if value is not None}
        yield round, known


def _evaluated(path: Path, eval_every: int, after: int) -> dict[int, dict[str, float]]:
    """Return the accuracies of classes and the forgetting by round; a round may have none."""
    evaluated: dict[int, dict[str, float]] = defaultdict(dict)
    classes = classes_of(path)
    names = [f"class/{number} {plain_name(name)}" for number, name in enumerate(classes.names)]
    for round, accuracies in zip(classes.rounds.tolist(), classes.accuracy.tolist(), strict=True):
        if round > after:
            evaluated[round] = dict(zip(names, accuracies, strict=True))
    clients = client_accuracies(confusions(path, classes.names, after), len(classes.names))
    series = by_round(classes.rounds, classes.accuracy, classes.seen, eval_every, clients, after)
    for name, (rounds, values) in series.items():
        for round, value in zip(rounds.tolist(), values.tolist(), strict=True):
            evaluated[round][f"forgetting.{name}"] = value
    return evaluated


def plain_name(name: str) -> str:
    """Return a name that every tracker takes.

    It has at most 200 letters, digits, spaces, and . - _.

    >>> plain_name("<b>"), plain_name("été 2")
    ('_b_', 'été 2')
    """
    return re.sub(r"[^\w .-]", "_", name)[:200].strip()


def config(job: Job) -> dict[str, Any]:
    """Return every key of a job, dotted, with its value: a number or text."""
    # This imports torch, which takes seconds.
    from rayfed.methods.registry import describe

    values = flat(job.table())
    values["method"] = describe(job.method)
    for key, value in values.items():
        if not isinstance(value, bool | int | float):
            values[key] = str(value)
    return values
