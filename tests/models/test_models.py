"""Models: their sizes and shapes, the equality with torchvision's, seeded weights, and messages about bad input."""

import functools
import hashlib
import subprocess
import sys
import types

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rayfed.models import MODELS, Classifier, build_model, has_features
from rayfed.values import InputError

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def built(name, image_shape=CIFAR):
    return build_model(name, image_shape=image_shape, num_classes=10, seed=0)


def images(image_shape, count=2):
    return torch.rand(count, *image_shape, generator=torch.Generator().manual_seed(0))


def digest(model):
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


@pytest.mark.parametrize(
    ("name", "image_shape", "parameters"),
    [
        ("cnn", CIFAR, 2_156_490),
        ("cnn", MNIST, 1_663_370),
        ("lenet", CIFAR, 62_006),
        ("resnet8", CIFAR, 78_042),
        ("resnet10", CIFAR, 4_903_242),
        ("resnet50", CIFAR, 23_520_842),
        ("mobilenet", CIFAR, 2_236_682),
        ("alexnet", CIFAR, 57_023_306),
    ],
)
def test_parameter_counts(name, image_shape, parameters):
    assert sum(parameter.numel() for parameter in built(name, image_shape).parameters()) == parameters


WIDTHS = {"cnn": 512, "lenet": 84, "resnet8": 64, "resnet10": 512, "resnet50": 2048, "mobilenet": 1280, "alexnet": 4096}


@pytest.mark.parametrize("image_shape", [CIFAR, MNIST])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_flat_features_and_logits_of_them(name, image_shape):
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
            "an image's logits depend on the rest of the batch"
        )
    model.train()


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_reaches_every_parameter(name):
    model = built(name, MNIST)
    model(images(MNIST)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_says_what_it_is(name):
    assert MODELS[name].__doc__.splitlines()[0].endswith(".")


@pytest.mark.parametrize(
    ("name", "image_shape", "last_map"),
    [
        ("resnet8", CIFAR, (64, 8, 8)),
        ("resnet10", CIFAR, (512, 4, 4)),
        ("resnet10", MNIST, (512, 4, 4)),
        ("resnet50", CIFAR, (2048, 4, 4)),
        ("mobilenet", CIFAR, (1280, 2, 2)),
    ],
)
def test_the_last_map_before_pooling(name, image_shape, last_map):
    *maps, _pool, _flatten = built(name, image_shape).features
    with torch.no_grad():
        assert nn.Sequential(*maps)(images(image_shape)).shape[1:] == last_map


def same_function(ours, theirs, image_shape):
    """Whether two models of the same structure agree, once the second has the weights of the first, in order."""
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = images(image_shape)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        return torch.allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_resnet50_is_torchvisions_behind_the_small_stem():
    theirs = torchvision.models.resnet50(num_classes=10)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    assert same_function(build_model("resnet50", image_shape=CIFAR, num_classes=10, seed=0), theirs, CIFAR)


def test_resnet10_is_torchvisions_behind_the_small_stem():
    theirs = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    assert same_function(build_model("resnet10", image_shape=CIFAR, num_classes=10, seed=0), theirs, CIFAR)


@pytest.mark.parametrize(
    ("name", "theirs"), [("alexnet", torchvision.models.alexnet), ("mobilenet", torchvision.models.mobilenet_v2)]
)
def test_large_images_get_torchvisions_own_network(name, theirs):
    office = (3, 224, 224)
    ours = build_model(name, image_shape=office, num_classes=10, seed=0)
    assert same_function(ours, theirs(num_classes=10), office)


def test_dropout_is_where_torchvision_has_it():
    model = build_model("mobilenet", image_shape=CIFAR, num_classes=10, seed=0, dropout=0.5)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.5]
    assert isinstance(model.head[0], nn.Dropout)
    assert [module.p for module in built("alexnet").modules() if isinstance(module, nn.Dropout)] == [0.5, 0.5]


@settings(max_examples=20, deadline=None)
@given(
    least=st.sampled_from([("cnn", 4), ("lenet", 16), ("resnet8", 1)]),
    extra=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    channels=st.integers(1, 4),
    num_classes=st.integers(1, 12),
)
def test_small_models_take_every_size_from_their_least(least, extra, channels, num_classes):
    name, side = least
    shape = (channels, side + extra[0], side + extra[1])
    model = build_model(name, image_shape=shape, num_classes=num_classes, seed=0)
    assert model(images(shape, count=3)).shape == (3, num_classes)


# Weights from a seed.


@pytest.mark.parametrize("name", ["cnn", "resnet8", "mobilenet"])
def test_weights_are_a_function_of_the_seed(name):
    def weights(seed):
        return digest(build_model(name, image_shape=CIFAR, num_classes=10, seed=seed))

    first = weights(1)
    torch.rand(3)
    torch.set_num_threads(2)
    assert weights(1) == first
    assert weights(2) != first


def test_the_callers_generator_is_left_alone():
    before = torch.get_rng_state()
    build_model("cnn", image_shape=MNIST, num_classes=10, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_process_makes_the_same_weights_and_does_not_import_torchvision():
    code = """
import hashlib, sys, torch
from rayfed.models import build_model
torch.rand(5)
model = build_model("cnn", image_shape=(3, 32, 32), num_classes=10, seed=0)
assert "torchvision" not in sys.modules
print(hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert out.strip() == digest(build_model("cnn", image_shape=CIFAR, num_classes=10, seed=0))


def test_the_check_leaves_batchnorms_statistics_as_they_start():
    model = build_model("resnet8", image_shape=CIFAR, num_classes=10, seed=0)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(norm.running_mean.any() or norm.num_batches_tracked for norm in norms)


# Models of one's own.


def linear(*, image_shape, num_classes, bias=True):
    features = image_shape[0] * image_shape[1] * image_shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(features, num_classes, bias=bias))


def with_features(*, image_shape, num_classes, width):
    inner = linear(image_shape=image_shape, num_classes=width)
    return Classifier(features=inner, head=nn.Linear(width, num_classes))


def broken(*, image_shape, num_classes):
    raise KeyError("depth")


def not_a_model(*, image_shape, num_classes):
    return "resnet"


def too_few_logits(*, image_shape, num_classes):
    return linear(image_shape=image_shape, num_classes=num_classes - 1)


def tuple_of_logits(*, image_shape, num_classes):
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    return Pair()


def only_gray(*, image_shape, num_classes):
    return linear(image_shape=(1, *image_shape[1:]), num_classes=num_classes)


def maps_as_features(*, image_shape, num_classes):
    head = nn.Sequential(nn.Flatten(), linear(image_shape=image_shape, num_classes=num_classes))
    return Classifier(features=nn.Identity(), head=head)


def forward_does_more(*, image_shape, num_classes):
    class Scaled(Classifier):
        def forward(self, x):
            return 2 * super().forward(x)

    model = with_features(image_shape=image_shape, num_classes=num_classes, width=4)
    return Scaled(model.features, model.head)


def keywords(**arguments):
    return linear(**arguments)


class AsClass(nn.Sequential):
    def __init__(self, image_shape, num_classes):
        super().__init__(linear(image_shape=image_shape, num_classes=num_classes))


seven = 7


def own(function, **options):
    return build_model(f"{__name__}:{function}", image_shape=CIFAR, num_classes=10, seed=3, **options)


def test_an_imported_function_gets_shape_classes_options_and_seed():
    model = own("linear", bias=False)
    assert not has_features(model)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(10, 3072)]
    assert digest(model) == digest(own("keywords", bias=False))
    assert has_features(own("with_features", width=5))
    assert not has_features(own("AsClass"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cnnn", {}, r"unknown model 'cnnn'; did you mean 'cnn'\? \(valid: alexnet, cnn, lenet, .*package.module:func"),
        ("rayfed.models.cnn", {}, "or give a 'package.module:function'"),
        ("no.such.module:net", {}, "cannot import 'no.such.module': ModuleNotFoundError: No module named 'no'"),
        (":net", {}, "cannot import ''"),
        ("{here}:nothing", {}, "has no function 'nothing'"),
        ("{here}:seven", {}, "has no function 'seven'"),
        ("{here}:", {}, "has no function ''"),
        ("cnn", {"width": 2}, "model 'cnn': unknown option 'width'; it takes none"),
        ("alexnet", {"drop_out": 0.1}, r"unknown option 'drop_out'; did you mean 'dropout'\? \(valid: dropout\)"),
        ("alexnet", {"dropout": 7}, "cannot be built from .*dropout=7: ValueError: dropout probability"),
        ("{here}:with_features", {}, "cannot be built from .*missing 1 required keyword-only argument: 'width'"),
        ("{here}:broken", {}, r"cannot be built from image_shape=\(3, 32, 32\), num_classes=10: KeyError: 'depth'"),
        ("{here}:not_a_model", {}, r"must return a torch.nn.Module, not str"),
        ("{here}:too_few_logits", {}, r"must have the shape \(2, 10\), not \(2, 9\)"),
        ("{here}:tuple_of_logits", {}, r"must have the shape \(2, 10\), not tuple"),
        ("{here}:only_gray", {}, "cannot take images of 3x32x32: RuntimeError"),
        ("{here}:maps_as_features", {}, r"must have the shape \(B, D\).*features here: \(2, 3, 32, 32\)"),
        ("{here}:forward_does_more", {}, r"head of them must give the model's logits"),
    ],
)
def test_bad_names_options_and_functions_are_refused(name, options, message):
    with pytest.raises(InputError, match=message) as caught:
        build_model(name.format(here=__name__), image_shape=CIFAR, num_classes=10, seed=0, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "image_shape", "message"),
    [
        ("cnn", (3, 3, 32), "model 'cnn': its two pools need images of 4x4 pixels or more, not 3x32"),
        ("lenet", (1, 15, 28), "model 'lenet': .* 16x16 pixels or more, not 15x28"),
        ("alexnet", (1, 14, 14), "model 'alexnet': .* 15x15 pixels or more, not 14x14"),
        ("cnn", (0, 32, 32), r"at least one class, not \(0, 32, 32\) and 10"),
        ("cnn", (32, 32), r"an image shape \(channels, height, width\)"),
    ],
)
def test_sizes_that_a_model_cannot_take_are_refused(name, image_shape, message):
    with pytest.raises(InputError, match=message):
        build_model(name, image_shape=image_shape, num_classes=10, seed=0)


def test_the_smallest_alexnet():
    assert built("alexnet", (1, 15, 15))(images((1, 15, 15))).shape == (2, 10)


def test_a_module_that_fails_on_import_is_refused_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "failing_models.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="cannot import 'failing_models': RuntimeError: no licence"):
        build_model("failing_models:net", image_shape=CIFAR, num_classes=10, seed=0)


def test_features_without_a_head_are_no_features():
    model = nn.Sequential()
    model.features = nn.Identity()
    assert not has_features(model)
    assert not has_features(types.SimpleNamespace(features=None, head=None))


@pytest.mark.parametrize(("shape", "classes"), [((3, 2**16, 2**16), 10), ((1, 28, 28), 10**12)])
def test_a_model_beyond_the_machines_memory_is_refused_before_any_of_it_is_filled(shape, classes):
    with pytest.raises(InputError, match=r"model 'cnn': for images of .* GiB of weights, and this machine has \d+ GiB"):
        build_model("cnn", image_shape=shape, num_classes=classes, seed=0)
