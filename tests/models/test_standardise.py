"""Weight standardisation: its formula, what it leaves alone, and methods that train with it."""

import copy
import pickle

import numpy as np
import pytest
import torch
from extras import needs
from torch import nn

from rayfed import methods as m
from rayfed.base.errors import InputError
from rayfed.data.augment import prepare
from rayfed.models.adapt import adapt
from rayfed.models.classifier import Classifier
from rayfed.models.registry import build_model
from rayfed.models.settings import Adapt, Lora
from rayfed.models.standardise import KINDS, is_standardised, standardised
from rayfed.tensors.weights import state_of, with_weights

SCALE = 0.05
OURS = set(KINDS.values())
SHAPE = (1, 28, 28)


def built(name="lenet", scale=SCALE, seed=0, rank=0, **options):
    model = build_model(name, options, image_shape=SHAPE, num_classes=10, seed=seed)
    adapt(model, Adapt(weight_standardisation=scale, lora=Lora(rank)), seed=1)
    return model


def by_hand(weight, scale):
    """In float64, by numpy."""
    rows = weight.detach().double().numpy().reshape(len(weight), -1)
    centred = rows - rows.mean(axis=1, keepdims=True)
    made = scale * centred / (rows.std(axis=1, ddof=1, keepdims=True) + 1e-5)
    return torch.from_numpy(made.reshape(weight.shape))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 3, 3, padding=1), (4, 2, 5)),
        (nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), (4, 4, 7, 7)),
        (nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), (4, 4, 5, 5)),
        (nn.Conv3d(1, 2, 2), (4, 1, 3, 3, 3)),
        (nn.Linear(5, 3), (4, 5)),
    ],
    ids=str,
)
def test_a_layer_computes_with_its_weight_by_the_formula(layer, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = Classifier(nn.Sequential(layer, nn.Flatten()), nn.LazyLinear(2))
    model(x)
    plain = copy.deepcopy(layer).double()
    adapt(model, Adapt(weight_standardisation=0.3), seed=0)
    plain.weight.data = by_hand(layer.weight, 0.3)
    torch.testing.assert_close(layer(x).double(), plain(x.double()), rtol=1e-4, atol=1e-5)


def test_a_filters_scale_and_mean_do_not_count_and_take_no_gradient():
    """The laws. So a gradient has no part along the filter, and none along a constant."""
    torch.manual_seed(0)
    weight = torch.randn(3, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    made = standardised(weight, 0.1)
    filters = made.flatten(1)
    torch.testing.assert_close(filters.mean(dim=1), torch.zeros(3).double())
    torch.testing.assert_close(
        filters.std(dim=1), torch.full((3,), 0.1).double(), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(standardised(7 * weight + 2, 0.1), made, rtol=1e-4, atol=1e-6)
    (gradient,) = torch.autograd.grad((made * torch.randn(3, 4, 3, 3)).sum(), weight)
    rows = gradient.flatten(1)
    assert rows.sum(dim=1).abs().max() < 1e-12
    along = (rows * weight.detach().flatten(1)).sum(dim=1)
    assert along.abs().max() < 1e-4 * rows.norm(dim=1).max()


def test_a_constant_filter_becomes_zero():
    assert torch.equal(standardised(torch.full((2, 3), 5.0), 0.1), torch.zeros(2, 3))


@pytest.mark.parametrize("name", ["cnn", "lenet", "resnet8", "resnet18", "mobilenet"])
def test_names_values_and_buffers_stay_and_every_layer_but_the_head_is_changed(name):
    model, plain = built(name), built(name, scale=0.0)
    assert is_standardised(model) and not is_standardised(plain)
    assert [*model.state_dict()] == [*plain.state_dict()]
    for entry, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[entry], tensor)
    before = dict(plain.named_modules())
    for place, module in model.named_modules():
        inner = type(before[place]) in (nn.Conv2d, nn.Linear) and not place.startswith("head")
        assert (type(module) is type(before[place])) == (not inner), place
    x = torch.randn(2, *SHAPE)
    assert not torch.equal(model.eval()(x), plain.eval()(x))


def test_layers_whose_weights_are_used_past_them_and_other_classes_stay():
    class Own(nn.Linear):
        pass

    inner = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    depthwise = nn.Conv1d(4, 4, 1, groups=4)
    model = Classifier(nn.Sequential(inner, Own(4, 4), depthwise, nn.Linear(4, 4)), nn.Linear(4, 2))
    adapt(model, Adapt(weight_standardisation=0.1), seed=0)
    changed = [place for place, module in model.named_modules() if is_standardised(module)]
    assert changed == ["", "features", "features.3"]


def test_a_model_without_such_a_layer_is_refused():
    for features in (nn.Flatten(), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)):
        model = Classifier(features, nn.Linear(4, 2))
        with pytest.raises(InputError, match=r"weight_standardisation = 0.1: the model has no lin"):
            adapt(model, Adapt(weight_standardisation=0.1), seed=0)


@needs("peft")
def test_lora_is_added_to_what_a_standardised_layer_gives():
    """Its matrices begin with no effect, and are not standardised themselves."""
    model, x = built().eval(), torch.randn(2, *SHAPE)
    with_lora = built(rank=2).eval()
    assert torch.equal(with_lora(x), model(x))
    changed = [place for place, module in with_lora.named_modules() if type(module) in OURS]
    assert changed and all(place.endswith(".base_layer") for place in changed)
    assert any(".lora_A" in name for name, p in with_lora.named_parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "options", "scale", "warned"),
    [
        ("cnn", {}, 0.001, True),
        ("cnn", {}, 0.05, False),
        ("lenet", {"batch_norm": True}, 0.001, False),
        ("resnet8", {"norm": "group"}, 0.001, False),
    ],
)
def test_small_weights_without_norms_are_warned_of(name, options, scale, warned, caplog):
    built(name, scale, **options)
    assert ("and with such small weights its outputs vanish" in caplog.text) == warned


def test_copies_and_pickles_are_standardised_too():
    model, x = built().eval(), torch.randn(2, *SHAPE)
    expected = model(x)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    copies.append(with_weights(built(seed=5), state_of(model)).eval())
    for copied in copies:
        assert torch.equal(copied(x), expected)


@pytest.fixture
def standardised_setup(make_setup):
    """A setup of the small model, with BatchNorm and standardised weights."""

    def make(method, **setting):
        setup = make_setup(method, norm=True, **setting)
        adapt(setup.model, Adapt(weight_standardisation=SCALE), seed=0)
        return setup

    return make


@pytest.mark.parametrize(
    "method",
    [m.fedavg, m.fedntd, m.moon, m.scaffold, m.fedcurv, m.fedsam, m.fedbn, m.fedalign, m.ditto],
)
def test_a_method_trains_with_it_and_averages_the_weights_themselves(
    method, standardised_setup, make_setup, play
):
    last, plain = play(standardised_setup(method()))[-1], play(make_setup(method(), norm=True))[-1]
    assert [*last.weights] == [*plain.weights]
    assert all(np.isfinite(row.train_loss) for row in last.clients)
    weight = last.weights["features.0.weight"]
    assert not torch.equal(weight, plain.weights["features.0.weight"])
    # A standardised filter would have the mean 0.
    assert weight.flatten(1).mean(dim=1).abs().max() > 1e-3


def test_one_client_takes_the_step_of_plain_torch(standardised_setup, play):
    """All its images in one batch, and the step by hand on the formula."""
    one = {"counts": [[4, 1, 0, 0]], "clients_per_round": 1, "num_rounds": 1, "batch_size": 5}
    setup = standardised_setup(m.fedavg(), **one, local_epochs=1, momentum=0.0, weight_decay=0.0)
    conv, norm, head = setup.model.features[0], setup.model.features[1], setup.model.head
    setup.model.features[4].p = 0.0
    data = setup.federation
    rows = data.client(0)
    images = prepare(torch.from_numpy(data.train.examples[rows]), data.mean, data.std)
    images, labels = images.plain(torch.arange(5)), torch.from_numpy(data.train.labels[rows])
    weight = conv.weight.detach().clone().requires_grad_(True)
    mean = weight.mean(dim=(1, 2, 3), keepdim=True)
    deviation = ((weight - mean).square().sum(dim=(1, 2, 3), keepdim=True) / 8).sqrt()
    used = (weight - mean) / (deviation + 1e-5) * SCALE
    maps = nn.functional.conv2d(images, used, conv.bias)
    maps = nn.functional.batch_norm(maps, None, None, norm.weight, norm.bias, training=True)
    loss = nn.functional.cross_entropy(head(maps.relu().flatten(1)), labels)
    (gradient,) = torch.autograd.grad(loss, weight)
    (_, last) = play(setup)
    torch.testing.assert_close(
        last.weights["features.0.weight"], (weight - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6
    )
    assert gradient.abs().max() > 1e-3
