"""The actors of a run: who is idle, who is awaited, who has gone; they come and go with the cluster's nodes.

An actor that failed gets no work until it has taken up the run again and said so: one that fails fast never looks like
an idle one. Ray restarts it, elsewhere if its node is gone, as soon as there is room.
"""

from __future__ import annotations

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

from rayfed.job import RayOptions
from rayfed.local import RunFailed
from rayfed.runtime.actors import ClientActor, Restarted
from rayfed.runtime.head import Head
from rayfed.runtime.placement import Place, capacity, each, there, where
from rayfed.values import InputError

log = logging.getLogger(__name__)

COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Ray paints its tracebacks
MAX_OPENINGS = 3  # times in a row that an actor may fail to take up the run
PAUSE = 0.1  # seconds at least before one is asked again; Ray itself mostly takes a second to refuse
OPEN_LIMIT = 180.0  # seconds after which one that has not taken up the run is started anew


class WorkersLost(RunFailed):
    """Workers, or what they held, are gone, and the run cannot go on without. A later one can, from a checkpoint."""

    resumable = True


@dataclass(eq=False)
class Member:
    """An actor of the run."""

    name: str
    actor: Any
    place: Place | None = None  # where it was when it last said so
    asked: float = 0.0  # when it was last asked to take up the run
    failures: int = 0  # in a row, to do so

    def __str__(self) -> str:
        return f"actor {self.name}" + (f" on {self.place.node}" if self.place else "")


class Crew:
    """All members. `share` gives what they need of the run, by node; told that it was lost, it makes it anew.

    `most` is how many there should be if the cluster had room for any number.
    """

    def __init__(
        self,
        options: RayOptions,
        run: str,
        share: Callable[[ObjectLostError | None], Mapping[str, ObjectRef]],
        most: int,
    ) -> None:
        self.idle: deque[Member] = deque()
        self.opening: dict[ObjectRef, Member] = {}
        self._members: list[Member] = []
        self._numbers = itertools.count()
        self._options = options
        self._run = run
        self._share = share
        self._most = most
        self._alone_since: float | None = None  # when there was first nobody to work
        self._head = Head()
        self._last_words = ""  # of the last one that is gone for good

    def start(self, count: int) -> None:
        """Hire so many, wait for them with a limit, and say what came up."""
        started = time.monotonic()
        self._hire(count)
        while self.opening and (left := started + OPEN_LIMIT - time.monotonic()) > 0:
            self._answered(ray.wait(list(self.opening), timeout=left, fetch_local=False)[0])
        up = len(self.idle)
        if not self._members:
            raise RunFailed(f"no actor could take up the run; the last one said: {self._last_words}")
        if up == 0 or (self.opening and self._options.actors != "auto"):
            raise InputError(
                f"after {OPEN_LIMIT:.0f} s {up} of {count} actors had come up: the cluster has the resources but does "
                f"not give them now; try ray.actors = {max(1, up)}, or wait until other jobs are done"
            )
        log.info("%s up after %.1f s", self._where(), time.monotonic() - started)

    def open(self, member: Member, *, kill: bool = False) -> None:
        """Have a member take up the run, anew if need be; with `kill` in a new process. It is idle once it has."""
        if member not in self._members:
            return  # all has ended: nothing may be asked of Ray any more, as it would start another one
        if kill:
            ray.kill(member.actor, no_restart=False)  # returns at once, also where the actor cannot be reached
        member.asked = time.monotonic()
        self.opening[member.actor.open.remote(self._share(None))] = member

    def wait(self, working: Sequence[ObjectRef], seconds: float) -> list[ObjectRef]:
        """Wait so long at most until one of the calls at work ends, or a member comes up. The calls that have ended.

        Raises `WorkersLost` once there has been nobody to work for `ray.patience` seconds.
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
            left = self._alone_since + self._options.patience - now
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
        """Start more where the cluster has room for them."""
        if (there_is := self._head.nodes()) is None:
            return
        more = min(self._most, capacity(self._options, there_is)) - len(self._members)
        if more > 0:
            log.info("%s, with room for %d more actors; they join when they are up", there(there_is), more)
            self._hire(more)

    @property
    def in_danger(self) -> bool:
        """Whether Ray may soon end this process, and the run with it."""
        return self._head.silent

    def end(self) -> None:
        """Kill all, at once; nothing of them stays in the cluster."""
        for member in self._members:
            ray.kill(member.actor)
        self._members.clear()
        self.idle.clear()
        self.opening.clear()

    def _hire(self, count: int) -> None:
        for _ in range(count):
            name = f"client-{next(self._numbers)}"
            self._members.append(member := Member(name, hired(self._options, f"{self._run}/{name}")))
            self.open(member)

    def _answered(self, references: Sequence[ObjectRef]) -> None:
        """Members have taken up the run, or failed to."""
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
        """A member has not taken up the run: it is asked again, some times in a row."""
        if isinstance(error, RayTaskError) and isinstance(error.cause, InputError):
            raise InputError(str(error.cause))
        if gone := lost_object(error):
            self._share(gone)
        member.failures += 1
        if member.failures < MAX_OPENINGS and not isinstance(error, ActorDiedError):
            self.open(member)
            return
        self._last_words = COLOURS.sub("", str(error))
        log.warning("%s could not take up the run, and is given up: %s", member, self._last_words)
        self._members.remove(member)
        ray.kill(member.actor)

    def _where(self) -> str:
        return where([member.place for member in self._members if member.place is not None])

    def _missing(self) -> str:
        nodes = self._head.nodes()
        text = (
            f"for {self._options.patience:.0f} s (ray.patience) there was no actor to work on; {self._most} were asked "
            f"for, each with {each(self._options)}; "
            f"{f'now {there(nodes)}' if nodes is not None else 'the head of the cluster does not answer'}"
        )
        return f"{text}\nthe last actor that was given up said: {self._last_words}" if self._last_words else text


def hired(options: RayOptions, name: str) -> Any:
    """A new actor, as it was asked for."""
    return ClientActor.options(  # type: ignore[attr-defined]
        name=name,
        num_cpus=options.num_cpus,
        num_gpus=options.gpu_share,
        max_restarts=-1,
        max_task_retries=0,  # lost work is run again by us, and elsewhere
        scheduling_strategy="SPREAD",
    ).remote(name, options.threads, options.gpu_share)


def lost(error: RayError) -> bool:
    """Whether a call was lost with its actor or its objects; otherwise what it ran has raised something of its own."""
    if not isinstance(error, RayTaskError):
        return True
    # A plain RayError stands for an exception that could not be pickled.
    return isinstance(error.cause, Restarted) or (
        isinstance(error.cause, RayError) and type(error.cause) is not RayError
    )


def lost_object(error: RayError) -> ObjectLostError | None:
    """Where a call was lost for want of an object that it needs, that loss; its actor is well."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, ObjectLostError) else None
