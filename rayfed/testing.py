"""Checks for tests of your own parts: the laws on which the same bits of every run depend."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfed.base.isolation import alone
from rayfed.clients.settings import Training
from rayfed.data.federation import Federation
from rayfed.data.inputs import Images
from rayfed.data.partition import Partition
from rayfed.data.samples import Samples
from rayfed.job import Job
from rayfed.methods.composition import compose
from rayfed.methods.part import Part, Parts, all_parts
from rayfed.models.classifier import Classifier
from rayfed.rounds.engine import rounds
from rayfed.rounds.executor import Item, Result, Work
from rayfed.rounds.round import Round
from rayfed.rounds.setup import Setup
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.trees import Tree
from rayfed.tensors.wire import pack, unpack

CLASSES = 4
CLIENTS = 5
SHAPE = (1, 6, 6)


def check_part(
    part: Part | Sequence[Part], *, num_rounds: int = 3, model: nn.Module | None = None
) -> None:
    """Raise `AssertionError` or `BrokenContract` if a part, or a method, breaks a law of rayfed.

    A few rounds with five clients and random images are played in this process, with the part
    composed with FedAvg, or a whole method as it is. Then they are played again:

    * the hooks must not write to what they are given;
    * a client that is served a second time must give the same bits, as in each run;
    * rounds that are played again must give the same bits, with the clients served in another
      order, as on many workers.

    `model` takes images (B, 1, 6, 6) to logits (B, 4); by default it is a small network with
    features. A cache that holds what belongs to a client and a round is not found: it is there in
    this process, and gone after a resume.

    >>> from rayfed.methods import Proximal
    >>> check_part(Proximal(mu=0.1))
    """
    setup = small_setup(compose(part), num_rounds, model)
    with alone("the check of a part"):
        once = list(rounds(setup, ThisProcess(setup)))
        backwards = list(rounds(setup, Backwards(setup)))
    names = ", ".join(type(each_part).__name__ for each_part in all_parts(setup.job.method))
    refuse_difference(names, once, backwards)


def small_setup(method: Parts, num_rounds: int = 3, model: nn.Module | None = None) -> Setup:
    """Return a setup of five clients with random images of four classes, for tests.

    Each client has images of two or three classes. The server holds eight images, for parts that
    have an auxiliary set.
    """
    draws = np.random.default_rng(0)
    counts = draws.integers(0, 6, (CLIENTS, CLASSES))
    counts[np.arange(CLIENTS), np.arange(CLIENTS) % CLASSES] = 6
    labels: list[int] = []
    owners: list[int] = []
    for client in range(CLIENTS):
        for label in range(CLASSES):
            labels.extend([label] * int(counts[client, label]))
            owners.extend([client] * int(counts[client, label]))
    held_by_clients = len(labels)
    labels.extend(list(range(CLASSES)) * 2)
    train = random_samples(draws, np.array(labels))
    test = random_samples(draws, draws.integers(0, CLASSES, 20))
    dealt = Partition.of_owners(np.array(owners), CLIENTS)
    mean, std = Images(SHAPE).moments(train.examples)
    auxiliary = np.arange(held_by_clients, len(train))
    federation = Federation(train, test, dealt, dealt, mean, std, auxiliary=auxiliary)
    training = Training(
        num_rounds=num_rounds,
        clients_per_round=4,
        local_epochs=2,
        batch_size=5,
        lr=0.1,
        momentum=0.9,
        task_images=1,
    )
    job = Job("check", 0, method, train=training)
    return Setup(small_model() if model is None else model, federation, job, torch.device("cpu"))


def random_samples(draws: np.random.Generator, labels: np.ndarray) -> Samples:
    """Return random images with these labels."""
    images = draws.integers(0, 256, (len(labels), *SHAPE), np.uint8)
    return Samples(images, labels.astype(np.int64), tuple("abcd"))


def small_model() -> nn.Module:
    """Return a small network, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8))
        return Classifier(features, nn.Linear(8, CLASSES))


class Backwards(ThisProcess):
    """Does the work of a round in this process, the last item first."""

    def map(
        self, work: Work, items: Sequence[Item], shared: Mapping[str, Tree]
    ) -> Generator[Result, None, None]:
        """Yield the results in the order of the items, as every executor does."""
        results: list[Result] = []
        for item in reversed(items):
            results.extend(super().map(work, [item], shared))
        yield from reversed(results)


def refuse_difference(names: str, expected: Sequence[Round], again: Sequence[Round]) -> None:
    """Raise `AssertionError` at the first round that is not the same, with what differs."""
    for before, after in zip(expected, again, strict=True):
        differing = [
            what
            for what, value in contents(before).items()
            if not same_bits(value, contents(after)[what])
        ]
        assert not differing, (
            f"{names}: played again, with its clients in another order, round {before.round} has "
            f"other {' and '.join(differing)}. The part keeps something from client to client: "
            "give it back as memory or state, and draw from torch's generator"
        )


def contents(round: Round) -> dict[str, Any]:
    """Return all of a round that must be the same, by its name in a message."""
    memories = {client: unpack(memory) for client, memory in round.memories.items()}
    return {
        "weights": round.weights,
        "states": {slot: held.state for slot, held in round.held.items()},
        "memories": [memories[client] for client in sorted(memories)],
        "losses": [row.train_loss for row in round.clients],
    }


def same_bits(one: Tree, other: Tree) -> bool:
    """Say whether two trees have the same structure and the same bits."""
    packed, packed_other = pack(one), pack(other)
    if repr(packed.skeleton) != repr(packed_other.skeleton):
        return False
    if packed.buffers.keys() != packed_other.buffers.keys():
        return False
    for name, buffer in packed.buffers.items():
        if buffer.tobytes() != packed_other.buffers[name].tobytes():
            return False
    return True
