"""The actors of a run: idle, working, or opening the run. They come and go with the nodes of the cluster.

A lost actor gets no work until it has opened the run again: an actor that fails fast never looks like an idle actor.
Ray restarts it as soon as there is room, on another node if its own is lost.
"""

import itertools
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayError, RayTaskError

from rayfed.errors import InputError, Restarted, RunFailed, WorkersLost
from rayfed.job import RayOptions
from rayfed.runtime.actors import ClientActor
from rayfed.runtime.head import Head
from rayfed.runtime.placement import Place, actor_text, capacity, nodes_text, places_text

log = logging.getLogger(__name__)

COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of Ray's tracebacks
MAX_OPENINGS = 3  # times in a row that an actor may fail to open the run
PAUSE = 0.1  # seconds, at least, before an actor is asked again; mostly Ray itself takes a second to refuse
OPEN_LIMIT = 180.0  # seconds in which an actor must open the run; afterwards its process is restarted


@dataclass(eq=False)
class Member:
    """An actor of the run."""

    name: str
    actor: Any
    place: Place | None = None  # where it last opened the run
    asked: float = 0.0  # when it was last asked to open the run
    failures: int = 0  # to open the run, in a row

    def __str__(self) -> str:
        return f"actor {self.name}" + (f" on {self.place.node}" if self.place else "")


@dataclass(eq=False)
class Crew:
    """All actors of a run."""

    options: RayOptions
    run: str
    share: Callable[[ObjectLostError | None], Mapping[str, ObjectRef]]  # gives the sites; after a loss, new ones
    most: int  # actors, however large the cluster is

    def __post_init__(self) -> None:
        self.idle: deque[Member] = deque()
        self.opening: dict[ObjectRef, Member] = {}
        self._members: list[Member] = []
        self._numbers = itertools.count()
        self._alone_since: float | None = None  # since when there has been no actor to work on
        self._head = Head()
        self._last_words = ""  # of the last actor that was given up

    def start(self, count: int) -> None:
        """Create `count` actors, wait for them with a limit, and log which came up."""
        started = time.monotonic()
        self._create(count)
        while self.opening and (left := started + OPEN_LIMIT - time.monotonic()) > 0:
            self._answered(ray.wait(list(self.opening), timeout=left, fetch_local=False)[0])
        up = len(self.idle)
        if not self._members:
            raise RunFailed(f"no actor could open the run; the last actor said: {self._last_words}")
        if up == 0 or (self.opening and self.options.actors != "auto"):
            raise InputError(
                f"after {OPEN_LIMIT:.0f} s {up} of {count} actors had come up: the cluster has the resources but does "
                f"not give them now; try ray.actors = {max(1, up)}, or wait until other jobs are done"
            )
        places = [member.place for member in self._members if member.place is not None]
        log.info("%s; up after %.1f s", places_text(places), time.monotonic() - started)

    def open(self, member: Member, *, kill: bool = False) -> None:
        """Ask a member to open the run, with `kill` in a new process. It is idle once it has opened the run."""
        if member not in self._members:
            return  # the crew has ended: a request to Ray would start another Ray
        if kill:
            ray.kill(member.actor, no_restart=False)  # returns at once, even if the actor cannot be reached
        member.asked = time.monotonic()
        self.opening[member.actor.open.remote(self.share(None))] = member

    def wait(self, working: Sequence[ObjectRef], seconds: float) -> list[ObjectRef]:
        """Wait at most `seconds` until a working call ends, or a member comes up. Gives the calls that have ended.

        Raises `WorkersLost` when there has been no actor to work on for `ray.patience` seconds.
        """
        now = time.monotonic()
        for reference, member in list(self.opening.items()):
            if now > member.asked + OPEN_LIMIT:
                del self.opening[reference]
                self.open(member, kill=True)
        if working or self.idle:
            self._alone_since = None
        else:
            self._alone_since = self._alone_since or now
            left = self._alone_since + self.options.patience - now
            if left <= 0:
                raise WorkersLost(self._missing())
            seconds = min(seconds, left)
        if not working and not self.opening:
            time.sleep(min(seconds, 1.0))
            self.grow()
            return []
        ready, _ = ray.wait([*working, *self.opening], timeout=seconds, fetch_local=False)
        self._answered([reference for reference in ready if reference in self.opening])
        return [reference for reference in ready if reference in working]

    def grow(self) -> None:
        """Create more actors where the cluster has room for them."""
        if (nodes := self._head.nodes()) is None:
            return
        more = min(self.most, capacity(self.options, nodes)) - len(self._members)
        if more > 0:
            log.info("%s, with room for %d more actors; they join when they are up", nodes_text(nodes), more)
            self._create(more)

    @property
    def in_danger(self) -> bool:
        """Whether Ray may soon end this process, and the run with it."""
        return self._head.silent

    def end(self) -> None:
        """Kill all actors at once."""
        for member in self._members:
            ray.kill(member.actor)
        self._members.clear()
        self.idle.clear()
        self.opening.clear()

    def _create(self, count: int) -> None:
        for _ in range(count):
            name = f"client-{next(self._numbers)}"
            self._members.append(member := Member(name, new_actor(self.options, f"{self.run}/{name}")))
            self.open(member)

    def _answered(self, references: Sequence[ObjectRef]) -> None:
        """Members have opened the run, or failed to."""
        for reference in references:
            member = self.opening.pop(reference)
            known = member.place is not None
            try:
                member.place, member.failures = ray.get(reference), 0
                self.idle.append(member)
                if known:
                    log.warning("%s is back", member)
            except ActorUnavailableError:  # it is being restarted, or there is no room for it yet
                time.sleep(max(0.0, member.asked + PAUSE - time.monotonic()))
                self.open(member)
            except RayError as error:
                self._failed(member, error)

    def _failed(self, member: Member, error: RayError) -> None:
        """A member has failed to open the run: ask it again, or give it up."""
        if isinstance(error, RayTaskError) and isinstance(error.cause, InputError):
            raise InputError(str(error.cause))
        if gone := lost_object(error):
            self.share(gone)
        member.failures += 1
        if member.failures < MAX_OPENINGS and not isinstance(error, ActorDiedError):
            self.open(member)
            return
        self._last_words = COLOURS.sub("", str(error))
        log.warning("%s could not open the run, and is given up: %s", member, self._last_words)
        self._members.remove(member)
        ray.kill(member.actor)

    def _missing(self) -> str:
        nodes = self._head.nodes()
        now = f"now {nodes_text(nodes)}" if nodes is not None else "the head of the cluster does not answer"
        last = f"\nthe last actor that was given up said: {self._last_words}" if self._last_words else ""
        text = f"for {self.options.patience:.0f} s (ray.patience) there was no actor to work on; the run wants"
        return f"{text} {self.most}, each with {actor_text(self.options)}; {now}{last}"


def new_actor(options: RayOptions, name: str) -> Any:
    """An actor with the resources that the options ask for."""
    return ClientActor.options(  # type: ignore[attr-defined]
        name=name,
        num_cpus=options.num_cpus,
        num_gpus=options.gpu_share,
        max_restarts=-1,
        max_task_retries=0,  # lost work is run again by `Dispatch`, on another actor
        scheduling_strategy="SPREAD",
    ).remote(name, options.threads, options.gpu_share)


def is_loss(error: RayError) -> bool:
    """Whether a call was lost with its actor or its objects; if not, the work itself has raised an exception."""
    if not isinstance(error, RayTaskError) or isinstance(error.cause, Restarted):
        return True
    return isinstance(error.cause, RayError) and type(error.cause) is not RayError  # that is an unpicklable exception


def lost_object(error: RayError) -> ObjectLostError | None:
    """The loss of an object that the call needs, if the call was lost for that reason; its actor is well."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, ObjectLostError) else None
