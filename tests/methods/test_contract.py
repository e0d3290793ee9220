"""What every method owes the engine. A recipe is tested here from the moment it is in `RECIPES`.

All of it on the model with BatchNorm and Dropout, with augmentation, and with clients that come back: the hardest case.
"""

import dataclasses
import pickle
import tomllib
from dataclasses import dataclass

import numpy as np
import pytest
import ray.cloudpickle
import tomli_w
import torch

from rayfed import local
from rayfed.data.augment import Augment
from rayfed.methods import (
    PARTS,
    RECIPES,
    Average,
    Batch,
    ClientView,
    CrossEntropy,
    Distill,
    DynamicRegularizer,
    Fit,
    NormalizedAverage,
    NotTrueDistill,
    Part,
    Proximal,
    RestrictedCrossEntropy,
    ServerMomentum,
    compose,
    fedcsd,
    fedgkd,
    fedlmd,
    fedntd,
    moon,
    read_method,
    scaffold,
    switch,
    write_method,
)
from rayfed.methods.part import Method, parts_at
from rayfed.rounds import Arrival, ClientRow, Round, rounds, start
from rayfed.runtime.here import Here
from rayfed.weights import Tree, Weights, state_of
from rayfed.wire import pack, unpack

SETTING = {"norm": True, "augment": Augment(crop=1, flip=True, cutout=2), "local_epochs": 1}


@dataclass(frozen=True)
class Everything(Part):
    """Uses every hook and changes nothing, so that the engine's side is tested whatever methods there are."""

    note: str = "seen"

    def init(self, weights: Weights) -> Tree:
        return {"rounds": 0, "examples": 0}

    def survey(self, client: ClientView) -> Tree:
        assert client.state is not None
        return {"examples": client.num_examples, "images": sum(images.double().sum() for images, _ in client.samples())}

    def tell(self, state: Tree, server: object, surveyed: Tree) -> tuple[Tree, Tree]:
        return {**state, "rounds": state["rounds"] + 1}, {"examples": surveyed["examples"], "mean": surveyed["images"]}

    def begin(self, client: ClientView) -> Tree:
        memory = client.memory or {"id": client.id, self.note: torch.zeros(4, dtype=torch.int64)}
        assert memory["id"] == client.id, "another client's memory"
        return memory

    def loss(self, batch: Batch, local: Tree) -> torch.Tensor:
        return 0.0 * batch.features.sum()

    def report(self, client: ClientView, local: Tree, fit: Fit) -> tuple[Tree, Tree]:
        seen = local[self.note].clone()
        seen[client.round] += 1
        return {"examples": client.num_examples}, {"id": client.id, self.note: seen}

    def update(self, state: Tree, total: Tree, step: object) -> tuple[Tree, object]:
        return {**state, "examples": state["examples"] + total["examples"]}, step


METHODS: dict[str, Method] = {name: recipe() for name, recipe in RECIPES.items()} | {
    "uniform average": compose(Average(by="client")),
    "label smoothing, weighted": compose(CrossEntropy(weight=0.5, smoothing=0.1)),
    "soft fedrs": compose(RestrictedCrossEntropy(soft=True)),
    "warm kd": compose(Distill(beta=0.5, tau=3.0)),
    "kd to ntd": compose(NotTrueDistill(tau=2.0, mix=0.5)),
    "fedntd, mse": fedntd(form="mse"),
    "fedntd, no teacher": fedntd(teacher=False),
    "fedlmd + prox + momentum": compose(fedlmd(), Proximal(), ServerMomentum()),
    "fednova + momentum": compose(NormalizedAverage(), ServerMomentum()),
    "fedlmd-tf, then fedlmd": switch(fedlmd(teacher=False), fedlmd(), at=3),
    "three in a row": switch(switch(fedntd(), moon(), at=2), scaffold(), at=3),
    "fedcsd, plain": fedcsd(similarity=False, mask="none", decay=0.0),
    "fedgkd, two teachers": fedgkd(buffer=2),
    "scaffold + moon": compose(scaffold(), moon()[-1]),
    "everything": compose(Everything()),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def all_parts(method):
    return {part for round in (1, 2, 3) for part in parts_at(method, round)}


EVERY_PART = sorted({part for method in METHODS.values() for part in all_parts(method)}, key=repr)
every_part = pytest.mark.parametrize("part", EVERY_PART, ids=repr)


# Same bits, wherever and whenever the work is done.


class Recording(Here):
    """Keeps what each client has trained, as its model has it."""

    def __init__(self, site):
        super().__init__(site)
        self._site, self.trained = site, []

    def train(self, broadcast, clients, memories):
        trained = []
        for client, arrival in zip(clients, super().train(broadcast, clients, memories), strict=True):
            trained.append((client, state_of(self._site.model)))
            yield arrival
        self.trained.append(trained)


class Reversed(Here):
    """The last client of the cohort is run first."""

    def survey(self, broadcast, clients):
        survey = super().survey
        done = {client: next(survey(broadcast, [client])) for client in reversed(clients)}
        yield from (done[client] for client in clients)

    def train(self, broadcast, clients, memories):
        done = {
            client: next(super(Reversed, self).train(broadcast, [client], memories)) for client in reversed(clients)
        }
        yield from (done[client] for client in clients)


class Lost(Here):
    """Every result is lost, and the work done again, by a new worker with a pickled site."""

    def __init__(self, site):
        super().__init__(site)
        self._pickled = ray.cloudpickle.dumps(site)

    def survey(self, broadcast, clients):
        for client in clients:
            next(super().survey(broadcast, [client]))
            yield next(Here(pickle.loads(self._pickled)).survey(broadcast, [client]))

    def train(self, broadcast, clients, memories):
        for client in clients:
            next(super().train(broadcast, [client], memories))
            torch.rand(client + 1)  # the state of the global generator is nobody's business
            yield next(Here(pickle.loads(self._pickled)).train(broadcast, [client], memories))


class Unwrapped(Here):
    """Nothing that a client is given is copied for it: a hook that writes to what it was given is found out."""

    def __init__(self, site, digest):
        super().__init__(site)
        self._site, self._digest = site, digest

    def survey(self, broadcast, clients):
        before = self._of(broadcast)
        for client in clients:
            packed = pack(local.survey(self._site, broadcast, client))
            assert self._of(broadcast) == before
            yield unpack(packed), packed.num_bytes

    def train(self, broadcast, clients, memories):
        for client in clients:
            memory = unpack(memories[client])["slots"] if client in memories else {}
            before = self._of(broadcast), self._digest(memory)
            reply = local.train(self._site, broadcast, client, memory)
            assert (self._of(broadcast), self._digest(memory)) == before
            packed = pack(reply.summands)
            row = ClientRow(client, reply.num_examples, reply.train_loss, reply.seconds, "here")
            memory = pack({"round": broadcast.round, "slots": reply.memory}) if reply.memory else None
            yield unpack(packed), Arrival(row, memory, packed.num_bytes)

    def _of(self, broadcast):
        return self._digest([broadcast.weights, broadcast.states, broadcast.payloads])


@dataclass
class Run:
    """One method's run, with which the others are compared."""

    rounds: list[Round]
    bits: list[dict]  # of each round, taken when it was finished
    trained: list[list[tuple[int, Weights]]]  # by each client, in rounds 1, 2, 3


RUNS: dict[Method, Run] = {}  # made once, by the first test that asks


@pytest.fixture
def reference(method, make_site, bits):
    if method not in RUNS:
        site = make_site(method, **SETTING)
        workers = Recording(site)
        run = Run([start(site, state_of(site.model), workers)], [], workers.trained)
        run.bits.append(bits(run.rounds[0]))
        for round in rounds(site, run.rounds[0], workers):
            run.rounds.append(round)
            run.bits.append(bits(round))
        RUNS[method] = run
    return RUNS[method]


@every_method
@pytest.mark.parametrize("workers", [Reversed, Lost, Unwrapped])
def test_same_bits_whoever_does_the_work(method, workers, reference, make_site, play, bits, digest):
    assert len({round["weights"] for round in reference.bits}) == 4  # something was learnt in each of three rounds
    site = make_site(method, **SETTING)
    run = play(site, workers(site, digest) if workers is Unwrapped else workers(site))
    assert [bits(round) for round in run] == reference.bits


@every_method
def test_a_finished_round_is_never_written_to(method, reference, bits):
    assert [bits(round) for round in reference.rounds] == reference.bits


@every_method
def test_a_run_can_be_taken_up_after_any_round(method, reference, make_site, bits):
    for last in reference.rounds[1:]:
        site = make_site(method, **SETTING)
        assert [bits(round) for round in rounds(site, last, Here(site))] == reference.bits[last.round + 1 :]


@every_method
@pytest.mark.parametrize("dump", [pickle.dumps, ray.cloudpickle.dumps], ids=["pickle", "cloudpickle"])
def test_a_method_survives_pickling(method, dump):
    assert pickle.loads(dump(method)) == method


@every_method
def test_a_client_with_a_single_sample_takes_part(method, make_site, play):
    last = play(make_site(method, **SETTING, clients_per_round=6, num_rounds=2))[-1]
    assert [row.num_examples for row in last.clients] == [12, 11, 1, 8, 13, 7]
    assert all(np.isfinite(row.train_loss) for row in last.clients)
    assert all(tensor.isfinite().all() for tensor in last.weights.values())


@every_method
def test_buffers_are_the_mean_of_the_clients_by_hand(method, reference, make_site):
    """BatchNorm's statistics are averaged as they are, whatever the method does to parameters; counts stay counts."""
    site = make_site(method, **SETTING)
    for round, trained in zip(reference.rounds[1:], reference.trained, strict=True):
        (average,) = (part for part in parts_at(method, round.round) if part.slot == "average")
        uniform = isinstance(average, DynamicRegularizer) or average == Average(by="client")
        sizes = np.array([1 if uniform else site.federation.num_examples(client) for client, _ in trained])
        for name, buffer in site.model.named_buffers():
            values = np.array([state[name].double().numpy() for _, state in trained])
            mean = np.tensordot(sizes, values, axes=1) / sizes.sum()
            assert round.weights[name].dtype == buffer.dtype
            if buffer.is_floating_point():
                np.testing.assert_allclose(round.weights[name].numpy(), mean, rtol=1e-6, atol=1e-8)
            else:
                assert round.weights[name].item() == np.rint(mean)


# A part is its configuration.


def test_every_part_is_in_some_method_here():
    assert set(PARTS.values()) <= {type(part) for part in EVERY_PART}


@every_part
def test_a_part_is_a_frozen_dataclass_that_prints_and_compares_as_its_configuration(part):
    assert dataclasses.is_dataclass(part)
    for field in dataclasses.fields(part):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field.name, None)
    again = eval(repr(part), {type(part).__name__: type(part)})
    assert again == part and again is not part and hash(again) == hash(part)
    assert vars(part) == {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


@every_method
def test_a_method_is_read_back_as_it_was_written(method):
    assert read_method(write_method(method)) == method
    job = tomllib.loads(tomli_w.dumps({"method": write_method(method)}))  # what TOML cannot say, no job can hold
    assert read_method(job["method"]) == method
