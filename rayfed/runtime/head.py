"""The nodes of a cluster, asked of its head. The head may be lost, or be starting again, so no wait for it is long.

Ray's own request has no limit, and Ray ends a process that has not heard from the head for a minute.
"""

import logging
import threading
import time
from queue import Empty, SimpleQueue

import ray

from rayfed.runtime.placement import Resources

log = logging.getLogger(__name__)

HEAD_LIMIT = 10.0  # seconds in which the head must answer


def nodes() -> list[Resources]:
    """The resources of each node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class Head:
    """The head, asked by a thread that may wait for it. Ray reaches actors without the head, so the work continues."""

    def __init__(self) -> None:
        self._answers: SimpleQueue[list[Resources]] = SimpleQueue()
        self._asked: float | None = None  # when, if there is no answer yet
        self.silent = False

    def nodes(self) -> list[Resources] | None:
        """The resources of each node that is alive; None while there has been no answer for `HEAD_LIMIT` seconds."""
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            threading.Thread(target=lambda: self._answers.put(nodes()), daemon=True).start()
        try:
            answer = self._answers.get(timeout=max(0.0, self._asked + HEAD_LIMIT - now))
        except Empty:
            answer = None
        else:
            self._asked = None
        if answer is None and not self.silent:
            log.warning(
                "the head of the cluster has not answered for %.0f s; the run continues, with a checkpoint after each "
                "round; Ray would end it after a minute",
                HEAD_LIMIT,
            )
        if answer is not None and self.silent:
            log.warning("the head of the cluster is back")
        self.silent = answer is None
        return answer
