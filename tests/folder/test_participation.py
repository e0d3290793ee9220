"""A run whose clients take part by a trace: what it records, how it continues, and what a replay
says.
"""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rayfed
from rayfed.base.errors import InputError
from rayfed.folder.tables import read_table
from rayfed.report.page import write_report

# Nobody is there in round 3.
ROWS = {
    "round": [1, 1, 2, 2, 4, 4, 4],
    "client": [0, 1, 2, 3, 0, 1, 2],
    "drops": [False, True, True, False, False, True, False],
    "seconds_per_example": [0.5, 1.0, 2.0, 0.25, 0.125, 1.0, 4.0],
}


@pytest.fixture
def trace(tmp_path):
    pq.write_table(pa.table(ROWS), tmp_path / "trace.parquet")
    return tmp_path / "trace.parquet"


@pytest.fixture
def job(tables, trace):
    """Ten images per client; in round 5, the trace begins again."""
    return {**tables, "clients": {"trace": str(trace), "deadline": 30.0}}


def test_the_rounds_have_their_clients_and_their_virtual_time_by_hand(job, caplog):
    with caplog.at_level(logging.WARNING):
        result = rayfed.run(job)
    assert "ends with round 4 of 5; from round 5 on it begins again" in caplog.text
    assert "round 3 is empty, and the model stays as it was: no client was available" in caplog.text
    names = ("available", "chosen", "answered", "dropped", "late", "virtual_seconds")
    notes = [dict(row["notes"]) for row in result.rounds.to_pylist()]
    assert [[note.get(f"clients.{name}") for name in names] for note in notes[1:4]] == [
        # Client 0 takes 5 virtual seconds; the server waits for client 1.
        [2, 2, 1, 1, 0, 30.0],
        [2, 2, 1, 1, 0, 30.0],
        [0, 0, 0, 0, 0, 30.0],
    ]
    assert notes[0] == {} and notes[5] == notes[1]
    trained = {
        round: [row["client"] for row in result.clients.to_pylist() if row["round"] == round]
        for round in range(6)
    }
    assert (trained[1], trained[2], trained[3], trained[5]) == ([0], [3], [], [0])
    rows = result.rounds.to_pylist()
    assert rows[3]["train_loss"] is None and rows[3]["test_accuracy"] == rows[2]["test_accuracy"]
    write_report(result.path)


def test_in_a_job_without_the_table_nothing_is_noted(tables):
    result = rayfed.run(tables, {"train.num_rounds": 1})
    assert not any(result.rounds.column("notes").to_pylist())
    assert "trace" not in json.loads((result.path / "environment.json").read_text())


def test_a_run_does_not_continue_with_another_trace_or_other_settings(job, trace):
    path = rayfed.run(job, {"train.num_rounds": 2}).path
    with pytest.raises(
        InputError, match=r"another job: clients\.deadline is 30\.0 there, 20\.0 here\n"
    ):
        rayfed.resume(path, {"train.num_rounds": 5, "clients.deadline": 20.0})
    pq.write_table(pa.table({**ROWS, "drops": [False] * 7}), trace)
    with pytest.raises(
        InputError, match=r"belongs to another job: the trace of the clients has changed since\n"
    ):
        rayfed.resume(path, {"train.num_rounds": 5})
    pq.write_table(pa.table(ROWS).take([6, 5, 4, 3, 2, 1, 0]), trace)
    assert rayfed.resume(path, {"train.num_rounds": 5}).rounds.num_rows == 6, (
        "the same rows in another order"
    )


def test_a_replay_takes_those_that_answered_and_says_why_others_did_not_train(job):
    job["clients"] |= {"deadline": 12.0, "oversample": 1.5, "bytes_per_second": 1e9}
    path = rayfed.run(job).path
    for row in read_table(path, "clients").to_pylist():
        again, recorded = rayfed.replay(path, row["round"], row["client"])
        assert again.train_loss == recorded == row["train_loss"]
    for round, client, why in [
        (1, 1, "it dropped out of round 1, and did not train; that round has 0$"),
        (1, 2, "not in round 1, which has 0$"),
        (4, 2, "it was late in round 4, and did not train; that round has 0$"),
        (3, 0, "not in round 3, which has no client$"),
    ]:
        with pytest.raises(InputError, match=f"^client {client}: {why}"):
            rayfed.replay(path, round, client)
