"""A client's optimizer is torch's, to the same bits, with a state that begins anew in each
round.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.batches import batches
from rayfed.clients.optimizers import stepper
from rayfed.clients.settings import Training
from rayfed.data.augment import prepare
from rayfed.methods import Part, compose, fedavg, fedntd
from rayfed.tensors.weights import parameters_of, squared_distance, state_of

THEIRS = {
    "sgd": lambda p, **options: torch.optim.SGD(p, fused=True, **options),
    "adam": lambda p, momentum, **options: torch.optim.Adam(p, fused=True, **options),
    "adamw": lambda p, momentum, **options: torch.optim.AdamW(p, fused=True, **options),
}
EVERY = [
    (name, momentum, decay) for name in THEIRS for decay in (0.0, 0.01) for momentum in (0.0, 0.9)
]
EVERY = [
    (name, momentum, decay) for name, momentum, decay in EVERY if name == "sgd" or not momentum
]


@pytest.mark.parametrize(("name", "momentum", "decay"), EVERY)
def test_a_step_is_torchs_bit_for_bit(name, momentum, decay):
    def trained(steps_of):
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"used": nn.Linear(40, 30), "late": nn.Linear(40, 30), "unused": nn.Linear(2, 2)}
        )
        step = steps_of(model)
        for number in range(4):
            images = torch.randn(8, 40)
            # Torch's fused SGD itself refuses momentum that begins later.
            late = number > 1 and name != "sgd"
            outputs = model["used"](images) + (model["late"](images) if late else 0)
            step(outputs.square().mean())
        return model.state_dict()

    def theirs(model):
        optimizer = THEIRS[name](model.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)

        def step(loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    training = Training(lr=0.1, optimizer=name, momentum=momentum, weight_decay=decay)
    expected, found = (
        trained(theirs),
        trained(lambda model: stepper(parameters_of(model), training, 1)),
    )
    assert all(torch.equal(found[entry], tensor) for entry, tensor in expected.items())


def test_the_first_step_of_adam_by_hand():
    """Its moments are then the gradient and its square, so each weight moves by the learning
    rate.
    """
    for name, decayed in (("adam", 3.0), ("adamw", 3.0 * (1 - 0.5 * 0.25))):
        w = torch.tensor([3.0], requires_grad=True)
        stepper({"w": w}, Training(lr=0.5, optimizer=name, weight_decay=0.25), 1)((2 * w).sum())
        assert w.item() == pytest.approx(decayed - 0.5, abs=1e-6), name


@pytest.mark.parametrize("name", THEIRS)
def test_two_rounds_of_one_client_are_torchs_with_a_new_optimizer_in_each(make_setup, play, name):
    setting = {
        "counts": [[12, 13, 9, 8]],
        "clients_per_round": 1,
        "num_rounds": 2,
        "optimizer": name,
    }
    setup = make_setup(fedavg(), momentum=0.9 if name == "sgd" else 0.0, lr_decay=1.0, **setting)
    training, weights, data = setup.job.train, state_of(setup.model), setup.federation
    rows = data.client(0)
    images = prepare(torch.from_numpy(data.train.examples[rows]), data.mean, data.std).plain(
        torch.arange(len(rows))
    )
    labels = torch.from_numpy(data.train.labels[rows])
    played = play(make_setup(fedavg(), momentum=training.momentum, lr_decay=1.0, **setting))
    for round in played[1:]:
        model = setup.model.train()
        model.load_state_dict(weights)
        options = {"momentum": training.momentum, "weight_decay": training.weight_decay}
        optimizer = THEIRS[name](model.parameters(), lr=training.lr, **options)
        rng = torch.Generator().manual_seed(
            seed_of(setup.job.seed, Purpose.BATCHES, round.round, 0)
        )
        for index in batches(len(rows), training, rng):
            optimizer.zero_grad()
            F.cross_entropy(model(images[index]), labels[index]).backward()
            optimizer.step()
        weights = state_of(model)
        assert all(torch.equal(round.weights[entry], tensor) for entry, tensor in weights.items())


# Clipping.


def test_a_gradient_is_clipped_by_its_norm_over_all_parameters():
    a, b = (torch.tensor([value], requires_grad=True) for value in (0.0, 0.0))
    unused = torch.zeros(1, requires_grad=True)
    step = stepper({"a": a, "b": b, "unused": unused}, Training(lr=1.0, clip=1.0), 1)
    # Of norm 5.
    step((3 * a + 4 * b).sum())
    assert [a.item(), b.item()] == pytest.approx([-0.6, -0.8], abs=1e-5)
    # Of norm 0.5: as it is.
    step((0.3 * a + 0.4 * b).sum())
    assert [a.item(), b.item()] == pytest.approx([-0.9, -1.2], abs=1e-5)


@pytest.mark.parametrize("name", THEIRS)
def test_a_bound_that_no_gradient_reaches_changes_no_bit(make_setup, play, name):
    setting = {"optimizer": name, "momentum": 0.0, "num_rounds": 2}
    free, bound = (play(make_setup(fedntd(), clip=clip, **setting))[-1] for clip in (0.0, 1e30))
    assert all(torch.equal(bound.weights[entry], tensor) for entry, tensor in free.weights.items())


@dataclass(frozen=True)
class Pull(Part):
    """A term that is linear in the parameters, as corrections of the gradient are."""

    def loss(self, batch, local):
        return 1e4 * torch.stack([p.sum() for p in batch.parameters.values()]).sum()


def test_the_terms_of_all_parts_are_clipped_together(make_setup, play):
    setting = {
        "counts": [[12, 13, 9, 8]],
        "clients_per_round": 1,
        "num_rounds": 1,
        "local_steps": 1,
    }
    setup = make_setup(compose(Pull()), clip=0.5, weight_decay=0.0, **setting)
    before, after = (round.weights for round in play(setup))
    names = parameters_of(setup.model)
    moved = squared_distance({name: before[name] for name in names}, after).sqrt().item()
    assert math.isclose(moved, setup.job.train.lr * 0.5, rel_tol=1e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("round", [1, 2, 4])
def test_a_step_has_the_rate_of_its_round(optimizer, round):
    """The first step of Adam on a gradient of 1 has the length of the rate, as one of SGD has."""
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    training = Training(optimizer=optimizer, lr=0.5, lr_decay=0.5)
    stepper({"w": w}, training, round)(w.sum())
    assert w.item() == pytest.approx(1 - 0.5**round)
