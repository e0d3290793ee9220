"""The round engine: a generator that yields each round when it is finished. Its callers log, keep and stop.

    draw a cohort -> survey it -> tell it what the parts say -> train it -> add its summands -> update -> evaluate

Only some rounds are evaluated where `train.eval_every` says so; nothing in training depends on it. So the next round's
work is handed out before a round is evaluated, and actors that have nothing left to evaluate begin it at once.

The `Workers` know where the work is done; the engine does not. Nothing depends on which client was ready first: the
cohort is drawn from the seed and cut into tasks, a task's summands are added in its order, and so are the tasks' sums.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfed.base.errors import RunFailed
from rayfed.base.isolation import isolated
from rayfed.base.seeds import Purpose, seed_of
from rayfed.base.spans import at, timed
from rayfed.clients.cohort import Cohort, cohort_at
from rayfed.losses import metrics
from rayfed.losses.metrics import Evaluation
from rayfed.methods.part import Held, Parts, defines, in_force, parts_at, refuse_spoilt, trains, two_values
from rayfed.methods.personal import local_names, put_back, shared
from rayfed.methods.views import Step
from rayfed.rounds import measures
from rayfed.rounds.local import Broadcast, Site, server_view
from rayfed.rounds.measures import UPDATES
from rayfed.rounds.round import Arrival, Round, Workers
from rayfed.rounds.tasks import Summed, Task, add_up, cut
from rayfed.tensors.trees import Tree, copied, first_difference, num_bytes
from rayfed.tensors.weights import parameters_of, state, state_of

log = logging.getLogger(__name__)
Replies = Iterator[tuple[Summed, list[Arrival]]]  # of `Workers.train`


def start(site: Site, workers: Workers) -> Round:
    """Round 0: the initial model, evaluated."""
    return _evaluated(site, first := _initial(site), _evaluation(site, first, workers))


def rounds(
    site: Site, workers: Workers, last: Round | None = None, is_over: Callable[[], object] = lambda: False
) -> Iterator[Round]:
    """The rounds after `last` up to `train.num_rounds`; without `last`, all rounds, the initial model first.

    `last` itself comes again, evaluated, where it is the last round now, and was not when it was played. `is_over`
    says after each round whether the run ends with it.

    The next round has been opened when a round comes, unless it surveys, and actors train for it that would wait for
    the end of the evaluation. What fails in it is raised after that.
    """
    training, since, played = site.job.train, time.perf_counter(), False
    if last is None:
        last = _initial(site)
    elif last.evaluation is not None or not training.evaluates(last.round):  # it has come already
        if last.round >= training.num_rounds or is_over():
            return
        last, played = _begin(site, last, workers)(last), True
    while True:
        evaluation = _evaluation(site, last, workers)
        end = _begin(site, last, workers) if last.round < training.num_rounds else None
        last, before, since = _evaluated(site, last, evaluation), since, time.perf_counter()
        yield (last := replace(last, seconds=since - before) if played else last)
        if end is None or is_over():
            return
        last, played = end(last), True
        end = None  # it holds the round before, and all that was sent


@timed("server")
def play(site: Site, last: Round, workers: Workers, clients: Sequence[int] | None = None) -> Round:
    """The round after `last`, with its cohort or with the given clients, which all train; evaluated if that is due.

    Raises `RunFailed`, naming client and place, where an update cannot be averaged.
    """
    started = time.perf_counter()
    round = _begin(site, last, workers, clients)(last)
    round = _evaluated(site, round, _evaluation(site, round, workers))
    return replace(round, seconds=time.perf_counter() - started)


def _initial(site: Site) -> Round:
    """Round 0, not evaluated."""
    return Round(0, state_of(site.model), {}, {}, None, np.full(site.federation.num_classes, np.nan), None)


def _evaluation(site: Site, round: Round, workers: Workers) -> Callable[[], Evaluation | None]:
    """Begin to evaluate a round, if that is due after it."""
    due = site.job.train.evaluates(round.round)
    return workers.evaluate(round.weights) if due else lambda: None


@timed("server")
def _evaluated(site: Site, round: Round, result: Callable[[], Evaluation | None]) -> Round:
    """A round with the evaluation of its weights, if one is due after it.

    Its class accuracies count as a peak only where `train.eval_every` asks for them. The extra evaluation after the
    last round does not count, so that a run that is extended has the forgetting of a run that never stopped. Nor does
    round 0: an untrained model may know a class by chance, which no training has forgotten.
    """
    if (evaluation := result()) is None:
        return round
    class_accuracy = metrics.class_accuracy(evaluation.confusion)
    by_domain = zip(site.federation.test.domain_names, *evaluation.domains.tolist(), strict=True)
    counts = site.job.train.counts(round.round)
    return replace(
        round,
        evaluation=evaluation,
        peak=np.fmax(round.peak, class_accuracy) if counts else round.peak,
        forgetting=metrics.forgetting_from(round.peak, class_accuracy),
        notes={**round.notes, **{f"domain.{name}": right / images for name, right, images in by_domain if images}},
    )


@timed("server")
def _begin(site: Site, last: Round, workers: Workers, clients: Sequence[int] | None = None) -> Callable[[Round], Round]:
    """Begin the round after `last`, which need not be evaluated yet: that is passed to the function, which ends it.

    A round with a survey begins only then: `last` would be recorded after the survey, and be lost if it fails.
    """

    def opened() -> tuple[Opening, Replies]:
        opening = open_round(site, last, workers, clients)
        tasks = opening.to_train
        return opening, workers.train(opening.broadcast, tasks, last.memories) if tasks else iter(())

    def end(finished: Round) -> Round:
        if failure is not None:
            raise failure
        return _train(site, finished, workers, *(begun or opened()))

    begun, failure = None, None
    if not any(defines(part, "survey") for part in parts_at(site.job.method, last.round + 1)):
        try:
            begun = opened()
        except Exception as error:  # of the next round: `last` is finished first
            failure = error
    return end


@timed("server")
def _train(site: Site, last: Round, workers: Workers, opening: Opening, replies: Replies) -> Round:
    """The round after `last`, not evaluated."""
    broadcast, states = opening.broadcast, opening.states
    number, cohort = broadcast.round, opening.cohort
    played = Round(
        round=number,
        weights=last.weights,
        held=opening.held,
        memories=last.memories,
        evaluation=None,
        peak=last.peak,
        forgetting=None,
        bytes_down=num_bytes([broadcast.weights, broadcast.states, broadcast.payloads]) * len(cohort.chosen),
        notes=cohort.notes,
    )
    if not cohort.answered:
        log.warning("round %d is empty, and the model stays as it was: %s", number, cohort)
        return played

    total, found = add_up(f"round {number}", opening.to_train, replies)
    arrivals = {arrival.row.client: arrival for arrival in found}
    answers = {client: arrivals[client] for client in (cohort.answered if opening.to_train else ())}
    memories = {client: memory for client, memory in last.memories.items() if client not in arrivals}
    memories |= {client: arrival.memory for client, arrival in arrivals.items() if arrival.memory is not None}
    notes = measures.of_round(total.pop(UPDATES, None), len(found))

    stay = local_names(opening.parts, site.model)
    trainable = frozenset(shared(stay, parameters_of(site.model)))
    step = Step(server_view(site, number, copied(last.weights)), None, trainable)
    with at(f"update, round {number}"), isolated(seed_of(site.job.seed, Purpose.UPDATE, number), site.device):
        for part in opening.parts:
            given = part.update(states[part.slot], total.get(part.slot), step)
            states[part.slot], step = two_values(part, "update", given, "state", "step")
            refuse_spoilt(f"round {number}, after {type(part).__name__}.update", step)
            if stay and step.proposed is not None:
                step = step.towards(put_back(stay, step.proposed, step.weights))
    if (difference := first_difference(step.averaged, last.weights)) is not None:
        raise RunFailed(f"round {number}: the average does not fit the model: {difference}")
    weights = {name: step.averaged[name] for name in last.weights}  # always in the model's order
    if "drift" in site.job.measures(number):
        before, after = workers.activations(last.weights), workers.activations(weights)
        if before is not None and after is not None:
            notes |= {f"drift.{key}": value for key, value in measures.aligned(before, after)}
    return replace(
        played,
        weights=weights,
        held={slot: replace(hold, state=states[slot]) for slot, hold in opening.held.items()},
        memories=memories,
        clients=tuple(arrival.row for arrival in answers.values()),
        bytes_up=opening.bytes_surveyed + sum(arrival.bytes_up for arrival in arrivals.values()),
        notes={**cohort.notes, **notes},
        confusions={client: one.confusion for client, one in answers.items() if one.confusion is not None},
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
    bytes_surveyed: int

    @property
    def to_train(self) -> Sequence[Task]:
        """The tasks of training: none in CCVR's round, which needs the survey alone."""
        return self.tasks if trains(self.parts) else ()


def open_round(site: Site, last: Round, workers: Workers, clients: Sequence[int] | None = None) -> Opening:
    """Draw the cohort of the round after `last`, survey it, and let each part give the payload for it.

    Where no client of the cohort answers, no hook is called but `init`.
    """
    number, job = last.round + 1, site.job
    parts, view, payloads = parts_at(job.method, number), server_view(site, number, copied(last.weights)), {}
    cohort = cohort_of(site, number) if clients is None else Cohort(clients, clients)
    tasks = cut({client: site.federation.num_examples(client) for client in cohort.answered}, job.train)
    with at(f"init, round {number}"), isolated(seed_of(job.seed, Purpose.INIT, number), site.device):
        held = {part.slot: in_force(part, last.held.get(part.slot), number, last.weights) for part in parts}
    # A copy, so that the last round stays as it was, and can be kept, where a hook writes to it and the round fails.
    states = {slot: copied(hold.state) for slot, hold in held.items()}

    parts = parts if tasks else ()
    surveyors = {part.slot: states[part.slot] for part in parts if defines(part, "survey")}
    broadcast = Broadcast(number, last.weights, surveyors, {}, {slot: hold.since for slot, hold in held.items()})
    replies = workers.survey(broadcast, tasks) if surveyors else ()
    surveyed, sizes = add_up(f"round {number} (survey)", tasks if surveyors else (), replies)

    with at(f"tell, round {number}"), isolated(seed_of(job.seed, Purpose.TELL, number), site.device):
        for part in parts:
            given = part.tell(states[part.slot], view, surveyed.get(part.slot))
            states[part.slot], payload = two_values(part, "tell", given, "state", "payload")
            if payload is not None:
                payloads[part.slot] = payload
    return Opening(cohort, tasks, parts, held, states, replace(broadcast, payloads=payloads), sum(sizes))


def cohort_of(site: Site, round: int) -> Cohort:
    """The clients of a round, as the seed and the settings have it."""
    job, data = site.job, site.federation
    model = num_bytes(state(site.model))
    return cohort_at(round, job.seed, job.clients, job.train, site.trace, data.partition.sizes, model)
