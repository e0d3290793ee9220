"""FedETF: its corners, its scale, and what the global model's head is."""

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
from rayfed.models.classifier import Classifier


def state(round):
    return round.held["supervise"].state


@pytest.mark.parametrize(("classes", "width"), [(2, 2), (4, 16), (10, 10)])
def test_the_corners_have_length_1_and_equal_angles(classes, width):
    head = torch.randn(classes, width, generator=torch.Generator().manual_seed(0))
    corners = m.SimplexHead().init({"head.weight": head})["corners"]
    even = torch.full((classes, classes), -1 / (classes - 1)).fill_diagonal_(1.0)
    torch.testing.assert_close(corners @ corners.T, even)
    assert corners.sum(dim=0).abs().max() < 1e-5


def test_the_global_models_head_is_the_scaled_corners_and_the_scale_is_learned(make_site, play):
    before, *run = play(make_site(m.fedetf(), norm=True))
    scales = [1.0]
    for round in run:
        corners, scale = state(round)["corners"], state(round)["scale"]
        torch.testing.assert_close(round.weights["head.weight"], scale / 2 * corners)  # of four classes
        assert not round.weights["head.bias"].any() and torch.equal(corners, state(run[0])["corners"])
        scales.append(scale)
    assert len(set(scales)) == 4 and not torch.equal(before.weights["head.weight"], run[0].weights["head.weight"])


def test_a_client_alone_learns_features_and_a_scale_by_plain_sgd(make_site, play, of_client):
    """The scale as a parameter of its own; weight decay is 0, as at first the head has other weights to decay."""
    alone = {"counts": [[12, 13, 9, 8]], "clients_per_round": 1, "weight_decay": 0.0}
    site = make_site(m.fedetf(scale=2.0), **alone)
    training, features = site.job.train, site.model.features
    images, labels = of_client(site, 0)
    prior = torch.tensor([12.0, 13.0, 9.0, 8.0]).log()
    scale = torch.tensor(2.0, requires_grad=True)
    for before, after in pairwise(play(make_site(m.fedetf(scale=2.0), **alone))):
        features.load_state_dict({k.removeprefix("features."): w for k, w in before.weights.items() if "feat" in k})
        lr = training.lr * training.lr_decay ** (after.round - 1)
        order = torch.Generator().manual_seed(seed_of(0, Purpose.BATCHES, after.round, 0))

        corners = state(after)["corners"]

        def loss(corners, index):
            return F.cross_entropy(scale * F.normalize(features(images[index])) @ corners.T + prior, labels[index])

        losses = [partial(loss, corners, index) for index in batches(42, training, order)]
        oracle.descend([*features.parameters(), scale], losses, lr=lr, momentum=training.momentum)
        assert state(after)["scale"] == pytest.approx(scale.item(), rel=1e-4)
        for name, w in features.state_dict().items():
            torch.testing.assert_close(after.weights[f"features.{name}"], w, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("head", [nn.Linear(3, 4), nn.Sequential(nn.Linear(8, 4))], ids=["narrow", "not linear"])
def test_a_model_whose_head_cannot_hold_a_simplex_is_refused(head):
    with pytest.raises(
        InputError, match="a single linear layer as its head, with as many features as there are classes"
    ):
        m.SimplexHead().check(Classifier(nn.Flatten(), head))


def test_a_frozen_head_is_refused():
    model = Classifier(nn.Flatten(), nn.Linear(8, 4).requires_grad_(False))
    with pytest.raises(InputError, match="learns the scale of the head, which is frozen"):
        m.SimplexHead().check(model)


def test_a_head_that_stays_at_the_clients_is_refused(make_site, play):
    with pytest.raises(InputError, match="the head stays at the clients; remove that"):
        play(make_site(m.compose(m.fedetf(), m.LocalHead())))
