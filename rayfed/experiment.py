"""From a job to its results: the one function behind the command and `rayfed.run`."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import torch

from rayfed import rounds as engine
from rayfed.checkpoint import Checkpoints, Saved, newest, refuse_another
from rayfed.data.federation import Federation, open_federation
from rayfed.job import Job, read_job
from rayfed.local import ClientFailed, Site, refuse_batches_of_one
from rayfed.methods.part import Method, Parts, Switch
from rayfed.models import build_model
from rayfed.package import is_relative, places_of
from rayfed.provenance import hash_of
from rayfed.record import (
    Record,
    Unwritable,
    checkpoints_of,
    folder_of,
    is_begun,
    logging_to_file,
    read_table,
    refuse_overwriting,
)
from rayfed.rounds import Round, Workers
from rayfed.runtime.here import Here
from rayfed.seeds import Purpose, seed_of
from rayfed.storage import Folder
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
    resume: bool = False,
    display: Display | None = None,
) -> Result:
    """Run a job to its end and return its results.

    `job` is a TOML file, a table, or a `Job`; `overrides` replace single values: `{"train.num_rounds": 2}`; `method`,
    made with `compose`, replaces the job's. Everything is checked before anything is started or written; raises
    `InputError` where something the user gave is wrong. Results of an earlier run are replaced only with `force`; with
    `resume` the job is gone on with if it was begun, so that the same call may be made again and again.

    Nothing is printed, unless a `display` does; `rayfed.display.follow` makes the one that the command uses.
    """
    job = job if isinstance(job, Job) else read_job(job, overrides)
    job = _with(job, method)
    if resume and is_begun(job):
        saved = newest(checkpoints_of(job))
        return _train(job, display or Silent(), saved, force=True)
    refuse_overwriting(job, force)
    return _train(job, display or Silent(), force=force)


def resume(
    run: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    method: Method | None = None,
    display: Display | None = None,
) -> Result:
    """Go on with a run from its newest checkpoint, up to `train.num_rounds`, to the bits of a run that never stopped.

    `run` is its folder, or the folder or URI of its checkpoints. `overrides` may change where the work is done
    (`ray.*`), where results go (`output.*`), and how many rounds there are; a `method` that was made in Python and
    cannot be named in a job file is given again. Raises `InputError` where there is nothing to go on from.
    """
    job, saved = find(run, overrides, method)
    return _train(job, display or Silent(), saved)


def find(
    run: str | Path, overrides: Mapping[str, Any] | None = None, method: Method | None = None
) -> tuple[Job, Saved]:
    """The job of a run, and its newest checkpoint that is whole."""
    if (job := job_of(run, overrides, method)) is not None:
        saved = newest(checkpoints_of(job))
        if saved is None:
            begin = f"begin anew: rayfed run {folder_of(job) / 'job.toml'} --force"
            raise InputError(f"'{run}' holds no checkpoint to go on from; {begin}")
        return job, saved
    saved = newest(Folder(str(run)))
    if saved is None:
        raise InputError(f"'{run}' is neither the folder of a run nor one of checkpoints")
    return _with(read_job(saved.job, overrides), method), saved


def job_of(run: str | Path, overrides: Mapping[str, Any] | None = None, method: Method | None = None) -> Job | None:
    """The job of the run in a folder; None where there is none."""
    path = Path(run).expanduser().absolute()
    if "://" in str(run) or not (path / "job.toml").is_file():
        return None
    job = _with(read_job(path / "job.toml", overrides), method)
    if folder_of(job) != path and not any(key.startswith("output.") for key in overrides or {}):
        job = replace(job, name=path.name, output=replace(job.output, path=str(path.parent)))  # it was moved
    return job


def _with(job: Job, method: Method | None) -> Job:
    return replace(job, method=method) if method is not None else job


def _train(job: Job, display: Display, saved: Saved | None = None, *, force: bool = False) -> Result:
    """The rounds of a job that are still to be played, recorded as they finish."""
    site = prepare(job)
    if saved is not None:
        refuse_another(saved, job, hash_of(site.federation))
    path = folder_of(job)
    display.start(job, site)
    with ExitStack() as stack:
        begin_log = stack.enter_context(logging_to_file())
        stack.enter_context(threads(job.ray.threads))
        over = saved is not None and saved.round >= job.training.num_rounds  # no work is left to start workers for
        workers = stack.enter_context(nullcontext(Here(site)) if over else open_workers(job, site, display.client))
        stack.enter_context(_sigterm_as_ctrl_c())  # after Ray has started: it sets a handler of its own
        record = stack.enter_context(closing(Record(job, site.federation, force=force, saved=saved)))
        begin_log(path)
        stack.callback(_report, path)  # however the run ends
        checkpoints = Checkpoints(checkpoints_of(job), job, hash_of(site.federation), saved)
        last = saved.restore(site, workers) if saved is not None else None
        if last is not None:
            log.info("it had reached round %d" if over else "going on after round %d", last.round)
        try:
            for round in _rounds(site, last, workers):
                last = round
                record.add(last)
                checkpoints.follow(last)
                display.round(last)
                in_danger = workers.finished(last)
                if last.round and (in_danger or last.round % job.output.every == 0):
                    _checkpoint(checkpoints, last, workers, record)
        except BaseException as error:
            with suppress(Unwritable):  # which is what has happened, then
                if last is not None:
                    record.add(last)  # a signal may have come before it was written
                    checkpoints.follow(last)
                    _checkpoint(checkpoints, last, workers, record)
            with suppress(Unwritable):
                status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                record.finish(status, f"{type(error).__name__}: {error}")
            for note in _what_now(error, path, record.round, checkpoints.round):
                error.add_note(note)
            raise
        assert last is not None, "there is always a round 0"
        _checkpoint(checkpoints, last, workers, record)
        record.finish("done")
    return Result(path, read_table(path, "rounds"), last.weights)


def _what_now(error: BaseException, path: Path, recorded: int | None, saved: int | None) -> Iterator[str]:
    """What to tell somebody whose run has ended early: what is there, how to go on, how to look into it."""
    yield f"{'no round is' if recorded is None else f'rounds up to {recorded} are'} recorded in {path}"
    if saved is not None:
        yield f"to go on after round {saved}: rayfed resume {path}"
    if isinstance(error, ClientFailed) and error.client is not None:
        yield f"to see it again, in this process: rayfed replay {path} --round {error.round} --client {error.client}"


def _checkpoint(checkpoints: Checkpoints, round: Round, workers: Workers, record: Record) -> None:
    """Write one. A run is not lost by a checkpoint that cannot be written."""
    try:
        checkpoints.save(round, workers, record.tables())
    except Exception as error:
        there = f"the last is of round {checkpoints.round}" if checkpoints.round is not None else "there is none yet"
        log.warning("no checkpoint of round %d was written (%s); %s", round.round, error, there)


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
    refuse_batches_of_one(job.training, federation, model)
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
        yield Here(site, progress, gpu=job.ray.num_gpus != 0)
        return
    if job.ray.data == "storage":
        for key, path in places_of(job).items():
            if key.startswith("data.") and is_relative(path):
                raise InputError(f"{key} = '{path}': with ray.data = 'storage' every node reads it: give a whole path")
    from rayfed.runtime.session import workers  # Ray takes a second to import; without it nobody should wait

    with workers(job.ray, job.name, site, progress, load=partial(prepare, job)) as pool:
        yield pool


def _rounds(site: Site, last: Round | None, workers: Workers) -> Iterator[Round]:
    """The rounds after `last`; all of them, the initial model's first, where there is none."""
    if last is None:
        yield (last := engine.start(site, state_of(site.model), workers))
    yield from engine.rounds(site, last, workers)


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
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads, then with as many as before: their number can change the last bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
