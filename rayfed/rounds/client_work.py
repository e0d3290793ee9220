"""A client's work: survey, train, evaluate. The only local training loop of the package.

It is all a function of the run's setup, the round's broadcast and the client: any process may do it,
and do it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.base.errors import BrokenContract, Diverged
from rayfed.base.isolation import in_tf32, isolated, seed_generators
from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.batches import batches
from rayfed.clients.optimizers import stepper
from rayfed.data.federation import EVALUATION_BATCH
from rayfed.measures import metrics, updates
from rayfed.measures.clients import Activations, Seen, sampled
from rayfed.measures.failing import warn_of_failure
from rayfed.measures.metrics import Evaluation
from rayfed.methods.checks import a_term, two_values
from rayfed.methods.own_model import Models, before_and_after
from rayfed.methods.part import Parts, defines, names_of_terms, parts_at
from rayfed.methods.personal import local_names, recalled, remembered, shared
from rayfed.methods.registry import describe
from rayfed.methods.views import Batch, ClientView, Fit, Frozen, Known, Notes
from rayfed.methods.watch import call
from rayfed.rounds import measuring
from rayfed.rounds.round import ClientRow
from rayfed.rounds.setup import Setup, common_view
from rayfed.tensors.trees import Tree, to_device
from rayfed.tensors.weights import (
    Weights,
    changed_constants,
    in_evaluation,
    in_training,
    overwrite,
    parameters_of,
    state,
    with_weights,
)
from rayfed.tensors.wire import Packed, pack, unpack


@dataclass(frozen=True, eq=False)
class Broadcast:
    """The server's message for one round, the same to every client.

    Its three trees change at different times.
    """

    round: int
    weights: Weights
    # Slot -> server state, of the parts that survey.
    states: dict[str, Tree]
    # Slot -> payload from the part's `tell`; empty during the survey.
    payloads: dict[str, Tree]
    # Slot -> first round of its part.
    since: dict[str, int]

    def read_memory(self, memory: Packed | None) -> dict[str, Tree]:
        """A client's memory by slot; empty before its first training, and without what parts before
        these have kept.
        """
        if memory is None:
            return {}
        tree = unpack(memory)
        written, slots = tree["round"], tree["slots"]
        return {
            slot: kept
            for slot, kept in slots.items()
            if slot in self.since and self.since[slot] <= written
        }

    def write_memory(self, slots: dict[str, Tree]) -> Packed | None:
        """A client's memory after this round, as `read_memory` reads it; None where no part keeps
        any.
        """
        return pack({"round": self.round, "slots": slots}) if slots else None

    def map(self, function: Callable[[Any], Any]) -> Broadcast:
        """The message with its three trees replaced: packed for the wire, unpacked, or moved to a
        device.
        """
        return replace(
            self,
            **{name: function(getattr(self, name)) for name in ("weights", "states", "payloads")},
        )


class RoundContext:
    """What a worker serves clients with: a round's broadcast, on the setup's device, and the models
    for it.
    """

    def __init__(
        self,
        setup: Setup,
        broadcast: Broadcast,
        seen: dict[int, Seen] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.setup = setup
        self.broadcast = broadcast.map(partial(to_device, device=setup.device))
        self._frozen = Frozen(setup.model)
        # To train, for all clients.
        self._model = model
        # Round -> its global model on the sampled test images, once measured.
        self._seen = {} if seen is None else seen

    def frozen(self, own: Weights) -> Frozen:
        """Frozen copies for the next client: the global model's is kept, those of one client alone
        are dropped.
        """
        return (
            Frozen(self.setup.model, own) if own else self._frozen.keep_only(self.broadcast.weights)
        )

    def model(self, weights: Weights) -> nn.Module:
        """The model with these weights, which the next client will train again."""
        self._model = (
            with_weights(self.setup.model, weights)
            if self._model is None
            else overwrite(self._model, weights)
        )
        return self._model

    def measured(
        self, client: ClientView, fit: Fit, own: Weights, own_models: Models
    ) -> tuple[dict[str, float], np.ndarray | None]:
        """What the job measures in this round at a client: notes, and the confusion (C, C) of its
        model.
        """
        names = self.setup.job.measures(client.round)
        chosen = self.setup.measured_clients
        if not names or (chosen and client.id not in chosen):
            return {}, None
        p = client.label_counts.cpu().numpy() / client.num_examples
        before = self._once(client.weights) if own else self._look_at_global
        trained = before, self._once(state(fit.model))
        of_own = (self._once(own_models[0]), self._once(own_models[1])) if own_models else trained
        return measuring.measured(names, trained, of_own, p)

    def _once(self, weights: Weights) -> Callable[[], Seen]:
        """A look at the model with these weights, taken when it is first asked for."""
        return cache(partial(self._look, weights))

    def _look(self, weights: Weights) -> Seen:
        """What a copy of the model sees with these weights: a forward pass may change its buffers."""
        return _see(self.setup, in_evaluation(with_weights(self.setup.model, weights)))

    def _look_at_global(self) -> Seen:
        number = self.broadcast.round
        if number not in self._seen:
            self._seen[number] = self._look(self.broadcast.weights)
        return self._seen[number]


@dataclass(frozen=True, eq=False)
class Reply:
    """A client's reply after training.

    Its summands are added to its task's sum, and its memory is sent by itself.
    """

    row: ClientRow
    # Slot -> the part's report, and what is measured of the update; {} once they are added.
    summands: dict[str, Tree]
    # Slot -> the part's memory of this client; packed on the way, and a handle at the server, or
    # None.
    memory: Any
    # int64 (C, C), of the client's model on the sampled test images, if it is measured.
    confusion: np.ndarray | None


def survey(context: RoundContext, client: int, *, watch: bool = False) -> dict[str, Tree]:
    """The summands of the parts that survey, by slot."""
    setup, broadcast, view = context.setup, context.broadcast, view_of(context, client, {})
    surveyors = [
        part for part in parts_at(setup.job.method, broadcast.round) if defines(part, "survey")
    ]
    with _isolated(setup, Purpose.SURVEY, broadcast.round, client):
        return {
            p.slot: call(
                p,
                "survey",
                view.for_part(p.slot, broadcast.since, broadcast.states, {}, {}),
                watch=watch,
            )
            for p in surveyors
        }


def train(
    context: RoundContext, client: int, memory: dict[str, Tree], *, watch: bool = False
) -> Reply:
    """One client's round: local steps from the global weights on the sum of all parts' terms.

    With `watch`, a part of the user's that writes to what it is given is refused. `memory` is by
    slot, as the client's last reply gave it. Raises `Diverged` with method, client, round and batch
    when a loss is NaN or infinite. The reply may hold the context's model itself: use it before the
    next client is served.
    """
    started = time.perf_counter()
    setup, broadcast = context.setup, context.broadcast
    parts, memory = parts_at(setup.job.method, broadcast.round), to_device(memory, setup.device)
    rng = torch.Generator().manual_seed(
        seed_of(setup.job.seed, Purpose.BATCHES, broadcast.round, client)
    )
    stay = local_names(parts, setup.model)
    own = recalled(stay, memory)
    with _isolated(setup, Purpose.TRAIN, broadcast.round, client):
        view = view_of(context, client, own)
        views = {
            part.slot: view.for_part(
                part.slot, broadcast.since, broadcast.states, broadcast.payloads, memory
            )
            for part in parts
        }
        local = {part.slot: call(part, "begin", views[part.slot], watch=watch) for part in parts}
        model = context.model(view.weights)
        with in_tf32(setup.job.train.precision == "tf32"):
            losses, notes = descend(setup, model, view, parts, local, rng, views if watch else None)
        refuse_diverged(losses, notes, f"client {client}, round {broadcast.round}", parts)
        mean_loss = float(np.mean(losses))
        trained = state(in_evaluation(model))
        refuse_changed(setup, model, f"client {client}, round {broadcast.round}")
        fit = Fit(model, shared(stay, trained), len(losses), mean_loss)
        summands: dict[str, Tree] = {}
        memories: dict[str, Tree] = {}
        for part in parts:
            values = call(part, "report", views[part.slot], local[part.slot], fit, watch=watch)
            summand, new_memory = two_values(part, "report", values, "summands", "memory")
            if summand is not None:
                summands[part.slot] = summand
            if new_memory is not None:
                memories[part.slot] = new_memory
    kept = remembered(stay, trained, memories)
    seconds = time.perf_counter() - started
    if "drift" in setup.job.measures(broadcast.round):
        summands[updates.UPDATES] = updates.summand(view.weights, fit.model)
    numbers: dict[str, float] = {}
    confusion = None
    if setup.job.measures(broadcast.round):
        with _looking(setup):
            own_models = before_and_after(parts, (view.weights, memory), (trained, kept))
            numbers, confusion = context.measured(view, fit, own, own_models)
    row = ClientRow(
        client, view.num_examples, mean_loss, seconds, setup.node, notes.means() | numbers
    )
    return Reply(row, summands, kept, confusion)


def refuse_changed(setup: Setup, model: nn.Module, work: str) -> None:
    """Raises `BrokenContract` where training has changed a buffer that is not averaged, as it has
    no mean.
    """
    changed = changed_constants(model, setup.model)
    if changed:
        raise BrokenContract(
            f"{work}: training has changed the model's buffer '{changed[0]}', which holds a NaN or "
            "an infinity, or is complex or sparse, and so has no mean over clients; if they need "
            "not send it, register it with persistent=False"
        )


def refuse_diverged(losses: Sequence[float], notes: Notes, work: str, parts: Parts) -> None:
    """Raises `Diverged` for the first loss that is NaN or infinite, with the terms that are."""
    for index, loss in enumerate(losses):
        if not np.isfinite(loss):
            terms = " and ".join(
                name[5:] for name in notes.not_finite(index + 1) if name.startswith("loss.")
            )
            raise Diverged(
                f"the loss became {loss} at {work}, batch {index + 1} of {len(losses)}, in {terms} "
                f"of the method {describe(parts)}; try a smaller train.lr"
            )


def _isolated(
    setup: Setup, purpose: Purpose, round: int, client: int
) -> AbstractContextManager[None]:
    seed = seed_of(setup.job.seed, purpose, round, client)
    # Of several threads, only one would flush.
    return isolated(seed, setup.device, flush=setup.job.ray.threads == 1)


def _looking(setup: Setup) -> AbstractContextManager[None]:
    """As hooks are isolated in training, a model is that is only looked at; `_test_batches` seeds
    its draws.
    """
    return isolated(seed_of(setup.job.seed, Purpose.EVALUATION), setup.device)


def _test_batches(setup: Setup, rows: np.ndarray, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of test images `rows`, the first of which is the image `first` of those that are
    looked at.

    The generators are seeded before each batch, by its first image. So what a model draws does not
    depend on the ranges of images that a worker is given, nor on what was computed before.
    """
    batches = setup.federation.batches(setup.federation.test, rows, setup.device)
    for number, batch in enumerate(batches):
        place = first + number * EVALUATION_BATCH
        seed_generators(seed_of(setup.job.seed, Purpose.EVALUATION, place), setup.device)
        yield batch


def evaluate(setup: Setup, model: nn.Module, start: int, stop: int) -> Evaluation:
    """A model, in eval mode and on the setup's device, on the test images `start` to `stop`."""
    started, test = time.perf_counter(), setup.federation.test
    loss, predictions, overconfidence = 0.0, [], np.zeros(metrics.BINS)
    rows, run = np.arange(start, min(stop, len(test.labels))), setup.run
    with _looking(setup), torch.no_grad():
        for images, labels in _test_batches(setup, rows, start):
            logits = run(model, images).logits
            loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
            confidence, predicted = (
                each.cpu() for each in logits.float().softmax(dim=1).max(dim=1)
            )
            overconfidence += metrics.overconfidence(
                confidence.numpy(), (predicted == labels.cpu()).numpy()
            )
            predictions.append(logits.argmax(dim=1).cpu())
    truth, answers = test.labels[rows], torch.cat(predictions).numpy()
    domains = np.stack([test.by_domain(rows[truth == answers]), test.by_domain(rows)])
    confusion = metrics.confusion_matrix(truth, answers, setup.federation.num_classes)
    return Evaluation(confusion, loss, domains, overconfidence, time.perf_counter() - started)


def activations(setup: Setup, model: nn.Module, start: int, stop: int) -> Activations | None:
    """What a model's measured layers say of the classes, on some of the sampled test images; None
    where it fails.
    """
    try:
        with _looking(setup):
            return _see(setup, model, slice(start, stop)).activations
    except Exception as error:
        warn_of_failure("drift", error)
        return None


def sample(setup: Setup) -> np.ndarray:
    """The test images to measure on."""
    return sampled(
        len(setup.federation.test),
        setup.job.measure_images,
        seed_of(setup.job.seed, Purpose.MEASURE),
    )


def _see(setup: Setup, model: nn.Module, some: slice = slice(0, None)) -> Seen:
    batches = _test_batches(setup, sample(setup)[some], some.start)
    return measuring.see(setup.run, setup.job.measure_layers, batches, model)


def descend(
    setup: Setup,
    model: nn.Module,
    client: ClientView,
    parts: Parts,
    local: dict[str, Tree],
    rng: torch.Generator,
    watched: dict[str, ClientView] | None = None,
) -> tuple[list[float], Notes]:
    """The optimizer's steps, in place on the model: the loss of every step, and the notes.

    `watched` are the views of the parts by slot, where writing to them is refused.
    """
    data, training = setup.federation, setup.job.train
    rows = data.client(client.id)
    examples, labels = data.prepared(data.train, rows, setup.device, setup.job.data.augment)
    parameters = parameters_of(in_training(model))
    step = client.stepper(parameters)
    parameters = shared(local_names(parts, model), parameters)
    with_terms = [part for part in parts if defines(part, "loss")]
    names = names_of_terms(with_terms)
    # Without augmentation, a teacher says the same of an image in every epoch. It is not asked for
    # images never used.
    all_used = training.steps(len(rows)) * training.batch_size >= len(rows)
    known = Known(client) if setup.job.data.augment.off and all_used else None
    losses, notes = [], Notes()
    for index in batches(len(rows), training, rng):
        # Else each step would wait for the GPU
        at = index.to(setup.device, non_blocking=True)
        known_here = partial(known, at) if known else None
        batch = Batch(
            examples.augmented(index, rng), labels[at], model, parameters, client, known_here, notes
        )
        terms = {}
        for part in with_terms:
            if watched is None:
                term = part.loss(batch, local[part.slot])
            else:
                view = watched[part.slot]
                term = call(part, "loss", batch, local[part.slot], watch=True, client=view)
            terms[part.slot] = a_term(part, term)
        loss = reduce(torch.add, (term for term in terms.values() if term is not None))
        step(loss)
        losses.append(loss.detach())
        for slot, term in terms.items():
            if term is not None:
                notes.add(f"loss.{names[slot]}", term)
    # Read once: each read of a loss would wait for the GPU
    return torch.stack(losses).tolist(), notes


def view_of(context: RoundContext, client: int, own: Weights) -> ClientView:
    """A client's view; `own` are the entries that have stayed there since it last trained."""
    setup, broadcast, data, training = (
        context.setup,
        context.broadcast,
        context.setup.federation,
        context.setup.job.train,
    )
    weights = {**broadcast.weights, **own} if own else broadcast.weights
    stay = local_names(parts_at(setup.job.method, broadcast.round), setup.model)
    return ClientView(
        **common_view(setup, broadcast.round, weights, data.client(client), context.frozen(own)),
        id=client,
        num_examples=data.num_examples(client),
        label_counts=torch.from_numpy(data.label_counts(client)).to(setup.device),
        lr=training.lr_at(broadcast.round),
        momentum=training.momentum,
        batch_size=training.batch_size,
        steps=training.steps(data.num_examples(client)),
        stepper=partial(stepper, training=training, round=broadcast.round),
        trained=tuple(shared(stay, parameters_of(setup.model))),
    )
