"""The nodes of a cluster, asked of its head.

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
from functools import partial
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
    """The resources of each node that is alive and has such labels, by the id that Ray gave the
    node.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeID"]: node["Resources"] for node in alive if selected(node["Labels"], labels)}


@contextmanager
def ending_with_its_node() -> Iterator[None]:
    """Within the context, this process ends once the head has given its node up, as it does where
    Ray notices that.

    It does not where the node's raylet is stopped, or hangs: a call to Ray would wait for that
    raylet for ever.
    """
    own, over = ray.get_runtime_context().get_node_id(), threading.Event()

    def watch() -> None:
        while not over.wait(WATCH):
            # The head may be lost, which ends the run in another way.
            with suppress(Exception):
                if own not in nodes({}):
                    os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _ask(question: Callable[[], T]) -> SimpleQueue[T | Exception]:
    """Where the answer of the head will be, or the exception that Ray raised instead."""
    answers: SimpleQueue[T | Exception] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(question())
        except Exception as error:
            # Without an answer, the head would never be asked again.
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    return answers


class Head:
    """The head, asked by a thread that may wait for it.

    Ray reaches actors without the head, so the work continues.

    It tells of the nodes that have the `labels` of a run.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._answers: SimpleQueue[dict[str, Resources] | Exception]
        # When, if there is no answer yet.
        self._asked: float | None = None
        # The last answer.
        self._known: dict[str, Resources] | None = None
        self.silent = False
        # Ids of nodes that are, or were, about to end.
        self.draining: set[str] = set()

    def known(self) -> dict[str, Resources]:
        """The nodes as the head last knew them.

        Raises `WorkersLost` where it has never answered.
        """
        self.nodes()
        if self._known is None:
            raise WorkersLost("the head of the cluster does not answer; try again when it does")
        return self._known

    def nodes(self, seconds: float = HEAD_LIMIT) -> dict[str, Resources] | None:
        """As the function `nodes`; None if the head fails, or has not answered `seconds` from now.

        With `seconds` 0 it gives the answer to the call before. The head is silent after
        `HEAD_LIMIT` seconds.
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
        self._falls_silent(
            f"failed ({answer!r})" if answer else f"has not answered for {HEAD_LIMIT:.0f} s"
        )
        return None

    def _look(self) -> dict[str, Resources]:
        self.draining |= internals.draining()
        return nodes(self._labels)

    def memory_was_full(self, process: str) -> bool:
        """Whether Ray killed a process because its node ran out of memory; False if the head is
        silent.

        The call that is lost does not say it: to Ray, an actor that will be restarted is only
        unavailable.
        """
        # Each actor of a lost node would wait for it.
        if self.silent:
            return False
        with suppress(Empty):
            return _ask(partial(internals.memory_was_full, process)).get(timeout=HEAD_LIMIT) is True
        self._falls_silent(f"has not answered for {HEAD_LIMIT:.0f} s")
        return False

    def _falls_silent(self, how: str) -> None:
        if not self.silent:
            log.warning(
                "the head of the cluster %s; the run continues, with a checkpoint after each "
                "round; Ray would end it after a minute",
                how,
            )
        self.silent = True
