"""Arithmetic of weights, tensor by tensor of the same name."""

import math

import torch
from torch import nn

from rayfed.tensors import weights as w
from rayfed.tensors.trees import tree_map

A = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
# One name more than A
B = {
    "w": torch.tensor([10.0, 20.0]),
    "b": torch.tensor(30.0),
    "buffer": torch.tensor(7),
}


def lists(tree):
    return tree_map(torch.Tensor.tolist, tree)


def test_arithmetic_by_hand():
    assert lists(w.add(A, B)) == {"w": [11, 22], "b": 33}
    assert lists(w.add(A, B, alpha=-2.0)) == {"w": [-19, -38], "b": -57}
    assert lists(w.subtract(A, B)) == {"w": [-9, -18], "b": -27}
    assert lists(w.scale(A, 0.5)) == {"w": [0.5, 1], "b": 1.5}
    assert lists(w.zeros_like(A)) == {"w": [0, 0], "b": 0}
    assert w.dot(A, B).item() == 10 + 40 + 90
    assert w.squared_distance(A, B).item() == 81 + 18**2 + 27**2


def test_arithmetic_changes_nothing_in_place():
    before = lists([A, B])
    results = [w.add(A, B), w.subtract(A, B), w.scale(A, 2.0), w.like(A, A), w.zeros_like(A)]
    for result in results:
        # `like` may return the same tensor if there is nothing to do.
        if result["w"].data_ptr() != A["w"].data_ptr():
            result["w"].fill_(math.nan)
    assert lists([A, B]) == before


def test_to_overwrite_is_to_load():
    model, other = (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(3, 2)) for _ in range(2)
    )
    # Frozen: no entry of the weights.
    model[2].requires_grad_(False)
    trained = w.state_of(other.train().requires_grad_(True)[:2])
    wanted = w.whole(model, {name: tensor + 1 for name, tensor in trained.items()})
    w.overwrite(
        model.to(memory_format=torch.channels_last), {name: wanted[name] for name in trained}
    )
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert not any(
        tensor.requires_grad != (not name.startswith("2"))
        for name, tensor in model.named_parameters()
    )


def test_dot_and_distance_are_differentiable_in_both():
    a, b = ({"w": t.clone().double().requires_grad_()} for t in (A["w"], B["w"]))
    assert torch.autograd.gradcheck(lambda x, y: w.dot({"w": x}, {"w": y}), (a["w"], b["w"]))
    assert torch.autograd.gradcheck(
        lambda x, y: w.squared_distance({"w": x}, {"w": y}), (a["w"], b["w"])
    )


def test_state_is_a_copy_with_buffers_and_parameters_are_live():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    state = w.state_of(model)
    assert (
        state.keys()
        == model.state_dict().keys() - {"0.bias"}
        > {"1.running_mean", "1.num_batches_tracked"}
    )
    assert not any(tensor.requires_grad for tensor in state.values())
    parameters = w.parameters_of(model)
    # The frozen bias is not one.
    assert parameters.keys() == {"0.weight", "1.weight", "1.bias"}
    with torch.no_grad():
        parameters["0.weight"].add_(1.0)
    assert torch.equal(model[0].weight, state["0.weight"] + 1)


def test_a_model_with_other_weights_is_a_copy_in_the_same_layout():
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)).to(
        memory_format=torch.channels_last
    )
    model[2].weight = nn.Parameter(torch.ones(3, 3, 1, 1), requires_grad=False)
    # Shared, and must stay so.
    model[2].bias = model[0].bias
    model.register_buffer("own", torch.ones(1), persistent=False)
    before, weights = (
        w.state_of(model),
        {name: tensor + 1 for name, tensor in w.state_of(model).items()},
    )
    made = w.with_weights(model, weights)
    # As it is frozen.
    still = "2.weight"
    assert before.keys() == model.state_dict().keys() - {still, "2.bias"}
    weights = w.under_all_names(model, weights)
    before = w.under_all_names(model, before)
    assert (
        torch.equal(made[2].weight, torch.ones(3, 3, 1, 1))
        and made[2].weight is not model[2].weight
    )
    assert all(
        torch.equal(tensor, weights[name])
        for name, tensor in made.state_dict().items()
        if name != still
    )
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in model.state_dict().items()
        if name != still
    )
    assert made[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert w.parameters_of(made).keys() == w.parameters_of(model).keys()
    assert made[2].bias is made[0].bias is not model[0].bias
    assert torch.equal(made.own, model.own) and made.own is not model.own


class Tied(nn.Module):
    """A layer's weight under two names, a buffer under two, and a layer of two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.again = self.last
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("mask_too", self.mask)


def test_a_tensor_of_two_names_is_one_entry_and_files_have_both():
    model = Tied()
    second = {"b.weight", "again.weight", "again.bias", "mask_too"}
    weights = {name: tensor + 1 for name, tensor in w.state_of(model).items()}
    assert weights.keys() == model.state_dict().keys() - second
    assert w.other_names(model) == {
        "b.weight": "a.weight",
        "again.weight": "last.weight",
        "again.bias": "last.bias",
        "mask_too": "mask",
    }
    made = w.with_weights(model, weights)
    assert made.b.weight is made.a.weight and made.again is made.last
    assert all(
        torch.equal(tensor, model.state_dict()[name] + 1)
        for name, tensor in made.state_dict().items()
    )
    files = w.under_all_names(model, weights)
    assert files.keys() == w.whole(model, weights).keys() == model.state_dict().keys()
    assert len({tensor.data_ptr() for tensor in files.values()}) == len(files)
    torch.testing.assert_close(w.state_of(w.overwrite(model, weights)), weights, rtol=0, atol=0)


def test_a_constant_is_no_entry_stays_as_it_is_and_keeps_no_module_from_training():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("mask", torch.tensor([0.0, -math.inf, math.nan]))
    w.keep_constant(model, ["mask"])
    copy = w.with_weights(model, {name: x + 1 for name, x in w.state_of(model).items()})
    assert w.state_of(copy).keys() == {"0.weight", "0.bias"}
    assert w.whole(copy, w.state_of(copy)).keys() == {"0.weight", "0.bias", "mask"}
    assert w.changed_constants(copy, model) == [] and w.in_training(copy).training
    copy.mask[0] = 1
    assert w.changed_constants(copy, model) == ["mask"]


def test_like_rounds_values_for_integers():
    example = {"x": torch.tensor([0, 0, 0, 0]), "y": torch.zeros(1, dtype=torch.float16)}
    cast = w.like({"x": torch.tensor([1.6, 2.4, -1.6, 2.5]), "y": torch.tensor([0.1])}, example)
    assert cast["x"].tolist() == [2, 2, -2, 2]
    assert (cast["x"].dtype, cast["y"].dtype) == (torch.int64, torch.float16)
