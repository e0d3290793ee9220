"""From a job to its results: run, resume, replay."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rayfed.base.errors import InputError
from rayfed.base.isolation import alone
from rayfed.base.storage import Folder
from rayfed.data.federation import Read
from rayfed.data.naming import number_of
from rayfed.folder.checkpoint import Checkpoint, newest
from rayfed.folder.found import near_run
from rayfed.folder.log import logging_to_file
from rayfed.folder.places import Folders, folder_of, is_begun, refuse_other_paths
from rayfed.folder.provenance import refuse_another_partition, refuse_edited
from rayfed.folder.recorder import Recorder
from rayfed.folder.tables import read_table, write_own
from rayfed.job import Job, read_job, read_toml
from rayfed.methods.part import Method, trains
from rayfed.rounds import engine
from rayfed.rounds.observer import Observer, Run, observing
from rayfed.rounds.own import OwnRow, Tuning, own_rows
from rayfed.rounds.round import ClientRow
from rayfed.rounds.setup import Setup, open_setup
from rayfed.runtime.executors import open_executor, opened
from rayfed.tensors.weights import Weights, whole

# How many runs a message names.
RUNS_NAMED = 10
FORCE = "--force (in Python force=True)"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """How a job is run. Nothing here changes a number of the results."""

    # Results of an earlier run are replaced.
    force: bool = False
    # Hardware of several kinds is allowed, and code or a partition that has changed.
    other_bits: bool = False
    # The work is done on Ray if the job says so; otherwise in this process.
    on_ray: bool = True
    # Reads the data, if they are at hand already.
    read: Read | None = None


@dataclass(frozen=True, eq=False)
class Trained:
    """What a run has left: its folder, and the weights of the last global model."""

    path: Path
    weights: Weights


def run(
    job: Job, observers: Sequence[Observer], options: RunOptions, *, resume: bool = False
) -> Trained:
    """Begin a job, or with `resume` continue it if it was begun.

    Raises `InputError` if something that the user gave is wrong, before anything is started.
    """
    folders = Folders.of(job)
    with alone(f"the run '{job.name}'"):
        # It waits for a lock, and while it does checkpoints may come and go.
        folders.refuse_unwritable()
        saved = _newest(folders) if resume else None
        # Where only the checkpoints are left, they are enough.
        if resume and (is_begun(job) or saved):
            if saved is None:
                refuse_other_paths(job)
            return _train(job, saved, observers, replace(options, force=True))
        folders.refuse_overwriting(options.force)
        return _train(job, None, observers, options)


def resume(
    job: Job, saved: Checkpoint, observers: Sequence[Observer], options: RunOptions
) -> Trained:
    """Continue a run that `find` has found."""
    if saved.round > job.train.num_rounds:
        raise InputError(
            f"train.num_rounds = {job.train.num_rounds}: "
            f"the run already has {saved.round} rounds; "
            f"give {saved.round + 1} or more to add rounds"
        )
    with alone(f"the run '{job.name}'"):
        return _train(job, saved, observers, options)


def replay(
    run: str | Path, round: int, client: int | str, *, method: Method | None = None
) -> tuple[ClientRow, float | None]:
    """Train a client of a round again, in this process, as the run did: to see its work, or why it
    failed.

    `client` is a client's number, as in `clients.parquet`, or as text its number or its name in the
    data. Plays the rounds since the newest older checkpoint again. Gives the client's row, and the
    training loss that the run recorded, if there is one. Raises the client's own exception, and
    `InputError` where it was not in the round, or where a text is the name of one client and the
    number of another.

    >>> row, recorded = replay("runs/quickstart", round=2, client=7)  # doctest: +SKIP
    >>> row.train_loss == recorded  # doctest: +SKIP
    True
    """
    with alone(f"the replay of '{run}'"):
        job = job_of(run, None, method)
        if job is None:
            raise InputError(f"'{run}' is not the folder of a run")
        folders = Folders.of(job)
        setup = open_setup(job)
        if round < 1:
            raise InputError(f"round {round}: the first round is 1")
        last_recorded = max((row["round"] for row in _rows(folders.path, "rounds")), default=0)
        # The round after the last may have failed.
        if round > last_recorded + 1:
            raise InputError(f"round {round}: the run has {last_recorded} finished rounds")
        refuse_another_partition(folders.path, setup, round)
        if isinstance(client, str):
            names, count = setup.federation.client_names, setup.federation.num_clients
            client = number_of(client, names, count, "replay")
        engine.cohort_of(setup, round).refuse_absent(client, round)
        with open_executor(setup, on_ray=False) as workers:
            saved = newest(folders.checkpoints, before=round)
            if saved:
                saved.refuse_another(setup)
            last = saved.restore(setup, workers) if saved else engine.start(setup, workers)
            while last.round < round - 1:
                last = engine.play(setup, last, workers)
            opening = engine.open_round(setup, last, workers)
            if not trains(opening.parts):
                raise InputError(
                    f"round {round}: no client trained in it, as its method works on the server "
                    "alone"
                )
            tasks = [(client,)]
            replies = engine.train(setup, workers, opening.broadcast, tasks, last.memories)
            (reply,) = next(replies).clients
    losses = {
        (row["round"], row["client"]): row["train_loss"] for row in _rows(folders.path, "clients")
    }
    return reply.row, losses.get((round, client))


def own_models(run: str | Path, tuning: Tuning | None = None) -> list[OwnRow]:
    """Each client's own model after a run's newest checkpoint, measured in this process and kept in
    `own.parquet`.

    Raises `InputError` where there is no checkpoint, or the job's data have changed.

    >>> [row.client for row in own_models("runs/quickstart")][:3]  # doctest: +SKIP
    [0, 1, 2]
    """
    with alone(f"the measuring of '{run}'"):
        job, saved = find(run, None, None)
        setup = open_setup(job)
        saved.refuse_another(setup)
        with open_executor(setup, on_ray=False) as workers:
            rows = list(own_rows(setup, saved.restore(setup, workers), workers, tuning))
        write_own(folder_of(job), rows)
    return rows


def _rows(path: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a table that a run has recorded in its folder."""
    try:
        return read_table(path, name).to_pylist()
    except ValueError as error:
        # Of Arrow, or of a text that is no UTF-8.
        again = "`rayfed resume` writes them again from the checkpoint"
        raise InputError(
            f"the recorded {name} in {path} cannot be read ({error}); {again}"
        ) from None


def _train(
    job: Job, saved: Checkpoint | None, observers: Sequence[Observer], options: RunOptions
) -> Trained:
    """Play a job's remaining rounds after a checkpoint, or all, and record each.

    However the run ends, its folder is complete, Ray has ended, and then the observers hear of it.
    """
    Folders.of(job).refuse_unwritable()
    path = folder_of(job)
    leaves_work = saved is None or saved.leaves_work(job)
    on_ray = options.on_ray and job.ray.mode == "on" and leaves_work
    make_setup = partial(_checked_setup, job, saved, options.read)
    with (
        logging_to_file() as begin_log,
        observing(observers) as everyone,
        opened(
            job,
            make_setup,
            lambda setup: everyone.started(Run(setup, path, resumed=saved is not None)),
            on_ray=on_ray,
        ) as setup,
        open_executor(
            setup, everyone.client, on_ray=on_ray, other_bits=options.other_bits
        ) as executor,
        # Innermost: the last checkpoint needs the executor, which holds the clients' memories.
        Recorder(
            setup, executor, saved, force=options.force, other_bits=options.other_bits
        ) as recorder,
    ):
        begin_log(path)
        last = recorder.restored()
        everyone.restored(last)
        for round in engine.rounds(setup, executor, last, recorder.early_end):
            # First, and its failure ends the run: the others show what is recorded.
            recorder.round(round)
            executor.round(round)
            everyone.round(round)
            last = round
    assert last is not None, "there is always a round 0"
    return Trained(path, whole(setup.model, last.evaluated))


def _checked_setup(job: Job, saved: Checkpoint | None, read: Read | None) -> Setup:
    setup = open_setup(job, read)
    refuse_edited(job)
    if saved is not None:
        saved.refuse_another(setup)
    return setup


def find(
    run: str | Path, overrides: Mapping[str, Any] | None, method: Method | None
) -> tuple[Job, Checkpoint]:
    """The job of a run, and its newest whole checkpoint."""
    if "name" in (overrides or {}):
        raise InputError(
            "name: a run keeps its name; to continue under another name, move its folder first"
        )
    job = job_of(run, overrides, method)
    if job:
        folders = Folders.of(job)
        folders.refuse_unwritable()
        saved = _newest(folders)
        if saved is None:
            raise InputError(
                f"'{run}' holds no checkpoint; begin again: rayfed run {folders.path / 'job.toml'} "
                f"{FORCE}"
            )
        return job, saved
    saved = newest(Folder(str(run)))
    if saved:
        return read(saved.manifest["job"], overrides, method), saved
    if "://" not in str(run) and not Path(run).expanduser().exists():
        raise InputError(f"'{run}': there is no such folder{near_run(Path(run))}")
    names = sorted(str(file.parent) for file in Path(run).glob("*/job.toml"))
    runs = f"; runs in it: {', '.join(names[:RUNS_NAMED])}" if names else ""
    raise InputError(f"'{run}' is neither the folder of a run nor a folder of checkpoints{runs}")


def _newest(folders: Folders) -> Checkpoint | None:
    """The newest checkpoint of a run.

    Raises `InputError`, with what to do, where none of them is whole.
    """
    try:
        return newest(folders.checkpoints)
    except InputError as error:
        file = folders.path / "job.toml"
        if not file.is_file():
            raise
        raise InputError(f"{error}; begin again: rayfed run {file} {FORCE}") from None


def job_of(
    run: str | Path, overrides: Mapping[str, Any] | None, method: Method | None
) -> Job | None:
    """The job of the run in a folder; None where there is none."""
    path = Path(os.path.abspath(Path(run).expanduser()))
    if "://" in str(run) or not (path / "job.toml").is_file():
        return None
    try:
        tables = read_toml(path / "job.toml")
    except InputError as error:
        remedy = "put it back, or continue from the checkpoints: rayfed run YOUR.toml --resume"
        raise InputError(f"{error}; {remedy}") from None
    job = read(tables, overrides, method)
    if folder_of(job) != path and not any(key.startswith("output.") for key in overrides or {}):
        # The folder was moved, or we have.
        kept = path.parts[-len(Path(job.name).parts) :] == Path(job.name).parts
        name = job.name if kept else path.name
        place = path.parents[len(Path(name).parts) - 1]
        job = replace(job, name=name, output=replace(job.output, path=str(place)))
    return job


def read(
    job: Mapping[str, Any] | Job, overrides: Mapping[str, Any] | None, method: Method | None
) -> Job:
    """A job from its tables.

    A `method` made in Python replaces theirs, which may not be importable.
    """
    method_keys = [key for key in overrides or {} if key.partition(".")[0] == "method"]
    if method_keys and method is not None:
        raise InputError(
            f"the method is given twice, as `method` and as '{method_keys[0]}' in `overrides`; "
            "give it once"
        )
    if isinstance(job, Job):
        if method is None and not method_keys:
            method = job.method
        job = job.table()
    if method is None:
        return read_job(job, overrides)
    return replace(read_job({**job, "method": "fedavg"}, overrides), method=method)
