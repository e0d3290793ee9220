"""Federations whose actors, nodes and driver die, and whose checkpoints are cut short: no bit of
the results changes.

`pytest -m slow` runs one of them and `pytest -m chaos` the other twenty-nine, each with its own
seed; and so sixty runs on a Ray of their own, each of which loses one process of that Ray, or the
driver.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

import pytest
from ray.cluster_utils import Cluster

from rayfed.folder.tables import read_table
from rayfed.runtime.session import OUR_RAY

ROOT = Path(__file__).resolve().parents[1]
METHODS = ["fedntd", "scaffold", "fedcsd", "moon", "feddyn"]
ROUNDS = 8
SETTINGS = {
    "model.name": "lenet",
    "data.partition.num_clients": 8,
    "train.num_rounds": ROUNDS,
    "train.clients_per_round": 4,
    # Rounds take longer than what happens in them, or the run would end before.
    "train.local_steps": 40,
    "train.batch_size": 20,
    "output.every": 1,
    "ray.deadline": 20,
    "ray.max_retries": 20,
}
ACTOR = (
    # In the commands of processes that train clients.
    r"actor-|ClientActor|ray::(train|survey|evaluation) round"
)
KILL, TERM, STOP = SIGNALS = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP
# Short intervals, so that the death of a node is noticed within seconds.
WATCHFUL = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "5",
    "RAY_worker_niceness": "0",
}


def command(path, name, method, **settings):
    overrides = {**SETTINGS, **settings, "name": name, "method": method, "output.path": path}
    values = [word for key, value in overrides.items() for word in ("-s", f"{key}={value}")]
    return [
        sys.executable,
        "-m",
        "rayfed",
        "run",
        str(ROOT / "jobs/quickstart.toml"),
        *values,
        "--resume",
    ]


def numbers(path):
    """All results of a finished run that must not depend on what happened during it."""
    weights = (path / f"checkpoints/round-{ROUNDS:05d}.safetensors").read_bytes()
    columns = {"rounds": ["seconds"], "clients": ["seconds", "node"], "classes": []}
    return weights, {
        name: read_table(path, name).drop_columns(drop).to_pylist()
        for name, drop in columns.items()
    }


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Gives the numbers of a method's undisturbed run, in one process, without Ray."""
    folder, known = tmp_path_factory.mktemp("undisturbed"), {}

    def undisturbed(method):
        if method not in known:
            ran = subprocess.run(
                command(folder, method, method, **{"ray.mode": "off"}),
                capture_output=True,
                text=True,
            )
            assert ran.returncode == 0, ran.stderr
            known[method] = numbers(folder / method)
        return known[method]

    return undisturbed


@pytest.fixture
def nodes(monkeypatch):
    """A cluster: a head without CPUs for actors, and two nodes with one CPU each."""
    for key, value in {**OUR_RAY, **WATCHFUL}.items():
        monkeypatch.setenv(key, value)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    # Ray writes the cluster's address to a file in it.
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    node = {
        "include_dashboard": False,
        "temp_dir": f"{folder}/ray",
        "object_store_memory": 100 * 2**20,
    }
    try:
        cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
            yield cluster
        finally:
            cluster.shutdown()
    finally:
        rmtree(folder, ignore_errors=True)


def raylet(node):
    return node.all_processes["raylet"][0].process.pid


def kill_actor(cluster, chance):
    """Kill or stop a process that trains clients; returns whether there was one."""
    found = [pid for node in cluster.list_all_nodes() for pid in below(raylet(node), ACTOR)]
    # It has just ended.
    with suppress(ProcessLookupError):
        os.kill(chance.choice(found or [2**30]), chance.choice(SIGNALS))
        return True
    return False


def below(pid, pattern):
    """Processes that a process, or one of those below it, has started, and whose command
    matches.
    """
    listed = subprocess.run(
        ["ps", "-ww", "--ppid", str(pid), "-o", "pid=,args="], capture_output=True, text=True
    ).stdout
    found = [line.split(maxsplit=1) for line in listed.splitlines()]
    own = [int(child) for child, command in found if re.search(pattern, command)]
    return own + [one for child, _ in found for one in below(child, pattern)]


def kill_node(cluster, chance):
    """End a node, or stop it until Ray gives it up; a moment later, add another."""
    node = chance.choice(sorted(cluster.worker_nodes, key=lambda node: node.node_id))
    os.kill(raylet(node), how := chance.choice(SIGNALS))
    time.sleep({KILL: 0.0, TERM: chance.uniform(0, 3), STOP: 8.0}[how])
    cluster.remove_node(node, allow_graceful=False)
    time.sleep(chance.uniform(0, 3))
    cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    return True


def tear(checkpoints, chance):
    """Cut short or delete a file of the newest checkpoint, if there is an older one; returns
    whether there was.
    """
    *older, newest = sorted(checkpoints.glob("round-*.json")) or [None]
    if not older:
        return False
    file = chance.choice(sorted(checkpoints.glob(f"{newest.stem}.*")))
    if chance.random() < 0.3:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: chance.randrange(file.stat().st_size)])
    return True


seeds = [
    pytest.param(seed, marks=pytest.mark.slow if seed < 1 else pytest.mark.chaos)
    for seed in range(30)
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds)
def test_the_results_are_the_same_bit_for_bit_whatever_dies(
    seed, nodes, undisturbed, tmp_path, record_property
):
    method, chance = METHODS[seed % len(METHODS)], random.Random(seed)
    expected = undisturbed(method)
    # Round -> what happens in it, once: not if the round is played again.
    kinds = ["actor", "actor", "node", "driver", "torn"]
    due = dict(zip(chance.sample(range(1, ROUNDS), 5), chance.sample(kinds, 5), strict=True))
    happened, run = Counter(), tmp_path / "run"
    driver = command(tmp_path, "run", method, **{"ray.address": nodes.address})
    while True:
        process = subprocess.Popen(
            driver, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            for line in process.stdout:
                round = int(line[5:].partition("/")[0]) if line.startswith("round ") else -1
                # Also what was due in rounds that the previous driver played just before it was
                # killed.
                while process.poll() is None and (now := min(due, default=ROUNDS + 1)) <= round:
                    kind = due.pop(now)
                    time.sleep(chance.uniform(0, 0.5))
                    if kind == "actor":
                        happened[kind] += kill_actor(nodes, chance)
                    elif kind == "node":
                        happened[kind] += kill_node(nodes, chance)
                    else:
                        process.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
                        process.wait(timeout=300)
                        happened["driver"] += 1
                        happened["torn"] += kind == "torn" and tear(run / "checkpoints", chance)
            _, said = process.communicate(timeout=300)
        finally:
            process.kill()
        if process.returncode not in (-signal.SIGKILL, 130):
            break
    record_property("happened", dict(happened))
    print(f"seed {seed}, {method}: {dict(happened)}")
    assert process.returncode == 0, said
    assert numbers(run) == expected
    # A short run may end while a node is given up.
    assert happened["driver"] or happened["node"]


# A process of a run's own Ray, or the driver: its command, and the exit codes of the run by signal
# (docs/failure.md).
OWN = {
    "raylet": (r"/raylet/raylet ", {KILL: [75], TERM: [75], STOP: [75]}),
    # 0: done before Ray's minute was over.
    "gcs": (
        r"/gcs/gcs_server ",
        {KILL: [0, 75], TERM: [0, 75], STOP: [0, 75]},
    ),
    # 75: Ray ends the node with it.
    "dashboard agent": (
        r"DashboardAgent",
        {KILL: [0, 75], TERM: [0, 75], STOP: [0]},
    ),
    "environment agent": (r"RuntimeEnvAgent", {KILL: [0, 75], TERM: [0, 75], STOP: [0]}),
    "actor": (ACTOR, {KILL: [0], TERM: [0], STOP: [0]}),
    "driver": ("", {KILL: [-KILL], TERM: [130], STOP: [0]}),
}
# While a checkpoint is written.
CHECKPOINT = [("raylet", SIGNALS[number % 2], True) for number in range(20)]
ANY = [(what, how, False) for what, (_, codes) in OWN.items() for how in codes]
own_kills = [
    pytest.param(
        number, *kill, marks=pytest.mark.slow if number in (0, 22, 33) else pytest.mark.chaos
    )
    for number, kill in enumerate([*CHECKPOINT, *(ANY * 3)[:40]])
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "what", "how", "keeping"), own_kills)
def test_a_run_whose_own_ray_loses_a_process_has_the_same_bits(
    number, what, how, keeping, undisturbed, tmp_path, record_property
):
    method, chance = METHODS[number % len(METHODS)], random.Random(number)
    expected, (pattern, codes), run = undisturbed(method), OWN[what], tmp_path / "run"
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    environment = {
        **os.environ,
        "TMPDIR": folder,
        "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
        **WATCHFUL,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    own = command(tmp_path, "run", method, **{"ray.actors": 2})
    at, pause = chance.randrange(1, ROUNDS - 2), chance.uniform(0, 0.2)
    try:
        with subprocess.Popen(own, env=environment, **pipes) as process:
            try:
                next(line for line in process.stdout if line.startswith("round "))
                found = below(process.pid, pattern) if pattern else [process.pid]
                next(line for line in process.stdout if re.match(rf"round +{at}/", line))
                if keeping:
                    before = set((run / "checkpoints").iterdir())
                    while set((run / "checkpoints").iterdir()) <= before and process.poll() is None:
                        time.sleep(0.001)
                else:
                    time.sleep(pause)
                os.kill(chance.choice(found), how)
                since = time.monotonic()
                if what == "driver" and how == STOP:
                    time.sleep(3)
                    process.send_signal(signal.SIGCONT)
                _, said = process.communicate(timeout=300)
            finally:
                process.kill()
        took = time.monotonic() - since
        print(
            f"{number}: {what}, {how.name}{' in a checkpoint' * keeping}: exit code "
            f"{process.returncode}, {took:.0f} s"
        )
        assert process.returncode in codes[how], said
        assert "Traceback" not in said
    finally:
        # What a dead raylet leaves.
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"TMPDIR={folder}\0".encode() in file.read_bytes():
                    os.kill(int(file.parent.name), KILL)
        rmtree(folder, ignore_errors=True)
    if process.returncode:
        resumed = subprocess.run(
            command(tmp_path, "run", method, **{"ray.mode": "off"}), capture_output=True, text=True
        )
        assert resumed.returncode == 0, resumed.stderr
    assert numbers(run) == expected
