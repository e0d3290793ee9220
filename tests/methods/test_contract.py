"""What the engine needs of every method. A recipe is tested here as soon as it is in `RECIPES`.

Every test runs the hardest case: BatchNorm and Dropout, augmentation, and clients that are sampled
more than once.
"""

import dataclasses
import pickle
import tomllib
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import ray.cloudpickle
import tomli_w
import torch

from rayfed import methods as m
from rayfed.data.settings import Augment
from rayfed.methods.part import Method, all_parts, parts_at, trains
from rayfed.methods.views import Fit
from rayfed.rounds import client_work
from rayfed.rounds.engine import rounds
from rayfed.rounds.messages import TaskReply
from rayfed.rounds.round import Round
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.sums import OrderedSum
from rayfed.tensors.trees import Tree, num_bytes
from rayfed.tensors.weights import Weights, state_of
from rayfed.tensors.wire import pack, unpack

SETTING = {"norm": True, "augment": Augment(crop=1, flip=True, cutout=2), "local_epochs": 1}


@dataclass(frozen=True)
class Everything(m.Part):
    """Uses every hook and changes nothing: this tests the engine whatever hooks the methods use."""

    note: str = "seen"

    def init(self, weights: Weights) -> Tree:
        return {"rounds": 0, "examples": 0}

    def survey(self, client: m.ClientView) -> Tree:
        assert client.state is not None
        return {
            "examples": client.num_examples,
            "images": sum(images.double().sum() for images, _ in client.samples()),
        }

    def tell(self, state: Tree, server: object, surveyed: Tree) -> tuple[Tree, Tree]:
        return {**state, "rounds": state["rounds"] + 1}, {
            "examples": surveyed["examples"],
            "mean": surveyed["images"],
        }

    def begin(self, client: m.ClientView) -> Tree:
        memory = client.memory or {"id": client.id, self.note: torch.zeros(4, dtype=torch.int64)}
        assert memory["id"] == client.id, "another client's memory"
        return memory

    def loss(self, batch: m.Batch, local: Tree) -> torch.Tensor:
        return 0.0 * batch.features.sum()

    def report(self, client: m.ClientView, local: Tree, fit: m.Fit) -> tuple[Tree, Tree]:
        seen = local[self.note].clone()
        seen[client.round] += 1
        return {"examples": client.num_examples}, {"id": client.id, self.note: seen}

    def update(self, state: Tree, total: Tree, step: object) -> tuple[Tree, object]:
        return {**state, "examples": state["examples"] + total["examples"]}, step


METHODS: dict[str, Method] = {name: recipe() for name, recipe in m.RECIPES.items()} | {
    "uniform average": m.compose(m.Average(by="client")),
    "label smoothing, weighted": m.compose(m.CrossEntropy(weight=0.5, smoothing=0.1)),
    "soft fedrs": m.compose(m.RestrictedCrossEntropy(soft=True)),
    "warm kd": m.compose(m.Distill(beta=0.5, tau=3.0)),
    "kd to ntd": m.compose(m.NotTrueDistill(tau=2.0, mix=0.5)),
    "fedntd, mse": m.fedntd(form="mse"),
    "fedntd, no teacher": m.fedntd(teacher=False),
    "fedlmd + prox + momentum": m.compose(m.fedlmd(), m.Proximal(), m.ServerMomentum()),
    "fednova + momentum": m.compose(m.NormalizedAverage(), m.ServerMomentum()),
    "fedlmd-tf, then fedlmd": m.switch(m.fedlmd(teacher=False), m.fedlmd(), at=3),
    "three in a row": m.switch(m.switch(m.fedntd(), m.moon(), at=2), m.scaffold(), at=3),
    "fedcsd, plain": m.fedcsd(similarity=False, mask="none", decay=0.0),
    "fedcsd, released": m.fedcsd(mu=0.1, released=True),
    "fedgkd, two teachers": m.fedgkd(buffer=2),
    "scaffold + moon": m.compose(m.scaffold(), m.moon()[-1]),
    "scaffold by samples": m.scaffold(by="samples"),
    "moon from the initial model": m.moon(first="initial"),
    "feddyn by size": m.feddyn(by_size=True),
    "topk, uniform, without feedback": m.topk(share=0.3, feedback=False, by="client"),
    "topk + scaffold + momentum": m.compose(
        m.topk(share=0.1), m.ControlVariates(), m.ServerMomentum()
    ),
    "fedpaq + fedbn, uniform": m.compose(m.fedpaq(levels=3, by="client"), m.LocalNorm()),
    "fedwsq, all weights": m.fedwsq(ends=True),
    "fedwsq + fedbn, uniform": m.compose(
        m.fedwsq(scale="client", ends=True, by="client"), m.LocalNorm()
    ),
    "fedexp, uniform": m.fedexp(by="client"),
    "fedexp with control variates": m.compose(m.fedexp(), m.ControlVariates()),
    "fedacg + fedadam": m.compose(m.fedacg(), m.AdaptiveStep()),
    "fedbn + fedper + fedntd": m.compose(m.fedbn(), m.LocalHead(), m.NotTrueDistill()),
    "fedbn + moon + fednova": m.compose(m.LocalNorm(), m.moon()[-1], m.NormalizedAverage()),
    "fedper + scaffold + adam": m.compose(m.LocalHead(), m.scaffold(), m.AdaptiveStep()),
    "fedper + feddyn + momentum": m.compose(m.LocalHead(), m.feddyn(), m.ServerMomentum()),
    "fedbn + fedexp + fedgkd + fedcurv": m.compose(
        m.fedexp(), m.LocalNorm(), m.fedgkd()[-1], m.Curvature()
    ),
    "fedcm + control variates + momentum": m.compose(
        m.fedcm(), m.ControlVariates(), m.ServerMomentum()
    ),
    "fedper + fedcm, uniform": m.compose(m.LocalHead(), m.fedcm()[1:], m.Average(by="client")),
    "fedper + fedsmoo": m.compose(m.LocalHead(), m.fedsmoo()),
    "fedrcl + feduv + feddisco": m.compose(m.feddisco(a=0.9, b=0.0), m.fedrcl()[-1], m.feduv()[2:]),
    "fedmr + fedproto + scaffold": m.compose(m.fedmr()[2:], m.Prototypes(), m.scaffold()),
    "fedper + fedlesam + fedacg, smoothed": m.compose(
        m.LocalHead(), m.fedlesam()[-1], m.fedacg()[1], m.Smoothed()
    ),
    "fedrod + scaffold + kd": m.compose(m.fedrod()[1:], m.scaffold()[::2], m.Distill()),
    "fedbn + fedreg": m.compose(m.LocalNorm(), m.fedreg(iterations=2)),
    "ditto + scaffold + kd": m.compose(m.ditto(lam=0.3), m.ControlVariates(), m.Distill()),
    "fedrep + fedbn + kd": m.compose(m.fedrep(head=0.5), m.LocalNorm(), m.Distill()),
    "ccvr": m.switch(m.fedavg(), m.ccvr(steps=5), at=3),
    "scaffold + feddf + momentum": m.compose(
        m.scaffold(), m.EnsembleDistill(steps=5), m.ServerMomentum()
    ),
    "private average + fedbn + fedntd": m.compose(
        m.PrivateAverage(quantile=0.5), m.LocalNorm(), m.NotTrueDistill()
    ),
    "everything": m.compose(Everything()),
}
FAST = {
    *m.RECIPES,
    "everything",
    "three in a row",
    "fedwsq, all weights",
    "fedlmd + prox + momentum",
}
assert METHODS.keys() >= FAST
every_method = pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, method in METHODS.items()
    ],
)
EVERY_PART = sorted({part for method in METHODS.values() for part in all_parts(method)}, key=repr)
every_part = pytest.mark.parametrize("part", EVERY_PART, ids=repr)


# The same bits wherever and whenever the work is done.


class Watched(ThisProcess):
    """Gives a client the original values, not copies, and so finds a hook that writes to its input.

    Keeps each client's state after its training, as the model holds it.
    """

    def __init__(self, setup, digest):
        super().__init__(setup)
        self._setup, self._digest, self.trained = setup, digest, {}

    def map(self, work, items, shared):
        if work.kind not in ("survey", "train"):
            return super().map(work, items, shared)
        broadcast = client_work.Broadcast(work.round, since=work.since, **shared)
        if work.kind == "survey":
            return self.survey(broadcast, items)
        memories = {}
        for group in items:
            for each in group:
                memories.update(each.memories)
        return self.train(broadcast, [each.clients for group in items for each in group], memories)

    def survey(self, broadcast, tasks):
        before = self._sent(broadcast)
        for task in tasks:
            summands = [
                client_work.survey(client_work.RoundContext(self._setup, broadcast), client)
                for client in task
            ]
            assert self._sent(broadcast) == before
            yield self._reply(task, summands, sum(map(num_bytes, summands)))

    def train(self, broadcast, tasks, memories):
        self.trained[broadcast.round] = []
        for task in tasks:
            summands, replies = [], []
            for client in task:
                memory = unpack(memories[client])["slots"] if client in memories else {}
                before = self._sent(broadcast), self._digest(memory)
                reply = self._train(broadcast, client, memory)
                assert (self._sent(broadcast), self._digest(memory)) == before
                summands.append(unpack(pack(reply.summands)))
                memory = (
                    pack({"round": broadcast.round, "slots": reply.memory})
                    if reply.memory
                    else None
                )
                replies.append(replace(reply, memory=memory))
            bytes_up = sum(reply.bytes_up for reply in replies)
            yield self._reply(task, summands, bytes_up, replies)

    def _train(self, broadcast, client, memory):
        def fit(model, *rest):
            self.trained[broadcast.round].append((client, state_of(model)))
            return Fit(model, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client_work, "Fit", fit)
            return client_work.train(
                client_work.RoundContext(self._setup, broadcast), client, memory
            )

    def _reply(self, task, summands, bytes_up, clients=()):
        total = OrderedSum()
        for summand in summands:
            total.add(summand)
        return TaskReply(task[0], total.layout, bytes_up, total.packed(), clients)

    def _sent(self, broadcast):
        return self._digest([broadcast.weights, broadcast.states, broadcast.payloads])


class Lost(ThisProcess):
    """Runs the last task first and loses that result; new workers with a pickled site then do all
    the work.
    """

    def __init__(self, setup):
        super().__init__(setup)
        self._pickled = ray.cloudpickle.dumps(setup)

    def map(self, work, items, shared):
        next(super().map(work, items[-1:], shared))
        done = {}
        for number in reversed(range(len(items))):
            # No draw may depend on the state of the global generator.
            torch.rand(number + 1)
            workers = ThisProcess(pickle.loads(self._pickled))
            done[number] = next(workers.map(work, [items[number]], shared))
        for number in range(len(items)):
            yield done[number]


@dataclass
class Run:
    """One run of a method, with which the other runs are compared."""

    rounds: list[Round]
    # Of each round, taken as soon as it was finished.
    bits: list[dict]
    # By each client, in rounds 1, 2, 3, if clients train in them.
    trained: dict[int, list[tuple[int, Weights]]]


# Each is made once, by the first test that asks for it.
RUNS: dict[Method, Run] = {}


@pytest.fixture
def reference(method, make_setup, bits, digest):
    if method not in RUNS:
        setup = make_setup(method, **SETTING)
        workers = Watched(setup, digest)
        run = Run([], [], workers.trained)
        for round in rounds(setup, workers):
            run.rounds.append(round)
            run.bits.append(bits(round))
        RUNS[method] = run
    return RUNS[method]


@every_method
def test_work_that_is_lost_and_done_by_others_in_another_order_has_the_same_bits(
    method, reference, make_setup, play, bits
):
    trained = [(round["weights"], str(round["memories"])) for round in reference.bits]
    # Each of the three rounds has changed weights; of `local`, those at the clients.
    assert len({*trained}) == 4
    setup = make_setup(method, **SETTING)
    assert [bits(round) for round in play(setup, Lost(setup))] == reference.bits


@every_method
def test_a_finished_round_is_never_changed(method, reference, bits):
    assert [bits(round) for round in reference.rounds] == reference.bits


@every_method
def test_a_run_can_continue_after_any_round(method, reference, make_setup, bits):
    for last in reference.rounds[1:-1]:
        setup = make_setup(method, **SETTING)
        assert bits(next(rounds(setup, ThisProcess(setup), last))) == reference.bits[last.round + 1]


@every_method
def test_a_method_survives_pickling(method):
    assert (
        pickle.loads(pickle.dumps(method)) == method == pickle.loads(ray.cloudpickle.dumps(method))
    )


@every_method
def test_a_client_with_a_single_sample_takes_part(reference):
    assert 1 in [row.num_examples for row in reference.rounds[2].clients]
    for round in reference.rounds[1:]:
        assert all(np.isfinite(row.train_loss) for row in round.clients)
        assert all(tensor.isfinite().all() for tensor in round.weights.values())


@every_method
def test_the_terms_add_up_to_the_training_loss(method, reference):
    for round in reference.rounds[1:]:
        for row in round.clients:
            # A term that some steps lack counts as a mean over the others, which no recipe has
            # within a client's round.
            terms = [value for name, value in row.notes.items() if name.startswith("loss.")]
            assert terms and sum(terms) == pytest.approx(row.train_loss, rel=1e-5, abs=1e-5)


def discrepancy_weights(part, counts):
    """FedDisco's, by its formula."""
    sizes, shares = (
        np.array([each.sum() for each in counts]),
        [each / each.sum() for each in counts],
    )
    divergences = np.array([sum(p * np.log(p * len(each)) for p in each if p) for each in shares])
    return np.maximum(0, sizes / sizes.sum() - part.a * divergences / divergences.sum() + part.b)


@every_method
def test_buffers_are_the_mean_of_the_clients_buffers(method, reference, make_setup):
    """For every method BatchNorm's statistics are plain means, if not local, and its counts stay
    whole numbers.
    """
    setup = make_setup(method, **SETTING)
    for before, round in pairwise(reference.rounds):
        if not trains(parts_at(method, round.round)):
            assert round.round not in reference.trained and not round.clients
            buffers = dict(setup.model.named_buffers())
            assert all(torch.equal(round.weights[name], before.weights[name]) for name in buffers)
            continue
        trained = reference.trained[round.round]
        (average,) = (part for part in parts_at(method, round.round) if part.slot == "average")
        uniform = (
            isinstance(average, m.DynamicRegularizer) or getattr(average, "by", "") == "client"
        )
        sizes = np.array(
            [1 if uniform else setup.federation.num_examples(client) for client, _ in trained]
        )
        if isinstance(average, m.DiscrepancyAverage):
            sizes = discrepancy_weights(
                average, [setup.federation.label_counts(client) for client, _ in trained]
            )
        stay = {
            name for part in parts_at(method, round.round) for name in part.local_names(setup.model)
        }
        for name, buffer in setup.model.named_buffers():
            # At each client, and in the global model as at the start.
            if name in stay:
                assert torch.equal(round.weights[name], buffer)
                continue
            values = np.array([state[name].double().numpy() for _, state in trained])
            mean = np.tensordot(sizes, values, axes=1) / sizes.sum()
            assert round.weights[name].dtype == buffer.dtype
            if buffer.is_floating_point():
                np.testing.assert_allclose(round.weights[name].numpy(), mean, rtol=1e-6, atol=1e-8)
            else:
                assert round.weights[name].item() == np.rint(mean)


# A part is its configuration.


def test_every_part_is_in_a_method_of_this_file():
    assert set(m.PARTS.values()) <= {type(part) for part in EVERY_PART}


@every_part
def test_a_part_is_a_frozen_dataclass_that_prints_and_compares_as_its_configuration(part):
    assert dataclasses.is_dataclass(part)
    for field in dataclasses.fields(part):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field.name, None)
    again = eval(repr(part), {type(part).__name__: type(part)})
    assert again == part and again is not part and hash(again) == hash(part)
    assert vars(part) == {
        field.name: getattr(part, field.name) for field in dataclasses.fields(part)
    }


@every_method
def test_a_written_method_is_read_back_the_same(method):
    # A job can hold only what TOML can say.
    job = tomllib.loads(tomli_w.dumps({"method": m.write_method(method)}))
    assert m.read_method(job["method"]) == method
