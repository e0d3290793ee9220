"""Weights from a file, frozen parameters and LoRA: what trains, what is sent, what stays, and what
is refused.
"""

import builtins
import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from extras import needs
from safetensors.torch import load_file, save_file
from torch import nn

import rayfed
from rayfed import methods as m
from rayfed.base.errors import InputError
from rayfed.job import read_job
from rayfed.models.adapt import adapt
from rayfed.models.classifier import Classifier
from rayfed.models.registry import build_model
from rayfed.models.settings import Adapt, Lora
from rayfed.rounds import evaluation
from rayfed.rounds.setup import open_setup
from rayfed.tensors.trees import num_bytes
from rayfed.tensors.weights import frozen, in_training, load, state, state_of, with_weights

SHAPE = (1, 28, 28)
VIT = {
    "name": "timm/vit_tiny_patch16_224",
    "patch_size": 7,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
}
TRAIN = {"num_rounds": 2, "clients_per_round": 3, "local_steps": 2, "batch_size": 10, "lr": 0.1}


def job(model=VIT, method="fedavg", **output):
    tables = {
        "name": "tiny",
        "method": method,
        "model": model,
        "train": TRAIN,
        "ray": {"mode": "off"},
    }
    return {**tables, "data": {"partition": {"name": "iid", "num_clients": 6}}, "output": output}


def vit(**adapt):
    return {**VIT, **adapt}


def built(name="lenet", **options):
    return build_model(name, options, image_shape=SHAPE, num_classes=10, seed=0)


def adapted(*given, **keys):
    model = built(*given)
    adapt(model, Adapt(**keys), seed=1)
    return model


@pytest.fixture
def adapt_setup(make_setup):
    """A setup of the small model, with BatchNorm, after `adapt`."""

    def make(method, settings):
        setup = make_setup(method, norm=True)
        adapt(setup.model, settings, seed=0)
        return setup

    return make


# What is frozen.


def test_what_is_frozen_are_parameters_without_gradient_and_the_buffers_of_modules_that_do_not_train():
    norm = [
        f"1.{name}"
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]
    model = nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2, affine=False))
    )
    assert frozen(model) == frozenset() and [*state(model)] == [*model.state_dict()]
    model[1].requires_grad_(False)
    assert frozen(model) == {*norm}
    model[1].bias.requires_grad_(True)
    assert frozen(model) == {"1.weight"}, "its statistics still change what the bias learns"
    model.requires_grad_(False)
    assert frozen(model) == {*model.state_dict()}


def test_a_frozen_batchnorm_keeps_its_statistics_and_a_dropout_beside_it_still_drops():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    in_training(model.eval())
    assert [module.training for module in model] == [False, True, True, True]
    model(torch.randn(8, 3))
    changed = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert changed == {"3.running_mean", "3.running_var", "3.num_batches_tracked"}


def test_weights_are_loaded_without_what_is_frozen_and_wrong_names_are_refused(make_model):
    model = make_model(norm=True)
    model.features.requires_grad_(False)
    weights = {name: tensor + 1 for name, tensor in state_of(model).items()}
    assert weights.keys() == {"head.weight", "head.bias"}
    copied = with_weights(model, weights)
    for name, tensor in copied.state_dict().items():
        assert torch.equal(tensor, weights.get(name, model.state_dict()[name]))
    for wrong in ({"head.weight": weights["head.weight"]}, {**weights, "other": torch.zeros(1)}):
        with pytest.raises(RuntimeError, match=r"not of this model: '(head.bias|other)'"):
            load(model, wrong)


@pytest.mark.parametrize(
    "method", [m.fedavg, m.fedprox, m.scaffold, m.feddyn, m.fedcurv, m.moon, m.fedbn, m.fedalign]
)
def test_a_method_trains_and_sends_what_is_not_frozen(method, adapt_setup, play):
    settings = Adapt(freeze=["features.0.*"])
    setup, full = (adapt_setup(method(), each) for each in (settings, Adapt()))
    before = copy.deepcopy(setup.model.state_dict())
    (first, *_, last), (whole, *_, whole_last) = play(setup), play(full)
    assert (
        {*whole.weights} - {*last.weights}
        == {"features.0.weight", "features.0.bias"}
        == frozen(setup.model)
    )
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in setup.model.state_dict().items()
    )
    assert not torch.equal(last.weights["head.weight"], first.weights["head.weight"])
    saved = num_bytes([before[name] for name in frozen(setup.model)])
    assert last.bytes_up <= whole_last.bytes_up - 4 * saved
    assert last.bytes_down <= whole_last.bytes_down - 4 * saved


def test_a_step_with_frozen_features_is_one_of_softmax_regression_on_them(make_setup, play):
    """The law, by hand: frozen layers are a constant function before the rest, BatchNorm too."""
    one = {"counts": [[4, 1, 0, 0]], "clients_per_round": 1, "num_rounds": 1, "local_epochs": 1}
    setup = make_setup(m.fedavg(), **one, weight_decay=0.0)
    features = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 8))
    features[1].running_mean.fill_(0.5)
    setup = replace(setup, model=Classifier(features, nn.Linear(8, 4)))
    adapt(setup.model, Adapt(freeze=["features.*"]), seed=0)
    first, last = play(setup)
    assert first.weights.keys() == last.weights.keys() == {"head.weight", "head.bias"}
    data, lr = setup.federation, setup.job.train.lr
    images, labels = next(data.batches(data.train, data.client(0), setup.device))
    h = (images.flatten(1) - 0.5) / math.sqrt(1 + 1e-5) @ features[2].weight.T + features[2].bias
    weight, bias = first.weights["head.weight"], first.weights["head.bias"]
    wrong = (torch.softmax(h @ weight.T + bias, dim=1) - nn.functional.one_hot(labels, 4)) / 5
    torch.testing.assert_close(last.weights["head.weight"], (weight - lr * wrong.T @ h).detach())
    torch.testing.assert_close(last.weights["head.bias"], (bias - lr * wrong.sum(dim=0)).detach())


# LoRA.


@needs("peft")
@pytest.mark.parametrize("name", ["lenet", "resnet8", "mobilenet"])
def test_lora_begins_as_the_base_model_and_only_its_matrices_and_the_head_train(name):
    base, model = built(name), adapted(name, lora=Lora(rank=2))
    x = torch.rand(2, *SHAPE)
    assert torch.equal(base.eval()(x), model.eval()(x))
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trains if not name.startswith("head.")} == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }
    assert {name for name in trains if name.startswith("head.")} == {
        f"head.{name}" for name, _ in model.head.named_parameters()
    }
    kept = [p for name, p in model.named_parameters() if ".lora_" not in name]
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), kept, strict=True))


@needs("peft")
def test_lora_is_what_its_paper_says():
    """On one linear layer: x W' + (alpha / rank) x A' B'."""
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), nn.Linear(5, 3))
    base = copy.deepcopy(model)
    adapt(model, Adapt(lora=Lora(rank=2, alpha=6.0)), seed=0)
    weights = {name: torch.randn_like(tensor) for name, tensor in state(model).items()}
    load(model, weights)
    a, b = (weights[f"features.1.lora_{letter}.default.weight"] for letter in "AB")
    assert (a.shape, b.shape) == ((2, 12), (5, 2))
    x = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(model.features(x), base.features(x) + 3.0 * x.flatten(1) @ a.T @ b.T)


@needs("peft")
def test_loras_matrices_depend_on_the_seed_alone():
    torch.rand(3)
    first, second = adapted("lenet", lora=Lora(rank=2)), adapted("lenet", lora=Lora(rank=2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(state(first).values(), state(second).values(), strict=True)
    )


def test_the_keys_of_every_model_are_read_back_as_they_were_written():
    keys = {"freeze": ["head.*"], "weights": "/w.safetensors"}
    model = read_job({"name": "n", "model": {"name": "cnn", "project": 3, **keys}})
    assert model.model.options == {"project": 3}
    assert model.places()["model.weights"] == "/w.safetensors"
    for written in (model, read_job(job(vit(lora={"rank": 4})))):
        assert read_job(written.table()) == written
        assert (
            written.hash() != read_job({"name": "n", "model": {"name": "cnn", "project": 3}}).hash()
        )


@needs("peft")
def test_loras_targets_are_exactly_the_layers_that_the_patterns_fit():
    model = adapted("resnet8", lora=Lora(rank=2, targets=["features.[0-3].*"]))
    changed = {name.partition(".lora_")[0] for name in state(model) if ".lora_" in name}
    layers = [
        name for name, module in built("resnet8").named_modules() if isinstance(module, nn.Conv2d)
    ]
    assert changed == {name for name in layers if re.match(r"features\.[0-3]\.", name)}
    assert changed and changed < {*layers}


@needs("peft")
@pytest.mark.parametrize(
    "inner", [nn.Flatten(), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)]
)
def test_lora_on_a_model_without_layers_for_it_is_refused(inner):
    """Torch's own transformer takes its layers' weights past their forward: LoRA would change
    nothing there.
    """
    with pytest.raises(
        InputError,
        match=r"model.lora: the model has no linear layer and no convolution without groups",
    ):
        adapt(Classifier(inner, nn.Linear(4, 2)), Adapt(lora=Lora(rank=2)), seed=0)


@pytest.mark.parametrize(
    ("missing", "model", "install"),
    [("peft", {"name": "lenet", "lora": {"rank": 2}}, "lora"), ("timm", VIT, "timm")],
)
def test_a_package_that_is_not_installed_comes_with_the_command_that_installs_it(
    monkeypatch, missing, model, install
):
    real = builtins.__import__

    def without(name, *given, **more):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named '{missing}'")
        return real(name, *given, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        InputError, match=rf"needs {missing}, .*: pip install 'rayfed-distill\[{install}\]'"
    ):
        open_setup(read_job(job(model)))


# Weights from a file.


@pytest.fixture
def file(tmp_path):
    """Saves a model's state, with some entries replaced or (None) left out."""

    def save(model, **other):
        entries = {
            **model.state_dict(),
            **{name.replace("__", "."): tensor for name, tensor in other.items()},
        }
        save_file(
            {name: t.contiguous() for name, t in entries.items() if t is not None},
            tmp_path / "w.safetensors",
        )
        return str(tmp_path / "w.safetensors")

    return save


def test_weights_come_back_from_a_file(file):
    saved = build_model("resnet8", image_shape=SHAPE, num_classes=10, seed=5)
    model = adapted("resnet8", weights=file(saved))
    assert all(
        torch.equal(a, b)
        for a, b in zip(saved.state_dict().values(), model.state_dict().values(), strict=True)
    )


@needs("timm")
def test_timms_own_files_fit_and_a_head_of_other_classes_is_left_as_the_seed_draws_it(file, caplog):
    import timm

    net = timm.create_model("resnet10t", num_classes=7, in_chans=1)
    base, model = built("timm/resnet10t"), adapted("timm/resnet10t", weights=file(net))
    assert (
        "the head is not taken from the file" in caplog.text
        and "'head.bias' is (7,)" in caplog.text
    )
    assert torch.equal(model.head.weight, base.head.weight)
    net.fc = nn.Identity()
    x = torch.rand(2, *SHAPE)
    assert torch.equal(model.eval().features(x), net.eval()(x))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"features__0__weight": torch.zeros(3, 3)},
            r"'features.0.weight' is \(3, 3\) in the file, and \(6, 1, 5, 5\)",
        ),
        (
            {"features__0__weight": None},
            "'features.0.weight' is not in the file; did you mean 'features.\\d.weight'",
        ),
        (
            {"features__9__other": torch.zeros(1)},
            "'features.9.other' is not in the model; did you mean 'features.9",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_what_does_not(file, other, message):
    path = file(built(), **other)
    with pytest.raises(InputError, match=f"model.weights = '.*' does not fit the model: {message}"):
        adapted("lenet", weights=path)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    (tmp_path / "w.pt").write_bytes(b"PK\x03\x04 of another kind")
    with pytest.raises(InputError, match=r"w.pt' was written by torch.save"):
        adapted("lenet", weights=str(tmp_path / "w.pt"))


def test_a_run_is_not_continued_with_another_file(file, tmp_path):
    tables = job(
        {"name": "lenet", "weights": file(built()), "freeze": ["features.*"]}, path=str(tmp_path)
    )
    path = rayfed.run(tables).path
    assert {*load_file(path / "checkpoints/round-00002.safetensors")} == {
        "head.weight",
        "head.bias",
    }
    rayfed.resume(path, {"train.num_rounds": 3})
    file(build_model("lenet", image_shape=SHAPE, num_classes=10, seed=9))
    with pytest.raises(
        InputError, match=r"the file of the model's weights, or what is frozen .* has changed since"
    ):
        rayfed.resume(path, {"train.num_rounds": 4})


# Models of timm.


@needs("timm")
def test_a_model_of_timm_takes_the_datas_images_and_its_own_options_and_gives_features():
    model = built(VIT["name"], **{key: value for key, value in VIT.items() if key != "name"})
    x = torch.rand(3, *SHAPE)
    assert model.features(x).shape == (3, 32) and model.head.in_features == 32
    assert len(model.features.blocks) == 2 and model.features.patch_embed.num_patches == 16


# A ViT with LoRA, federated.


@needs("peft", "timm")
def test_bytes_fall_with_the_share_that_trains(play):
    full, lora = (open_setup(read_job(job(vit(**keys)))) for keys in ({}, {"lora": {"rank": 2}}))
    before = copy.deepcopy(lora.model.state_dict())
    everything, some = play(full)[-1], play(lora)[-1]
    share = num_bytes(state_of(lora.model)) / num_bytes(state_of(full.model))
    assert 0.02 < share < 0.2
    assert some.bytes_up / everything.bytes_up == pytest.approx(share, rel=1e-3)
    assert some.bytes_down / everything.bytes_down == pytest.approx(share, rel=1e-3)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in lora.model.state_dict().items()
    )
    assert all(math.isfinite(row.train_loss) for row in some.clients)


@needs("peft", "timm")
def test_the_job_of_a_pretrained_vit_trains_loras_matrices_on_top_of_timms_file(
    file, tmp_path, write_images
):
    import timm

    options = {key: value for key, value in VIT.items() if key != "name"}
    pretrained = timm.create_model("vit_tiny_patch16_224", img_size=28, num_classes=1000, **options)
    write_images(tmp_path, 40, 10, pixels=3 * 28**2, classes=10)
    data = {
        "data.source": str(tmp_path / "data"),
        "data.shape": [3, 28, 28],
        "data.size": 28,
        "data.partition": "iid",
    }
    few = {
        "train.num_rounds": 1,
        "train.clients_per_round": 2,
        "train.local_steps": 1,
        "data.partition.num_clients": 4,
    }
    model = {f"model.{key}": value for key, value in options.items()} | {
        "model.weights": file(pretrained)
    }
    here = {"ray.mode": "off", "output.path": str(tmp_path / "runs")}
    weights = rayfed.run("jobs/cifar10/vit-lora.toml", {**data, **few, **model, **here}).weights
    kept = {
        f"features.{name}": tensor
        for name, tensor in pretrained.state_dict().items()
        if "head" not in name
    }
    shared = {name: tensor for name, tensor in weights.items() if name in kept}
    assert len(shared) > 20 and all(
        torch.equal(kept[name], tensor) for name, tensor in shared.items()
    )
    trained = [tensor for name, tensor in weights.items() if ".lora_B." in name]
    assert len(trained) == 2 and all(tensor.any() for tensor in trained)


@needs("peft", "timm")
def test_results_and_checkpoints_give_the_whole_model_again(tmp_path):
    done = rayfed.run(job(vit(lora={"rank": 2}), path=str(tmp_path)))
    again = rayfed.resume(done.path).weights
    assert all(
        torch.equal(a, b) for a, b in zip(done.weights.values(), again.values(), strict=True)
    )
    setup = open_setup(read_job(done.path / "job.toml"))
    setup.model.load_state_dict(again)
    saved = load_file(done.path / "checkpoints/round-00002.safetensors")
    assert saved.keys() == state(setup.model).keys() < again.keys()
    assert evaluation.evaluate(setup, setup.model, 0, 50).confusion.sum() == 50


@needs("peft", "timm")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["moon", "scaffold"])
def test_a_vit_with_lora_has_the_same_bits_on_two_actors_as_in_this_process(
    run_apart, tmp_path, method
):
    tables = job(
        vit(lora={"rank": 2}, drop_rate=0.1, drop_path_rate=0.1), method, path=str(tmp_path)
    )
    here = rayfed.run({**tables, "name": "here"})
    actors = run_apart({**tables, "name": "actors", "ray": {"actors": 2}})
    assert here.weights.keys() == actors.weights.keys()
    assert all(torch.equal(here.weights[name], actors.weights[name]) for name in here.weights)
    for column in ("test_accuracy", "test_loss", "bytes_up", "bytes_down"):
        assert here.rounds[column].to_pylist() == actors.rounds[column].to_pylist()
