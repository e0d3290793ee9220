"""Spans of time: measured where the work is done, and handed to whoever listens; nobody by default.

Beside them, a note for the parent process of what a run is at.
"""

import functools
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Span(NamedTuple):
    """Some work that is done."""

    step: str
    seconds: float  # without those of the spans within this one


class _Thread(threading.local):
    inner = 0.0  # seconds of the spans that have ended within the one that is open


_thread = _Thread()
_nothing = nullcontext()
_listener: Callable[[Span], None] | None = None


def listen(listener: Callable[[Span], None] | None) -> None:
    """Give each span of this process to `listener` as it ends; to nobody with None."""
    global _listener
    _listener = listener


def span(step: str, on: Any = None) -> AbstractContextManager[None]:
    """Measure what is done in the context. While nobody listens this costs one `if`.

    Do not `yield` from a generator within it. `on` is the device that computes the step.
    """
    return _nothing if _listener is None else _measured(_listener, step, on)


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
def _measured(listener: Callable[[Span], None], step: str, on: Any) -> Iterator[None]:
    outer = _thread.inner
    _thread.inner = 0.0
    start = _now(on)
    try:
        yield
    finally:
        seconds = _now(on) - start
        listener(Span(step, seconds - _thread.inner))
        _thread.inner = outer + seconds


def _now(on: Any) -> float:
    if on is not None and on.type == "cuda":  # which works on after its calls have returned
        sys.modules["torch"].cuda.synchronize(on)
    return time.monotonic()


# For a parent process, which outlives this one: any code may end a process without a word ----------------------------

NOTE = 8192  # bytes
_shared = mmap.mmap(-1, NOTE)  # with each process that is forked from this one


def note(run: str, work: str = "") -> None:
    """Note the folder of the run, and what is done there."""
    _shared[:] = f"{run}\n{work}".encode()[:NOTE].ljust(NOTE, b"\0")


def noted() -> tuple[str, str]:
    """The folder of the run, and what is done there; '' where nothing is noted."""
    run, _, work = _shared[:].rstrip(b"\0").decode(errors="replace").rpartition("\n")
    return run, work


@contextmanager
def at(work: str) -> Iterator[None]:
    """Code that may be the user's runs in the context."""
    run, _ = noted()
    note(run, work)
    try:
        yield
    finally:
        note(run)
