"""Models: sizes and shapes, equality with torchvision's models, seeded weights, and messages about
bad input.
"""

import copy
import functools
import hashlib
import inspect
import math
import subprocess
import sys
import types

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from rayfed.base.errors import InputError
from rayfed.base.values import keys
from rayfed.job import Job
from rayfed.models.classifier import Classifier, has_features
from rayfed.models.convnets import MaxPool
from rayfed.models.registry import MODELS, build_model
from rayfed.models.resnet import Pad
from rayfed.models.vision import pooled
from rayfed.runtime.executors import threads

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)


@functools.cache
def built(name, image_shape=CIFAR):
    return build_model(name, image_shape=image_shape, num_classes=10, seed=0)


def images(image_shape, count=2):
    return torch.rand(count, *image_shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def vision():
    """torchvision's models, whose import takes seconds, as it imports torch's compiler."""
    from torchvision import models

    return models


def digest(model):
    return hashlib.sha256(
        b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    ).hexdigest()


@pytest.mark.parametrize(
    ("name", "image_shape", "parameters"),
    [
        ("cnn", CIFAR, 2_156_490),
        ("cnn", MNIST, 1_663_370),
        ("lenet", CIFAR, 62_006),
        ("circle", MNIST, 1_659_296),
        ("resnet8", CIFAR, 78_042),
        ("resnet10", CIFAR, 4_903_242),
        ("resnet18", CIFAR, 11_173_962),
        ("resnet50", CIFAR, 23_520_842),
        ("resnet56", CIFAR, 853_018),
        ("mobilenet", CIFAR, 2_236_682),
        ("alexnet", CIFAR, 57_023_306),
    ],
)
def test_parameter_counts(name, image_shape, parameters):
    assert (
        sum(parameter.numel() for parameter in built(name, image_shape).parameters()) == parameters
    )


OF_IMAGES = [
    name for name, build in MODELS.items() if "image_shape" in inspect.signature(build).parameters
]
RESNETS = {"resnet8": 64, "resnet10": 512, "resnet18": 512, "resnet50": 2048, "resnet56": 64}
WIDTHS = {"cnn": 512, "lenet": 84, "circle": 2, **RESNETS, "mobilenet": 1280, "alexnet": 4096}


@pytest.mark.parametrize("image_shape", [CIFAR, MNIST])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_every_model_gives_flat_features_and_their_logits(name, image_shape):
    model = built(name, image_shape)
    assert model.training
    assert has_features(model)
    x = images(image_shape)
    model.eval()
    with torch.no_grad():
        features = model.features(x)
        assert features.shape == (2, WIDTHS[name])
        assert model(x).shape == (2, 10)
        assert torch.equal(model.head(features), model(x))
        assert torch.allclose(model(x[:1]), model(x)[:1], atol=1e-5), (
            "an image's logits depend on its batch"
        )
    model.train()


@pytest.mark.parametrize("name", OF_IMAGES)
def test_the_gradient_reaches_every_parameter(name):
    model = built(name, MNIST)
    model(images(MNIST)).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()
    )
    model.zero_grad(set_to_none=True)


def test_every_model_is_listed_and_described():
    (listed,) = [key.sentence for key in keys(Job) if key.name == "model.name"]
    assert listed.partition(", or package.module:function")[0].split(", ") == list(MODELS)
    assert all(build.__doc__.splitlines()[0].endswith(".") for build in MODELS.values())


@pytest.mark.parametrize(
    ("name", "image_shape", "last_map"),
    [
        ("resnet8", CIFAR, (64, 8, 8)),
        ("resnet10", CIFAR, (512, 4, 4)),
        ("resnet10", MNIST, (512, 4, 4)),
        ("resnet50", CIFAR, (2048, 4, 4)),
        ("resnet56", CIFAR, (64, 8, 8)),
        ("mobilenet", CIFAR, (1280, 2, 2)),
    ],
)
def test_the_last_map_before_pooling(name, image_shape, last_map):
    *maps, _pool, _flatten = built(name, image_shape).features
    with torch.no_grad():
        assert nn.Sequential(*maps)(images(image_shape)).shape[1:] == last_map


def same_function(ours, theirs, image_shape):
    """Whether two models of the same structure agree after the second gets the weights of the first
    in their order.
    """
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = images(image_shape)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        return torch.allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "block", "depths"),
    [
        ("resnet10", "BasicBlock", [1, 1, 1, 1]),
        ("resnet18", "BasicBlock", [2, 2, 2, 2]),
        ("resnet50", "Bottleneck", [3, 4, 6, 3]),
    ],
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnets_are_torchvisions_with_a_small_stem(vision, name, block, depths, norm):
    layer = functools.partial(nn.GroupNorm, 2) if norm == "group" else nn.BatchNorm2d
    theirs = vision.resnet.ResNet(
        getattr(vision.resnet, block), depths, num_classes=10, norm_layer=layer
    )
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    options = {"norm": norm}
    assert same_function(
        build_model(name, options, image_shape=CIFAR, num_classes=10, seed=0), theirs, CIFAR
    )


def test_resnet18_with_the_large_stem_is_torchvisions_as_fl_simulator_trains_it(vision):
    norm = functools.partial(nn.GroupNorm, 2)
    theirs = vision.resnet.ResNet(vision.resnet.BasicBlock, [2, 2, 2, 2], 10, norm_layer=norm)
    options = {"stem": "7x7", "norm": "group"}
    ours = build_model("resnet18", options, image_shape=CIFAR, num_classes=10, seed=0)
    assert (
        same_function(ours, theirs, CIFAR)
        and sum(p.numel() for p in ours.parameters()) == 11_181_642
    )


@pytest.mark.parametrize("name", sorted(RESNETS))
def test_group_norm_is_in_the_place_of_each_batch_norm_and_the_weights_are_the_same(name):
    build = functools.partial(build_model, name, image_shape=CIFAR, num_classes=10, seed=0)
    batch, group = build(), build({"norm": "group", "groups": 4})
    kinds = [{type(module) for module in model.modules()} for model in (batch, group)]
    assert nn.GroupNorm not in kinds[0] and nn.BatchNorm2d not in kinds[1]
    assert {
        module.num_groups for module in group.modules() if isinstance(module, nn.GroupNorm)
    } == {4}
    ours, theirs = dict(group.named_parameters()), dict(batch.named_parameters())
    assert ours.keys() == theirs.keys() == group.state_dict().keys(), (
        "no running statistics are left"
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_resnet56_has_the_parameters_of_the_paper_counted_by_hand():
    """0.85 million (He et al., CVPR 2016, Table 6): shortcuts have none."""

    def convolution(inputs, outputs):
        # 3x3 without bias, and BatchNorm's weight and bias.
        return inputs * outputs * 9 + 2 * outputs

    first = convolution(3, 16) + 18 * convolution(16, 16)
    later = sum(
        convolution(width // 2, width) + 17 * convolution(width, width) for width in (32, 64)
    )
    assert (
        first + later + 64 * 10 + 10
        == 853_018
        == sum(p.numel() for p in built("resnet56").parameters())
    )
    layers = [m for m in built("resnet56").modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 56


def test_resnet56_with_bottlenecks_has_56_layers_too_and_the_parameters_counted_by_hand():
    model = build_model("resnet56", {"bottleneck": True}, image_shape=CIFAR, num_classes=10, seed=0)

    def block(inputs, outputs):
        inner = outputs // 4
        return inputs * inner + 9 * inner * inner + inner * outputs + 2 * (2 * inner + outputs)

    def stage(inputs, outputs):
        return block(inputs, outputs) + inputs * outputs + 2 * outputs + 5 * block(outputs, outputs)

    stages = stage(16, 64) + stage(64, 128) + stage(128, 256)
    by_hand = 3 * 16 * 9 + 2 * 16 + stages + 256 * 10 + 10
    assert by_hand == sum(p.numel() for p in model.parameters()) == 591_322
    shortcuts = [
        m for name, m in model.named_modules() if "shortcut" in name and isinstance(m, nn.Conv2d)
    ]
    assert (
        len([m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]) - len(shortcuts)
        == 56
    )


def test_a_shortcut_without_parameters_keeps_every_other_pixel_and_adds_channels_of_zeros():
    x = images((2, 5, 4))
    y = Pad(3, 2)(x)
    assert y.shape == (2, 5, 3, 2)
    assert torch.equal(y[:, :2], x[:, :, [0, 2, 4]][..., [0, 2]]) and not y[:, 2:].any()
    assert torch.equal(Pad(0, 1)(x), x)


@pytest.mark.parametrize(
    ("name", "theirs"), [("alexnet", "alexnet"), ("mobilenet", "mobilenet_v2")]
)
def test_for_large_images_the_model_is_torchvisions(vision, name, theirs):
    office = (3, 224, 224)
    ours = build_model(name, image_shape=office, num_classes=10, seed=0)
    assert same_function(ours, getattr(vision, theirs)(num_classes=10), office)


@given(st.tuples(*[st.integers(1, 13)] * 2), st.tuples(*[st.integers(1, 7)] * 2))
def test_the_pool_for_gpus_is_torchs(before, after):
    """Values and gradients; on a GPU torch's own gradients would differ in their last bits each
    time.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, *before, dtype=torch.float64, generator=rng, requires_grad=True)
    ours, theirs = pooled(x, *after), nn.functional.adaptive_avg_pool2d(x, after)
    torch.testing.assert_close(ours, theirs)
    weight = torch.rand(ours.shape, dtype=torch.float64, generator=rng)
    torch.testing.assert_close(
        *(torch.autograd.grad((y * weight).sum(), x)[0] for y in (ours, theirs))
    )


def test_lenets_batch_norm_follows_each_convolution_and_leaves_the_other_weights_as_they_are():
    plain, normed = (
        build_model("lenet", {"batch_norm": on}, image_shape=CIFAR, num_classes=10, seed=0)
        for on in (False, True)
    )
    before = None
    for layer in normed.features:
        assert isinstance(layer, nn.BatchNorm2d) == isinstance(before, nn.Conv2d)
        before = layer
    others = [
        p
        for m in normed.modules()
        if not isinstance(m, nn.BatchNorm2d)
        for p in m.parameters(recurse=False)
    ]
    assert all(
        torch.equal(one, other) for one, other in zip(plain.parameters(), others, strict=True)
    )


def test_dropout_has_the_place_that_torchvision_gives_it():
    model = build_model(
        "mobilenet", image_shape=CIFAR, num_classes=10, seed=0, options={"dropout": 0.5}
    )
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.5]
    assert isinstance(model.head[0], nn.Dropout)
    assert [
        module.p for module in built("alexnet").modules() if isinstance(module, nn.Dropout)
    ] == [0.5, 0.5]


@settings(max_examples=20)
@given(
    smallest=st.sampled_from([("cnn", 4), ("lenet", 16), ("resnet8", 1)]),
    extra=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    channels=st.integers(1, 4),
    num_classes=st.integers(1, 12),
)
@example(smallest=("alexnet", 15), extra=(0, 0), channels=1, num_classes=10)
def test_a_model_takes_every_size_from_its_smallest(smallest, extra, channels, num_classes):
    name, side = smallest
    shape = (channels, side + extra[0], side + extra[1])
    model = build_model(name, image_shape=shape, num_classes=num_classes, seed=0)
    assert model(images(shape, count=3)).shape == (3, num_classes)


@pytest.mark.parametrize("name", ["cnn", "lenet"])
def test_relu_after_the_pool_is_relu_before_it_to_the_bit(name):
    """In value and gradient, also where a whole window is negative, or its largest values are
    equal.
    """
    model = build_model(name, image_shape=(1, 28, 28), num_classes=10, seed=0)
    before = copy.deepcopy(model)
    for i, layer in enumerate(list(before.features)):
        if isinstance(layer, nn.MaxPool2d):
            before.features[i], before.features[i + 1] = before.features[i + 1], layer
    x = images((1, 28, 28), count=8).round()
    for net in (model, before):
        net(x).square().sum().backward()
    assert torch.equal(model(x), before(x))
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(model.parameters(), before.parameters(), strict=True)
    )


# Weights from a seed.


@pytest.mark.parametrize("name", ["cnn", "resnet8", "mobilenet"])
def test_weights_depend_on_the_seed_alone_and_the_callers_generator_is_unchanged(name):
    def weights(seed):
        return digest(build_model(name, image_shape=CIFAR, num_classes=10, seed=seed))

    first = weights(1)
    torch.rand(3)
    before = torch.get_rng_state()
    with threads(2):
        assert weights(1) == first
    assert weights(2) != first
    assert torch.equal(torch.get_rng_state(), before)


def test_another_process_makes_the_same_weights_and_does_not_import_torchvision():
    code = """
import hashlib, sys, torch
from rayfed.models.registry import build_model
torch.rand(5)
model = build_model("cnn", image_shape=(3, 32, 32), num_classes=10, seed=0)
assert "torchvision" not in sys.modules
print(hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest())
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert out.strip() == digest(build_model("cnn", image_shape=CIFAR, num_classes=10, seed=0))


def test_building_a_model_leaves_batchnorms_statistics_at_their_start():
    model = build_model("resnet8", image_shape=CIFAR, num_classes=10, seed=0)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(norm.running_mean.any() or norm.num_batches_tracked for norm in norms)


# A projection head.


@pytest.mark.parametrize("name", ["cnn", "lenet", "resnet8", "mobilenet"])
def test_a_projection_head_is_two_layers_between_the_same_features_and_a_new_head(name):
    plain, model = (
        build_model(name, options, image_shape=CIFAR, num_classes=10, seed=0).eval()
        for options in ({}, {"project": 7})
    )
    x, base = images(CIFAR), plain.features(images(CIFAR))
    first, relu, second = model.features[-3:]
    assert (first.weight.shape, second.weight.shape) == (
        (WIDTHS[name], WIDTHS[name]),
        (7, WIDTHS[name]),
    )
    by_hand = (base @ first.weight.T + first.bias).clamp(min=0) @ second.weight.T + second.bias
    torch.testing.assert_close(model.features(x), by_hand)
    assert isinstance(relu, nn.ReLU) and model(x).shape == (2, 10)
    assert [type(layer) for layer in model.head.modules()] == [
        type(layer) for layer in plain.head.modules()
    ]


def test_no_projection_head_is_the_same_model():
    assert digest(
        build_model("cnn", {"project": 0}, image_shape=CIFAR, num_classes=10, seed=0)
    ) == digest(built("cnn"))


# Models of the user.


def linear(*, image_shape, num_classes, bias=True):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(image_shape), num_classes, bias=bias))


def with_features(*, image_shape, num_classes, width):
    inner = linear(image_shape=image_shape, num_classes=width)
    return Classifier(features=inner, head=nn.Linear(width, num_classes))


def decorated(*arguments, **options):
    return linear(*arguments, **options)


def annotated(*, image_shape: ("Shape"), num_classes: int, bias: bool):  # noqa: F821, a name for type checkers only
    return linear(image_shape=image_shape, num_classes=num_classes, bias=bias)


class AsClass(nn.Sequential):
    def __init__(self, image_shape, num_classes):
        super().__init__(linear(image_shape=image_shape, num_classes=num_classes))


class Doubled(Classifier):
    def forward(self, x):
        return 2 * super().forward(x)


bad = types.SimpleNamespace(
    raises=lambda image_shape, num_classes: {}["depth"],
    not_a_model=lambda image_shape, num_classes: "resnet",
    too_few_logits=lambda image_shape, num_classes: linear(
        image_shape=image_shape, num_classes=num_classes - 1
    ),
    only_grey=lambda image_shape, num_classes: linear(
        image_shape=(1, *image_shape[1:]), num_classes=num_classes
    ),
    features_that_are_maps=lambda image_shape, num_classes: Classifier(
        nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(3072, num_classes))
    ),
    forward_does_more=lambda image_shape, num_classes: Doubled(
        nn.Flatten(), nn.Linear(3072, num_classes)
    ),
)


def own(function, **options):
    return build_model(
        f"{__name__}:{function}", image_shape=CIFAR, num_classes=10, seed=3, options=options
    )


def test_a_users_function_gets_shape_classes_and_options():
    model = own("linear", bias=False)
    assert not has_features(model)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(10, 3072)]
    assert (
        digest(model)
        == digest(own("decorated", bias=False))
        == digest(own("annotated", bias=False))
    )
    assert has_features(own("with_features", width=5))
    assert not has_features(own("AsClass"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("with_features", "model '.*:with_features'.width is missing"),
        (
            "bad.raises",
            r"cannot be built from image_shape=\(3, 32, 32\), num_classes=10: KeyError: 'depth'",
        ),
        ("bad.not_a_model", "must return a torch.nn.Module, not str"),
        ("bad.too_few_logits", r"need the shape \(2, 10\), not \(2, 9\)"),
        ("bad.only_grey", "cannot take images of 3x32x32: RuntimeError"),
        ("bad.features_that_are_maps", r"the shape \(B, D\), .*; features here: \(2, 3, 32, 32\)"),
        ("bad.forward_does_more", "head of them must give the model's logits"),
    ],
)
def test_a_users_function_that_gives_no_such_model_is_refused(name, message):
    with pytest.raises(InputError, match=message) as caught:
        own(name)
    assert "\n" not in str(caught.value)


def test_a_module_that_python_cannot_read_is_refused_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text("\ndef net(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match=r"Python cannot read .*failing.py, line 2: invalid syntax$"
    ):
        build_model("failing:net", image_shape=CIFAR, num_classes=10, seed=0)


def test_a_model_with_features_needs_a_head_as_well():
    model = nn.Sequential()
    model.features = nn.Identity()
    assert not has_features(model)
    assert not has_features(types.SimpleNamespace(features=None, head=None))


@given(
    st.tuples(
        st.integers(1, 3), st.sampled_from([1, 3, 6, 16, 33]), st.integers(2, 9), st.integers(2, 9)
    ),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_max_pool_has_torchs_values_gradients_and_layout(shape, layout, grad, seed):
    x = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        .round()
        .contiguous(memory_format=layout)
    )
    x[0, 0, 0, 0] = math.nan
    ours, theirs = (x.clone().requires_grad_(grad) for _ in range(2))
    a, b = MaxPool()(ours), nn.MaxPool2d(2)(theirs)
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert a.is_contiguous(memory_format=layout) and b.is_contiguous(memory_format=layout)
    if grad:
        a.sum().backward(), b.sum().backward()
        assert torch.equal(ours.grad, theirs.grad)
