"""Trackers: a run's curves in TensorBoard, Weights & Biases and MLflow.

A tracker follows the tables in the run's folder: when a round is recorded there, it is sent the rows that it does not
have yet. So its curves are those of the tables, and a run that is resumed also sends what was missed before. Each
tracker has a thread of its own, and only the end of the run waits for it, for a limited time: a tracker that fails or
hangs gets no more, and the run goes on.
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
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from rayfed.base.errors import InputError, cut
from rayfed.base.files import write_text
from rayfed.folder.places import folder_of
from rayfed.folder.summary import read_json, read_summary
from rayfed.folder.tables import read_table
from rayfed.job import Job, flat

PATIENCE = 30.0  # seconds that the end of a run waits for its trackers

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One run at a tracker. It is made in a thread of its own, and any method may raise."""

    sent: int  # the last round that the tracker has; -1 for none

    @property
    def id(self) -> str | None:
        """By which the tracker knows the run when it is resumed."""

    def __init__(self, job: Job, path: Path, id: str | None) -> None:
        """`path` is the run's folder."""

    def log(self, round: int, values: dict[str, float]) -> None:
        """Send the numbers of a round."""

    def close(self, status: str) -> None:
        """Send the rest: the run is done, stopped or failed."""


class TensorBoard:
    """Event files in the run's folder. They are written anew when a run is resumed, since no event can be replaced."""

    id: str | None = None
    sent = -1

    def __init__(self, job: Job, path: Path, id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for file in (path / "tensorboard").glob("events.out.*"):
            file.unlink()
        self._writer = SummaryWriter(str(path / "tensorboard"), purge_step=0)  # a TensorBoard that is open forgets, too
        # Not `add_hparams`, which makes another run of them.
        for summary in hparams(config(job), {"test_accuracy": None}):
            self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]

    def log(self, round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round, new_style=True)  # not as doubles, which its page drops
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()


class WandB:
    """A run at Weights & Biases, or with WANDB_MODE=offline in the run's folder.

    Offline files are written anew when a run is resumed, since those of a killed run lack their last block.
    """

    def __init__(self, job: Job, path: Path, id: str | None) -> None:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("nobody is logged in: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        for folder in path.glob(f"wandb/offline-run-*-{id}"):
            shutil.rmtree(folder)
        self._run = wandb.init(
            id=id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "rayfed"),
            group=os.environ.get("WANDB_RUN_GROUP", job.name.rpartition("/")[0] or None),  # of a grid: all seeds
            name=job.name,
            dir=path,
            config=config(job),
            reinit="create_new",  # leaves a run of the user's own alone
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id: str | None = self._run.id
        self.sent = self._run.starting_step - 1

    def log(self, round: int, values: dict[str, float]) -> None:
        self._run.log(values, step=round, commit=True)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "done" else 1)


class MLflow:
    """A run on the tracking server that MLFLOW_TRACKING_URI names."""

    def __init__(self, job: Job, path: Path, id: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        self.sent = -1
        if id is not None:
            self.id = id
            self._client.update_run(id, status="RUNNING")
            every_round = self._client.get_metric_history(id, "seconds")
            self.sent = max((metric.step for metric in every_round), default=-1)
            return
        self.id = self._client.create_run(self._experiment(), run_name=job.name).info.run_id
        params = [Param(key, str(value)) for key, value in config(job).items()]
        for start in range(0, len(params), 100):  # as many as a request may have
            self._client.log_batch(self.id, params=params[start : start + 100])

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rayfed")
        try:
            return self._client.create_experiment(name)
        except MlflowException:  # it is there already: another run may have made it just now
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                raise
            return experiment.experiment_id

    def log(self, round: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, round) for name, value in values.items()]
        for start in range(0, len(metrics), 1000):  # as many as a request may have
            self._client.log_batch(self.id, metrics=metrics[start : start + 1000])

    def close(self, status: str) -> None:
        self._client.set_terminated(self.id, {"done": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


@contextmanager
def tracking(job: Job) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told the number of each round that is recorded in the job's folder.

    Raises `InputError` where a tracker cannot work on this machine.
    """
    refuse_missing(job)
    followers = [Follower(name, job) for name in dict.fromkeys(job.track)]

    def recorded(round: int) -> None:
        for follower in followers:
            follower.recorded(round)

    try:
        yield recorded
        for follower in followers:
            if not follower.is_begun:  # no round was left to play: send what was missed
                follower.recorded(read_summary(folder_of(job)).get("rounds", 0))
    finally:
        for follower in followers:
            follower.recorded(None)
        deadline = time.monotonic() + PATIENCE
        for follower in followers:
            follower.wait_until(deadline)


def refuse_missing(job: Job) -> None:
    """Raises `InputError`, with the command that helps, where a package that a tracker needs is not installed."""
    for name in job.track:
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # none, or just a folder of this name here, such as W&B makes
            raise InputError(
                f"track: {name} is not installed here, where the run is driven: pip install 'rayfed-distill[{name}]'"
            )
    if "mlflow" in job.track and importlib.util.find_spec("sqlalchemy") is None:
        from mlflow import get_tracking_uri

        if get_tracking_uri().startswith(("sqlite", "postgresql", "mysql", "mssql")):
            raise InputError(
                "track: mlflow would write to a database, and that needs sqlalchemy, which is not installed: "
                "set MLFLOW_TRACKING_URI to your tracking server, or pip install mlflow"
            )


class Follower:
    """Sends one tracker what the run's folder has and it has not. `<tracker>/run.json` there has its id of the run."""

    def __init__(self, tracker: str, job: Job) -> None:
        self._news: SimpleQueue[int | None] = SimpleQueue()  # rounds that are recorded; None: there are no more
        self._tracker, self._job, self._path = tracker, job, folder_of(job)
        self._given_up = False
        # A daemon does not hold up the end of the process.
        self._thread = Thread(target=self._follow, name=f"rayfed-{tracker}", daemon=True)

    @property
    def is_begun(self) -> bool:
        return self._thread.ident is not None

    def recorded(self, round: int | None) -> None:
        """A round is recorded; None: there are no more."""
        if round is not None and not self.is_begun:
            self._thread.start()
        self._news.put(round)

    def wait_until(self, deadline: float) -> None:
        if not self.is_begun:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"it did not answer within {PATIENCE:g} seconds after the last round")

    def _follow(self) -> None:
        note = self._path / self._tracker / "run.json"
        try:
            tracker = TRACKERS[self._tracker](self._job, self._path, read_json(note).get("id"))
            try:
                write_text(note, json.dumps({"id": tracker.id}) + "\n")
                self._send(tracker)
            except BaseException as error:
                self._give_up(cut(f"{type(error).__name__}: {error}", 1000))
            tracker.close(read_summary(self._path).get("status", ""))  # it keeps what it has
        except BaseException as error:  # a library may even exit
            self._give_up(cut(f"{type(error).__name__}: {error}", 1000))

    def _send(self, tracker: Tracker) -> None:
        sent = tracker.sent
        while (number := self._news.get()) is not None:
            for round, values in curves(self._path, sent, number):
                tracker.log(round, values)
                sent = round

    def _give_up(self, why: str) -> None:
        """Say once that the tracker gets no more."""
        if not self._given_up:
            self._given_up = True
            log.warning(
                "track: %s gets no more of %s (%s); the run goes on without; `rayfed resume %s` sends what is missing",
                self._tracker,
                self._job.name,
                why,
                self._path,
            )


def curves(path: Path, after: int = -1, last: float = float("inf")) -> Iterator[tuple[int, dict[str, float]]]:
    """The rounds of a run after a round, up to the `last`: every number that its tables have of a round, by name.

    A column of `rounds.parquet` by its own name, `notes/<name>`, and `class/<name>` for the accuracy of a class.
    """
    rounds = [row for row in read_table(path, "rounds", after).to_pylist() if row["round"] <= last]
    if not rounds:
        return
    accuracies: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for row in read_table(path, "classes", after).to_pylist():
        accuracies[row["round"]].append((row["class"], row["accuracy"]))
    for row in rounds:
        values = {name: value for name, value in row.items() if name not in ("round", "notes")}
        values |= {f"notes/{name}": value for name, value in plain_names(row["notes"] or [])}
        values |= {f"class/{name}": value for name, value in plain_names(accuracies[row["round"]])}
        yield row["round"], {name: float(value) for name, value in values.items() if value is not None}


def plain_names(named: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The values under names that every tracker takes: of 200 letters, digits, spaces, and . - _ at most.

    >>> list(plain_names([("<b>", 1), ("été 2", 2)])), list(plain_names([("a/b", 1), ("a:b", 2)]))
    ([('_b_', 1), ('été 2', 2)], [('0 a_b', 1), ('1 a_b', 2)])
    """
    names = [re.sub(r"[^\w .-]", "_", name)[:200].strip(". ") or "_" for name, _ in named]
    twins = len(set(names)) < len(names)  # then all have their number in front
    for number, (name, (_, value)) in enumerate(zip(names, named, strict=True)):
        yield f"{number} {name}" if twins else name, value


def config(job: Job) -> dict[str, Any]:
    """Every key of a job, dotted, and its value: a number, or text."""
    from rayfed.methods.registry import describe  # brings torch

    values = {**flat(job.table()), "method": describe(job.method)}
    return {key: value if isinstance(value, bool | int | float) else str(value) for key, value in values.items()}
