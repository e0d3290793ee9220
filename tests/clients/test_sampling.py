"""The rules of `clients.sampling`: laws, cases by hand, and what is refused of a rule."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfed.base.errors import BrokenContract, InputError
from rayfed.base.seeds import Purpose, cohort, seed_of
from rayfed.clients.cohort import Circumstances, choice_at, cohort_at
from rayfed.clients.participation import Participation
from rayfed.clients.sampling import (
    Choice,
    Oort,
    PowerOfChoice,
    Rule,
    Seen,
    Size,
    Uniform,
    draw,
    read_sampling,
    refuse_choice,
    refuse_state,
    start,
)
from rayfed.clients.settings import Training
from rayfed.job import read_job

SIZES = np.array([5, 40, 1, 20, 20, 3, 80, 11])
HOURS = {"seconds_per_example": 0.1}


def generator(round=1, seed=0):
    return np.random.default_rng(seed_of(seed, Purpose.COHORT, round))


def choice(rule, number=3, *, round=1, there=range(8), seconds=None, state=None, seed=0):
    return Choice(
        round,
        number,
        np.array(there),
        SIZES,
        None if seconds is None else np.array(seconds, float),
        start(rule, 8) if state is None else state,
        generator(round, seed),
    )


def seen(round, losses, *, sizes=SIZES, seconds=None):
    """The clients with a loss, at every step the same."""
    clients = np.array(sorted(losses))
    loss = np.array([float(losses[client]) for client in clients.tolist()])
    time = None if seconds is None else np.array(seconds, float)
    return Seen(round, clients, sizes[clients], loss, loss**2, time)


def frequencies(choose, draws=4000):
    """How often each of eight clients is chosen, over many rounds."""
    count = np.zeros(8)
    for round in range(1, draws + 1):
        count[choose(round)] += 1
    return count / draws


# Laws.

all_choices = st.tuples(st.integers(0, 10**6), st.integers(1, 99), st.integers(0, 8))


@given(all_choices)
def test_uniform_is_the_cohort_of_the_seed(place):
    seed, round, number = place
    chosen = Uniform().choose(choice(Uniform(), number, round=round, seed=seed))
    assert chosen.tolist() == cohort(seed, round, 8, number)


@given(all_choices, st.integers(1, 50))
def test_size_with_equal_sizes_is_uniform(place, size):
    seed, round, number = place
    equal = replace(choice(Size(), number, round=round, seed=seed), sizes=np.full(8, size))
    assert Size().choose(equal).tolist() == cohort(seed, round, 8, number)


def test_size_chooses_by_size_and_without_replacement():
    once = frequencies(lambda round: Size().choose(choice(Size(), 1, round=round)))
    # A standard deviation is 0.008 at most.
    np.testing.assert_allclose(once, SIZES / SIZES.sum(), atol=0.03)
    four = frequencies(lambda round: Size().choose(choice(Size(), 4, round=round)), 300)
    assert four.sum() == pytest.approx(4) and four.max() <= 1
    assert not np.allclose(four, 0.5, atol=0.1), "uniform has a half each"


@given(all_choices, st.lists(st.sampled_from([0.1, 0.5, 2.0, 7.0]), min_size=8, max_size=8))
def test_power_of_choice_with_all_candidates_takes_the_largest_losses(place, losses):
    seed, round, number = place
    rule, losses = PowerOfChoice(candidates=8), np.array(losses)
    asking = choice(rule, number, round=round, seed=seed)
    asked = rule.ask(asking)
    assert asked.tolist() == list(range(8))
    chosen = rule.choose(replace(asking, asked=asked, losses=losses[asked]))
    others = np.delete(losses, chosen)
    assert len(set(chosen.tolist())) == number
    assert not number or number == 8 or losses[chosen].min() >= others.max()


def test_power_of_choice_with_as_many_candidates_as_places_is_sampling_by_size():
    """The losses do not matter then."""
    for round in range(1, 20):
        rule = PowerOfChoice(candidates=3)
        asking = choice(rule, round=round)
        asked = rule.ask(asking)
        chosen = rule.choose(replace(asking, asked=asked, losses=np.arange(3.0)))
        assert sorted(chosen.tolist()) == Size().choose(choice(Size(), round=round)).tolist()


def test_power_of_choice_by_last_losses_takes_new_clients_first_then_the_largest():
    rule = PowerOfChoice(candidates=8, estimate="last")
    assert rule.ask(choice(rule)).tolist() == [] and not rule.asks and rule.learns
    state = rule.learn(start(rule, 8), seen(1, {0: 1, 1: 9, 2: 3, 3: 2, 4: 5}))
    chosen = rule.choose(choice(rule, 5, state=state))
    assert set(chosen.tolist()) == {5, 6, 7, 1, 4}
    state = rule.learn(state, seen(2, {5: 0.5, 6: 4, 7: 1, 1: 0.1}))
    assert set(rule.choose(choice(rule, 3, state=state)).tolist()) == {4, 6, 2}


def test_equal_losses_are_taken_in_the_order_of_the_seed():
    rule = PowerOfChoice(candidates=8)
    asked, equal = np.arange(8), np.zeros(8)

    def choose(round):
        return rule.choose(replace(choice(rule, 2, round=round), asked=asked, losses=equal))

    np.testing.assert_allclose(frequencies(choose, 2000), 0.25, atol=0.05)


@given(all_choices)
def test_oort_without_utility_is_uniform(place):
    """Where nobody has trained, and speed does not count, it explores with equal chances."""
    seed, round, number = place
    rule = Oort(penalty=0.0)
    seconds = np.arange(1.0, 9.0)
    chosen = rule.choose(choice(rule, number, round=round, seed=seed, seconds=seconds))
    assert chosen.tolist() == cohort(seed, round, 8, number)


def test_oort_with_equal_utilities_is_uniform():
    """Where all have trained in the same round, it exploits with equal chances."""
    rule = Oort(exploration=0.0, least=0.0, penalty=0.0)
    equal = np.full(8, 10)
    state = rule.learn(start(rule, 8), seen(1, dict.fromkeys(range(8), 2.0), sizes=equal))
    for round in range(2, 30):
        chosen = rule.choose(choice(rule, 3, round=round, state=state))
        assert chosen.tolist() == cohort(0, round, 8, 3)


def test_oort_prefers_large_losses_and_many_examples():
    rule = Oort(exploration=0.0, least=0.0, penalty=0.0, cut_off=1.0, clip=1.0)
    state = rule.learn(start(rule, 8), seen(1, dict.fromkeys(range(8), 2.0)))
    # The utility is by size now: 80, 40, 20, 20.
    assert set(rule.choose(choice(rule, 2, round=2, state=state)).tolist()) == {6, 1}
    state = rule.learn(state, seen(1, {6: 0.01, 2: 400.0}))
    assert set(rule.choose(choice(rule, 2, round=2, state=state)).tolist()) == {2, 1}


def test_oort_by_hand():
    """Round 5; clients 0, 1, 3 have trained, with utilities of 10, 80 and 40."""
    rule = Oort(penalty=2.0, quantile=0.5, clip=0.5)
    state = rule.learn(start(rule, 8), seen(2, {0: 2.0, 1: 2.0}, seconds=[1.0, 8.0]))
    state = rule.learn(state, seen(4, {3: 2.0}, seconds=[2.0]))
    of = choice(rule, round=5, there=[0, 1, 3, 5], seconds=[9, 9, 9, 16], state=state)
    # Clipped to the median, 40; the lowest is 10.
    low, spread = 9.99, 80 - 9.99
    age = np.sqrt(0.1 * math.log(5) / np.array([2, 2, 4]))
    scores = rule._scores(of, np.array([0, 1, 3]))
    np.testing.assert_allclose(scores, (np.array([10, 40, 40]) - low) / spread + age, rtol=1e-12)
    # The durations 1, 8, 2 were seen, and that of client 5 is known of its device: T is 8.
    has_trained = np.array([True, True, True, False])
    np.testing.assert_allclose(rule._slowness(of, has_trained), [1, 1, 1, 0.25])
    faster = replace(rule, quantile=0.25)
    of = replace(of, state={**state, "quantile": np.array(0.25)})
    np.testing.assert_allclose(faster._slowness(of, has_trained), [1, 1 / 16, 1, 1 / 64])


def test_oort_explores_less_from_round_to_round_and_then_not_at_all():
    rule = Oort(exploration=0.5, decay=0.5, least=0.0, penalty=0.0)
    state = rule.learn(start(rule, 8), seen(1, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}))
    new = [
        sum(client >= 4 for client in rule.choose(choice(rule, 4, round=round, state=state)))
        for round in (1, 2, 3, 9)
    ]
    # The share of 4 is rounded up.
    assert new == [2, 1, 1, 1]
    everyone = rule.learn(state, seen(2, dict.fromkeys(range(4, 8), 1.0)))
    assert len(rule.choose(choice(rule, 4, round=3, state=everyone))) == 4
    few = choice(rule, 4, round=9, state=state, there=[0, 4, 5, 6])
    assert sorted(rule.choose(few).tolist()) == [0, 4, 5, 6], "new ones fill the places"


def test_oorts_pacer_admits_slower_clients_when_the_utility_falls():
    rule = Oort(window=2, quantile=0.25, pace=0.5)
    state = start(rule, 8)
    quantiles = []
    for round, loss in enumerate([3, 3, 2, 2, 1, 1, 5, 5], start=1):
        state = rule.learn(state, seen(round, {0: loss}))
        quantiles.append(float(state["quantile"]))
    # It falls in rounds 4 and 6, grows in round 8; 1 is the most.
    assert quantiles == [0.25, 0.25, 0.25, 0.75, 0.75, 1.0, 1.0, 1.0]
    assert state["gained"].tolist() == [5, 5, 25, 25]


@pytest.mark.parametrize(
    "rule",
    [Uniform(), Size(), PowerOfChoice(4), PowerOfChoice(6, "last"), Oort()],
    ids=lambda rule: type(rule).__name__,
)
@given(all_choices)
def test_every_rule_chooses_as_many_different_clients_as_it_should(rule, place):
    seed, round, number = place
    number, there = min(number, 4), [0, 1, 3, 4, 6]
    state = rule.learn(start(rule, 8), seen(1, {1: 2.0, 6: 0.5}, seconds=[1.0, 2.0]))
    of = choice(
        rule, number, round=round, seed=seed, there=there, seconds=[5, 4, 3, 2, 1], state=state
    )
    asked = refuse_choice(rule, of, rule.ask(of), "ask")
    assert rule.asks == bool(len(asked))
    of = replace(of, asked=asked, losses=np.arange(float(len(asked))))
    assert len(refuse_choice(rule, of, rule.choose(of), "choose")) == number
    assert refuse_state(rule, state, "learn") == state


def test_weights_of_zero_are_drawn_last():
    weights = np.array([0.0, 0.0, 1.0, 3.0])
    for round in range(30):
        assert {2, 3} <= {*draw(generator(round), np.arange(4), 3, weights).tolist()}


# In a round.


def circumstances(sampling, round=1, k=3, sizes=SIZES, **clients):
    settings = Participation(sampling=sampling, **clients)
    return Circumstances(round, 0, settings, Training(clients_per_round=k), None, sizes, 1000)


def test_a_rule_sees_those_that_are_there_and_their_virtual_seconds():
    of = circumstances(Oort(), available=0.5, seconds_per_example=0.5, bytes_per_second=100.0)
    found = choice_at(of, {})
    without = choice_at(circumstances(Uniform(), available=0.5, **HOURS), {})
    assert found.there.tolist() == without.there.tolist()
    assert 0 < len(found.there) < 8 and without.seconds is None
    np.testing.assert_allclose(found.seconds, SIZES[found.there] * 0.5 + 20)


def test_the_answers_of_those_that_were_chosen_are_drawn_as_for_uniform():
    """Equal sizes draw the same clients, and they drop out and are late in the same way."""
    equal = np.full(8, 10)
    clients = {"dropout": 0.3, "oversample": 1.5, "spread": 1.0, **HOURS}
    for round in range(1, 10):
        uniform = circumstances(Uniform(), round, sizes=equal, **clients)
        by_size = circumstances(Size(), round, sizes=equal, **clients)
        of_uniform, of_size = choice_at(uniform, {}), choice_at(by_size, {})
        assert cohort_at(by_size, of_size) == cohort_at(uniform, of_uniform)


# What is refused.


@dataclass(frozen=True)
class Gives(Rule):
    """Gives what it is made with."""

    what: str = ""

    def choose(self, choice):
        return eval(self.what)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("[0, 1]", r"choose gives 2 clients; give choice\.number, which is 3$"),
        ("[0, 1, 1]", "choose gives client 1 twice; give each client once$"),
        ("[0, 1, 9]", r"choose gives client 9, which is not in choice\.there$"),
        ("[0.0, 1.0, 2.0]", r"gives \[0\.0, 1\.0, 2\.0\]; give the numbers of clients"),
        ("None", "gives None; give the numbers of clients, as an array$"),
        ("[[0, 1], [2]]", "give the numbers of clients, as an array$"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_refused(what, message):
    rule = Gives(what)
    with pytest.raises(BrokenContract, match=r"^clients\.sampling = '.*:Gives', round 1: .*"):
        refuse_choice(rule, choice(rule), rule.choose(choice(rule)), "choose")
    with pytest.raises(BrokenContract, match=message):
        refuse_choice(rule, choice(rule), rule.choose(choice(rule)), "choose")


@pytest.mark.parametrize("state", [None, {"a": "text"}, {1: np.zeros(2)}, {"a": np.float32(1)}])
def test_a_state_that_no_checkpoint_can_hold_is_refused(state):
    with pytest.raises(BrokenContract, match="arrays of "):
        refuse_state(Gives(), state, "learn")
    assert refuse_state(Gives(), {"a": 1.5, "b": [True]}, "learn")["a"].dtype == np.float64


def test_a_job_names_a_rule_with_or_without_values():
    assert read_job({"name": "n"}).clients.sampling == Uniform()
    tables = {"name": "n", "clients": {"sampling": "size"}}
    assert read_job(tables).clients.sampling == Size()
    choice = {"clients.sampling": "power_of_choice", "clients.sampling.candidates": 9}
    job = read_job(tables, choice)
    assert job.clients.sampling == PowerOfChoice(candidates=9)
    assert read_job(job.table()) == job
    assert read_sampling({"decay": 1.0, "name": "oort"}) == Oort(decay=1.0)


def test_the_usual_rule_does_not_change_the_hash_of_a_job():
    job = read_job({"name": "n"})
    assert "sampling" not in job.lineage()["clients"]
    assert replace(job, clients=Participation(sampling=Size())).hash() != job.hash()


def test_a_class_that_is_no_rule_is_refused():
    for name in ("rayfed.clients.sampling:Choice", "rayfed.clients.sampling:Rule"):
        with pytest.raises(InputError, match="it must be a frozen dataclass that derives from"):
            read_sampling(name)
