"""Who is chosen for a round and who answers: laws, frequencies, cases by hand, and what is
refused.
"""

import logging
import sys
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfed.base.errors import InputError
from rayfed.base.seeds import cohort
from rayfed.clients.batches import batches
from rayfed.clients.clock import images_trained, seconds, speeds
from rayfed.clients.cohort import Circumstances, Cohort, choice_at, cohort_at
from rayfed.clients.participation import Participation
from rayfed.clients.settings import Training
from rayfed.clients.trace import Trace, open_trace, read_trace
from rayfed.job import read_job

# Bytes
MODEL = 1000
CLOCK = {"seconds_per_example": 0.5, "bytes_per_second": 100.0, "spread": 1.0}


def draw(round=1, *, seed=0, k=4, sizes=(10,) * 12, trace=None, **settings):
    settings = Participation(**({} if trace is None else {"trace": "some.parquet"}), **settings)
    training = Training(clients_per_round=k)
    of = Circumstances(round, seed, settings, training, trace, np.array(sizes), MODEL)
    return of.simple_cohort() or cohort_at(of, choice_at(of, {}))


def trace_of(*rows, **columns):
    rounds, clients = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return Trace(rounds, clients, {name: np.array(values) for name, values in columns.items()})


# The cohort.

settings = st.fixed_dictionaries(
    {
        "available": st.sampled_from([0.05, 0.6, 1.0]),
        "dropout": st.sampled_from([0.0, 0.4, 0.95]),
        "oversample": st.sampled_from([1.0, 1.5, 3.0]),
        "deadline": st.none() | st.sampled_from([1e-3, 15.0, 25.0, 1e9]),
        **{name: st.just(value) for name, value in CLOCK.items()},
    }
)


@given(settings, st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 4))
def test_those_chosen_answer_drop_out_or_are_late(settings, seed, round, k):
    found = draw(round, seed=seed, k=k, **settings)
    assert found == draw(round, seed=seed, k=k, **settings)
    for clients in (found.chosen, found.answered, found.dropped):
        assert all(one < other for one, other in pairwise(clients))
        assert all(type(client) is int and 0 <= client < 12 for client in clients)
    answered, dropped, chosen = map(set, (found.answered, found.dropped, found.chosen))
    assert answered <= chosen and dropped <= chosen and not answered & dropped
    assert len(answered) <= k and len(chosen) <= min(12, np.ceil(k * settings["oversample"]))
    notes = {name.removeprefix("clients."): count for name, count in found.notes.items()}
    assert [notes[name] for name in ("chosen", "answered", "dropped")] == [
        len(chosen),
        len(answered),
        len(dropped),
    ]
    assert notes["late"] == len(chosen - answered - dropped)
    assert notes["chosen"] == min(notes["available"], Participation(**settings).chosen(k))
    assert 0 <= notes["virtual_seconds"] <= (settings["deadline"] or np.inf)
    if settings["deadline"] is None and settings["oversample"] == 1:
        assert answered == chosen - dropped, "nobody is late"


@given(st.integers(0, 10**6), st.integers(1, 100), st.integers(1, 12))
def test_where_all_answer_the_cohort_is_the_seeds(seed, round, k):
    clients = cohort(seed, round, 12, k)
    assert draw(round, seed=seed, k=k) == Cohort(clients, clients)
    with_clock = draw(round, seed=seed, k=k, **CLOCK, deadline=1e9)
    assert with_clock.answered == with_clock.chosen == clients
    everybody = trace_of(*((1, client) for client in range(12)))
    assert draw(1, seed=seed, k=k, trace=everybody).answered == cohort(seed, 1, 12, k)


def test_availability_and_dropout_have_their_chances_and_all_clients_the_same():
    rounds = 3000
    found = [
        draw(round, k=4, available=0.7, dropout=0.2, oversample=1.5)
        for round in range(1, rounds + 1)
    ]
    there = sum(cohort.notes["clients.available"] for cohort in found)
    assert abs(there - 0.7 * 12 * rounds) < 5 * np.sqrt(12 * rounds * 0.7 * 0.3)
    chosen, dropped = (
        sum(cohort.notes[f"clients.{name}"] for cohort in found) for name in ("chosen", "dropped")
    )
    assert abs(dropped - 0.2 * chosen) < 5 * np.sqrt(chosen * 0.2 * 0.8)
    # Without a clock, those that answer do so at the same time: the first are any.
    for clients in ("chosen", "answered", "dropped"):
        times = np.bincount(
            [client for cohort in found for client in getattr(cohort, clients)], minlength=12
        )
        assert (np.abs(times - times.mean()) < 5 * np.sqrt(times.mean())).all(), clients
    late = [set(cohort.chosen) - {*cohort.answered, *cohort.dropped} for cohort in found]
    assert sum(map(len, late)) > 0, "more have answered than count"
    one, other = (draw(3, seed=seed, k=4, available=0.7, dropout=0.2) for seed in (1, 2))
    assert one != other


def test_a_client_drops_out_or_not_whoever_is_chosen_beside_it():
    few, many = (draw(5, k=k, dropout=0.5) for k in (3, 12))
    assert set(few.dropped) == set(many.dropped) & set(few.chosen)


def test_the_first_answers_before_the_deadline_count_by_hand():
    """Ten images each; the model goes down and up in 2 x 1000 / 1000 = 2 virtual seconds."""
    rows = [(1, client) for client in (0, 2, 3, 5, 7)]
    traced = {
        # So 5, 3, 4, 3, 6 seconds.
        "seconds_per_example": [0.3, 0.1, 0.2, 0.1, 0.4],
        "drops": [False, False, False, True, False],
    }

    def found(k, **more):
        cohort = draw(
            k=k, trace=trace_of(*rows, **traced), bytes_per_second=1000.0, oversample=5 / k, **more
        )
        assert (cohort.chosen, cohort.dropped) == ([0, 2, 3, 5, 7], [5])
        return (
            cohort.answered,
            cohort.notes["clients.late"],
            cohort.notes["clients.virtual_seconds"],
        )

    assert found(2) == ([2, 3], 2, 4.0), "the round ends with the second answer"
    assert found(2, deadline=4.0) == ([2, 3], 2, 4.0)
    assert found(2, deadline=3.5) == ([2], 3, 3.5), (
        "one answer, and the server waits for another to the end"
    )
    assert found(2, deadline=1.0) == ([], 4, 1.0)
    assert found(4) == ([0, 2, 3, 7], 0, 6.0)
    assert found(5) == ([0, 2, 3, 7], 0, 6.0), (
        "no deadline: a client that drops out is not waited for"
    )
    assert found(5, deadline=9.0) == ([0, 2, 3, 7], 0, 9.0)


def test_a_round_without_clients_takes_no_time_or_all_of_it():
    empty = trace_of((2, 1))
    for deadline, time in ((None, 0.0), (7.0, 7.0)):
        found = draw(1, trace=empty, **CLOCK, deadline=deadline)
        assert (found.chosen, found.answered, found.notes["clients.virtual_seconds"]) == (
            [],
            [],
            time,
        )
        assert str(found) == "no client was available"
    assert str(Cohort([1, 2, 3], [], [2])) == "of 3 chosen clients, 1 dropped out and 2 came late"


def test_a_round_has_fewer_clients_where_fewer_are_there():
    found = draw(1, k=4, trace=trace_of((1, 3), (1, 8)), oversample=2.0, **CLOCK)
    assert (found.chosen, found.notes["clients.available"]) == ([3, 8], 2)


def test_a_large_population_costs_no_python_time():
    def calls(num_clients):
        count = [0]
        before, sizes = sys.getprofile(), np.full(num_clients, 10)
        sys.setprofile(lambda *event: count.__setitem__(0, count[0] + 1))
        try:
            draw(1, k=4, sizes=sizes, available=0.5, dropout=0.1, **CLOCK)
        finally:
            sys.setprofile(before)
        return count[0]

    # Whatever is done once.
    calls(100)
    assert abs(calls(100) - calls(10**6)) < 20


# The clock.


@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.sampled_from([1, 2, 4, 0.01, 0.5, 1.5]),
    st.none() | st.integers(1, 40),
)
def test_the_images_are_those_of_all_batches(n, batch_size, epochs, steps):
    training = Training(batch_size=batch_size, local_epochs=epochs, local_steps=steps)
    trained = sum(len(batch) for batch in batches(n, training, torch.Generator()))
    assert images_trained(np.array([n, 7]), training)[0] == trained


def test_speeds_are_log_normal_with_the_jobs_median_and_stay():
    wanted, clients = (
        Participation(seconds_per_example=0.02, bytes_per_second=1e6, spread=0.5),
        np.arange(20_000),
    )
    found = speeds(wanted, 0, clients, 20_000, {})
    logs = {name: np.log(values / getattr(wanted, name)) for name, values in found.items()}
    for values in logs.values():
        assert abs(values.mean()) < 5 * 0.5 / np.sqrt(20_000)
        assert abs(values.std() - 0.5) < 5 * 0.5 / np.sqrt(40_000)
    assert abs(np.corrcoef(*logs.values())[0, 1]) < 5 / np.sqrt(20_000)
    some = speeds(wanted, 0, np.array([3, 17]), 20_000, {})
    assert {name: values.tolist() for name, values in some.items()} == {
        n: v[[3, 17]].tolist() for n, v in found.items()
    }
    assert (
        speeds(wanted, 1, clients, 20_000, {})["bytes_per_second"][0]
        != found["bytes_per_second"][0]
    )
    traced = {"bytes_per_second": np.array([5.0]), "drops": np.array([True])}
    only = speeds(Participation(trace="some.parquet"), 0, np.array([0]), 1, traced)
    assert {name: values.tolist() for name, values in only.items()} == {"bytes_per_second": [5.0]}


def test_the_time_is_that_of_the_model_down_of_training_and_of_the_model_up():
    both = {
        "seconds_per_example": np.array([0.5, 2.0]),
        "bytes_per_second": np.array([100.0, 1000.0]),
    }
    assert seconds(both, np.array([10, 20]), MODEL).tolist() == [5 + 20, 40 + 2]
    assert seconds({}, np.array([10, 20]), MODEL).tolist() == [0, 0]


# The trace.


@pytest.fixture
def write(tmp_path):
    def write(**columns):
        pq.write_table(pa.table(columns), tmp_path / "trace.parquet")
        return str(tmp_path / "trace.parquet")

    return write


def test_a_trace_says_who_is_there_and_begins_again(write, caplog):
    path = write(
        round=[3, 1, 1], client=[2, 5, 0], drops=[True, False, False], bytes_per_second=[7, 8, 9]
    )
    trace = open_trace(Participation(trace=path), 6, 3)
    assert not caplog.text
    found = {round: trace.clients[trace.rows(round)].tolist() for round in range(1, 8)}
    assert found == {1: [0, 5], 2: [], 3: [2], 4: [0, 5], 5: [], 6: [2], 7: [0, 5]}
    assert trace.columns["bytes_per_second"][trace.rows(1)].tolist() == [9.0, 8.0]
    assert draw(6, trace=trace).dropped == [2]
    with caplog.at_level(logging.WARNING):
        open_trace(Participation(trace=path), 6, 5)
    assert (
        f"clients.trace = '{path}' ends with round 3 of 5; from round 4 on it begins again"
        in caplog.text
    )


def test_the_hash_of_a_trace_is_of_what_it_says(write):
    rows = {"round": [1, 1, 2], "client": [0, 1, 1]}
    first = read_trace(write(**rows), 3).hash()
    assert read_trace(write(round=[2, 1, 1], client=[1, 1, 0]), 3).hash() == first, "in any order"
    others = [{**rows, "client": [0, 2, 1]}, {**rows, "round": [1, 1, 3]}]
    others += [
        {**rows, name: [1.0, 1.0, 1.0]} for name in ("seconds_per_example", "bytes_per_second")
    ]
    assert len({first, *(read_trace(write(**other), 3).hash() for other in others)}) == 5


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"round": [1]}, "there is no column 'client'; it has round$"),
        (
            {"round": [1], "client": [1], "drop": [1]},
            r"'drop' has no meaning; did you mean 'drops'\?",
        ),
        ({"round": [1], "client": [9]}, "there is a client 9; the partition has clients 0 to 5$"),
        ({"round": [0], "client": [1]}, "there is a round 0; the first round is 1$"),
        (
            {"round": [1, 1], "client": [4, 4]},
            "client 4 is there twice in round 1; give each client of a round once$",
        ),
        (
            {"round": [1.5], "client": [1]},
            "the column 'round' is of type double; give whole numbers$",
        ),
        (
            {"round": [1, 2], "client": [1, None]},
            "1 values of the column 'client' are missing; give all$",
        ),
        (
            {"round": [1], "client": [1], "drops": ["x"]},
            "the column 'drops' is of type string; give true or false$",
        ),
        (
            {"round": [1], "client": [1], "bytes_per_second": [0]},
            "'bytes_per_second' has the value 0.0; give more than 0",
        ),
        (
            {"round": [1, 1], "client": [5, 6]},
            "there is a client 6; the partition has clients 0 to 5$",
        ),
        ({"round": [], "client": []}, "it has no rows, so no client is ever there$"),
    ],
)
def test_a_trace_that_cannot_be_meant_is_refused(write, columns, message):
    with pytest.raises(InputError, match=rf"^clients\.trace = '.*': .*{message}"):
        read_trace(write(**columns), 6)


# The settings.


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dropout": 0.1}, "clients.dropout = 0.1: the trace has a column 'drops'; give one$"),
        (
            {"bytes_per_second": 1.0},
            "clients.bytes_per_second = 1.0: the trace has a column 'bytes_per_second'; give one$",
        ),
        ({"spread": 0.3}, "clients.spread = 0.3: there is no speed to spread"),
    ],
)
def test_a_key_for_what_a_trace_says_is_refused(write, keys, message):
    path = write(round=[1], client=[1], drops=[True], bytes_per_second=[5.0])
    assert open_trace(Participation(trace=path, deadline=9.0, oversample=1.3), 6, 1) is not None
    with pytest.raises(InputError, match=message):
        open_trace(Participation(trace=path, **keys), 6, 1)
    with pytest.raises(InputError, match=r"clients\.deadline = 9\.0: no work takes virtual time"):
        open_trace(Participation(trace=write(round=[1], client=[1]), deadline=9.0), 6, 1)


def test_the_trace_is_a_path_of_the_job():
    assert read_job({"name": "n", "clients": {"trace": "traces/day.parquet"}}).places() == {
        "data.root": "~/.cache/rayfed/data",
        "clients.trace": "traces/day.parquet",
        "output.path": "runs",
    }
