"""Real clusters of our own, each in a short folder of its own; and what a run on one of them is compared with."""

import copy
import gc
import os
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import ray
from ray.cluster_utils import Cluster

from rayfed.job import RayOptions
from rayfed.rounds import rounds, start
from rayfed.runtime.here import Here
from rayfed.runtime.session import OUR_RAY, workers
from rayfed.weights import state_of

FAIR = {"RAY_worker_niceness": "0"}  # workers keep up with whatever else the machine does
WATCHFUL = {  # a node that is lost is noticed after three seconds, not after a minute
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


@contextmanager
def _a_cluster(environment=(), join=True, **head):
    """A head node, and this process joined to it if it is to; stopped, and its folder removed, at the end."""
    ray.shutdown()
    environment = {**OUR_RAY, **FAIR, **dict(environment)}
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path may have 107 characters
    node = {"include_dashboard": False, "temp_dir": folder, "object_store_memory": 150 * 2**20, **head}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray forgets a socket where the dashboard's port is taken
            cluster = Cluster(initialize_head=True, head_node_args=node)
            gc.collect()
        try:
            if join:
                ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _small():
    with _a_cluster(num_cpus=4, num_gpus=2) as cluster:
        yield cluster.address


@pytest.fixture
def cluster(_small):
    """The address of one small Ray for most tests, with more CPUs and GPUs than the machine has."""
    if not ray.is_initialized():  # a test with a cluster of its own came before
        ray.init(address=_small, log_to_driver=False)
    return _small


@pytest.fixture
def several():
    """A cluster that begins with one node of one CPU, and notices soon when one is lost."""
    with _a_cluster(WATCHFUL, num_cpus=1) as cluster:
        yield cluster


@pytest.fixture
def a_cluster():
    """Another one: `with a_cluster(environment, num_cpus=...)`, of the head node."""
    return lambda environment=(), **options: _a_cluster({**WATCHFUL, **dict(environment)}, **options)


@pytest.fixture
def played(bits):
    """All rounds of a site on some workers, the initial one first, in comparable form; `between` sees each."""

    def played(site, workers, between=lambda round: None):
        every = [start(site, state_of(site.model), workers)]
        workers.finished(every[0])
        for round in rounds(site, every[0], workers):
            every.append(round)
            workers.finished(round)
            between(round)
        recalled = [{client: workers.recall(m) for client, m in round.memories.items()} for round in every]
        return [bits(replace(round, memories=m)) for round, m in zip(every, recalled, strict=True)]

    return played


@pytest.fixture
def here(played):
    """All rounds of a site in this process; the site's own model stays as it is."""

    def here(site):
        site = replace(site, model=copy.deepcopy(site.model))
        return played(site, Here(site))

    return here


@pytest.fixture
def on_ray(played):
    """All rounds of a site on the Ray that this process has joined."""

    def on_ray(site, actors, between=lambda round: None, load=None, **options):
        options = RayOptions(address=ray.get_runtime_context().gcs_address, actors=actors, **options)
        with workers(options, f"test-{os.urandom(4).hex()}", site, load=load) as pool:
            return played(site, pool, between)

    return on_ray
