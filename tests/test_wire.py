"""What is packed comes back bit for bit, in memory of its own."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfed.weights import Scaled
from rayfed.wire import pack, unpack

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
]  # fmt: skip
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    """Any bits, of any type, NaN's among them."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        raw = bytes(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    else:
        raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


leaves = tensors() | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.just("text")
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["a", "b", 3]), inner, max_size=3)
        | st.builds(Scaled, st.integers(1, 9), inner)
    ),
    max_leaves=8,
)


def same(a, b):
    """Equal trees: types, order of keys, and every bit."""
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


@given(trees)
def test_what_is_packed_comes_back(tree):
    packed = pack(tree)
    assert same(unpack(packed), tree)
    assert same(unpack(pickle.loads(pickle.dumps(packed, protocol=5))), tree)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_every_shape(dtype):
    tree = [torch.ones(shape).to(dtype) for shape in [(), (0,), (3,), (2, 0, 3), (2, 3)]]
    assert same(unpack(pack(tree)), tree)


def test_one_buffer_for_each_type():
    packed = pack({"a": torch.ones(2, 3), "b": [torch.zeros(4), torch.ones(5, dtype=torch.int64)]})
    assert {name: (buffer.dtype, buffer.shape) for name, buffer in packed.buffers.items()} == {
        "float32": (np.dtype(np.uint8), (40,)),
        "int64": (np.dtype(np.uint8), (40,)),
    }
    assert packed.num_bytes == 80
    assert pack({"n": 1, "none": None}).num_bytes == 0


def test_views_and_gradients_are_packed_as_the_values_they_show():
    base = torch.arange(12.0).view(3, 4)
    tree = [base.t(), base[:, 1], base[::2], torch.ones(2, requires_grad=True), torch.tensor(1.0).expand(3)]
    back = unpack(pack(tree))
    assert same(back, [t.detach() for t in tree])
    assert not back[3].requires_grad


def test_packing_copies():
    source = {"one": torch.ones(2), "other": torch.ones(3, dtype=torch.int64)}  # one of each: nothing to gather
    packed = pack(source)
    for tensor in source.values():
        tensor.zero_()
    assert [t.sum().item() for t in unpack(packed).values()] == [2, 3]


def test_unpacking_gives_fresh_memory_each_time():
    packed = pack([torch.ones(2), Scaled(2, {"x": torch.ones(3)})])
    for buffer in packed.buffers.values():
        buffer.flags.writeable = False  # as Ray hands them out
    first, second = unpack(packed), unpack(packed)
    first[0].zero_()
    first[1].values["x"].zero_()
    assert same(second, unpack(packed))
    assert second[0].tolist() == [1, 1]
    assert second[1].values["x"].tolist() == [1, 1, 1]
