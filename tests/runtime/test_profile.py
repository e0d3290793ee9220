"""A profile accounts for all of the time, and changes no result."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfed.base import spans as profiles
from rayfed.base.spans import (
    ACTORS,
    DRIVER,
    IDLE,
    LOST,
    ON_THE_WAY,
    Measured,
    Profile,
    Span,
    profiling,
    span,
    timed,
)
from rayfed.methods import Part, compose, fedcsd, fedntd

SLACK = 1e-6  # seconds, of sums of floats


@dataclass(frozen=True)
class Dies(Part):
    """Kills its process at client 1 in round 2, once."""

    mark: str

    def begin(self, client):
        if (client.id, client.round) == (1, 2) and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def profiled(work):
    """Call something with a profile; gives the profile."""
    with profiling() as profile:
        work(profile)
    return profile


def accounted(profile, who):
    return [sum(seconds for (found, _), seconds in phase.seconds.items() if found == who) for phase in profile.phases]


def test_without_a_profile_nothing_is_measured():
    assert span("train") is span("teacher")
    assert profiles.profile() is None


def test_own_seconds_of_nested_spans_add_up():
    @timed("inner")
    def fails():
        raise KeyError

    def work(profile):
        with span("outer"):
            for _ in range(3):
                with span("inner"), span("inmost"):
                    time.sleep(0.001)
            with pytest.raises(KeyError):
                fails()

    added = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Profile, "add", lambda self, span, add=Profile.add: added.append(span) or add(self, span))
        profile = profiled(work)
    assert [one.step for one in added] == [*["inmost", "inner"] * 3, "inner", "outer"]
    assert sum(accounted(profile, DRIVER)) == pytest.approx(added[-1].seconds, abs=SLACK)
    assert profile.phases[0].seconds[DRIVER, "inmost"] >= 0.003


def test_a_thousand_rounds_are_four_phases():
    def work(profile):
        for round in range(1000):
            with span("server"):
                pass
            profile.finished(round)

    profile = profiled(work)
    assert [phase.rounds for phase in profile.phases] == [[], [1, 1], [2, 999], []]
    assert sum(phase.wall for phase in profile.phases) <= time.monotonic() - profile.began
    assert 0 < accounted(profile, DRIVER)[2] <= profile.phases[2].wall


@given(ahead=st.floats(-1e9, 1e9))
def test_an_actors_spans_lie_in_their_call_whatever_its_clock_says(ahead):
    """Placed outside of it, they would count in another phase, or not at all."""
    with profiling() as profile:
        since = time.monotonic()
        time.sleep(0.001)
        start = since + ahead  # on the actor's monotonic clock
        spans = [Span("teacher", start + 2e-4, 1e-4, 1e-4), Span("train", start + 1e-4, 4e-4, 3e-4)]
        profile.call("actor-0", since, Measured(None, spans, start, start + 6e-4))
    found = profile.phases[0].seconds
    assert found[ACTORS, "train"] == pytest.approx(3e-4, abs=1e-5)
    assert found[ACTORS, "teacher"] == pytest.approx(1e-4, abs=1e-5)


def test_a_call_counts_in_each_phase_in_which_it_ran(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(profiles, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now))
    profile = Profile()

    def at(moment):
        clock.now = moment
        return profile

    at(1.0).came_up("actor-0")
    at(2.0).finished(0)
    at(5.0).finished(1)
    spans = [Span("teacher", 104.0, 2.0, 2.0), Span("train", 103.5, 4.0, 2.0)]
    at(8.0).call("actor-0", 3.0, Measured(None, spans, 103.0, 107.6))
    at(9.0).call("actor-0", 8.5, None)
    at(9.0).finished(2)
    at(10.0).close()
    found = [{step: s for (who, step), s in phase.seconds.items() if who == ACTORS and s} for phase in profile.phases]
    assert found == [
        {IDLE: 1.0},  # from 1 to 2
        {IDLE: 1.0, ON_THE_WAY: 0.5, "train": 0.5, "teacher": 1.0},  # to 5
        {"teacher": 1.0, "train": 1.5, ON_THE_WAY: 0.5, LOST: 0.5, IDLE: 0.5},  # to 9
        {IDLE: 1.0},
    ]
    assert profile.idle == {"actor-0": 3.5}


@pytest.mark.parametrize("method", [fedntd(), fedcsd()])
def test_a_profile_changes_no_bit(make_site, play, bits, method):
    played = []
    profile = profiled(lambda profile: played.extend(play(make_site(method))))
    assert [*map(bits, played)] == [*map(bits, play(make_site(method)))]
    steps = {step for phase in profile.phases for _, step in phase.seconds}
    assert {"train", "teacher", "evaluate", "wire", "fold", "server"} <= steps
    assert ("survey" in steps) == (method == fedcsd())
    assert {who for who, _ in profile.phases[0].seconds} == {DRIVER}


@pytest.mark.slow
def test_actors_send_their_spans_and_a_lost_call_is_shown(cluster, make_site, here, on_ray, tmp_path):
    site, played = make_site(compose(fedntd(), Dies(str(tmp_path / "mark"))), clients_per_round=6), []
    profile = profiled(lambda profile: played.extend(on_ray(site, 2)))
    Path(tmp_path / "mark").touch()
    assert played == here(site)
    (phase,) = profile.phases
    steps = {step: seconds for (who, step), seconds in phase.seconds.items() if who == ACTORS}
    assert {"train", "teacher", "evaluate", "wire", "fold", ON_THE_WAY, LOST, IDLE} == set(steps)
    assert min(steps.values()) >= 0
    assert sum(profile.idle.values()) == pytest.approx(steps[IDLE], abs=SLACK)
