"""The gauges of a run, which can do a run no harm. test_monitoring.py tests what Prometheus
reads.
"""

import logging
import time
from dataclasses import replace

import pytest

from rayfed.measures.forgetting import dropped
from rayfed.methods import fedavg
from rayfed.runtime import gauges
from rayfed.runtime.gauges import SERIES, Gauges


class Noted:
    """Stands for Ray's gauge, whose values only the cluster can see."""

    values: dict

    def __init__(self, name, description, tag_keys):
        assert description and tag_keys == ("run",)
        self._name = name

    def set_default_tags(self, tags):
        self._run = tags["run"]
        return self

    def set(self, value):
        # Ray takes no number of numpy's.
        assert type(value) is float
        self.values.setdefault(self._run, {})[self._name] = value


class Broken(Noted):
    def set(self, value):
        raise RuntimeError("no agent")


@pytest.fixture
def shown(monkeypatch):
    """run -> series -> the last value that was set."""
    monkeypatch.setattr(Noted, "values", {}, raising=False)
    monkeypatch.setattr(gauges, "Gauge", Noted)
    monkeypatch.setattr(gauges, "REFRESH", 0.01)
    return Noted.values


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("the condition was not met in ten seconds")


def test_every_series_is_shown_with_the_values_of_the_run(shown, make_setup, play):
    run = Gauges("a/run", num_rounds=8)
    # The last of these is not evaluated.
    finished = play(make_setup(fedavg(), num_rounds=6, eval_every=2))[:6]
    finished[-1] = replace(finished[-1], notes={"clients.late": 2.0, "clients.dropped": 1.0})
    for round in finished:
        run.round(round, 100 * round.round, idle=round.round / 10)
    run.clients(3, 4)
    run.retried()
    run.retried()
    run.close()
    *_, last, newest = finished
    since = shown["a/run"].pop("rayfed_seconds_since_client")
    assert since >= 0
    assert shown == {
        "a/run": {
            "rayfed_round": 5,
            "rayfed_rounds": 8,
            "rayfed_seconds_left": pytest.approx(
                3 * sum(round.seconds for round in finished[1:]) / 5
            ),
            "rayfed_images_per_second": 500 / newest.seconds,
            "rayfed_test_accuracy": last.test_accuracy,
            "rayfed_test_loss": last.test_loss,
            "rayfed_forgetting": last.forgetting,
            "rayfed_forgetting_round": dropped(finished[2].class_accuracy, last.class_accuracy),
            "rayfed_round_seconds": newest.seconds,
            "rayfed_bytes_down": sum(round.bytes_down for round in finished),
            "rayfed_bytes_up": sum(round.bytes_up for round in finished),
            "rayfed_clients_done": 3,
            "rayfed_clients_in_round": 4,
            "rayfed_idle_share": 0.5,
            "rayfed_late_clients": 3,
            "rayfed_retries": 2,
        }
    }
    assert {*shown["a/run"], "rayfed_seconds_since_client"} == set(SERIES)


def test_values_are_shown_again_until_the_run_is_closed(shown):
    run = Gauges("long", num_rounds=2)
    run.clients(1, 2)
    for _ in range(2):
        shown.clear()
        until(lambda: shown.get("long", {}).get("rayfed_clients_done") == 1)
    assert shown["long"]["rayfed_retries"] == 0, (
        "a run shows from the start that it has retried nothing"
    )
    since = shown["long"]["rayfed_seconds_since_client"]
    until(lambda: shown["long"]["rayfed_seconds_since_client"] > since)
    run.close()
    shown.clear()
    run.clients(2, 2)
    time.sleep(0.1)
    assert not shown


def test_gauges_that_cannot_be_shown_are_logged_once(shown, monkeypatch, caplog):
    monkeypatch.setattr(gauges, "Gauge", Broken)
    with caplog.at_level(logging.WARNING, "rayfed"):
        run = Gauges("run", num_rounds=2)
        run.clients(1, 2)
        run.retried()
        run.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the run's gauges cannot be shown: RuntimeError('no agent')"
    ]


@pytest.mark.slow
def test_an_actor_without_work_is_idle_and_one_that_trains_is_not(
    cluster, make_setup, pool_on, played
):
    """Of two actors, a cohort of a single client has work for one."""
    idle, setup = [], make_setup(fedavg(), num_rounds=4, clients_per_round=1, eval_every=9)
    with pool_on(setup, "test-idle", actors=2) as pool:
        played(setup, pool, lambda round: idle.append(pool._gauges._values["rayfed_idle_share"]))
    # After the last, both evaluate.
    assert len(idle) == 4 and all(0.5 <= share < 1 for share in idle[:3]), idle
