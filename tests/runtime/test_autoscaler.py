"""More actors than fit: Ray's own stand-in for a cloud adds nodes to a real cluster, which are processes here."""

import json
import os
import signal
import socket
import subprocess

import pytest
from ray._private.services import get_node_ip_address
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.autoscaler._private.monitor import BASE_READONLY_CONFIG

from rayfed.errors import InputError, RunFailed
from rayfed.job import RayOptions
from rayfed.methods import scaffold
from rayfed.runtime import autoscaler, crew
from rayfed.runtime.autoscaler import room

slow = pytest.mark.slow

V2 = {"RAY_enable_autoscaler_v2": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}  # as `ray up` and KubeRay choose
FAKE = {"RAY_FAKE_CLUSTER": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
FAKE |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID}


@pytest.fixture
def autoscaling(a_cluster, tmp_path):
    """A cluster with a head of one CPU, and room for two more nodes of one CPU.

    `ray.cluster_utils.AutoscalingCluster` does the same, but needs a file that Ray's wheel lacks, and would stop every
    Ray of this machine.
    """
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    provider = {**BASE_READONLY_CONFIG["provider"], "type": "external", "disable_node_updaters": True}
    provider |= {"module": f"{FakeMultiNodeProvider.__module__}.FakeMultiNodeProvider", "launch_multiple": True}
    provider |= {"gcs_address": f"{get_node_ip_address()}:{port}", "head_node_id": FAKE_HEAD_NODE_ID}
    resources = {"CPU": 1, "object_store_memory": 150 * 2**20}
    types = {FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}}
    types |= {"worker": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": 2}}
    settings = {**BASE_READONLY_CONFIG, "provider": provider, "available_node_types": types, "max_workers": 2}
    settings["idle_timeout_minutes"] = 5
    (file := tmp_path / "cluster.json").write_text(json.dumps(settings))
    session = None
    head = {"num_cpus": 1, "gcs_server_port": port, "autoscaling_config": str(file)}
    try:
        with a_cluster(V2 | FAKE, **head) as cluster:
            session = cluster.head_node.get_session_dir_path()
            yield cluster
    finally:
        left = subprocess.run(["pgrep", "-f", session], capture_output=True, text=True).stdout if session else ""
        for process in left.split():  # of the nodes that the autoscaler has added
            os.kill(int(process), signal.SIGKILL)


def requested():
    """How many actors the cluster's request to its autoscaler is for, as Ray knows it."""
    constraints = autoscaler._status().cluster_resource_state.cluster_resource_constraints
    return sum(one.count for constraint in constraints for one in constraint.resource_requests)


@slow
def test_a_run_starts_with_the_actors_that_are_up_and_the_autoscaler_adds_nodes(
    autoscaling, make_site, played, here, pool_on, ready, monkeypatch, caplog
):
    asked = []

    def start(self, count, start=crew.Crew.start):
        asked.append(requested())
        start(self, count)

    def all_are_up(round):
        while ready(pool) < 3:
            pool._crew.wait([], 1.0)

    monkeypatch.setattr(crew, "LATE", 0.0)
    monkeypatch.setattr(crew.Crew, "start", start)
    site = make_site(scaffold(), clients_per_round=6, num_rounds=2)
    expected = here(site)
    with pytest.raises(InputError, match=r"at most 1 fit; .*; Ray's autoscaler cannot add nodes for so many"):
        with pool_on(site, "too-many", actors=4):
            pass
    assert (asked, requested()) == ([], 0), "the request is withdrawn"
    with pool_on(site, "grows", actors=3) as pool:
        assert (asked, requested()) == ([3], 0), "the actors themselves are waiting now"
        assert len(pool._crew.idle) == 1
        assert played(site, pool, all_are_up) == expected
        assert len({member.node_id for member in pool._crew.idle}) == 3
    assert "the run starts with 1 of 3 actors; the others join when" in caplog.text


@slow
def test_a_cluster_of_fixed_size_that_an_autoscaler_watches_refuses_at_once(a_cluster, make_site, pool_on):
    with a_cluster(V2, num_cpus=1), pytest.raises(InputError, match=r"at most 1 fit.*autoscaler cannot add nodes"):
        with pool_on(make_site(scaffold()), "fixed", actors=2):
            pass


@slow
def test_a_cluster_without_an_autoscaler_refuses_without_asking(cluster, make_site, pool_on, requests):
    with pytest.raises(InputError, match=r"so at most 4 fit; .* share a CPU\)$"):
        with pool_on(make_site(scaffold()), "static", actors=5):
            pass
    assert requests == []


@pytest.fixture
def requests(monkeypatch):
    """The number of actors in each request from now on; no request reaches Ray."""
    requests = []
    monkeypatch.setattr(autoscaler, "_request", lambda bundles: requests.append(len(bundles)))
    return requests


@pytest.fixture
def grows(monkeypatch):
    """An autoscaler that refuses nothing."""
    monkeypatch.setattr(autoscaler, "_is_there", lambda: True)
    monkeypatch.setattr(autoscaler, "_refusal", lambda: "")


@pytest.mark.parametrize("error", [RunFailed, KeyboardInterrupt])
def test_the_request_is_withdrawn_however_a_start_ends(grows, requests, error):
    def start():
        with room(RayOptions(actors=3), [{"CPU": 1.0}], 5) as count:
            assert (count, requests) == (3, [3])
            raise error

    with pytest.raises(error):
        start()
    assert requests == [3, 0]


@pytest.mark.parametrize(("actors", "nodes", "expected"), [("auto", 1, 1), (2, 2, 2)])
def test_nothing_is_asked_for_where_the_actors_fit(grows, requests, actors, nodes, expected):
    with room(RayOptions(actors=actors), [{"CPU": 1.0}] * nodes, 5) as count:
        assert count == expected
    assert requests == []


def test_a_request_that_cannot_be_withdrawn_is_told(grows, monkeypatch, caplog):
    def request(bundles):
        if not bundles:
            raise TimeoutError("the head is gone")

    monkeypatch.setattr(autoscaler, "_request", request)
    with room(RayOptions(actors=3), [{"CPU": 1.0}], 5) as count:
        assert count == 3
    assert "the request to Ray's autoscaler could not be withdrawn (TimeoutError('the head is gone'))" in caplog.text
