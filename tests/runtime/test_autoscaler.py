"""More actors than fit: Ray's own stand-in for a cloud adds nodes to a real cluster, which are
processes here.
"""

import json
import os
import signal
import subprocess
from contextlib import suppress

import pytest
from ray._private.services import get_node_ip_address
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.autoscaler._private.monitor import BASE_READONLY_CONFIG

from rayfed.base.errors import InputError
from rayfed.methods import scaffold
from rayfed.runtime import worker_group

slow = pytest.mark.slow

# As `ray up` and KubeRay choose.
V2 = {
    "RAY_enable_autoscaler_v2": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
FAKE = {"RAY_FAKE_CLUSTER": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
FAKE |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID}


@pytest.fixture
def autoscaling(a_cluster, free, tmp_path):
    """A cluster with a head of one CPU, and room for two more nodes of one CPU.

    `ray.cluster_utils.AutoscalingCluster` does the same, but needs a file that Ray's wheel lacks,
    and would stop every Ray of this machine.
    """
    port = free(["port"])["port"]
    provider = {
        **BASE_READONLY_CONFIG["provider"],
        "type": "external",
        "disable_node_updaters": True,
    }
    provider |= {
        "module": f"{FakeMultiNodeProvider.__module__}.FakeMultiNodeProvider",
        "launch_multiple": True,
    }
    provider |= {
        "gcs_address": f"{get_node_ip_address()}:{port}",
        "head_node_id": FAKE_HEAD_NODE_ID,
    }
    resources = {"CPU": 1, "object_store_memory": 150 * 2**20}
    types = {FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}}
    types |= {
        "worker": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": 2}
    }
    settings = {
        **BASE_READONLY_CONFIG,
        "provider": provider,
        "available_node_types": types,
        "max_workers": 2,
    }
    settings["idle_timeout_minutes"] = 5
    (file := tmp_path / "cluster.json").write_text(json.dumps(settings))
    session = None
    head = {"num_cpus": 1, "gcs_server_port": port, "autoscaling_config": str(file)}
    try:
        with a_cluster(V2 | FAKE, **head) as cluster:
            session = cluster.head_node.get_session_dir_path()
            yield cluster
    finally:
        left = (
            subprocess.run(["pgrep", "-f", session], capture_output=True, text=True).stdout
            if session
            else ""
        )
        # Of the nodes that the autoscaler has added.
        for process in left.split():
            # It may have just ended.
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


@slow
def test_actors_that_do_not_fit_become_nodes_and_the_bits_stay(
    autoscaling, make_setup, played, here, pool_on, ready, monkeypatch, caplog
):
    def all_are_up(round):
        while ready(pool) < 3:
            pool._group.wait([], 1.0)

    monkeypatch.setattr(worker_group, "LATE", 0.0)
    setup = make_setup(scaffold(), clients_per_round=6, num_rounds=2)
    expected = here(setup)
    with pool_on(setup, "grows", actors=3) as pool:
        assert len(pool._group.idle) == 1
        assert played(setup, pool, all_are_up) == expected
        assert len({member.node_id for member in pool._group.idle}) == 3
    assert "the run starts with 1 of 3 actors; the others join when" in caplog.text


@slow
def test_a_cluster_without_an_autoscaler_refuses_what_does_not_fit(cluster, make_setup, pool_on):
    with pytest.raises(InputError, match=r"so at most 4 fit; .* share a CPU\)$"):
        with pool_on(make_setup(scaffold()), "static", actors=5):
            pass
