"""What becomes of a run whose actors, calls or objects are lost: each of them for real, and the same bits."""

import ctypes
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray
import torch
from ray._private import state
from ray.exceptions import ActorUnavailableError
from torch import nn

from rayfed.job import RayOptions
from rayfed.local import ClientFailed, RunFailed
from rayfed.methods import Part, compose, fedavg, scaffold
from rayfed.runtime import dispatch
from rayfed.runtime.crew import WorkersLost
from rayfed.runtime.dispatch import Call, Deadline
from rayfed.runtime.session import workers

HARMS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),  # in native code
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(3600),
}


def happens(folder, times):
    """Whether something is to happen once more: counted in a folder, across processes, up to so many times."""
    count = len(list(Path(folder).iterdir())) if times else 0
    if count < times:
        Path(folder, str(count)).touch()
    return count < times


@dataclass(frozen=True)
class Harm(Part):
    """Does something to the process that trains a client, a number of times."""

    what: str
    folder: str
    times: int = 1
    client: int = 1
    round: int = 2

    def begin(self, client):
        if (client.id, client.round) == (self.client, self.round) and happens(self.folder, self.times):
            HARMS[self.what]()


@dataclass(frozen=True)
class Fail(Part):
    """Raises an exception of its own at one client."""

    error: str

    def begin(self, client):
        if client.id == 3:
            raise ERRORS[self.error]


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
    """Takes its time at each client."""

    seconds: float

    def begin(self, client):
        time.sleep(self.seconds)


class Unpicklable(Exception):
    """Cannot be sent as it is."""

    def __reduce__(self):
        raise TypeError("not me")


ERRORS = {
    "plain": KeyError("no such thing at this client"),
    "unpicklable": Unpicklable("no such thing at this client"),
    "memory": torch.OutOfMemoryError("CUDA out of memory"),
}


class Trap(nn.Module):
    """Kills the process where it is when a model is evaluated, or taken from a message."""

    def __init__(self, inner, stage, folder="", times=0):
        super().__init__()
        self.inner, self.stage, self.folder, self.times = inner, stage, folder, times

    def forward(self, x):
        if self.stage == "evaluate" and not self.training and happens(self.folder, self.times):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)

    def __setstate__(self, state):
        super().__setstate__(state)
        if self.stage == "open" and happens(self.folder, self.times):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.stage == "refuse" and happens(self.folder, self.times):
            raise OSError("a broken library on this node")


class Broken(nn.Module):
    """Cannot be taken from a message by one actor, from when a file is there."""

    def __init__(self, inner, actor, file):
        super().__init__()
        self.inner, self.actor, self.file = inner, actor, file

    def forward(self, x):
        return self.inner(x)

    def __setstate__(self, state):
        super().__setstate__(state)
        if Path(self.file).exists() and ray.get_runtime_context().get_actor_name() == self.actor:
            raise OSError("a broken library on this node")


@pytest.fixture
def folder(tmp_path):
    """Where it is counted how often something has happened."""
    (folder := tmp_path / "happened").mkdir()
    return str(folder)


def joined(**options):
    return RayOptions(address=ray.get_runtime_context().gcs_address, **options)


def pids(run):
    """The processes of a run's actors, once all of them are there."""
    actors = [ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith(run)]
    while True:
        try:
            return set(ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors]))
        except ActorUnavailableError:  # it is being restarted
            time.sleep(0.1)


@pytest.mark.parametrize("what", ["SIGKILL", *(pytest.param(w, marks=pytest.mark.slow) for w in ("crash", "abort"))])
def test_a_process_that_dies_in_training_changes_nothing(cluster, make_site, here, on_ray, folder, caplog, what):
    site = make_site(compose(scaffold(), Harm(what, folder, times=2)), clients_per_round=6)
    result = on_ray(site, 2)
    assert not happens(folder, 2), "it did happen"
    assert result == here(site)
    assert "client 1, round 2: lost with actor client-" in caplog.text
    assert caplog.text.count("running it again") == 2, "nothing else was waiting on a process that died"
    assert "is back" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["open", "refuse", "evaluate", "survey"])
def test_a_process_that_dies_at_another_moment_changes_nothing(cluster, make_site, here, on_ray, folder, stage):
    site = make_site(compose(scaffold(), Surveyed("", 0)), num_rounds=2)
    site.model.features = Trap(site.model.features, stage)
    expected = here(site)
    site.model.features.folder, site.model.features.times = folder, 2
    if stage == "survey":
        site = replace(site, method=compose(scaffold(), Surveyed(folder, 2)))
    assert on_ray(site, 2) == expected
    assert not happens(folder, 2), "it did happen"


@pytest.mark.slow
def test_an_idle_actor_may_die_and_all_of_them_at_any_time(cluster, make_site, played, here):
    """Between rounds nobody waits for it: Ray has restarted it before we know, and it knows nothing of the run."""
    site = make_site(scaffold(), num_rounds=4, clients_per_round=6)
    killed = []

    def kill(round):
        for pid in pids("idle/"):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        if round.round == 2:
            while not pids("idle/").isdisjoint(killed):  # until Ray has restarted them, and nobody has opened them
                time.sleep(0.1)

    with workers(joined(actors=2), "idle", site) as pool:
        assert played(site, pool, kill) == here(site)
    assert len(set(killed)) == 8


@pytest.mark.slow
def test_a_process_killed_every_second_and_a_half_changes_nothing(cluster, make_site, here, on_ray):
    """And each client is in each round once: `bits` has them all."""
    site = make_site(compose(scaffold(), Slow(0.3)), num_rounds=12, clients_per_round=6)
    killed, over = [], threading.Event()

    def kill():
        while len(killed) < 13 and not over.wait(1.5):
            alive = [a for a in state.actors().values() if a["State"] == "ALIVE" and a["Name"].startswith("test-")]
            if alive:
                killed.append(random.Random(len(killed)).choice(alive)["Pid"])
                os.kill(killed[-1], signal.SIGKILL)

    (killer := threading.Thread(target=kill)).start()
    try:
        result = on_ray(site, 2, max_retries=13)
    finally:
        over.set()
        killer.join()
    assert len(killed) >= 6, "every client lasts 0.3 s, and two work at a time: ten seconds at least"
    assert result == here(replace(site, method=compose(scaffold(), Slow(0.0))))


@pytest.mark.slow
def test_an_actor_that_is_broken_takes_no_work_from_the_others(cluster, make_site, played, here, tmp_path, caplog):
    """It fails at once whatever it is asked, and so would look idle to who did not look twice."""
    site = make_site(scaffold(), num_rounds=4, clients_per_round=6)
    site.model.features = Broken(site.model.features, "broken/client-0", str(tmp_path / "from now on"))
    expected = here(site)

    def break_it(round):
        if round.round == 1:
            (tmp_path / "from now on").touch()
            ray.kill(ray.get_actor("broken/client-0"), no_restart=False)
        while round.round == 2 and "given up" not in caplog.text:  # Ray takes its time to start it again
            pool._crew.wait([], 1.0)

    with workers(joined(actors=2), "broken", site) as pool:
        assert played(site, pool, break_it) == expected
    assert re.search(
        r"(?s)client-0 on [\d.]+ could not take up the run, and is given up.*a broken library", caplog.text
    )
    assert caplog.text.count("running it again") <= 1, "at most what it had in hand"


@pytest.mark.slow
def test_an_actor_that_hangs_is_killed_and_its_client_run_elsewhere(cluster, make_site, here, on_ray, folder, caplog):
    site = make_site(compose(scaffold(), Harm("hang", folder)), clients_per_round=6)
    result = on_ray(site, 2, deadline=20.0)  # a busy machine is no mistake
    assert result == here(site)
    assert re.search(
        r"client 1, round 2: no answer from actor client-\d on [\d.]+ for \d+ s; it is killed", caplog.text
    )


def test_a_client_may_take_ten_times_as_long_as_the_longest_before(cluster):
    def call(size, kind="fit"):
        return Call(kind, "", size, lambda actor: [])

    deadline = Deadline("auto")
    assert deadline.of(call(10)) == 3600
    deadline.took(call(10), seconds=2.0)
    assert deadline.of(call(10)) == 300
    deadline.took(call(10), seconds=100.0)
    deadline.took(call(10), seconds=50.0)
    assert deadline.of(call(5)) == deadline.of(call(10)) == 1000
    assert deadline.of(call(30)) == 3000, "three times as many samples as the longest had"
    assert deadline.of(call(10, "evaluate")) == 3600, "another kind of work"
    assert Deadline(7.5).of(call(10)) == 7.5


@pytest.mark.slow
def test_a_heartbeat_says_who_is_awaited_and_where_and_less_and_less_often(
    cluster, make_site, on_ray, folder, monkeypatch, caplog
):
    monkeypatch.setattr(dispatch, "HEARTBEAT", 0.25)
    site = make_site(compose(Harm("hang", folder, round=1)), num_rounds=1)
    on_ray(site, 1, deadline=6.0)
    before = caplog.text.partition("no answer")[0]
    beats = re.findall(r"no progress for \d+ s; waiting for client 1, round 1 on actor client-0 on [\d.]+", before)
    assert 2 <= len(beats) <= 5, "after 0.25, 0.5, 1, 2 and 4 s"


def test_work_that_kills_every_worker_ends_the_run(cluster, make_site, on_ray, folder):
    site = make_site(compose(Harm("exit", folder, times=99, round=1)), clients_per_round=6)
    with pytest.raises(WorkersLost, match=r"client 1, round 1: lost 2 times, .*the last time: lost with actor client-"):
        on_ray(site, 2, max_retries=1)


@pytest.mark.parametrize("error", ["plain", pytest.param("unpicklable", marks=pytest.mark.slow)])
def test_a_clients_own_exception_ends_the_run_at_once(cluster, make_site, on_ray, error):
    site = make_site(compose(Fail(error)), clients_per_round=6)
    with pytest.raises(
        ClientFailed, match=r"(?s)client 3, round 1 failed on [\d.]+ .*no such thing at this client"
    ) as e:
        on_ray(site, 2)
    assert (e.value.client, e.value.round) == (3, 1)


def test_a_client_without_enough_gpu_memory_is_told_what_to_ask_for(cluster, make_site, on_ray):
    site = make_site(compose(Fail("memory")), clients_per_round=6)
    with pytest.raises(ClientFailed, match=r"(?s)client 3, round 1 failed.*try a larger ray.num_gpus"):
        on_ray(site, 2)


def test_an_actor_that_can_never_be_opened_says_why(cluster, make_site, on_ray, folder):
    site = make_site(fedavg())
    site.model.features = Trap(site.model.features, "refuse", folder, 99)
    with pytest.raises(RunFailed, match=r"(?s)no actor could take up the run.*a broken library on this node"):
        on_ray(site, 1)
