"""The actors of a run, and the state of each. They come and go with the nodes of the cluster.

A lost worker gets no work until it has opened the run again: a worker that fails fast never looks
like an idle one. Ray restarts it as soon as there is room, on another node if its own is lost.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from rayfed.base.errors import InputError, RunFailed, WorkersLost, uncoloured
from rayfed.folder.provenance import modules_to_send
from rayfed.job import RayOptions, differences
from rayfed.rounds.round import HardwareKind
from rayfed.rounds.setup import Setup
from rayfed.runtime.actors import ClientActor
from rayfed.runtime.causes import cause_of, end_of_ray, lost_object, refuse_input
from rayfed.runtime.head import HEAD_LIMIT, Head
from rayfed.runtime.heartbeat import Heartbeat
from rayfed.runtime.hints import ray_status
from rayfed.runtime.placement import actor_text, actors_text, capacity, nodes_text

log = logging.getLogger(__name__)

# How often in a row a worker may fail to open the run.
MAX_OPENINGS = 3
# How often a worker's GPU may fail until the worker is given up.
MAX_FAULTS = 2
# Seconds until an object that is on its way here is looked for again.
TICK = 0.02
# Seconds, at least, before a worker is asked again.
PAUSE = 0.1
# Seconds in which a worker's process must come up; afterwards it is restarted.
UP_LIMIT = 180.0
# Seconds in which a worker that is up must have the data.
DATA_LIMIT = 3600.0
# Seconds after which a run that works looks for new nodes again.
NODES_PAUSE = 5.0
# Seconds without another worker after which a run starts with those that are up.
LATE = 30.0
OTHER_BITS = "--other-bits (in Python other_bits=True)"
# Awaited workers or pieces of work that a line names.
NAMED = 5


class WorkerState(Enum):
    """The state of a worker."""

    # It was asked where it is, which it answers once its process is up.
    COMING = auto()
    # Its process is up, and it was asked to open the run: to get the data and the model.
    OPENING = auto()
    # Ray has refused to ask it, as it restarts or there is no room yet: it is soon asked again.
    REFUSED = auto()
    # It has opened the run, and waits for work.
    IDLE = auto()
    # A message is with it.
    WORKING = auto()
    # It is not used any more.
    GONE = auto()


TRANSITIONS = {
    WorkerState.COMING: {
        WorkerState.COMING,
        WorkerState.OPENING,
        WorkerState.REFUSED,
        WorkerState.GONE,
    },
    WorkerState.OPENING: {
        WorkerState.COMING,
        WorkerState.IDLE,
        WorkerState.REFUSED,
        WorkerState.GONE,
    },
    WorkerState.REFUSED: {WorkerState.COMING, WorkerState.GONE},
    WorkerState.IDLE: {WorkerState.WORKING, WorkerState.GONE},
    WorkerState.WORKING: {WorkerState.IDLE, WorkerState.COMING, WorkerState.GONE},
    WorkerState.GONE: set(),
}


@dataclass(eq=False)
class Worker:
    """An actor of the run, as the driver knows it."""

    name: str
    actor: Any
    state: WorkerState = WorkerState.COMING
    # Where it last came up: Ray's id of the node, the node's address, the GPU's number there, and
    # Ray's id of its process.
    node_id: str = ""
    node: str = ""
    gpu: str = ""
    process: str = ""
    # The device with which it last opened the run; '' if it never has.
    device: str = ""
    # When it was last asked where it is, or to open the run.
    asked: float = 0.0
    # How often in a row it has failed to open the run, and how often its GPU has failed.
    failures: int = 0
    faults: int = 0

    def become(self, state: WorkerState) -> None:
        """Change the state.

        All changes go through here, and only those in `TRANSITIONS` are possible.
        """
        assert state in TRANSITIONS[self.state], f"{self}: {self.state.name} -> {state.name}"
        log.debug("%s: %s -> %s", self, self.state.name, state.name)
        self.state = state

    @property
    def card(self) -> tuple[str, str]:
        """Return the GPU that it works on, or without one its node."""
        return self.node_id, self.gpu

    def __str__(self) -> str:
        return self.name + (f" on {self.node}" if self.node else "")


@dataclass(eq=False)
class WorkerGroup:
    """All workers of a run."""

    options: RayOptions
    run: str
    setup: Setup
    # The setup in Ray's store.
    stored: ObjectRef
    # The most workers, however large the cluster is.
    most: int
    head: Head
    # Whether workers may be on several kinds of hardware.
    other_bits: bool = False

    def __post_init__(self) -> None:
        # Workers that wait for work, the one that has waited longest first.
        self.idle: deque[Worker] = deque()
        # The kinds of hardware that workers have come up on.
        self.kinds: list[HardwareKind] = []
        # What workers were asked while they come up.
        self.opening: dict[ObjectRef, Worker] = {}
        self._workers: list[Worker] = []
        # Why a worker was given up that came up on another kind of hardware.
        self._mixed = ""
        # The ids of nodes that cannot work for this run.
        self._unfit: set[str] = set()
        self._numbers = itertools.count()
        # When to look for new nodes again.
        self._look_for_nodes_at = 0.0
        # Since when there has been no worker to work on.
        self._alone_since: float | None = None
        # At first, processes must come up.
        self._patience = max(self.options.patience, UP_LIMIT)
        # The last words of the last worker that was given up.
        self._last_words = ""
        # The user's modules, for actors to import them as they were when the run began.
        self._modules = modules_to_send(self.setup.job)

    # The life of the worker group.

    def start(self, count: int) -> None:
        """Create workers, wait for the first and a little for the others, and log which are up.

        Raise `RunFailed` where no worker can open the run, `WorkersLost` as `wait` does, and
        `InputError` where workers are on several kinds of hardware.
        """
        started = latest = time.monotonic()
        heartbeat, up = Heartbeat(starting=True), 0
        self._create(count)
        while len(self.idle) < len(self._workers) and (up == 0 or time.monotonic() < latest + LATE):
            self.wait([], min(heartbeat.left, 1.0))
            if len(self.idle) > up:
                up, latest = len(self.idle), time.monotonic()
                heartbeat.progress()
            heartbeat.beat(self._what_is_awaited)
        if self._mixed:
            raise InputError(
                f"{self._mixed}; give the run nodes of one kind, or allow it with {OTHER_BITS}"
            )
        if not self._workers:
            raise RunFailed(f"no actor could open the run; the last actor said: {self._last_words}")
        places = [(worker.node, worker.device) for worker in self.idle]
        log.info("%s; up after %.1f s", actors_text(places), time.monotonic() - started)
        if up < len(self._workers):
            late = (
                "the others join when the cluster has room: other jobs hold it, "
                "or nodes are starting"
            )
            command = ray_status(self.options)
            if command:
                late += f" ({command})"
            log.warning("the run starts with %d of %d actors; %s", up, len(self._workers), late)
        self._patience = self.options.patience

    def _what_is_awaited(self) -> str:
        """Return the actors that are not up yet, and how to see whether there is room for them."""
        command = ray_status(self.options)
        waiting = named(self.awaited())
        return f"{waiting}; {command} shows whether there is room" if command else waiting

    def grow(self, seconds: float = HEAD_LIMIT) -> None:
        """Replace idle workers on draining nodes, and create more where the cluster has room.

        Nothing happens if the head does not answer in `seconds`.
        """
        by_id = self.head.nodes(seconds)
        if by_id is None:
            return
        for worker in list(self.idle):
            if worker.node_id in self.head.draining:
                self.idle.remove(worker)
                self._replace_on_draining_node(worker)
        nodes = [resources for node, resources in by_id.items() if node not in self._avoided()]
        more = min(self.most, capacity(self.options, nodes)) - len(self._workers)
        if more > 0:
            message = "%s, with room for %d more actors; they join when they are up"
            log.info(message, nodes_text(nodes), more)
            self._create(more)

    def end(self) -> None:
        """Kill all actors at once."""
        actors = [worker.actor for worker in self._workers]
        end_of_ray(lambda: [ray.kill(actor) for actor in actors])
        for worker in self._workers:
            worker.become(WorkerState.GONE)
        self._workers.clear()
        self.idle.clear()
        self.opening.clear()

    @property
    def size(self) -> int:
        """Return the number of workers, with those that are not up."""
        return len(self._workers)

    # What becomes of a worker that has had work.

    def take(self, worker: Worker) -> None:
        """Take an idle worker to give it work."""
        self.idle.remove(worker)
        worker.become(WorkerState.WORKING)

    def free(self, worker: Worker) -> None:
        """Note that a worker has no work. On a node that is about to end it gets no other."""
        if worker.state is WorkerState.GONE:
            return
        worker.become(WorkerState.IDLE)
        if worker.node_id in self.head.draining:
            self._replace_on_draining_node(worker)
        else:
            self.idle.append(worker)

    def bring_up(self, worker: Worker, *, kill: bool = False) -> None:
        """Have a worker open the run again, with `kill` in a new process."""
        if worker.state is WorkerState.GONE:
            # The worker group has ended: a request to Ray would start another Ray.
            return
        worker.become(WorkerState.COMING)
        if kill:
            # This returns at once, even if the actor cannot be reached.
            ray.kill(worker.actor, no_restart=False)
        self._ask(worker, worker.actor.where)

    def replace_after_fault(self, worker: Worker) -> None:
        """Have a new process for a worker whose GPU has failed, or give the worker up.

        The error would stay in its process.
        """
        worker.faults += 1
        if worker.faults < MAX_FAULTS or len(self._workers) == 1:
            self.bring_up(worker, kill=True)
        else:
            message = "the GPU of %s has failed %d times; the actor is given up"
            log.warning(message, worker, worker.faults)
            self._do_without(worker)

    # Waiting.

    def wait(self, working: Sequence[ObjectRef], seconds: float) -> list[ObjectRef]:
        """Wait at most `seconds` until work ends or a worker comes up; returns the work that has.

        New nodes that come meanwhile get workers, too. Raises `WorkersLost` when there has been no
        worker to work on for `ray.patience` seconds. One that is up and gets the data counts.
        """
        now = time.monotonic()
        self._ask_late_ones_again(now)
        refused = any(worker.state is WorkerState.REFUSED for worker in self._workers)
        if refused:
            seconds = min(seconds, PAUSE)
        if now >= self._look_for_nodes_at:
            self._look_for_nodes_at = now + NODES_PAUSE
            self.grow(0.0)
        seconds = min(seconds, self._look_for_nodes_at - now, self._patience_left(working, now))
        if not working and not self.opening:
            time.sleep(min(seconds, 1.0))
            if not refused and not self.idle:
                self.grow()
            return []
        awaited = [*working, *self.opening]
        if not ray.wait(awaited, timeout=seconds, fetch_local=False)[0]:
            return []
        # Take all that have ended, so that none of them looks late. Values that are not here yet
        # are brought in the meantime. If Ray waited for one of these and for the others together,
        # it would let the others wait.
        ready, _ = ray.wait(awaited, num_returns=len(awaited), timeout=0, fetch_local=True)
        if not ready:
            time.sleep(TICK)
        for reference in ready:
            if reference in self.opening:
                self._take_answer(reference)
        at_work = set(working)
        return [reference for reference in ready if reference in at_work]

    def awaited(self) -> list[str]:
        """Say which workers are not there yet, and what they wait for."""
        up, down = [], []
        for worker in self._workers:
            if worker.state is WorkerState.OPENING:
                up.append(f"{worker} to get the data")
            elif worker.state in (WorkerState.COMING, WorkerState.REFUSED):
                down.append(f"{worker} to come up")
        return up + down

    def _ask_late_ones_again(self, now: float) -> None:
        """Restart workers that take too long to come up, and ask those again that Ray refused."""
        for reference, worker in list(self.opening.items()):
            limit = DATA_LIMIT if worker.state is WorkerState.OPENING else UP_LIMIT
            if now > worker.asked + limit:
                del self.opening[reference]
                self.bring_up(worker, kill=True)
        for worker in list(self._workers):
            if worker.state is WorkerState.REFUSED and now >= worker.asked + PAUSE:
                self.bring_up(worker)

    def _patience_left(self, working: Sequence[ObjectRef], now: float) -> float:
        """Return for how long the run still waits for a worker. Raises `WorkersLost` at the end."""
        if working or self.idle or any(w.state is WorkerState.OPENING for w in self._workers):
            self._alone_since = None
            return float("inf")
        self._alone_since = self._alone_since or now
        seconds = self._alone_since + self._patience - now
        if seconds <= 0:
            raise WorkersLost(self._missing())
        return seconds

    # Coming up.

    def _create(self, count: int) -> None:
        """Create workers, and ask each where it is."""
        for _ in range(count):
            name = f"actor-{next(self._numbers)}"
            worker = Worker(name, new_actor(self.options, f"{self.run}/{name}", self._avoided()))
            self._workers.append(worker)
            self.bring_up(worker)

    def _ask(self, worker: Worker, method: Any, *arguments: Any) -> None:
        """Call a method of a worker's actor; `wait` takes the answer."""
        worker.asked = time.monotonic()
        self.opening[method.remote(*arguments)] = worker

    def _take_answer(self, reference: ObjectRef) -> None:
        """Take the answer of a worker that is up, has opened the run, or failed to."""
        worker = self.opening.pop(reference)
        try:
            answer = ray.get(reference)
        except ActorUnavailableError:
            # It is being restarted, or there is no room for it yet.
            worker.become(WorkerState.REFUSED)
            return
        except RayError as error:
            self._could_not_open(worker, error)
            return
        if worker.state is WorkerState.COMING:
            worker.node_id, worker.node, worker.gpu, worker.process = answer
            worker.become(WorkerState.OPENING)
            self._ask(worker, worker.actor.open, [self.stored], self._modules)
            return
        was_open = bool(worker.device)
        # It may have been restarted elsewhere in the meantime.
        where, worker.device, kind = answer
        worker.node_id, worker.node, worker.gpu, worker.process = where
        worker.failures = 0
        if not self._admit(worker, kind):
            return
        self.free(worker)
        if was_open:
            log.warning("%s is back", worker)

    def _admit(self, worker: Worker, kind: HardwareKind) -> bool:
        """Admit a worker that computes the same bits as the others; give up any other.

        No more are created: Ray would start one there again and again. Raises `WorkersLost` where
        no other worker is left.
        """
        if kind not in self.kinds and self.kinds and not self.other_bits:
            differing = differences(self.kinds[0], kind, "with the others", "here")
            self._mixed = self._last_words = (
                f"{worker} is on other hardware than the run, and would compute other bits: "
                f"{'; '.join(differing)}"
            )
            log.warning("%s; it is not used", self._mixed)
            self._do_without(worker)
            if not self._workers:
                raise WorkersLost(
                    f"{self._mixed}; resume on hardware as before, "
                    f"or allow the other with {OTHER_BITS}"
                )
            return False
        if kind not in self.kinds:
            self.kinds.append(kind)
        return True

    def _could_not_open(self, worker: Worker, error: RayError) -> None:
        """Ask a worker again that has failed to open the run, or give it up.

        Ray itself restarts an actor that was lost, and so it is asked again. Only one that is given
        up is replaced. An `InputError` is the run's while no worker has opened the run; later it is
        its node's, which lacks the data's mount, or whose GPU torch does not see.
        """
        if not self.kinds:
            refuse_input(error)
        cause = cause_of(error)
        unfit = isinstance(cause, InputError)
        lost = lost_object(error)
        if lost is not None and lost.object_ref_hex == self.stored.hex():
            self.stored = ray.put(self.setup)
        worker.failures += 1
        died = isinstance(error, ActorDiedError)
        if worker.failures < MAX_OPENINGS and not unfit and not died:
            self.bring_up(worker)
            return
        self._last_words = uncoloured(str(cause if unfit else error))
        log.warning("%s could not open the run, and is given up: %s", worker, self._last_words)
        if unfit:
            self._unfit.add(worker.node_id)
        self._remove(worker)
        # A worker that was up is replaced, also after its node has ended in good order, when Ray
        # calls it dead for a while.
        if worker.device:
            self._create(1)

    # Going.

    def _replace_on_draining_node(self, worker: Worker) -> None:
        """End a worker on a node that is about to end, and create another elsewhere."""
        log.warning("%s is on a node that is about to end; another actor takes its place", worker)
        self._remove(worker)
        self._create(1)

    def _do_without(self, worker: Worker) -> None:
        """End a worker, and create no other in its place, which would be where it was."""
        self._remove(worker)
        self.most = len(self._workers)

    def _remove(self, worker: Worker) -> None:
        """End a worker."""
        worker.become(WorkerState.GONE)
        self._workers.remove(worker)
        ray.kill(worker.actor)

    def _avoided(self) -> set[str]:
        """Return the ids of the nodes that get no workers."""
        return self._unfit | self.head.draining

    def _missing(self) -> str:
        """Say why the run ends without a worker, and what to do."""
        by_id = self.head.nodes()
        if by_id is None:
            cluster = "the head of the cluster does not answer"
        else:
            cluster = f"now {nodes_text(list(by_id.values()))}"
            usable = [node for name, node in by_id.items() if name not in self._avoided()]
            if capacity(self.options, usable):
                command = ray_status(self.options)
                look = f" ({command})" if command else ""
                cluster += (
                    f", which other jobs may hold{look}: try again when they are done, "
                    "or raise ray.patience"
                )
            elif by_id.keys() & self.head.draining:
                cluster += (
                    ", on nodes that are about to end and take no actors: "
                    "add a node, then resume the run"
                )
        message = (
            f"for {self._patience:.0f} s (ray.patience) there was no actor to work on; "
            f"the run wants {self.most}, each with {actor_text(self.options)}; {cluster}"
        )
        if self._last_words:
            message += f"\nthe last actor that was given up said: {self._last_words}"
        return message


def new_actor(options: RayOptions, name: str, unfit: Iterable[str] = ()) -> Any:
    """Create an actor with the resources that the options ask for, on no `unfit` node."""
    labels = dict(options.labels)
    if unfit:
        labels["ray.io/node-id"] = f"!in({','.join(unfit)})"
    return ClientActor.options(  # type: ignore[attr-defined]
        name=name,
        num_cpus=options.num_cpus,
        num_gpus=options.gpu_share,
        memory=options.memory_bytes or None,
        max_restarts=-1,
        # Lost work is run again by the pool, on another actor.
        max_task_retries=0,
        scheduling_strategy="SPREAD",
        label_selector=labels or None,
    ).remote(name, options.threads, options.gpu_share)


def named(awaited: Sequence[str]) -> str:
    """Name the first few of those that are awaited."""
    if not awaited:
        return "room for an actor"
    names = ", ".join(awaited[:NAMED])
    return f"{names} and {len(awaited) - NAMED} more" if len(awaited) > NAMED else names
