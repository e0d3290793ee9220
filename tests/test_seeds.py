"""What is drawn depends on the job's seed, the purpose, the round and the client, each of them
where it should.

`LAWS` has a row for each draw. Runs with three seeds are played, and what each draws is written
down. Draws that differ in seed, place, round or client are different; draws that differ in none of
them are the same.
"""

import ast
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import rayfed
from rayfed.base.seeds import Purpose
from rayfed.clients.clock import speeds
from rayfed.clients.participation import Participation
from rayfed.clients.settings import Training
from rayfed.data.federation import _withdraw
from rayfed.data.partition import PARTITIONS, Iid, Partition
from rayfed.data.samples import hold_out
from rayfed.job import Job
from rayfed.methods import Part, compose, fedavg, switch
from rayfed.rounds import setup as sites
from rayfed.rounds.choosing import cohort_of
from rayfed.rounds.client_work import loss_of
from rayfed.rounds.engine import rounds
from rayfed.rounds.evaluation import evaluate, sample
from rayfed.rounds.own import Tuning, own_rows
from rayfed.rounds.setup import Setup
from rayfed.runtime.this_process import ThisProcess

SEEDS, ROUNDS, CLIENTS = (0, 1, 2), (1, 2), (0, 1, 2, 3)
# Clients, of a population whose draws are compared by their correlation.
MANY = 2000

# A place where something is drawn: its purpose, and whether it depends on the round and on the
# client.
LAWS = {
    "init": (Purpose.INIT, ROUNDS, [None]),
    "tell": (Purpose.TELL, ROUNDS, [None]),
    "update": (Purpose.UPDATE, ROUNDS, [None]),
    "survey": (Purpose.SURVEY, ROUNDS, CLIENTS),
    "begin": (Purpose.TRAIN, ROUNDS, CLIENTS),
    "model in training": (Purpose.TRAIN, ROUNDS, CLIENTS),
    "order of images": (Purpose.BATCHES, ROUNDS, CLIENTS),
    "model in tuning": (Purpose.TUNE, ROUNDS, CLIENTS),
    "order in tuning": (Purpose.TUNE, ROUNDS, CLIENTS),
    "model that is asked": (Purpose.ASK, ROUNDS, CLIENTS),
    "model in evaluation": (Purpose.EVALUATION, [None], [None]),
    "weights": (Purpose.MODEL, [None], [None]),
    "added weights": (Purpose.MODEL, [None], [None]),
    "measured images": (Purpose.MEASURE, [None], [None]),
    "cohort": (Purpose.COHORT, ROUNDS, [None]),
    "available": (Purpose.AVAILABLE, ROUNDS, [None]),
    "dropped": (Purpose.ANSWER, ROUNDS, [None]),
    "held out": (Purpose.HELD_OUT, [None], [None]),
    "speed of work": (Purpose.SPEED, [None], [None]),
    "speed of network": (Purpose.SPEED, [None], [None]),
}
# All that seeds a generator, or draws from one that it has not been given: the file and function,
# and how often.
CALLS = {
    # By the laws above.
    ("base/seeds.py", "chances", "default_rng"): 1,
    ("base/seeds.py", "cohort", "default_rng"): 1,
    ("base/isolation.py", "seed_generators", "seed"): 2,
    ("base/isolation.py", "seed_generators", "manual_seed"): 2,
    ("clients/clock.py", "speeds", "default_rng"): 1,
    ("models/registry.py", "build_model", "manual_seed"): 1,
    # The data and the network of a check, which are the same each time.
    ("testing.py", "small_setup", "default_rng"): 1,
    ("testing.py", "small_model", "manual_seed"): 1,
    ("models/adapt.py", "adapt", "manual_seed"): 1,
    ("rounds/client_work.py", "train", "manual_seed"): 1,
    ("measures/clients.py", "sampled", "default_rng"): 1,
    ("rounds/own.py", "_tune", "manual_seed"): 1,
    # The rules of `clients.sampling`, by the laws in tests/clients/test_sampling.py.
    ("clients/cohort.py", "choice_at", "default_rng"): 1,
    ("rounds/client_work.py", "loss_of", "default_rng"): 1,
    # The noise of differential privacy, by the laws in tests/methods/test_private.py.
    ("methods/noise.py", "__init__", "manual_seed"): 1,
    # By the laws of the data, at the end, and of skews in tests/data/test_skews.py.
    ("data/skews.py", "skewed", "default_rng"): 1,
    ("data/samples.py", "hold_out", "default_rng"): 1,
    ("data/partition.py", "split", "default_rng"): 3,
    ("data/federation.py", "_withdraw", "default_rng"): 1,
    # Figures of the loss around a model, which are the same each time.
    ("papers/loss_space.py", "changes_under_noise", "manual_seed"): 1,
    ("papers/loss_space.py", "leading", "manual_seed"): 1,
    # `verify --clients` shall take other clients each time.
    ("report/verify/again.py", "_train", "sample"): 1,
}
# Where each purpose is used: the file, and how often.
USES = {
    ("rounds/setup.py", "MODEL"): 2,
    ("base/seeds.py", "COHORT"): 1,
    ("clients/cohort.py", "COHORT"): 1,
    ("rounds/client_work.py", "ASK"): 1,
    ("rounds/client_work.py", "BATCHES"): 1,
    ("rounds/engine.py", "UPDATE"): 1,
    ("rounds/evaluation.py", "MEASURE"): 1,
    ("clients/cohort.py", "AVAILABLE"): 1,
    ("clients/cohort.py", "ANSWER"): 1,
    ("clients/clock.py", "SPEED"): 1,
    ("rounds/client_work.py", "SURVEY"): 1,
    ("rounds/client_work.py", "TRAIN"): 1,
    ("rounds/engine.py", "INIT"): 1,
    ("rounds/engine.py", "TELL"): 1,
    ("clients/cohort.py", "HELD_OUT"): 1,
    ("rounds/own.py", "TUNE"): 2,
    ("rounds/evaluation.py", "EVALUATION"): 2,
    ("rounds/own.py", "EVALUATION"): 1,
    ("rounds/setup.py", "OPEN"): 1,
}
SEEDING = {"default_rng", "manual_seed", "manual_seed_all", "seed", "RandomState", "Random"}
# Of the module `random`.
DRAWING = {"random", "sample", "shuffle", "choice", "randint", "uniform"}


class Calls(ast.NodeVisitor):
    """The calls that seed or draw, and the purposes, in a file."""

    def __init__(self, file: str) -> None:
        self.calls, self.uses = Counter(), Counter()
        self._file, self._function = file, ""

    def visit_FunctionDef(self, node):
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer

    def visit_Call(self, node):
        called = node.func
        name = getattr(called, "attr", getattr(called, "id", ""))
        of_random = isinstance(getattr(called, "value", None), ast.Name) and (
            called.value.id == "random"
        )
        if name in SEEDING or (of_random and name in DRAWING):
            self.calls[self._file, self._function, name] += 1
        self.generic_visit(node)

    def visit_Attribute(self, node):
        if isinstance(node.value, ast.Name) and node.value.id == "Purpose":
            self.uses[self._file, node.attr] += 1
        self.generic_visit(node)


def test_every_purpose_and_every_place_that_draws_has_a_law():
    """A new place needs a row in `LAWS`, and then one here."""
    package, calls, uses = Path(rayfed.__file__).parent, Counter(), Counter()
    for path in package.rglob("*.py"):
        visitor = Calls(path.relative_to(package).as_posix())
        visitor.visit(ast.parse(path.read_text()))
        calls += visitor.calls
        uses += visitor.uses
    assert calls == CALLS
    assert uses == USES
    # What is drawn as a run is opened is the same for all seeds: a law of its own.
    assert {purpose for purpose, _, _ in LAWS.values()} == set(Purpose) - {Purpose.OPEN}


# The draws of a run.

# (place, round, client) -> what was drawn there: a list, or which half of the clients, bool (N,)
Drawn = dict[tuple, Any]
DRAWN: Drawn = {}
# What was drawn as runs were opened.
OPENED: list = []
# What the model drew in evaluation.
EVALUATED: list = []
# A pair for each step of the model that trains now: its images, and a draw.
STEPS: list = []


def draw():
    """A number of each generator."""
    return [torch.rand(1).item(), random.random(), np.random.random()]


@dataclass(frozen=True)
class Draws(Part):
    """Draws in every hook, and writes down what it got."""

    since: ClassVar[int] = 1

    def init(self, weights):
        DRAWN["init", self.since, None] = draw()

    def survey(self, client):
        DRAWN["survey", client.round, client.id] = draw()
        return torch.ones(1)

    def tell(self, state, server, surveyed):
        DRAWN["tell", server.round, None] = draw()
        return state, None

    def begin(self, client):
        DRAWN["begin", client.round, client.id] = draw()
        STEPS.clear()

    def report(self, client, local, fit):
        keep_steps(("order of images", "model in training"), client.round, client.id)
        return torch.ones(1), None

    def update(self, state, total, step):
        DRAWN["update", step.server.round, None] = draw()
        return state, step


@dataclass(frozen=True)
class Second(Draws):
    """In force from round 2 on, so that `init` is called in that round."""

    since: ClassVar[int] = 2


class Watched(nn.Module):
    """A linear layer that draws in training, as Dropout does, and writes down which images it
    sees.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, images):
        if self.training:
            STEPS.append((tuple(images[:, 0, 0, 0].tolist()), torch.rand(1).item()))
        else:
            EVALUATED.append(torch.rand(1).item())
        return self.layer(images.flatten(1))


def keep_steps(names, round, client):
    order, draws = names
    DRAWN[order, round, client] = [tuple(image for images, _ in STEPS for image in images)]
    DRAWN[draws, round, client] = [number for _, number in STEPS]


def alike(make_federation):
    """Four clients with the same twelve images; the value of all pixels of an image is its
    number.
    """
    federation = make_federation([[3, 3, 3, 3]] * len(CLIENTS))
    for client in CLIENTS:
        numbers = np.arange(12, dtype=np.uint8)
        federation.train.examples[federation.client(client)] = numbers[:, None, None, None]
    return federation


def of_rounds(federation, seed):
    """What is drawn in two rounds, in which all clients train, and in tuning after each."""
    method = switch(compose(fedavg(), Draws()), compose(fedavg(), Second()), at=2)
    training = Training(num_rounds=2, clients_per_round=4, local_epochs=2, batch_size=5)
    job = Job("tiny", seed, method, train=training)
    setup = Setup(Watched(), federation, job, torch.device("cpu"))
    workers = ThisProcess(setup)
    for round in rounds(setup, workers):
        for client in CLIENTS if round.round else ():
            EVALUATED.clear()
            loss_of(setup, Watched().eval(), client, round.round, one_batch=True)
            DRAWN["model that is asked", round.round, client] = list(EVALUATED)
        tuned = own_rows(setup, round, workers, Tuning(epochs=2)) if round.round else ()
        STEPS.clear()
        for row in tuned:
            keep_steps(("order in tuning", "model in tuning"), round.round, row.client)
            STEPS.clear()


def of_the_setup(federation, seed, monkeypatch):
    """Which test images are measured; and the seeds of the model's weights, and of those that are
    added to it.
    """
    job = Job("tiny", seed, fedavg(), measure_images=10)
    setup = Setup(Watched(), federation, job, torch.device("cpu"))
    DRAWN["measured images", None, None] = [tuple(sample(setup).tolist())]
    EVALUATED.clear()
    evaluate(setup, Watched().eval(), 0, 30)
    DRAWN["model in evaluation", None, None] = list(EVALUATED)
    seeds = {}

    def build_model(name, options, *, seed, **sizes):
        seeds["weights"] = seed
        return Watched()

    with monkeypatch.context() as patch:
        patch.setattr(sites, "open_data", lambda job, read: OPENED.append(draw()) or federation)
        patch.setattr(sites, "build_model", build_model)
        patch.setattr(
            sites, "adapt", lambda model, settings, seed: seeds.update({"added weights": seed})
        )
        sites.open_setup(replace(job, train=Training(clients_per_round=4)))
    for place, drawn in seeds.items():
        DRAWN[place, None, None] = [drawn]


def of_many(population, seed):
    """Which half of a large population a draw takes: bool (N,)."""

    def half(clients):
        return np.isin(np.arange(MANY), clients)

    def setup(chosen, **settings):
        training, settings = Training(clients_per_round=chosen), Participation(**settings)
        job = Job("tiny", seed, fedavg(), train=training, clients=settings)
        return Setup(Watched(), population, job, torch.device("cpu"))

    for round in ROUNDS:
        of_round = {
            "cohort": cohort_of(setup(MANY // 2), round).chosen,
            "available": cohort_of(setup(MANY, available=0.5), round).chosen,
            "dropped": cohort_of(setup(MANY, dropout=0.5), round).dropped,
        }
        for place, clients in of_round.items():
            DRAWN[place, round, None] = half(clients)
    DRAWN["held out", None, None] = half(setup(1, held_out=MANY // 2).held_out)
    medians = {"seconds_per_example": 1.0, "bytes_per_second": 1.0}
    settings = Participation(**medians, spread=1.0)
    drawn = speeds(settings, seed, np.arange(MANY), MANY, {})
    DRAWN["speed of work", None, None] = drawn["seconds_per_example"] > 1
    DRAWN["speed of network", None, None] = drawn["bytes_per_second"] > 1


@pytest.fixture(scope="module")
def draws_of(make_federation):
    """What is drawn in a run with a seed."""
    population = make_federation([[1, 0, 0, 0]] * MANY)

    def draws_of(seed) -> Drawn:
        DRAWN.clear()
        # What the process has drawn before is never the same.
        torch.manual_seed(seed + 100)
        of_rounds(alike(make_federation), seed)
        with pytest.MonkeyPatch.context() as patch:
            of_the_setup(alike(make_federation), seed, patch)
        of_many(population, seed)
        return dict(DRAWN)

    with torch.random.fork_rng(devices=[]):
        yield draws_of


@pytest.fixture(scope="module")
def drawn(draws_of):
    """What is drawn, by seed, place, round and client."""
    return {(seed, *place): value for seed in SEEDS for place, value in draws_of(seed).items()}


def test_each_draw_is_made_for_each_seed_round_and_client_of_its_law(drawn):
    expected = {
        (seed, place, round, client)
        for place, (_, of_rounds, of_clients) in LAWS.items()
        for seed in SEEDS
        for round in of_rounds
        for client in of_clients
    }
    assert set(drawn) == expected


def test_a_run_with_the_same_seed_draws_the_same(draws_of, drawn):
    """Whatever the process has drawn before."""
    again = draws_of(SEEDS[0])
    for place, value in again.items():
        assert np.array_equal(value, drawn[SEEDS[0], *place]), place


def test_draws_with_another_seed_purpose_round_or_client_are_others(drawn):
    seen = {}
    for place, value in drawn.items():
        if isinstance(value, list):
            for one in value:
                assert one not in seen, (place, seen[one])
                seen[one] = place


def test_what_is_drawn_as_a_run_is_opened_is_the_same_for_all_seeds(drawn):
    """So that a user's function gives the same data to all seeds."""
    assert len(OPENED) >= len(SEEDS)
    assert all(each == OPENED[0] for each in OPENED)


def test_who_takes_part_is_independent_of_all_that_is_drawn_for_another_use(drawn):
    """A correlation of half the clients with another half has a deviation of 1 / sqrt(N)."""
    halves = {place: value for place, value in drawn.items() if isinstance(value, np.ndarray)}
    assert len(halves) == len(SEEDS) * (3 * len(ROUNDS) + 3)
    for one, other in combinations(halves, 2):
        correlation = np.corrcoef(halves[one], halves[other])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(MANY), (one, other, correlation)


# The data, which have seeds of their own.


def test_the_data_are_dealt_held_out_and_withdrawn_by_their_own_seeds(make_federation):
    train = make_federation([[30, 30, 30, 30]]).train
    dealt = Partition.of_owners(np.arange(len(train)) % 3, 3)
    ways = {
        "held out": lambda seed: hold_out(train, 0.3, seed)[1].examples.tobytes(),
        "withdrawn": lambda seed: _withdraw(dealt, train, 2, seed)[1].tobytes(),
    }
    needed = {"shares": {"shares": [[0.25, 0.25, 0.25, 0.25]]}}
    for name, rule in PARTITIONS.items():
        if "seed" in rule.__dataclass_fields__:
            keys = needed.get(name, {})

            def split(seed, rule=rule, keys=keys):
                return rule(3, seed, **keys).split(train.labels, 4).hash()

            ways[name] = split
    assert len(ways) > 2
    for name, way in ways.items():
        assert way(1) == way(1) != way(2), name


def test_images_are_withdrawn_by_another_stream_than_they_were_dealt_by(
    make_federation, monkeypatch
):
    """The same seed is given to both."""
    streams, make = [], np.random.default_rng

    def default_rng(seed):
        streams.append(make(seed).random())
        return make(seed)

    monkeypatch.setattr(np.random, "default_rng", default_rng)
    train = make_federation([[30, 30, 30, 30]]).train
    streams.clear()
    _withdraw(Iid(3, seed=1).split(train.labels, 4), train, 2, 1)
    assert len(set(streams)) == len(streams) == 2
