"""FedAlign's term: which layers are the last stage, what the slimmed stage computes, and the term
by an exact norm.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rayfed import methods as m
from rayfed.methods.slim import _cut, _last_stage, _slimmed
from rayfed.models.registry import build_model
from rayfed.models.resnet import Residual, _basic, _padded

X = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def features():
    """A stem of 8 channels, and a last stage of 16: a block that halves the map, and one with an
    identity shortcut.
    """
    torch.manual_seed(0)
    blocks = _basic(8, 8, 1), _basic(8, 16, 2), _basic(16, 16, 1)
    for norm in (
        module
        for block in blocks
        for module in block.modules()
        if isinstance(module, nn.BatchNorm2d)
    ):
        nn.init.uniform_(norm.weight), nn.init.uniform_(norm.bias)
    assert isinstance(blocks[2].shortcut, nn.Identity)
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), *blocks, *pool
    ).double()


def cut_by_hand(module):
    """The same layers with half of the inputs and half of the outputs, so that nothing is left to
    mask.
    """
    module = copy.deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.weight = nn.Parameter(
                layer.weight[: layer.out_channels // 2, : layer.in_channels // 2].clone()
            )
        elif isinstance(layer, nn.BatchNorm2d):
            for name in ("weight", "bias"):
                setattr(
                    layer,
                    name,
                    nn.Parameter(getattr(layer, name)[: layer.num_features // 2].clone()),
                )
            for name in ("running_mean", "running_var"):
                setattr(layer, name, getattr(layer, name)[: layer.num_features // 2])
    return module


def norm(inputs, outputs):
    """The largest singular value of each sample's `a b^T / (h w)`, by a decomposition."""
    a, b = (
        nn.functional.adaptive_avg_pool2d(inputs, outputs.shape[2:]).flatten(2),
        outputs.flatten(2),
    )
    return torch.linalg.matrix_norm(a @ b.transpose(1, 2) / b.shape[2], ord=2)


def test_the_slimmed_stage_is_the_stage_cut_by_hand_from_its_input_on_shortcuts_included(features):
    stage, x, _ = _last_stage(features, X)
    slim, by_hand = _slimmed(stage, _cut(x, 0.5), 0.5), cut_by_hand(features[3:5])(x[:, :4])
    torch.testing.assert_close(slim[:, :8], by_hand)
    assert not slim[:, 8:].any()


def test_a_shortcut_that_adds_zeros_is_cut_as_by_hand():
    torch.manual_seed(0)
    stage = nn.Sequential(_padded(8, 16, 2), _padded(16, 16, 1)).double()
    x, narrow = torch.rand(6, 8, 8, 8, dtype=torch.float64), cut_by_hand(stage)
    narrow[0].shortcut.channels //= 2
    slim = _slimmed(stage, _cut(x, 0.5), 0.5)
    torch.testing.assert_close(slim[:, :8], narrow(x[:, :4]))
    assert not slim[:, 8:].any()


def test_the_term_and_its_gradient_are_those_of_the_stage_cut_by_hand_with_an_exact_norm(features):
    model = SimpleNamespace(features=features)
    ours = m.SlimAlign(mu=0.3, width=0.5).loss(SimpleNamespace(model=model, images=X), None)
    narrow = cut_by_hand(features[3:5])
    with torch.no_grad():
        x = features[:3](X)
        full = norm(x, features[3:5](x))
    term = 0.3 * ((norm(x[:, :4], narrow(x[:, :4])) - full) / full).square().mean()
    torch.testing.assert_close(ours, term, rtol=1e-4, atol=0)
    ours.backward(), term.backward()
    # Layers before the stage have no part in it.
    assert all(p.grad is None for p in features[:3].parameters())
    for whole, half in zip(features[3:5].parameters(), narrow.parameters(), strict=True):
        kept = torch.zeros_like(whole)
        # A channel that is cut has no gradient.
        kept[tuple(slice(side) for side in half.shape)] = half.grad
        torch.testing.assert_close(whole.grad, kept, rtol=1e-3, atol=1e-5)


def test_the_passes_leave_no_trace_in_the_model(features):
    before = copy.deepcopy(features.state_dict())
    m.SlimAlign().loss(SimpleNamespace(model=SimpleNamespace(features=features), images=X), None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in features.state_dict().items())
    assert not any(module._forward_hooks for module in features.modules())


@pytest.mark.parametrize(
    ("name", "options", "stage"),
    [
        ("cnn", {}, [nn.Linear, nn.ReLU]),
        ("lenet", {}, [nn.Linear, nn.ReLU]),
        ("cnn", {"project": 8}, [nn.Linear]),
        ("alexnet", {}, [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU]),
        ("resnet8", {}, [Residual]),
        ("resnet50", {}, [Residual, Residual, Residual]),
        ("resnet56", {}, [Residual] * 9),
        ("resnet56", {"bottleneck": True}, [Residual] * 6),
        ("mobilenet", {}, [nn.Conv2d, nn.BatchNorm2d, nn.ReLU6]),
    ],
)
def test_the_last_stage_of_a_model(name, options, stage):
    model = build_model(name, options, image_shape=(3, 32, 32), num_classes=10, seed=0)
    with torch.no_grad():
        found, inputs, outputs = _last_stage(model.features, torch.rand(2, 3, 32, 32))
        assert [type(layer) for layer in found] == stage
        assert found.train()(inputs).shape == outputs.shape != inputs.shape


def test_a_pool_goes_before_the_stage_and_layers_that_keep_the_shape_belong_to_it():
    layers = [
        nn.Conv2d(3, 4, 1),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1),
        nn.Flatten(),
    ]
    stage, inputs, outputs = _last_stage(
        nn.Sequential(nn.Sequential(*layers[:3]), *layers[3:]).double(), X
    )
    assert list(stage) == layers[2:5]
    assert inputs.shape == outputs.shape == (6, 4, 4, 4)
    alone = nn.Linear(3, 3, dtype=torch.float64)
    assert list(_last_stage(nn.Sequential(alone), X[:, :, 0, 0])[0]) == [alone]
