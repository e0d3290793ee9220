"""A run that really loses actors, calls or objects has the same bits as a run that loses nothing."""

import ctypes
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import torch
from ray._private import state
from ray.exceptions import ActorUnavailableError, OutOfDiskError
from torch import nn

import rayfed
from rayfed.base.errors import ClientFailed, KilledActors, RunFailed, WorkersLost
from rayfed.methods import Part, compose, fedavg, scaffold
from rayfed.rounds.engine import rounds
from rayfed.runtime import dispatch, heartbeat
from rayfed.runtime.calls import Call, Deadline
from rayfed.tensors.wire import pack


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("not me")


class Demanding(Exception):
    """Cannot be unpickled: its arguments are not those of its class."""

    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")


def throw(error):
    raise error


HARMS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),  # in native code
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(3600),
    "plain": lambda: throw(KeyError("no such thing at this client")),
    "unpicklable": lambda: throw(Unpicklable("no such thing at this client")),
    "demanding": lambda: throw(Demanding("no such thing", "this client")),
    "memory": lambda: throw(torch.OutOfMemoryError("CUDA out of memory")),
    "disk": lambda: throw(OSError(28, "No space left on device")),
    "GPU": lambda: throw(torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nMore.")),
}


def happens(folder, times):
    """Whether something is to happen once more, of so many times in all: counted in a folder, by all processes."""
    count = len(list(Path(folder).iterdir())) if times else 0
    if count < times:
        Path(folder, str(count)).touch()
    return count < times


@dataclass(frozen=True)
class Harm(Part):
    """Harms the process that trains a client, or raises an exception there, a number of times."""

    what: str
    folder: str
    times: int = 1
    client: int = 1
    round: int = 2

    def begin(self, client):
        if (client.id, client.round) == (self.client, self.round) and happens(self.folder, self.times):
            HARMS[self.what]()


@dataclass(frozen=True)
class Surveyed(Part):
    """Kills the process that surveys a client."""

    folder: str
    times: int

    def survey(self, client):
        if happens(self.folder, self.times):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Slow(Part):
    """Waits at each client."""

    seconds: float

    def begin(self, client):
        time.sleep(self.seconds)


class Trap(nn.Module):
    """Kills its process, or raises an error, when the model is evaluated or unpickled; if named, by one actor only."""

    def __init__(self, inner, stage, folder, times, actor=""):
        super().__init__()
        self.inner, self.stage, self.folder, self.times, self.actor = inner, stage, folder, times, actor

    def forward(self, x):
        if not self.training:
            self.spring("evaluate")
        return self.inner(x)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.spring("open")
        self.spring("refuse")

    def spring(self, stage):
        if stage != self.stage or not Path(self.folder).exists():
            return
        if self.actor and ray.get_runtime_context().get_actor_name() != self.actor:
            return
        if happens(self.folder, self.times):
            if stage == "refuse":
                raise OSError("a broken library on this node")
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def folder(tmp_path):
    """Where `happens` counts."""
    (folder := tmp_path / "happened").mkdir()
    return str(folder)


def pids(run):
    """The processes of a run's actors, once all of them are up."""
    actors = [ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith(run)]
    while True:
        try:
            return set(ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors]))
        except ActorUnavailableError:  # it is being restarted
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["SIGKILL", "crash", "abort"])
def test_a_process_that_dies_in_training_changes_nothing(cluster, make_site, here, on_ray, folder, caplog, what):
    site = make_site(compose(scaffold(), Harm(what, folder, times=2)), clients_per_round=6)
    result = on_ray(site, 2)
    assert not happens(folder, 2), "it did happen, twice"
    assert result == here(site)
    assert "client 1, round 2: lost with actor-" in caplog.text
    assert caplog.text.count("running it again") == 2, "no other call was waiting on a process that died"
    assert "is back" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["open", "refuse", "evaluate", "survey"])
def test_a_process_that_dies_at_another_moment_changes_nothing(cluster, make_site, here, on_ray, folder, stage):
    def site(times):
        made = make_site(compose(scaffold(), Surveyed(folder, times if stage == "survey" else 0)), num_rounds=2)
        made.model.features = Trap(made.model.features, stage, folder, times)
        return made

    assert on_ray(site(times=2), 2) == here(site(times=0))
    assert not happens(folder, 2), "it did happen, twice"


@pytest.mark.slow
def test_idle_actors_that_die_between_rounds_change_nothing(cluster, make_site, played, here, pool_on):
    """No call waits for them: Ray has restarted them before the driver notices, and they have not opened the run."""
    site = make_site(scaffold(), num_rounds=4, clients_per_round=6)
    killed = []

    def kill(round):
        for pid in pids("idle/"):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        if round.round == 2:
            while not pids("idle/").isdisjoint(killed):  # until Ray has restarted them, before they are opened
                time.sleep(0.1)

    with pool_on(site, "idle", actors=2) as pool:
        assert played(site, pool, kill) == here(site)
    assert len(set(killed)) == 8


@pytest.mark.chaos  # the slow chaos test kills too; this one does so more often
def test_a_process_killed_every_second_and_a_half_changes_nothing(cluster, make_site, here, on_ray):
    """And each client is in each round once: `bits` has all clients."""

    def site(seconds):
        return make_site(compose(scaffold(), Slow(seconds)), num_rounds=12, clients_per_round=6)

    killed, over = [], threading.Event()

    def kill():
        while len(killed) < 13 and not over.wait(1.5):
            alive = [a for a in state.actors().values() if a["State"] == "ALIVE" and a["Name"].startswith("test-")]
            if alive:
                killed.append(random.Random(len(killed)).choice(alive)["Pid"])
                os.kill(killed[-1], signal.SIGKILL)

    (killer := threading.Thread(target=kill)).start()
    try:
        result = on_ray(site(0.3), 2, max_retries=13)
    finally:
        over.set()
        killer.join()
    assert len(killed) >= 6, "every client lasts 0.3 s, and two work at a time: ten seconds at least"
    assert result == here(site(0.0))


@pytest.mark.slow
def test_a_broken_actor_takes_no_work_from_the_others(cluster, make_site, played, here, pool_on, tmp_path, caplog):
    """It fails every call at once, and so might look idle."""
    site = make_site(scaffold(), num_rounds=4, clients_per_round=6)
    site.model.features = Trap(site.model.features, "refuse", tmp_path / "from now on", 99, "broken/actor-0")
    expected = here(site)

    def break_it(round):
        if round.round == 1:
            ray.kill(ray.get_actor("broken/actor-0"), no_restart=False)  # first: it is at work on the next round
            (tmp_path / "from now on").mkdir()
        while round.round == 2 and "given up" not in caplog.text:  # Ray takes its time to start it again
            pool._crew.wait([], 1.0)

    with pool_on(site, "broken", actors=2) as pool:
        assert played(site, pool, break_it) == expected
    assert re.search(r"(?s)actor-0 on [\d.]+ could not open the run, and is given up.*a broken library", caplog.text)
    assert caplog.text.count("running it again") <= 1, "at most the call that it was working on"


@pytest.mark.slow
def test_an_actor_that_hangs_is_killed_and_its_client_run_elsewhere(cluster, make_site, here, on_ray, folder, caplog):
    site = make_site(compose(scaffold(), Harm("hang", folder)), clients_per_round=6)
    result = on_ray(site, 2, deadline=20.0)  # enough for the other clients, also on a busy machine
    assert result == here(site)
    message = r"client 1, round 2: no answer from actor-\d on [\d.]+ for \d+ s; it is killed"
    assert re.search(message, caplog.text)


def test_a_client_may_take_ten_times_as_long_as_the_longest_before():
    def call(size, kind="fit"):
        return Call(kind, "", size)

    deadline = Deadline("auto")
    assert deadline.seconds(call(10)) == 3600
    deadline.took(call(10), seconds=2.0)
    assert deadline.seconds(call(10)) == 300
    deadline.took(call(10), seconds=100.0)
    deadline.took(call(10), seconds=50.0)
    assert deadline.seconds(call(5)) == deadline.seconds(call(10)) == 1000
    assert deadline.seconds(call(30)) == 3000, "three times as many samples as the longest call had"
    assert deadline.seconds(call(10, "evaluate")) == 3600, "another kind of work"
    assert Deadline(7.5).seconds(call(10)) == 7.5
    assert Deadline(7.5).seconds(Call("evaluate", "", 3000, pieces=[(0, 1000), (1000, 2000), (2000, 3000)])) == 22.5


@pytest.mark.slow
def test_answers_that_came_while_the_driver_was_busy_are_not_late(cluster, make_site, played, here, pool_on, caplog):
    site = make_site(compose(fedavg(), Slow(0.01)), clients_per_round=6)
    with pool_on(site, "busy", actors=2, deadline=2.0, max_retries=0) as pool:
        # A slow tracker or disk: actors are done with what they have, and their answers lie there.
        assert played(site, pool, between=lambda round: time.sleep(3.0)) == here(site)
    assert "no answer" not in caplog.text


@pytest.mark.slow
def test_a_heartbeat_names_the_awaited_client_and_actor_less_and_less_often(
    cluster, make_site, on_ray, folder, monkeypatch, caplog
):
    monkeypatch.setattr(heartbeat, "HEARTBEAT", 0.25)
    site = make_site(compose(Harm("hang", folder, round=1)), num_rounds=1)
    on_ray(site, 1, deadline=6.0)
    before = caplog.text.partition("client 1, round 1: no answer")[0]  # a slow machine may also lose other calls
    beats = re.findall(r"no progress for \d+ s; waiting for client 1, round 1 on actor-0 on [\d.]+", before)
    assert 2 <= len(beats) <= 5, "after 0.25, 0.5, 1, 2 and 4 s"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("full", "why"), [(False, r"\w+Error\)"), (True, r"out of memory\)(?s:.*)fewer actors per node")]
)
def test_work_that_kills_every_worker_ends_the_run(cluster, make_site, on_ray, folder, monkeypatch, full, why):
    monkeypatch.setattr(dispatch, "memory_was_full", lambda process: full)  # test_memory.py asks a real Ray
    site = make_site(compose(Harm("exit", folder, times=99, round=1)), clients_per_round=6)
    words = rf"client 1, round 1: lost 2 times, .*the last time: lost with actor-\d on [\d.]+ \({why}"
    with pytest.raises(WorkersLost, match=words):
        on_ray(site, 2, max_retries=1)


@pytest.mark.slow
def test_work_that_kills_every_worker_again_after_a_resume_ends_the_run_for_good(cluster, folder, tmp_path):
    job = {
        "name": "again",
        "model": "lenet",
        "data": {"partition": {"name": "iid", "num_clients": 2}},
        "train": {"num_rounds": 2, "clients_per_round": 2, "local_steps": 1},
        "ray": {"address": cluster, "actors": 1, "max_retries": 1},
        "output": {"path": str(tmp_path / "runs")},
    }
    codes = []
    for _ in range(2):
        with pytest.raises(KilledActors, match="client 1, round 2: lost 2 times") as caught:
            rayfed.run(job, method=compose(Harm("exit", folder, times=99)), resume=True)
        codes.append(caught.value.exit_code)
    assert codes == [75, 1]
    assert any("ended in the same way before" in note for note in caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("plain", "no such thing at this client"),
        ("unpicklable", "no such thing at this client"),
        ("demanding", "no such thing at this client"),
        ("memory", "CUDA out of memory.*try a larger ray.num_gpus"),
        ("GPU", "uncorrectable ECC error"),
        ("disk", "No space left on device"),
    ],
)
def test_a_clients_own_exception_ends_the_run_at_once(cluster, make_site, on_ray, folder, error, message):
    site = make_site(compose(Harm(error, folder, times=2, client=3, round=1)), clients_per_round=6)
    with pytest.raises(ClientFailed, match=rf"(?s)client 3, round 1 failed on [\d.]+ .*{message}") as caught:
        on_ray(site, 2)
    assert (caught.value.client, caught.value.round) == (3, 1)
    assert happens(folder, 2) == (error != "GPU"), "only after an error of CUDA's the client was tried once more"


@pytest.mark.slow
def test_an_actor_that_can_never_open_the_run_says_why(cluster, make_site, on_ray, folder):
    site = make_site(fedavg())
    site.model.features = Trap(site.model.features, "refuse", folder, 99)
    with pytest.raises(RunFailed, match=r"(?s)no actor could open the run.*a broken library on this node"):
        on_ray(site, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "error", "enter"),
    [
        ("wait", OSError("Broken pipe"), lambda pool, site: list(rounds(site, pool))),
        ("get", ValueError("no such object"), lambda pool, site: pool.recall(ray.put(1))),
        ("put", OutOfDiskError("Local disk is full"), lambda pool, site: pool.remember(pack({}))),
    ],
)
def test_an_error_of_rays_own_is_lost_workers(cluster, make_site, pool_on, monkeypatch, call, error, enter):
    """As Ray raises them in C++ where its node is gone, or has no room."""
    exec("def fails(*_, **__): raise error", names := {"__name__": "ray._raylet", "error": error})
    with pool_on(site := make_site(scaffold()), "ray-fails", actors=1) as pool, monkeypatch.context() as patch:
        patch.setattr(ray, call, names["fails"])
        with pytest.raises(WorkersLost, match=f"Ray has failed here .*{error.args[0]}"):
            enter(pool, site)
