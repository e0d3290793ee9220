"""Who takes part in a round: the rule of `clients.sampling`, and what it is told.

A rule that asks gets the losses of the global model from clients before it chooses. A rule that
learns is told what the chosen clients reported after their training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayfed.base.errors import Diverged, InputError
from rayfed.clients.cohort import BYTES_OF_LOSS, Circumstances, Cohort, choice_at, cohort_at
from rayfed.clients.sampling import Seen, State, label_of, refuse_choice, refuse_state, start
from rayfed.rounds.executor import Executor, Losses
from rayfed.rounds.messages import ClientReply
from rayfed.rounds.round import Round
from rayfed.rounds.setup import Setup
from rayfed.rounds.tasks import cut_into_tasks
from rayfed.tensors.trees import num_bytes
from rayfed.tensors.weights import Weights, state


def looks_back(setup: Setup) -> bool:
    """Say whether the choice depends on the rounds before it, not on the job alone."""
    rule = setup.job.clients.sampling
    return rule.asks or rule.learns


def cohort_of(setup: Setup, round: int) -> Cohort:
    """Draw the clients of a round, as the seed and the settings have it.

    Raises `InputError` if the rule needs to know the rounds before it.
    """
    if looks_back(setup):
        raise InputError(
            f"{label_of(setup.job.clients.sampling)}: who takes part in round {round} depends on "
            "the rounds before it"
        )
    of = circumstances(setup, round)
    return of.simple_cohort() or cohort_at(of, choice_at(of, started(setup)))


def choose(setup: Setup, executor: Executor, previous: Round) -> Cohort:
    """Choose the clients of the round after `previous`; candidates are asked if the rule does."""
    rule = setup.job.clients.sampling
    of = circumstances(setup, previous.round + 1)
    simple = of.simple_cohort()
    if simple is not None:
        return simple
    choice = choice_at(of, started(setup) if previous.sampling is None else previous.sampling)
    if rule.asks:
        asked = refuse_choice(rule, choice, rule.ask(choice), "ask")
        losses = losses_of(setup, executor, previous.weights, of.round, asked)
        choice = replace(choice, asked=asked, losses=losses)
    return cohort_at(of, choice)


def losses_of(
    setup: Setup, executor: Executor, weights: Weights, round: int, clients: np.ndarray
) -> np.ndarray:
    """Return the loss of a model on the data of each of these clients (Q,), float64 (Q,)."""
    sizes = {client: setup.federation.num_examples(client) for client in clients.tolist()}
    tasks = cut_into_tasks(sizes, setup.job.train)
    work = Losses(round, setup.job.clients.sampling.one_batch)
    by_client: dict[int, float] = {}
    results = executor.map(work, tasks, {"weights": weights})
    for task, losses in zip(tasks, results, strict=True):
        by_client.update(zip(task, losses, strict=True))
    for client, loss in by_client.items():
        if not np.isfinite(loss):
            raise Diverged(
                f"the loss of the global model is {loss} at client {client}, which was asked in "
                f"round {round}; try a smaller train.lr"
            )
    return np.array([by_client[client] for client in clients.tolist()])


def learned(
    setup: Setup, previous: Round, cohort: Cohort, replies: Sequence[ClientReply]
) -> State | None:
    """Return the state of the rule after a round, in which clients of the cohort have trained.

    It is None where the rule learns nothing. `replies` are in the order of the cohort.
    """
    rule = setup.job.clients.sampling
    if not rule.learns or not replies:
        return previous.sampling
    seen = Seen(
        round=previous.round + 1,
        clients=np.array([reply.row.client for reply in replies], np.int64),
        sizes=np.array([reply.row.num_examples for reply in replies], np.int64),
        losses=np.array([reply.row.train_loss for reply in replies]),
        squares=np.array([reply.mean_square for reply in replies]),
        seconds=np.array(cohort.seconds) if cohort.seconds else None,
    )
    before = started(setup) if previous.sampling is None else previous.sampling
    return refuse_state(rule, rule.learn(before, seen), "learn")


def bytes_reported(setup: Setup, replies: Sequence[ClientReply]) -> int:
    """Return the bytes of what clients report to a rule that learns.

    These are two numbers: the mean of a client's losses, and the mean of their squares.
    """
    return 2 * BYTES_OF_LOSS * len(replies) if setup.job.clients.sampling.learns else 0


def started(setup: Setup) -> State:
    """Return the state of the rule before the first round."""
    return start(setup.job.clients.sampling, setup.federation.num_clients)


def circumstances(setup: Setup, round: int) -> Circumstances:
    """Return what the draws of a round's cohort depend on."""
    job, sizes = setup.job, setup.federation.partition.sizes
    model = num_bytes(state(setup.model))
    return Circumstances(round, job.seed, job.clients, job.train, setup.trace, sizes, model)
