"""Ditto: the global model is FedAvg's, the clients' own models are trained as by hand, and measures show them."""

import copy
import itertools
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfed import methods as m
from rayfed.base.errors import ClientFailed, Diverged, InputError
from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.batches import batches
from rayfed.clients.optimizers import stepper
from rayfed.clients.settings import Training
from rayfed.data.augment import prepare
from rayfed.data.settings import Augment
from rayfed.methods.checks import of_models, refuse_misplaced
from rayfed.methods.views import run_model
from rayfed.models.classifier import Classifier
from rayfed.rounds import local
from rayfed.tensors.weights import parameters_of, state_of, with_weights
from rayfed.tensors.wire import unpack


def own_of(round):
    """By client, its own model after a round."""
    return {client: unpack(packed)["slots"]["own_model"] for client, packed in round.memories.items()}


def trained_alone(site, client, weights, round, lam, anchor):
    """One client's round in plain torch: cross-entropy and the pull, on the batches of the global training."""
    data, training, model = site.federation, site.job.train, with_weights(site.model, weights).train()
    rows = data.client(client)
    images = prepare(torch.from_numpy(data.train.examples[rows]), data.mean, data.std).plain(torch.arange(len(rows)))
    labels = torch.from_numpy(data.train.labels[rows])
    lr, decay = training.lr * training.lr_decay ** (round - 1), training.weight_decay
    optimizer = torch.optim.SGD(model.parameters(), lr, training.momentum, weight_decay=decay, fused=True)
    rng = torch.Generator().manual_seed(seed_of(0, Purpose.BATCHES, round, client))
    for index in batches(len(rows), training, rng):
        optimizer.zero_grad()
        F.cross_entropy(model(images[index]), labels[index]).backward()
        for name, p in model.named_parameters():
            if lam:
                p.grad += lam * (p.detach() - anchor[name])
        optimizer.step()
    return state_of(model)


def test_all_of_a_run_but_the_own_models_is_fedavgs_bit_for_bit(make_site, play, bits):
    """With BatchNorm, Dropout and augmentation: the second pass leaves no trace, in no generator and no statistic."""
    setting = {"norm": True, "augment": Augment(crop=1, flip=True, cutout=2)}
    for ditto, fedavg in zip(
        play(make_site(m.ditto(), **setting)), play(make_site(m.fedavg(), **setting)), strict=True
    ):
        rows = [replace(row, notes={k: v for k, v in row.notes.items() if k != "own_loss"}) for row in ditto.clients]
        assert all("own_loss" in row.notes for row in ditto.clients)
        ours, theirs = (bits(round) for round in (replace(ditto, clients=rows, memories={}, held={}), fedavg))
        assert {**ours, "states": {}} == {**theirs, "states": {}}


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_own_models_are_those_of_a_plain_loop(lam, make_site, play):
    """Bit for bit without the pull; a client begins with the round's global model, and comes back with its own."""
    site, own = make_site(m.ditto(lam=lam)), {}
    first, *others = play(site)
    weights, came_back = first.weights, 0
    for round in others:
        for client in (row.client for row in round.clients):
            came_back += client in own
            begun = own.get(client, weights)
            own[client] = trained_alone(site, client, begun, round.round, lam, weights)
        kept = own_of(round)
        assert kept.keys() == own.keys()
        for client, expected in own.items():
            torch.testing.assert_close(kept[client], expected, rtol=1e-5 if lam else 0, atol=1e-6 if lam else 0)
        weights = round.weights
    assert came_back > 3
    heads = [w["head.weight"] for w in own.values()]  # not their sums, which cross-entropy keeps
    assert all(float((a - b).abs().max()) > 1e-3 for a, b in itertools.combinations(heads, 2))


@pytest.mark.parametrize("training", [{}, {"optimizer": "adamw", "momentum": 0.0, "lr": 0.01}, {"clip": 0.1}], ids=str)
def test_a_client_alone_without_the_pull_has_the_global_model_for_its_own(training, make_site, play):
    """By the job's optimizer, whichever it is, bit for bit."""
    for round in play(make_site(m.ditto(lam=0.0), counts=[[12, 13, 9, 8]], clients_per_round=1, **training))[1:]:
        assert all(torch.equal(own, round.weights[name]) for name, own in own_of(round)[0].items())


IMAGES = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(8) % 4


def network(seed):
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return Classifier(nn.Sequential(*layers), nn.Linear(16, 4)).double()


def client_of(anchor, memory, lr):
    """A client that has been here before; the job trains with plain SGD."""
    frozen = copy.deepcopy(anchor).eval().requires_grad_(False)
    steps = partial(stepper, training=Training(lr=lr), round=1)
    view = {"weights": state_of(anchor), "memory": memory, "global_model": frozen, "run": run_model, "stepper": steps}
    return SimpleNamespace(**view, id=3, round=1)


@pytest.mark.parametrize(("lam", "lr"), [(0.0, 0.1), (0.3, 0.1), (1000.0, 0.001)])
def test_a_step_follows_the_formula_in_float64(lam, lr):
    """`v - lr (grad CE(v) + lam (v - w))`, by parameter; with `lam = 1 / lr` it ends next to the global model."""
    own = network(1).train()
    part, client, before = m.OwnModel(lam), client_of(network(0), state_of(own), lr), state_of(own)
    inside = part.begin(client)
    given = m.Batch(IMAGES, LABELS, network(2), {}, client)
    assert part.loss(given, inside) is None
    loss = F.cross_entropy(own(IMAGES), LABELS)
    gradients = dict(zip(parameters_of(own), torch.autograd.grad(loss, list(own.parameters())), strict=True))
    assert given.note.means() == {"own_loss": pytest.approx(loss.item())}
    total, after = part.report(client, inside, None)
    assert total is None and after.keys() == before.keys()
    for name, g in gradients.items():
        expected = before[name] - lr * (g + lam * (before[name] - client.weights[name]))
        torch.testing.assert_close(after[name], expected, rtol=1e-9, atol=1e-12)
        if lam * lr == 1:
            torch.testing.assert_close(after[name], client.weights[name], rtol=0, atol=lr * float(g.abs().max()) + 1e-9)
    for name, buffer in own.named_buffers():  # of its own passes, and not pulled
        torch.testing.assert_close(after[name], buffer)
    assert all(torch.equal(w, state_of(network(1))[name]) for name, w in client.memory.items()), "the memory is kept"
    assert all(torch.equal(w, state_of(network(0))[name]) for name, w in client.weights.items())


def test_batch_norm_counts_the_batches_that_an_own_model_has_seen(make_site, play):
    alone = {"counts": [[3, 4, 2, 2]], "clients_per_round": 1, "local_steps": 4, "norm": True}
    for round in play(make_site(m.ditto(), **alone))[1:]:
        own = own_of(round)[0]
        assert own["features.1.num_batches_tracked"] == 4 * round.round
        assert own.keys() == round.weights.keys()


def test_frozen_parameters_stay_frozen_in_own_models(make_site, play):
    site = make_site(m.ditto())
    site.model.features.requires_grad_(False)
    assert all(own.keys() == {"head.weight", "head.bias"} for own in own_of(play(site)[-1]).values())


def test_measures_show_own_models_but_the_drift_that_of_the_global_training(make_site, play):
    measured = {"measure": ["local", "drift", "confusion"], "measure_images": 0}
    site, plain = (make_site(method, clients_per_round=6) for method in (m.ditto(lam=0.1), m.fedavg()))
    site, plain = (replace(each, job=replace(each.job, **measured)) for each in (site, plain))
    weights, own, differ = state_of(site.model), {}, 0
    for ours, theirs in zip(play(site)[1:], play(plain)[1:], strict=True):
        kept = own_of(ours)
        for row, other in zip(ours.clients, theirs.clients, strict=True):
            for when, of in (("before", own.get(row.client, weights)), ("after", kept[row.client])):
                confusion = local.evaluate(site, with_weights(site.model, of).eval(), 0, 30).confusion
                assert row.notes[f"local.{when}.accuracy"] == np.trace(confusion) / 30
            assert np.array_equal(ours.confusions[row.client], confusion)
            differ += row.notes["local.after.in_local"] != other.notes["local.after.in_local"]
            drifts = [{k: v for k, v in each.notes.items() if k.startswith("drift.")} for each in (row, other)]
            assert drifts[0] == drifts[1] and "drift.divergence" in drifts[0]
        weights, own = ours.weights, own | kept
    assert differ


# What is refused, and what is told.


@dataclass(frozen=True)
class Keeps(m.Part):
    keeps_model: ClassVar[bool] = True

    def begin(self, client):
        return None


@pytest.mark.parametrize(
    "method", [m.compose(m.ditto(), Keeps()), m.compose(m.ditto(), m.LocalHead()), m.compose(m.fedbn(), m.OwnModel())]
)
def test_a_client_has_one_model_of_its_own(method, make_model):
    with pytest.raises(InputError, match=r"own_model.*would have several models of its own; keep one of these"):
        refuse_misplaced(method, make_model(norm=True))


def test_a_method_may_change_to_ditto(make_site, play):
    """The own models then begin with the global model of that round."""
    site = make_site(m.switch(m.fedavg(), m.ditto(lam=0.0), at=3))
    refuse_misplaced(site.job.method, site.model)
    *_, before, last = play(site)
    assert not before.memories
    for client, own in own_of(last).items():
        alone = trained_alone(site, client, before.weights, 3, 0.0, before.weights)
        assert all(torch.equal(own[name], w) for name, w in alone.items())


def test_a_run_is_told_that_the_test_accuracy_is_not_of_the_own_models(make_model):
    (doubt,) = of_models(m.ditto(), make_model(), measured=False)
    assert doubt == (
        "with own_model each client has a model of its own, and test_accuracy is that of the global model; "
        "measure = ['local'] records the accuracy of the clients' models"
    )
    (doubt,) = of_models(m.ditto(), make_model(), measured=True)
    assert doubt.endswith("that of the global model"), "it is measured already"
    assert not [*of_models(m.fedavg(), make_model(), measured=False)]


def test_a_part_that_keeps_a_model_gives_it_as_memory(make_site, play):
    with pytest.raises(ClientFailed, match="Keeps has keeps_model = True, and its report gave no weights as memory"):
        play(make_site(m.compose(Keeps())))


def test_an_own_model_that_is_no_longer_finite_ends_the_run(make_site, play):
    """A pull that is too strong for the rate throws it further away with each step; the global model is well."""
    match = r"client \d's own model in round 1 holds a NaN or an infinity at .*; try a smaller train.lr"
    with pytest.raises(Diverged, match=match + ", or a lam below 1000000000000.0"):
        play(make_site(m.ditto(lam=1e12), local_steps=20))
    spoilt = m.OwnModel(0.0).begin(client := client_of(network(0), None, lr=0.1))
    spoilt.model.head.weight.data[0, 0] = torch.nan
    with pytest.raises(Diverged, match=f"{match}$"):
        m.OwnModel(0.0).report(client, spoilt, None)
