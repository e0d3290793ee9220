"""FedETF, FedGELA and FedNH: their cosines, the scale that clients learn, and the head of class
means.
"""

import math
from functools import partial
from itertools import pairwise

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfed import methods as m
from rayfed.base.errors import InputError
from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.batches import batches
from rayfed.clients.settings import Training
from rayfed.methods.cosines import _to_corners
from rayfed.models.classifier import Classifier
from rayfed.tensors.weights import with_weights

ALONE = {"counts": [[12, 13, 9, 0]], "clients_per_round": 1, "weight_decay": 0.0}
COUNTS = torch.tensor([12.0, 13.0, 9.0, 0.0])


@pytest.mark.parametrize("classes", [2, 4, 10])
def test_cosines_are_those_to_points_with_length_1_and_equal_angles_and_keep_the_order_of_logits(
    classes,
):
    corners = _to_corners(torch.eye(classes, dtype=torch.float64))
    even = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(
        1.0
    )
    torch.testing.assert_close(corners @ corners.T, even)
    logits = torch.randn(
        20, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    found = _to_corners(logits)
    torch.testing.assert_close(found, torch.stack([oracle.cosines(z, corners) for z in logits]))
    assert torch.equal(found.argsort(dim=1), logits.argsort(dim=1))


def etf(model, head, scale, images, labels):
    """As the authors' code has it: a linear projection, length 1, a simplex that is drawn, the log
    of the shares.
    """
    classes = head.shape[0]
    drawn, _ = torch.linalg.qr(torch.eye(classes))
    simplex = math.sqrt(classes / (classes - 1)) * (drawn @ (torch.eye(classes) - 1 / classes))
    cosines = F.normalize(model(images)) @ simplex
    return F.cross_entropy(scale * cosines + (COUNTS / COUNTS.sum() + 1e-9).log(), labels)


def gela(model, head, scale, images, labels):
    classes = head.shape[0]
    simplex = math.sqrt(classes / (classes - 1)) * (torch.eye(classes) - 1 / classes)
    lengths = COUNTS / COUNTS.sum() * classes
    return F.cross_entropy(F.normalize(model(images)) @ (lengths * simplex) / 0.2, labels)


def nh(model, head, scale, images, labels):
    return F.cross_entropy(
        scale * F.normalize(model.features(images)) @ F.normalize(head).T, labels
    )


CASES = {
    "fedetf": (m.fedetf(scale=2.0), etf),
    "fedgela": (m.fedgela(), gela),
    "fednh": (m.fednh(scale=2.0), nh),
}


@pytest.mark.parametrize(("method", "formula"), CASES.values(), ids=CASES)
def test_a_client_alone_learns_by_plain_sgd_and_its_scale_too(
    method, formula, make_setup, play, of_client
):
    setup = make_setup(method, **ALONE)
    training, (images, labels) = setup.job.train, of_client(setup, 0)
    scale = torch.tensor(2.0, requires_grad=True)
    for before, after in pairwise(play(setup)):
        model, head = with_weights(setup.model, before.weights), before.weights["head.weight"]
        order = torch.Generator().manual_seed(seed_of(0, Purpose.BATCHES, after.round, 0))
        rows = list(batches(34, training, order))
        losses = [
            partial(formula, model, head, scale, images[index], labels[index]) for index in rows
        ]
        lr = training.lr * training.lr_decay ** (after.round - 1)
        oracle.descend([*model.parameters(), scale], losses, lr=lr, momentum=training.momentum)
        if formula is not gela:
            assert after.held["supervise"].state == pytest.approx(scale.item(), rel=1e-4) != 2.0
        for name, w in model.state_dict().items():
            if formula is not nh or name.startswith("features"):
                torch.testing.assert_close(after.weights[name], w, rtol=1e-3, atol=1e-5)
        if formula is nh:
            features, expected = F.normalize(model.features(images)), F.normalize(head)
            # The client has none of class 3.
            for c in range(3):
                direction = F.normalize(features[labels == c].mean(dim=0), dim=0)
                expected[c] = F.normalize(0.9 * expected[c] + 0.1 * direction, dim=0)
            torch.testing.assert_close(after.weights["head.weight"], expected, rtol=1e-3, atol=1e-5)
            assert not after.weights["head.bias"].any()


def test_the_scale_is_the_mean_by_samples():
    part = m.SimplexHead()
    assert part.update(1.0, {"examples": 4, "scale": 1 * 2.0 + 3 * 6.0}, "step") == (5.0, "step")


@pytest.mark.parametrize("part", [m.PrototypeHead(), m.PersonalHead()], ids=repr)
def test_a_head_of_another_kind_is_refused(part):
    with pytest.raises(InputError, match="needs a model with a single linear layer as its head"):
        part.check(Classifier(nn.Flatten(), nn.Sequential(nn.Linear(8, 4))), Training())
    with pytest.raises(InputError, match="learns the head, which is frozen"):
        part.check(Classifier(nn.Flatten(), nn.Linear(8, 4).requires_grad_(False)), Training())


def test_class_means_in_a_head_that_stays_at_the_clients_are_refused(make_setup, play):
    with pytest.raises(InputError, match="the head stays at the clients; remove that"):
        play(make_setup(m.compose(m.fednh(), m.LocalHead())))
