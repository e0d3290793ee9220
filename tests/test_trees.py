"""Trees: their leaves, how they are added, and how they are sent and saved."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rayfed.folder.tensorfile import tree_from_bytes as from_bytes
from rayfed.folder.tensorfile import tree_to_bytes as to_bytes
from rayfed.tensors import trees
from rayfed.tensors.sums import OrderedSum, checked
from rayfed.tensors.trees import Scaled, layout_of, leaves, tree_map
from rayfed.tensors.wire import pack, unpack

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
]  # fmt: skip


@st.composite
def tensors(draw):
    """Any bits of any type, also NaNs."""
    dtype, shape = (
        draw(st.sampled_from(DTYPES)),
        draw(st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    )
    count = math.prod(shape)
    if dtype == torch.bool:
        raw = bytes(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    else:
        raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    return (
        torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
        if count
        else torch.empty(shape, dtype=dtype)
    )


any_tree = st.recursive(
    tensors()
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.just("text"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", 3]), inner, max_size=3)
        | st.builds(Scaled, st.integers(1, 9) | st.floats(0.1, 9), inner)
    ),
    max_leaves=8,
)


def same(a, b):
    """Whether two trees are equal: types, order of keys, and every bit."""
    if isinstance(a, torch.Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8).tolist() for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and raw[0] == raw[1]
    if isinstance(a, Scaled):
        return type(b) is Scaled and a.weight == b.weight and same(a.values, b.values)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def lists(tree):
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, tree)


# Leaves.


def test_leaves_by_hand():
    tree = {"a": [1, (2, None)], "b": Scaled(3, {"c": 4}), "d": {"e": [], "f": ()}, 5: {}}
    found = {"a.0": 1, "a.1.0": 2, "a.1.1": None, "b.c": 4, "d.e": [], "d.f": (), "5": {}}
    assert [(trees.dotted(path), leaf) for path, leaf in leaves(tree)] == list(found.items())
    assert list(leaves(Scaled(2, ([7],)))) == [((("scaled", 2), ("tuple", 0), ("list", 0)), 7)]
    tenfold = {"a": [10, (20, None)], "b": Scaled(3, {"c": 40}), "d": {"e": [], "f": ()}, 5: {}}
    assert tree_map(lambda leaf: leaf and 10 * leaf, tree) == tenfold


@example(
    [
        torch.ones(shape).to(dtype)
        for dtype in DTYPES
        for shape in [(), (0,), (3,), (2, 0, 3), (2, 3)]
    ]
)
@given(any_tree)
def test_a_tree_is_the_same_after_leaves_packing_pickling_and_saving(tree):
    packed = pack(tree)
    assert same(trees.tree_of(leaves(tree)), tree)
    assert same(unpack(packed), tree)
    assert same(unpack(pickle.loads(pickle.dumps(packed, protocol=5))), tree)
    assert same(unpack(from_bytes(to_bytes(packed))), tree)
    assert packed.num_bytes == trees.num_bytes(tree)
    assert trees.first_difference(unpack(packed), tree) is None


# The ordered sum.


def ordered_sum(*summands):
    total = OrderedSum()
    for summand in summands:
        total.add(summand)
    return total.value


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


def test_summands_are_added_in_the_given_order():
    def total(*values):
        return ordered_sum(*[torch.tensor(v, dtype=torch.float64) for v in values]).item()

    assert total(1e16, 1.0, -1e16) == 0.0
    assert total(1e16, -1e16, 1.0) == 1.0


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_integers_stay_exact_integers(dtype):
    largest = torch.iinfo(dtype).max // (1 if dtype != torch.int64 else 4)
    total = ordered_sum(*[{"t": torch.tensor([largest, 1], dtype=dtype), "n": 2**60 + 1}] * 3)
    assert total["t"].tolist() == [3 * largest, 3]
    assert not total["t"].is_floating_point()
    assert total["n"] == 3 * (2**60 + 1)


@pytest.mark.parametrize(
    "weights", [(1, 3), (3, 1), (2, 5), (1, 0.5), (0.5, 1), (1.0, 1.0)], ids=str
)
def test_integer_tensors_may_have_any_weight(weights):
    """The later weights need not be of the type of the first."""
    total = ordered_sum(*[{"t": Scaled(weight, torch.tensor([10, 20]))} for weight in weights])
    assert total["t"].tolist() == [10 * sum(weights), 20 * sum(weights)]


def test_weights_of_nested_trees_multiply():
    tree = Scaled(2, {"a": torch.tensor(1.5), "n": 4, "in": Scaled(3, [torch.tensor(1.0), None])})
    assert lists(ordered_sum(tree)) == {"a": 3.0, "n": 8, "in": [6.0, None]}
    assert lists(ordered_sum(tree, tree)) == {"a": 6.0, "n": 16, "in": [12.0, None]}


def test_sums_of_booleans_tuples_and_empty_trees():
    assert lists(ordered_sum(torch.tensor([True, False]), torch.tensor([True, True]))) == [2, 1]
    assert lists(ordered_sum((1, torch.tensor(2)), (3, torch.tensor(4)))) == (4, 6)
    assert ordered_sum({}, {}) == {}
    assert ordered_sum({"p": ()}, {"p": ()}) == {"p": ()}
    assert ordered_sum() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64], ids=str)
def test_a_sum_does_not_change_its_summands(dtype):
    first, second = torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype)
    total = ordered_sum({"x": first, "y": Scaled(2, first)}, {"x": second, "y": Scaled(3, second)})
    assert lists(total) == {"x": [2, 2], "y": [5, 5]}
    assert first.tolist() == second.tolist() == [1, 1]


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(any_tree.filter(lambda tree: not _holds_what_cannot_be_added(tree)))
def test_a_sum_on_the_wire_has_the_bytes_of_its_tensors_and_no_others(tree):
    total = OrderedSum()
    total.add(tree)
    sent, packed = total.packed(), pack(total.value)
    assert sent.skeleton == packed.skeleton
    assert {dtype: each.tobytes() for dtype, each in sent.buffers.items()} == {
        dtype: each.tobytes() for dtype, each in packed.buffers.items()
    }


def _holds_what_cannot_be_added(tree):
    try:
        checked(tree)
    except ValueError:
        return True
    return False


def test_finite_values_whose_sum_is_infinite_can_be_added():
    """The check looks at sums first, as that is a tenth of the work."""
    large = torch.full((2,), 3e38)
    assert large.sum().isinf()
    assert ordered_sum({"w": large})["w"].tolist() == large.double().tolist()
    with pytest.raises(ValueError, match="holds a NaN or an infinity at w"):
        ordered_sum({"w": torch.tensor([3e38, math.inf])})


def test_a_sum_takes_tensors_of_several_devices():
    """As FedCSD's on a GPU; torch pretends to have one."""
    with FakeTensorMode():
        try:
            torch.zeros(1, device="cuda")[0:1]
        except RuntimeError:
            pytest.skip("this torch asks the GPU's driver, also for a GPU that it pretends to have")
        tree = {"sums": torch.zeros(3), "counts": torch.zeros(3, dtype=torch.int64, device="cuda")}
        total = OrderedSum()
        for _ in range(3):
            total.add(tree, layout_of(tree))


GOOD = {"n": 3, "x": torch.ones(2), "i": torch.tensor(1), "none": None, "flag": True}


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize(
    ("tree", "place"),
    [
        (lambda bad: {"a": GOOD, "b": [GOOD, {"c": torch.tensor([1.0, bad])}]}, "b.1.c"),
        (lambda bad: {"a": Scaled(1, {"c": torch.tensor([1.0, bad])})}, "a.c"),
        (lambda bad: {"a": Scaled(bad, GOOD)}, "a.n"),
        (lambda bad: {"a": Scaled(bad, {})}, "a"),
        (lambda bad: {"a": bad, "b": bad}, "a"),
        (lambda bad: torch.tensor(bad), "the value"),
    ],
)
def test_the_first_invalid_value_of_a_summand_is_named_by_its_place(tree, place, bad):
    ordered_sum([GOOD, Scaled(2, GOOD), (GOOD,)])
    with pytest.raises(ValueError, match=f"^holds a NaN or an infinity at {place}$"):
        ordered_sum(tree(bad))


def test_a_leaf_that_is_not_a_number_is_refused():
    with pytest.raises(
        ValueError, match=r"^holds a str, which is neither a tensor nor a number, at p\.1$"
    ):
        ordered_sum({"p": [1, "text"]})


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (
            {"p": torch.zeros(2)},
            {"p": torch.zeros(2).double()},
            r"p is float64 \(2,\), not float32 \(2,\)",
        ),
        ({"p": {"w": 1, "v": 1}}, {"p": {"w": 1}}, r"p\.v is missing"),
        ({"p": {"w": 1}}, {"p": {"w": 1, "v": 1}}, r"p\.v should not be there"),
        ({"p": [1, 2]}, {"p": [1]}, r"p\.1 is missing"),
        ({"p": 5}, {"p": torch.zeros(1)}, r"p is float32 \(1,\), not a number"),
        ({"p": None}, {"p": 5}, "p is a number, not None"),
        ({"p": {}}, {"p": []}, "p is a list, not a dict"),
        (None, {"p": 5}, "the value is missing"),
        # Different places with the same text.
        ([1], (1,), "0 "),
        (
            {"a": {"b": torch.zeros(2)}, "a.b": 1},
            {"a": {"b": torch.zeros(3)}, "a.b": 1},
            "a.b is float32",
        ),
    ],
)
def test_a_summand_unlike_the_first_is_refused_by_the_place_that_differs(first, second, difference):
    with pytest.raises(ValueError, match=f"^{difference}"):
        ordered_sum(first, second)


# Packing.


def test_packing_makes_one_buffer_per_type():
    packed = pack({"a": torch.ones(2, 3), "b": [torch.zeros(4), torch.ones(5, dtype=torch.int64)]})
    assert {name: (buffer.dtype, buffer.shape) for name, buffer in packed.buffers.items()} == {
        "float32": (np.dtype(np.uint8), (40,)),
        "int64": (np.dtype(np.uint8), (40,)),
    }
    assert packed.num_bytes == 80
    assert pack({"n": 1, "none": None}).num_bytes == 0


def test_views_and_parameters_are_packed_as_plain_values():
    base = torch.arange(12.0).view(3, 4)
    tree = [
        base.t(),
        base[:, 1],
        base[::2],
        torch.ones(2, requires_grad=True),
        torch.tensor(1.0).expand(3),
    ]
    back = unpack(pack(tree))
    assert same(back, [t.detach() for t in tree])
    assert not back[3].requires_grad


def test_packed_tensors_are_copies():
    # One of each type: none are joined.
    source = {
        "one": torch.ones(2),
        "other": torch.ones(3, dtype=torch.int64),
    }
    packed = pack(source)
    for tensor in source.values():
        tensor.zero_()
    assert [t.sum().item() for t in unpack(packed).values()] == [2, 3]


def test_unpacking_gives_fresh_memory_each_time():
    packed = pack([torch.ones(2), Scaled(2, {"x": torch.ones(3)})])
    for buffer in packed.buffers.values():
        # As Ray hands them out.
        buffer.flags.writeable = False
    first, second = unpack(packed), unpack(packed)
    first[0].zero_()
    first[1].values["x"].zero_()
    assert same(second, unpack(packed))
    assert second[0].tolist() == [1, 1]
    assert second[1].values["x"].tolist() == [1, 1, 1]


# Saving.


@pytest.mark.parametrize(
    ("key", "skeleton"),
    [
        *(("leaves", skeleton) for skeleton in ("[", "3", '[[[], ["bag"]]]', '[[[], ["tensor"]]]')),
        ("another", ""),
    ],
)
def test_content_that_is_not_a_packed_tree_is_refused(key, skeleton):
    for content in (
        b"text",
        safetensors.numpy.save({"float32": np.zeros(4, np.uint8)}, {key: skeleton}),
    ):
        with pytest.raises(ValueError, match=r"^this is not a packed tree: "):
            from_bytes(content)
