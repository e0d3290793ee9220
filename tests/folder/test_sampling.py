"""Runs whose rules of `clients.sampling` look back: the same bits wherever they are played, after a
stop and in a replay.
"""

import itertools
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import rayfed
from rayfed.base.errors import InputError
from rayfed.clients.sampling import Rule
from rayfed.folder.tables import read_table
from rayfed.methods import fedavg, fedcsd
from rayfed.rounds.engine import rounds
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.trees import num_bytes

CLOCK = {"seconds_per_example": 0.1, "spread": 1.0}


@dataclass(frozen=True)
class InTurn(Rule):
    """Each client in its turn, those with small losses first: it asks, chooses and learns."""

    def start(self, num_clients):
        return {"times": np.zeros(num_clients, np.int64)}

    def ask(self, choice):
        return choice.there

    def choose(self, choice):
        order = np.lexsort((choice.losses, choice.state["times"][choice.there]))
        return choice.there[order[: choice.number]]

    def learn(self, state, seen):
        times = state["times"].copy()
        times[seen.clients] += 1
        return {"times": times}


HERE = f"{__name__}:"
RULES = {
    "uniform": {},
    "size": {},
    "pow": {"name": "power_of_choice", "candidates": 3},
    "cpow": {"name": "power_of_choice", "candidates": 3, "estimate": "batch"},
    "rpow": {"name": "power_of_choice", "candidates": 3, "estimate": "last"},
    "oort": {**CLOCK, "exploration": 0.5, "least": 0.1, "window": 1, "quantile": 0.5},
    "own": {"name": HERE + "InTurn"},
}
every_rule = pytest.mark.parametrize("rule", RULES)


def job_of(tables, rule):
    options = {"name": rule, **RULES[rule]}
    clients = {key: options.pop(key) for key in CLOCK if key in options}
    train = {**tables["train"], "local_steps": 3, "batch_size": 4}
    data = {
        **tables["data"],
        "partition": {"name": "quantity", "alpha": 0.5, "num_clients": 6, "seed": 1, "min_size": 2},
    }
    return {
        **tables,
        "data": data,
        "train": train,
        "clients": {**clients, "sampling": options},
        "measure_images": 0,
    }


def outcome(result):
    """The rows without durations, and the bytes of the weights."""
    tables = result.rounds, result.clients
    rows = [row for table in tables for row in table.to_pylist()]
    left_out = ("seconds", "node")
    numbers = [{key: row[key] for key in row if key not in left_out} for row in rows]
    return numbers, {name: tensor.numpy().tobytes() for name, tensor in result.weights.items()}


@pytest.fixture
def whole(tables, rule):
    """The outcome of a run without a stop."""
    return rayfed.run({**job_of(tables, rule), "name": "whole"})


@every_rule
def test_a_run_that_was_stopped_chooses_the_same_clients_and_so_does_a_replay(tables, whole, rule):
    for stop in (1, 3):
        job = {**job_of(tables, rule), "name": f"stopped-{stop}"}
        path = rayfed.run(job, {"train.num_rounds": stop}).path
        assert outcome(rayfed.resume(path, {"train.num_rounds": 5})) == outcome(whole)
    for row in read_table(whole.path, "clients").to_pylist():
        if row["round"] in (1, 4):
            again, recorded = rayfed.replay(whole.path, row["round"], row["client"])
            assert again.train_loss == recorded == row["train_loss"]
    trained = {row["client"] for row in whole.clients.to_pylist() if row["round"] == 4}
    absent = min(set(range(6)) - trained)
    others = ", ".join(map(str, sorted(trained)))
    with pytest.raises(
        InputError, match=f"client {absent}: not in round 4, which has {re.escape(others)}$"
    ):
        rayfed.replay(whole.path, 4, absent)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["own"])
def test_two_actors_choose_the_same_clients(run_apart, tables, whole, rule):
    ray = {"mode": "on", "actors": 2, "num_cpus": 1, "num_gpus": 0}
    actors = run_apart({**job_of(tables, rule), "name": "actors", "ray": ray})
    assert outcome(actors) == outcome(whole)


@every_rule
def test_the_choice_is_no_others(tables, whole, rule):
    """A rule that looks at losses has other clients than the uniform one in some round."""
    uniform = rayfed.run({**job_of(tables, "uniform"), "name": "other"})
    clients = [[row["client"] for row in run.clients.to_pylist()] for run in (whole, uniform)]
    assert (clients[0] == clients[1]) == (rule == "uniform")


# What it costs, and what it asks.


@pytest.fixture
def ruled(make_setup):
    """Make a setup with a rule."""

    def ruled(rule, method=None, **clients):
        setup = make_setup(method or fedavg(), num_rounds=4, clients_per_round=2)
        tables = {"name": "n", "clients": {"sampling": rule, **clients}}
        return replace(setup, job=replace(setup.job, clients=rayfed.read_job(tables).clients))

    return ruled


@pytest.mark.parametrize("method", [fedavg(), fedcsd()])
def test_candidates_get_the_model_and_send_a_loss_and_those_bytes_count(ruled, play, method):
    """Of five candidates, two are chosen; they have got the weights already."""
    rule = {"name": "power_of_choice", "candidates": 5}
    _, *run = play(ruled(rule, method))
    _, *plain = play(ruled("uniform", method))
    weights = num_bytes(run[0].weights)
    for round, other in zip(run, plain, strict=True):
        assert round.bytes_down - other.bytes_down == 3 * weights
        assert round.bytes_up - other.bytes_up == 5 * 8
        assert round.notes["clients.asked"] == 5.0


def test_a_rule_that_learns_gets_two_numbers_of_each_client(ruled, play):
    rule = {"name": "power_of_choice", "candidates": 5, "estimate": "last"}
    _, *run = play(ruled(rule))
    _, *plain = play(ruled("uniform"))
    for round, other in zip(run, plain, strict=True):
        assert round.bytes_up - other.bytes_up == 2 * 2 * 8
        assert round.bytes_down == other.bytes_down and "clients.asked" not in round.notes


def test_the_largest_losses_of_the_global_model_are_chosen(ruled):
    """By the cross-entropy of the global model on each client's examples, computed here."""
    setup = ruled({"name": "power_of_choice", "candidates": 6})
    for last in rounds(setup, ThisProcess(setup)):
        if last.round == 3:
            break
    (following,) = [round for round in rounds(setup, ThisProcess(setup), last) if round.round == 4]
    model = setup.model.eval()
    model.load_state_dict(last.weights)
    losses = []
    data = setup.federation
    for client in range(6):
        images, labels = next(data.batches(data.train, data.client(client), setup.device))
        with torch.no_grad():
            losses.append(float(torch.nn.functional.cross_entropy(model(images), labels)))
    chosen = [row.client for row in following.clients]
    assert chosen == sorted(np.argsort(losses)[-2:].tolist())
    assert len({*np.round(losses, 4)}) == 6


# What is refused before a run starts.


# Counts the choices of `Moody`, as a generator may draw the same clients twice.
ASKED = itertools.count()


@dataclass(frozen=True)
class Moody(Rule):
    """Chooses other clients whenever it is asked; or fails."""

    fails: bool = False

    def choose(self, choice):
        if self.fails:
            raise KeyError("mood")
        return np.roll(choice.there, next(ASKED))[: choice.number]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"name": HERE + "Moody"}, "choose gives other clients when it is asked again; draw from"),
        ({"name": HERE + "Moody", "fails": True}, "fails when it is tried: KeyError: 'mood'"),
    ],
)
def test_a_rule_of_ones_own_is_tried_before_the_run(tables, rule, message):
    job = {**job_of(tables, "uniform"), "clients": {"sampling": rule}}
    with pytest.raises(InputError, match=message):
        rayfed.run(job)
