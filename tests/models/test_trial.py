"""The trial of a model before a run: what it finds, what it must not say, and that it leaves all as
it was.
"""

import copy
import random

import numpy as np
import pytest
import torch
from ray import cloudpickle
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from rayfed import methods as m
from rayfed.base.errors import InputError, RunFailed
from rayfed.clients.settings import Training
from rayfed.data.inputs import Images, Tokens, Vectors
from rayfed.models.classifier import Classifier
from rayfed.models.registry import build_model
from rayfed.models.sending import make_sendable
from rayfed.models.trial import Setting, check_outputs, try_model
from rayfed.rounds.engine import rounds
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.weights import constants, keep_constant

SHAPE = (1, 4, 4)
INPUTS = {"text": Tokens(6, 50), "mlp": Vectors(5)}


def tried(model, inputs=None, **setting):
    inputs = inputs or Images(SHAPE)
    examples = inputs.some(8)
    if examples.is_floating_point():
        examples = torch.randn(examples.shape, generator=torch.Generator().manual_seed(0))
    given = {"name": "m", "inputs": inputs, "num_classes": 4, "training": Training(lr=0.1)}
    given |= {"examples": examples, "labels": torch.arange(8) % 4}
    given |= {"alone_in_training": "", "alone_in_evaluation": ""}
    return try_model(model, Setting(**given | setting))


class Net(nn.Module):
    """A linear layer, with what a test changes around it."""

    def __init__(self, before=None, after=None, **buffers):
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.before, self.after = before, after
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        if self.before:
            x = self.before(self, x)
        logits = self.layer(x.flatten(1))
        return self.after(self, logits) if self.after else logits


@pytest.mark.parametrize("name", ["cnn", "resnet8", "text", "mlp"])
def test_of_the_models_of_this_package_it_finds_nothing(name):
    inputs = INPUTS.get(name, Images((3, 32, 32)))
    model = build_model(name, **inputs._asdict(), num_classes=4, seed=0)
    found = tried(model, inputs)
    assert (found.writes_to_inputs, found.constants, found.unused, found.warnings) == (
        (False, (), (), ())
    )


def test_it_leaves_the_model_and_the_process_as_they_were():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(8, 4)
    )
    before = copy.deepcopy(model.state_dict())
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    tried(model)
    assert model.training and all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]


def test_a_model_that_writes_to_its_input_is_found_and_so_is_a_head():
    assert tried(Net(before=lambda net, x: x.mul_(0.5))).writes_to_inputs
    in_training = Net(before=lambda net, x: x.mul_(0.5) if net.training else x * 0.5)
    assert tried(in_training).writes_to_inputs
    assert not tried(Net(before=lambda net, x: x * 0.5)).writes_to_inputs
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
    for in_place in (True, False):
        head = nn.Sequential(nn.ReLU(inplace=in_place), nn.Linear(8, 4))
        assert tried(Classifier(body, head)).writes_to_inputs == in_place


@pytest.mark.parametrize(
    ("after", "where"),
    [
        (lambda net, z: z.softmax(1), ""),
        (lambda net, z: z.softmax(1).double(), ""),
        (lambda net, z: z if net.training else z.softmax(1), " in evaluation mode"),
        (lambda net, z: z.softmax(1) if net.training else z, " in training mode"),
        (lambda net, z: z.sigmoid().view(-1, 4), ""),
    ],
)
def test_outputs_that_are_probabilities_are_named(after, where):
    (warning,) = tried(Net(after=after)).warnings
    assert f"its outputs are probabilities{where}, and the losses take logits" in warning


@pytest.mark.parametrize(
    "after",
    [
        None,
        # A softmax of it is the same softmax.
        lambda net, z: z.log_softmax(1),
        lambda net, z: z.abs(),
        lambda net, z: z.relu(),
        lambda net, z: z.tanh(),
        # In [0, 1], and each row sums to 1, nearly.
        lambda net, z: z * 0.001 + 0.25,
    ],
)
def test_other_outputs_are_not(after):
    assert tried(Net(after=after)).warnings == ()


def test_a_fresh_head_whose_outputs_are_all_the_share_of_a_class_gives_no_probabilities():
    net = Net()
    nn.init.zeros_(net.layer.weight)
    nn.init.constant_(net.layer.bias, 0.25)
    assert tried(net).warnings == ()


def test_buffers_without_a_mean_that_stay_as_they_are_are_constants():
    inf = float("inf")
    net = Net(
        mask=torch.tensor([0.0, -inf]),
        turns=torch.ones(2, dtype=torch.complex64),
        edges=torch.eye(2).to_sparse(),
        ids=torch.arange(3),
    )
    assert tried(net).constants == ("mask", "turns", "edges")
    # An observer's least value, of what it has seen so far.
    least = Net(before=lambda net, x: net.least.fill_(x.min()) * 0 + x, least=torch.tensor(inf))
    assert tried(least).constants == ()


def test_parameters_without_a_gradient_are_named_and_no_reason_to_refuse():
    net = Net()
    net.other = nn.Linear(2, 2)
    assert tried(net).unused == ("other.weight", "other.bias")
    net.other.requires_grad_(False)
    assert tried(net).unused == ()


@pytest.mark.parametrize(
    ("held", "place"),
    [
        (lambda: [nn.Linear(4, 4)], "'extra'"),
        (lambda: {"a": nn.Linear(4, 4)}, "'extra'"),
        (lambda: (nn.Linear(4, 4).requires_grad_(False),), ""),
        (lambda: [1.0, "name"], ""),
        (lambda: nn.ModuleList([nn.Linear(4, 4)]), ""),
    ],
)
def test_layers_in_a_plain_container_are_told_as_they_would_not_be_trained(held, place):
    net = Net()
    net.extra = held()
    told = [text for text in tried(net).warnings if "in a plain list" in text]
    assert len(told) == bool(place)
    assert not told or f"the layers in {place} are" in told[0]
    # A layer that the model also has under a name of its own is trained.
    net = Net()
    net.extra = [net.layer]
    assert not any("plain list" in text for text in tried(net).warnings)


def test_what_a_model_keeps_outside_its_state_is_named():
    def counted(net, z):
        net.count = getattr(net, "count", 0) + net.training
        return z * (1 + net.count)

    (warning,) = tried(Net(after=counted)).warnings
    assert "it keeps something outside its parameters and buffers" in warning
    drawn = Net(after=lambda net, z: z + random.random() + np.random.random() + torch.rand(()))
    assert tried(drawn).warnings == ()


def test_a_model_that_writes_to_its_input_trains_as_without(make_setup, play):
    """Student, teacher, evaluation and measures see the images as they are."""

    class Half(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.in_place = in_place

        def forward(self, x):
            return x.mul_(0.5) if self.in_place else x * 0.5

    for method in (m.fedntd(), m.fedsam(), m.fedcurv(), m.feddf(steps=3)):
        ends = []
        for in_place in (False, True):
            setup = make_setup(method, num_rounds=2, clients_per_round=2)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                layers = [Half(in_place), nn.Flatten(), nn.Linear(16, 8), nn.ReLU()]
                model = Classifier(nn.Sequential(*layers), nn.Linear(8, 4))
            setup = copy.copy(setup)
            object.__setattr__(setup, "model", model)
            object.__setattr__(setup, "writes_to_inputs", in_place)
            ends.append(play(setup)[-1])
        torch.testing.assert_close(ends[0].weights, ends[1].weights, rtol=0, atol=0)
        assert ends[0].test_loss == ends[1].test_loss


def test_a_model_that_writes_unseen_by_its_trial_and_a_constant_that_changes_end_the_run(
    make_setup,
):
    def failing(model):
        setup = make_setup(m.fedavg(), num_rounds=1)
        object.__setattr__(setup, "model", model)
        with pytest.raises(RunFailed) as raised:
            list(rounds(setup, ThisProcess(setup)))
        return str(raised.value)

    writing = Net(before=lambda net, x: x.mul_(0.5))
    assert "has written to the images that it was given" in failing(writing)
    changing = Net(
        before=lambda net, x: net.mask.add_(1)[1] * 0 + x,
        mask=torch.tensor([float("inf"), 0.0]),
    )
    keep_constant(changing, ["mask"])
    assert constants(copy.deepcopy(changing)) == {"mask"}
    assert "training has changed the model's buffer 'mask'" in failing(changing)


def test_a_parametrized_model_that_was_sent_trains_to_the_same_bits():
    """Torch itself cannot pickle it."""
    model = nn.Sequential(
        nn.Flatten(), spectral_norm(nn.Linear(16, 4)), weight_norm(nn.Linear(4, 4))
    )
    make_sendable(model)
    sent = cloudpickle.loads(cloudpickle.dumps(model))
    again = cloudpickle.loads(cloudpickle.dumps(copy.deepcopy(sent)))
    x, losses = torch.randn(8, 16), []
    for each in (model, sent, again):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(3):
            loss = each(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        assert list(each.state_dict()) == list(model.state_dict())
    assert losses[0] == losses[1] == losses[2]


class TakesNoMode(Net):
    def train(self):
        return super().train(True)


class RequiresMode(Net):
    def train(self, mode):
        return super().train(mode)


@pytest.mark.parametrize("kind", [TakesNoMode, RequiresMode])
def test_a_model_that_cannot_change_its_mode_is_refused(kind):
    message = (
        r"model 'm': it cannot be put into .*TypeError: .*train\(\).*; its train and eval must take"
    )
    with pytest.raises(InputError, match=message):
        check_outputs("m", kind(), Images(SHAPE), 4)
    check_outputs("m", Net(), Images(SHAPE), 4)
