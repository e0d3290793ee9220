"""What a run survives in its cluster: a table of harms, their moments, and the ends that are
expected, on real nodes.

They come, go and die, or their link is cut. The end is the bits of a run in this process, or an
error.
"""

import copy
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from ray._private.state import actors

from rayfed.base.errors import InputError, WorkersLost
from rayfed.job import RayOptions
from rayfed.methods import Part, compose, fedavg, scaffold
from rayfed.rounds.engine import rounds, start
from rayfed.runtime import heartbeat, worker_group
from rayfed.runtime import pool as pool_module
from rayfed.runtime.gpus import PRETENDED
from rayfed.runtime.pool import Pool
from rayfed.runtime.session import Stored, open_actors
from rayfed.runtime.worker_group import WorkerGroup

# Torch before 2.8 has no such class.
GPU_ERROR = getattr(torch, "AcceleratorError", RuntimeError)

pytestmark = pytest.mark.slow

# Sums of a tiny model lie where those of large models do. Ray cannot restart an actor whose
# arguments lie there, too.
IN_STORE = {"RAY_max_direct_call_object_size": "500"}
# Ray gives no node up.
PATIENT = {"RAY_health_check_failure_threshold": "1000"}
# Torch computes as on a CPU of another kind.
OTHER = {"ATEN_CPU_CAPABILITY": "default"}


@dataclass(frozen=True)
class Linger(Part):
    """Waits at a client on a certain node, once, after the first round; and creates a file to say
    so.
    """

    node: str
    file: str
    seconds: float = 60.0

    def begin(self, client):
        if (
            client.round > 1
            and ray.get_runtime_context().get_node_id() == self.node
            and not Path(self.file).exists()
        ):
            Path(self.file).touch()
            time.sleep(self.seconds)


@dataclass(frozen=True)
class FaultyGPU(Part):
    """Every client on a certain node ends with an error of CUDA's."""

    node: str

    def begin(self, client):
        if ray.get_runtime_context().get_node_id() == self.node:
            raise GPU_ERROR("CUDA error: uncorrectable ECC error encountered")


@dataclass(frozen=True)
class FaultyCard(Part):
    """Every client on the first GPU of a node ends with an error of CUDA's."""

    def begin(self, client):
        if [*map(str, ray.get_gpu_ids())] == ["0"]:
            raise GPU_ERROR("CUDA error: uncorrectable ECC error encountered")


@contextmanager
def once(file, action):
    """Does something as soon as a file exists."""
    done = threading.Event()

    def wait():
        while not done.wait(0.02):
            if Path(file).exists():
                return action()

    (thread := threading.Thread(target=wait)).start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def removes_its_node(it):
    it.cluster.remove_node(it.node)


def loses_power(it):
    os.kill(it.node.all_processes["raylet"][0].process.pid, signal.SIGKILL)


def swaps_for_other_hardware(it):
    it.cluster.add_node(num_cpus=1, env_vars=OTHER)
    it.cluster.remove_node(it.node)


def joins_with_other_hardware(it):
    it.cluster.add_node(num_cpus=1, env_vars=OTHER)


def joins_without_its_gpu(it):
    # Torch does not see it.
    it.cluster.add_node(**GPUS, env_vars={PRETENDED: ""})


@dataclass(frozen=True)
class Row:
    """What is done to a cluster of a head and perhaps a second node, and how a run ends."""

    harm: Callable | None = None
    # This round; 0: while a client trains on the second node, or without a harm from the start.
    after: int = 0
    # By another job.
    held: bool = False
    head: dict = field(default_factory=lambda: {"num_cpus": 1})
    second: dict | None = None
    environment: dict = field(default_factory=dict)
    # Of the second node and a folder.
    part: Callable | None = None
    # The words are there before this round begins.
    before: int = 0
    # Of the worker group, in the end.
    size: int = 0
    ray: dict = field(default_factory=dict)
    # Regular expressions.
    logs: tuple[str, ...] = ()
    error: type[Exception] | None = None
    # A regular expression.
    says: str = ""

    def __str__(self):
        return self.harm.__name__ if self.harm else re.sub(r"\W+", " ", self.says or self.logs[0])


ONE, TWO, GPUS = {"num_cpus": 1}, {"actors": 2}, {"num_cpus": 1, "num_gpus": 1}
ON_GPUS = {"head": GPUS, "environment": {PRETENDED: "1"}}
LINGERS = {"second": ONE, "ray": TWO, "part": lambda node, there: Linger(node, f"{there}/there")}
LOST = ("lost with actor-", "running it again")
FAULTY = (r"the GPU of actor-\d on .* failed \(CUDA error: uncorrectable.*running it",)
ONLY_OTHER = r"is on other hardware .*; resume on hardware as before"
NO_ACTOR = (
    r"(?s)for 5 s \(ray.patience\) there was no actor.*the run wants 1, each with 1 CPU.*there are "
    r"0 CPU"
)
OTHER_BITS = (
    "on other hardware than the run, and would compute other bits: instructions is .*; "
    ".*--other-bits"
)
BLIND = (
    r"^Ray counts a GPU on node [\d.]+, but torch .* sees none there.*NVIDIA_VISIBLE_DEVICES=all"
)
BLIND_LATE = ("is given up: Ray counts a GPU",)
NO_ROOM = (
    r"for 4 s .*the run wants 2, each with 1 CPU.*other jobs may hold .*: try again when they are "
    r"done"
)
NO_GPU = r"for 3 s \(ray.patience\) no whole GPU was free"
WAITS = ("s; waiting for actor-0 to come up, actor-1 to come up",)
WAITS_FOR_GPU = ("s; waiting for a whole GPU, to measure the largest client",)
ALONE = partial(Row, after=1, head={"num_cpus": 0}, second=ONE, error=WorkersLost)
REFUSED = partial(Row, error=InputError)
HELD = partial(Row, held=True, error=WorkersLost)
ROWS = [
    Row(removes_its_node, logs=LOST, **LINGERS),
    Row(loses_power, logs=LOST, **LINGERS),
    Row(second=ONE, ray=TWO, part=lambda node, there: FaultyGPU(node), logs=FAULTY),
    Row(
        joins_with_other_hardware,
        after=1,
        ray={"actors": "auto"},
        before=4,
        logs=("it is not used",),
        size=1,
    ),
    Row(
        joins_without_its_gpu,
        after=1,
        **ON_GPUS,
        ray={"num_gpus": 1.0},
        before=3,
        logs=BLIND_LATE,
        size=1,
    ),
    ALONE(swaps_for_other_hardware, ray={"actors": 1}, says=ONLY_OTHER),
    ALONE(removes_its_node, ray={"actors": 1, "patience": 5.0}, says=NO_ACTOR),
    REFUSED(says=OTHER_BITS, second={"num_cpus": 1, "env_vars": OTHER}, ray=TWO),
    *(
        REFUSED(says=BLIND, head=GPUS, environment={PRETENDED: ""}, ray={"num_gpus": asked})
        for asked in (1.0, "auto")
    ),
    HELD(head={"num_cpus": 2}, ray={"actors": 2, "patience": 4.0}, logs=WAITS, says=NO_ROOM),
    HELD(**ON_GPUS, ray={"num_gpus": "auto", "patience": 3.0}, logs=WAITS_FOR_GPU, says=NO_GPU),
]


@ray.remote
class Another:
    """An actor of another job, which holds resources."""

    def up(self):
        pass


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_happens_to_a_cluster(
    a_cluster, make_setup, played, here, pool_on, tmp_path, caplog, monkeypatch, row
):
    """No wait is silent, and none is longer than it must be."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT", 0.5)
    monkeypatch.setattr(heartbeat, "STARTING", 0.5)
    if row.held:
        monkeypatch.setattr(worker_group, "UP_LIMIT", 3.0)
        monkeypatch.setattr(worker_group, "LATE", 3.0)
    it = SimpleNamespace()

    def between(round):
        if row.harm and round.round == row.after:
            row.harm(it)
        while round.round == row.before - 1 and not re.search(row.logs[0], caplog.text):
            it.pool._group.wait([], 0.2)

    with ExitStack() as stack:
        it.cluster = stack.enter_context(a_cluster(row.environment, **row.head))
        if row.second:
            it.node = it.cluster.add_node(**row.second)
        if row.held:
            it.holder = Another.options(**row.head).remote()
            ray.get(it.holder.up.remote())
        parts = [row.part(it.node.node_id, tmp_path)] if row.part else []
        setup = make_setup(compose(scaffold(), *parts), clients_per_round=6, num_rounds=4)
        expected = here(setup)
        if row.harm and not row.after:
            stack.enter_context(once(tmp_path / "there", partial(row.harm, it)))
        stack.enter_context(
            pytest.raises(row.error, match=row.says) if row.error else nullcontext()
        )
        it.pool = stack.enter_context(pool_on(setup, "harm", **row.ray))
        assert played(setup, it.pool, between) == expected
        it.pool._group.grow()
        assert not row.size or it.pool._group.size == row.size, "no other actor is put there"
        assert len(it.pool.kinds()) == 1
    assert all(re.search(words, caplog.text) for words in row.logs)


def test_only_nodes_with_the_labels_of_a_job_get_actors(
    a_cluster, make_setup, played, here, pool_on
):
    setup = make_setup(scaffold(), clients_per_round=6)
    with a_cluster(num_cpus=1) as cluster:
        node = cluster.add_node(num_cpus=2, labels={"card": "H100"})
        with pool_on(setup, "labels", labels={"card": "in(L4,H100)"}, actors="auto") as pool:
            assert played(setup, pool) == here(setup)
            assert [member.node_id for member in pool._group._workers] == [node.node_id] * 2
        says = (
            r"no actor with 1 CPU and 0 GPU, on a node with the labels card = 'L4' fits: there are "
            r"0 CPU"
        )
        with pytest.raises(InputError, match=says), pool_on(setup, "labels", labels={"card": "L4"}):
            pass


def test_a_client_whose_gpu_fails_goes_to_another_and_the_gpu_is_given_up_in_the_end(
    a_cluster, make_setup, played, here, pool_on, ready, caplog
):
    """Both GPUs are on one node."""
    setup = make_setup(compose(scaffold(), FaultyCard()), clients_per_round=6)

    def between(round):
        while round.round == 1 and ready(pool) < 2:
            pool._group.wait([], 0.2)

    with (
        a_cluster({PRETENDED: "1"}, num_cpus=2, num_gpus=2),
        pool_on(setup, "card", num_gpus=1.0) as pool,
    ):
        assert played(setup, pool, between) == here(setup)
        assert [member.gpu for member in pool._group._workers] == ["1"]
        pool._group.grow()
        assert pool._group.size == 1, "no other actor is put there"
    assert "failed 2 times; the actor is given up" in caplog.text


def test_actors_on_several_kinds_of_hardware_are_allowed_where_other_bits_are(
    several, make_setup, played
):
    several.add_node(num_cpus=1, env_vars=OTHER)
    setup = make_setup(fedavg(), num_rounds=1, ray=RayOptions(address=several.address, actors=2))
    with open_actors(setup, other_bits=True) as pool:
        played(setup, pool)
        assert len({kind["instructions"] for kind in pool.kinds()}) == 2


def test_a_reply_is_lost_with_its_node(
    a_cluster, make_setup, played, here, pool_on, monkeypatch, caplog
):
    removed = []

    def fetched(pool, call, item, begun, fetch=Pool._fetched):
        """Removes a node when it is the turn of a reply that lies on it."""
        if (
            call.work.kind == "train"
            and item.came
            and item.came.worker.node_id == node.node_id
            and not removed
        ):
            removed.append(cluster.remove_node(node))
        return fetch(pool, call, item, begun)

    setup = make_setup(scaffold(), clients_per_round=6)
    expected = here(setup)
    with a_cluster(IN_STORE, num_cpus=1) as cluster:
        node = cluster.add_node(num_cpus=1)
        monkeypatch.setattr(Pool, "_fetched", fetched)
        # These small ones would all be there in time.
        monkeypatch.setattr(pool_module, "bring", lambda objects: None)
        with pool_on(setup, "reply", actors=2) as pool:
            assert played(setup, pool) == expected
    assert removed
    assert "its reply was lost with actor-" in caplog.text


@dataclass(frozen=True)
class Slow(Part):
    """Waits at each client."""

    def begin(self, client):
        time.sleep(0.2)


def test_a_silent_node_holds_up_neither_the_others_nor_a_deadline(
    a_cluster, make_setup, played, here, pool_on, monkeypatch, caplog
):
    """Its raylet is stopped while the sum of a reply lies there, and Ray itself would wait for that
    for ever.
    """
    monkeypatch.setattr(heartbeat, "HEARTBEAT", 0.5)
    silent, went_on = [], []

    def arrived(dispatch, message, arrived=Pool._arrived):
        if message.worker.node_id != node.node_id:
            went_on.extend(dispatch._coming)
        elif message.kind == "train" and not silent:
            os.kill(raylet, signal.SIGSTOP)
            silent.append(str(message.worker))
        arrived(dispatch, message)

    setup = make_setup(compose(fedavg(), Slow()), clients_per_round=6, num_rounds=2)
    expected = here(setup)
    with a_cluster({**IN_STORE, **PATIENT}, num_cpus=1) as cluster:
        node = cluster.add_node(num_cpus=1)
        raylet = node.all_processes["raylet"][0].process.pid
        monkeypatch.setattr(Pool, "_arrived", arrived)
        try:
            with pool_on(setup, "silent", actors=2, deadline=6.0) as pool:
                assert played(setup, pool) == expected
        finally:
            os.kill(raylet, signal.SIGCONT)
    awaited = f"the reply of .*, round 1 from {silent[0]}"
    given_up = f"its reply did not come from {silent[0]} for \\d+ s; running it again"
    assert re.search(f"waiting for {awaited}(?s:.*){given_up}", caplog.text), (
        "the heartbeat, and then the deadline"
    )
    assert re.search(awaited, went_on[0]), "others answered, and got more work, in the meantime"


def stored_as(setup, reference):
    return Stored(setup.model, setup.federation, setup.job, setup.device, reference=reference)


def test_lost_objects_are_made_again_or_named(several, make_setup, play, bits, pool_on, caplog):
    @ray.remote(num_cpus=0, max_retries=0, resources={"far": 1})
    def leave():
        return np.zeros(10**6)

    node = several.add_node(num_cpus=0, resources={"far": 1})
    lost = leave.remote()
    ray.wait([lost], fetch_local=False)
    several.remove_node(node)

    setup = make_setup(scaffold(), counts=[[4, 4, 4, 4]] * 2, clients_per_round=2, num_rounds=2)
    expected = copy.deepcopy(setup.model)
    with pool_on(stored_as(setup, lost), "objects", actors=1) as pool:
        first = start(setup, pool)
        pool._sent["weights"] = first.weights, lost
        second = next(rounds(setup, pool, first))
        assert pool._group.stored != lost, "the setup was lost, and put again"
        assert "client 0, round 1: an object that it needs was lost" in caplog.text
        found = bits(
            replace(second, memories={c: ray.get(memory) for c, memory in second.memories.items()})
        )
        assert found == bits(play(replace(setup, model=expected))[1])
        with pytest.raises(
            WorkersLost, match=r"client 1, round 2: the memory of client 1 of an earlier .*resume"
        ):
            next(rounds(setup, pool, replace(second, memories={**second.memories, 1: lost})))


def test_the_pool_grows_and_shrinks_with_the_cluster(
    several, make_setup, played, here, pool_on, ready, caplog
):
    setup = make_setup(scaffold(), clients_per_round=6, num_rounds=7)
    expected, added, sizes = here(setup), [], []

    def change(round):
        sizes.append(ready(pool))
        if round.round in (1, 4):
            added.append(several.add_node(num_cpus=1))
        if round.round in (2, 5):
            # Until it has come up.
            while ready(pool) < 2:
                pool._group.wait([], 1.0)
        if round.round == 3:
            several.remove_node(added.pop())

    with caplog.at_level("INFO"), pool_on(setup, "elastic") as pool:
        assert played(setup, pool, change) == expected
    # Not after rounds 2 and 5: whether the new one is up by then is a matter of speed.
    assert [sizes[number - 1] for number in (1, 3, 4, 6, 7)] == [1, 2, 1, 2, 2]
    assert (
        "actors: 1 on " in caplog.text
        and "with room for 1 more" in caplog.text
        and "is back" in caplog.text
    )


@dataclass(frozen=True)
class Meet(Part):
    """Waits at a client until clients have begun on two nodes."""

    folder: str

    def begin(self, client):
        Path(self.folder, ray.get_runtime_context().get_node_id()).touch()
        for _ in range(2400):
            if len([*Path(self.folder).iterdir()]) == 2:
                return
            time.sleep(0.1)
        raise TimeoutError("no client has begun on a second node")


def test_a_node_that_comes_during_a_round_works_in_it(
    several, make_setup, played, here, pool_on, tmp_path, monkeypatch
):
    setup = make_setup(compose(scaffold(), Meet(str(tmp_path))), clients_per_round=6, num_rounds=1)
    (stands_in := tmp_path / "another node").touch()
    expected = here(setup)
    stands_in.unlink()
    (first := tmp_path / several.head_node.node_id).unlink()
    added = []

    def wait(self, working, seconds, wait=WorkerGroup.wait):
        if first.exists() and not added:
            # In this thread, as it sets signal handlers.
            added.append(several.add_node(num_cpus=1))
        return wait(self, working, seconds)

    monkeypatch.setattr(WorkerGroup, "wait", wait)
    with pool_on(setup, "meet") as pool:
        assert played(setup, pool) == expected
        assert len([*tmp_path.iterdir()]) == 2


def test_an_actor_whose_node_ends_in_good_order_is_asked_for_again(
    several, make_setup, played, here, pool_on, tmp_path, free_ports
):
    """By SIGTERM to `ray start`, as pods and spot machines end: an actor that waits for room is
    what adds nodes.
    """
    command = [
        f"{sys.prefix}/bin/ray",
        "start",
        "--block",
        f"--address={several.address}",
        "--num-cpus=1",
    ]
    with subprocess.Popen([*command, *free_ports], stdout=subprocess.DEVNULL) as node:
        while len(alive := [one["NodeID"] for one in ray.nodes() if one["Alive"]]) < 2:
            time.sleep(0.2)
        (other,) = {*alive} - {several.head_node.node_id}
        method = compose(scaffold(), Linger(other, str(tmp_path / "there")))
        setup = make_setup(method, clients_per_round=6)
        expected = here(setup)
        with once(tmp_path / "there", node.terminate), pool_on(setup, "ends", actors=2) as pool:
            assert played(setup, pool) == expected
            # Ten seconds in which Ray may call it dead, and more where the machine is busy.
            for turn in range(1000):
                pool._group.wait([], 0.2)
                named = [one for one in actors().values() if one["Name"].startswith("ends/")]
                waits = {one["State"] for one in named} & {"PENDING_CREATION", "RESTARTING"}
                if turn > 50 and waits:
                    break
            assert pool._group.size == 2
            assert waits


def drain(cluster, node):
    """As a spot machine's notice, or an autoscaler, does it: the node takes no new actors, and ends
    later.
    """
    command = [
        f"{sys.prefix}/bin/ray",
        "drain-node",
        "--address",
        cluster.address,
        "--node-id",
        node.node_id,
    ]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True)


@dataclass(frozen=True)
class WhereRounds(Part):
    """Says of each round on which nodes its clients were."""

    folder: str

    def begin(self, client):
        Path(self.folder, f"{client.round} {ray.get_runtime_context().get_node_id()}").touch()


def test_a_node_that_drains_gets_no_new_work(
    several, make_setup, played, here, pool_on, tmp_path, monkeypatch, caplog
):
    """An actor takes the place of the one there: where it waits for room, it is what adds nodes."""
    monkeypatch.setattr(worker_group, "NODES_PAUSE", 0.2)
    node = several.add_node(num_cpus=1)
    setup = make_setup(
        compose(scaffold(), WhereRounds(str(tmp_path))), clients_per_round=6, num_rounds=5
    )
    expected = here(setup)
    for file in tmp_path.iterdir():
        file.unlink()

    def change(round):
        if round.round == 1:
            drain(several, node)
            while pool._group.head.draining != {node.node_id}:
                pool._group.grow()

    with pool_on(setup, "drains", actors=2) as pool:
        assert played(setup, pool, change) == expected
        places = {file.name for file in tmp_path.iterdir()}
        head = several.head_node.node_id
        assert {f"1 {head}", f"1 {node.node_id}"} <= places
        assert {place for place in places if place[0] in "345"} == {
            f"{round} {head}" for round in (3, 4, 5)
        }
        assert pool._group.size == 2
        states = {one["State"] for one in actors().values() if one["Name"].startswith("drains/")}
        assert states == {"ALIVE", "DEAD", "PENDING_CREATION"}
    assert (
        caplog.text.count("is on a node that is about to end; another actor takes its place") == 1
    )
    assert "run again" not in caplog.text


def test_work_that_is_lost_with_a_node_that_drains_does_not_count(
    several, make_setup, played, here, pool_on, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(worker_group, "NODES_PAUSE", 0.2)
    node = several.add_node(num_cpus=1)
    setup = make_setup(
        compose(scaffold(), Linger(node.node_id, str(tmp_path / "there"))), clients_per_round=6
    )
    expected = here(setup)

    def lose():
        drain(several, node)
        while node.node_id not in pool._group.head.draining:
            time.sleep(0.1)
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)

    with pool_on(setup, "drained", actors=2, max_retries=0) as pool, once(tmp_path / "there", lose):
        assert played(setup, pool) == expected
    assert re.search(
        r"round \d: lost with actor-\d on .*; running (it|its \d tasks) again", caplog.text
    )


@ray.remote(num_cpus=0)
def late(setup):
    """The setup, as over a network that is slow."""
    time.sleep(45.0)
    return setup


def test_an_actor_that_waits_for_its_data_is_not_restarted(
    a_cluster, make_setup, here, on_ray, monkeypatch, caplog
):
    """Neither does the run end, although the data need longer than an actor may need to come up."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT", 0.5)
    monkeypatch.setattr(heartbeat, "STARTING", 0.5)
    monkeypatch.setattr(worker_group, "UP_LIMIT", 40.0)
    monkeypatch.setattr(worker_group, "LATE", 3.0)
    setup = make_setup(fedavg(), num_rounds=1)
    with a_cluster(num_cpus=1):
        assert on_ray(stored_as(setup, late.remote(setup)), 1, patience=5.0) == here(setup)
    assert re.search(r"s; waiting for actor-0 on [\d.]+ to get the data", caplog.text)
    assert "to come up" not in caplog.text.partition("to get the data")[2]


def sh(script):
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


QUIETLY = {"shell": True, "capture_output": True}


@contextmanager
def two_machines(a_cluster, environment):
    """A head in this network namespace, and a node in another: as on two machines, with a link
    between them.

    One at a time: its names and addresses are the machine's.
    """
    with Path(tempfile.gettempdir(), "rayfed-far.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with far_machine(a_cluster, environment):
            yield


@contextmanager
def far_machine(a_cluster, environment):
    # What a run of this test has left that was killed.
    subprocess.run("ip link delete rayfed0; ip netns delete rayfed-far", **QUIETLY)
    sh("""
    ip netns add rayfed-far
    ip link add rayfed0 type veth peer name rayfed1
    ip link set rayfed1 netns rayfed-far
    ip addr add 10.93.7.1/24 dev rayfed0
    ip link set rayfed0 up
    ip -n rayfed-far addr add 10.93.7.2/24 dev rayfed1
    ip -n rayfed-far link set rayfed1 up
    ip -n rayfed-far link set lo up
    """)
    try:
        with a_cluster(environment, num_cpus=1, node_ip_address="10.93.7.1") as cluster:
            start = [f"{sys.prefix}/bin/ray", "start", "--block", f"--address={cluster.address}"]
            start += [
                "--node-ip-address=10.93.7.2",
                "--num-cpus=1",
                f"--object-store-memory={150 * 2**20}",
            ]
            with subprocess.Popen(
                ["ip", "netns", "exec", "rayfed-far", *start], stdout=subprocess.DEVNULL
            ) as node:
                try:
                    yield
                finally:
                    sh("ip netns pids rayfed-far | xargs --no-run-if-empty kill -9")
                    node.wait(240)
    finally:
        subprocess.run("ip link delete rayfed0; ip netns delete rayfed-far", **QUIETLY)


def node_at(address):
    """The id of the node with this address, once it is up."""
    for _ in range(1800):
        for node in ray.nodes():
            if node["Alive"] and node["NodeManagerAddress"] == address:
                return node["NodeID"]
        time.sleep(0.1)
    raise TimeoutError(address)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip to make a network"
)
@pytest.mark.parametrize(
    "noticed",
    [pytest.param(True, id="noticed", marks=pytest.mark.chaos), pytest.param(False, id="silent")],
)
def test_a_link_is_cut_and_healed(
    a_cluster, make_setup, played, here, pool_on, tmp_path, caplog, noticed
):
    """Either Ray notices that a node is gone, and gives it up; or our deadline comes first, and the
    node returns.
    """
    with two_machines(a_cluster, {} if noticed else PATIENT):
        node = node_at("10.93.7.2")
        method = compose(scaffold(), Linger(node, str(tmp_path / "there"), seconds=3.0))
        setup = make_setup(method, clients_per_round=6, num_rounds=4)
        expected = here(setup)
        cut = partial(sh, "ip link set rayfed0 down; sleep 16; ip link set rayfed0 up")
        deadline = "auto" if noticed else 10.0
        with (
            once(tmp_path / "there", cut),
            pool_on(setup, "cut", actors=2, deadline=deadline) as pool,
        ):
            assert played(setup, pool) == expected
    assert ("lost with actor" if noticed else "no answer from actor") in caplog.text
    assert "on 10.93.7.2" in caplog.text
