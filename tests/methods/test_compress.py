"""Compressed averages: laws, a case by hand, and the bytes that count."""

import math
from types import SimpleNamespace

import pytest
import torch

from rayfed import methods as m
from rayfed.methods.compress import largest, num_kept, quantized
from rayfed.tensors.trees import num_bytes


def report(part, before, after, memory=None, num_examples=1, buffers=None):
    """What a client reports after it has moved the parameters `before` to `after`."""
    buffers = buffers or {}
    client = SimpleNamespace(weights=before, memory=memory, num_examples=num_examples)
    fit = SimpleNamespace(parameters=after, weights={**after, **buffers})
    return part.report(client, None, fit)


def sent_by(summands):
    return {**summands["parameters"].values, **summands["buffers"].values}


def weights(*values, b=0.0):
    return {"w": torch.tensor(values), "b": torch.tensor([b])}


# Top-k.


def test_top_k_by_hand():
    """Half of four entries; what is kept back comes the next time, with the sign it has."""
    part = m.SparseAverage(share=0.5)
    before, after = weights(1.0, 1.0, 1.0, b=1.0), weights(4.0, 0.0, 3.0, b=1.5)
    summands, error = report(part, before, after)
    assert {name: tensor.tolist() for name, tensor in sent_by(summands).items()} == {
        "w": [4.0, 1.0, 3.0],
        "b": [1.0],
    }
    assert {name: tensor.tolist() for name, tensor in error.items()} == {
        "w": [0.0, -1.0, 0.0],
        "b": [0.5],
    }
    summands, error = report(part, before, weights(1.0, 0.0, 1.5, b=1.75), memory=error)
    # The updates are 0, -1 - 1, 0.5 and 0.75 + 0.5.
    assert sent_by(summands)["w"].tolist() == [1.0, -1.0, 1.0]
    assert sent_by(summands)["b"].tolist() == [2.25]
    assert error["w"].tolist() == [0.0, 0.0, 0.5] and error["b"].tolist() == [0.0]


@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_what_is_sent_and_what_is_kept_back_are_the_update(share):
    torch.manual_seed(0)
    # Multiples of 1/64 are added without rounding.
    draw = lambda: {  # noqa: E731
        name: torch.randint(-640, 640, shape) / 64 for name, shape in (("w", (7, 9)), ("b", (5,)))
    }
    before, after, memory = draw(), draw(), draw()
    summands, error = report(m.SparseAverage(share), before, after, memory)
    sent, number = sent_by(summands), 0
    for name in before:
        update = after[name] + memory[name] - before[name]
        assert torch.equal(sent[name] - before[name] + error[name], update)
        assert not (error[name] * (sent[name] - before[name])).any(), "each entry is in one of them"
        number += int((sent[name] != before[name]).sum())
    assert number == math.ceil(share * 68)


def test_without_feedback_and_if_all_is_sent_a_client_keeps_nothing():
    before, after = weights(0.0, 1.0), weights(2.0, 1.5)
    assert report(m.SparseAverage(0.1, feedback=False), before, after)[1] is None
    summands, memory = report(m.SparseAverage(share=1.0), before, after)
    assert memory is None and torch.equal(sent_by(summands)["w"], after["w"])


def test_of_equal_entries_the_first_are_sent():
    equal = {"w": torch.ones(2, 2), "b": -torch.ones(3)}
    masks = largest(equal, 5)
    assert masks["w"].all() and masks["b"].tolist() == [True, False, False]
    assert num_kept(equal, 0.07) == 1 and num_kept(equal, 1.0) == 7
    assert num_kept({"w": torch.zeros(100)}, 0.07) == 7


def test_an_average_of_sparse_updates_by_hand():
    """Two clients of three and one examples, each of which sends its largest entry."""
    part, before = m.SparseAverage(share=0.3), weights(0.0, 0.0)
    one, _ = report(part, before, weights(4.0, 1.0), num_examples=3)
    other, _ = report(part, before, weights(1.0, -8.0), num_examples=1)
    total = {
        "weight": 4,
        "parameters": {name: 3 * sent_by(one)[name] + sent_by(other)[name] for name in before},
        "buffers": {},
    }
    step = m.Step(SimpleNamespace(weights=before, round=1), None, frozenset(before))
    _, step = part.update(None, total, step)
    assert step.averaged["w"].tolist() == [3.0, -2.0] and step.averaged["b"].tolist() == [0.0]


# QSGD.


def test_values_on_a_level_stay_and_all_others_go_to_a_level_next_to_them():
    on_grid = torch.tensor([[3.0, 0.0], [-4.0, 0.0]])
    assert torch.equal(quantized(on_grid, levels=5), on_grid)
    torch.manual_seed(0)
    values = torch.randn(1000)
    steps = quantized(values, levels=8) * 8 / values.norm()
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    assert ((steps - values * 8 / values.norm()).abs() < 1 + 1e-4).all()
    assert torch.equal(quantized(torch.zeros(3), levels=8), torch.zeros(3))


@pytest.mark.parametrize("levels", [1, 4])
def test_the_mean_over_the_draws_is_the_value(levels):
    values, draws = torch.tensor([0.1, -0.7, 0.02, 0.5, 0.0, 3.0]), 2_000
    found = torch.zeros(6, dtype=torch.float64)
    for seed in range(draws):
        torch.manual_seed(seed)
        found += quantized(values, levels)
    # A draw has a deviation of half a level at most.
    level = float(values.norm()) / levels
    torch.testing.assert_close(
        found / draws, values.double(), rtol=0, atol=5 * level / 2 / draws**0.5
    )
    torch.manual_seed(0)
    assert not torch.equal(quantized(values, levels), values)


def test_with_many_levels_it_is_nearly_fedavg(make_setup, play):
    """The draws do not change the training of later rounds by much; buffers are exact."""
    fine, plain = (
        play(make_setup(method, norm=True))[-1].weights
        for method in (m.fedpaq(levels=2**23), m.fedavg())
    )
    torch.testing.assert_close(fine, plain, rtol=1e-4, atol=1e-5)


# Bytes.


@pytest.mark.parametrize(
    ("method", "sent"),
    [
        # 116 entries of float32; the buffers of BatchNorm come on top.
        (m.topk(share=1.0), 4 * 116),
        # Twelve values, and a bit for each entry: shorter than twelve places.
        (m.topk(share=0.1), 12 * 4 + 15),
        (m.topk(share=0.01), 2 * 4 + 2 * 4),
        # Eight bits, and four for 15 numbers; the tensors have 36, 4, 4, 4, 64 and 4 entries.
        (m.fedpaq(levels=127), 116 + 6 * 4),
        (m.fedpaq(levels=7), 58 + 6 * 4),
        (m.fedpaq(levels=1), 29 + 6 * 4),
    ],
    ids=str,
)
def test_the_bytes_of_the_messages_count(make_setup, play, method, sent):
    setup = make_setup(method, norm=True, num_rounds=2)
    sizes = [p.numel() for p in setup.model.parameters()]
    assert sizes == [36, 4, 4, 4, 64, 4] and sum(sizes) == 116
    buffers = num_bytes(dict(setup.model.named_buffers()))
    for round in play(setup)[1:]:
        assert round.bytes_up == len(round.clients) * (sent + buffers)
        assert round.bytes_down == len(round.clients) * num_bytes(round.weights)
