"""The keeper of a run's folder: it restores the run, keeps each round, and closes with how the run ended."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w

from rayfed.base.errors import (
    BrokenContract,
    Diverged,
    InputError,
    KilledActors,
    RunFailed,
    Unwritable,
    cut,
)
from rayfed.base.files import write_bytes, write_text, writing_to
from rayfed.base.noted import note
from rayfed.data.naming import to_ask_for
from rayfed.folder.checkpoint import Checkpoints, delete_checkpoints
from rayfed.folder.guess import guess, no_better_than_a_guess
from rayfed.folder.owner import lock, owning
from rayfed.folder.places import Folders
from rayfed.folder.provenance import (
    about,
    changed_since,
    environment,
    hash_of,
    is_of,
    sources,
    versions,
    versions_of,
)
from rayfed.folder.read import confusions, matrices
from rayfed.folder.saved import Saved
from rayfed.folder.summary import early_end, read_environment, read_summary, summarise
from rayfed.folder.tables import (
    RESULTS,
    read_table,
    replace_table,
    round_rows,
    without_extra,
    write_partition,
    write_round,
)
from rayfed.rounds.round import ClientRow, Round
from rayfed.rounds.site import Site
from rayfed.rounds.workers import Workers
from rayfed.tensors.weights import under_all_names

PARTITION = "the partition has changed, and clients hold other images than before"

log = logging.getLogger(__name__)


class Keeper:
    """Writes one run's folder while the context lasts. A single process at a time may write to it.

    On leaving, however the run ends, the last round gets a checkpoint, and `summary.json` the status; an error that
    ends the run gets notes that say where the results are and how to continue.
    """

    def __init__(
        self,
        site: Site,
        workers: Workers,
        saved: Saved | None = None,
        *,
        force: bool = False,
        other_bits: bool = False,
        when_closed: Callable[[Path], object] = lambda path: None,
    ) -> None:
        """`saved` is the checkpoint to continue from. Without it a new run begins, over an earlier one with `force`.

        With `other_bits` it may continue on other hardware, or with other code of the user, than it began with.
        `when_closed` is called with the folder when it is complete, however the run has ended.
        """
        self._folders = Folders.of(site.job)
        self.path = self._folders.path
        self._when_closed = when_closed
        self._site, self._workers, self._saved, self._force = site, workers, saved, force
        self._other_bits = other_bits
        self._rows: list[dict[str, Any]] = []  # of `rounds`
        self._last: Round | None = None  # that was given to `keep`

    def __enter__(self) -> Keeper:
        self._folders.refuse_unwritable()
        if self._saved is None:
            self._folders.refuse_overwriting(self._force)
        now = self._origin()
        with ExitStack() as owned, writing_to(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            owned.callback(os.close, lock(self.path))
            self._before = read_summary(self.path)  # of the run that this run continues, if any
            self._begin(owned, now)
            note(str(self.path))
            self._owned = owned.pop_all()
        return self

    def _origin(self) -> dict[str, Any]:
        """What the results come from. Raises `InputError` where the run began with something else."""
        now, saved = environment(self._site, self._workers), self._saved
        work_left = saved is not None and saved.leaves_work(self._site.job)
        differing = (
            saved.other_bits(now["hardware"], now["modules"], versions_of(self.path))
            if saved is not None and work_left
            else []
        )
        if saved is not None and saved.manifest["partition"] != now["partition"]:
            differing = [
                PARTITION,
                *differing,
            ]  # also where no work is left: the folder's table of it is written anew
        if differing and not self._other_bits:
            has_own_code = any(reason.startswith("the module") for reason in differing)
            leave = "if you mended it on purpose" if has_own_code else "to allow it"
            raise InputError(
                f"the run would continue to other bits: {'; '.join(differing)}; "
                f"{leave}: rayfed resume {self.path} --other-bits (in Python other_bits=True)"
            )
        return {**now, "other_bits": differing} if self._other_bits else now

    def _begin(self, owned: ExitStack, now: dict[str, Any]) -> None:
        """Make the folder that of this run, up to its checkpoint if there is one."""
        site, saved, folder = self._site, self._saved, self._folders.checkpoints
        modules = sources(site.job)
        with writing_to(folder.place):
            # Checkpoints in the run's folder are under its lock.
            checks = [owned.enter_context(owning(folder))] if site.job.output.checkpoints else []
            self._checkpoints = Checkpoints(
                folder,
                site.job,
                {**now, "about": about(site), "versions": versions()},
                saved,
                *checks,
                all_names=partial(under_all_names, site.model),
            )
            if saved is None:
                self._folders.clear()
                delete_checkpoints(folder)
        if saved is not None:
            for name in RESULTS:
                replace_table(
                    self.path,
                    name,
                    saved.round,
                    without_extra(name, saved.table(name), site.job.train),
                )
            self._rows = read_table(self.path, "rounds").to_pylist()
            began = read_environment(self.path) or now
            times = [began, *began.get("resumed", [])]
            if not saved.leaves_work(site.job) and all(
                times[-1].get(key) == now[key] for key in ("job", "partition")
            ):
                now, modules = began, {}  # nothing comes of what is here now
            else:
                now = {**began, "resumed": [*times[1:], {"after_round": saved.round, **now}]}
        for name, source in modules.items():
            write_bytes(self.path / "modules" / f"{name}-{hash_of(source)[:8]}.py", source)
        write_text(self.path / "job.toml", tomli_w.dumps(site.job.table()))
        write_text(self.path / "environment.json", json.dumps(now, indent=2) + "\n")
        write_partition(self.path, site.federation)
        self._summarise("running")
        self._tried = time.monotonic()

    def restored(self) -> Round | None:
        """The round of the checkpoint to continue from; None for a new run."""
        if self._saved is None:
            return None
        work_left, number = self._saved.leaves_work(self._site.job), self._saved.round
        log.info("continuing after round %d" if work_left else "already at round %d", number)
        for name in [] if work_left else changed_since(self.path):
            again = f"rayfed run {self.path / 'job.toml'} --force"
            log.warning(
                "%s has changed since, and the results are of before; to train again: %s",
                name,
                again,
            )
        if why := self.early_end():
            on = f"to go on: rayfed resume {self.path} -s train.patience=0, or with a larger train.patience"
            log.warning("the run has ended after round %d: %s; %s", number, why, on)
        clients = (
            read_table(self.path, "clients", after=number - 1).drop_columns("round").to_pylist()
        )
        rows = [ClientRow(**{**row, "notes": dict(row["notes"])}) for row in clients]
        costs = {key: self._rows[-1][key] for key in ("seconds", "bytes_down", "bytes_up")}
        costs["notes"] = dict(self._rows[-1]["notes"])
        classes = self._site.federation.train.classes
        of_models = matrices(confusions(self.path, classes, after=number - 1), number, len(classes))
        of_clients = {client: matrix for client, matrix in of_models.items() if client >= 0}
        last = self._saved.restore(self._site, self._workers)
        if not self._site.job.train.evaluates(number):  # any more
            last = replace(last, evaluation=None, forgetting=None)
        self._checkpoints.probe(last)
        return replace(last, clients=tuple(rows), confusions=of_clients, **costs)

    def keep(self, round: Round) -> None:
        """Write a finished round's rows, and a checkpoint when one is due. Raises `Unwritable`."""
        self._last = round
        self._record(round)
        if not round.round:
            self._checkpoints.probe(round)
        elif self._is_due(round.round):
            self.checkpoint(round)

    def checkpoint(self, round: Round) -> None:
        """Write a checkpoint of a kept round, unless it has one. Raises `Unwritable` where it would be the first."""
        why_not = self._checkpoint(round)
        before = self._saved.round if self._saved else None
        if why_not and self._checkpoints.round == before:
            raise Unwritable(why_not)

    def early_end(self) -> str:
        """Why the run ends before `train.num_rounds`, by the rounds that are kept; '' where it goes on."""
        return early_end(self._site.job.train, self._rows)

    def _is_due(self, round: int) -> bool:
        output = self._site.job.output
        return (
            round == 1
            or round % output.every == 0
            or time.monotonic() >= self._tried + output.every_seconds
        )

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as at_the_end:
            at_the_end.callback(self._when_closed, self.path)
            at_the_end.enter_context(self._owned)
            ended = error
            try:
                if self._last is not None:
                    if error is not None:
                        self._record(self._last)  # again: a signal may have come in the middle
                    if why := self._checkpoint(self._last):
                        raise Unwritable(why)
            except (Unwritable, InputError, KeyboardInterrupt) as late:
                ended = error or late  # the first error says more
            status = (
                "done"
                if ended is None
                else "stopped"
                if isinstance(ended, KeyboardInterrupt)
                else "failed"
            )
            more: dict[str, Any] = {}
            if status == "failed":
                more["error"] = cut(f"{type(ended).__name__}: {ended}")
            if isinstance(ended, KilledActors):
                more["killed"] = [
                    ended.what,
                    ended.how,
                    self._rows[-1]["round"] if self._rows else None,
                ]
                if more["killed"] == self._before.get("killed"):
                    ended.exit_code = RunFailed.exit_code  # it would end so again and again
            try:
                self._summarise(status, **more)
            except OSError as why:
                ended = ended or Unwritable(
                    f"how the run ended cannot be written to {self.path}: {why}"
                )
            if ended is not None:
                for note in self._what_now(ended):
                    ended.add_note(note)
                    log.info(
                        "%s", note, extra={"on_screen": True}
                    )  # to the log: the screen shows it at the end
            if ended is not error and ended is not None:
                raise ended from None

    def _record(self, round: Round) -> None:
        rows = round_rows(round, self._site)
        try:
            write_round(self.path, round.round, rows)
            self._rows = [row for row in self._rows if row["round"] < round.round] + rows["rounds"]
            self._summarise("running")
        except OSError as error:
            raise Unwritable(
                f"the results of round {round.round} cannot be written to {self.path}: {error}"
            ) from None
        self._checkpoints.follow(round)

    def _checkpoint(self, round: Round) -> str:
        """Write a checkpoint. Gives why it could not be written, and continues; '' if it was."""
        why = ""
        try:
            self._checkpoints.save(round, self._workers, partial(read_table, self.path))
        except InputError:  # the folder has become another run's
            raise
        except Exception as error:
            last = self._checkpoints.round
            there = f"the last is of round {last}" if last is not None else "there is none yet"
            why = f"no checkpoint of round {round.round} was written ({error}); {there}"
            log.warning("%s", why)
        self._tried = time.monotonic()
        return why

    def _summarise(self, status: str, **more: Any) -> None:
        if status == "done" and (why := self.early_end()):
            more["ended_early"] = why
        labels = self._site.federation.test.labels
        by_guess = guess(labels)
        training = self._site.job.train
        summary = {"status": status, **more, **summarise(self._rows), "guess": by_guess}
        if status == "done":
            why = no_better_than_a_guess(self._rows, by_guess, len(labels), training)
            if why:
                summary["no_better_than_a_guess"] = why
                log.info("%s", why, extra={"on_screen": True})
        if "best" in summary and (
            place := self._checkpoints.place_of_best(summary["best"]["round"])
        ):
            summary["best"]["weights"] = place
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def _what_now(self, error: BaseException) -> Iterator[str]:
        """Where the results of a run that ended early are, how to continue it, how to look into its failure."""
        recorded = f"rounds up to {self._rows[-1]['round']} are" if self._rows else "no round is"
        yield f"{recorded} recorded in {self.path}"
        job, last, again = (
            self._site.job,
            self._checkpoints.round,
            f"rayfed run {self.path / 'job.toml'}",
        )
        onwards = f"to continue after round {last}: rayfed resume {self.path}"
        if isinstance(error, Diverged):
            lower = f"{again} -s train.lr={job.train.lr / 10:g} --force"
            yield f"to resume it would end in the same way; begin again with another value, such as: {lower}"
        elif isinstance(error, BrokenContract) or is_of(sources(job), error):
            yield f"once the code is mended, begin again: {again} --force"
            if last is not None:
                yield f"or, {onwards} --other-bits"
        elif last is not None:
            yield onwards
        if isinstance(error, KilledActors) and error.exit_code == RunFailed.exit_code:
            yield "the run has ended in the same way before, so to resume it unchanged would not help"
        if isinstance(error, RunFailed) and error.client is not None:
            client = to_ask_for(error.client, self._site.federation.client_names)
            place = f"{self.path} --round {error.round} --client {client}"
            yield f"to see it again, in this process: rayfed replay {place}"
