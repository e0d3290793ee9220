"""Log a line that says what a run waits for, while there is no progress."""

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import ObjectRef

log = logging.getLogger(__name__)

# Seconds without progress until the first line. Until each next line, they are twice as many.
HEARTBEAT = 10.0
# Seconds until the first line while processes start. Each imports torch, which alone often takes
# ten seconds.
STARTING = 30.0


class Heartbeat:
    """Logs a line now and then, from the last progress on."""

    def __init__(self, *, starting: bool = False) -> None:
        self._first_pause = STARTING if starting else HEARTBEAT
        self.progress()

    def progress(self) -> None:
        """Note that there is progress, or that a line about it has just been logged."""
        self._since, self._pause = time.monotonic(), self._first_pause

    @property
    def left(self) -> float:
        """Return the seconds until the next line is due."""
        return max(0.0, self._since + self._pause - time.monotonic())

    def beat(self, awaited: Callable[[], str]) -> None:
        """Log a line if it is due; `awaited` says what the run waits for, and where."""
        if self.left == 0.0:
            log.warning(
                "no progress for %.0f s; waiting for %s", time.monotonic() - self._since, awaited()
            )
            self._pause *= 2


def got(
    references: list[ObjectRef], limit: float, awaited: str, *, starting: bool = False
) -> list[Any]:
    """Return the values of all references, with a heartbeat while they are awaited.

    With `starting`, processes start first. Raises `GetTimeoutError` after `limit` seconds.
    """
    end, heartbeat = time.monotonic() + limit, Heartbeat(starting=starting)
    while time.monotonic() < end:
        pause = min(end - time.monotonic(), heartbeat.left)
        _, missing = ray.wait(references, num_returns=len(references), timeout=max(0.0, pause))
        if not missing:
            break
        heartbeat.beat(lambda: awaited)
    return ray.get(references, timeout=max(1.0, end - time.monotonic()))
