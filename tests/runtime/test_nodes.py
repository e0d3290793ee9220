"""Several nodes on one machine: nodes that come, go and die, a link that is cut, and always the same bits."""

import copy
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import ray

from rayfed.job import RayOptions
from rayfed.methods import Part, compose, fedavg, scaffold
from rayfed.rounds import rounds, start
from rayfed.runtime import session
from rayfed.runtime.crew import WorkersLost
from rayfed.runtime.dispatch import Batch
from rayfed.runtime.session import Sites, workers
from rayfed.weights import state_of

pytestmark = pytest.mark.slow

PATIENT = {"RAY_health_check_failure_threshold": "1000"}  # no node is ever given up


@dataclass(frozen=True)
class Linger(Part):
    """Stays at a client from the second round on, once, on a certain node; and says in a file that it is there."""

    node: str
    file: str
    seconds: float = 60.0

    def begin(self, client):
        if client.round > 1 and ray.get_runtime_context().get_node_id() == self.node and not Path(self.file).exists():
            Path(self.file).touch()
            time.sleep(self.seconds)


@contextmanager
def once(file, action):
    """Does something as soon as a file is there."""

    def wait():
        while not done.is_set():
            if Path(file).exists():
                return action()
            time.sleep(0.02)

    done = threading.Event()
    (thread := threading.Thread(target=wait)).start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def joined(**options):
    return RayOptions(address=ray.get_runtime_context().gcs_address, **options)


def kill_raylet(cluster, node):
    """As if the machine's plug was pulled."""
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "loss", [lambda cluster, node: cluster.remove_node(node), kill_raylet], ids=["removed", "killed"]
)
def test_a_node_is_lost_with_its_work_and_what_clients_left_there(
    several, make_site, played, here, tmp_path, caplog, loss
):
    node = several.add_node(num_cpus=1)
    method = compose(scaffold(), Linger(node.node_id, str(tmp_path / "there")))
    site = make_site(method, clients_per_round=6)
    expected = here(site)
    with once(tmp_path / "there", lambda: loss(several, node)), workers(joined(actors=2), "lost", site) as pool:
        assert played(site, pool) == expected
    assert "lost with actor client-" in caplog.text and "running it again" in caplog.text


def test_a_reply_is_lost_with_the_node_that_it_lies_on(a_cluster, make_site, played, here, monkeypatch, caplog):
    removed = []

    def fetched(batch, turn, fetch=Batch._fetched):
        """Removes a node when the turn has come of a reply that lies there."""
        if turn in batch._finished and batch._finished[turn][0].member.place.node_id == node.node_id and not removed:
            removed.append(cluster.remove_node(node))
        return fetch(batch, turn)

    site = make_site(scaffold(), clients_per_round=6)
    expected = here(site)
    in_store = {"RAY_max_direct_call_object_size": "1"}  # objects of any size, as those of large models
    with a_cluster(in_store, num_cpus=1) as cluster:
        node = cluster.add_node(num_cpus=1)
        monkeypatch.setattr(Batch, "_fetched", fetched)
        with workers(joined(actors=2), "reply", site) as pool:
            assert played(site, pool) == expected
    assert removed
    assert "its reply was lost with actor client-" in caplog.text


def test_objects_that_are_lost_are_made_again_or_named(several, make_site, play, bits, monkeypatch, caplog):
    @ray.remote(num_cpus=0, max_retries=0, resources={"far": 1})
    def leave():
        return np.zeros(10**6)

    class LostSites(Sites):
        def __init__(self, site, load):
            super().__init__(site, load)
            self._made = {"": lost}

    node = several.add_node(num_cpus=0, resources={"far": 1})
    lost = leave.remote()
    ray.wait([lost], fetch_local=False)
    several.remove_node(node)

    monkeypatch.setattr(session, "Sites", LostSites)
    site = make_site(scaffold(), counts=[[4, 4, 4, 4]] * 2, clients_per_round=2, num_rounds=2)
    expected = copy.deepcopy(site.model)
    with workers(joined(actors=1), "objects", site) as pool:
        first = start(site, state_of(site.model), pool)
        pool._sent["weights"] = first.weights, lost
        second = next(rounds(site, first, pool))
        assert "client 0, round 1: an object that it needs was lost" in caplog.text
        found = bits(replace(second, memories={c: ray.get(memory) for c, memory in second.memories.items()}))
        assert found == bits(play(replace(site, model=expected))[1])
        with pytest.raises(WorkersLost, match=r"client 1, round 2: what it remembers .* is lost .*resume"):
            next(rounds(site, replace(second, memories={**second.memories, 1: lost}), pool))


def test_the_pool_grows_and_shrinks_with_the_cluster(several, make_site, played, here, caplog):
    site = make_site(scaffold(), clients_per_round=6, num_rounds=7)
    expected, added, sizes = here(site), [], []

    def change(round):
        sizes.append(len(pool._crew.idle))
        if round.round in (1, 4):
            added.append(several.add_node(num_cpus=1))
        if round.round in (2, 5):
            while len(pool._crew.idle) < 2:  # until it has come up
                pool._crew.wait([], 1.0)
        if round.round == 3:
            several.remove_node(added.pop())

    with caplog.at_level("INFO"), workers(joined(), "elastic", site) as pool:
        assert played(site, pool, change) == expected
    assert sizes == [1, 1, 2, 1, 1, 2, 2]
    assert "1 actor on" in caplog.text and "with room for 1 more" in caplog.text and "is back" in caplog.text


def test_a_run_without_any_actor_left_ends_in_words(a_cluster, make_site, played):
    site = make_site(fedavg())
    with a_cluster(num_cpus=0) as cluster:
        node = cluster.add_node(num_cpus=1)
        words = r"(?s)for 5 s \(ray.patience\) there was no actor.*1 were asked for, each with 1 CPU.*there are 0 CPU"
        with workers(joined(actors=1, patience=5.0), "none", site) as pool, pytest.raises(WorkersLost, match=words):
            played(site, pool, lambda round: cluster.remove_node(node))


def sh(*commands):
    for command in commands:
        subprocess.run(command, shell=True, check=True, capture_output=True)


@contextmanager
def two_machines(a_cluster, environment):
    """Two network namespaces with an address each, a head here and a node there: the head, and the node's process."""
    away, near, far = "rayfed-far", "rayfed0", "rayfed1"
    sh(
        f"ip netns add {away}",
        f"ip link add {near} type veth peer name {far}",
        f"ip link set {far} netns {away}",
        f"ip addr add 10.93.7.1/24 dev {near}",
        f"ip link set {near} up",
        f"ip -n {away} addr add 10.93.7.2/24 dev {far}",
        f"ip -n {away} link set {far} up",
        f"ip -n {away} link set lo up",
    )
    try:
        with a_cluster(environment, num_cpus=1, node_ip_address="10.93.7.1") as cluster:
            start = [f"{sys.prefix}/bin/ray", "start", "--block", f"--address={cluster.address}"]
            start += ["--node-ip-address=10.93.7.2", "--num-cpus=1", f"--object-store-memory={150 * 2**20}"]
            with subprocess.Popen(["ip", "netns", "exec", away, *start], stdout=subprocess.DEVNULL) as node:
                try:
                    yield
                finally:
                    sh(f"ip netns pids {away} | xargs --no-run-if-empty kill -9")
                    node.wait(30)
    finally:
        subprocess.run(f"ip link delete {near}; ip netns delete {away}", shell=True, capture_output=True)


def node_at(address):
    """The id of the node there, once it is up."""
    for _ in range(1800):
        for node in ray.nodes():
            if node["Alive"] and node["NodeManagerAddress"] == address:
                return node["NodeID"]
        time.sleep(0.1)
    raise TimeoutError(address)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip to make a network")
@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "silent"])
def test_a_link_is_cut_and_healed(a_cluster, make_site, played, here, tmp_path, caplog, noticed):
    """Either Ray notices that a node is away, and gives it up; or our deadline comes first, and the node returns."""
    with two_machines(a_cluster, {} if noticed else PATIENT):
        node = node_at("10.93.7.2")
        method = compose(scaffold(), Linger(node, str(tmp_path / "there"), seconds=3.0))
        site = make_site(method, clients_per_round=6, num_rounds=4)
        expected = here(site)

        def cut():
            sh("ip link set rayfed0 down")
            time.sleep(16)
            sh("ip link set rayfed0 up")

        deadline = "auto" if noticed else 10.0
        with once(tmp_path / "there", cut), workers(joined(actors=2, deadline=deadline), "cut", site) as pool:
            assert played(site, pool) == expected
    assert ("lost with actor" if noticed else "no answer from actor") in caplog.text
    assert "on 10.93.7.2" in caplog.text
