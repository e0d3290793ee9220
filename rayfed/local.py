"""What happens at a client: survey, train, evaluate. The only local training loop in the package.

Everything here is a function of the site (which does not change during a run), the round's broadcast and the client,
so it may run in any process, in any order, and again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.data.augment import Augment, prepare
from rayfed.data.federation import Federation
from rayfed.methods.part import (
    Batch,
    ClientView,
    Fit,
    Frozen,
    Method,
    Parts,
    ServerView,
    defines,
    parts_at,
    run_model,
)
from rayfed.seeds import Purpose, seed_of
from rayfed.values import Ge, Gt, InputError, Le, Lt
from rayfed.weights import Tree, Weights, parameters_of, to_device

EVALUATION_BATCH = 250  # images a forward pass; a constant, since the size of a batch can change the last bits


@dataclass(frozen=True)
class Training:
    """Rounds, and the SGD of a client in one round; momentum starts at zero in every round."""

    num_rounds: Annotated[int, Ge(1), "rounds to train"] = 20
    clients_per_round: Annotated[int, Ge(1), "clients sampled each round"] = 5
    local_epochs: Annotated[int, Ge(1), "passes over a client's data in a round"] = 1
    local_steps: Annotated[int | None, Ge(1), "SGD steps in a round, in place of epochs"] = None
    batch_size: Annotated[int, Ge(1), "images a step; the last batch of an epoch may be smaller"] = 50
    lr: Annotated[float, Gt(0), "learning rate of the first round"] = 0.01
    lr_decay: Annotated[float, Gt(0), Le(1), "factor of the learning rate from round to round"] = 1.0
    momentum: Annotated[float, Ge(0), Lt(1), "momentum of SGD"] = 0.0
    weight_decay: Annotated[float, Ge(0), "weight decay of SGD"] = 0.0

    def lr_at(self, round: int) -> float:
        """The learning rate of round 1, 2, ..."""
        return self.lr * self.lr_decay ** (round - 1)


@dataclass(frozen=True, eq=False)
class Site:
    """What a worker holds for a whole run, whichever clients it serves."""

    model: nn.Module  # working memory: every piece of work loads the weights that it needs
    federation: Federation
    augment: Augment
    training: Training
    method: Method
    seed: int
    device: torch.device


@dataclass(frozen=True, eq=False)
class Broadcast:
    """What the server sends for one round, the same to every client."""

    round: int
    weights: Weights
    states: dict[str, Tree]  # slot -> server state, of the parts that survey
    payloads: dict[str, Tree]  # slot -> what the part's `tell` sent; empty during the survey
    since: dict[str, int]  # slot -> first round of its part; what a client remembers from before is another's

    def on(self, device: torch.device) -> Broadcast:
        """The same, with all tensors on a device."""
        moved = {name: to_device(getattr(self, name), device) for name in ("weights", "states", "payloads")}
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class Reply:
    """What comes back from a client after training."""

    num_examples: int
    train_loss: float  # mean over the steps
    seconds: float
    # Both may hold the site's own weights, live: pack them before the site does anything else.
    summands: dict[str, Tree]  # slot -> what the part reported
    memory: dict[str, Tree]  # slot -> what the part remembers; it stays where the clients are


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Counts on some test images; two of them add up."""

    confusion: np.ndarray  # int64 (C, C), rows true, columns predicted
    loss: float  # summed over the images

    def __add__(self, other: Evaluation) -> Evaluation:
        return Evaluation(self.confusion + other.confusion, self.loss + other.loss)


class RunFailed(RuntimeError):
    """A run that cannot go on; the message says where and why."""

    resumable = False  # whether it is sound, and can go on from its checkpoint once there is something to run it on


class Diverged(RunFailed):
    """A loss that is no number any more."""


class ClientFailed(RunFailed):
    """A client's own exception, with its traceback: it would fail again anywhere."""

    def __init__(self, message: str, client: int | None = None, round: int | None = None) -> None:
        super().__init__(message, client, round)  # all of them, so that it can be pickled
        self.client, self.round = client, round  # None where it was an evaluation

    def __str__(self) -> str:
        return self.args[0]


def survey(site: Site, broadcast: Broadcast, client: int) -> dict[str, Tree]:
    """The summands of the parts that survey, by slot."""
    parts, broadcast = parts_at(site.method, broadcast.round), broadcast.on(site.device)
    view = _view(site, broadcast, client)
    return {
        part.slot: part.survey(view.of(part.slot, broadcast.states, {}, {}))
        for part in parts
        if defines(part, "survey")
    }


def train(site: Site, broadcast: Broadcast, client: int, memory: dict[str, Tree]) -> Reply:
    """One client's round: local SGD from the global weights on the sum of all parts' terms.

    `memory` is by slot, as the client's last reply gave it. Raises `Diverged` with method, client, round and batch when
    a loss is NaN or infinite.
    """
    started = time.perf_counter()
    parts, broadcast = parts_at(site.method, broadcast.round), broadcast.on(site.device)
    memory = to_device(memory, site.device)
    seed = seed_of(site.seed, Purpose.CLIENT, broadcast.round, client)
    rng = torch.Generator().manual_seed(seed)
    devices = [site.device] if site.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)  # for what draws from the global generator: dropout
        view = _view(site, broadcast, client)
        views = {p.slot: view.of(p.slot, broadcast.states, broadcast.payloads, memory) for p in parts}
        local = {part.slot: part.begin(views[part.slot]) for part in parts}
        site.model.load_state_dict(view.weights)
        losses = _descend(site, view, parts, local, rng)
        if (bad := next((i for i, loss in enumerate(losses) if not np.isfinite(loss)), None)) is not None:
            raise Diverged(
                f"the loss became {losses[bad]} at client {client}, round {broadcast.round}, batch {bad + 1} "
                f"of {len(losses)}, with the method {' + '.join(map(repr, parts))}; try a smaller train.lr"
            )
        site.model.eval()
        mean_loss = float(np.mean(losses))
        fit = Fit(site.model, site.model.state_dict(), len(losses), mean_loss)
        reports = {part.slot: part.report(views[part.slot], local[part.slot], fit) for part in parts}
    summands = {slot: summand for slot, (summand, _) in reports.items() if summand is not None}
    kept = {slot: memory for slot, (_, memory) in reports.items() if memory is not None}
    return Reply(view.num_examples, mean_loss, time.perf_counter() - started, summands, kept)


def evaluate(site: Site, weights: Weights, start: int, stop: int) -> Evaluation:
    """A model on the test images `start` to `stop`."""
    site.model.load_state_dict(weights)
    site.model.eval()
    test, classes = site.federation.test, site.federation.num_classes
    confusion, loss = torch.zeros(classes * classes, dtype=torch.int64), 0.0
    rows = np.arange(start, min(stop, len(test.labels)))
    with torch.no_grad():
        for images, labels in _plain_batches(site, test.images, test.labels, rows)():
            logits = run_model(site.model, images).logits
            loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
            pairs = labels * classes + logits.argmax(dim=1)
            confusion += torch.bincount(pairs, minlength=classes * classes).cpu()
    return Evaluation(confusion.view(classes, classes).numpy(), loss)


def batches(num_examples: int, training: Training, rng: torch.Generator) -> Iterator[Tensor]:
    """Indices of each step's batch: shuffled anew every epoch, the last, smaller batch kept.

    >>> [b.tolist() for b in batches(3, Training(batch_size=2), torch.Generator().manual_seed(0))]
    [[2, 0], [1]]
    """
    per_epoch = -(-num_examples // training.batch_size)
    steps = training.local_steps or per_epoch * training.local_epochs
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(num_examples, generator=rng)
        start = step % per_epoch * training.batch_size
        yield order[start : start + training.batch_size]


def refuse_batches_of_one(training: Training, federation: Federation, model: nn.Module) -> None:
    """Raises `InputError` where a client's last batch would be a single image and the model cannot be trained on one.

    BatchNorm has nothing to normalise where a channel of its input is one number.
    """

    def alone(batch_size: int) -> list[int]:
        sizes = federation.partition.sizes
        return [client for client in range(len(sizes)) if sizes[client] % batch_size == 1 % batch_size]

    if not (clients := alone(training.batch_size)):
        return
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(model).train()(torch.zeros(1, *federation.image_shape))
    except Exception as error:
        near = sorted(range(2, 2 * training.batch_size + 10), key=lambda size: abs(size - training.batch_size))
        fits = next((size for size in near if not alone(size)), None)
        raise InputError(
            f"train.batch_size = {training.batch_size}: one of client {clients[0]}'s images would be alone in its last "
            f"batch, and this model cannot be trained on one ({error}); "
            + (f"with train.batch_size = {fits} none is" if fits else "give another model")
        ) from None


def _descend(site: Site, client: ClientView, parts: Parts, local: dict[str, Tree], rng: torch.Generator) -> list[float]:
    """SGD in place on the site's model; the loss of every step."""
    data, training, model = site.federation, site.training, site.model.train()
    rows = data.client(client.id)
    images = prepare(torch.from_numpy(data.train.images[rows]).to(site.device), data.mean, data.std, site.augment)
    labels = torch.from_numpy(data.train.labels[rows]).to(site.device)
    parameters = parameters_of(model)
    optimizer = torch.optim.SGD(
        parameters.values(), training.lr_at(client.round), training.momentum, weight_decay=training.weight_decay
    )
    with_terms = [part for part in parts if defines(part, "loss")]
    losses = []
    for index in batches(len(rows), training, rng):
        batch = Batch(images.augmented(index, rng), labels[index.to(site.device)], model, parameters, client)
        terms = [part.loss(batch, local[part.slot]) for part in with_terms]
        loss = torch.stack([term for term in terms if term is not None]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()  # read once: on a GPU every look at a loss would wait for it


def _view(site: Site, broadcast: Broadcast, client: int) -> ClientView:
    data = site.federation
    return ClientView(
        round=broadcast.round,
        weights=broadcast.weights,
        num_classes=data.num_classes,
        frozen=Frozen(site.model),
        samples=_plain_batches(site, data.train.images, data.train.labels, data.client(client)),
        id=client,
        num_clients=data.num_clients,
        num_examples=data.num_examples(client),
        label_counts=torch.from_numpy(data.label_counts(client)).to(site.device),
        lr=site.training.lr_at(broadcast.round),
        momentum=site.training.momentum,
        batch_size=site.training.batch_size,
    )


def server_view(site: Site, round: int, weights: Weights) -> ServerView:
    """What a part's `tell` sees; its samples are the auxiliary set."""
    data = site.federation
    return ServerView(
        round=round,
        weights=weights,
        num_classes=data.num_classes,
        frozen=Frozen(site.model),
        samples=_plain_batches(site, data.train.images, data.train.labels, data.auxiliary),
        num_clients=data.num_clients,
    )


def _plain_batches(
    site: Site, images: np.ndarray, labels: np.ndarray, rows: np.ndarray
) -> Callable[..., Iterator[tuple[Tensor, Tensor]]]:
    """Normalised images and labels of some rows, in order, without augmentation."""

    def batches(size: int = EVALUATION_BATCH) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(rows), size):
            index = rows[start : start + size]
            some = prepare(torch.from_numpy(images[index]).to(site.device), site.federation.mean, site.federation.std)
            yield some.plain(torch.arange(len(index))), torch.from_numpy(labels[index]).to(site.device)

    return batches
