"""Rounds in which not all chosen clients answer: what is trained, sent and kept."""

import logging
from dataclasses import dataclass, replace
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayfed import methods as m
from rayfed.clients.participation import Participation
from rayfed.clients.trace import read_trace
from rayfed.methods import Part
from rayfed.rounds.choosing import cohort_of
from rayfed.rounds.engine import play, start
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.trees import num_bytes
from rayfed.tensors.wire import unpack

# Some of six clients, and fewer answers.
SHY = {
    "available": 0.8,
    "dropout": 0.3,
    "oversample": 1.5,
}
CLOCK = {"seconds_per_example": 0.1, "bytes_per_second": 1e3, "spread": 0.5, "deadline": 5.0}


@pytest.fixture
def shy(make_setup):
    """Make a setup whose clients take part by some settings; a trace is given as (round, client,
    drops).
    """

    def shy(method, settings=SHY, trace=None, **training):
        setup = make_setup(method, **{"num_rounds": 6, "clients_per_round": 3, **training})
        settings = Participation(**settings, **({"trace": str(trace)} if trace else {}))
        read = read_trace(str(trace), setup.federation.num_clients) if trace else None
        return replace(setup, job=replace(setup.job, clients=settings), trace=read)

    return shy


@pytest.fixture
def gaps(tmp_path):
    """A trace: nobody is there in round 2, and all drop out in round 4."""
    rows = [(1, 0, False), (1, 3, False), (1, 5, True), (3, 1, False), (3, 2, False), (3, 3, False)]
    rows += [(4, 0, True), (4, 4, True), (5, 0, False), (6, 3, False), (6, 1, True)]
    columns = dict(zip(("round", "client", "drops"), zip(*rows, strict=True), strict=True))
    pq.write_table(pa.table(columns), tmp_path / "gaps.parquet")
    return tmp_path / "gaps.parquet"


class Counting(ThisProcess):
    """Counts whom it trains and surveys."""

    def __init__(self, setup):
        super().__init__(setup)
        self.trained, self.surveyed = [], []

    def map(self, work, items, shared):
        told = {"survey": self.surveyed, "train": self.trained}.get(work.kind)
        if told is not None:
            told.append(
                (work.round, sorted(client for item in items for client in work.clients(item)))
            )
        return super().map(work, items, shared)


@pytest.mark.parametrize("method", [m.fedavg(), m.fedcsd(), m.scaffold()])
def test_only_those_that_answer_work_and_the_bytes_of_all_chosen_count(shy, play, method):
    setup = shy(method, {**SHY, **CLOCK})
    workers = Counting(setup)
    _, *run = play(setup, workers)
    cohorts = [cohort_of(setup, round.round) for round in run]
    answered = [
        (round.round, cohort.answered)
        for round, cohort in zip(run, cohorts, strict=True)
        if cohort.answered
    ]
    assert workers.trained == answered
    assert workers.surveyed == (answered if method == m.fedcsd() else [])
    assert [[row.client for row in round.clients] for round in run] == [
        cohort.answered for cohort in cohorts
    ]
    assert sum(len(cohort.chosen) - len(cohort.answered) for cohort in cohorts) >= 5
    unit = num_bytes(run[0].weights)
    for round, cohort in zip(run, cohorts, strict=True):
        assert round.notes == cohort.notes
        if cohort.answered and method == m.fedavg():
            assert (round.bytes_down, round.bytes_up) == (
                unit * len(cohort.chosen),
                unit * len(cohort.answered),
            )


def test_the_average_is_that_of_those_that_answer(shy):
    setup = shy(m.fedavg())
    workers, last = ThisProcess(setup), start(setup, ThisProcess(setup))
    found = play(setup, last, workers)
    cohort = cohort_of(setup, 1)
    assert 0 < len(cohort.answered) < len(cohort.chosen)
    alone = play(setup, last, workers, clients=cohort.answered)
    torch.testing.assert_close(found.weights, alone.weights, rtol=0, atol=0)
    assert alone.notes == {}, "clients that are given all train"


@dataclass(frozen=True)
class Diary(Part):
    """Keeps the rounds in which the server's hooks were called."""

    def init(self, weights):
        return []

    def tell(self, state, server, surveyed):
        return [*state, f"tell {server.round}"], None

    def update(self, state, total, step):
        return [*state, f"update {step.server.round}"], step


def test_an_empty_round_changes_nothing_and_the_run_goes_on(
    shy, play, bits, gaps, caplog, monkeypatch
):
    asked = []

    def noting(workers, work, items, shared, map=ThisProcess.map):
        if work.kind == "train":
            asked.append(work.round)
        return map(workers, work, items, shared)

    monkeypatch.setattr(ThisProcess, "map", noting)
    setup = shy(m.compose(Diary(), m.ServerMomentum(0.5)), {}, gaps)
    with caplog.at_level(logging.WARNING):
        run = play(setup)
    assert [len(round.clients) for round in run] == [0, 2, 0, 3, 0, 1, 1]
    assert asked == [1, 3, 5, 6], "on Ray, a stage that nobody waits for would keep what was sent"
    told = [record.message for record in caplog.records if record.name == "rayfed.rounds.engine"]
    assert told == [
        "round 2 is empty, and the model stays as it was: no client was available",
        "round 4 is empty, and the model stays as it was: of 2 chosen clients, 2 dropped out and 0 "
        "came late",
    ]
    for number in (2, 4):
        before, after = bits(run[number - 1]), bits(run[number])
        for kept in ("weights", "states", "memories", "evaluation"):
            assert before[kept] == after[kept], kept
        assert (run[number].train_loss, run[number].bytes_up) == (None, 0)
    assert (run[2].bytes_down, run[4].bytes_down) == (0, 2 * num_bytes(run[0].weights))
    diary = [f"{hook} {round}" for round in (1, 3, 5, 6) for hook in ("tell", "update")]
    assert run[-1].held["diary"].state == diary
    assert run[-1].notes["clients.dropped"] == 1 and run[4].notes["clients.dropped"] == 2


def test_a_part_begins_in_an_empty_round_too(shy, play, gaps):
    run = play(shy(m.switch(m.fedavg(), m.compose(Diary()), at=4), {}, gaps))
    assert run[4].held["diary"].state == [] and run[4].held["diary"].since == 4
    assert run[5].held["diary"].state == ["tell 5", "update 5"] and run[5].held["diary"].since == 4


# Methods.


def test_scaffolds_c_is_the_mean_of_all_clients_whoever_answers(shy, play):
    """N in its update is the population: of clients that have not trained, `c_i` is 0."""
    last = play(shy(m.scaffold(), lr=0.05))[-1]
    kept = [unpack(packed)["slots"]["control_variates"] for packed in last.memories.values()]
    assert len(kept) >= 4
    for name, c in last.held["control_variates"].state.items():
        torch.testing.assert_close(
            c, sum(c_i[name].double() for c_i in kept) / 6, rtol=1e-5, atol=1e-6
        )


def test_feddyns_h_is_the_mean_of_all_clients_whoever_answers(shy, play):
    """Algorithm 1: `h` changes by the mean over the population of the changes of `g_i`."""
    last = play(shy(m.feddyn(), lr=0.05))[-1]
    kept = [unpack(packed)["slots"]["average"] for packed in last.memories.values()]
    for name, h in last.held["average"].state.items():
        mean = sum(g[name].double() for g in kept) / 6
        torch.testing.assert_close(h, mean, rtol=1e-4, atol=1e-6)


def test_fednova_with_equal_steps_is_fedavg_whoever_answers(shy, play):
    setting = {"local_steps": 3, "momentum": 0.0, "num_rounds": 4}
    nova, avg = (play(shy(method, **setting))[-1].weights for method in (m.fednova(), m.fedavg()))
    torch.testing.assert_close(nova, avg, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "method", [m.moon(), m.scaffold(), m.feddyn()], ids=["moon", "scaffold", "feddyn"]
)
def test_a_clients_memory_stays_while_it_does_not_answer(shy, play, bits, method):
    run = play(shy(method))
    for before, after in pairwise(run):
        answered = {row.client for row in after.clients}
        theirs, ours = bits(before)["memories"], bits(after)["memories"]
        assert {client: kept for client, kept in ours.items() if client not in answered} == {
            client: kept for client, kept in theirs.items() if client not in answered
        }
        assert answered <= ours.keys()
