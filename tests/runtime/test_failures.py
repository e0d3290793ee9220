"""What a run survives in its actors: a table of harms, their moments, and the ends that are
expected, on a real Ray.

The end is the bits of a run that loses nothing, with words in its log; or an error, with its words.
"""

import ctypes
import os
import re
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import ray
import torch
from ray.exceptions import ActorUnavailableError, OutOfDiskError
from torch import nn

import rayfed
from rayfed.base.errors import ClientFailed, KilledActors, RunFailed, WorkersLost
from rayfed.methods import Part, compose, fedavg, scaffold
from rayfed.rounds.engine import rounds
from rayfed.runtime import heartbeat
from rayfed.runtime.deadline import Deadline
from rayfed.runtime.head import Head
from rayfed.tensors.wire import pack

# Torch before 2.8 has no such class.
GPU_ERROR = getattr(torch, "AcceleratorError", RuntimeError)

slow = pytest.mark.slow


@dataclass(frozen=True)
class Row:
    """A harm at a moment, and how a run with it ends: with the same bits and these words in its
    log, or in an error.
    """

    harm: str
    moment: str = "begin"
    times: int = 2
    client: int = 1
    ray: dict = field(default_factory=dict)
    # Regular expressions.
    logs: tuple[str, ...] = ()
    error: type[Exception] | None = None
    # A regular expression.
    says: str = ""

    def __str__(self):
        return f"{self.harm}-{self.moment}"


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
    # In native code.
    "crash": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(3600),
    "plain": lambda: throw(KeyError("no such thing at this client")),
    "unpicklable": lambda: throw(Unpicklable("no such thing at this client")),
    "demanding": lambda: throw(Demanding("no such thing", "this client")),
    "memory": lambda: throw(torch.OutOfMemoryError("CUDA out of memory")),
    "iteration": lambda: throw(StopIteration("no such thing")),
    "library": lambda: throw(OSError("a broken library on this node")),
    "disk": lambda: throw(OSError(28, "No space left on device")),
    "GPU": lambda: throw(GPU_ERROR("CUDA error: uncorrectable ECC error encountered\nMore.")),
}


def happens(folder, times):
    """Whether something is to happen once more, of so many times in all: counted in a folder, by
    all processes.
    """
    count = len(list(Path(folder).iterdir())) if times else 0
    if count < times:
        Path(folder, str(count)).touch()
    return count < times


@dataclass(frozen=True)
class Harm(Part):
    """Harms the process that surveys a client or trains it in round 2, or raises an exception
    there, some times.
    """

    harm: str
    moment: str
    folder: str
    times: int
    client: int = 1

    def begin(self, client):
        if self.moment == "begin" and (client.id, client.round) == (self.client, 2):
            self._harm()

    def _harm(self):
        if happens(self.folder, self.times):
            HARMS[self.harm]()


@dataclass(frozen=True)
class Surveyed(Harm):
    def survey(self, client):
        self._harm()


class Trap(nn.Module):
    """Does harm when the model is evaluated, or opened by an actor; if named, by that actor
    only.
    """

    def __init__(self, inner, harm, moment, folder, times, actor=""):
        super().__init__()
        self.inner, self.harm, self.moment = inner, harm, moment
        self.folder, self.times, self.actor = folder, times, actor

    def forward(self, x):
        if not self.training:
            self.spring("evaluate")
        return self.inner(x)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.spring("open")

    def spring(self, moment):
        if moment != self.moment or not Path(self.folder).exists():
            return
        if self.actor and ray.get_runtime_context().get_actor_name() != self.actor:
            return
        if happens(self.folder, self.times):
            HARMS[self.harm]()


@pytest.fixture
def folder(tmp_path):
    """Where `happens` counts."""
    (folder := tmp_path / "happened").mkdir()
    return str(folder)


@pytest.fixture
def world(make_setup, folder):
    """A setup in which the harm of a row happens, or none."""

    def world(row, times):
        kind = Surveyed if row.moment == "survey" else Harm
        together = {
            "counts": [[20] * 4, *[[2] * 4] * 12],
            "task_images": 20,
            "clients_per_round": 13,
        }
        sizes = together if row.client == 5 else {"clients_per_round": 6}
        setup = make_setup(
            compose(scaffold(), kind(row.harm, row.moment, folder, times, row.client)),
            num_rounds=2,
            **sizes,
        )
        setup.model.features = Trap(setup.model.features, row.harm, row.moment, folder, times)
        return setup

    return world


AGAIN = (r"client 1, round 2: lost with actor-\d on [\d.]+ \(\w+\); running it again", "is back")
HANGS = (
    r"no progress for \d+ s; waiting for client 1, round 2 on actor-\d on [\d.]+",
    r"client 1, round 2: no answer from actor-\d on [\d.]+ for \d+ s; it is killed",
)
NAMED = r"(?s)client 5, round 2 failed on [\d.]+ .*"
LOST = r"client 5, round 2: lost 2 times, .*the last time: lost with actor-\d on [\d.]+ "
# Client 5 goes to an actor together with others.
OWN = partial(Row, client=5, error=ClientFailed)
IN_AN_ACTOR = [
    *(Row(harm, logs=AGAIN) for harm in ("SIGKILL", "crash", "abort")),
    *(Row("SIGKILL", moment) for moment in ("survey", "evaluate", "open")),
    Row("library", "open"),
    # Enough for the others, also on a busy machine.
    Row("hang", times=1, ray={"deadline": 20.0}, logs=HANGS),
    *(
        OWN(harm, says=NAMED + "no such thing")
        for harm in ("plain", "unpicklable", "demanding", "iteration")
    ),
    OWN("memory", says=NAMED + "CUDA out of memory.*try a larger ray.num_gpus"),
    OWN("disk", says=NAMED + "No space left on device"),
    OWN("GPU", says=NAMED + "uncorrectable ECC error"),
    Row(
        "exit",
        times=99,
        client=5,
        ray={"max_retries": 1},
        error=KilledActors,
        says=LOST + r"\(\w+Error\)",
    ),
    Row(
        "library",
        "open",
        times=99,
        error=RunFailed,
        says="(?s)no actor could open the run.*a broken library",
    ),
]


@slow
@pytest.mark.parametrize(
    "row", IN_AN_ACTOR, ids=lambda row: f"{row}-{row.error.__name__ if row.error else 'same'}"
)
def test_what_happens_in_an_actor(cluster, world, here, on_ray, folder, caplog, monkeypatch, row):
    """What kills a process is tried again, elsewhere and then alone.

    A client's own error ends the run at once.
    """
    monkeypatch.setattr(heartbeat, "HEARTBEAT", 0.25)
    expected = None if row.error else here(world(row, 0))
    with pytest.raises(row.error, match=row.says) if row.error else nullcontext() as caught:
        assert on_ray(world(row, row.times), 2, **row.ray) == expected
    if row.error is None:
        assert not happens(folder, row.times), "it did happen, so many times"
    elif row.moment == "begin":
        assert (caught.value.client, caught.value.round) == (5, 2)
    assert all(re.search(words, caplog.text) for words in row.logs)
    if row.logs == AGAIN:
        assert caplog.text.count("running it again") == 2, (
            "no other call was waiting on a process that died"
        )
    if row.error is ClientFailed:
        assert happens(folder, 2) == (row.harm != "GPU"), (
            "only after an error of CUDA's the client was tried once more"
        )
        with pytest.raises(ClientFailed, match="client 5, round 2 failed"):
            here(world(row, 99))


@slow
def test_actors_that_ray_killed_for_their_memory_are_said_to_be_too_many(
    cluster, world, on_ray, monkeypatch
):
    # test_internals.py asks a real Ray.
    monkeypatch.setattr(Head, "memory_was_full", lambda head, process: True)
    with pytest.raises(WorkersLost, match=LOST + r"\(out of memory\)(?s:.*)fewer actors per node"):
        on_ray(world(Row("exit", client=5), 99), 2, max_retries=1)


@slow
def test_work_that_kills_every_worker_again_after_a_resume_ends_the_run_for_good(
    cluster, folder, tmp_path
):
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
            rayfed.run(job, method=compose(Harm("exit", "begin", folder, times=99)), resume=True)
        codes.append(caught.value.exit_code)
    assert codes == [75, 1]
    assert any("ended in the same way before" in note for note in caught.value.__notes__)


# As Ray raises them in C++ where its node is gone, or has no room.
RAYS_OWN = [
    ("get", ValueError("no such object"), lambda pool, setup: pool.recall(ray.put(1))),
    ("put", OutOfDiskError("Local disk is full"), lambda pool, setup: pool.remember(pack({}))),
    # Last: work is under way.
    (
        "wait",
        OSError("Broken pipe"),
        lambda pool, setup: list(rounds(setup, pool)),
    ),
]


@slow
def test_an_error_of_rays_own_is_lost_workers(cluster, make_setup, pool_on, monkeypatch):
    setup = make_setup(scaffold())
    with pool_on(setup, "ray-fails", actors=1) as pool:
        for call, error, enter in RAYS_OWN:
            names = {"__name__": "ray._raylet", "error": error}
            exec("def fails(*_, **__): raise error", names)
            with monkeypatch.context() as patch:
                patch.setattr(ray, call, names["fails"])
                with pytest.raises(WorkersLost, match=f"Ray has failed here .*{error.args[0]}"):
                    enter(pool, setup)


# Between rounds
# ------------------------------------------------------------------------------------------


def pids(run):
    """The processes of a run's actors, once all of them are up."""
    members = [ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith(run)]
    while True:
        try:
            return set(
                ray.get(
                    [member.__ray_call__.remote(lambda self: os.getpid()) for member in members]
                )
            )
        except ActorUnavailableError:
            # It is being restarted.
            time.sleep(0.1)


@slow
def test_idle_actors_that_die_between_rounds_change_nothing(
    cluster, make_setup, played, here, pool_on
):
    """No call waits for them: Ray has restarted them before the driver notices, and they have not
    opened the run.
    """
    setup = make_setup(scaffold(), num_rounds=4, clients_per_round=6)
    killed = []

    def kill(round):
        for pid in pids("idle/"):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        # Until they are restarted, and not yet opened.
        while round.round == 2 and not pids("idle/").isdisjoint(killed):
            time.sleep(0.1)

    with pool_on(setup, "idle", actors=2) as pool:
        assert played(setup, pool, kill) == here(setup)
    assert len(set(killed)) == 8


@slow
def test_a_broken_actor_takes_no_work_from_the_others(
    cluster, make_setup, played, here, pool_on, tmp_path, caplog
):
    """It fails every call at once, and so might look idle."""
    setup = make_setup(scaffold(), num_rounds=4, clients_per_round=6)
    setup.model.features = Trap(
        setup.model.features, "library", "open", tmp_path / "from now on", 99, "broken/actor-0"
    )
    expected = here(setup)

    def break_it(round):
        if round.round == 1:
            actor = ray.get_actor("broken/actor-0")
            process = Path(
                "/proc", str(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))
            )
            ray.kill(actor, no_restart=False)
            # It is at work on the next round, and would fail a client.
            while process.exists():
                time.sleep(0.1)
            (tmp_path / "from now on").mkdir()
        # Ray takes its time to start it again.
        while round.round == 2 and "given up" not in caplog.text:
            pool._group.wait([], 1.0)

    with pool_on(setup, "broken", actors=2) as pool:
        assert played(setup, pool, break_it) == expected
    assert re.search(
        r"(?s)actor-0 on [\d.]+ could not open the run, and is given up.*a broken library",
        caplog.text,
    )
    assert caplog.text.count("running it again") <= 1, "at most the call that it was working on"


@dataclass(frozen=True)
class Slow(Part):
    """Waits at each client."""

    def begin(self, client):
        time.sleep(0.01)


@slow
def test_answers_that_came_while_the_driver_was_busy_are_not_late(
    cluster, make_setup, played, here, pool_on, caplog
):
    setup = make_setup(compose(fedavg(), Slow()), clients_per_round=6)

    def between(round):
        # A slow tracker or disk: actors are done with what they have, and their answers lie there.
        time.sleep(12.0 if round.round == 1 else 0.0)

    # So long that on a busy machine too no client takes longer.
    with pool_on(setup, "busy", actors=2, deadline=10.0, max_retries=0) as pool:
        assert played(setup, pool, between) == here(setup)
    assert "no answer" not in caplog.text


def test_a_client_may_take_ten_times_as_long_as_the_longest_before():
    deadline = Deadline("auto")
    assert deadline.seconds("train", 10, 1) == 3600
    deadline.took("train", 10, 2.0)
    assert deadline.seconds("train", 10, 1) == 300
    deadline.took("train", 10, 100.0)
    deadline.took("train", 10, 50.0)
    assert deadline.seconds("train", 5, 1) == deadline.seconds("train", 10, 1) == 1000
    assert deadline.seconds("train", 30, 1) == 3000, (
        "three times as many samples as the longest call had"
    )
    assert deadline.seconds("evaluation", 10, 1) == 3600, "another kind of work"
    assert Deadline(7.5).seconds("train", 10, 1) == 7.5
    assert Deadline(7.5).seconds("evaluation", 3000, 3) == 22.5
