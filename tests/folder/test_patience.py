"""A run ends early by its recorded rounds, wherever it was stopped and continued."""

import pytest

import rayfed
from rayfed.folder.places import is_done
from rayfed.folder.summary import read_summary
from rayfed.folder.tables import read_table
from rayfed.job import read_job
from rayfed.observers.display import result_text


@pytest.fixture
def tables(tables):
    return {**tables, "train": {"num_rounds": 12, "clients_per_round": 2, "lr": 0.1}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs/run"


@pytest.fixture
def accuracies(tables):
    """Of a run that goes on, by round."""
    return rayfed.run({**tables, "name": "whole"}).rounds.column("test_accuracy").to_pylist()


def numbers(path):
    rows = [
        row
        for name in ("rounds", "clients", "classes")
        for row in read_table(path, name).to_pylist()
    ]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def end_of(accuracies, patience, every=1):
    """The last round, found by going through them."""
    best, since = -1.0, 0
    for round in range(every, len(accuracies), every):
        best, since = (accuracies[round], 0) if accuracies[round] > best else (best, since + 1)
        if since == patience:
            return round
    return len(accuracies) - 1


@pytest.mark.parametrize(("patience", "every"), [(2, 1), (1, 3)])
def test_a_run_ends_where_its_accuracies_say(tables, path, accuracies, patience, every):
    end = end_of(accuracies, patience, every)
    assert end < 12, "so that this test says something"
    rayfed.run(tables, {"train.patience": patience, "train.eval_every": every})
    summary = read_summary(path)
    assert (summary["status"], summary["rounds"], summary["last"]["round"]) == ("done", end, end)
    words = f"{patience} evaluated round{'s' if patience > 1 else ''}"
    assert summary["ended_early"] == f"no better test accuracy in {words} (train.patience)"
    assert f"ended    after round {end}: no better test accuracy" in result_text(path, summary)


def test_a_run_that_has_ended_says_why_and_is_done_for_a_job_with_its_patience_only(
    tables, path, accuracies, caplog
):
    rayfed.run(tables, {"train.patience": 2})
    end, before = end_of(accuracies, 2), numbers(path)
    rayfed.resume(path, {"train.num_rounds": 13})
    assert (
        f"the run has ended after round {end}: no better test accuracy in 2 evaluated rounds"
        in caplog.text
    )
    assert f"to go on: rayfed resume {path} -s train.patience=0" in caplog.text
    assert numbers(path) == before and read_summary(path)["ended_early"]
    done = [is_done(read_job(tables, {"train.patience": patience})) for patience in (0, 2, 11)]
    assert done == [False, True, False]
