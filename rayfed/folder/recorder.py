"""The recorder writes each round to the run's folder, before any observer hears of the round."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
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
from rayfed.data.naming import to_ask_for
from rayfed.folder.checkpoint import Checkpoint
from rayfed.folder.checkpointer import Checkpointer, delete_checkpoints
from rayfed.folder.guess import guess, no_better_than_a_guess
from rayfed.folder.lock import locked, owning
from rayfed.folder.places import Folders
from rayfed.folder.provenance import (
    about,
    changed_since,
    environment,
    hash_of,
    is_of,
    sources,
    versions,
)
from rayfed.folder.summary import early_end, read_environment, read_summary, summarise
from rayfed.folder.tables import (
    RESULTS,
    confusions,
    matrices,
    read_table,
    replace_table,
    round_rows,
    without_extra,
    write_partition,
    write_round,
)
from rayfed.job import Job
from rayfed.rounds.executor import Executor
from rayfed.rounds.observer import Outcome
from rayfed.rounds.round import ClientRow, Round
from rayfed.rounds.setup import Setup
from rayfed.tensors.weights import Weights, under_all_names

PARTITION = "the partition has changed, and clients hold other images than before"

log = logging.getLogger(__name__)


class Recorder:
    """Writes one run's folder while the context lasts. Only one process at a time may write to it.

    At the end of the context, however the run ends, the last round gets a checkpoint, and
    `summary.json` gets the status. An error gets notes that say where the results are and how to
    continue.
    """

    def __init__(
        self,
        setup: Setup,
        executor: Executor,
        saved: Checkpoint | None = None,
        *,
        force: bool = False,
        other_bits: bool = False,
    ) -> None:
        """Continue from `saved`. Without it a new run begins, with `force` over an earlier one.

        With `other_bits` a run may continue on other hardware, or with changed modules of the user.
        """
        self._folders = Folders.of(setup.job)
        self.path = self._folders.path
        self._setup, self._executor, self._saved = setup, executor, saved
        self._force, self._other_bits = force, other_bits
        # What a guess would be worth on the test set.
        self._guess = guess(setup.federation.test.labels)
        # The rows of `rounds.parquet`.
        self._rows: list[dict[str, Any]] = []
        self._newest: Round | None = None
        # The time of the newest attempt to write a checkpoint.
        self._tried_at = time.monotonic()

    def __enter__(self) -> Recorder:
        self._folders.refuse_unwritable()
        if self._saved is None:
            self._folders.refuse_overwriting(self._force)
        origin = self._origin()
        # The locks are given back when the context ends, and also if it cannot begin.
        with ExitStack() as locks, writing_to(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            locks.enter_context(locked(self.path))
            self._earlier_summary = read_summary(self.path)
            self._begin_checkpoints(locks, origin)
            self._write_origin(origin)
            self._locks = locks.pop_all()
        return self

    def restore(self) -> Round | None:
        """Restore the round of the checkpoint to continue from; returns None for a new run."""
        if self._saved is None:
            return None
        number = self._saved.round
        self._say_what_is_left(self._saved)
        round = self._saved.restore(self._setup, self._executor)
        if not self._setup.job.train.evaluates(number):
            # The round was evaluated because it was the last one of a shorter run.
            round = replace(round, evaluation=None, forgetting=None)
        clients = []
        table = read_table(self.path, "clients", after=number - 1).drop_columns("round")
        for row in table.to_pylist():
            clients.append(ClientRow(**{**row, "notes": dict(row["notes"])}))
        classes = self._setup.federation.train.classes
        cells = confusions(self.path, classes, after=number - 1)
        of_clients = {}
        for client, matrix in matrices(cells, number, len(classes)).items():
            if client >= 0:
                of_clients[client] = matrix
        row = self._rows[-1]
        return replace(
            round,
            clients=tuple(clients),
            confusions=of_clients,
            seconds=row["seconds"],
            bytes_down=row["bytes_down"],
            bytes_up=row["bytes_up"],
            notes=dict(row["notes"]),
        )

    def round(self, round: Round) -> None:
        """Write a finished round's rows, and a checkpoint if one is due.

        Raises `Unwritable` if the rows or the first checkpoint cannot be written.
        """
        self._newest = round
        self._write_rows(round)
        if not self._is_due(round.round):
            return
        failure = self._write_checkpoint(round)
        if not failure:
            return
        began_at = self._saved.round if self._saved else 0
        # A later checkpoint may fail, because the disk may have room again for the next one.
        if self._checkpoints.round is None or self._checkpoints.round <= began_at:
            raise Unwritable(failure)

    def early_end(self) -> str:
        """Say why the run ends before `train.num_rounds`; '' if it does not."""
        return early_end(self._setup.job.train, self._rows)

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._locks:
            failure = error
            try:
                if self._newest is not None:
                    self._write_newest(self._newest, error)
            except (Unwritable, InputError, KeyboardInterrupt) as later_error:
                # The first error says more.
                failure = error or later_error
            failure = self._write_how_it_ended(failure)
            if failure is not None:
                for line in self._what_now(failure):
                    failure.add_note(line)
                    # Only the log gets the line now: the screen shows it at the end.
                    log.info("%s", line, extra={"on_screen": True})
            if failure is not None and failure is not error:
                raise failure from None

    def _origin(self) -> dict[str, Any]:
        """Return what the results come from.

        Raises `InputError` if the results would change from here on, and this is not allowed.
        """
        origin, saved = environment(self._setup, self._executor), self._saved
        if saved is None:
            return {**origin, "other_bits": []} if self._other_bits else origin
        differing = []
        # This counts even if no work is left, because the table of the partition is written anew.
        if saved.manifest["partition"] != origin["partition"]:
            differing.append(PARTITION)
        if saved.leaves_work(self._setup.job):
            differing += saved.other_bits(origin["hardware"], origin["modules"])
        if self._other_bits:
            return {**origin, "other_bits": differing}
        if differing:
            has_own_code = any(reason.startswith("the module") for reason in differing)
            leave = "if you mended it on purpose" if has_own_code else "to allow it"
            raise InputError(
                f"the run would continue to other bits: {'; '.join(differing)}; "
                f"{leave}: rayfed resume {self.path} --other-bits (in Python other_bits=True)"
            )
        return origin

    def _begin_checkpoints(self, locks: ExitStack, origin: dict[str, Any]) -> None:
        """Take the folder of checkpoints. A new run deletes what an earlier run has left."""
        folder, model = self._folders.checkpoints, self._setup.model
        origin = {**origin, "about": about(self._setup), "versions": versions()}

        def all_names(weights: Weights) -> Weights:
            return under_all_names(model, weights)

        with writing_to(folder.place):
            checks = []
            # The lock of the run's folder protects checkpoints in it.
            if self._setup.job.output.checkpoints:
                checks.append(locks.enter_context(owning(folder)))
            self._checkpoints = Checkpointer(
                folder, self._setup.job, origin, self._saved, *checks, all_names=all_names
            )
            if self._saved is None:
                self._folders.clear()
                delete_checkpoints(folder)

    def _write_origin(self, origin: dict[str, Any]) -> None:
        """Write the job and its origin, and the results up to the checkpoint if there is one."""
        job, saved, modules = self._setup.job, self._saved, sources(self._setup.job)
        if saved is not None:
            self._put_back_results(saved)
            first_origin = read_environment(self.path) or origin
            resumed = first_origin.get("resumed", [])
            newest = resumed[-1] if resumed else first_origin
            is_same = all(newest.get(key) == origin[key] for key in ("job", "partition"))
            if is_same and not saved.leaves_work(job):
                # No result will come from the versions, hardware and modules that are here now.
                origin, modules = first_origin, {}
            else:
                resumption = {"after_round": saved.round, **origin}
                origin = {**first_origin, "resumed": [*resumed, resumption]}
        for name, source in modules.items():
            write_bytes(self.path / "modules" / f"{name}-{hash_of(source)[:8]}.py", source)
        write_text(self.path / "job.toml", tomli_w.dumps(job.table()))
        write_text(self.path / "environment.json", json.dumps(origin, indent=2) + "\n")
        write_partition(self.path, self._setup.federation)
        self._summarise("running")

    def _put_back_results(self, saved: Checkpoint) -> None:
        """Give the tables the rows of a checkpoint, except rows that this job does not measure."""
        for name in RESULTS:
            table = without_extra(name, saved.table(name), self._setup.job.train)
            replace_table(self.path, name, saved.round, table)
        self._rows = read_table(self.path, "rounds").to_pylist()

    def _say_what_is_left(self, saved: Checkpoint) -> None:
        """Log after which round the run continues, or why no work is left."""
        number = saved.round
        if saved.leaves_work(self._setup.job):
            log.info("continuing after round %d", number)
        else:
            log.info("already at round %d", number)
            again = f"rayfed run {self.path / 'job.toml'} --force"
            for name in changed_since(self.path):
                log.warning(
                    "%s has changed since, and the results are of before; to train again: %s",
                    name,
                    again,
                )
        reason = self.early_end()
        if reason:
            log.warning(
                "the run has ended after round %d: %s; to go on: rayfed resume %s "
                "-s train.patience=0, or with a larger train.patience",
                number,
                reason,
                self.path,
            )

    def _write_rows(self, round: Round) -> None:
        """Write a round's rows and the summary. Raises `Unwritable`."""
        rows = round_rows(round, self._setup)
        try:
            write_round(self.path, round.round, rows)
            earlier = [row for row in self._rows if row["round"] < round.round]
            self._rows = earlier + rows["rounds"]
            self._summarise("running")
        except OSError as error:
            raise Unwritable(
                f"the results of round {round.round} cannot be written to {self.path}: {error}"
            ) from None
        self._checkpoints.follow(round)

    def _is_due(self, number: int) -> bool:
        """Say whether a checkpoint is due: by the round's number, by the clock, or in danger."""
        output = self._setup.job.output
        # Round 0 shows before any training whether there is room. Round 1 has the first memories.
        return (
            number <= 1
            or number % output.every == 0
            or time.monotonic() >= self._tried_at + output.every_seconds
            or self._executor.may_end()
        )

    def _write_checkpoint(self, round: Round) -> str:
        """Write a checkpoint. If it fails, log and return the reason, otherwise return ''."""
        failure = ""
        try:
            tables = {name: read_table(self.path, name) for name in RESULTS}
            self._checkpoints.save(round, self._executor, tables)
        except InputError:
            # Another run has taken the folder.
            raise
        except Exception as error:
            newest = self._checkpoints.round
            state = "there is none yet" if newest is None else f"the last is of round {newest}"
            failure = f"no checkpoint of round {round.round} was written ({error}); {state}"
            log.warning("%s", failure)
        self._tried_at = time.monotonic()
        return failure

    def _write_newest(self, round: Round, error: BaseException | None) -> None:
        """Write the last checkpoint of a run that ends. Raises `Unwritable`."""
        if error is not None:
            # The rows are written once more, because a signal may have come at the first time.
            self._write_rows(round)
        failure = self._write_checkpoint(round)
        if failure:
            raise Unwritable(failure)

    def _write_how_it_ended(self, error: BaseException | None) -> BaseException | None:
        """Write the status. Returns the run's error, or `Unwritable` if only the writing failed."""
        status = Outcome(error).status
        facts: dict[str, Any] = {}
        if status == "failed":
            facts["error"] = cut(f"{type(error).__name__}: {error}")
        if isinstance(error, KilledActors):
            at_round = self._rows[-1]["round"] if self._rows else None
            facts["killed"] = [error.what, error.how, at_round]
            if facts["killed"] == self._earlier_summary.get("killed"):
                # The run would end in this way again and again.
                error.exit_code = RunFailed.exit_code
        try:
            self._summarise(status, **facts)
        except OSError as os_error:
            return error or Unwritable(
                f"how the run ended cannot be written to {self.path}: {os_error}"
            )
        return error

    def _summarise(self, status: str, **facts: Any) -> None:
        """Write `summary.json` with a status and further facts."""
        if status == "done" and self.early_end():
            facts["ended_early"] = self.early_end()
        summary = {"status": status, **facts, **summarise(self._rows), "guess": self._guess}
        if status == "done":
            warning = no_better_than_a_guess(
                self._rows,
                self._guess,
                len(self._setup.federation.test.labels),
                self._setup.job.train,
            )
            if warning:
                summary["no_better_than_a_guess"] = warning
                log.info("%s", warning, extra={"on_screen": True})
        if "best" in summary:
            place = self._checkpoints.place_of_best(summary["best"]["round"])
            if place:
                summary["best"]["weights"] = place
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def _what_now(self, error: BaseException) -> Iterator[str]:
        """Yield where the results are, how to continue the run, and how to look at its failure."""
        recorded = f"rounds up to {self._rows[-1]['round']} are" if self._rows else "no round is"
        yield f"{recorded} recorded in {self.path}"
        job, newest = self._setup.job, self._checkpoints.round
        again = f"rayfed run {self.path / 'job.toml'}"
        onwards = f"to continue after round {newest}: rayfed resume {self.path}"
        if isinstance(error, Diverged):
            lower = f"{again} -s train.lr={job.train.lr / 10:g} --force"
            yield (
                "to resume it would end in the same way; "
                f"begin again with another value, such as: {lower}"
            )
        elif isinstance(error, BrokenContract) or is_of(sources(job), error):
            yield f"once the code is mended, begin again: {again} --force"
            if newest is not None:
                yield f"or, {onwards} --other-bits"
        elif newest is not None:
            yield onwards
        if isinstance(error, KilledActors) and error.exit_code == RunFailed.exit_code:
            yield (
                "the run has ended in the same way before, so to resume it unchanged would not help"
            )
        if isinstance(error, RunFailed) and error.client is not None:
            client = to_ask_for(error.client, self._setup.federation.client_names)
            place = f"{self.path} --round {error.round} --client {client}"
            yield f"to see it again, in this process: rayfed replay {place}"


def start_over(job: Job) -> None:
    """Remove what an earlier run has left. Raises `InputError` or `Locked` if it must stay."""
    folders = Folders.of(job)
    folders.refuse_unwritable()
    folders.refuse_overwriting(force=True)
    if not folders.path.exists():
        return
    with locked(folders.path):
        delete_checkpoints(folders.checkpoints)
        folders.clear()
