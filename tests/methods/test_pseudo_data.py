"""FedReg's steps, written out as the authors' code has them."""

import copy

import oracle
import pytest
import torch
import torch.nn.functional as F

from rayfed import methods as m
from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.batches import batches
from rayfed.clients.settings import Training
from rayfed.tensors.weights import with_weights


def uphill(model, x, y, length, iterations):
    for _ in range(iterations):
        x = x + length * oracle.gradient(lambda x: F.cross_entropy(model(x), y), x).sign()
    return x


def between(model, anchor, share):
    made = copy.deepcopy(model)
    with torch.no_grad():
        for w, w_global in zip(made.parameters(), anchor.parameters(), strict=True):
            w.copy_(share * w + (1 - share) * w_global)
    return made


def vector(tree):
    return torch.cat([x.flatten() for x in tree.values()])


@pytest.mark.parametrize("gamma", [0.4, 1.0])
def test_a_client_alone_takes_the_steps_of_the_authors_code(gamma, make_setup, play, of_client):
    setting = {
        "counts": [[12, 13, 9, 8]],
        "clients_per_round": 1,
        "weight_decay": 0.0,
        "momentum": 0.0,
    }
    method = m.fedreg(gamma=gamma, iterations=3)
    setup = make_setup(method, num_rounds=1, **setting)
    images, labels = of_client(setup, 0)
    images, before = images.double(), play(setup)[0].weights
    anchor = with_weights(setup.model, before).double()
    model, lr, removed = copy.deepcopy(anchor), 0.1, 0
    made = [(x, y) for x, y in zip(images.split(5), labels.split(5), strict=True)]
    order = torch.Generator().manual_seed(seed_of(0, Purpose.BATCHES, 1, 0))
    for step, index in enumerate(batches(42, setup.job.train, order)):
        middle = between(model, anchor, gamma)
        g = oracle.gradients(oracle.loss_of(middle, images[index], labels[index]), middle)
        model = oracle.moved(model, {name: -lr * x for name, x in g.items()})
        x, y = made[step % len(made)]
        pseudo = uphill(anchor, x, y, 0.2, 3)
        penal, way = between(model, anchor, 0.5), None
        for data, target in (
            (pseudo, anchor(pseudo).softmax(1).detach()),
            (uphill(anchor, x, y, 0.002, 3), y),
        ):
            g = oracle.gradients(F.cross_entropy(penal(data), target), penal)
            if way is None:
                way = {
                    n: (w - o).detach()
                    for (n, w), o in zip(model.named_parameters(), anchor.parameters(), strict=True)
                }
            share = max(0.0, (vector(way) @ vector(g) / vector(g).square().sum()).item())
            removed += share > 0
            way = {n: x - share * g[n] for n, x in way.items()}
        with torch.no_grad():
            for (name, w), o in zip(model.named_parameters(), anchor.parameters(), strict=True):
                w.copy_(o + way[name])
    assert removed > 5
    for name, w in play(setup)[1].weights.items():
        torch.testing.assert_close(w.double(), model.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_momentum_is_warned_of_as_what_is_taken_back_would_be_in_it(make_model, caplog):
    for part in (*m.fedreg(), *m.fedavg()):
        part.check(make_model(), Training())
    for part in m.fedavg():
        part.check(make_model(), Training(momentum=0.9))
    assert caplog.text == ""
    for part in m.fedreg():
        part.check(make_model(), Training(momentum=0.9))
    (warning,) = caplog.messages
    assert warning == (
        "the maths of pseudo_data holds for steps without momentum, and train.momentum = 0.9: "
        "give train.momentum = 0"
    )
