"""The recorder: the first observer of a run. It keeps each round in the run's folder."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
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
from rayfed.tensors.weights import under_all_names

PARTITION = "the partition has changed, and clients hold other images than before"

log = logging.getLogger(__name__)


class Recorder:
    """Writes one run's folder while the context lasts. A single process at a time may write to it.

    On leaving, however the run ends, the last round gets a checkpoint, and `summary.json` the
    status. An error gets notes that say where the results are and how to continue.
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
        """Continue from `saved`. Without it a new run begins, over an earlier one with `force`.

        With `other_bits` it may continue on other hardware, or with changed modules of the user.
        """
        self._folders = Folders.of(setup.job)
        self.path = self._folders.path
        self._setup, self._executor, self._saved = setup, executor, saved
        self._force, self._other_bits = force, other_bits
        # The rows of `rounds.parquet`.
        self._rows: list[dict[str, Any]] = []
        self._last: Round | None = None
        self._tried = time.monotonic()

    def __enter__(self) -> Recorder:
        self._folders.refuse_unwritable()
        if self._saved is None:
            self._folders.refuse_overwriting(self._force)
        origin = self._origin()
        # What is locked is given back when the context ends, and also if it cannot begin.
        with ExitStack() as owned, writing_to(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            owned.enter_context(locked(self.path))
            self._before = read_summary(self.path)
            self._begin_checkpoints(owned, origin)
            self._write_origin(origin)
            self._owned = owned.pop_all()
        return self

    def restored(self) -> Round | None:
        """Return the round of the checkpoint to continue from; None for a new run."""
        if self._saved is None:
            return None
        number = self._saved.round
        self._say_what_is_left(self._saved)
        last = self._saved.restore(self._setup, self._executor)
        if not self._setup.job.train.evaluates(number):
            # It was the last round of a shorter run.
            last = replace(last, evaluation=None, forgetting=None)
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
            last,
            clients=tuple(clients),
            confusions=of_clients,
            seconds=row["seconds"],
            bytes_down=row["bytes_down"],
            bytes_up=row["bytes_up"],
            notes=dict(row["notes"]),
        )

    def round(self, round: Round) -> None:
        """Write a finished round's rows, and a checkpoint when one is due. Raises `Unwritable`."""
        self._last = round
        self._write_rows(round)
        if not self._is_due(round.round):
            return
        why_not = self._write_checkpoint(round)
        began = self._saved.round if self._saved else 0
        # Later, a checkpoint may be left out: the disk may have room again for the next.
        if why_not and (self._checkpoints.round is None or self._checkpoints.round <= began):
            raise Unwritable(why_not)

    def early_end(self) -> str:
        """Say why the run ends before `train.num_rounds`; '' if it goes on."""
        return early_end(self._setup.job.train, self._rows)

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._owned:
            ended = error
            try:
                if self._last is not None:
                    self._write_last(self._last, error)
            except (Unwritable, InputError, KeyboardInterrupt) as late:
                # The first error says more.
                ended = error or late
            ended = self._write_how_it_ended(ended)
            if ended is not None:
                for line in self._what_now(ended):
                    ended.add_note(line)
                    # To the log only: the screen shows it at the end.
                    log.info("%s", line, extra={"on_screen": True})
            if ended is not None and ended is not error:
                raise ended from None

    def _origin(self) -> dict[str, Any]:
        """Collect what the results come from. Raises `InputError` if the run began otherwise."""
        now, saved = environment(self._setup, self._executor), self._saved
        if saved is None:
            return {**now, "other_bits": []} if self._other_bits else now
        differing = []
        # Also if no work is left, because the table of the partition is written anew.
        if saved.manifest["partition"] != now["partition"]:
            differing.append(PARTITION)
        if saved.leaves_work(self._setup.job):
            differing += saved.other_bits(now["hardware"], now["modules"])
        if self._other_bits:
            return {**now, "other_bits": differing}
        if differing:
            has_own_code = any(reason.startswith("the module") for reason in differing)
            leave = "if you mended it on purpose" if has_own_code else "to allow it"
            raise InputError(
                f"the run would continue to other bits: {'; '.join(differing)}; "
                f"{leave}: rayfed resume {self.path} --other-bits (in Python other_bits=True)"
            )
        return now

    def _begin_checkpoints(self, owned: ExitStack, origin: dict[str, Any]) -> None:
        """Take the folder of checkpoints. A new run deletes what an earlier one has left."""
        folder = self._folders.checkpoints
        origin = {**origin, "about": about(self._setup), "versions": versions()}
        all_names = partial(under_all_names, self._setup.model)
        with writing_to(folder.place):
            checks = []
            # Checkpoints in the run's folder are under its lock.
            if self._setup.job.output.checkpoints:
                checks.append(owned.enter_context(owning(folder)))
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
            for name in RESULTS:
                table = without_extra(name, saved.table(name), job.train)
                replace_table(self.path, name, saved.round, table)
            self._rows = read_table(self.path, "rounds").to_pylist()
            began = read_environment(self.path) or origin
            times = [began, *began.get("resumed", [])]
            same = all(times[-1].get(key) == origin[key] for key in ("job", "partition"))
            if same and not saved.leaves_work(job):
                # No result comes from what is here now.
                origin, modules = began, {}
            else:
                resumed = [*times[1:], {"after_round": saved.round, **origin}]
                origin = {**began, "resumed": resumed}
        for name, source in modules.items():
            write_bytes(self.path / "modules" / f"{name}-{hash_of(source)[:8]}.py", source)
        write_text(self.path / "job.toml", tomli_w.dumps(job.table()))
        write_text(self.path / "environment.json", json.dumps(origin, indent=2) + "\n")
        write_partition(self.path, self._setup.federation)
        self._summarise("running")

    def _say_what_is_left(self, saved: Checkpoint) -> None:
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
        why = self.early_end()
        if why:
            log.warning(
                "the run has ended after round %d: %s; to go on: rayfed resume %s "
                "-s train.patience=0, or with a larger train.patience",
                number,
                why,
                self.path,
            )

    def _write_rows(self, round: Round) -> None:
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
        """Return whether a checkpoint is due: by the number, by the clock, or in danger."""
        output = self._setup.job.output
        # Round 0 shows before any training whether there is room; round 1 has the first memories.
        return (
            number <= 1
            or number % output.every == 0
            or time.monotonic() >= self._tried + output.every_seconds
            or self._executor.may_end()
        )

    def _write_checkpoint(self, round: Round) -> str:
        """Write a checkpoint. Returns why it could not be written, and logs it; '' if it was."""
        why = ""
        try:
            tables = {name: read_table(self.path, name) for name in RESULTS}
            self._checkpoints.save(round, self._executor, tables)
        except InputError:
            # Another run has taken the folder.
            raise
        except Exception as error:
            last = self._checkpoints.round
            there = "there is none yet" if last is None else f"the last is of round {last}"
            why = f"no checkpoint of round {round.round} was written ({error}); {there}"
            log.warning("%s", why)
        self._tried = time.monotonic()
        return why

    def _write_last(self, last: Round, error: BaseException | None) -> None:
        if error is not None:
            # Once more, because a signal may have come while the rows were written.
            self._write_rows(last)
        why_not = self._write_checkpoint(last)
        if why_not:
            raise Unwritable(why_not)

    def _write_how_it_ended(self, ended: BaseException | None) -> BaseException | None:
        """Write the status. Returns how the run ended: it may be that this cannot be written."""
        status = Outcome(ended).status
        more: dict[str, Any] = {}
        if status == "failed":
            more["error"] = cut(f"{type(ended).__name__}: {ended}")
        if isinstance(ended, KilledActors):
            at_round = self._rows[-1]["round"] if self._rows else None
            more["killed"] = [ended.what, ended.how, at_round]
            if more["killed"] == self._before.get("killed"):
                # It would end so again and again.
                ended.exit_code = RunFailed.exit_code
        try:
            self._summarise(status, **more)
        except OSError as why:
            return ended or Unwritable(f"how the run ended cannot be written to {self.path}: {why}")
        return ended

    def _summarise(self, status: str, **more: Any) -> None:
        if status == "done" and self.early_end():
            more["ended_early"] = self.early_end()
        labels = self._setup.federation.test.labels
        by_guess = guess(labels)
        summary = {"status": status, **more, **summarise(self._rows), "guess": by_guess}
        if status == "done":
            why = no_better_than_a_guess(self._rows, by_guess, len(labels), self._setup.job.train)
            if why:
                summary["no_better_than_a_guess"] = why
                log.info("%s", why, extra={"on_screen": True})
        if "best" in summary:
            place = self._checkpoints.place_of_best(summary["best"]["round"])
            if place:
                summary["best"]["weights"] = place
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def _what_now(self, error: BaseException) -> Iterator[str]:
        """Say where the results are, how to continue the run, and how to look into its failure."""
        recorded = f"rounds up to {self._rows[-1]['round']} are" if self._rows else "no round is"
        yield f"{recorded} recorded in {self.path}"
        job, last = self._setup.job, self._checkpoints.round
        again = f"rayfed run {self.path / 'job.toml'}"
        onwards = f"to continue after round {last}: rayfed resume {self.path}"
        if isinstance(error, Diverged):
            lower = f"{again} -s train.lr={job.train.lr / 10:g} --force"
            yield (
                "to resume it would end in the same way; "
                f"begin again with another value, such as: {lower}"
            )
        elif isinstance(error, BrokenContract) or is_of(sources(job), error):
            yield f"once the code is mended, begin again: {again} --force"
            if last is not None:
                yield f"or, {onwards} --other-bits"
        elif last is not None:
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
