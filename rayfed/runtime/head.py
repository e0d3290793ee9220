"""Ask the head of a cluster about its nodes.

The head may be lost, or be starting again, so no wait for it is long.

Ray's own request has no limit, and Ray ends a process that has not heard from the head for a
minute.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

import ray

from rayfed.base.errors import WorkersLost
from rayfed.runtime import internals
from rayfed.runtime.placement import Resources, selected

log = logging.getLogger(__name__)
T = TypeVar("T")

# Seconds in which the head must answer.
HEAD_LIMIT = 10.0
# Seconds from one look at this process's own node to the next.
WATCH = 5.0


def nodes(labels: Mapping[str, str]) -> dict[str, Resources]:
    """Return the resources of each node that is alive and has such labels.

    They are found by the id that Ray gave the node.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeID"]: node["Resources"] for node in alive if selected(node["Labels"], labels)}


@contextmanager
def ending_with_its_node() -> Iterator[None]:
    """End this process, within the context, once the head has given its node up.

    Ray ends it where Ray notices that. It does not where the node's raylet is stopped, or hangs: a
    call to Ray would wait for that raylet for ever.
    """
    own_node = ray.get_runtime_context().get_node_id()
    over = threading.Event()

    def watch() -> None:
        """Look again and again whether the head still knows this node."""
        while not over.wait(WATCH):
            # The head may be lost, which ends the run in another way.
            with suppress(Exception):
                if own_node not in nodes({}):
                    os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _ask(question: Callable[[], T]) -> SimpleQueue[T | Exception]:
    """Return where the answer of the head will be, or the exception that Ray raised instead."""
    answers: SimpleQueue[T | Exception] = SimpleQueue()

    def ask() -> None:
        """Ask, and put the answer where it is awaited."""
        try:
            answers.put(question())
        except Exception as error:
            # It counts as an answer. Without one, the head would never be asked again.
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    return answers


class Head:
    """Asks the head, with a thread that may wait for it.

    Ray reaches actors without the head, so the work continues. It tells of the nodes that have the
    `labels` of a run.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._answers: SimpleQueue[dict[str, Resources] | Exception]
        # When the head was asked, if there is no answer yet.
        self._asked: float | None = None
        # The last answer that named nodes.
        self._known: dict[str, Resources] | None = None
        self.silent = False
        # Ids of nodes that are, or were, about to end.
        self.draining: set[str] = set()

    def known(self) -> dict[str, Resources]:
        """Return the nodes as the head last knew them.

        Raise `WorkersLost` where it has never answered.
        """
        self.nodes()
        if self._known is None:
            raise WorkersLost("the head of the cluster does not answer; try again when it does")
        return self._known

    def nodes(self, seconds: float = HEAD_LIMIT) -> dict[str, Resources] | None:
        """Return what the function `nodes` does; None if the head fails, or is late.

        It is late if it has not answered `seconds` from now. With `seconds` 0 the answer is of the
        call before. The head is silent after `HEAD_LIMIT` seconds.
        """
        now = time.monotonic()
        if self._asked is None:
            self._asked, self._answers = now, _ask(self._look)
        silent_at = self._asked + HEAD_LIMIT
        answer: dict[str, Resources] | Exception | None = None
        with suppress(Empty):
            answer = self._answers.get(timeout=max(0.0, min(seconds, silent_at - now)))
            self._asked = None
        if isinstance(answer, dict):
            if self.silent:
                log.warning("the head of the cluster is back")
            self.silent, self._known = False, answer
            return answer
        if answer is None and time.monotonic() < silent_at:
            return None
        if answer:
            self._falls_silent(f"failed ({answer!r})")
        else:
            self._falls_silent(f"has not answered for {HEAD_LIMIT:.0f} s")
        return None

    def _look(self) -> dict[str, Resources]:
        """Return the nodes that are alive, and note which are about to end."""
        self.draining |= internals.draining()
        return nodes(self._labels)

    def memory_was_full(self, process: str) -> bool:
        """Say whether Ray killed a process because its node ran out of memory.

        Return False if the head is silent. The call that is lost does not say it: to Ray, an actor
        that will be restarted is only unavailable.
        """
        # Each actor of a lost node would wait for a silent head.
        if self.silent:
            return False
        answers = _ask(lambda: internals.memory_was_full(process))
        with suppress(Empty):
            return answers.get(timeout=HEAD_LIMIT) is True
        self._falls_silent(f"has not answered for {HEAD_LIMIT:.0f} s")
        return False

    def _falls_silent(self, reason: str) -> None:
        """Note that the head does not answer, and log the first time why."""
        if not self.silent:
            log.warning(
                "the head of the cluster %s; the run continues, with a checkpoint after each "
                "round; Ray would end it after a minute",
                reason,
            )
        self.silent = True
