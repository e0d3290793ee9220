"""The round engine: a generator that yields each round when it is finished. Its callers log, keep and stop.

A round in the order of its steps, and the functions below that do them:

    open_round          draw a cohort, cut it into tasks, survey it, let the parts tell what they send
    _begin_training     hand out the training; what it returns waits for the replies
    _train              add up the replies' summands
    _updated            the parts' updates make the next weights
    _begin_evaluation   hand out the evaluation; what it returns waits for the result

Nothing in training depends on an evaluation. So the next round's training is handed out before a round is evaluated,
and actors that have nothing left to evaluate begin it at once.

The `Workers` know where the work is done; the engine does not. Nothing depends on which client was ready first: the
cohort is drawn from the seed and cut into tasks, a task's summands are added in its order, and so are the tasks' sums.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfed.base.errors import BrokenContract
from rayfed.base.isolation import isolated
from rayfed.base.noted import at
from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.cohort import Cohort, cohort_at
from rayfed.losses import forgetting, metrics
from rayfed.methods.checks import in_force, refuse_spoilt, two_values
from rayfed.methods.part import Held, Parts, defines, parts_at, trains
from rayfed.methods.personal import Local, local_names, put_back, shared
from rayfed.methods.views import Step
from rayfed.methods.watch import call
from rayfed.rounds import measures
from rayfed.rounds.client_work import Broadcast
from rayfed.rounds.measures import UPDATES
from rayfed.rounds.round import Round
from rayfed.rounds.site import Site, server_view
from rayfed.rounds.tasks import Task, TaskReply, add_up, cut
from rayfed.rounds.workers import Workers
from rayfed.tensors.trees import Tree, copied, first_difference, num_bytes
from rayfed.tensors.weights import Weights, parameters_of, state, state_of
from rayfed.tensors.wire import unpack

log = logging.getLogger(__name__)


def start(site: Site, workers: Workers) -> Round:
    """Round 0: the initial model, evaluated."""
    return _begin_evaluation(site, _initial(site), workers)()


def rounds(
    site: Site,
    workers: Workers,
    last: Round | None = None,
    is_over: Callable[[], object] = lambda: False,
) -> Iterator[Round]:
    """The rounds after `last` up to `train.num_rounds`; without `last`, all rounds, the initial model first.

    `last` is yielded once more, evaluated, if it is the final round now and was not when it was played. `is_over` says
    after each round whether the run ends with it.

    When a round is yielded, actors may be at work on the next one. What fails in the next round is raised only when
    that is asked for.
    """
    num_rounds = site.job.train.num_rounds
    began: float | None = None  # when the work on `last` began; None if it was not played here
    if last is None:
        last = _initial(site)
    elif last.evaluation is not None or not site.job.train.evaluates(
        last.round
    ):  # it was yielded before
        if last.round >= num_rounds or is_over():
            return
        began = time.perf_counter()
        last = _begin_training(site, last, workers)(last)  # the numbers of `last` are known
    while True:
        evaluated = _begin_evaluation(site, last, workers)
        trained = _begin_training(site, last, workers) if last.round < num_rounds else None
        last = evaluated()
        ended = time.perf_counter()
        if began is not None:
            last = replace(last, seconds=ended - began)
        yield last
        if trained is None or is_over():
            return
        began = ended
        last = trained(last)


def play(site: Site, last: Round, workers: Workers, clients: Sequence[int] | None = None) -> Round:
    """The round after `last`, with its cohort or with the given clients, which all train; evaluated if that is due.

    Raises `RunFailed`, naming client and place, where an update cannot be averaged.
    """
    began = time.perf_counter()
    round = _begin_training(site, last, workers, clients)(last)
    round = _begin_evaluation(site, round, workers)()
    return replace(round, seconds=time.perf_counter() - began)


def _initial(site: Site) -> Round:
    """Round 0, not evaluated."""
    peak = np.full(site.federation.num_classes, np.nan)
    return Round(
        0, state_of(site.model), held={}, memories={}, evaluation=None, peak=peak, forgetting=None
    )


@dataclass(frozen=True, eq=False)
class Opening:
    """A round up to its training: the clients in it, and the message to them."""

    cohort: Cohort
    tasks: Sequence[Task]
    parts: Parts
    held: dict[str, Held]  # as the last round left them
    states: dict[str, Tree]  # slot -> state, once the parts have told
    broadcast: Broadcast
    stay: Local  # the entries of the model that stay at each client, and so are not sent
    bytes_surveyed: int

    @property
    def bytes_down(self) -> int:
        """What the server sends: the same message to each client that was chosen."""
        message = [
            shared(self.stay, self.broadcast.weights),
            self.broadcast.states,
            self.broadcast.payloads,
        ]
        return num_bytes(message) * len(self.cohort.chosen)

    @property
    def to_train(self) -> Sequence[Task]:
        """The tasks of training: none in CCVR's round, which needs the survey alone."""
        return self.tasks if trains(self.parts) else ()


def open_round(
    site: Site, last: Round, workers: Workers, clients: Sequence[int] | None = None
) -> Opening:
    """Draw the cohort of the round after `last`, survey it, and let each part give the payload for it.

    Where no client of the cohort answers, no hook is called but `init`.
    """
    number, job = last.round + 1, site.job
    parts = parts_at(job.method, number)
    view = server_view(site, number, copied(last.weights))
    cohort = cohort_of(site, number) if clients is None else Cohort(clients, clients)
    tasks = cut(
        {client: site.federation.num_examples(client) for client in cohort.answered}, job.train
    )
    with (
        at(f"init, round {number}"),
        isolated(seed_of(job.seed, Purpose.INIT, number), site.device),
    ):
        held = {
            part.slot: in_force(part, last.held.get(part.slot), number, last.weights)
            for part in parts
        }
    # A copy, so that the last round stays as it was, and can be kept, where a hook writes to it and the round fails.
    states = {slot: copied(hold.state) for slot, hold in held.items()}

    parts = parts if tasks else ()
    surveyors = {part.slot: states[part.slot] for part in parts if defines(part, "survey")}
    broadcast = Broadcast(
        number, last.weights, surveyors, {}, {slot: hold.since for slot, hold in held.items()}
    )
    survey = add_up(
        f"round {number} (survey)", workers.survey(broadcast, tasks) if surveyors else ()
    )
    surveyed = unpack(survey.summands, copy=False)

    payloads: dict[str, Tree] = {}
    with (
        at(f"tell, round {number}"),
        isolated(seed_of(job.seed, Purpose.TELL, number), site.device),
    ):
        for part in parts:
            first = held[part.slot].since == number
            arguments = (states[part.slot], view, surveyed.get(part.slot))
            values = call(part, "tell", *arguments, watch=first)
            states[part.slot], payload = two_values(part, "tell", values, "state", "payload")
            if payload is not None:
                payloads[part.slot] = payload
    stay = local_names(parts, site.model)
    return Opening(
        cohort,
        tasks,
        parts,
        held,
        states,
        replace(broadcast, payloads=payloads),
        stay,
        survey.bytes_up,
    )


def cohort_of(site: Site, round: int) -> Cohort:
    """The clients of a round, as the seed and the settings have it."""
    job, data = site.job, site.federation
    model = num_bytes(state(site.model))
    return cohort_at(
        round, job.seed, job.clients, job.train, site.trace, data.partition.sizes, model
    )


def _begin_training(
    site: Site, last: Round, workers: Workers, clients: Sequence[int] | None = None
) -> Callable[[Round], Round]:
    """Hand out the training of the round after `last`. The function that is returned waits for it, and gives the round.

    That function is called with `last` once it is evaluated and recorded. So that it is recorded whatever happens next,
    errors are raised only then, and a round with a survey, which takes its time, begins only then.
    """

    def hand_out(last: Round) -> tuple[Opening, Iterator[TaskReply]]:
        opening = open_round(site, last, workers, clients)
        tasks = opening.to_train
        return opening, workers.train(opening.broadcast, tasks, last.memories) if tasks else iter(
            ()
        )

    begun: tuple[Opening, Iterator[TaskReply]] | None = None
    failed: Exception | None = None
    if not any(defines(part, "survey") for part in parts_at(site.job.method, last.round + 1)):
        try:
            begun = hand_out(last)
        except Exception as error:
            failed = error

    def trained(last: Round) -> Round:
        nonlocal begun
        if failed is not None:
            raise failed
        opening, replies = begun or hand_out(last)
        begun = None  # it holds all that was sent
        return _train(site, last, workers, opening, replies)

    return trained


def _train(
    site: Site, last: Round, workers: Workers, opening: Opening, replies: Iterator[TaskReply]
) -> Round:
    """The round after `last`, not evaluated: its clients' summands are added, and make the update."""
    number, cohort = opening.broadcast.round, opening.cohort
    unchanged = replace(
        last,
        round=number,
        held=opening.held,
        evaluation=None,
        forgetting=None,
        clients=(),
        seconds=0.0,
        bytes_down=opening.bytes_down,
        bytes_up=0,
        notes=cohort.notes,
        confusions={},
    )
    if not cohort.answered:
        log.warning("round %d is empty, and the model stays as it was: %s", number, cohort)
        return unchanged
    reply = add_up(f"round {number}", replies)
    total, clients = unpack(reply.summands, copy=False), reply.clients
    updates = total.pop(UPDATES, None)
    weights, states, shown = _updated(site, last.weights, opening, total)
    measured = measures.of_round(updates, len(clients))
    measured |= _drift(site, number, workers, last.weights, weights)
    replied = {client.row.client: client for client in clients}
    in_order = [replied[client] for client in cohort.answered if client in replied]
    absent = {client: memory for client, memory in last.memories.items() if client not in replied}
    return replace(
        unchanged,
        weights=weights,
        shown=shown,
        held={slot: replace(hold, state=states[slot]) for slot, hold in opening.held.items()},
        memories=absent
        | {reply.row.client: reply.memory for reply in clients if reply.memory is not None},
        clients=tuple(reply.row for reply in in_order),
        bytes_up=opening.bytes_surveyed + reply.bytes_up,
        notes={**cohort.notes, **measured},
        confusions={
            reply.row.client: reply.confusion for reply in in_order if reply.confusion is not None
        },
    )


def _updated(
    site: Site, before: Weights, opening: Opening, total: dict[str, Tree]
) -> tuple[Weights, dict[str, Tree], Weights | None]:
    """The new global model, the parts' new states, and the weights to evaluate where they are others.

    Each part's `update` gets the total of its summands, in turn.
    """
    number, states = opening.broadcast.round, dict(opening.states)
    stay = opening.stay
    trainable = frozenset(shared(stay, parameters_of(site.model)))
    step = Step(server_view(site, number, copied(before)), None, trainable)
    with (
        at(f"update, round {number}"),
        isolated(seed_of(site.job.seed, Purpose.UPDATE, number), site.device),
    ):
        for part in opening.parts:
            first = opening.held[part.slot].since == number
            arguments = (states[part.slot], total.get(part.slot), step)
            values = call(part, "update", *arguments, watch=first)
            states[part.slot], step = two_values(part, "update", values, "state", "step")
            refuse_spoilt(f"round {number}, after {type(part).__name__}.update", step)
            if stay and step.proposed is not None:
                step = step.towards(put_back(stay, step.proposed, step.weights))

    def in_order(what: str, weights: Weights) -> Weights:
        unlike = first_difference(weights, before)
        if unlike is not None:
            raise BrokenContract(f"round {number}: the {what} does not fit the model: {unlike}")
        return {name: weights[name] for name in before}

    weights = in_order("average", step.averaged)
    return (
        weights,
        states,
        None if step.shown is None else in_order("evaluated average", step.shown),
    )


def _drift(
    site: Site, number: int, workers: Workers, before: Weights, after: Weights
) -> dict[str, float]:
    """How much the global model's neurons have changed in a round, if the job measures that."""
    if "drift" not in site.job.measures(number):
        return {}
    of_before, of_after = workers.activations(before), workers.activations(after)
    if of_before is None or of_after is None:
        return {}
    return {f"drift.{key}": value for key, value in measures.aligned(of_before, of_after)}


def _begin_evaluation(site: Site, round: Round, workers: Workers) -> Callable[[], Round]:
    """Hand out the evaluation of a round, if that is due. The function that is returned gives the round with it.

    The class accuracies count as a peak only where `train.eval_every` asks for them. The extra evaluation after the
    last round does not count, so that a run that is extended has the forgetting of a run that never stopped. Nor does
    round 0: an untrained model may know a class by chance, which no training has forgotten.
    """
    if not site.job.train.evaluates(round.round):
        return lambda: round
    wait = workers.evaluate(round.evaluated)

    def evaluated() -> Round:
        evaluation = wait()
        class_accuracy = metrics.class_accuracy(evaluation.confusion)
        by_domain = zip(
            site.federation.test.domain_names, *evaluation.domains.tolist(), strict=True
        )
        counts = site.job.train.counts(round.round)
        lost = None
        if site.job.train.can_forget(round.round):
            lost = forgetting.peak(round.peak, class_accuracy)
        return replace(
            round,
            evaluation=evaluation,
            peak=np.fmax(round.peak, class_accuracy) if counts else round.peak,
            forgetting=lost,
            notes={
                **round.notes,
                **{f"domain.{name}": right / images for name, right, images in by_domain if images},
            },
        )

    return evaluated
