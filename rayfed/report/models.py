"""The models of a run after it has ended: the global model of a round, and its local models.

A run keeps no local models. They are made again by a replay: on the same hardware and versions,
with the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from rich.filesize import decimal

from rayfed.base.errors import InputError
from rayfed.base.isolation import alone
from rayfed.data.naming import number_of
from rayfed.experiment import (
    job_of,
    open_again,
    recorded_rows,
    refuse_absent_round,
    round_before,
)
from rayfed.folder.places import Folders
from rayfed.folder.provenance import other_versions, refuse_another_partition, versions_of
from rayfed.methods.part import Method
from rayfed.report.verify.numbers import same
from rayfed.report.words import listed
from rayfed.rounds import engine
from rayfed.rounds.executor import Executor
from rayfed.rounds.round import ClientRow, Round
from rayfed.rounds.setup import Setup, open_setup
from rayfed.runtime.executors import open_executor
from rayfed.tensors.trees import num_bytes
from rayfed.tensors.weights import Weights, whole

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LocalModels:
    """The local models of a round, as complete states for `load_state_dict`, on the CPU.

    >>> models = local_models("runs/quickstart")  # doctest: +SKIP
    >>> sorted(models.clients), models.differing  # doctest: +SKIP
    ([1, 4, 7], {})
    """

    round: int
    # The global model that the round's clients were sent.
    start: Weights
    # By client, the model after its training.
    clients: dict[int, Weights]
    # By client, the name that it has in the data; empty if clients have no names.
    names: dict[int, str]
    # By client, the loss of the replay and the loss that the run recorded, where they differ.
    differing: dict[int, tuple[float, float]]


def local_models(
    run: str | Path,
    round: int | None = None,
    clients: Sequence[int | str] | None = None,
    *,
    method: Method | None = None,
) -> LocalModels:
    """Make the local models of a round again, after the run.

    The rounds since the newest older checkpoint are played again in this process, and then the
    clients of the round train. On the run's hardware and versions, the models have the run's bits.
    If a client's loss is not the one that the run recorded, a warning says so.

    `round` is the last finished round if it is not given. `clients` are numbers or names of clients
    of the round; all of them if they are not given. Give a `method` again that was made in Python.
    Raises `InputError` if a client was not in the round, or if memory does not hold the models.

    >>> models = local_models("runs/quickstart", round=2)  # doctest: +SKIP
    >>> model.load_state_dict(models.clients[7])  # doctest: +SKIP
    """
    with replaying(run, method) as again:
        of_round = again.open(again.last_round if round is None else round)
        chosen = of_round.chosen(clients)
        refuse_too_many(of_round, len(chosen))
        models = {}
        for client, weights in of_round.train(chosen):
            models[client] = weights
    names = again.setup.federation.client_names
    return LocalModels(
        round=of_round.round,
        start=of_round.start,
        clients=models,
        names={client: names[client] for client in chosen} if names else {},
        differing=of_round.differing,
    )


@contextmanager
def replaying(run: str | Path, method: Method | None = None) -> Iterator[Again]:
    """Open a run to play rounds of it again, in this process, without writing into its folder."""
    with alone(f"the replay of '{run}'"):
        job = job_of(run, None, method)
        if job is None:
            raise InputError(f"'{run}' is not the folder of a run")
        # Measures take time, and change nothing.
        setup = open_setup(replace(job, measure=[], measure_layers=[]))
        with open_executor(setup, on_ray=False) as workers:
            yield Again(Folders.of(job), setup, workers)


@dataclass(frozen=True, eq=False)
class Again:
    """A run whose rounds can be played again."""

    folders: Folders
    setup: Setup
    workers: Executor

    @property
    def last_round(self) -> int:
        """Return the last finished round. Raises `InputError` if the run has none."""
        last = max((row["round"] for row in recorded_rows(self.folders.path, "rounds")), default=0)
        if not last:
            raise InputError(f"'{self.folders.path}' has no finished round, and so no model")
        return last

    def global_model(self, round: int | None = None) -> Weights:
        """Return the global model after a round, complete, as the method evaluates it."""
        number = self.last_round if round is None else round
        if number:
            refuse_absent_round(self.folders.path, number)
            refuse_another_partition(self.folders.path, self.setup, number)
        if number > self.last_round:
            raise InputError(f"round {number}: the run has {self.last_round} finished rounds")
        after = round_before(self.setup, self.folders, number + 1, self.workers)
        return whole(self.setup.model, after.evaluated)

    def open(self, round: int) -> RoundAgain:
        """Return a round, before its clients train."""
        refuse_absent_round(self.folders.path, round)
        refuse_another_partition(self.folders.path, self.setup, round)
        previous = round_before(self.setup, self.folders, round, self.workers)
        opening = open_again(self.setup, previous, self.workers)
        return RoundAgain(self, previous, opening, {})


@dataclass(frozen=True, eq=False)
class RoundAgain:
    """A round that is played again, up to its training."""

    run: Again
    previous: Round
    opening: engine.Opening
    # By client that has trained, the loss of the replay and the recorded loss, where they differ.
    differing: dict[int, tuple[float, float]]

    @property
    def round(self) -> int:
        return self.opening.broadcast.round

    @property
    def start(self) -> Weights:
        """Return the global model that the clients were sent, complete."""
        return whole(self.run.setup.model, self.opening.broadcast.weights)

    def chosen(self, clients: Sequence[int | str] | None) -> list[int]:
        """Return the numbers of the round's clients that are meant; of all without `clients`.

        Raises `InputError` for a client that did not train in the round.
        """
        cohort, data = self.opening.cohort, self.run.setup.federation
        if clients is None:
            return sorted(cohort.answered)
        chosen = []
        for client in clients:
            number = client
            if isinstance(client, str):
                number = number_of(client, data.client_names, data.num_clients)
            cohort.refuse_absent(int(number), self.round)
            chosen.append(int(number))
        return list(dict.fromkeys(chosen))

    def train(self, clients: Sequence[int]) -> Iterator[tuple[int, Weights]]:
        """Train clients one after another, and yield each one with its complete model.

        At the end, a warning says whose losses differ from what the run has recorded.
        """
        recorded = {}
        for row in recorded_rows(self.run.folders.path, "clients"):
            recorded[row["round"], row["client"]] = row["train_loss"]
        replies = engine.local_models(
            self.run.workers, self.opening.broadcast, clients, self.previous.memories
        )
        trained: ClientRow
        for trained, weights in replies:
            loss = recorded.get((self.round, trained.client), trained.train_loss)
            # The loss of a client that has diverged may be NaN.
            if not same(loss, trained.train_loss, 0.0):
                self.differing[trained.client] = trained.train_loss, loss
            yield trained.client, whole(self.run.setup.model, weights)
        if self.differing:
            self._warn()

    def _warn(self) -> None:
        """Warn that local models do not have the run's bits."""
        client, (loss, recorded) = next(iter(self.differing.items()))
        reasons = other_versions(versions_of(self.run.folders.path))
        log.warning(
            "round %d: clients %s have other losses than in the run, such as client %d %.9g instead"
            " of %.9g, so these local models are not bit for bit the run's (%s)",
            self.round,
            listed(self.differing),
            client,
            loss,
            recorded,
            "; ".join(reasons) or "other hardware, or changed code",
        )


def refuse_too_many(of_round: RoundAgain, count: int) -> None:
    """Raise `InputError` if memory does not hold the local models of so many clients."""
    size = num_bytes(of_round.start)
    free = psutil.virtual_memory().available
    fitting = free // size
    if count <= fitting:
        return
    raise InputError(
        f"round {of_round.round}: {count} local models of {decimal(size)} do not fit into the "
        f"{decimal(free)} of memory that are free; {fitting} fit: name up to {fitting} "
        f"clients, such as clients={of_round.chosen(None)[:3]}"
    )
