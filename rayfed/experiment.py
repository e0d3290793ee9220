"""From a job to its results: run, resume, replay."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rayfed.base.aside import aside
from rayfed.base.errors import InputError
from rayfed.base.isolation import alone
from rayfed.base.noted import at
from rayfed.base.storage import Folder
from rayfed.data.federation import Read
from rayfed.data.naming import number_of
from rayfed.folder.keeper import Keeper
from rayfed.folder.log import logging_to_file
from rayfed.folder.places import Folders, folder_of, is_begun, refuse_other_paths
from rayfed.folder.provenance import refuse_another_partition, refuse_edited
from rayfed.folder.read import near_run
from rayfed.folder.saved import Saved, newest
from rayfed.folder.tables import read_table, write_own
from rayfed.folder.trackers import tracking
from rayfed.job import Job, read_job, read_toml
from rayfed.methods.part import Method, trains
from rayfed.report.result import Result
from rayfed.rounds import engine
from rayfed.rounds.display import Display
from rayfed.rounds.own import OwnRow, Tuning, own_rows
from rayfed.rounds.round import ClientRow
from rayfed.rounds.site import Site, open_site
from rayfed.runtime.workers import open_workers, opened
from rayfed.screen.display import follow
from rayfed.tensors.weights import whole

RUNS_NAMED = 10  # in a message
FORCE = "--force (in Python force=True)"

log = logging.getLogger(__name__)


def run(
    job: str | Path | Mapping[str, Any] | Job,
    overrides: Mapping[str, Any] | None = None,
    *,
    method: Method | None = None,
    force: bool = False,
    resume: bool = False,
    other_bits: bool = False,
    display: Display | None = None,
    progress: bool = False,
) -> Result:
    """Run a job to its end and return its results.

    `job` is a TOML file, a table, or a `Job`; `overrides` replace single values: `{"train.num_rounds": 2}`; `method`,
    made with `compose`, replaces the job's. Everything is checked before anything is started or written; raises
    `InputError` where the user gave something wrong. Results of an earlier run are replaced only with `force`; with
    `resume` the job continues if it was begun, so that the same call may be made again and again. `other_bits` allows
    hardware of several kinds, as in `resume`.

    Only warnings are printed, unless a `display` prints more. `progress` shows what the command shows: a bar on a
    terminal, a line for each round in a notebook or a file.

    >>> result = run("quickstart", {"train.num_rounds": 2, "ray.mode": "off"})  # doctest: +SKIP
    >>> result.rounds.column("test_accuracy").to_pylist()  # doctest: +SKIP
    [0.094, 0.427, 0.5635]
    """
    if force and resume:
        raise InputError("force begins the run again, and resume continues it: give one of the two")
    job = _read(job if isinstance(job, Job) else read_toml(job), overrides, method)
    with _followed(display, progress) as display:
        return run_checked(job, Way(display, force, other_bits), resume=resume)


@contextmanager
def _followed(display: Display | None, progress: bool) -> Iterator[Display]:
    """The display of a run: the one that is given, or with `progress` that of the command."""
    if progress and display:
        raise InputError(
            "progress shows the command's display, and display is your own: give one of the two"
        )
    with follow() if progress else nullcontext(display or Display()) as shown:
        yield shown


@dataclass(frozen=True)
class Way:
    """How a job is run; nothing of it changes a number of the results."""

    display: Display
    force: bool = False  # results of an earlier run are replaced
    other_bits: bool = False  # hardware of several kinds is allowed
    on_ray: bool = True  # where the job says so; else in this process
    read: Read | None = None  # reads the data, where they are at hand already


def run_checked(job: Job, way: Way, *, resume: bool) -> Result:
    """Begin a checked job, or with `resume` continue it if it was begun."""
    folders = Folders.of(job)
    with alone(f"the run '{job.name}'"):
        folders.refuse_unwritable()  # waits for a lock, and while it does checkpoints may come and go
        saved = _newest(folders) if resume else None
        # Where only the checkpoints are left, they are enough.
        if resume and (is_begun(job) or saved):
            if saved is None:
                refuse_other_paths(job)
            return _train(job, saved, replace(way, force=True))
        folders.refuse_overwriting(way.force)
        return _train(job, None, way)


def resume(
    run: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    method: Method | None = None,
    other_bits: bool = False,
    display: Display | None = None,
    progress: bool = False,
) -> Result:
    """Continue a run from its newest checkpoint, up to `train.num_rounds`, to the bits of a run that never stopped.

    `run` is its folder, or the folder or URI of its checkpoints. `overrides` may change where the work is done
    (`ray.*`), where files lie (such as `data.source`), where results go (`output.*`, `track`), what is measured
    (`measure*`, `data.domain`), how many rounds there are and when they end early (`train.num_rounds`,
    `train.patience`); a `method` made in Python that a job file cannot name is given again. Raises `InputError` where
    nothing is there to continue from, and where the data, the hardware, the partition or the code of the user's own
    modules has changed; `other_bits` allows the last three (noted in `environment.json`).

    >>> resume("runs/quickstart", {"train.num_rounds": 6})  # doctest: +SKIP
    """
    with _followed(display, progress) as display, alone(f"the run in '{run}'"):
        job, saved = _find(run, overrides, method)
        if saved.round > job.train.num_rounds:
            raise InputError(
                f"train.num_rounds = {job.train.num_rounds}: the run already has {saved.round} rounds; "
                f"give {saved.round + 1} or more to add rounds"
            )
        return _train(job, saved, Way(display, other_bits=other_bits))


def replay(
    run: str | Path, round: int, client: int | str, *, method: Method | None = None
) -> tuple[ClientRow, float | None]:
    """Train a client of a round again, in this process, as the run did: to see its work, or why it failed.

    `client` is a client's number, as in `clients.parquet`, or as text its number or its name in the data. Plays the
    rounds since the newest older checkpoint again. Gives the client's row, and the training loss that the run recorded,
    if there is one. Raises the client's own exception, and `InputError` where it was not in the round, or where a text
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
        site = open_site(job)
        if round < 1:
            raise InputError(f"round {round}: the first round is 1")
        last_recorded = max((row["round"] for row in _rows(folders.path, "rounds")), default=0)
        if round > last_recorded + 1:  # the round after the last may have failed
            raise InputError(f"round {round}: the run has {last_recorded} finished rounds")
        refuse_another_partition(folders.path, site, round)
        if isinstance(client, str):
            names, count = site.federation.client_names, site.federation.num_clients
            client = number_of(client, names, count, "replay")
        engine.cohort_of(site, round).refuse_absent(client, round)
        with open_workers(site, on_ray=False) as workers:
            saved = newest(folders.checkpoints, before=round)
            if saved:
                saved.refuse_another(site)
            last = saved.restore(site, workers) if saved else engine.start(site, workers)
            while last.round < round - 1:
                last = engine.play(site, last, workers)
            opening = engine.open_round(site, last, workers)
            if not trains(opening.parts):
                raise InputError(
                    f"round {round}: no client trained in it, as its method works on the server alone"
                )
            (reply,) = next(workers.train(opening.broadcast, [(client,)], last.memories)).clients
    losses = {
        (row["round"], row["client"]): row["train_loss"] for row in _rows(folders.path, "clients")
    }
    return reply.row, losses.get((round, client))


def own_models(run: str | Path, tuning: Tuning | None = None) -> list[OwnRow]:
    """Each client's own model after a run's newest checkpoint, measured in this process and kept in `own.parquet`.

    Raises `InputError` where there is no checkpoint, or the job's data have changed.

    >>> [row.client for row in own_models("runs/quickstart")][:3]  # doctest: +SKIP
    [0, 1, 2]
    """
    with alone(f"the measuring of '{run}'"):
        job, saved = _find(run, None, None)
        site = open_site(job)
        saved.refuse_another(site)
        with open_workers(site, on_ray=False) as workers:
            rows = list(own_rows(site, saved.restore(site, workers), workers, tuning))
        write_own(folder_of(job), rows)
    return rows


def _rows(path: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a table that a run has recorded in its folder."""
    try:
        return read_table(path, name).to_pylist()
    except ValueError as error:  # of Arrow, or of a text that is no UTF-8
        again = "`rayfed resume` writes them again from the checkpoint"
        raise InputError(
            f"the recorded {name} in {path} cannot be read ({error}); {again}"
        ) from None


def _train(job: Job, saved: Saved | None, way: Way) -> Result:
    """Play a job's remaining rounds after a checkpoint, or all, and keep each round when it is finished.

    At the end the run's folder is complete, Ray has ended, and the page is written, however the run ends.
    """
    Folders.of(job).refuse_unwritable()
    on_ray = way.on_ray and job.ray.mode == "on" and (saved is None or saved.leaves_work(job))
    make_site, display = partial(_checked_site, job, saved, way.read), way.display
    with (
        logging_to_file() as begin_log,
        tracking(job) as tell_trackers,
        _writing_page() as begin_page,
        opened(job, make_site, display.start, on_ray=on_ray) as site,
        open_workers(site, display.client, on_ray=on_ray, other_bits=way.other_bits) as workers,
        Keeper(
            site, workers, saved, force=way.force, other_bits=way.other_bits, when_closed=begin_page
        ) as keeper,
    ):
        begin_log(keeper.path)
        display.ready(resumed=saved is not None)
        last = keeper.restored()
        if last is not None:
            display.restored(last)
        for round in engine.rounds(site, workers, last, keeper.early_end):
            keeper.keep(round)
            last = round
            if workers.finished(round):  # Ray may soon end this process
                keeper.checkpoint(round)
            tell_trackers(round.round)
            display.round(round)
    assert last is not None, "there is always a round 0"
    return Result(keeper.path, read_table(keeper.path, "rounds"), whole(site.model, last.evaluated))


@contextmanager
def _writing_page() -> Iterator[Callable[[Path], None]]:
    """Gives a function that begins to write a run's page while this thread goes on; the context ends with the page."""
    pages: list[Future[None]] = []

    def begin(path: Path) -> None:
        pages.append(aside(_write_page, path))

    try:
        yield begin
    finally:
        wait(pages)


def _checked_site(job: Job, saved: Saved | None, read: Read | None) -> Site:
    with at("the opening of the data and the model"):
        site = open_site(job, read)
    refuse_edited(job)
    if saved is not None:
        saved.refuse_another(site)
    return site


def _find(
    run: str | Path, overrides: Mapping[str, Any] | None, method: Method | None
) -> tuple[Job, Saved]:
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
                f"'{run}' holds no checkpoint; begin again: rayfed run {folders.path / 'job.toml'} {FORCE}"
            )
        return job, saved
    saved = newest(Folder(str(run)))
    if saved:
        return _read(saved.manifest["job"], overrides, method), saved
    if "://" not in str(run) and not Path(run).expanduser().exists():
        raise InputError(f"'{run}': there is no such folder{near_run(Path(run))}")
    names = sorted(str(file.parent) for file in Path(run).glob("*/job.toml"))
    runs = f"; runs in it: {', '.join(names[:RUNS_NAMED])}" if names else ""
    raise InputError(f"'{run}' is neither the folder of a run nor a folder of checkpoints{runs}")


def _newest(folders: Folders) -> Saved | None:
    """The newest checkpoint of a run. Raises `InputError`, with what to do, where none of them is whole."""
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
    job = _read(tables, overrides, method)
    if folder_of(job) != path and not any(key.startswith("output.") for key in overrides or {}):
        kept = (
            path.parts[-len(Path(job.name).parts) :] == Path(job.name).parts
        )  # the folder was moved, or we have
        name = job.name if kept else path.name
        place = path.parents[len(Path(name).parts) - 1]
        job = replace(job, name=name, output=replace(job.output, path=str(place)))
    return job


def _read(
    job: Mapping[str, Any] | Job, overrides: Mapping[str, Any] | None, method: Method | None
) -> Job:
    """A job from its tables. A `method` made in Python replaces theirs, which may not be importable."""
    method_keys = [key for key in overrides or {} if key.partition(".")[0] == "method"]
    if method_keys and method is not None:
        raise InputError(
            f"the method is given twice, as `method` and as '{method_keys[0]}' in `overrides`; give it once"
        )
    if isinstance(job, Job):
        if method is None and not method_keys:
            method = job.method
        job = job.table()
    if method is None:
        return read_job(job, overrides)
    return replace(read_job({**job, "method": "fedavg"}, overrides), method=method)


def _write_page(path: Path) -> None:
    """Write the run's page. A run does not fail where its page cannot be made."""
    try:
        from rayfed.report.page import (
            write_report,
        )  # brings jinja2, which nothing before this needs

        write_report(path)
    except Exception as error:
        log.warning("the run has no page, because %r; to try again: rayfed report %s", error, path)
