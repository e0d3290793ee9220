"""Real Ray clusters, each in a short folder of its own; and the same run in this process, for
comparison.
"""

import copy
import gc
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from rayfed.job import RayOptions
from rayfed.rounds.engine import rounds
from rayfed.runtime.session import OUR_RAY, open_actors
from rayfed.runtime.this_process import ThisProcess

# Workers keep up with the other work of the machine.
FAIR = {"RAY_worker_niceness": "0"}
# The loss of a node is noticed after three seconds, not after a minute.
WATCHFUL = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
PORTS = (
    "port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
)
PORTS += ("ray-client-server-port", "runtime-env-agent-port")
# Tests in another process have other ports: those of pytest-xdist have numbers and one parent.
NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
FIRST = 20_000 + (4 * os.getppid() + NUMBER) % 120 * 100
# Below the ephemeral ones, which the kernel gives to any socket.
OUR_PORTS = cycle(range(FIRST, FIRST + 100))


def _short_folder():
    """A folder for a Ray: the path of a socket may have 107 characters."""
    return tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)


@pytest.fixture
def short_folder():
    with _short_folder() as folder:
        yield folder


@contextmanager
def _a_cluster(environment=(), join=True, **head):
    """A cluster of a head node, which this process joins; stopped in the end."""
    ray.shutdown()
    # Ray writes the cluster's address to a file in it.
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    with _short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in {**OUR_RAY, **FAIR, **dict(environment)}.items():
            # The scripts that tests start would inherit it.
            if name != "PYTHONSAFEPATH":
                patch.setenv(name, value)
        node = {
            "include_dashboard": False,
            "temp_dir": f"{folder}/ray",
            "object_store_memory": 150 * 2**20,
            **head,
        }
        with warnings.catch_warnings():
            # Ray forgets a socket where the dashboard's port is taken.
            warnings.simplefilter("ignore", ResourceWarning)
            cluster = Cluster(initialize_head=True, head_node_args=node)
            gc.collect()
        try:
            if join:
                ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="session")
def _small():
    with _a_cluster(num_cpus=4) as cluster:
        yield cluster.address


@pytest.fixture
def cluster(_small):
    """The address of one small Ray for most tests, with more CPUs than the machine has."""
    # A test with a cluster of its own came before.
    if not ray.is_initialized():
        ray.init(address=_small, log_to_driver=False)
    return _small


@pytest.fixture
def ready():
    """How many actors of a pool have opened the run: some are at work on the next round already."""
    return lambda pool: len(pool._group.idle) + len(pool._working)


@pytest.fixture
def several():
    """A cluster that begins with one node of one CPU, and soon notices the loss of a node."""
    with _a_cluster(WATCHFUL, num_cpus=1) as cluster:
        yield cluster


@pytest.fixture
def a_cluster():
    """Another such cluster: `with a_cluster(environment, num_cpus=...)`, with options of the head
    node.
    """
    return lambda environment=(), **options: _a_cluster(
        {**WATCHFUL, **dict(environment)}, **options
    )


def _free(names):
    """A free port for each name, which is still free when Ray listens there."""
    ports = {}
    for name in names:
        while name not in ports:
            with suppress(OSError), socket.create_server(("", port := next(OUR_PORTS))):
                ports[name] = port
    return ports


@pytest.fixture
def free():
    """`free(["port"])`: a dictionary with a free port for each name."""
    return _free


@pytest.fixture
def free_ports(free):
    """Options of `ray start` for another node."""
    return [f"--{name}={port}" for name, port in free(PORTS[2:5] + PORTS[6:]).items()]


def _has_started(head, log):
    """Wait until a `ray start --block` says that its Ray has started, or ends."""
    while "Ray runtime started" not in log.read_text():
        if head.poll() is not None:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def _ray_head(environment, *flags, python=sys.executable):
    command = [
        python,
        Path(sys.executable).parent / "ray",
        "start",
        "--head",
        "--block",
        "--object-store-memory=100000000",
    ]
    command += ["--min-worker-port=0", "--max-worker-port=0", *flags]
    with _short_folder() as folder, open(f"{folder}/log", "w+") as log:
        # As docs/security.md has it.
        environment = {**FAIR, **environment, "RAY_TMPDIR": folder}
        # Ray gives a node 30 seconds to start, which a busy machine does not always keep; and
        # somebody else may have taken a port.
        for attempt in range(3):
            # Else fixed ones.
            ports = _free(PORTS)
            metrics = _free(["DASHBOARD_METRIC_PORT", "AUTOSCALER_METRIC_PORT"])
            head = subprocess.Popen(
                [*command, *(f"--{name}={port}" for name, port in ports.items())],
                env=environment | {name: str(port) for name, port in metrics.items()},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            if _has_started(head, Path(folder, "log")):
                break
            assert attempt < 2, Path(folder, "log").read_text()
        try:
            yield {**ports, "folder": folder}
        finally:
            # It ends all processes that it has started.
            head.terminate()
            head.wait(240)


@pytest.fixture(scope="session")
def ray_head():
    """`with ray_head(environment, "--num-cpus=1")`: a Ray as users start it; gives its ports and
    its folder.
    """
    return _ray_head


@pytest.fixture
def played(bits):
    """All rounds of a setup on some workers, in comparable form; `between` sees each round but the
    initial model.
    """

    def played(setup, workers, between=lambda round: None):
        every = []
        for round in rounds(setup, workers):
            every.append(round)
            workers.between_rounds(round)
            if round.round:
                between(round)
        recalled = [
            {client: workers.recall(m) for client, m in round.memories.items()} for round in every
        ]
        return [bits(replace(round, memories=m)) for round, m in zip(every, recalled, strict=True)]

    return played


@pytest.fixture
def here(played):
    """All rounds of a setup in this process; the setup's own model stays as it is."""

    def here(setup):
        setup = replace(setup, model=copy.deepcopy(setup.model))
        return played(setup, ThisProcess(setup))

    return here


@pytest.fixture
def pool_on():
    """`with pool_on(site, name, actors=...)`: a pool, named `name`, on the Ray that this process
    has joined.
    """

    def pool_on(setup, name, **options):
        options = RayOptions(address=ray.get_runtime_context().gcs_address, **options)
        return open_actors(replace(setup, job=replace(setup.job, name=name, ray=options)))

    return pool_on


@pytest.fixture
def on_ray(played, pool_on):
    """All rounds of a setup on the Ray that this process has joined."""

    def on_ray(setup, actors, **options):
        with pool_on(setup, f"test-{os.urandom(4).hex()}", actors=actors, **options) as pool:
            return played(setup, pool)

    return on_ray
