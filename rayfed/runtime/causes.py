"""Tell what an error of Ray, or of a call on an actor, means.

It is wrong input, a loss, or an exception of the work itself.
"""

import atexit
import errno
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import ray
import torch
from ray.exceptions import (
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    PlasmaObjectNotAvailable,
    RayActorError,
    RayError,
    RayTaskError,
    RpcError,
    TaskUnschedulableError,
    UnserializableException,
    WorkerCrashedError,
)

from rayfed.base.aside import aside
from rayfed.base.errors import InputError, Restarted, WorkersLost, first_line
from rayfed.base.files import PASSING
from rayfed.runtime.internals import RAYLET

# torch 2.7 has no such class, and raises a RuntimeError instead, whose text begins with "CUDA
# error". This name can go once pyproject.toml asks for torch 2.8.
ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", ())
# Seconds in which Ray, or what is on it, must end.
END_LIMIT = 20.0

# The causes that a second try can mend, and for which alone the exit code is 75. docs/failure.md
# has the same list. They are lost workers, nodes, objects and connections, and room that may come
# back.
LOST = (
    RayActorError,
    NodeDiedError,
    LocalRayletDiedError,
    WorkerCrashedError,
    # The node of an actor or a task is lost, if it was bound to that node.
    ActorUnschedulableError,
    TaskUnschedulableError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    PlasmaObjectNotAvailable,
    RpcError,
    ConnectionError,
    TimeoutError,
)
# The numbers of the operating system's errors that may pass.
MAY_PASS = (
    *PASSING,
    # The port was taken.
    errno.EADDRINUSE,
    # No more processes can be started.
    errno.EAGAIN,
    errno.ENOMEM,
    errno.ENFILE,
    errno.EPIPE,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
)
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# What Ray says of such causes where its kind of error does not: RaySystemError, RuntimeError,
# Exception.
SAID = re.compile(
    r"(?i)timed out|broken pipe|connection (?:refused|reset|closed)|disconnected|unavailable"
    r"|no space left|address already in use|already occupied|resource temporarily unavailable"
    r"|out of memory"
)


def may_pass(error: BaseException) -> bool:
    """Say whether an error has a cause that a second try can mend. An unknown cause has none."""
    if isinstance(error, LOST):
        return True
    if isinstance(error, grpc.RpcError):
        code = getattr(error, "code", None)
        return code is not None and code() in NO_ANSWER
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in MAY_PASS
    # In C++, Ray raises these where an object or an actor is not there any more, or the connection
    # to its node or its store is broken.
    if isinstance(error, ValueError | OSError) and _raised_in(error) == RAYLET:
        return True
    return bool(SAID.search(first_line(error)))


def _raised_in(error: BaseException) -> str:
    """Return the name of the module whose code raised an error; '' where it was not raised."""
    steps = list(traceback.walk_tb(error.__traceback__))
    return str(steps[-1][0].f_globals.get("__name__")) if steps else ""


def _of_ray(error: BaseException) -> bool:
    """Say whether Ray itself raised an error, and not the work that it ran."""
    if isinstance(error, RayError):
        return not isinstance(error, RayTaskError)
    return _raised_in(error).partition(".")[0] in ("ray", "grpc")


@contextmanager
def ray_may_fail() -> Iterator[None]:
    """Raise `WorkersLost` for an error that Ray itself raises in the context, if it may pass.

    Any other error is raised as it is. Where this process's node, its head or the room in its
    store is lost, Ray raises not only its own kinds of errors.
    """
    try:
        yield
    except Exception as error:
        if not _of_ray(error) or not may_pass(error):
            raise
        raise WorkersLost(
            f"Ray has failed here ({type(error).__name__}: {first_line(error)}): the node of this "
            "process is lost, or its disk or object store is full"
        ) from error


def end_of_ray(end: Callable[[], object]) -> None:
    """End Ray, or what is on it.

    Where it fails or does not answer, it is left: its processes end with this one.
    """
    try:
        aside(end).result(END_LIMIT)
    except TimeoutError:
        # At the end of the process, this would wait once more.
        atexit.unregister(ray.shutdown)
    except Exception as error:
        if not _of_ray(error):
            raise


def cause_of(error: RayError) -> BaseException | None:
    """Return the exception that the work raised on the actor; None where Ray itself failed."""
    return error.cause if isinstance(error, RayTaskError) else None


def refuse_input(error: RayError) -> None:
    """Raise the `InputError` that an actor raised, if it did.

    It is raised as this process would have raised it.
    """
    cause = cause_of(error)
    if isinstance(cause, InputError):
        raise InputError(str(cause)) from None


def is_lost(error: RayError) -> bool:
    """Say whether a call was lost with its actor or its objects.

    If it was not lost, the work itself has raised an exception.
    """
    cause = cause_of(error)
    # The work has raised an exception that cannot be unpickled here.
    if isinstance(error, UnserializableException):
        return False
    if cause is None or isinstance(cause, Restarted):
        return True
    # Ray raises a plain `RayError` in place of an exception that cannot be pickled.
    return isinstance(cause, RayError) and type(cause) is not RayError


def lost_object(error: RayError) -> ObjectLostError | None:
    """Return the loss of an object that the call needs, if the call was lost for that reason.

    Its actor is well then.
    """
    cause = cause_of(error)
    return cause if isinstance(cause, ObjectLostError) else None


def is_gpu_fault(error: RayError) -> bool:
    """Say whether CUDA has failed so that no later work in the same process would survive.

    The GPU may be faulty (ECC, Xid), or the work itself, such as a label beyond the classes: CUDA's
    error is the same.
    """
    cause = cause_of(error)
    if isinstance(cause, torch.OutOfMemoryError):
        return False
    if isinstance(cause, ACCELERATOR_ERROR):
        return True
    return str(cause).startswith(("CUDA error", "cuDNN error"))
