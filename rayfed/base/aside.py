"""Something done by another thread, while this one does something else."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import ParamSpec, TypeVar

NAME = "rayfed-aside"

P = ParamSpec("P")
T = TypeVar("T")


def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call the function in a thread of its own.

    Unlike a pool's thread, it does not hold up the end of the process.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            # It is raised where the result is wanted.
            future.set_exception(error)

    threading.Thread(target=copy_context().run, args=[call], daemon=True, name=NAME).start()
    return future


def is_working() -> bool:
    """Say whether such a thread has not ended.

    In C++ code, as PyTorch's, it aborts a process whose interpreter ends.
    """
    return any(thread.name == NAME for thread in threading.enumerate())
