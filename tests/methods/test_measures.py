"""Measures of the clients' models: by hand, against the engine's evaluation, and without a trace in the training."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from rayfed.engine import rounds
from rayfed.errors import InputError
from rayfed.job import read_job
from rayfed.methods import fedavg, measures, scaffold
from rayfed.methods.measures import Seen, sampled
from rayfed.runtime.here import Here

LABELS = np.array([0, 0, 1, 1])


def measured(names, before, after, p):
    """`measures.measured`, of models that have seen the images."""
    return measures.measured(names, {1: before, 2: after}.__getitem__, 1, 2, [], p)


def seen(predictions, weights=(0.0, 0.0), features=None):
    """A model that predicts these classes, surely."""
    named = {"a.w": torch.tensor([weights[0]]), "a.b": torch.tensor([0.0]), "head.w": torch.tensor([weights[1]])}
    return Seen(named, LABELS, 10.0 * np.eye(2)[predictions], features)


def test_local_by_hand():
    before, after, p = seen([0, 1, 1, 1]), seen([0, 0, 0, 1]), np.array([0.75, 0.25])
    assert measured(["local"], before, after, p) == {
        "local.before.accuracy": 0.75,
        "local.before.in_local": 0.75 * 0.5 + 0.25 * 1.0,
        "local.before.out_local": 0.25 * 0.5 + 0.75 * 1.0,
        "local.after.accuracy": 0.75,
        "local.after.in_local": 0.75 * 1.0 + 0.25 * 0.5,
        "local.after.out_local": 0.25 * 1.0 + 0.75 * 0.5,
    }


def test_drift_by_hand():
    one = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    other = one + np.array([3.0, 4.0])  # each feature is still largest on the same class
    found = measured(
        ["drift"], seen([0, 0, 1, 1], features=one), seen([0, 0, 1, 0], (3.0, 4.0), other), np.array([1.0, 0.0])
    )
    assert found == pytest.approx(
        {
            "drift.divergence": 5.0,
            "drift.divergence.a": 3.0,
            "drift.divergence.head": 4.0,
            "drift.distribution_distance": abs(2 / 3 - 1) + 1 / 3,  # accuracies of 1 and 1/2, scaled to 2/3 and 1/3
            "drift.logit_distance": np.sqrt(200) / 4,  # of one image in four
            "drift.feature_distance": 5.0,
            "drift.alignment": 1.0,
        }
    )
    without = measured(["drift"], seen([0, 0, 1, 1]), seen([0, 0, 1, 0]), np.array([1.0, 0.0]))
    assert without.keys() == found.keys() - {"drift.feature_distance", "drift.alignment"}


def test_a_model_that_has_not_moved_has_not_drifted():
    same = seen([0, 1, 1, 0], features=np.eye(4))
    found = measured(["drift"], same, same, np.array([0.5, 0.5]))
    still = {
        key: value for key, value in found.items() if key not in ("drift.distribution_distance", "drift.alignment")
    }
    assert set(still.values()) == {0.0} and found["drift.alignment"] == 1.0


@pytest.mark.parametrize(("total", "wanted", "count"), [(100, 10, 10), (100, 0, 100), (100, 100, 100), (100, 500, 100)])
def test_a_sample_is_fixed_by_the_seed(total, wanted, count):
    rows = sampled(total, wanted, seed=3)
    assert len(rows) == len(set(rows)) == count and (np.diff(rows) > 0).all() and rows.max() < total
    assert rows.tolist() == sampled(total, wanted, seed=3).tolist()
    assert count == total or rows.tolist() != sampled(total, wanted, seed=4).tolist()


def with_measures(site, **changes):
    return replace(site, job=replace(site.job, measure=["local", "drift"], measure_images=0, **changes))


@pytest.mark.parametrize("method", [fedavg(), scaffold()], ids=["fedavg", "scaffold"])
def test_a_measure_leaves_no_trace_in_the_training(method, make_site, play, bits):
    site = make_site(method, norm=True)
    plain, with_them = (play(each) for each in (site, with_measures(site, measure_every=2)))
    for one, other in zip(plain, with_them, strict=True):
        without = tuple(
            replace(row, notes={k: v for k, v in row.notes.items() if k.startswith("loss.")}) for row in other.clients
        )
        assert bits(one) == bits(replace(other, clients=without))
        measured_here = [any(not name.startswith("loss.") for name in row.notes) for row in other.clients]
        assert measured_here == [other.round % 2 == 0] * len(other.clients)


def test_before_is_the_global_model_and_after_the_clients_own(make_site, play):
    """On all test images, with one client per round: its model becomes the global model."""
    last, *others = play(site := with_measures(make_site(fedavg(), clients_per_round=1, norm=True)))
    parameters = dict(site.model.named_parameters())
    for round in others:
        (row,) = round.clients
        assert row.notes["local.before.accuracy"] == pytest.approx(last.test_accuracy)
        assert row.notes["local.after.accuracy"] == pytest.approx(round.test_accuracy)
        moved = sum(
            (round.weights[name] - last.weights[name]).double().square().sum()
            for name in parameters  # not BatchNorm's statistics
        )
        assert row.notes["drift.divergence"] == pytest.approx(float(moved.sqrt()), rel=1e-6)
        last = round


def test_a_measure_that_fails_warns_once_and_the_run_goes_on(make_site, monkeypatch, caplog):
    def broken(*given):
        raise ValueError("no such layer")

    measures._warn.cache_clear()
    monkeypatch.setitem(measures.MEASURES, "drift", broken)
    site = with_measures(make_site(fedavg()))
    with caplog.at_level(logging.WARNING):
        *_, last = rounds(site, Here(site))
    assert [r.getMessage() for r in caplog.records] == [
        "measure = drift fails, and is left out: ValueError: no such layer"
    ]
    assert all("local.after.accuracy" in row.notes for row in last.clients)


def test_a_model_that_cannot_be_shown_the_images_does_not_end_the_run(make_site, monkeypatch, caplog):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    measures._warn.cache_clear()
    monkeypatch.setattr(measures, "Seen", full)
    site = with_measures(make_site(fedavg()))
    with caplog.at_level(logging.WARNING):
        *_, last = rounds(site, Here(site))
    (record,) = caplog.records
    assert (
        "measure = local and drift fails, and is left out: OutOfMemoryError: CUDA out of memory" in record.getMessage()
    )
    assert last.round == 3 and all(row.notes.keys() == {"loss.cross_entropy"} for row in last.clients)


def test_an_unknown_measure_is_refused_and_the_keys_are_no_part_of_the_lineage():
    with pytest.raises(InputError, match=r"measure.*'locale'.*local"):
        read_job({"name": "x", "measure": ["locale"]})
    with pytest.raises(InputError, match="give each measure once"):
        read_job({"name": "x", "measure": ["local", "local"]})
    for key, value in {"measure_every": 0, "measure_images": -1}.items():
        with pytest.raises(InputError, match=rf"{key} = {value}"):
            read_job({"name": "x", key: value})
    plain, other = read_job({"name": "x"}), read_job({"name": "x", "measure": ["local"], "measure_every": 7})
    assert plain.lineage() == other.lineage() and plain.hash() == other.hash()


def test_a_worker_shows_the_images_to_the_global_model_once_per_round(make_site, play, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "rayfed.local.see", lambda run, batches, model: shown.append(model) or measures.see(run, batches, model)
    )
    play(with_measures(make_site(fedavg(), task_images=1)))  # each client is a task of its own
    assert len(shown) == 3 * (4 + 1)
