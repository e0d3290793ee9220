"""Each client's own model after a run, held-out clients, and what a federation without an average
is.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rayfed import methods as m
from rayfed.base.errors import InputError
from rayfed.clients.participation import Participation
from rayfed.losses import metrics
from rayfed.rounds.client_work import evaluate
from rayfed.rounds.engine import cohort_of
from rayfed.rounds.own import Tuning, own_rows
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.weights import state_of, with_weights
from rayfed.tensors.wire import unpack


def with_held_out(site, number):
    return replace(site, job=replace(site.job, clients=Participation(held_out=number)))


def rows_after(site, last, tuning=None):
    return list(own_rows(site, last, ThisProcess(site), tuning))


def by_hand(site, client, weights):
    """Accuracy, and accuracy weighted by the client's labels, of a model on all test images."""
    confusion = evaluate(
        site, with_weights(site.model, weights).eval(), 0, len(site.federation.test)
    ).confusion
    p = site.federation.label_counts(client) / site.federation.num_examples(client)
    return metrics.accuracy(confusion), metrics.in_local_accuracy(
        metrics.class_accuracy(confusion), p
    )


def own_by_hand(method, last, client):
    """The model that a client has of its own: its memory over the global model."""
    if client not in last.memories:
        return last.evaluated
    (kept,) = unpack(last.memories[client])["slots"].values()
    return {**last.evaluated, **kept}


@pytest.mark.parametrize(
    "method", [m.fedavg(), m.fedacg(), m.fedper(), m.fedbn(), m.ditto(), m.local()]
)
def test_a_clients_own_model_is_its_memory_over_the_global_model(method, make_site, play):
    site = with_held_out(make_site(method, norm=True), 2)
    *_, last = play(site)
    rows = rows_after(site, last)
    assert [row.client for row in rows] == list(range(site.federation.num_clients))
    for row in rows:
        assert (row.accuracy, row.in_local) == by_hand(
            site, row.client, own_by_hand(method, last, row.client)
        )
        assert row.num_examples == site.federation.num_examples(row.client)
        assert row.tuned_accuracy is None
    if method not in (m.fedavg(), m.fedacg()):
        assert len({row.accuracy for row in rows}) > 1


def test_measuring_changes_nothing(make_site, play):
    site = make_site(m.fedper())
    *_, last = play(site)
    before = {name: w.clone() for name, w in last.weights.items()}
    initial = state_of(site.model)
    first = rows_after(site, last, Tuning(1))
    assert rows_after(site, last, Tuning(1)) == first
    assert all(torch.equal(last.weights[name], w) for name, w in before.items())
    assert all(torch.equal(state_of(site.model)[name], w) for name, w in initial.items())
    assert rows_after(site, last) == [
        replace(row, tuned_accuracy=None, tuned_in_local=None) for row in first
    ]


def test_tuning_all_layers_for_a_long_time_learns_the_clients_labels(make_site, play):
    site = make_site(m.fedavg(), num_rounds=1, lr=0.1)
    *_, last = play(site)
    rows = rows_after(site, last, Tuning(60))
    sure = [row for row in rows if row.num_examples > 1]
    assert np.mean([row.tuned_in_local for row in sure]) > np.mean([row.in_local for row in sure])


def test_tuning_the_head_leaves_the_body(make_site, play, monkeypatch):
    from rayfed.rounds import own

    site = make_site(m.fedavg(), num_rounds=1)
    *_, last = play(site)
    seen = []
    tuned = own._measured

    def spy(site, model):
        seen.append({name: w.clone() for name, w in model.state_dict().items()})
        return tuned(site, model)

    monkeypatch.setattr(own, "_measured", spy)
    rows_after(site, last, Tuning(1, "head"))
    of_global, *after = seen
    heads = {name for name in of_global if name.startswith("head.")}
    assert len(after) == site.federation.num_clients
    for state in after:
        assert all(
            torch.equal(state[name], w) == (name not in heads) for name, w in of_global.items()
        )


def test_a_model_without_a_head_is_refused(make_site, play):
    site = make_site(m.fedavg(), num_rounds=1)
    *_, last = play(site)
    headless = replace(site, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4)))
    with pytest.raises(
        InputError, match=r"no module `head` that trains; give all .in Python layers"
    ):
        rows_after(headless, last, Tuning(1, "head"))


def test_held_out_clients_never_train_and_the_others_are_the_population(make_site, play):
    site = with_held_out(make_site(m.scaffold(), num_rounds=30), 2)
    rounds = play(site)
    trained = {row.client for round in rounds for row in round.clients}
    held_out = set(site.held_out.tolist())
    assert len(held_out) == 2 and trained == set(range(6)) - held_out
    assert {row.client for row in rows_after(site, rounds[-1]) if row.held_out} == held_out
    number, mean = site.population
    assert (number, mean) == (
        4,
        np.mean([site.federation.num_examples(client) for client in trained]),
    )
    other = replace(site, job=replace(site.job, seed=site.job.seed + 1))
    assert cohort_of(site, 1) == cohort_of(site, 1)
    assert {*with_held_out(other, 2).held_out.tolist()} <= set(range(6))


def test_a_federation_without_an_average_is_each_client_alone(make_site, play):
    """A client that is alone in its federation has the same bits: nothing of the others reaches it."""
    site = make_site(m.local(), clients_per_round=6, num_rounds=3)
    rounds = play(site)
    assert all(torch.equal(rounds[-1].weights[name], w) for name, w in rounds[0].weights.items())
    counts = [[0, 0, 12, 1]]
    alone = play(make_site(m.fedavg(), counts=counts, clients_per_round=1, num_rounds=3))
    with_local = play(make_site(m.local(), counts=counts, clients_per_round=1, num_rounds=3))
    kept = unpack(with_local[-1].memories[0])["slots"]["local_model"]
    assert all(torch.equal(kept[name], w) for name, w in alone[-1].weights.items())


def test_macro_f1_and_calibration_are_known_of_evaluated_rounds(make_site, play):
    site = make_site(m.fedavg(), num_rounds=2)
    *_, last = play(site)
    confusion = last.evaluation.confusion
    precision = np.diagonal(confusion) / np.maximum(confusion.sum(axis=0), 1)
    recall = np.diagonal(confusion) / confusion.sum(axis=1)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    assert last.macro_f1 == pytest.approx(f1.mean())
    assert 0 <= last.calibration_error <= 1
    assert (
        replace(last, evaluation=None).macro_f1
        is replace(last, evaluation=None).calibration_error
        is None
    )


def test_calibration_is_the_gap_of_confidence_and_accuracy():
    confidence = np.array([0.95, 0.95, 0.95, 0.95, 0.52, 0.52])
    right = np.array([1, 1, 1, 0, 0, 0])
    bins = metrics.overconfidence(confidence, right)
    by_hand = 4 / 6 * abs(0.75 - 0.95) + 2 / 6 * abs(0 - 0.52)
    assert metrics.calibration_error(bins, 6) == pytest.approx(by_hand)
    halves = metrics.overconfidence(confidence[:3], right[:3]) + metrics.overconfidence(
        confidence[3:], right[3:]
    )
    np.testing.assert_allclose(halves, bins)
    assert metrics.calibration_error(metrics.overconfidence(np.ones(3), np.ones(3)), 3) == 0
