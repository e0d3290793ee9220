"""The rounds of a run, from top to bottom.

    rounds        the loop: evaluate round n while round n + 1 trains (on Ray)
    NextRound     the round that is in flight meanwhile
    open_round    draw a cohort, survey it, let the parts tell what they send
    begin_round   open the round and hand out its training
    finish_round  add up what clients sent, and let the parts update the model

The executor knows where work is done; this file does not. Which client was ready first changes
nothing: the cohort and its tasks are a function of the job, and sums are added in that order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from rayfed.base.errors import BrokenContract
from rayfed.base.isolation import isolated
from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.cohort import Cohort
from rayfed.measures import forgetting, metrics
from rayfed.measures.clients import aligned
from rayfed.measures.gradients import GRADIENTS, dissimilarity
from rayfed.measures.updates import UPDATES, agreement
from rayfed.methods.checks import in_force, refuse_spoilt, two_values
from rayfed.methods.part import Held, Parts, defines, parts_at, remembers, trains
from rayfed.methods.personal import Local, local_names, put_back, shared
from rayfed.methods.views import Step
from rayfed.methods.watch import call
from rayfed.rounds.choosing import bytes_reported, choose, learned
from rayfed.rounds.evaluation import sample
from rayfed.rounds.executor import (
    Evaluate,
    Executor,
    LocalModel,
    MeasureActivations,
    Results,
    Survey,
    Train,
    nothing,
    pieces_of,
)
from rayfed.rounds.messages import Assignment, Broadcast, ClientReply, Task, TaskReply
from rayfed.rounds.round import DIVERGED, Memory, Round
from rayfed.rounds.setup import Setup, server_view
from rayfed.rounds.tasks import add_up, cut_into_tasks, grouped
from rayfed.tensors.trees import Tree, copied, first_difference, num_bytes
from rayfed.tensors.weights import Weights, parameters_of, state_of
from rayfed.tensors.wire import unpack

log = logging.getLogger(__name__)

# A line of the log names so many clients that have diverged.
DIVERGED_NAMED = 5


def never() -> bool:
    """Return False."""
    return False


def rounds(
    setup: Setup,
    executor: Executor,
    current: Round | None = None,
    is_over: Callable[[], object] = never,
) -> Iterator[Round]:
    """Yield the rounds after `current` up to `train.num_rounds`; without it, all from 0 on.

    If the run was shortened so that `current` is now its final round, that is evaluated and yielded
    again. `is_over` says after each round whether the run ends with it.

    Workers may already train the next round when a round is yielded. Errors of that round are
    raised when it is asked for.
    """
    num_rounds = setup.job.train.num_rounds
    # When the work on the current round began; None if that was not here.
    began: float | None = None
    if current is None:
        current = initial(setup)
    elif current.evaluation is not None or not setup.job.train.evaluates(current.round):
        # It was yielded before.
        if current.round >= num_rounds or is_over():
            return
        began = time.perf_counter()
        current = NextRound(setup, executor, current).finish(current)

    while True:
        # Nothing in training depends on an evaluation. So on Ray the next round begins before this
        # one is measured, and workers that have no test images left go on with clients.
        results = begin_evaluation(setup, executor, current)
        with closing(NextRound(setup, executor, current)) as following:
            current = with_evaluation(setup, current, results)
            ended = time.perf_counter()
            if began is not None:
                current = replace(current, seconds=ended - began)
            yield current

            if current.round >= num_rounds or is_over():
                return
            began = ended
            current = following.finish(current)


def start(setup: Setup, executor: Executor) -> Round:
    """Return round 0: the initial model, evaluated."""
    first = initial(setup)
    return with_evaluation(setup, first, begin_evaluation(setup, executor, first))


def play(
    setup: Setup, previous: Round, executor: Executor, clients: Sequence[int] | None = None
) -> Round:
    """Return the round after `previous`, evaluated if that is due.

    With `clients`, these train in place of the cohort. Raises `RunFailed`, naming client and place,
    where an update cannot be averaged.
    """
    began = time.perf_counter()
    opening, replies = begin_round(setup, executor, previous, clients)
    round = finish_round(setup, executor, previous, opening, replies)
    round = with_evaluation(setup, round, begin_evaluation(setup, executor, round))
    return replace(round, seconds=time.perf_counter() - began)


class NextRound:
    """The round after one that is still to be evaluated and recorded.

    It is in one of three states: its clients train (`_begun`); it could not begin (`_error`); or it
    has not begun, because it asks or surveys clients, or because the run ends before it. `finish`
    waits for it in each of them; `close` drops it.
    """

    def __init__(self, setup: Setup, executor: Executor, previous: Round) -> None:
        self._setup, self._executor = setup, executor
        self._begun: tuple[Opening, Results] | None = None
        self._error: Exception | None = None

        if previous.round >= setup.job.train.num_rounds:
            return
        # To wait for clients' answers here would hold up the evaluation of `previous`.
        asks = setup.job.clients.sampling.asks
        if asks or surveys(parts_at(setup.job.method, previous.round + 1)):
            return
        try:
            self._begun = begin_round(setup, executor, previous)
        except Exception as error:
            # `previous` must be recorded first, and a run that ends with it never needs this round.
            self._error = error

    def finish(self, previous: Round) -> Round:
        """Wait for the round and return it, not evaluated.

        `previous` is the round that this object was made with, evaluated and recorded by now: its
        best accuracies are needed.
        """
        if self._error is not None:
            raise self._error
        begun = self._begun or begin_round(self._setup, self._executor, previous)
        # It holds all that was sent, which would stay in memory as long as this object.
        self._begun = None
        return finish_round(self._setup, self._executor, previous, *begun)

    def close(self) -> None:
        """Drop the round: the run ends before it."""
        if self._begun is not None:
            _, replies = self._begun
            replies.close()
            self._begun = None


@dataclass(frozen=True, eq=False)
class Opening:
    """A round up to its training: the clients in it, and what is sent to them."""

    cohort: Cohort
    tasks: Sequence[Task]
    # The parts whose hooks are called: none in an empty round.
    parts: Parts
    # Each part with its state as the previous round left it, by slot.
    held: dict[str, Held]
    # Each part's state once it has told, by slot.
    states: dict[str, Tree]
    broadcast: Broadcast
    # The entries of the model that stay at each client, and so are not sent.
    stay: Local
    bytes_surveyed: int

    @property
    def bytes_down(self) -> int:
        """Return the bytes that the server sends, the same to each client that was chosen.

        A client that was only asked for its loss has got the weights alone.
        """
        broadcast = self.broadcast
        sent = [shared(self.stay, broadcast.weights), broadcast.states, broadcast.payloads]
        for_losses = num_bytes(broadcast.weights) * self.cohort.num_only_asked
        return num_bytes(sent) * len(self.cohort.chosen) + for_losses

    def without_answers(self, previous: Round) -> Round:
        """Return the round in which no client answers: the model stays as it was."""
        return replace(
            previous.without_results(),
            round=self.broadcast.round,
            held=self.held,
            bytes_down=self.bytes_down,
            bytes_up=self.cohort.bytes_of_losses,
            notes=self.cohort.notes,
        )

    @property
    def to_train(self) -> Sequence[Task]:
        """Return the tasks of training: none in CCVR's round, which needs the survey alone."""
        return self.tasks if trains(self.parts) else ()


def open_round(
    setup: Setup, previous: Round, executor: Executor, clients: Sequence[int] | None = None
) -> Opening:
    """Draw the cohort of the round after `previous`, survey it, and let each part tell.

    Where no client of the cohort answers, no hook is called but `init`.
    """
    number = previous.round + 1
    parts = parts_at(setup.job.method, number)
    cohort = choose(setup, executor, previous) if clients is None else Cohort(clients, clients)
    sizes = {client: setup.federation.num_examples(client) for client in cohort.answered}
    tasks = cut_into_tasks(sizes, setup.job.train)

    held: dict[str, Held] = {}
    with server_hooks(setup, Purpose.INIT, number):
        for part in parts:
            held[part.slot] = in_force(part, previous.held.get(part.slot), number, previous.weights)
    # Hooks may write to a state. The previous round must stay as it was, to be kept if this one
    # fails.
    states = {slot: copied(hold.state) for slot, hold in held.items()}
    since = {slot: hold.since for slot, hold in held.items()}
    if not tasks:
        parts = ()

    surveying = {part.slot: states[part.slot] for part in surveys(parts)}
    broadcast = Broadcast(number, previous.weights, surveying, {}, since)
    survey = add_up(f"round {number} (survey)", begin_survey(executor, broadcast, tasks))
    surveyed = unpack(survey.summands, copy=False)

    payloads: dict[str, Tree] = {}
    view = server_view(setup, number, copied(previous.weights))
    with server_hooks(setup, Purpose.TELL, number):
        for part in parts:
            first = held[part.slot].since == number
            arguments = (states[part.slot], view, surveyed.get(part.slot))
            values = call(part, "tell", *arguments, watch=first)
            states[part.slot], payload = two_values(part, "tell", values, "state", "payload")
            if payload is not None:
                payloads[part.slot] = payload
    return Opening(
        cohort=cohort,
        tasks=tasks,
        parts=parts,
        held=held,
        states=states,
        broadcast=replace(broadcast, payloads=payloads),
        stay=local_names(parts, setup.model),
        bytes_surveyed=survey.bytes_up,
    )


def begin_round(
    setup: Setup, executor: Executor, previous: Round, clients: Sequence[int] | None = None
) -> tuple[Opening, Results]:
    """Open the round after `previous` and hand out its training."""
    opening = open_round(setup, previous, executor, clients)
    replies = begin_training(
        setup, executor, opening.broadcast, opening.to_train, previous.memories
    )
    return opening, replies


def finish_round(
    setup: Setup, executor: Executor, previous: Round, opening: Opening, replies: Results
) -> Round:
    """Add up the replies in order, and let the parts make the next model; it is not evaluated."""
    number, cohort = opening.broadcast.round, opening.cohort
    without_answers = opening.without_answers(previous)
    if not cohort.answered:
        replies.close()
        log.warning("round %d is empty, and the model stays as it was: %s", number, cohort)
        return without_answers

    # In the order of the tasks, whichever arrives first: so the sum has the same bits every time.
    reply = add_up(f"round {number}", replies)
    total = unpack(reply.summands, copy=False)
    # The summands of measures belong to no part.
    updates = total.pop(UPDATES, None)
    gradients = total.pop(GRADIENTS, None)

    # The average is the first part's update; later parts may change what it proposes.
    step, states = update(setup, opening, total, previous.weights)
    weights = in_models_order("average", step.averaged, previous.weights, number)
    shown = step.shown
    if shown is not None:
        shown = in_models_order("evaluated average", shown, previous.weights, number)

    measured = agreement(updates, len(reply.clients))
    measured |= dissimilarity(gradients, len(reply.clients), setup.federation.num_classes)
    if "drift" in setup.job.measures(number):
        measured |= drift(setup, executor, number, previous.weights, weights)

    in_order = cohort_order(reply.clients, cohort.answered)
    measured |= diverged(number, opening.parts, in_order)
    bytes_up = without_answers.bytes_up + opening.bytes_surveyed + reply.bytes_up
    bytes_up += bytes_reported(setup, in_order)
    confusions = {
        client.row.client: client.confusion for client in in_order if client.confusion is not None
    }
    return replace(
        without_answers,
        weights=weights,
        shown=shown,
        held={slot: replace(hold, state=states[slot]) for slot, hold in opening.held.items()},
        memories=memories_after(previous, reply.clients),
        clients=tuple(client.row for client in in_order),
        bytes_up=bytes_up,
        notes={**cohort.notes, **measured, **step.notes},
        confusions=confusions,
        sampling=learned(setup, previous, cohort, in_order),
    )


def cohort_order(replies: Sequence[ClientReply], cohort: Sequence[int]) -> list[ClientReply]:
    """Return the clients' replies in the order of the cohort: tasks have the largest first."""
    by_client = {reply.row.client: reply for reply in replies}
    return [by_client[client] for client in cohort if client in by_client]


def diverged(number: int, parts: Parts, replies: Sequence[ClientReply]) -> dict[str, float]:
    """Return how many clients have diverged, and log which; empty if no part skips them."""
    if not any(part.skips_diverged for part in parts):
        return {}
    clients = [reply.row.client for reply in replies if reply.row.notes.get(DIVERGED)]
    if clients:
        named = ", ".join(map(str, clients[:DIVERGED_NAMED]))
        more = ", ..." if len(clients) > DIVERGED_NAMED else ""
        log.warning(
            "round %d: %d of %d clients have diverged, and count as clients that have not moved: "
            "%s%s; a smaller train.lr may help",
            number,
            len(clients),
            len(replies),
            named,
            more,
        )
    return {DIVERGED: float(len(clients))}


def memories_after(previous: Round, replies: Sequence[ClientReply]) -> dict[int, Memory]:
    """Return all clients' memories once these have trained.

    A client that trained and gave no memory has none any more.
    """
    memories = dict(previous.memories)
    for reply in replies:
        memories.pop(reply.row.client, None)
        if reply.memory is not None:
            memories[reply.row.client] = reply.memory
    return memories


def update(
    setup: Setup, opening: Opening, total: dict[str, Tree], before: Weights
) -> tuple[Step, dict[str, Tree]]:
    """Give each part its total, in turn; return the last step and the parts' new states."""
    number, stay = opening.broadcast.round, opening.stay
    states = dict(opening.states)
    trainable = frozenset(shared(stay, parameters_of(setup.model)))
    # A copy, as in `open_round`: a hook may write to the weights.
    step = Step(server_view(setup, number, copied(before)), None, trainable)
    with server_hooks(setup, Purpose.UPDATE, number):
        for part in opening.parts:
            first = opening.held[part.slot].since == number
            arguments = (states[part.slot], total.get(part.slot), step)
            values = call(part, "update", *arguments, watch=first)
            states[part.slot], step = two_values(part, "update", values, "state", "step")
            refuse_spoilt(f"round {number}, after {type(part).__name__}.update", step)
            # No part may change what stays at the clients.
            if stay and step.proposed is not None:
                step = step.towards(put_back(stay, step.proposed, step.weights))
    return step, states


def in_models_order(what: str, weights: Weights, before: Weights, number: int) -> Weights:
    """Return the weights in the model's order. Raises `BrokenContract` if they do not fit."""
    unlike = first_difference(weights, before)
    if unlike is not None:
        raise BrokenContract(f"round {number}: the {what} does not fit the model: {unlike}")
    return {name: weights[name] for name in before}


def begin_evaluation(setup: Setup, executor: Executor, round: Round) -> Results | None:
    """Hand out the evaluation of a round; None if it is not due."""
    if not setup.job.train.evaluates(round.round):
        return None
    pieces = pieces_of(len(setup.federation.test))
    return executor.map(Evaluate(round.round), pieces, {"weights": round.evaluated})


def with_evaluation(setup: Setup, round: Round, results: Results | None) -> Round:
    """Wait for the evaluation of a round, and return the round with it.

    The class accuracies count as a peak only where `train.eval_every` asks for them. The extra
    evaluation after the last round does not count: so a run that is extended has the forgetting of
    one that never stopped. Nor does round 0: an untrained model may know a class by chance.
    """
    if results is None:
        return round
    evaluation = next(results)
    for piece in results:
        evaluation = evaluation + piece
    class_accuracy = metrics.class_accuracy(evaluation.confusion)
    peak = round.peak
    if setup.job.train.counts(round.round):
        peak = np.fmax(peak, class_accuracy)
    lost = None
    if setup.job.train.can_forget(round.round):
        # Against the peak before this evaluation.
        lost = forgetting.peak(round.peak, class_accuracy)
    notes = dict(round.notes)
    names = setup.federation.test.domain_names
    for name, right, images in zip(names, *evaluation.domains.tolist(), strict=True):
        if images:
            notes[f"domain.{name}"] = right / images
    return replace(
        round,
        evaluation=evaluation,
        peak=peak,
        forgetting=lost,
        notes=notes,
    )


def drift(
    setup: Setup, executor: Executor, number: int, before: Weights, after: Weights
) -> dict[str, float]:
    """Measure how much the model's neurons have changed in a round; empty where that fails."""
    pieces = pieces_of(len(sample(setup)))
    seen = []
    for weights in (before, after):
        results = list(executor.map(MeasureActivations(number), pieces, {"weights": weights}))
        if None in results:
            return {}
        total = results[0]
        for piece in results[1:]:
            total = total + piece
        seen.append(total)
    return {f"drift.{key}": value for key, value in aligned(*seen)}


def begin_survey(
    executor: Executor, broadcast: Broadcast, tasks: Sequence[Task]
) -> Iterable[TaskReply]:
    """Survey the clients; nobody is asked if no part surveys."""
    if not broadcast.states:
        return ()
    return executor.map(Survey(broadcast.round, broadcast.since), tasks, trees_of(broadcast))


def begin_training(
    setup: Setup,
    executor: Executor,
    broadcast: Broadcast,
    tasks: Sequence[Task],
    memories: Mapping[int, Memory],
) -> Results:
    """Hand out the training of tasks, if there are any, in groups where their sums are large."""
    if not tasks:
        return nothing()
    groups = []
    for group in grouped(tasks, num_bytes(broadcast.weights)):
        groups.append([Assignment.of(task, memories) for task in group])
    remembering = remembers(parts_at(setup.job.method, broadcast.round))
    work = Train(broadcast.round, broadcast.since, remembering)
    return executor.map(work, groups, trees_of(broadcast))


def local_models(
    executor: Executor,
    broadcast: Broadcast,
    clients: Sequence[int],
    memories: Mapping[int, Memory],
) -> Results:
    """Train clients of a round one after another; yield each one's row, and its weights then."""
    assignments = [Assignment.of((client,), memories) for client in clients]
    work = LocalModel(broadcast.round, broadcast.since)
    return executor.map(work, assignments, trees_of(broadcast))


def trees_of(broadcast: Broadcast) -> dict[str, Tree]:
    """Return the trees of a broadcast by name. They change at different times."""
    return {
        "weights": broadcast.weights,
        "states": broadcast.states,
        "payloads": broadcast.payloads,
    }


def surveys(parts: Parts) -> Parts:
    """Return the parts that survey."""
    return tuple(part for part in parts if defines(part, "survey"))


@contextmanager
def server_hooks(setup: Setup, purpose: Purpose, number: int) -> Iterator[None]:
    """Run hooks of the server: what they draw depends on the place alone."""
    with isolated(seed_of(setup.job.seed, purpose, number), setup.device):
        yield


def initial(setup: Setup) -> Round:
    """Return round 0, not evaluated."""
    return Round(
        round=0,
        weights=state_of(setup.model),
        held={},
        memories={},
        evaluation=None,
        peak=np.full(setup.federation.num_classes, np.nan),
        forgetting=None,
    )
