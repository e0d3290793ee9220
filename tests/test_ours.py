"""How each kind of number in a paper is taken from a run: by hand, from tables written by hand."""

import csv
import math
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rayfed
from rayfed.folder import tables
from rayfed.folder.tables import NOTES, SCHEMAS
from rayfed.papers.ours import Theirs, ours
from rayfed.papers.tables import grids
from rayfed.report.read import read_run

TINY = {
    "model.name": "lenet",
    "train.num_rounds": 1,
    "train.clients_per_round": 2,
    "train.local_steps": 1,
}
CONFUSIONS = {
    "round": pa.int64(),
    "client": pa.int64(),
    "class": pa.string(),
    "predicted": pa.string(),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return rayfed.run(
        "jobs/quickstart.toml", {**TINY, "name": "a", "ray.mode": "off", "output.path": str(folder)}
    ).path


@pytest.fixture
def folder(path, tmp_path, monkeypatch):
    """A run's folder, to be given other tables."""
    if "notes" not in SCHEMAS["rounds"].names:
        monkeypatch.setitem(
            tables.SCHEMAS, "rounds", SCHEMAS["rounds"].append(pa.field("notes", NOTES))
        )
    monkeypatch.setitem(
        tables.SCHEMAS, "confusions", pa.schema([*CONFUSIONS.items(), ("count", pa.int64())])
    )
    return shutil.copytree(path, tmp_path / "run")


def write(folder, name, rows):
    shutil.rmtree(folder / f"{name}.parquet", ignore_errors=True)
    pq.write_table(pa.Table.from_pylist(rows, tables.SCHEMAS[name]), folder / f"{name}.parquet")


def with_accuracies(path, *accuracies):
    """A run with these accuracies after rounds 1, 2, ..., not evaluated where they are nan."""
    run, count = read_run(path), len(accuracies) + 1
    rounds = {
        "round": np.arange(count),
        "test_accuracy": np.array([0.1, *accuracies]),
        "forgetting": np.full(count, 0.2),
    }
    return replace(run, rounds=rounds, evaluated=~np.isnan(rounds["test_accuracy"]))


def number(metric, stat="", note=""):
    return Theirs(metric, "1.0", "", stat, note)


def taken(run, metric, baseline=None, of="last", **more):
    return ours(run, number(metric, **more), baseline, of)


def test_accuracy_is_that_of_the_round_which_the_paper_names(path):
    run = with_accuracies(path, 0.2, 0.6, 0.4)
    assert taken(run, "test_accuracy", stat="best") == (60.0, "")
    assert taken(run, "test_accuracy", stat="last") == (40.0, "")
    assert taken(run, "test_accuracy", stat="last_10").value == pytest.approx(40.0)
    unsaid = taken(run, "test_accuracy", of="best")
    assert unsaid == (60.0, "the paper does not say of which round; ours is the best")
    assert taken(run, "forgetting", stat="last") == (0.2, "")


def test_rounds_and_speed_up_are_to_fedavgs_last_and_best_accuracy(path):
    fedavg = with_accuracies(path, 0.2, 0.3, 0.5, 0.6, 0.55, 0.4)
    run = with_accuracies(path, 0.35, 0.45, 0.7, 0.1, 0.1, 0.1)
    # 0.4
    assert taken(run, "rounds_to_target", fedavg) == (2, "")
    # The number of its rounds, as FedSSD prints it.
    assert taken(fedavg, "rounds_to_target", fedavg) == (
        6,
        "",
    )
    # 0.6
    assert taken(run, "speed_up", fedavg).value == pytest.approx(4 / 3)
    assert taken(fedavg, "speed_up", fedavg).value == 1.0
    late = with_accuracies(path, 0.1, 0.1)
    assert math.isnan(taken(late, "rounds_to_target", fedavg).value)
    assert (
        taken(late, "rounds_to_target", fedavg).note
        == "FedAvg's last accuracy, 40.00 %, is not reached"
    )
    assert taken(late, "speed_up", fedavg).note == "FedAvg's best accuracy, 60.00 %, is not reached"
    for metric in ("rounds_to_target", "speed_up"):
        lacking = taken(run, metric)
        assert math.isnan(lacking.value) and "needs the run of fedavg" in lacking.note


def test_a_classs_accuracy_is_that_of_the_named_round(path):
    by_class = np.arange(30).reshape(3, 10) / 100
    run = replace(read_run(path), class_rounds=np.array([0, 5, 10]), class_accuracy=by_class)
    assert taken(run, "class_accuracy_3", note="global model after round 5").value == pytest.approx(
        13.0
    )
    assert taken(run, "class_accuracy_3").value == pytest.approx(23.0)
    missed = taken(run, "class_accuracy_3", note="global model after round 7")
    assert (
        math.isnan(missed.value)
        and missed.note == "there is no accuracy of this class after round 7"
    )
    assert math.isnan(taken(run, "class_accuracy_12").value)


def write_notes(folder, rounds, clients):
    """Notes of rounds as `{round: notes}` and of clients as `[(round, notes)]`; clients hold 10,
    20, ... images.
    """
    empty = dict.fromkeys(SCHEMAS["rounds"].names, 0)
    write(
        folder,
        "rounds",
        [{**empty, "round": round, "notes": [*notes.items()]} for round, notes in rounds.items()],
    )
    rows = [(number, round, notes) for number, (round, notes) in enumerate(clients)]
    held = [
        {"round": round, "client": k, "num_examples": 10 * k + 10, "notes": [*n.items()]}
        for k, round, n in rows
    ]
    write(folder, "clients", held)


def test_alignment_is_that_of_the_last_measured_round(folder):
    run = read_run(folder)
    for metric in ("alignment_fc512_local", "alignment_fc512_global"):
        lacking = taken(run, metric)
        assert math.isnan(lacking.value) and 'measure = ["drift"]' in lacking.note
    locals = [
        (2, {"drift.alignment": 0.5}),
        (2, {"drift.alignment": 0.25, "drift.alignment.fc9": 1.0}),
    ]
    later = [(1, {"drift.alignment": 0.1}), *locals, (3, {"loss.cross_entropy": 1.0})]
    write_notes(
        folder,
        {0: {}, 1: {"drift.alignment.features": 0.9}, 2: {"drift.alignment.features": 0.8}, 3: {}},
        later,
    )
    # Nothing that was read before is kept.
    run = replace(run)
    # A plain mean over clients.
    assert taken(run, "alignment_fc512_local").value == pytest.approx(0.375)
    assert taken(run, "alignment_fc512_global").value == pytest.approx(0.8)
    write_notes(folder, {1: {"drift.alignment.a": 0.9, "drift.alignment.b": 0.8}}, [])
    ambiguous = taken(replace(run), "alignment_fc512_global")
    assert math.isnan(ambiguous.value) and ambiguous.note.endswith(
        "the run has drift.alignment.a, drift.alignment.b"
    )
    assert '["features.10"]' in taken(run, "alignment_fc128_local").note


def test_domains_have_their_accuracy_and_a_plain_mean(folder):
    run = read_run(folder)
    assert taken(run, "test_accuracy_dslr").note.endswith("have these domains: none")
    write_notes(
        folder, {0: {"domain.DSLR": 0.1}, 1: {"domain.DSLR": 0.5, "domain.amazon": 0.25}, 2: {}}, []
    )
    # Nothing that was read before is kept.
    run = replace(run)
    assert taken(run, "test_accuracy_dslr", stat="last") == (50.0, "")
    assert taken(run, "test_accuracy_mean").value == pytest.approx(37.5)
    assert "does not say of which round" in taken(run, "test_accuracy_mean").note
    assert taken(run, "test_accuracy_webcam").note.endswith("have these domains: dslr, amazon")


def test_personalised_accuracy_is_the_mean_over_the_clients_own_models(path, tmp_path):
    assert taken(read_run(path), "personalised_accuracy").note == 'measure = ["local"] records it'
    options = {
        **TINY,
        "name": "b",
        "ray.mode": "off",
        "output.path": str(tmp_path),
        "measure": ["local"],
    }
    folder = rayfed.run("jobs/quickstart.toml", options).path
    notes = [
        dict(of_client) for of_client in tables.read_table(folder, "clients")["notes"].to_pylist()
    ]
    expected = 100 * np.mean([note["local.after.in_local"] for note in notes])
    assert taken(read_run(folder), "personalised_accuracy").value == pytest.approx(expected)


def test_a_run_without_these_tables_has_no_number_and_says_why(path):
    """Every kind of number in the papers: either a number, or a reason."""
    run = read_run(path)
    files = {grid.parent / "results.csv" for grid in grids().values()}
    for metric in {
        line["metric"] for file in files for line in csv.DictReader(file.read_text().splitlines())
    }:
        found = taken(run, metric, run)
        assert not math.isnan(found.value) or found.note, metric
