"""The profile of a run: its spans, added up by phase and by who spent the time.

Each process measures with its own monotonic clock, so durations are right on every node. An actor sends the spans of a
call along with its answer; they count in the phase in which the answer arrives. To see single calls: `ray timeline`.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from rayfed.base.spans import Span, listen

P = ParamSpec("P")
T = TypeVar("T")

DRIVER, BESIDE, ACTORS = "driver", "beside it", "actors"  # who spends time: the run's own thread, its others, actors
ON_THE_WAY, LOST, IDLE = "on the way", "lost", "idle"


# On an actor ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measured:
    """An actor's answer, with the spans of its work."""

    value: Any
    spans: list[Span]
    seconds: float


_spans: list[Span] | None = None  # of this actor's call; None: nothing is measured


def measure(on: bool) -> None:
    """Let this process, an actor's, send the spans of its work with each answer, or none."""
    global _spans
    _spans = [] if on else None
    listen(None if _spans is None else _spans.append)


def answer(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Any:
    """What an actor answers: the work's values, the first of them as a `Measured` if the driver has a profile.

    No decorator of the actor's methods: Ray would pickle it with this module's globals, and the actor have two of each.
    """
    if _spans is None:
        return work(*args, **kwargs)
    _spans.clear()  # of a call that failed
    start = time.monotonic()
    values = work(*args, **kwargs)
    first, *others = values if isinstance(values, tuple) else (values,)
    measured = Measured(first, list(_spans), time.monotonic() - start)
    return (measured, *others) if others else measured


# On the driver --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Phase:
    """The start of a run, its first round, its other rounds, or its end."""

    start: float
    rounds: list[int] = field(default_factory=list)  # the first and the last in it; none of start and end
    wall: float = 0.0  # seconds
    seconds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))  # who, step -> own


class Profile:
    """The spans of a run, added up by phase as they come."""

    def __init__(self, began: float | None = None) -> None:
        """`began` is where the table begins, on the monotonic clock: now, or when the command was started."""
        self.began = time.monotonic() if began is None else began
        self.phases: list[Phase] = []  # that have ended
        self.idle: dict[str, float] = defaultdict(float)  # actor -> seconds without a call, since it opened the run
        self._now = Phase(self.began)
        self._free: dict[str, float] = {}  # actor -> the end of its last call
        self._lock = threading.Lock()
        self._driver = threading.get_ident()

    def add(self, span: Span) -> None:
        """Something was done in this process."""
        with self._lock:
            who = DRIVER if threading.get_ident() == self._driver else BESIDE
            self._now.seconds[who, span.step] += span.seconds

    def call(self, actor: str, since: float, answer: Measured | None) -> None:
        """A call has ended: an answer is there, or the actor is lost."""
        now = time.monotonic()
        with self._lock:
            seconds = self._now.seconds
            taken = now - since
            if answer is None:
                seconds[ACTORS, LOST] += taken
            else:
                taken = max(taken, answer.seconds)  # the actor may begin before the driver has noted when
                for span in answer.spans:
                    seconds[ACTORS, span.step] += span.seconds
                seconds[ACTORS, ON_THE_WAY] += taken - sum(span.seconds for span in answer.spans)
            self._was_idle(actor, now - taken)
            self._free[actor] = now

    def came_up(self, actor: str) -> None:
        """An actor has opened the run."""
        with self._lock:
            self._free.setdefault(actor, time.monotonic())

    def finished(self, number: int) -> None:
        """A round is finished and recorded, or restored: the first ends the start."""
        with self._lock:
            if self.phases:
                self._now.rounds = [number, number]
            self._end_phase()

    def close(self) -> None:
        """The run has ended, and the table is whole."""
        with self._lock:
            for actor in self._free:
                self._was_idle(actor, time.monotonic())
            self._end_phase()

    def _was_idle(self, actor: str, until: float) -> None:
        seconds = max(until - self._free.get(actor, until), 0.0)
        self.idle[actor] += seconds
        self._now.seconds[ACTORS, IDLE] += seconds

    def _end_phase(self) -> None:
        phase = self._now
        self._now = Phase(time.monotonic())
        phase.wall = self._now.start - phase.start
        if not phase.rounds or len(self.phases) < 3:
            self.phases.append(phase)
            return
        others = self.phases[-1]
        others.rounds[1] = phase.rounds[1]
        others.wall += phase.wall
        for key, seconds in phase.seconds.items():
            others.seconds[key] += seconds


_profile: Profile | None = None  # that is open in this process, the driver


def profile() -> Profile | None:
    """The profile that is open in this process, the driver."""
    return _profile


def received(answer: Any, actor: str, since: float) -> Any:
    """The value of an actor's answer to a call that was sent at `since`; its spans go into the profile."""
    if not isinstance(answer, Measured):
        return answer
    if _profile is not None:
        _profile.call(actor, since, answer)
    return answer.value


def lost(actor: str, since: float) -> None:
    """An actor was lost with the call that was sent at `since`."""
    if _profile is not None:
        _profile.call(actor, since, None)


def came_up(actor: str) -> None:
    """An actor has opened the run."""
    if _profile is not None:
        _profile.came_up(actor)


def finished(number: int) -> None:
    """A round is finished and recorded, or restored."""
    if _profile is not None:
        _profile.finished(number)


@contextmanager
def profiling(began: float | None = None) -> Iterator[Profile]:
    """Profile the run in the context; the table is whole when the context has ended."""
    global _profile
    opened = Profile(began)
    _profile = opened
    listen(opened.add)
    try:
        yield opened
    finally:
        _profile = None
        listen(None)
        opened.close()
