"""Where the time of a run goes: spans, measured where the work is done, added up as a table.

While no profile is open, a span costs one `if`. An actor sends its spans along with its answer.

Each process measures with its own monotonic clock, so durations are right on every node. The driver places an actor's
spans as if a call had begun when it was submitted. To see single calls: `ray timeline`.
"""

import functools
import mmap
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

DRIVER, BESIDE, ACTORS = "driver", "beside it", "actors"  # who spends time: the run's own thread, its others, actors
ON_THE_WAY, LOST, IDLE = "on the way", "lost", "idle"


class Span(NamedTuple):
    """Some work that is done, in seconds of its process's monotonic clock."""

    step: str
    start: float
    seconds: float
    own: float  # of them, those outside of the spans within this one


class _Thread(threading.local):
    inner = 0.0  # seconds of the spans that have ended within the one that is open


_thread, _nothing = _Thread(), nullcontext()
_keep: Callable[[Span], None] | None = None  # what is done with a span; None: nothing is measured
_profile: "Profile | None" = None  # that is open in this process, the driver


def span(step: str, on: Any = None) -> AbstractContextManager[None]:
    """Measure what is done in the context, if there is a profile. Do not `yield` from a generator within it.

    A step is a row of the table; `on` is the device that computes it.
    """
    return _nothing if _keep is None else _measured(_keep, step, on)


def timed(step: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function: each call of it is a span."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(step):
                return function(*args, **kwargs)

        return call

    return decorate


@contextmanager
def _measured(keep: Callable[[Span], None], step: str, on: Any) -> Iterator[None]:
    def now() -> float:
        if on is not None and on.type == "cuda":  # which works on after its calls have returned
            sys.modules["torch"].cuda.synchronize(on)
        return time.monotonic()

    outer, _thread.inner = _thread.inner, 0.0
    start = now()
    try:
        yield
    finally:
        seconds = now() - start
        keep(Span(step, start, seconds, seconds - _thread.inner))
        _thread.inner = outer + seconds


# For a parent process, which outlives this one: any code may end a process without a word ----------------------------

NOTE = 8192  # bytes
_shared = mmap.mmap(-1, NOTE)  # with each process that is forked from this one


def note(run: str, what: str = "") -> None:
    """Note the folder of the run, and what is done there."""
    _shared[:] = f"{run}\n{what}".encode()[:NOTE].ljust(NOTE, b"\0")


def noted() -> tuple[str, str]:
    """The folder of the run, and what is done there; '' where nothing is noted."""
    run, _, what = _shared[:].rstrip(b"\0").decode(errors="replace").rpartition("\n")
    return run, what


@contextmanager
def at(what: str) -> Iterator[None]:
    """Code that may be the user's runs in the context."""
    run, _ = noted()
    note(run, what)
    try:
        yield
    finally:
        note(run)


# On an actor ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measured:
    """An actor's answer, with the spans of its work."""

    value: Any
    spans: list[Span]
    start: float
    end: float


_spans: list[Span] = []


def measure(on: bool) -> None:
    """Let this process, an actor's, send the spans of its work with each answer, or none."""
    global _keep
    _keep = _spans.append if on else None


def answer(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Any:
    """What an actor answers: the work's values, the first of them as a `Measured` if the driver has a profile.

    No decorator of the actor's methods: Ray would pickle it with this module's globals, and the actor have two of each.
    """
    if _keep is None:
        return work(*args, **kwargs)
    _spans.clear()  # of a call that failed
    start = time.monotonic()
    values = work(*args, **kwargs)
    first, *rest = values if isinstance(values, tuple) else (values,)
    measured = Measured(first, list(_spans), start, time.monotonic())
    return (measured, *rest) if rest else measured


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
        # Actor -> seconds without a call, since it first opened the run.
        self.idle: dict[str, float] = defaultdict(float)
        self._now = Phase(self.began)
        self._up: dict[str, float] = {}  # actor -> when it first opened the run
        self._lock = threading.RLock()
        self._driver = threading.get_ident()

    def add(self, span: Span) -> None:
        """Something was done in this process."""
        with self._lock:
            who = DRIVER if threading.get_ident() == self._driver else BESIDE
            self._now.seconds[who, span.step] += span.own

    def call(self, actor: str, since: float, answer: Measured | None) -> None:
        """A call has ended: an answer is there, or the actor is lost."""
        now = time.monotonic()
        if answer is not None:
            since = min(since, now - (answer.end - answer.start))  # it may begin before the driver has noted when
        with self._lock:
            self.idle[actor] -= now - since
            step, spans = LOST if answer is None else ON_THE_WAY, []
            if answer is not None:
                spans = [span._replace(start=span.start + since - answer.start) for span in answer.spans]
            phases = [*self.phases, self._now]
            for phase, end in zip(phases, [*(later.start for later in phases[1:]), now], strict=True):
                if (there := end - max(phase.start, since)) > 0:
                    own = own_within(spans, phase.start, end)
                    for found, seconds in {**own, step: there - sum(own.values())}.items():
                        phase.seconds[ACTORS, found] += seconds
                    if phase is not self._now:  # it has ended, and the actor counted as idle
                        phase.seconds[ACTORS, IDLE] -= there

    def came_up(self, actor: str) -> None:
        """An actor has opened the run."""
        with self._lock:
            self._up.setdefault(actor, time.monotonic())

    def finished(self, round: int) -> None:
        """A round is finished and recorded, or restored: the first ends the start."""
        with self._lock:
            if self.phases:
                self._now.rounds = [round, round]
            self._end_phase()

    def close(self) -> None:
        """The run has ended, and the table is whole."""
        with self._lock:
            self._end_phase()

    def _end_phase(self) -> None:
        now, phase = time.monotonic(), self._now
        phase.wall = now - phase.start
        if self._up:
            phase.seconds[ACTORS, IDLE] -= sum(seconds for (who, _), seconds in phase.seconds.items() if who == ACTORS)
        for actor, since in self._up.items():
            there = now - max(phase.start, since)
            self.idle[actor] += there
            phase.seconds[ACTORS, IDLE] += there
        if phase.rounds and len(self.phases) > 2:
            others = self.phases[-1]
            others.rounds[1] = phase.rounds[1]
            others.wall += phase.wall
            for key, seconds in phase.seconds.items():
                others.seconds[key] += seconds
        else:
            self.phases.append(phase)
        self._now = Phase(now)


def own_within(spans: Iterable[Span], start: float, end: float) -> dict[str, float]:
    """Own seconds by step between two moments, of spans of one thread in the order in which they ended.

    >>> inner, outer = Span("teacher", 1.0, 2.0, 2.0), Span("train", 0.0, 4.0, 2.0)
    >>> own_within([inner, outer], 2.0, 9.0)
    {'teacher': 1.0, 'train': 1.0}
    """
    found: dict[str, float] = defaultdict(float)
    apart: list[tuple[float, float]] = []  # start, and seconds between the moments, of spans that lie in no other
    for step, began, seconds, _ in spans:
        own = inside = max(0.0, min(end, began + seconds) - max(start, began))
        while apart and apart[-1][0] >= began:
            own -= apart.pop()[1]
        apart.append((began, inside))
        if inside:
            found[step] += own
    return dict(found)


def profile() -> Profile | None:
    """The profile that is open in this process, the driver."""
    return _profile


def received(answer: Any, actor: str, since: float) -> Any:
    """The value of an actor's answer to a call; its spans go into the profile."""
    if not isinstance(answer, Measured):
        return answer
    if _profile is not None:
        _profile.call(actor, since, answer)
    return answer.value


@contextmanager
def profiling(began: float | None = None) -> Iterator[Profile]:
    """Profile the run in the context; the table is whole when the context has ended."""
    global _keep, _profile
    opened = Profile(began)
    _keep, _profile = opened.add, opened
    try:
        yield opened
    finally:
        _keep = _profile = None
        opened.close()
