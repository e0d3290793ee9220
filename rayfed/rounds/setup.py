"""Open a run's setup: the model, the data and the job.

Every worker and the server have it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfed.base.errors import InputError
from rayfed.base.isolation import isolated, threads
from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.cohort import Circumstances, held_out
from rayfed.clients.trace import Trace, open_trace
from rayfed.data.federation import EVALUATION_BATCH, Federation, Read, open_federation
from rayfed.data.naming import number_of
from rayfed.job import Job
from rayfed.methods.checks import doubts
from rayfed.methods.leaks import refuse_leaks
from rayfed.methods.part import all_parts
from rayfed.methods.views import RUNS, RUNS_ON_COPIES, Frozen, Run, ServerView
from rayfed.models.adapt import adapt
from rayfed.models.registry import build_model
from rayfed.models.trial import Setting, try_model
from rayfed.rounds.measuring import refuse_absent
from rayfed.rounds.sampling_fits import refuse_unfit_sampling
from rayfed.tensors.trees import num_bytes
from rayfed.tensors.weights import Weights, keep_constant, state

# The number of examples of the training set on which a model is tried.
EXAMPLES = 8
# The most names that a message lists.
NAMED = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that a worker needs during a run, whichever clients it serves."""

    # It is never trained itself: work is done with copies of it.
    model: nn.Module
    federation: Federation
    job: Job
    device: torch.device
    # The trace that says which clients are there in which round.
    trace: Trace | None = None
    # Where the worker is, as the results name it.
    node: str = ""
    # Whether the model writes to its inputs. Then each pass gets a copy of its input.
    writes_to_inputs: bool = False

    @property
    def run(self) -> Run:
        """Return a forward pass of the model, in the job's precision."""
        runs = RUNS_ON_COPIES if self.writes_to_inputs else RUNS
        return runs[self.job.train.precision]

    @cached_property
    def held_out(self) -> np.ndarray:
        """Return the clients that never train, int64, ascending."""
        return held_out(self.job.clients, self.job.seed, self.federation.num_clients)

    @cached_property
    def measured_clients(self) -> frozenset[int]:
        """Return the clients to measure, where not all of a round are."""
        names, count = self.federation.client_names, self.federation.num_clients
        return frozenset(number_of(client, names, count) for client in self.job.measure_clients)

    @cached_property
    def population(self) -> tuple[int, float]:
        """Return the number of clients that train, and their mean number of images."""
        sizes = np.delete(self.federation.partition.sizes, self.held_out)
        return len(sizes), int(sizes.sum()) / len(sizes)


def open_setup(job: Job, read: Read | None = None) -> Setup:
    """Load the data, deal it to the clients, build the model.

    Raise `InputError` for all that is wrong with a job.

    What the user's functions draw for the data is the same each time, whatever the job's seed: the
    data of all seeds are the same.
    """
    with isolated(seed_of(0, Purpose.OPEN), torch.device("cpu")):
        return _open_setup(job, read)


def _open_setup(job: Job, read: Read | None) -> Setup:
    """Do what `open_setup` says, with the generators seeded."""
    federation = open_data(job, read)
    inputs = federation.inputs
    refuse_large_cohort(job, federation)
    trace = open_trace(job.clients, federation.num_clients, job.train.num_rounds)
    sizes = inputs._asdict() | {"num_classes": federation.num_classes}
    # The number of threads is set, as orthogonal weights have other bits with more threads.
    with threads(job.ray.threads):
        model = build_model(
            job.model.name, job.model.options, **sizes, seed=seed_of(job.seed, Purpose.MODEL)
        )
        adapt(model, job.model.adapt, seed_of(job.seed, Purpose.MODEL, 1))
    trial = try_model(model, _setting(job, federation))
    keep_constant(model, trial.constants)
    for warning in trial.warnings:
        log.warning("%s", warning)
    if trial.unused:
        log.info(
            "model '%s': no gradient reached %s in a trial step, and so they may stay as they "
            "begin",
            job.model.name,
            _listed(trial.unused),
        )
    # This is only for its errors: a client that is to be measured must be there.
    for client in job.measure_clients:
        number_of(client, federation.client_names, federation.num_clients, "measure_clients")
    refuse_absent(job.measure_layers, model, inputs)
    for part in all_parts(job.method):
        part.check(model, job.train)
    refuse_leaks(job.method, model, job.clients)
    sizes_of_clients = federation.partition.sizes
    of = Circumstances(
        1, job.seed, job.clients, job.train, trace, sizes_of_clients, num_bytes(state(model))
    )
    refuse_unfit_sampling(of, job.method, model)
    for doubt in doubts(job.method, model, job.train.num_rounds, "local" in job.measure):
        log.warning("%s", doubt)
    # Convolutions on CPUs are a third faster in this layout. A user's own `to` may not take a
    # layout.
    nn.Module.to(model, memory_format=torch.channels_last)
    return Setup(
        model,
        federation,
        job,
        torch.device("cpu"),
        trace,
        writes_to_inputs=trial.writes_to_inputs,
    )


def refuse_large_cohort(job: Job, federation: Federation) -> None:
    """Raise `InputError` where the partition has fewer clients than a round is to have."""
    if (
        job.clients.chosen(job.train.clients_per_round)
        > federation.num_clients - job.clients.held_out
    ):
        keys = f"train.clients_per_round = {job.train.clients_per_round}"
        if job.clients.oversample > 1:
            keys += f", clients.oversample = {job.clients.oversample}"
        clients = "client" if federation.num_clients == 1 else "clients"
        absent = f", of which {job.clients.held_out} are held out" if job.clients.held_out else ""
        raise InputError(
            f"{keys}: the partition has only {federation.num_clients} {clients}{absent}"
        )


def _setting(job: Job, federation: Federation) -> Setting:
    """Return what the job's model is tried for."""
    rows = np.arange(min(EXAMPLES, len(federation.train)))
    examples, labels = next(federation.batches(federation.train, rows, torch.device("cpu")))
    sizes, batch_size = federation.partition.sizes, job.train.batch_size
    clients = np.flatnonzero(sizes % batch_size == 1 % batch_size)
    in_training = ""
    if len(clients):
        in_training = (
            f"train.batch_size = {batch_size}: one of client {clients[0]}'s images would be alone "
            "in its last batch"
        )
    in_evaluation = ""
    if len(federation.test) % EVALUATION_BATCH == 1:
        in_evaluation = (
            f"of {len(federation.test)} test images the last would be alone in a batch of its own"
        )
    return Setting(
        job.model.name,
        federation.inputs,
        federation.num_classes,
        job.train,
        examples,
        labels,
        in_training,
        in_evaluation,
    )


def _listed(names: Sequence[str]) -> str:
    """Return names for a message: the first few, and how many more there are."""
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"


def open_data(job: Job, read: Read | None = None) -> Federation:
    """Return the job's data, dealt to clients, less the images that the server takes from them.

    Raise `InputError` where all labels are the same.
    """
    numbers = [part.auxiliary_per_class for part in all_parts(job.method)]
    auxiliary_per_class = max(numbers, default=0)
    federation = open_federation(job.data, auxiliary_per_class=auxiliary_per_class, read=read)
    labels = np.unique(federation.train.labels)
    if len(labels) == 1:
        single_class = federation.train.classes[labels[0]]
        raise InputError(
            f"data.source = '{job.data.source}': all labels are '{single_class}', and with a "
            "single class there is nothing to learn; give data with two or more"
        )
    return federation


def server_view(setup: Setup, round: int, weights: Weights) -> ServerView:
    """Return the view of a part's `tell` and `update`.

    Its samples are the auxiliary set.
    """
    return ServerView(
        **common_view(setup, round, weights, setup.federation.auxiliary, Frozen(setup.model))
    )


def common_view(
    setup: Setup, round: int, weights: Weights, rows: np.ndarray, frozen: Frozen
) -> dict[str, Any]:
    """Return the fields of a `View` whose samples are some rows of the training set."""
    data = setup.federation
    num_clients, mean_examples = setup.population
    return {
        "round": round,
        "weights": weights,
        "num_classes": data.num_classes,
        "num_clients": num_clients,
        "mean_examples": mean_examples,
        "frozen": frozen,
        "run": setup.run,
        "samples": partial(data.batches, data.train, rows, setup.device),
    }
