"""Ditto: the global model is FedAvg's, the clients' own models are trained as by hand, and measures
show them.
"""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F

from rayfed import methods as m
from rayfed.base.errors import Diverged
from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.batches import batches
from rayfed.data.settings import Augment
from rayfed.methods.checks import of_models, refuse_misplaced
from rayfed.rounds import evaluation
from rayfed.tensors.weights import state_of, with_weights
from rayfed.tensors.wire import unpack


def own_of(round):
    """By client, its own model after a round."""
    return {
        client: unpack(packed)["slots"]["own_model"] for client, packed in round.memories.items()
    }


def test_all_of_a_run_but_the_own_models_is_fedavgs_bit_for_bit(make_setup, play, bits):
    """With BatchNorm, Dropout and augmentation: the second pass leaves no trace, in no generator
    and no statistic.
    """
    setting = {"norm": True, "augment": Augment(crop=1, flip=True, cutout=2)}
    for ditto, fedavg in zip(
        play(make_setup(m.ditto(), **setting)), play(make_setup(m.fedavg(), **setting)), strict=True
    ):
        rows = [
            replace(row, notes={k: v for k, v in row.notes.items() if k != "own_loss"})
            for row in ditto.clients
        ]
        assert all("own_loss" in row.notes for row in ditto.clients)
        ours, theirs = (
            bits(round) for round in (replace(ditto, clients=rows, memories={}, held={}), fedavg)
        )
        assert {**ours, "states": {}} == {**theirs, "states": {}}


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_own_models_are_those_of_a_plain_loop(lam, make_setup, play, plain_sgd):
    """Bit for bit without the pull; a client begins with the round's global model, and comes back
    with its own.
    """
    setup, own = make_setup(m.ditto(lam=lam)), {}
    first, *others = play(setup)
    weights, came_back = first.weights, 0
    for round in others:
        for client in (row.client for row in round.clients):
            came_back += client in own
            begun = own.get(client, weights)
            own[client] = plain_sgd(setup, client, begun, round.round, lam=lam, anchor=weights)[0]
        kept = own_of(round)
        assert kept.keys() == own.keys()
        for client, expected in own.items():
            torch.testing.assert_close(
                kept[client], expected, rtol=1e-5 if lam else 0, atol=1e-6 if lam else 0
            )
        weights = round.weights
    assert came_back > 3
    # Not their sums, which cross-entropy keeps.
    heads = [w["head.weight"] for w in own.values()]
    assert all(float((a - b).abs().max()) > 1e-3 for a, b in itertools.combinations(heads, 2))


@pytest.mark.parametrize(
    "training", [{}, {"optimizer": "adamw", "momentum": 0.0, "lr": 0.01}, {"clip": 0.1}], ids=str
)
def test_a_client_alone_without_the_pull_has_the_global_model_for_its_own(
    training, make_setup, play
):
    """By the job's optimizer, whichever it is, bit for bit."""
    for round in play(
        make_setup(m.ditto(lam=0.0), counts=[[12, 13, 9, 8]], clients_per_round=1, **training)
    )[1:]:
        assert all(torch.equal(own, round.weights[name]) for name, own in own_of(round)[0].items())


def test_frozen_parameters_stay_frozen_in_own_models(make_setup, play):
    setup = make_setup(m.ditto())
    setup.model.features.requires_grad_(False)
    assert all(
        own.keys() == {"head.weight", "head.bias"} for own in own_of(play(setup)[-1]).values()
    )


def test_measures_show_own_models_but_the_drift_that_of_the_global_training(make_setup, play):
    measured = {"measure": ["local", "drift", "confusion"], "measure_images": 0}
    setup, plain = (
        make_setup(method, clients_per_round=6) for method in (m.ditto(lam=0.1), m.fedavg())
    )
    setup, plain = (replace(each, job=replace(each.job, **measured)) for each in (setup, plain))
    weights, own, differ = state_of(setup.model), {}, 0
    for ours, theirs in zip(play(setup)[1:], play(plain)[1:], strict=True):
        kept = own_of(ours)
        for row, other in zip(ours.clients, theirs.clients, strict=True):
            for when, of in (("before", own.get(row.client, weights)), ("after", kept[row.client])):
                confusion = evaluation.evaluate(
                    setup, with_weights(setup.model, of).eval(), 0, 30
                ).confusion
                assert row.notes[f"local.{when}.accuracy"] == np.trace(confusion) / 30
            assert np.array_equal(ours.confusions[row.client], confusion)
            differ += row.notes["local.after.in_local"] != other.notes["local.after.in_local"]
            drifts = [
                {k: v for k, v in each.notes.items() if k.startswith("drift.")}
                for each in (row, other)
            ]
            assert drifts[0] == drifts[1] and "drift.divergence" in drifts[0]
        weights, own = ours.weights, own | kept
    assert differ


# What is refused, and what is told.


def test_a_method_may_change_to_ditto(make_setup, play, plain_sgd):
    """The own models then begin with the global model of that round."""
    setup = make_setup(m.switch(m.fedavg(), m.ditto(lam=0.0), at=3))
    refuse_misplaced(setup.job.method, setup.model)
    *_, before, last = play(setup)
    assert not before.memories
    for client, own in own_of(last).items():
        alone = plain_sgd(setup, client, before.weights, 3)[0]
        assert all(torch.equal(own[name], w) for name, w in alone.items())


def test_a_run_is_told_that_the_test_accuracy_is_not_of_the_own_models(make_model):
    (doubt,) = of_models(m.ditto(), make_model(), measured=False)
    assert doubt == (
        "with own_model each client has a model of its own, and test_accuracy is that of the "
        "global model; `rayfed clients RUN` measures the clients' models after the run, measure = "
        "['local'] those of each round"
    )
    (doubt,) = of_models(m.ditto(), make_model(), measured=True)
    assert doubt.endswith("the clients' models after the run"), (
        "those of each round are measured already"
    )
    assert not [*of_models(m.fedavg(), make_model(), measured=False)]


def test_an_own_model_that_is_no_longer_finite_ends_the_run(make_setup, play):
    """A pull that is too strong for the rate throws it further away with each step; the global
    model is well.
    """
    match = (
        r"client \d's own model in round 1 holds a NaN or an infinity at .*; try a smaller train.lr"
    )
    with pytest.raises(Diverged, match=match + ", or a lam below 1000000000000.0"):
        play(make_setup(m.ditto(lam=1e12), local_steps=20))


# FedRoD.


def test_an_own_head_learns_what_the_global_head_leaves(make_setup, play, of_client):
    """Beside plain torch: the features and the global logits of each step are those of training by
    adjusted logits.
    """
    alone = {"counts": [[12, 13, 9, 8]], "clients_per_round": 1, "weight_decay": 0.0}
    setup = make_setup(m.fedrod(), **alone)
    images, labels = of_client(setup, 0)
    prior, head = torch.tensor([12.0, 13.0, 9.0, 8.0]).log(), torch.nn.Linear(16, 4)
    torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
    for before, after in itertools.pairwise(play(setup)):
        model, training = with_weights(setup.model, before.weights).train(), setup.job.train
        options = {
            "lr": training.lr * training.lr_decay ** (after.round - 1),
            "momentum": training.momentum,
        }

        def loss(model, head, index):
            logits = model(images[index])
            own = logits.detach() + head(model.features(images[index]).detach())
            return F.cross_entropy(logits + prior, labels[index]) + F.cross_entropy(
                own, labels[index]
            )

        order = torch.Generator().manual_seed(seed_of(0, Purpose.BATCHES, after.round, 0))
        steps = [partial(loss, model, head, index) for index in batches(42, training, order)]
        oracle.descend([*model.parameters(), *head.parameters()], steps, **options)
        kept = unpack(after.memories[0])["slots"]["personal_head"]
        torch.testing.assert_close(
            kept, {f"head.{k}": w.detach() for k, w in head.state_dict().items()}
        )
        torch.testing.assert_close(after.weights, state_of(model))


def test_measures_show_the_sum_of_the_heads(make_setup, play):
    setup = make_setup(m.fedrod(), clients_per_round=6)
    setup = replace(setup, job=replace(setup.job, measure=["local"], measure_images=0))
    _, first, second = play(setup)[:3]
    for row in second.clients:
        head = unpack(first.memories[row.client])["slots"]["personal_head"]
        own = {name: w + head[name] if name in head else w for name, w in first.weights.items()}
        confusion = evaluation.evaluate(
            setup, with_weights(setup.model, own).eval(), 0, 30
        ).confusion
        assert row.notes["local.before.accuracy"] == np.trace(confusion) / 30
