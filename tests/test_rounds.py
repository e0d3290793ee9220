"""The round engine: cohorts, order, what a round reports, what it refuses."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfed import metrics
from rayfed.local import Diverged, RunFailed
from rayfed.methods import Part, Proximal, compose, fedavg, fedcsd, fedntd, moon, switch
from rayfed.rounds import play as play_round
from rayfed.rounds import rounds, start
from rayfed.runtime.here import Here, chunks
from rayfed.seeds import Purpose, cohort, seed_of
from rayfed.weights import state_of
from rayfed.wire import unpack

# Cohorts and seeds.


@given(st.integers(0, 10**6), st.integers(1, 500), st.data())
def test_a_cohort_is_drawn_without_replacement_and_sorted(seed, num_clients, data):
    size = data.draw(st.integers(1, num_clients))
    clients = cohort(seed, 1, num_clients, size)
    assert clients == sorted(set(clients))
    assert len(clients) == size
    assert set(clients) <= set(range(num_clients))
    assert clients == cohort(seed, 1, num_clients, size)
    assert all(type(client) is int for client in clients)


def test_every_client_has_the_same_chance():
    drawn = np.bincount([client for round in range(2000) for client in cohort(0, round, 10, 3)], minlength=10)
    assert drawn.sum() == 6000
    assert (np.abs(drawn - 600) < 5 * np.sqrt(600 * 0.7)).all()


def test_cohorts_change_with_seed_and_round():
    assert len({tuple(cohort(seed, round, 100, 10)) for seed in range(5) for round in range(5)}) == 25


def test_a_cohort_of_many_costs_no_list_of_all():
    assert len(cohort(0, 1, 10**15, 10)) == 10


@given(st.tuples(*[st.integers(0, 2**40)] * 3), st.tuples(*[st.integers(0, 2**40)] * 3))
def test_seeds_are_as_different_as_their_places(one, other):
    a, b = (seed_of(seed, Purpose.CLIENT, round, client) for seed, round, client in (one, other))
    assert (a == b) == (one == other)
    assert 0 <= a < 2**63
    assert a != seed_of(one[0], Purpose.COHORT, *one[1:])


# A run.


def test_the_cohort_is_a_function_of_the_job_alone(make_site, play):
    runs = [
        play(make_site(method, **setting)) for method, setting in ((fedavg(), {}), (moon(), {"lr": 0.01, "norm": True}))
    ]
    for run in runs:
        assert [[row.client for row in round.clients] for round in run] == [
            [],
            *(cohort(0, round, 6, 4) for round in (1, 2, 3)),
        ]
    other = play(make_site(fedavg(), seed=1))
    assert [[row.client for row in round.clients] for round in other[1:]] == [cohort(1, r, 6, 4) for r in (1, 2, 3)]


def test_round_0_is_the_initial_model_evaluated(make_site, play):
    site = make_site(fedavg(), norm=True)
    expected = state_of(site.model)
    first = play(site)[0]
    assert (first.round, first.clients, first.bytes_down, first.bytes_up, first.forgetting) == (0, (), 0, 0, 0.0)
    assert all(torch.equal(first.weights[name], tensor) for name, tensor in expected.items())
    assert np.isnan(first.peak).all()


def test_rounds_go_on_to_the_target_and_no_further(make_site, play, bits):
    three = play(make_site(fedavg()))
    assert [round.round for round in three] == [0, 1, 2, 3]
    site = make_site(fedavg(), num_rounds=4)
    more = [*rounds(site, three[-1], Here(site))]
    assert bits(more[-1]) == bits(play(make_site(fedavg(), num_rounds=4))[-1])
    assert [*rounds(make_site(fedavg()), more[-1], None)] == []


def test_a_round_is_played_only_when_it_is_asked_for(make_site):
    site = make_site(fedavg())
    rounds(site, start(site, state_of(site.model), Here(site)), None)  # without workers, it could not


def test_evaluation_is_that_of_the_rounds_weights(make_site, play):
    site = make_site(fedntd(), norm=True)
    test, run = site.federation.test, play(make_site(fedntd(), norm=True))
    for round in run:
        site.model.load_state_dict(round.weights)
        std = torch.tensor(site.federation.std).view(1, -1, 1, 1)
        mean = torch.tensor(site.federation.mean).view(1, -1, 1, 1)
        images, labels = (torch.from_numpy(test.images).float() / 255 - mean) / std, torch.from_numpy(test.labels)
        with torch.no_grad():
            logits = site.model.eval()(images)
        assert round.test_accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())
        assert round.test_loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)
        assert round.evaluation.confusion.sum() == len(labels)
    history = np.array([round.class_accuracy for round in run[1:]])
    np.testing.assert_array_equal(run[-1].peak, history.max(axis=0))
    assert run[-1].forgetting == pytest.approx(metrics.forgetting(history))


@given(st.integers(1, 5000))
def test_chunks_cover_a_test_set_once(num_examples):
    assert [i for start, stop in chunks(num_examples) for i in range(start, stop)] == list(range(num_examples))


def test_bytes_are_those_of_the_weights_for_each_client(make_site, play):
    size = sum(tensor.nbytes for tensor in state_of(make_site(fedavg(), norm=True).model).values())
    for method in (fedavg(), fedntd()):
        for round in play(make_site(method, norm=True))[1:]:
            assert (round.bytes_down, round.bytes_up) == (4 * size, 4 * size)
    for round in play(make_site(fedcsd(), norm=True))[1:]:  # the teacher, 4 x 4 prototypes; their sums and counts
        assert round.bytes_down >= 4 * (2 * size + 4 * 4 * 4)
        assert round.bytes_up == 4 * (size + 4 * 4 * 8 + 4 * 8)


def test_rows_tell_who_trained_where_on_how_much(make_site, play):
    site = make_site(fedavg())
    for round in play(make_site(fedavg()))[1:]:
        for row in round.clients:
            assert row.num_examples == site.federation.num_examples(row.client)
            assert row.train_loss > 0
            assert row.seconds >= 0
            assert row.node


# Memory, and what is refused.


@dataclass(frozen=True)
class Diary(Part):
    """A client remembers its rounds; every second client forgets."""

    def report(self, client, local, fit):
        rounds = [*(client.memory["rounds"] if client.memory else []), client.round]
        return {"clients": 1, "past": len(rounds) - 1}, {"id": client.id, "rounds": rounds} if client.id % 2 else None

    def update(self, state, total, step):
        return [*(state or []), (total["clients"], total["past"])], step


def test_memory_is_kept_for_each_client_while_others_train(make_site, play):
    run = play(make_site(compose(Diary()), num_rounds=5, clients_per_round=3))
    cohorts = [cohort(0, round, 6, 3) for round in range(1, 6)]
    for round in run:
        seen = {c: [r + 1 for r, clients in enumerate(cohorts[: round.round]) if c in clients] for c in (1, 3, 5)}
        kept = {client: unpack(memory)["slots"]["diary"] for client, memory in round.memories.items()}
        assert kept == {c: {"id": c, "rounds": r} for c, r in seen.items() if r}
    past = [sum(c in earlier for c in clients if c % 2 for earlier in cohorts[:r]) for r, clients in enumerate(cohorts)]
    assert run[-1].held["diary"].state == [(3, count) for count in past]
    assert sum(past) > 0


def test_a_part_that_comes_back_remembers_nothing_and_one_that_stays_does(make_site, play):
    def kept(method):
        run = play(make_site(method, num_rounds=4, clients_per_round=6))
        return [1 in round.memories and unpack(round.memories[1])["slots"]["diary"]["rounds"] for round in run[1:]]

    diary, plain = compose(Diary()), fedavg()
    assert kept(switch(diary, compose(Diary(), Proximal()), at=3)) == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert kept(switch(switch(diary, plain, at=2), diary, at=3)) == [[1], False, [3], [3, 4]]


@dataclass(frozen=True)
class Spoiler(Part):
    """One client's summand is not like the others'."""

    client: int
    value: str = "nan"

    def report(self, client, local, fit):
        spoilt = {
            "nan": {"x": [torch.tensor([1.0, float("nan")])]},
            "inf": {"x": [float("inf")]},
            "more": {"y": 1},
            "shape": {"x": [torch.zeros(3)]},
            "dtype": {"x": [torch.zeros(2, dtype=torch.int64)]},
            "nothing": None,
        }
        return spoilt[self.value] if client.id == self.client else {"x": [torch.zeros(2)]}, None


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_update_with_a_nan_or_an_infinity_is_refused_before_it_is_averaged(value, make_site, play):
    last = cohort(0, 1, 6, 4)[-1]
    with pytest.raises(
        RuntimeError, match=rf"client {last}, round 1: .*NaN or an infinity at spoiler\.x\.0; nothing was averaged"
    ):
        play(make_site(compose(Spoiler(last, value))))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("more", r"spoiler holds \['y'\], not \['x'\]"),
        ("shape", r"spoiler\.x\.0 is float32 \(3,\), not float32 \(2,\)"),
        ("dtype", r"spoiler\.x\.0 is int64 \(2,\), not float32 \(2,\)"),
        ("nothing", r"the value holds \['average'.*\], not \['average'.*'spoiler'\]"),
    ],
)
def test_an_update_that_is_not_like_the_others_is_refused_before_it_is_averaged(value, where, make_site, play):
    last = cohort(0, 1, 6, 4)[-1]
    with pytest.raises(RunFailed, match=rf"client {last}, round 1: .*{where}; nothing was averaged"):
        play(make_site(compose(Spoiler(last, value))))


@dataclass(frozen=True)
class Forgetful(Part):
    """Loses a tensor of the average."""

    def update(self, state, total, step):
        return state, replace(step, proposed=dict(list(step.averaged.items())[1:]))


def test_an_average_that_does_not_fit_the_model_is_refused(make_site, play):
    with pytest.raises(RunFailed, match=r"round 1: the average does not fit the model: the value holds \['"):
        play(make_site(compose(Forgetful())))


def test_a_loss_that_diverges_ends_the_run_and_the_rounds_before_stand(make_site, bits):
    site = make_site(fedavg(), norm=False, lr=0.1)
    first = start(site, state_of(site.model), Here(site))
    before = bits(first)
    wild = replace(site, training=replace(site.training, lr=1e30))
    with pytest.raises(Diverged, match=rf"client {cohort(0, 1, 6, 4)[0]}, round 1, batch 2"):
        play_round(wild, first, Here(wild))
    assert bits(first) == before
