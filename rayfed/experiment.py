"""From a job to its results: the one function behind the command and `rayfed.run`."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import torch

from rayfed import rounds as engine
from rayfed.data.federation import Federation, open_federation
from rayfed.job import Job, read_job
from rayfed.local import Site
from rayfed.methods.part import Method, Parts, Switch
from rayfed.models import build_model
from rayfed.record import Record, folder_of, logging_to_file, read_table, refuse_overwriting
from rayfed.rounds import Round, Workers
from rayfed.runtime.here import Here
from rayfed.seeds import Purpose, seed_of
from rayfed.values import InputError
from rayfed.weights import Weights, state_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Result:
    """What a run leaves."""

    path: Path  # its folder
    rounds: pa.Table  # one row a round, round 0 first
    weights: Weights  # the last global model's

    @property
    def clients(self) -> pa.Table:
        """One row for each client and round."""
        return read_table(self.path, "clients")

    @property
    def classes(self) -> pa.Table:
        """One row for each class and round."""
        return read_table(self.path, "classes")


class Display(Protocol):
    """Who follows a run while it goes on."""

    def start(self, job: Job, site: Site) -> None:
        """All is checked; workers are about to be started."""

    def client(self, done: int, total: int) -> None:
        """A client of the round has trained."""

    def round(self, round: Round) -> None:
        """A round is finished, and recorded."""


class Silent:
    """Nobody."""

    def start(self, job: Job, site: Site) -> None: ...

    def client(self, done: int, total: int) -> None: ...

    def round(self, round: Round) -> None: ...


def run(
    job: str | Path | Mapping[str, Any] | Job,
    overrides: Mapping[str, Any] | None = None,
    *,
    method: Method | None = None,
    force: bool = False,
    display: Display | None = None,
) -> Result:
    """Run a job to its end and return its results.

    `job` is a TOML file, a table, or a `Job`; `overrides` replace single values: `{"train.num_rounds": 2}`; `method`,
    made with `compose`, replaces the job's. Everything is checked before anything is started or written; raises
    `InputError` where something the user gave is wrong. Results of an earlier run are replaced only with `force`.

    Nothing is printed, unless a `display` does; `rayfed.display.follow` makes the one that the command uses.
    """
    display = display or Silent()
    job = job if isinstance(job, Job) else read_job(job, overrides)
    job = replace(job, method=method) if method is not None else job
    path = folder_of(job)
    refuse_overwriting(path, force)
    site = prepare(job)
    weights = state_of(site.model)
    display.start(job, site)
    with ExitStack() as stack:
        begin_log = stack.enter_context(logging_to_file())
        stack.enter_context(_threads(job.ray.threads))
        workers = stack.enter_context(open_workers(job, site, display.client))
        stack.enter_context(_sigterm_as_ctrl_c())  # after Ray has started: it sets a handler of its own
        record = Record(job, site.federation, force=force)
        begin_log(path)
        stack.callback(_report, path)  # however the run ends
        last = None
        try:
            for last in _play(site, weights, workers):
                record.add(last)
                display.round(last)
        except BaseException as error:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            record.finish(status, last.weights if last else None, f"{type(error).__name__}: {error}")
            error.add_note(f"{f'rounds up to {last.round} are' if last else 'no round is'} recorded in {path}")
            raise
        assert last is not None, "there is always a round 0"
        record.finish("done", last.weights)
    return Result(path, read_table(path, "rounds"), last.weights)


def prepare(job: Job) -> Site:
    """Load the data, deal it to the clients, build the model: whatever can be wrong with a job is found here."""
    federation = open_data(job)
    if job.training.clients_per_round > federation.num_clients:
        raise InputError(
            f"train.clients_per_round = {job.training.clients_per_round}: the partition has "
            f"{federation.num_clients} clients"
        )
    model = build_model(
        job.model,
        image_shape=federation.image_shape,
        num_classes=federation.num_classes,
        seed=seed_of(job.seed, Purpose.MODEL),
        **job.model_options,
    )
    for part in all_parts(job.method):
        part.check(model)
    model.to(memory_format=torch.channels_last)  # convolutions on CPUs: a third faster
    return Site(model, federation, job.augment, job.training, job.method, job.seed, torch.device("cpu"))


def open_data(job: Job) -> Federation:
    """The job's data, dealt to its clients, less what the server keeps."""
    kept = max(job.source.auxiliary_per_class, auxiliary_per_class(job.method))
    return open_federation(job.source, job.partition, auxiliary_per_class=kept)


def all_parts(method: Method) -> Parts:
    """Every part that a method has at any time."""
    if isinstance(method, Switch):
        return all_parts(method.before) + all_parts(method.after)
    return method if isinstance(method, tuple) else ()


def auxiliary_per_class(method: Method) -> int:
    """How many samples of each class the server keeps for itself: as many as the neediest part asks for."""
    return max((part.auxiliary_per_class for part in all_parts(method)), default=0)


@contextmanager
def open_workers(job: Job, site: Site, progress: Callable[[int, int], None]) -> Iterator[Workers]:
    """Those who do the job's work, for as long as it lasts."""
    if job.ray.mode == "off":
        yield Here(site, progress, gpu=job.ray.num_gpus > 0)
        return
    from rayfed.runtime.session import workers  # Ray takes a second to import; without it nobody should wait

    with workers(job.ray, job.name, site, progress) as pool:
        yield pool


def _play(site: Site, weights: Weights, workers: Workers) -> Iterator[Round]:
    first = engine.start(site, weights, workers)
    yield first
    yield from engine.rounds(site, first, workers)


def _report(path: Path) -> None:
    """Make the run's page. A run is not lost by a page that cannot be made."""
    try:
        from rayfed.report.page import write_report  # brings matplotlib, which nothing before this needs

        write_report(path)
    except Exception as error:
        log.warning("no page was made of the run; `rayfed report %s` tries again: %r", path, error)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Take the signal with which schedulers stop a job as Ctrl-C: what is finished is kept, and said."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def stop(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many threads, then with as many as before: their number can change the last bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
