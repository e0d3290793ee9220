"""FedWSQ's quantiser: laws of its levels, cases by hand, the server's deviations, the bytes."""

import math
from itertools import pairwise
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rayfed
from rayfed import methods as m
from rayfed.methods.normal_levels import normal_levels, rounded
from rayfed.tensors.trees import num_bytes

# Mean squared errors of Max's table (IRE Trans. Inf. Theory 1960), by bits. His levels are rounded.
ERRORS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
# A grid on which the normal density is summed: its tails beyond hold 1e-15.
GRID = np.linspace(-8, 8, 400_001)
DENSITY = np.exp(-(GRID**2) / 2) / math.sqrt(2 * math.pi) * (GRID[1] - GRID[0])


def nearest(levels):
    levels = np.array(levels)
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, GRID)]


def error(levels):
    return float((DENSITY * (GRID - nearest(levels)) ** 2).sum())


# The levels.


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("zero", [True, False])
def test_each_level_is_the_mean_of_the_numbers_next_to_it(bits, zero):
    """Lloyd's condition, with the bounds half-way between levels; a level at 0 is given."""
    levels, normal = normal_levels(bits, zero), NormalDist()
    assert len(levels) == 2**bits and all(a < b for a, b in pairwise(levels))
    bounds = [-np.inf, *((a + b) / 2 for a, b in pairwise(levels)), np.inf]
    for level, (lower, upper) in zip(levels, pairwise(bounds), strict=True):
        if level == 0.0:
            continue
        at_lower, at_upper = (0.0 if np.isinf(x) else normal.pdf(x) for x in (lower, upper))
        # Below 0 all is mirrored, where differences of small tails are exact.
        a, b = (-upper, -lower) if level > 0 else (lower, upper)
        mass = (1.0 if b == np.inf else normal.cdf(b)) - (0.0 if a == -np.inf else normal.cdf(a))
        assert level == pytest.approx((at_lower - at_upper) / mass, rel=1e-9)


@pytest.mark.parametrize("bits", ERRORS)
def test_the_error_is_that_of_maxs_table(bits):
    assert error(normal_levels(bits, zero=False)) == pytest.approx(ERRORS[bits], rel=3e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_level_at_zero_costs_little_and_no_other_such_levels_are_better(bits):
    best, levels = normal_levels(bits, zero=False), normal_levels(bits)
    assert levels[2 ** (bits - 1) - 1] == 0.0
    assert error(best) < error(levels) < 1.2 * error(best)
    for place, level in enumerate(levels):
        for change in (-1e-2, 1e-2):
            if level:
                moved = [*levels[:place], level + change, *levels[place + 1 :]]
                assert error(moved) > error(levels)


def test_the_levels_without_zero_are_mirrored_and_one_bit_has_no_zero():
    levels = normal_levels(4, zero=False)
    assert levels == tuple(-level for level in reversed(levels))
    assert normal_levels(1) == normal_levels(1, zero=False)
    assert normal_levels(1)[1] == pytest.approx(math.sqrt(2 / math.pi), rel=1e-12)


def test_the_levels_for_few_bits_are_those_of_the_authors_code():
    assert normal_levels(1) == pytest.approx([-0.7979, 0.7979], abs=1e-4)
    assert normal_levels(2) == pytest.approx([-1.224, 0.0, 0.7646, 1.7242], abs=2e-4)


def test_entries_go_to_the_nearest_level():
    torch.manual_seed(0)
    values, levels = torch.randn(1000) * 3, normal_levels(3)
    found = rounded(values, 2.0, levels)
    distances = (values[:, None] - 2 * torch.tensor(levels)).abs()
    torch.testing.assert_close((values - found).abs(), distances.min(dim=1).values)


def test_a_tensor_whose_deviation_is_zero_is_sent_as_zeros():
    """The quotients are infinite, or not a number."""
    for values in (torch.tensor([-2.0, 0.0, 5.0]), torch.zeros(3)):
        assert torch.equal(rounded(values, torch.tensor(0.0), normal_levels(3)), torch.zeros(3))


# The part.


def client_of(before, num_examples=1):
    return SimpleNamespace(weights=before, num_examples=num_examples)


def fit_of(after, **buffers):
    return SimpleNamespace(parameters=after, weights={**after, **buffers})


def model_of(*values, others=0.0):
    """Three weights, of which the one between is given, and a bias."""
    end = torch.full((2, 2), others)
    return {
        "a": end.clone(),
        "w": torch.tensor([values]),
        "b": torch.tensor([others]),
        "z": end.clone(),
    }


def test_a_round_by_hand():
    """One bit, and a server that knows the deviation 2."""
    part = m.fedwsq(bits=1, momentum=0.25)[0]
    before, after = model_of(0.0, 1.0, 5.0), model_of(3.0, 0.0, 5.5, others=0.125)
    known = part.tell({"w": torch.tensor(2.0).double()}, None, None)[1]
    summands, memory = part.report(client_of(before, 3), known, fit_of(after, mean=torch.ones(1)))
    level = 2 * math.sqrt(2 / math.pi)
    sent = summands["parameters"].values
    torch.testing.assert_close(sent["w"], torch.tensor([[level, 1 - level, 5 + level]]))
    assert all(torch.equal(sent[name], after[name]) for name in "abz"), "these are exact"
    assert torch.equal(summands["buffers"].values["mean"], torch.ones(1)) and memory is None
    # The update is 3, -1, 0.5, with the mean 2.5 / 3.
    mean = 2.5 / 3
    deviation = math.sqrt(((3 - mean) ** 2 + (1 + mean) ** 2 + (0.5 - mean) ** 2) / 2)
    ((name, found),) = summands["deviations"].values.items()
    assert name == "w" and float(found) == pytest.approx(deviation)
    assert summands["deviations"].weight == summands["weight"] == 3


def test_the_servers_deviation_is_a_running_mean_of_the_clients_by_hand():
    part = m.fedwsq(momentum=0.25, start=0.5)[0]
    weights = model_of(1.0, 2.0)
    step = m.Step(SimpleNamespace(weights=weights, round=1), None, frozenset(weights))
    total = {
        "weight": 4,
        "parameters": {name: 4 * tensor.double() for name, tensor in weights.items()},
        "buffers": {},
        # Clients of 3 and 1 samples with the deviations 1 and 3.
        "deviations": {"w": torch.tensor(3 * 1.0 + 3.0).double()},
    }
    state, step = part.update(part.init(weights), total, step)
    assert step.averaged["w"].tolist() == [[1.0, 2.0]]
    assert float(state["w"]) == 0.75 * 0.5 + 0.25 * 1.5
    state, _ = part.update(state, total, step)
    assert float(state["w"]) == 0.75 * 0.75 + 0.25 * 1.5
    assert float(part.tell(state, None, None)[1]["w"]) == float(state["w"])


def test_at_first_the_deviation_is_the_start_and_later_the_servers():
    part, before, after = m.fedwsq(start=0.5)[0], model_of(0.0, 0.0), model_of(9.0, -9.0)
    largest = max(normal_levels(4))
    for known, scale in (({}, 0.5), ({"w": torch.tensor(2.0)}, 2.0)):
        summands, _ = part.report(client_of(before), known, fit_of(after))
        assert summands["parameters"].values["w"].max().item() == pytest.approx(largest * scale)


def test_a_client_that_uses_its_own_deviation_tells_it_to_nobody(make_setup, play):
    part, before = m.fedwsq(scale="client", bits=1)[0], model_of(0.0, 0.0)
    summands, _ = part.report(client_of(before), {}, fit_of(model_of(1.0, -1.0)))
    level = math.sqrt(2) * math.sqrt(2 / math.pi)
    torch.testing.assert_close(summands["parameters"].values["w"], torch.tensor([[level, -level]]))
    assert "deviations" not in summands
    for round in play(make_setup(m.fedwsq(scale="client", ends=True), norm=True)):
        assert all(not hold.state for hold in round.held.values())


def test_without_a_weight_between_the_first_and_the_last_it_is_fedavg(make_setup, play, bits):
    """The small model has a convolution and a head."""
    found, plain = (
        bits(play(make_setup(method, norm=True))[-1])["weights"]
        for method in (m.fedwsq(), m.fedavg())
    )
    assert found == plain


def test_with_many_bits_it_is_nearly_fedavg(make_setup, play):
    fine, plain = (
        play(make_setup(method, norm=True, num_rounds=1))[-1].weights
        for method in (m.fedwsq(bits=8, scale="client", ends=True), m.fedavg())
    )
    before = make_setup(m.fedavg(), norm=True).model.state_dict()
    for name, tensor in plain.items():
        update = (tensor - before[name]).double()
        # The levels of eight bits have an error of some 0.7 % of the deviation.
        left = float((fine[name] - tensor).double().norm())
        assert left <= 0.03 * float(update.norm()) + 1e-6, name
    assert any(not torch.equal(fine[name], plain[name]) for name in plain)


@pytest.mark.parametrize("scale", ["server", "client"])
@pytest.mark.parametrize(
    ("bits", "sent"),
    [
        # The convolution has 36 entries, the head 64; biases and BatchNorm have 16 floats.
        (4, 18 + 32 + 2 * 4 + 4 * 16),
        (3, 14 + 24 + 2 * 4 + 4 * 16),
        (1, 5 + 8 + 2 * 4 + 4 * 16),
    ],
)
def test_the_bytes_of_the_messages_count(make_setup, play, bits, sent, scale):
    setup = make_setup(m.fedwsq(bits=bits, ends=True, scale=scale), norm=True)
    buffers = num_bytes(dict(setup.model.named_buffers()))
    for number, round in enumerate(play(setup)[1:]):
        assert round.bytes_up == len(round.clients) * (sent + buffers)
        # From the second round on, the server has two deviations to tell.
        told = 8 if number and scale == "server" else 0
        assert round.bytes_down == len(round.clients) * (num_bytes(round.weights) + told)


def test_frozen_and_single_entries_are_not_rounded():
    part = m.fedwsq(ends=True)[0]
    shapes = {"norm": (4,), "one": (1, 1), "conv": (2, 1, 3, 3), "head": (2, 2)}
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    assert part.rounded_names(parameters) == ["conv", "head"]
    assert m.fedwsq()[0].rounded_names(parameters) == ["conv"]


def test_a_job_with_fedwsq_learns_and_sends_less(tmp_path):
    tables = {
        "name": "wsq",
        "method": {"name": "fedwsq", "scale": "client"},
        "model": {"name": "lenet", "batch_norm": True, "weight_standardisation": 0.01},
        "data": {"partition": {"name": "iid", "num_clients": 4}},
        "train": {"num_rounds": 3, "clients_per_round": 4, "batch_size": 20, "lr": 0.1},
        "ray": {"mode": "off"},
        "output": {"path": str(tmp_path)},
    }
    result = rayfed.run(tables)
    accuracy = result.rounds["test_accuracy"].to_pylist()
    assert accuracy[-1] > accuracy[0] + 0.2
    written = rayfed.read_job(result.path / "job.toml")
    assert written.model.adapt.weight_standardisation == 0.01
    plain = rayfed.run({**tables, "name": "plain", "method": "fedavg"})
    up, plain_up = (run.rounds["bytes_up"].to_pylist()[-1] for run in (result, plain))
    assert up < 0.3 * plain_up
