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
from rayfed.measures import metrics
from rayfed.rounds.choosing import cohort_of
from rayfed.rounds.evaluation import evaluate
from rayfed.rounds.own import Tuning, own_rows
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.weights import state_of, with_weights
from rayfed.tensors.wire import unpack


def with_held_out(setup, number):
    return replace(setup, job=replace(setup.job, clients=Participation(held_out=number)))


def rows_after(setup, last, tuning=None):
    return list(own_rows(setup, last, ThisProcess(setup), tuning))


def by_hand(setup, client, weights):
    """Accuracy, and accuracy weighted by the client's labels, of a model on all test images."""
    confusion = evaluate(
        setup, with_weights(setup.model, weights).eval(), 0, len(setup.federation.test)
    ).confusion
    p = setup.federation.label_counts(client) / setup.federation.num_examples(client)
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
def test_a_clients_own_model_is_its_memory_over_the_global_model(method, make_setup, play):
    setup = with_held_out(make_setup(method, norm=True), 2)
    *_, last = play(setup)
    rows = rows_after(setup, last)
    assert [row.client for row in rows] == list(range(setup.federation.num_clients))
    for row in rows:
        assert (row.accuracy, row.in_local) == by_hand(
            setup, row.client, own_by_hand(method, last, row.client)
        )
        assert row.num_examples == setup.federation.num_examples(row.client)
        assert row.tuned_accuracy is None
    if method not in (m.fedavg(), m.fedacg()):
        assert len({row.accuracy for row in rows}) > 1


def test_measuring_changes_nothing(make_setup, play):
    setup = make_setup(m.fedper())
    *_, last = play(setup)
    before = {name: w.clone() for name, w in last.weights.items()}
    initial = state_of(setup.model)
    first = rows_after(setup, last, Tuning(1))
    assert rows_after(setup, last, Tuning(1)) == first
    assert all(torch.equal(last.weights[name], w) for name, w in before.items())
    assert all(torch.equal(state_of(setup.model)[name], w) for name, w in initial.items())
    assert rows_after(setup, last) == [
        replace(row, tuned_accuracy=None, tuned_in_local=None) for row in first
    ]


def test_tuning_all_layers_for_a_long_time_learns_the_clients_labels(make_setup, play):
    setup = make_setup(m.fedavg(), num_rounds=1, lr=0.1)
    *_, last = play(setup)
    rows = rows_after(setup, last, Tuning(60))
    sure = [row for row in rows if row.num_examples > 1]
    assert np.mean([row.tuned_in_local for row in sure]) > np.mean([row.in_local for row in sure])


def test_tuning_the_head_leaves_the_body(make_setup, play, monkeypatch):
    from rayfed.rounds import own

    setup = make_setup(m.fedavg(), num_rounds=1)
    *_, last = play(setup)
    seen = []
    tuned = own._measured

    def spy(setup, model):
        seen.append({name: w.clone() for name, w in model.state_dict().items()})
        return tuned(setup, model)

    monkeypatch.setattr(own, "_measured", spy)
    rows_after(setup, last, Tuning(1, "head"))
    of_global, *after = seen
    heads = {name for name in of_global if name.startswith("head.")}
    assert len(after) == setup.federation.num_clients
    for state in after:
        assert all(
            torch.equal(state[name], w) == (name not in heads) for name, w in of_global.items()
        )


def test_a_model_without_a_head_is_refused(make_setup, play):
    setup = make_setup(m.fedavg(), num_rounds=1)
    *_, last = play(setup)
    headless = replace(setup, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4)))
    with pytest.raises(
        InputError, match=r"no module `head` that trains; give all .in Python layers"
    ):
        rows_after(headless, last, Tuning(1, "head"))


def test_held_out_clients_never_train_and_the_others_are_the_population(make_setup, play):
    setup = with_held_out(make_setup(m.scaffold(), num_rounds=30), 2)
    rounds = play(setup)
    trained = {row.client for round in rounds for row in round.clients}
    held_out = set(setup.held_out.tolist())
    assert len(held_out) == 2 and trained == set(range(6)) - held_out
    assert {row.client for row in rows_after(setup, rounds[-1]) if row.held_out} == held_out
    number, mean = setup.population
    assert (number, mean) == (
        4,
        np.mean([setup.federation.num_examples(client) for client in trained]),
    )
    other = replace(setup, job=replace(setup.job, seed=setup.job.seed + 1))
    assert cohort_of(setup, 1) == cohort_of(setup, 1)
    assert {*with_held_out(other, 2).held_out.tolist()} <= set(range(6))


def test_a_federation_without_an_average_is_each_client_alone(make_setup, play):
    """A client that is alone in its federation has the same bits: nothing of the others reaches
    it.
    """
    setup = make_setup(m.local(), clients_per_round=6, num_rounds=3)
    rounds = play(setup)
    assert all(torch.equal(rounds[-1].weights[name], w) for name, w in rounds[0].weights.items())
    counts = [[0, 0, 12, 1]]
    alone = play(make_setup(m.fedavg(), counts=counts, clients_per_round=1, num_rounds=3))
    with_local = play(make_setup(m.local(), counts=counts, clients_per_round=1, num_rounds=3))
    kept = unpack(with_local[-1].memories[0])["slots"]["local_model"]
    assert all(torch.equal(kept[name], w) for name, w in alone[-1].weights.items())


def test_macro_f1_and_calibration_are_known_of_evaluated_rounds(make_setup, play):
    setup = make_setup(m.fedavg(), num_rounds=2)
    *_, last = play(setup)
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
