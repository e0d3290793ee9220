"""No wait is silent, and none is longer than it must be: for actors, for a GPU, for the data of a node."""

import re
import time
from functools import partial

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from rayfed.base.errors import WorkersLost
from rayfed.job import RayOptions
from rayfed.methods import fedavg
from rayfed.runtime import crew, heartbeat, session
from rayfed.runtime.gpus import PRETENDED
from rayfed.runtime.head import Head

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(heartbeat, "HEARTBEAT", 0.5)
    monkeypatch.setattr(crew, "UP_LIMIT", 3.0)
    monkeypatch.setattr(crew, "LATE", 3.0)


@pytest.fixture
def another():
    """Gives an actor of another job, which holds these resources."""

    @ray.remote
    class Another:
        def up(self):
            pass

    def another(**resources):
        actor = Another.options(**resources).remote()
        ray.get(actor.up.remote())
        return actor

    return another


@slow
def test_a_busy_cluster_is_waited_for_with_a_heartbeat_and_can_be_tried_again(
    a_cluster, another, make_site, pool_on, caplog
):
    message = r"for 4 s .*the run wants 2, each with 1 CPU.*other jobs may hold .*: try again when they are done"
    with a_cluster(num_cpus=2):
        _holder = another(num_cpus=2)
        with pytest.raises(WorkersLost, match=message), pool_on(make_site(fedavg()), "busy", actors=2, patience=4.0):
            pass
    assert "s; waiting for actor-0 to come up, actor-1 to come up" in caplog.text


@slow
def test_a_gpu_for_the_measurement_is_waited_for_with_a_heartbeat(a_cluster, another, make_site, pool_on, caplog):
    with a_cluster({PRETENDED: "1"}, num_cpus=2, num_gpus=1):
        _holder = another(num_gpus=1)
        with pytest.raises(WorkersLost, match=r"for 3 s \(ray.patience\) no whole GPU was free"):
            with pool_on(make_site(fedavg()), "probe", num_gpus="auto", patience=3.0):
                pass
    assert "s; waiting for a whole GPU, to measure the largest client" in caplog.text


def opened_late(site, seconds, job):
    """Stands for `open_site` on storage that is slow."""
    time.sleep(seconds)
    return site


@slow
def test_an_actor_that_waits_for_its_data_is_not_restarted(a_cluster, make_site, here, on_ray, monkeypatch, caplog):
    """Neither does the run end, although the data need longer than an actor may need to come up."""
    monkeypatch.setattr(crew, "UP_LIMIT", 20.0)
    site = make_site(fedavg(), num_rounds=1)
    monkeypatch.setattr(session, "open_site", partial(opened_late, site, 30.0))
    with a_cluster(num_cpus=1):
        assert on_ray(site, 1, data="storage", patience=5.0) == here(site)
    assert re.search(r"s; waiting for actor-0 on [\d.]+ to get the data", caplog.text)
    assert "to come up" not in caplog.text.partition("to get the data")[2]


def test_an_actor_that_is_not_there_yet_delays_no_other(monkeypatch):
    def refuse(reference):
        raise ActorUnavailableError("it is being restarted", None)

    waiting = crew.Crew(RayOptions(), "run", lambda node, lost: None, 1, Head())
    monkeypatch.setattr(crew.ray, "get", refuse)
    monkeypatch.setattr(crew.time, "sleep", None)  # answers of other actors would wait
    waiting.opening = {"reference": crew.Member("actor-0", None)}
    waiting._answered(["reference"])
    assert (waiting.opening, waiting.awaited()) == ({}, ["actor-0 to come up"])
