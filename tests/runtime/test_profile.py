"""A profile accounts for all of the time, changes no result, and leaves a trace that can be read at any moment."""

import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfed.methods import Part, compose, fedcsd, fedntd
from rayfed.runtime import profile as profiles
from rayfed.runtime import timeline
from rayfed.runtime.here import Here
from rayfed.runtime.profile import (
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

SLACK = 1e-6  # seconds, of sums of floats


@dataclass(frozen=True)
class Dies(Part):
    """Kills its process at client 1 in round 2, once."""

    mark: str

    def begin(self, client):
        if (client.id, client.round) == (1, 2) and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def profiled(tmp_path):
    """Call something with a profile: gives the profile, and the trace's events."""

    def profiled(work):
        with profiling() as profile:
            profile.write_to(tmp_path)
            work(profile)
        return profile, json.loads(profile.timeline.path.read_text())

    return profiled


def accounted(profile, who):
    return [sum(seconds for (found, _), seconds in phase.seconds.items() if found == who) for phase in profile.phases]


def complete(events, row=None):
    """The spans among the events, by name; of a single row, if it is given."""
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [event for event in events if event["ph"] == "X" and row in (None, rows[event["tid"]])]


def covered(events):
    """Seconds of the spans that lie in no other. Asserts that two spans of a row are apart or within one another."""
    total, ends = 0.0, []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while ends and ends[-1] <= start + 0.01:
            ends.pop()
        assert not ends or end <= ends[-1] + 0.01, f"{event} is half in another span"
        total += 0 if ends else event["dur"]
        ends.append(end)
    return total / 1e6


def test_without_a_profile_nothing_is_measured():
    assert span("train") is span("teacher")
    assert profiles.profile() is None


def test_own_seconds_of_nested_spans_add_up(profiled):
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

    profile, events = profiled(work)
    named = {event["name"]: event["dur"] / 1e6 for event in complete(events)}
    assert len(complete(events)) == 1 + 4 + 3
    assert sum(accounted(profile, DRIVER)) == pytest.approx(named["outer"], abs=SLACK)
    assert profile.phases[0].seconds[DRIVER, "inmost"] >= 0.003


def test_a_thousand_rounds_are_four_phases_and_no_lines_in_memory(profiled):
    def work(profile):
        for round in range(1000):
            with span("server"):
                pass
            profile.finished(round)
            assert not profile.timeline._lines

    profile, events = profiled(work)
    assert [phase.rounds for phase in profile.phases] == [[], [1, 1], [2, 999], []]
    assert sum(phase.wall for phase in profile.phases) <= time.monotonic() - profile.began
    assert len(complete(events)) == 1000
    assert accounted(profile, DRIVER)[2] == pytest.approx(
        sum(event["dur"] for event in complete(events)[2:]) / 1e6, abs=1e-3
    )


def test_the_trace_of_a_killed_run_lacks_only_its_bracket(profiled):
    def work(profile):
        for round in range(3):
            with span("server", 'of "this"\nround'):
                pass
            profile.finished(round)
            assert len(complete(json.loads(profile.timeline.path.read_text() + "]"))) == round + 1

    profiled(work)


def test_a_long_trace_ends_and_the_table_goes_on(profiled, monkeypatch):
    monkeypatch.setattr(timeline, "MOST", 10)

    def work(profile):
        for _ in range(20):
            with span("server"):
                time.sleep(0.0001)

    profile, events = profiled(work)
    assert len(events) == 1 + 10
    assert sum(accounted(profile, DRIVER)) >= 0.002


def test_a_trace_that_cannot_be_written_ends_and_the_run_goes_on(profiled, tmp_path, caplog):
    def work(profile):
        profile.timeline.path = tmp_path / "nowhere" / "profile.json"
        with span("server"):
            pass
        profile.finished(0)
        profile.timeline.path = tmp_path / "profile.json"

    profile, _ = profiled(work)
    assert "the trace ends here" in caplog.text
    assert len(profile.phases) == 2


@given(ahead=st.floats(-1e9, 1e9), offset=st.floats(-1e9, 1e9))
def test_an_actors_spans_lie_in_their_call_whatever_its_clocks_say(ahead, offset):
    with profiling() as profile:
        since = time.monotonic()
        time.sleep(0.001)
        start = since + ahead  # on the actor's monotonic clock
        spans = [Span("teacher", "", start + 2e-4, 1e-4, 1e-4), Span("train", "", start + 1e-4, 4e-4, 3e-4)]
        profile.call("actor-0", "client 1", since, Measured(None, spans, start, start + 6e-4, offset))
        lines = [json.loads(line) for line in profile.timeline._lines]
    call, teacher, train = complete(lines)
    for inner, outer in ((teacher, train), (train, call)):
        assert outer["ts"] - 1 <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1


def test_a_call_counts_in_each_phase_in_which_it_ran(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(profiles, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now))
    profile = Profile()

    def at(moment):
        clock.now = moment
        return profile

    at(1.0).came_up("actor-0", 0.5, opened=True)
    at(2.0).finished(0)
    at(5.0).finished(1)
    spans = [Span("teacher", "", 4.0, 2.0, 2.0), Span("train", "", 3.5, 4.0, 2.0)]
    at(8.0).call("actor-0", "client 1", 3.0, Measured(None, spans, 3.2, 7.8, 0.0))
    at(9.0).call("actor-0", "client 2", 8.5, None)
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
def test_a_profile_changes_no_bit_and_shows_each_clients_training(profiled, make_site, play, bits, method):
    played = []
    profile, events = profiled(lambda profile: played.extend(play(make_site(method))))
    assert [*map(bits, played)] == [*map(bits, play(make_site(method)))]
    trained = Counter(event["name"] for event in complete(events) if event["cat"] == "train")
    assert trained == Counter(f"train client {row.client}, round {r.round}" for r in played for row in r.clients)
    steps = {event["cat"] for event in complete(events)}
    assert {"teacher", "evaluate", "wire", "fold", "server"} <= steps
    assert ("survey" in steps) == (method == fedcsd())
    assert accounted(profile, DRIVER)[0] == pytest.approx(covered(complete(events)), abs=1e-4)


@pytest.mark.slow
def test_actors_send_their_spans_and_a_lost_call_is_shown(profiled, cluster, make_site, here, on_ray, tmp_path):
    site, played = make_site(compose(fedntd(), Dies(str(tmp_path / "mark"))), clients_per_round=6), []
    profile, events = profiled(lambda profile: played.extend(on_ray(site, 2)))
    Path(tmp_path / "mark").touch()
    assert played == here(site)
    (phase,) = profile.phases
    steps = {step: seconds for (who, step), seconds in phase.seconds.items() if who == ACTORS}
    assert {"train", "teacher", "evaluate", "wire", "fold", ON_THE_WAY, LOST, IDLE} == set(steps)
    assert min(steps.values()) >= 0
    assert sum(profile.idle.values()) == pytest.approx(steps[IDLE], abs=SLACK)
    for actor in ("actor-0", "actor-1"):
        spans = complete(events, actor)
        assert covered(spans) <= phase.wall
        assert {"open the run", "come up"} < {event["name"] for event in spans}
    lost = [event["name"] for event in complete(events) if event["cat"] == LOST]
    assert any(name.startswith("lost: ") and "1" in name and "round 2" in name for name in lost)
    trained = [event["name"] for event in complete(events) if event["cat"] == "train"]
    assert {f"train client {client}, round {round}" for client in range(6) for round in (1, 2, 3)} == {*trained}


def test_here_is_the_driver(profiled, make_site, play):
    site = make_site(fedntd())
    _, events = profiled(lambda profile: play(site, Here(site)))
    assert complete(events) == complete(events, DRIVER)
