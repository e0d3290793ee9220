"""Entries that stay at each client: whose they are, what is sent, and what teachers and measures
see of them.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from rayfed import methods as m
from rayfed.base.errors import InputError
from rayfed.clients.settings import Training
from rayfed.methods.checks import of_models, refuse_misplaced
from rayfed.methods.personal import local_names, shared
from rayfed.methods.registry import PARTS
from rayfed.models.classifier import Classifier
from rayfed.rounds import client_work, engine, evaluation
from rayfed.rounds.engine import open_round
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.trees import num_bytes
from rayfed.tensors.weights import parameters_of, state_of, with_weights
from rayfed.tensors.wire import unpack

HEAD = {"head.weight", "head.bias"}
NORM = {
    f"features.1.{name}"
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}
SLOTS = ("local_head", "local_norm")


def own_of(round, slot):
    """By client, the entries that stay there after a round."""
    return {client: unpack(packed)["slots"][slot] for client, packed in round.memories.items()}


def test_the_names_are_those_of_all_entries_of_the_modules(make_model):
    model = make_model(norm=True)
    assert local_names((m.LocalNorm(), m.Average(), m.LocalHead()), model) == {
        "local_norm": NORM,
        "local_head": HEAD,
    }
    # One layer, under two names.
    twice = nn.Sequential(model.features[1], nn.Sequential(model.features[1]))
    assert set(m.LocalNorm().local_names(twice)) == set(state_of(twice))


@pytest.mark.parametrize(
    ("method", "slot", "names"), [(m.fedbn, "local_norm", NORM), (m.fedper, "local_head", HEAD)]
)
def test_a_client_alone_has_fedavgs_model_in_two_pieces(method, slot, names, make_setup, play):
    """Bit for bit: what the others would average away is the only difference between the
    methods.
    """
    alone = {"counts": [[12, 13, 9, 8]], "clients_per_round": 1, "norm": True}
    for ours, fedavg in zip(
        play(make_setup(method(), **alone))[1:],
        play(make_setup(m.fedavg(), **alone))[1:],
        strict=True,
    ):
        own = own_of(ours, slot)[0]
        assert own.keys() == names
        for name, w in fedavg.weights.items():
            assert torch.equal(own[name] if name in names else ours.weights[name], w)


def test_a_round_of_fedper_is_the_mean_of_plain_sgd_from_each_clients_own_head(
    make_setup, play, plain_sgd
):
    """A client that was not sampled before begins with the initial head, and one that is not
    sampled keeps its own.
    """
    setup, heads = make_setup(m.fedper()), {}
    run = play(setup)
    for before, after in pairwise(run):
        cohort = [row.client for row in after.clients]
        found = {
            i: plain_sgd(setup, i, before.weights | heads.get(i, {}), after.round)[0]
            for i in cohort
        }
        sizes = np.array([setup.federation.num_examples(client) for client in cohort])
        for name, w in after.weights.items():
            if name in HEAD:
                assert torch.equal(w, run[0].weights[name])
                continue
            mean = (
                np.tensordot(
                    sizes, np.array([found[i][name].double().numpy() for i in cohort]), axes=1
                )
                / sizes.sum()
            )
            np.testing.assert_array_equal(w.numpy(), mean.astype(np.float32))
        heads |= {client: {name: state[name] for name in HEAD} for client, state in found.items()}
        kept = own_of(after, "local_head")
        assert kept.keys() == heads.keys()
        assert all(torch.equal(kept[i][name], heads[i][name]) for i in kept for name in HEAD)
    # Some came later, some came back.
    assert len(heads) > len(run[1].clients) and len(heads) < 3 * 4


@pytest.mark.parametrize(
    ("method", "head"),
    [
        (m.fedrep(head=0.5), 0.5),
        (m.fedrep(), 0.9),
        (m.compose(m.LocalHead(), m.fedbabu()[-1]), 0.0),
    ],
)
def test_fedrep_trains_the_head_first_and_then_the_body(method, head, make_setup, play, plain_sgd):
    """Weight decay and momentum leave alone what is not trained."""
    alone = {"counts": [[12, 13, 9, 8]], "clients_per_round": 1, "weight_decay": 0.1}
    setup, own = make_setup(method, **alone), {}
    for before, after in pairwise(play(setup)):
        found = plain_sgd(setup, 0, before.weights | own, after.round, head=head)[0]
        own = own_of(after, "local_head")[0]
        for name, w in found.items():
            torch.testing.assert_close(
                own[name] if name in HEAD else after.weights[name], w, rtol=1e-4, atol=1e-6
            )
    assert all(torch.equal(own[name], state_of(setup.model)[name]) for name in HEAD) == (head == 0)


@pytest.mark.parametrize(
    "training",
    [{"local_epochs": 2}, {"local_steps": 3}, {"local_epochs": 1, "batch_size": 4}],
    ids=str,
)
def test_a_client_knows_how_many_steps_it_will_take(training, make_setup, play):
    told = []

    @dataclass(frozen=True)
    class Steps(m.Part):
        slot: ClassVar[str] = "my_steps"

        def begin(self, client):
            return client.steps

        def report(self, client, local, fit):
            told.append((local, fit.steps))
            return None, None

    play(make_setup(m.compose(Steps()), **training))
    # One client is served again.
    assert len(told) == 12 + 1 and all(before == after for before, after in told)


def test_fedbabus_head_stays_as_drawn_in_the_global_model_too(make_setup, play):
    run = play(make_setup(m.fedbabu(), weight_decay=0.1))
    for name, w in run[-1].weights.items():
        assert torch.equal(w, run[0].weights[name]) == (name in HEAD)


@pytest.mark.parametrize(
    "part",
    [cls() for cls in PARTS.values() if cls.slot == "supervise" and cls is not m.PrototypeHead],
    ids=repr,
)
def test_what_stays_is_trained_by_whatever_supervises(part, make_setup, play):
    """A gradient that is taken at other weights has what stays, too, where that is."""
    setup = make_setup(m.compose(m.LocalHead(), m.LocalNorm(), part), norm=True, local_steps=4)
    last, initial = play(setup)[-1], parameters_of(setup.model)
    own = [
        {**head, **norm}
        for head, norm in zip(*(own_of(last, slot).values() for slot in SLOTS), strict=True)
    ]
    moved = {
        name
        for one in own
        for name in one.keys() & initial.keys()
        if not torch.equal(one[name], initial[name])
    }
    assert moved == {*HEAD, "features.1.weight", "features.1.bias"}


EVERY_KIND = [
    m.fedrep(),
    m.fedper(),
    m.compose(m.LocalHead(), m.NormalizedAverage()),
    m.compose(m.LocalHead(), m.feddyn()),
    m.compose(m.LocalHead(), m.fedexp(), m.Proximal(10.0), m.ServerMomentum(), m.AdaptiveStep()),
]


@pytest.mark.parametrize("method", EVERY_KIND, ids=repr)
def test_nothing_that_stays_is_sent_up_or_moved_in_the_global_model(method, make_setup, play):
    run = play(make_setup(method, norm=True))
    for round in run[1:]:
        assert all(torch.equal(round.weights[name], run[0].weights[name]) for name in HEAD)
        sent = num_bytes({name: w for name, w in round.weights.items() if name not in HEAD})
        assert round.bytes_up == len(round.clients) * sent


@pytest.mark.parametrize("method", [m.scaffold(), m.compose(m.Curvature())], ids=repr)
def test_what_clients_tell_of_their_parameters_has_none_that_stay(method, make_setup, play):
    for round in play(make_setup(m.compose(m.LocalHead(), method)))[1:]:
        states = [
            round.held[slot].state for slot in round.held if round.held[slot].state is not None
        ]
        named = states[0].get("u", states[0])
        assert named.keys() == {"features.0.weight", "features.0.bias"}


@dataclass(frozen=True)
class Looks(m.Part):
    """Sees that a part is not given what stays at the client."""

    def loss(self, batch, local):
        assert batch.parameters.keys() == {
            "features.0.weight",
            "features.0.bias",
            "features.1.weight",
            "features.1.bias",
        }

    def report(self, client, local, fit):
        assert fit.parameters.keys() == {
            name for name in fit.weights if name.endswith(("weight", "bias"))
        }
        assert fit.weights.keys() == fit.model.state_dict().keys() - HEAD
        return {"clients": 1}, None


@dataclass(frozen=True)
class Moves(m.Part):
    """Moves every entry of the new weights by 1, and sees before that which were moved by an
    average.
    """

    changes_average: ClassVar[bool] = True

    def update(self, state, total, step):
        assert all(torch.equal(step.averaged[name], step.weights[name]) for name in HEAD)
        return state, step.towards({name: w + 1 for name, w in step.averaged.items()})


def test_no_part_moves_what_stays_in_the_global_model(make_setup, play):
    moved, plain = (
        play(make_setup(m.compose(m.fedper(), *more), num_rounds=1))[1] for more in ([Moves()], [])
    )
    for name, w in plain.weights.items():
        assert torch.equal(moved.weights[name], w if name in HEAD else w + 1)


def test_parts_see_nothing_of_what_stays(make_setup, play):
    assert len(play(make_setup(m.compose(m.fedper(), Looks()), norm=True))) == 4


def test_a_teacher_has_the_clients_own_entries(make_setup, play):
    """Before the first step it says what the student says, so that one step with a teacher is one
    without.
    """
    single = {
        "local_steps": 1,
        "batch_size": 20,
        "clients_per_round": 6,
        "num_rounds": 3,
        "lr_decay": 1.0,
    }
    alone = play(make_setup(m.fedper(), **single))[-1]
    taught = play(make_setup(m.compose(m.fedper(), m.Distill(beta=5.0)), **single))[-1]
    for one, other in (
        (alone.weights, taught.weights),
        [own_of(run, "local_head") for run in (alone, taught)],
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_every_frozen_model_at_a_client_has_its_own_entries(make_setup):
    """Also one that the server has sent, as FedGKD's teacher, or that lacks them, as MOON's last
    model.
    """
    setup, own = (
        make_setup(m.fedper()),
        {"head.weight": torch.ones(4, 16), "head.bias": torch.ones(4)},
    )
    sent = {name: w + 2 for name, w in state_of(setup.model).items()}
    client = client_work.view_of(
        client_work.RoundContext(
            setup, client_work.Broadcast(1, state_of(setup.model), {}, {}, {})
        ),
        0,
        own,
    )
    for weights in (sent, shared({"local_head": frozenset(HEAD)}, sent), client.weights):
        made = client.frozen(weights).state_dict()
        assert all(torch.equal(made[name], w) for name, w in ({**weights, **own}).items())
    assert client.frozen(client.weights) is client.global_model


def test_a_head_and_a_body_that_take_turns_must_both_train():
    def model(head, body):
        return Classifier(
            nn.Linear(4, 4).requires_grad_(body), nn.Linear(4, 2).requires_grad_(head)
        )

    with pytest.raises(InputError, match="nothing in the model's body trains; freeze fewer"):
        m.HeadThenBody(head=0.0).check(model(head=True, body=False), Training())
    with pytest.raises(InputError, match="nothing in the model's head trains; freeze fewer"):
        m.HeadThenBody().check(model(head=False, body=True), Training())
    m.HeadThenBody(head=0.0).check(model(head=False, body=True), Training())


def test_measures_compare_the_clients_own_models(make_setup, play, plain_sgd):
    """`local.before` of a client that returns is of the round's model with the entries it has
    kept.
    """
    setup = make_setup(m.fedper(), num_rounds=2, clients_per_round=6)
    setup = replace(setup, job=replace(setup.job, measure=["local"], measure_images=0))
    _, first, second = play(setup)
    heads, after = own_of(first, "local_head"), own_of(second, "local_head")
    for row in second.clients:
        before = evaluation.evaluate(
            setup, with_weights(setup.model, first.weights | heads[row.client]).eval(), 0, 30
        )
        assert row.notes["local.before.accuracy"] == np.trace(before.confusion) / 30
        its = plain_sgd(setup, row.client, first.weights | heads[row.client], 2)[0]
        assert all(torch.equal(its[name], after[row.client][name]) for name in HEAD)
        own = evaluation.evaluate(setup, with_weights(setup.model, its).eval(), 0, 30)
        assert row.notes["local.after.accuracy"] == np.trace(own.confusion) / 30
    assert len({row.notes["local.before.accuracy"] for row in second.clients}) > 1


def test_a_client_is_served_the_global_model_after_one_with_its_own_entries(make_setup, play):
    """One context serves both: no entry of the first may be left in the second."""
    setup = make_setup(m.fedper(), clients_per_round=3)
    last = play(setup)[1]
    opening = open_round(setup, last, ThisProcess(setup), clients=[0, 1, 2, 3, 4, 5])
    once = {}
    for tasks in ([(0, 1, 2, 3, 4, 5)], [(5,), (4,), (3,), (2,), (1,), (0,)]):
        for task in engine.begin_training(
            setup, ThisProcess(setup), opening.broadcast, tasks, last.memories
        ):
            for reply in task.clients:
                own = unpack(reply.memory)["slots"]["local_head"]
                for name, w in once.setdefault(reply.row.client, own).items():
                    assert torch.equal(w, own[name])
    assert len(once) == 6 and len(last.memories) == 3


# What is refused.


@dataclass(frozen=True)
class Stays(m.Part):
    names: tuple[str, ...] = ()
    memory: bool = False

    def local_names(self, model):
        return self.names

    def report(self, client, local, fit):
        return None, 1 if self.memory else None


BODY = ("features.0.weight", "features.0.bias", "head.weight", "head.bias")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            m.compose(Stays(("head.wait",))),
            "stays: local_names gives 'head.wait', and the model's state has no such",
        ),
        (
            m.compose(Stays(BODY)),
            "stays: all parameters would stay at the clients, and none would be averaged",
        ),
        (
            m.compose(m.fedper(), m.fedcsd()[-1]),
            "PrototypeSimilarityDistill.* needs the whole global model",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_with_local_entries_is_refused(method, message, make_model):
    with pytest.raises(InputError, match=message):
        refuse_misplaced(method, make_model())


def test_what_makes_sense_is_not_refused_but_the_global_accuracy_is_warned_of(make_model):
    for method in (
        m.fedavg(),
        m.fedcsd(),
        m.fedper(),
        m.switch(m.fedper(), m.compose(m.fedper(), m.fedntd()[-1]), at=2),
    ):
        refuse_misplaced(method, make_model())
    assert not list(of_models(m.fedavg(), make_model(), measured=False))
    (said,) = of_models(m.compose(m.fedper(), m.LocalNorm()), make_model(norm=True), measured=False)
    assert said.startswith("with local_head and local_norm each client has a model of its own")


@pytest.mark.parametrize(
    ("part", "lacks"), [(m.LocalNorm(), "BatchNorm layer"), (m.LocalHead(), "module `head`")]
)
def test_a_part_that_would_leave_nothing_at_the_clients_is_refused(part, lacks):
    with pytest.raises(
        InputError, match=f"the model has no {lacks} that trains, so nothing would stay"
    ):
        part.check(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), Training())


def test_a_part_with_local_names_has_no_other_memory(make_setup, play):
    with pytest.raises(Exception, match="the part 'stays' has local names, and so no other memory"):
        play(make_setup(m.compose(Stays(tuple(HEAD), memory=True))))
