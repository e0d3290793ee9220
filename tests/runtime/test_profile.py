"""A profile accounts for all of the time, and changes no result."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayfed.base.spans import Span, span, timed
from rayfed.methods import Part, compose, fedcsd, fedntd
from rayfed.runtime import profile as profiles
from rayfed.runtime.profile import ACTORS, DRIVER, IDLE, LOST, ON_THE_WAY, Measured, Profile, profiling

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

    profile = profiled(work)
    (phase,) = profile.phases
    assert {step for _, step in phase.seconds} == {"inmost", "inner", "outer"}
    assert 0.003 <= sum(accounted(profile, DRIVER)) <= phase.wall
    assert phase.seconds[DRIVER, "inmost"] >= 0.003


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


def test_a_call_counts_where_its_answer_arrives_with_the_idle_time_before(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(profiles, "time", SimpleNamespace(monotonic=lambda: clock.now))
    profile = Profile()

    def at(moment):
        clock.now = moment
        return profile

    at(1.0).came_up("actor-0")
    at(2.0).finished(0)
    at(5.0).finished(1)
    at(8.0).call("actor-0", 3.0, Measured(None, [Span("teacher", 2.0), Span("train", 2.5)], 4.75))
    at(9.0).call("actor-0", 8.5, None)
    at(9.0).finished(2)
    at(10.0).close()
    found = [{step: s for (who, step), s in phase.seconds.items() if who == ACTORS and s} for phase in profile.phases]
    assert found == [
        {},
        {},
        {"teacher": 2.0, "train": 2.5, ON_THE_WAY: 0.5, LOST: 0.5, IDLE: 2.5},  # idle from 1 to 3, and to 8.5
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
