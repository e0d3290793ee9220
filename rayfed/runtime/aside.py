"""Something done by another thread, while this one does something else."""

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from threading import Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call the function in a thread of its own. Unlike a pool's thread, it does not hold up the end of the process."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # it is raised where the result is wanted
            future.set_exception(error)

    Thread(target=copy_context().run, args=[call], daemon=True).start()
    return future
