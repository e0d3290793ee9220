"""The actors of a run. They come and go with the nodes of the cluster. Each of them is in one of four states:

    opening    it was asked where it is, which it answers once its process is up; then to open the run
    refused    Ray has just refused to ask it, as it restarts or there is no room for it yet: it is soon asked again
    idle       it has opened the run, and waits for work
    working    `Dispatch` has taken it out of `idle`, and gives it back with `free`, or with `open` when it is lost

A lost actor gets no work until it has opened the run again: an actor that fails fast never looks like an idle actor.
Ray restarts it as soon as there is room, on another node if its own is lost.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from rayfed.base.errors import InputError, RunFailed, WorkersLost, uncoloured
from rayfed.folder.provenance import to_send
from rayfed.job import RayOptions, differences
from rayfed.rounds.round import Kind
from rayfed.rounds.site import Site
from rayfed.runtime.actors import ClientActor
from rayfed.runtime.causes import cause_of, end_of_ray, lost_object, refuse_input
from rayfed.runtime.head import HEAD_LIMIT, Head
from rayfed.runtime.heartbeat import Heartbeat
from rayfed.runtime.hints import ray_status
from rayfed.runtime.placement import actor_text, actors_text, capacity, nodes_text

log = logging.getLogger(__name__)

MAX_OPENINGS = 3  # times in a row that an actor may fail to open the run
MAX_FAULTS = 2  # of an actor's GPU, after which it is given up
TICK = 0.02  # seconds until an object that is on its way here is looked for again
PAUSE = 0.1  # seconds, at least, before an actor is asked again; mostly Ray itself takes a second to refuse
UP_LIMIT = 180.0  # seconds in which an actor's process must come up; afterwards it is restarted
DATA_LIMIT = 3600.0  # seconds in which an actor that is up must have the data
LOOK = 5.0  # seconds after which a run that works looks for new nodes again
LATE = 30.0  # seconds without another actor after which a run starts with those that are up
OTHER_BITS = "--other-bits (in Python other_bits=True)"
NAMED = 5  # awaited actors or pieces of work that a line names


@dataclass(eq=False)
class Member:
    """An actor of the run."""

    name: str
    actor: Any
    node_id: str = ""  # Ray's id of the node on which it last came up
    node: str = ""  # that node's address
    gpu: str = ""  # its number there
    process: str = ""  # Ray's id of its process there
    device: str = ""  # with which it last opened the run; '' if it never has
    asked: float = 0.0  # when it was last asked whether it is up, or to open the run
    up: bool = False  # its process is up, and opens the run
    failures: int = 0  # to open the run, in a row
    faults: int = 0  # of its GPU

    @property
    def card(self) -> tuple[str, str]:
        """The GPU that it works on, or without one its node."""
        return self.node_id, self.gpu

    def __str__(self) -> str:
        return self.name + (f" on {self.node}" if self.node else "")


@dataclass(eq=False)
class Crew:
    """All actors of a run."""

    options: RayOptions
    run: str
    site: Site
    stored: ObjectRef  # the site in Ray's store
    most: int  # actors, however large the cluster is
    head: Head
    other_bits: bool = False  # actors may be on several kinds of hardware

    def __post_init__(self) -> None:
        self.idle: deque[Member] = deque()
        self.kinds: list[Kind] = []  # of the hardware that actors have come up on
        self._mixed = ""  # why an actor was given up that came up on another kind
        self._unfit: set[str] = set()  # ids of nodes that cannot work for this run
        self.opening: dict[ObjectRef, Member] = {}
        self._refused: list[Member] = []  # by Ray, a moment ago: they are to be asked again
        self._members: list[Member] = []
        self._numbers = itertools.count()
        self._look_at = 0.0  # when to look for new nodes again
        self._alone_since: float | None = None  # since when there has been no actor to work on
        self._patience = max(
            self.options.patience, UP_LIMIT
        )  # seconds; at first, processes must come up
        self._last_words = ""  # of the last actor that was given up
        self._modules = to_send(self.site.job)

    def start(self, count: int) -> None:
        """Create `count` actors, wait for the first, and a little for the others; log which are up.

        Raises `RunFailed` where no actor can open the run, `WorkersLost` as `wait` does, and `InputError` where actors
        are on several kinds of hardware.
        """
        started = latest = time.monotonic()
        heartbeat, up = Heartbeat(), 0
        self._create(count)
        while len(self.idle) < len(self._members) and (up == 0 or time.monotonic() < latest + LATE):
            self.wait([], min(heartbeat.left, 1.0))
            if len(self.idle) > up:
                up, latest = len(self.idle), time.monotonic()
                heartbeat.progress()
            heartbeat.beat(self._what_is_awaited)
        if self._mixed:
            raise InputError(
                f"{self._mixed}; give the run nodes of one kind, or allow it with {OTHER_BITS}"
            )
        if not self._members:
            raise RunFailed(f"no actor could open the run; the last actor said: {self._last_words}")
        places = [(member.node, member.device) for member in self.idle]
        log.info("%s; up after %.1f s", actors_text(places), time.monotonic() - started)
        if up < len(self._members):
            late = "the others join when the cluster has room: other jobs hold it, or nodes are starting"
            if command := ray_status(self.options):
                late += f" ({command})"
            log.warning("the run starts with %d of %d actors; %s", up, len(self._members), late)
        self._patience = self.options.patience

    def _what_is_awaited(self) -> str:
        """The actors that are not up yet, and how to see whether a joined cluster has room for them."""
        command = ray_status(self.options)
        waiting = named(self.awaited())
        return f"{waiting}; {command} shows whether there is room" if command else waiting

    def open(self, member: Member, *, kill: bool = False) -> None:
        """Ask a member whether it is up, with `kill` in a new process; then to open the run, after which it is idle."""
        if member not in self._members:
            return  # the crew has ended: a request to Ray would start another Ray
        if kill:
            ray.kill(
                member.actor, no_restart=False
            )  # returns at once, even if the actor cannot be reached
        member.up = False
        self._ask(member, member.actor.where)

    def replace_after_fault(self, member: Member) -> None:
        """A member's GPU has failed, and the error would stay in its process: have a new one, or give it up."""
        member.faults += 1
        if member.faults < MAX_FAULTS or len(self._members) == 1:
            self.open(member, kill=True)
        else:
            log.warning(
                "the GPU of %s has failed %d times; the actor is given up", member, member.faults
            )
            self._give_up(member)

    def wait(self, working: Sequence[ObjectRef], seconds: float) -> list[ObjectRef]:
        """Wait at most `seconds` until a working call ends, or a member comes up. Gives those with values here.

        New nodes that come meanwhile get members, too.
        Raises `WorkersLost` when there has been no actor to work on for `ray.patience` seconds, at first for three
        minutes at least. An actor that is up and gets the data counts as an actor.
        """
        now = time.monotonic()
        for reference, member in list(self.opening.items()):
            if now > member.asked + (DATA_LIMIT if member.up else UP_LIMIT):
                del self.opening[reference]
                self.open(member, kill=True)
        for member in [member for member in self._refused if now >= member.asked + PAUSE]:
            self._refused.remove(member)
            self.open(member)
        if self._refused:
            seconds = min(seconds, PAUSE)
        if now >= self._look_at:
            self._look_at = now + LOOK
            self.grow(0.0)
        seconds = min(seconds, self._look_at - now)
        if working or self.idle or any(member.up for member in self.opening.values()):
            self._alone_since = None
        else:
            self._alone_since = self._alone_since or now
            left = self._alone_since + self._patience - now
            if left <= 0:
                raise WorkersLost(self._missing())
            seconds = min(seconds, left)
        if not working and not self.opening:
            time.sleep(min(seconds, 1.0))
            if not self._refused and not self.idle:
                self.grow()
            return []
        awaited = [*working, *self.opening]
        if not ray.wait(awaited, timeout=seconds, fetch_local=False)[0]:
            return []
        # All that have ended: none of them is late. Those whose values are not here yet are brought in the meantime; to
        # wait for one of them and for the others together, Ray would let the others wait.
        ready, _ = ray.wait(awaited, num_returns=len(awaited), timeout=0, fetch_local=True)
        if not ready:
            time.sleep(TICK)
        self._answered([reference for reference in ready if reference in self.opening])
        return [reference for reference in ready if reference in working]

    def grow(self, seconds: float = HEAD_LIMIT) -> None:
        """Create more actors where the cluster has room for them, if the head answers in `seconds` (`Head.nodes`)."""
        by_id = self.head.nodes(seconds)
        if by_id is None:
            return
        for member in [member for member in self.idle if member.node_id in self.head.draining]:
            self.idle.remove(member)
            self.free(member)
        nodes = [resources for node, resources in by_id.items() if node not in self._avoided()]
        more = min(self.most, capacity(self.options, nodes)) - len(self._members)
        if more > 0:
            log.info(
                "%s, with room for %d more actors; they join when they are up",
                nodes_text(nodes),
                more,
            )
            self._create(more)

    def free(self, member: Member) -> None:
        """A member has no work. On a node that is about to end it gets no other, and an actor elsewhere replaces it."""
        if member.node_id not in self.head.draining:
            self.idle.append(member)
            return
        log.warning("%s is on a node that is about to end; another actor takes its place", member)
        self._members.remove(member)
        ray.kill(member.actor)
        self._create(1)

    def awaited(self) -> list[str]:
        """Which members are not there yet, and what they wait for."""
        up = [f"{member} to get the data" for member in self.opening.values() if member.up]
        return [
            *up,
            *(
                f"{member} to come up"
                for member in (*self.opening.values(), *self._refused)
                if not member.up
            ),
        ]

    @property
    def size(self) -> int:
        """Members, with those that are not up."""
        return len(self._members)

    def end(self) -> None:
        """Kill all actors at once."""
        actors = [member.actor for member in self._members]
        end_of_ray(lambda: [*map(ray.kill, actors)])
        self._members.clear()
        for members in (self.idle, self.opening, self._refused):
            members.clear()

    def _avoided(self) -> set[str]:
        """The ids of the nodes that get no actors."""
        return self._unfit | self.head.draining

    def _create(self, count: int) -> None:
        for _ in range(count):
            name = f"actor-{next(self._numbers)}"
            member = Member(name, new_actor(self.options, f"{self.run}/{name}", self._avoided()))
            self._members.append(member)
            self.open(member)

    def _ask(self, member: Member, method: Any, *arguments: Any) -> None:
        member.asked = time.monotonic()
        self.opening[method.remote(*arguments)] = member

    def _answered(self, references: Sequence[ObjectRef]) -> None:
        """Members are up, have opened the run, or failed to."""
        for reference in references:
            member = self.opening.pop(reference)
            was_open = bool(member.device)
            try:
                answer = ray.get(reference)
                if not member.up:
                    member.node_id, member.node, member.gpu, member.process = answer
                    member.up = True
                    self._ask(member, member.actor.open, [self.stored], self._modules)
                    continue
                where, member.device, kind = answer
                member.node_id, member.node, member.gpu, member.process = (
                    where  # it may have been restarted elsewhere
                )
                member.failures = 0
                if not self._admit(member, kind):
                    continue
                self.free(member)
                if was_open:
                    log.warning("%s is back", member)
            except ActorUnavailableError:  # it is being restarted, or there is no room for it yet
                member.up = False
                self._refused.append(member)
            except RayError as error:
                self._failed(member, error)

    def _admit(self, member: Member, kind: Kind) -> bool:
        """Admit a member that computes the same bits as the others; give up any other, and create no more (False).

        Raises `WorkersLost` where no other member is left: in its place, Ray would start one there again and again.
        """
        if kind not in self.kinds and self.kinds and not self.other_bits:
            differing = differences(self.kinds[0], kind, "with the others", "here")
            self._mixed = self._last_words = (
                f"{member} is on other hardware than the run, and would compute other bits: {'; '.join(differing)}"
            )
            log.warning("%s; it is not used", self._mixed)
            self._give_up(member)
            if not self._members:
                raise WorkersLost(
                    f"{self._mixed}; resume on hardware as before, or allow the other with {OTHER_BITS}"
                )
            return False
        if kind not in self.kinds:
            self.kinds.append(kind)
        return True

    def _give_up(self, member: Member) -> None:
        """End a member, and create no other in its place, which would be where it was."""
        self._members.remove(member)
        ray.kill(member.actor)
        self.most = len(self._members)

    def _failed(self, member: Member, error: RayError) -> None:
        """A member has failed to open the run: ask it again, or give it up.

        Ray itself restarts an actor that was lost, and so it is asked again. Only one that is given up is replaced.

        An `InputError` is the run's while no member has opened the run; later it is its node's, which lacks the data's
        mount, or whose GPU torch does not see, and which gets no other actor.
        """
        if not self.kinds:
            refuse_input(error)
        cause = cause_of(error)
        unfit = isinstance(cause, InputError)
        lost = lost_object(error)
        if lost is not None and lost.object_ref_hex == self.stored.hex():
            self.stored = ray.put(self.site)
        member.failures += 1
        if member.failures < MAX_OPENINGS and not unfit and not isinstance(error, ActorDiedError):
            self.open(member)
            return
        self._last_words = uncoloured(str(cause if unfit else error))
        log.warning("%s could not open the run, and is given up: %s", member, self._last_words)
        if unfit:
            self._unfit.add(member.node_id)
        self._members.remove(member)
        ray.kill(member.actor)
        if (
            member.device
        ):  # also after its node has ended in good order, when Ray calls it dead for a while
            self._create(1)

    def _missing(self) -> str:
        """Why the run ends without an actor, and what to do."""
        by_id = self.head.nodes()
        if by_id is None:
            cluster = "the head of the cluster does not answer"
        else:
            cluster = f"now {nodes_text(list(by_id.values()))}"
            if capacity(
                self.options, [node for name, node in by_id.items() if name not in self._avoided()]
            ):
                command = ray_status(self.options)
                look = f" ({command})" if command else ""
                cluster += f", which other jobs may hold{look}: try again when they are done, or raise ray.patience"
            elif by_id.keys() & self.head.draining:
                cluster += ", on nodes that are about to end and take no actors: add a node, then resume the run"
        message = (
            f"for {self._patience:.0f} s (ray.patience) there was no actor to work on; the run wants {self.most}, "
            f"each with {actor_text(self.options)}; {cluster}"
        )
        if self._last_words:
            message += f"\nthe last actor that was given up said: {self._last_words}"
        return message


def new_actor(options: RayOptions, name: str, unfit: Iterable[str] = ()) -> Any:
    """An actor with the resources that the options ask for, on a node that is not among the `unfit` ones."""
    return ClientActor.options(  # type: ignore[attr-defined]
        name=name,
        num_cpus=options.num_cpus,
        num_gpus=options.gpu_share,
        max_restarts=-1,
        max_task_retries=0,  # lost work is run again by `Dispatch`, on another actor
        scheduling_strategy="SPREAD",
        label_selector=options.labels
        | ({"ray.io/node-id": f"!in({','.join(unfit)})"} if unfit else {})
        or None,
    ).remote(name, options.threads, options.gpu_share)


def named(awaited: Sequence[str]) -> str:
    """The first few of those that are awaited, in words."""
    if not awaited:
        return "room for an actor"
    first = ", ".join(awaited[:NAMED])
    return f"{first} and {len(awaited) - NAMED} more" if len(awaited) > NAMED else first
