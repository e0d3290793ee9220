"""Weights as values, and the ordered sum on which the equality of bits rests."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rayfed import weights as w
from rayfed.weights import OrderedSum, Scaled

A = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
B = {
    "w": torch.tensor([10.0, 20.0]),
    "b": torch.tensor(30.0),
    "buffer": torch.tensor(7),
}  # names that A lacks do not matter


def ordered_sum(*summands):
    total = OrderedSum()
    for summand in summands:
        total.add(summand)
    return total.value


def lists(tree):
    return w.tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, tree)


# Values.


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
        if result["w"].data_ptr() != A["w"].data_ptr():  # `like` may give the same tensor where there is nothing to do
            result["w"].fill_(math.nan)
    assert lists([A, B]) == before


def test_dot_and_distance_are_differentiable_in_both():
    a, b = ({"w": t.clone().double().requires_grad_()} for t in (A["w"], B["w"]))
    assert torch.autograd.gradcheck(lambda x, y: w.dot({"w": x}, {"w": y}), (a["w"], b["w"]))
    assert torch.autograd.gradcheck(lambda x, y: w.squared_distance({"w": x}, {"w": y}), (a["w"], b["w"]))


def test_state_is_a_copy_with_buffers_and_parameters_are_live():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    state = w.state_of(model)
    assert state.keys() == model.state_dict().keys() > {"1.running_mean", "1.num_batches_tracked"}
    assert not any(tensor.requires_grad for tensor in state.values())
    parameters = w.parameters_of(model)
    assert parameters.keys() == {"0.weight", "1.weight", "1.bias"}  # those that are trained
    with torch.no_grad():
        parameters["0.weight"].add_(1.0)
    assert torch.equal(model[0].weight, state["0.weight"] + 1)


def test_like_rounds_what_goes_into_integers():
    example = {"x": torch.tensor([0, 0, 0, 0]), "y": torch.zeros(1, dtype=torch.float16)}
    cast = w.like({"x": torch.tensor([1.6, 2.4, -1.6, 2.5]), "y": torch.tensor([0.1])}, example)
    assert cast["x"].tolist() == [2, 2, -2, 2]
    assert (cast["x"].dtype, cast["y"].dtype) == (torch.int64, torch.float16)


def test_tree_map_keeps_the_shape_of_a_tree():
    tree = {"a": [1, (2, None)], "b": Scaled(3, {"c": 4})}
    assert w.tree_map(lambda leaf: leaf and leaf * 10, tree) == {"a": [10, (20, None)], "b": Scaled(3, {"c": 40})}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_invalid_value_is_named_by_its_path(bad):
    tensor = torch.tensor([1.0, bad])
    good = {"n": 3, "x": torch.ones(2), "i": torch.tensor(1), "none": None, "flag": True}
    assert w.first_invalid([good, Scaled(2, good), (good,)]) is None
    assert w.first_invalid({"a": good, "b": [good, {"c": tensor}]}) == "b.1.c"
    assert w.first_invalid({"a": Scaled(1, {"c": tensor})}) == "a.c"
    assert w.first_invalid({"a": Scaled(bad, good)}) == "a"
    assert w.first_invalid({"a": bad, "b": bad}) == "a"
    assert w.first_invalid(tensor) == "the value"


# The ordered sum.


float32 = st.floats(-1e6, 1e6, width=32)
summands = st.lists(st.tuples(st.integers(1, 10**6), float32), min_size=1, max_size=8)


@given(summands)
def test_each_product_is_exact_and_each_addition_is_of_float64(pairs):
    total = ordered_sum(*[{"w": Scaled(n, torch.tensor([x]))} for n, x in pairs])["w"]
    expected = 0.0
    for n, x in pairs:
        assert Fraction(n) * Fraction(x) == Fraction(n * x)
        expected = expected + n * x
    assert total.dtype == torch.float64
    assert total.tolist() == [expected]


@given(summands)
def test_a_mean_of_equal_weights_is_those_weights_bit_for_bit(pairs):
    x = torch.tensor(pairs[0][1])
    total = ordered_sum(*[{"n": n, "w": Scaled(n, x)} for n, _ in pairs])
    assert torch.equal((total["w"] / total["n"]).float(), x)


def test_the_order_is_the_one_given():
    def total(*values):
        return ordered_sum(*[torch.tensor(v, dtype=torch.float64) for v in values]).item()

    assert total(1e16, 1.0, -1e16) == 0.0
    assert total(1e16, -1e16, 1.0) == 1.0


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_stay_exact_integers(dtype):
    largest = torch.iinfo(dtype).max // (1 if dtype != torch.int64 else 4)
    total = ordered_sum(*[{"t": torch.tensor([largest, 1], dtype=dtype), "n": 2**60 + 1}] * 3)
    assert total["t"].tolist() == [3 * largest, 3]
    assert not total["t"].is_floating_point()
    assert total["n"] == 3 * (2**60 + 1)


def test_booleans_are_counted():
    assert lists(ordered_sum({"x": torch.tensor([True, False])}, {"x": torch.tensor([True, True])})) == {"x": [2, 1]}


@pytest.mark.parametrize("weights", [(1, 3), (3, 1), (2, 5), (1, 0.5), (0.5, 1), (1.0, 1.0)], ids=str)
def test_integer_tensors_may_have_any_weight(weights):
    """The first weight decides nothing about those that follow."""
    total = ordered_sum(*[{"t": Scaled(weight, torch.tensor([10, 20]))} for weight in weights])
    assert total["t"].tolist() == [10 * sum(weights), 20 * sum(weights)]


def test_weights_of_nested_trees_multiply():
    tree = Scaled(2, {"a": torch.tensor(1.5), "n": 4, "in": Scaled(3, [torch.tensor(1.0), None])})
    assert lists(ordered_sum(tree)) == {"a": 3.0, "n": 8, "in": [6.0, None]}
    assert lists(ordered_sum(tree, tree)) == {"a": 6.0, "n": 16, "in": [12.0, None]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64], ids=str)
def test_summands_are_left_as_they_are(dtype):
    first, second = torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype)
    total = ordered_sum({"x": first, "y": Scaled(2, first)}, {"x": second, "y": Scaled(3, second)})
    assert lists(total) == {"x": [2, 2], "y": [5, 5]}
    assert first.tolist() == second.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"p": {"w": torch.zeros(2)}},
            {"p": {"w": torch.zeros(3)}},
            r"summand\.p\.w: \(3,\) where others have shape \(2,\)",
        ),
        ({"p": {"w": 1, "v": 1}}, {"p": {"w": 1}}, r"summand\.p: has \['w'\] where others have \['w', 'v'\]"),
        ({"p": [1, 2]}, {"p": [1]}, r"summand\.p: has \[0\] where others have \[0, 1\]"),
        ({"p": {"w": 1}}, {"p": 5}, r"summand\.p: has 5 where others have \['w'\]"),
        ({"p": torch.zeros(1)}, {"p": 5}, r"summand\.p: 5 where others have shape \(1,\)"),
        ({"p": 5}, {"p": torch.zeros(1)}, r"summand\.p: tensor\(\[0\.\]\) where others have 5"),
        ({"p": None}, {"p": 5}, r"summand\.p: 5 where others have None"),
        ({"p": 5}, {"p": None}, r"summand\.p: None where others have 5"),
        ({}, {"p": 5}, r"summand: has \['p'\] where others have \[\]"),
        (None, {"p": 5}, r"summand: \{'p': 5\} where others have None"),
    ],
)
def test_a_summand_of_another_shape_is_refused_by_its_place(first, second, message):
    with pytest.raises(ValueError, match=message):
        ordered_sum(first, second)


def test_trees_with_tuples_and_empty_trees():
    assert lists(ordered_sum((1, torch.tensor(2)), (3, torch.tensor(4)))) == [4, 6]
    assert ordered_sum({}, {}) == {}
