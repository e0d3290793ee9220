"""A client's work: its loss, its survey, its training. The only local training loop of the package.

All of it is a function of the run's setup, the round's broadcast and the client. So any process may
do it, and do it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.base.errors import BrokenContract, Diverged
from rayfed.base.isolation import in_tf32, isolated
from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.batches import batches
from rayfed.clients.optimizers import stepper
from rayfed.measures import updates
from rayfed.measures.clients import Seen
from rayfed.measures.gradients import GRADIENTS, gradient_summand
from rayfed.methods.checks import a_term, two_values
from rayfed.methods.own_model import before_and_after
from rayfed.methods.part import Part, Parts, defines, names_of_terms, parts_at
from rayfed.methods.personal import Local, local_names, recalled, remembered, shared
from rayfed.methods.registry import describe
from rayfed.methods.views import Batch, ClientView, Fit, Frozen, Known, Notes
from rayfed.methods.watch import call
from rayfed.rounds import measuring
from rayfed.rounds.by_epoch import ByEpoch
from rayfed.rounds.evaluation import evaluating, see_own_data, see_sample
from rayfed.rounds.gradients import measured_gradients
from rayfed.rounds.messages import Broadcast, ClientReply
from rayfed.rounds.round import DIVERGED, ClientRow
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
    state_of,
    with_weights,
)

# A client's weights, with those that stay there, and its memory by slot.
WeightsAndMemory = tuple[Weights, dict[str, Tree]]


class RoundContext:
    """What clients are served with in a round: the broadcast on the device, and models for it."""

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
        # The model that each client trains in turn.
        self._model = model
        # Round -> what its global model gives for the sampled test images, once measured.
        self._seen = {} if seen is None else seen

    def frozen(self, own: Weights) -> Frozen:
        """Return frozen copies of models for the next client.

        That of the global model is kept; those of one client alone are dropped.
        """
        if own:
            return Frozen(self.setup.model, own)
        return self._frozen.keep_only(self.broadcast.weights)

    def model(self, weights: Weights) -> nn.Module:
        """Return the model with these weights; the next client will train it again."""
        if self._model is None:
            self._model = with_weights(self.setup.model, weights)
        else:
            self._model = overwrite(self._model, weights)
        return self._model

    def trained(self) -> Weights:
        """Return a copy of the weights of the client that was trained last, on the CPU."""
        assert self._model is not None, "a client has been trained"
        return state_of(self._model)

    def measured(
        self,
        client: ClientView,
        fit: Fit,
        own: Weights,
        parts: Parts,
        before: WeightsAndMemory,
        after: WeightsAndMemory,
    ) -> tuple[dict[str, float], np.ndarray | None]:
        """Measure a client as the job asks in this round.

        `before` and `after` its training, it had these weights and this memory. Return notes, and
        the confusion (C, C) of the client's model, if it is asked for.
        """
        names = self._names_of(client)
        if not names:
            return {}, None
        with evaluating(self.setup):
            first = self._seen_once(client.weights) if own else self._seen_global
            trained = first, self._seen_once(state(fit.model))
            models = before_and_after(parts, before, after)
            of_own = trained
            if models:
                of_own = self._seen_once(models[0]), self._seen_once(models[1])
            first_weights, last_weights = models or (client.weights, state(fit.model))
            looks = {"local": of_own, "drift": trained, "confusion": of_own}
            # A client's own images differ from client to client, so nothing is kept.
            looks["train"] = (
                partial(self._see_own_data, client, first_weights),
                partial(self._see_own_data, client, last_weights),
            )
            return measuring.measured(names, looks, shares_of(client))

    def _names_of(self, client: ClientView) -> Sequence[str]:
        """Return what is measured of a client in this round."""
        chosen = self.setup.measured_clients
        if chosen and client.id not in chosen:
            return ()
        return self.setup.job.measures(client.round)

    def by_epoch(self, client: ClientView, own: Weights) -> ByEpoch | None:
        """Return what measures a client's model during its training, if the job asks for it."""
        if "epochs" not in self._names_of(client):
            return None
        first = self._seen_once(client.weights) if own else self._seen_global
        return ByEpoch(self.setup, client, shares_of(client), first)

    def over_clients(
        self, client: ClientView, fit: Fit
    ) -> tuple[dict[str, Tree], dict[str, float]]:
        """Return the summands of what is measured over all clients of a round, and notes.

        The notes are the client's, if it is measured itself.
        """
        names = self.setup.job.measures(client.round)
        summands: dict[str, Tree] = {}
        notes: dict[str, float] = {}
        if "drift" in names:
            summands[updates.UPDATES] = updates.update_summand(client.weights, fit.model)
        if "gradients" in names:
            found = measured_gradients(self.setup, client, shares_of(client))
            size = sum(p.numel() for p in parameters_of(self.setup.model).values())
            summands[GRADIENTS] = gradient_summand(found, size, client.num_examples)
            if found is not None and "gradients" in self._names_of(client):
                notes = {f"gradients.{key}": value for key, value in found.notes()}
        return summands, notes

    def _seen_once(self, weights: Weights) -> Callable[[], Seen]:
        """Return a function that shows a model with these weights the images when it is called."""
        return cache(partial(self._see, weights))

    def _see(self, weights: Weights) -> Seen:
        # A copy of the model, as a forward pass may change its buffers.
        return see_sample(self.setup, in_evaluation(with_weights(self.setup.model, weights)))

    def _see_own_data(self, client: ClientView, weights: Weights) -> Seen:
        model = in_evaluation(with_weights(self.setup.model, weights))
        return see_own_data(self.setup, client, model)

    def _seen_global(self) -> Seen:
        number = self.broadcast.round
        if number not in self._seen:
            self._seen[number] = self._see(self.broadcast.weights)
        return self._seen[number]


def shares_of(client: ClientView) -> np.ndarray:
    """Return the client's label distribution, (C,)."""
    return client.label_counts.cpu().numpy() / client.num_examples


def survey(context: RoundContext, client: int, *, watch: bool = False) -> dict[str, Tree]:
    """Return the summands of the parts that survey, by slot."""
    setup, broadcast = context.setup, context.broadcast
    view = view_of(context, client, {})
    summands: dict[str, Tree] = {}
    with _isolated(setup, Purpose.SURVEY, broadcast.round, client):
        for part in parts_at(setup.job.method, broadcast.round):
            if defines(part, "survey"):
                of_part = view.for_part(part.slot, broadcast.since, broadcast.states, {}, {})
                summands[part.slot] = call(part, "survey", of_part, watch=watch)
    return summands


def train(
    context: RoundContext, client: int, memory: dict[str, Tree], *, watch: bool = False
) -> ClientReply:
    """Train a client: local steps from the global weights, on the sum of all parts' terms.

    `memory` is by slot, as the client's last reply gave it. With `watch`, a part of the user's that
    writes to what it is given is refused. Raises `Diverged` with method, client, round and batch
    when a loss is NaN or infinite, unless a part skips such clients.

    The reply may hold the context's model itself: use it before the next client is served.
    """
    started = time.perf_counter()
    setup, number = context.setup, context.broadcast.round
    where = f"client {client}, round {number}"
    parts = parts_at(setup.job.method, number)
    memory = to_device(memory, setup.device)
    rng = torch.Generator().manual_seed(seed_of(setup.job.seed, Purpose.BATCHES, number, client))
    # The entries of the model that stay at the client, as they were when it last trained.
    stay = local_names(parts, setup.model)
    own = recalled(stay, memory)

    with _isolated(setup, Purpose.TRAIN, number, client):
        view = view_of(context, client, own)
        views = views_of_parts(view, parts, context.broadcast, memory)
        local = begin(parts, views, watch=watch)
        model = context.model(view.weights)
        by_epoch = context.by_epoch(view, own)
        watched = views if watch else None
        with in_tf32(setup.job.train.precision == "tf32"):
            losses, notes = descend(setup, model, view, parts, local, rng, watched, by_epoch)
        skipping = tuple(part for part in parts if part.skips_diverged)
        try:
            refuse_diverged(losses, notes, where, parts)
            if skipping:
                refuse_infinite(model, where)
            refuse_changed(setup, model, where)
            fit = fit_of(model, stay, losses)
            summands, memories = report(parts, views, local, fit, watch=watch)
        except Diverged:
            if not skipping:
                raise
            # The client counts as one that has not moved, and its memory stays as it was.
            fit = fit_of(context.model(view.weights), stay, [math.nan] * len(losses))
            summands, _ = report(skipping, views, local, fit, watch=watch)
            memories = {slot: tree for slot, tree in memory.items() if slot not in stay}
    bytes_up = bytes_sent(parts, summands)
    trained = state(fit.model)
    new_memory = remembered(stay, trained, memories)
    seconds = time.perf_counter() - started

    # What follows measures, and changes nothing.
    of_measures, numbers = context.over_clients(view, fit)
    before, after = (view.weights, memory), (trained, new_memory)
    of_client, confusion = context.measured(view, fit, own, parts, before, after)
    numbers = notes.means() | of_client | numbers
    if skipping:
        numbers[DIVERGED] = float(math.isnan(fit.loss))
    if by_epoch is not None:
        seconds -= by_epoch.seconds
        numbers |= by_epoch.numbers
    row = ClientRow(client, view.num_examples, fit.loss, seconds, setup.node, numbers)
    mean_square = float(np.mean(np.square(losses)))
    reply = summands | of_measures
    return ClientReply(row, reply, new_memory, confusion, mean_square, bytes_up)


def loss_of(setup: Setup, model: nn.Module, client: int, round: int, *, one_batch: bool) -> float:
    """Return the mean cross-entropy of a model over a client's examples, as it was asked for it.

    With `one_batch` these are `train.batch_size` examples of the client, drawn for the round. The
    model is in eval mode and on the setup's device.
    """
    data = setup.federation
    rows = data.client(client)
    seed = seed_of(setup.job.seed, Purpose.ASK, round, client)
    if one_batch:
        number = min(setup.job.train.batch_size, len(rows))
        places = np.random.default_rng(seed).choice(len(rows), number, replace=False)
        rows = rows[np.sort(places)]
    losses: list[Tensor] = []
    with isolated(seed, setup.device), torch.no_grad():
        for examples, labels in data.batches(data.train, rows, setup.device):
            logits = setup.run(model, examples).logits
            losses.append(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    # They are read together: each read would wait for the GPU.
    return sum(torch.stack(losses).tolist()) / len(rows)


def views_of_parts(
    view: ClientView, parts: Parts, broadcast: Broadcast, memory: dict[str, Tree]
) -> dict[str, ClientView]:
    """Return each part's view of the client by slot: with its own payload, state and memory."""
    views: dict[str, ClientView] = {}
    for part in parts:
        views[part.slot] = view.for_part(
            part.slot, broadcast.since, broadcast.states, broadcast.payloads, memory
        )
    return views


def begin(parts: Parts, views: dict[str, ClientView], *, watch: bool) -> dict[str, Tree]:
    """Let each part compute its local values for the round, and return them by slot."""
    local: dict[str, Tree] = {}
    for part in parts:
        local[part.slot] = call(part, "begin", views[part.slot], watch=watch)
    return local


def fit_of(model: nn.Module, stay: Local, losses: Sequence[float]) -> Fit:
    """Return what the parts report of: the model in evaluation mode, and its mean loss."""
    weights = shared(stay, state(in_evaluation(model)))
    return Fit(model, weights, len(losses), float(np.mean(losses)))


def report(
    parts: Parts, views: dict[str, ClientView], local: dict[str, Tree], fit: Fit, *, watch: bool
) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Let each part report, and return the summands and the memories by slot."""
    summands: dict[str, Tree] = {}
    memories: dict[str, Tree] = {}
    for part in parts:
        values = call(part, "report", views[part.slot], local[part.slot], fit, watch=watch)
        summand, memory = two_values(part, "report", values, "summands", "memory")
        if summand is not None:
            summands[part.slot] = summand
        if memory is not None:
            memories[part.slot] = memory
    return summands, memories


def bytes_sent(parts: Parts, summands: dict[str, Tree]) -> int:
    """Return the bytes that a client sends for the summands of all parts."""
    return sum(part.bytes_sent(summands[part.slot]) for part in parts if part.slot in summands)


def descend(
    setup: Setup,
    model: nn.Module,
    client: ClientView,
    parts: Parts,
    local: dict[str, Tree],
    rng: torch.Generator,
    watched: dict[str, ClientView] | None = None,
    by_epoch: ByEpoch | None = None,
) -> tuple[list[float], Notes]:
    """Take the optimizer's steps, in place on the model.

    Return the loss of every step, and the notes. `local` has each part's local values by slot.
    `rng` draws the batches. Parts that write to their views in `watched` are refused. `by_epoch`
    measures the model meanwhile, which changes nothing.
    """
    data, training = setup.federation, setup.job.train
    rows = data.client(client.id)
    examples, labels = data.prepared(data.train, rows, setup.device, setup.job.data.augment)
    parameters = parameters_of(in_training(model))
    step = client.stepper(parameters)
    parameters = shared(local_names(parts, model), parameters)
    with_terms = [part for part in parts if defines(part, "loss")]
    names = names_of_terms(with_terms)

    # Without augmentation, a teacher says the same of an image in every epoch, so it is asked once.
    # It is not asked for images that are never used.
    all_used = training.steps(len(rows)) * training.batch_size >= len(rows)
    known = Known(client) if setup.job.data.augment.off and all_used else None
    losses: list[Tensor] = []
    notes = Notes()
    if by_epoch is not None:
        by_epoch.after(0, model)
    for index in batches(len(rows), training, rng):
        # One copy, and not blocking, or each step would wait for the GPU.
        draws = examples.draws(index, rng).to(setup.device, non_blocking=True)
        images, at = examples.augmented(draws), draws[0]
        of_batch = partial(known, at) if known else None
        batch = Batch(images, labels[at], model, parameters, client, of_batch, notes)

        terms: dict[str, Tensor] = {}
        for part in with_terms:
            term = term_of(part, batch, local[part.slot], watched)
            if term is not None:
                terms[part.slot] = term
        loss = added(list(terms.values()))
        step(loss)

        losses.append(loss.detach())
        for slot, term in terms.items():
            notes.add(f"loss.{names[slot]}", term)
        if by_epoch is not None:
            by_epoch.after(len(losses), model)
    # They are read together: each read of a loss would wait for the GPU.
    return torch.stack(losses).tolist(), notes


def term_of(
    part: Part, batch: Batch, local: Tree, watched: dict[str, ClientView] | None
) -> Tensor | None:
    """Return a part's term of the loss on a batch, a scalar; None where it has none."""
    if watched is None:
        term = part.loss(batch, local)
    else:
        term = call(part, "loss", batch, local, watch=True, client=watched[part.slot])
    return a_term(part, term)


def added(terms: Sequence[Tensor]) -> Tensor:
    """Add up the terms of a loss, from the first part's to the last part's."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def view_of(context: RoundContext, client: int, own: Weights) -> ClientView:
    """Return a client's view; `own` are the entries that have stayed there since its last round."""
    setup, broadcast = context.setup, context.broadcast
    data, training = setup.federation, setup.job.train
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


def refuse_changed(setup: Setup, model: nn.Module, where: str) -> None:
    """Raise `BrokenContract` where training has changed a buffer that has no mean over clients."""
    changed = changed_constants(model, setup.model)
    if changed:
        raise BrokenContract(
            f"{where}: training has changed the model's buffer '{changed[0]}', which holds a NaN "
            "or an infinity, or is complex or sparse, and so has no mean over clients; if they "
            "need not send it, register it with persistent=False"
        )


def refuse_diverged(losses: Sequence[float], notes: Notes, where: str, parts: Parts) -> None:
    """Raise `Diverged` for the first loss that is NaN or infinite, with the terms that are."""
    for index, loss in enumerate(losses):
        if np.isfinite(loss):
            continue
        terms = [
            name.removeprefix("loss.")
            for name in notes.not_finite(index + 1)
            if name.startswith("loss.")
        ]
        raise Diverged(
            f"the loss became {loss} at {where}, batch {index + 1} of {len(losses)}, "
            f"in {' and '.join(terms)} of the method {describe(parts)}; try a smaller train.lr"
        )


def refuse_infinite(model: nn.Module, where: str) -> None:
    """Raise `Diverged` where a client has trained a parameter, or a statistic, to NaN or infinity.

    A buffer that training leaves as it is may hold an infinity, such as a mask.
    """
    learnt: list[Tensor] = [*model.parameters()]
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            learnt += module.buffers()
    # They are read together: each read would wait for the GPU.
    if not bool(torch.stack([tensor.isfinite().all() for tensor in learnt]).all()):
        raise Diverged(f"the model became NaN or infinite at {where}; try a smaller train.lr")


def _isolated(
    setup: Setup, purpose: Purpose, round: int, client: int
) -> AbstractContextManager[None]:
    seed = seed_of(setup.job.seed, purpose, round, client)
    # Of several threads, only one would flush.
    return isolated(seed, setup.device, flush=setup.job.ray.threads == 1)
