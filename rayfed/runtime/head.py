"""The nodes of a cluster, asked of its head. The head may be lost, or be starting again, so no wait for it is long.

Ray's own request has no limit, and Ray ends a process that has not heard from the head for a minute.
"""

import logging
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue

import ray

from rayfed.errors import WorkersLost
from rayfed.runtime.placement import Resources

log = logging.getLogger(__name__)

HEAD_LIMIT = 10.0  # seconds in which the head must answer


def nodes() -> dict[str, Resources]:
    """The resources of each node that is alive, by the id that Ray gave the node."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


class Head:
    """The head, asked by a thread that may wait for it. Ray reaches actors without the head, so the work continues."""

    def __init__(self) -> None:
        self._answers: SimpleQueue[dict[str, Resources] | Exception] = SimpleQueue()
        self._asked: float | None = None  # when, if there is no answer yet
        self._known: dict[str, Resources] | None = None  # the last answer
        self.silent = False

    def known(self) -> dict[str, Resources]:
        """The nodes as the head last knew them. Raises `WorkersLost` where it has never answered."""
        self.nodes()
        if self._known is None:
            raise WorkersLost("the head of the cluster does not answer; try again once `ray status` shows its nodes")
        return self._known

    def nodes(self) -> dict[str, Resources] | None:
        """As the function `nodes`; None if the head fails, or while it has not answered for `HEAD_LIMIT` seconds."""
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            threading.Thread(target=self._ask, daemon=True).start()
        answer: dict[str, Resources] | Exception | None = None
        with suppress(Empty):
            answer = self._answers.get(timeout=max(0.0, self._asked + HEAD_LIMIT - now))
            self._asked = None
        if isinstance(answer, dict):
            if self.silent:
                log.warning("the head of the cluster is back")
            self.silent, self._known = False, answer
            return answer
        if not self.silent:
            log.warning(
                "the head of the cluster %s; the run continues, with a checkpoint after each round; Ray would end it "
                "after a minute",
                f"failed ({answer!r})" if answer else f"has not answered for {HEAD_LIMIT:.0f} s",
            )
        self.silent = True
        return None

    def _ask(self) -> None:
        try:
            self._answers.put(nodes())
        except Exception as error:  # of Ray; without an answer, the head would never be asked again
            self._answers.put(error)
