"""Run, resume and replay jobs: from a job to its results."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from rayfed.folder.places import FORCE, Folders, folder_of, is_begun, refuse_other_paths
from rayfed.folder.provenance import refuse_another_partition, refuse_edited
from rayfed.folder.recorder import Recorder
from rayfed.folder.tables import read_table, write_own
from rayfed.job import Job, read_job, read_toml
from rayfed.methods.part import Method, trains
from rayfed.rounds import engine
from rayfed.rounds.choosing import cohort_of, looks_back
from rayfed.rounds.executor import Executor
from rayfed.rounds.observer import Observer, Run, observing
from rayfed.rounds.own import OwnRow, Tuning, own_rows
from rayfed.rounds.round import ClientRow, Round
from rayfed.rounds.setup import Setup, open_setup
from rayfed.runtime.executors import on_ray_or_here, open_executor
from rayfed.runtime.signals import stopping
from rayfed.tensors.weights import Weights, whole

# How many runs a message names.
RUNS_NAMED = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """How a job is run. No option except `other_bits` can change a number of the results."""

    # Results of an earlier run are replaced.
    force: bool = False
    # Hardware of several kinds is allowed, and code or a partition that has changed.
    other_bits: bool = False
    # If the job says so, the work is done on Ray, otherwise in this process.
    on_ray: bool = True
    # Returns the data if they are read already.
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
        # This waits for a lock, and checkpoints may come and go meanwhile: so they are read later.
        folders.refuse_unwritable()
        saved = _newest(folders) if resume else None
        # A run of which only the checkpoints are left can be continued too.
        if resume and (is_begun(job) or saved):
            if saved is None:
                refuse_other_paths(job)
            return _train(job, saved, observers, replace(options, force=True))
        folders.refuse_overwriting(options.force)
        return _train(job, None, observers, options)


def resume(
    job: Job, saved: Checkpoint, observers: Sequence[Observer], options: RunOptions
) -> Trained:
    """Continue a run that `find` has found.

    Raises `InputError` if the job has fewer rounds than the run.
    """
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
    """Train a client of a round again in this process, as the run did.

    Use it to see a client's work, or why it failed. `client` is a client's number, as in
    `clients.parquet`, or as text its number or its name in the data. The rounds since the newest
    older checkpoint are played again.

    Returns the client's row, and the training loss that the run recorded, if there is one. Raises
    the client's own exception. Raises `InputError` if the client was not in the round, or if a text
    is the name of one client and the number of another.

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
        refuse_absent_round(folders.path, round)
        refuse_another_partition(folders.path, setup, round)
        if isinstance(client, str):
            names, count = setup.federation.client_names, setup.federation.num_clients
            client = number_of(client, names, count, "replay")
        # A rule that looks at earlier rounds is asked when they have been played again.
        if not looks_back(setup):
            cohort_of(setup, round).refuse_absent(client, round)
        row = _train_again(setup, folders, round, client)
    losses = {}
    for recorded in recorded_rows(folders.path, "clients"):
        losses[recorded["round"], recorded["client"]] = recorded["train_loss"]
    return row, losses.get((round, client))


def refuse_absent_round(path: Path, round: int) -> None:
    """Raise `InputError` if the run in a folder has not come to a round."""
    if round < 1:
        raise InputError(f"round {round}: the first round is 1")
    last_recorded = max((row["round"] for row in recorded_rows(path, "rounds")), default=0)
    # The round after the last recorded one may have failed, and can be replayed too.
    if round > last_recorded + 1:
        raise InputError(f"round {round}: the run has {last_recorded} finished rounds")


def _train_again(setup: Setup, folders: Folders, round: int, client: int) -> ClientRow:
    """Play the rounds since the newest older checkpoint, and train one client of the round."""
    with open_executor(setup, on_ray=False) as executor:
        previous = round_before(setup, folders, round, executor)
        opening = open_again(setup, previous, executor)
        opening.cohort.refuse_absent(client, round)
        tasks = [(client,)]
        replies = engine.begin_training(
            setup, executor, opening.broadcast, tasks, previous.memories
        )
        (reply,) = next(replies).clients
    return reply.row


def round_before(setup: Setup, folders: Folders, round: int, executor: Executor) -> Round:
    """Return the round before a round, not evaluated.

    The rounds since the newest older checkpoint are played again. Raises `InputError` if that
    checkpoint is of another job, or of other data.
    """
    saved = newest(folders.checkpoints, before=round)
    if saved:
        saved.refuse_another(setup)
        previous = saved.restore(setup, executor)
    else:
        previous = engine.initial(setup)
    if previous.round < round - 1:
        log.info("playing again what follows round %d, up to round %d", previous.round, round - 1)
    while previous.round < round - 1:
        # No later round depends on an evaluation.
        opening, replies = engine.begin_round(setup, executor, previous)
        previous = engine.finish_round(setup, executor, previous, opening, replies)
    return previous


def open_again(setup: Setup, previous: Round, executor: Executor) -> engine.Opening:
    """Open the round after `previous`. Raises `InputError` if no client trains in it."""
    opening = engine.open_round(setup, previous, executor)
    if not trains(opening.parts):
        raise InputError(
            f"round {previous.round + 1}: no client trained in it, as its method works on the "
            "server alone"
        )
    return opening


def own_models(run: str | Path, tuning: Tuning | None = None) -> list[OwnRow]:
    """Measure each client's own model after a run's newest checkpoint, in this process.

    The rows are written to `own.parquet` too. Raises `InputError` if there is no checkpoint, or if
    the job's data have changed.

    >>> [row.client for row in own_models("runs/quickstart")][:3]  # doctest: +SKIP
    [0, 1, 2]
    """
    with alone(f"the measuring of '{run}'"):
        job, saved = find(run, None, None)
        setup = open_setup(job)
        saved.refuse_another(setup)
        with open_executor(setup, on_ray=False) as executor:
            rows = list(own_rows(setup, saved.restore(setup, executor), executor, tuning))
        write_own(folder_of(job), rows)
    return rows


def recorded_rows(path: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of a table that a run has recorded in its folder."""
    try:
        return read_table(path, name).to_pylist()
    except ValueError as error:
        # Arrow raises it for a damaged file, and Python for a text that is not UTF-8.
        again = "`rayfed resume` writes them again from the checkpoint"
        raise InputError(
            f"the recorded {name} in {path} cannot be read ({error}); {again}"
        ) from None


def _train(
    job: Job, saved: Checkpoint | None, observers: Sequence[Observer], options: RunOptions
) -> Trained:
    """Play a job's remaining rounds after a checkpoint, or all rounds, and record each.

    However the run ends, its folder is complete, and Ray has ended before the observers hear of it.
    """
    Folders.of(job).refuse_unwritable()
    path = folder_of(job)
    leaves_work = saved is None or saved.leaves_work(job)
    on_ray = options.on_ray and job.ray.mode == "on" and leaves_work

    with logging_to_file() as begin_log, observing(observers) as everyone:
        with stopping("stopping"):
            setup = _checked_setup(job, saved, options.read)
            everyone.started(Run(setup, path, resumed=saved is not None))
        with (
            on_ray_or_here(setup, on_ray=on_ray) as setup,
            open_executor(
                setup, everyone.client, on_ray=on_ray, other_bits=options.other_bits
            ) as executor,
            # The recorder ends first: its last checkpoint needs the memories of the executor.
            Recorder(
                setup, executor, saved, force=options.force, other_bits=options.other_bits
            ) as recorder,
        ):
            begin_log(path)
            newest_round = recorder.restore()
            everyone.restored(newest_round)
            for round in engine.rounds(setup, executor, newest_round, recorder.early_end):
                # The recorder is first, and its failure ends the run: the others show what is
                # recorded.
                recorder.round(round)
                executor.between_rounds(round)
                everyone.round(round)
                newest_round = round
    assert newest_round is not None, "there is always a round 0"
    return Trained(path, whole(setup.model, newest_round.evaluated))


def _checked_setup(job: Job, saved: Checkpoint | None, read: Read | None) -> Setup:
    """Return the setup of a job. Raises `InputError` if the checkpoint is of other data."""
    setup = open_setup(job, read)
    refuse_edited(job)
    if saved is not None:
        saved.refuse_another(setup)
    return setup


def find(
    run: str | Path, overrides: Mapping[str, Any] | None, method: Method | None
) -> tuple[Job, Checkpoint]:
    """Return the job of a run, and its newest complete checkpoint.

    `run` is a run's folder, or a folder of checkpoints, which may be a URI. Raises `InputError` if
    there is none, or if `overrides` change the run's name.
    """
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
    if saved is None:
        raise _no_run(run)
    return read(saved.manifest["job"], overrides, method), saved


def _no_run(run: str | Path) -> InputError:
    """Make the error for a place that holds neither a run nor checkpoints."""
    if "://" not in str(run) and not Path(run).expanduser().exists():
        return InputError(f"'{run}': there is no such folder{near_run(Path(run))}")
    names = sorted(str(file.parent) for file in Path(run).glob("*/job.toml"))
    runs = f"; runs in it: {', '.join(names[:RUNS_NAMED])}" if names else ""
    return InputError(f"'{run}' is neither the folder of a run nor a folder of checkpoints{runs}")


def _newest(folders: Folders) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, or None if it has no checkpoint.

    Raises `InputError`, which says what to do, if all of them are damaged.
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
    """Return the job of the run in a folder; None if there is no run.

    A folder that was moved gives a job with the folder's new name and place. Raises `InputError` if
    the job file is damaged.
    """
    path = Path(os.path.abspath(Path(run).expanduser()))
    if "://" in str(run) or not (path / "job.toml").is_file():
        return None
    try:
        tables = read_toml(path / "job.toml")
    except InputError as error:
        remedy = "put it back, or continue from the checkpoints: rayfed run YOUR.toml --resume"
        raise InputError(f"{error}; {remedy}") from None
    job = read(tables, overrides, method)
    gives_output = any(key.startswith("output.") for key in overrides or {})
    if folder_of(job) != path and not gives_output:
        # The folder was moved, or the process works in another folder than the run did.
        steps = Path(job.name).parts
        ends_with_name = path.parts[-len(steps) :] == steps
        name = job.name if ends_with_name else path.name
        place = path.parents[len(Path(name).parts) - 1]
        job = replace(job, name=name, output=replace(job.output, path=str(place)))
    return job


def read(
    job: Mapping[str, Any] | Job, overrides: Mapping[str, Any] | None, method: Method | None
) -> Job:
    """Return the job that tables describe, with overrides.

    A `method` made in Python replaces the tables' method, which may not be importable. Raises
    `InputError` if a method is given here and in `overrides`.
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
