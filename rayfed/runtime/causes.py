"""What an error of Ray, or of a call on an actor, means: wrong input, a loss, or an exception of
the work itself.
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
# has the same list. Workers, nodes, objects, connections, and room that may come back.
LOST = (
    RayActorError,
    NodeDiedError,
    LocalRayletDiedError,
    WorkerCrashedError,
    # Their node is lost.
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
# Errors of a system.
MAY_PASS = (
    *PASSING,
    # A port that was taken.
    errno.EADDRINUSE,
    # No more processes.
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
    r"|no space left|address already in use|already occupied|resource temporarily unavailable|out "
    r"of memory"
)


def may_pass(error: BaseException) -> bool:
    """Return whether an error has a cause that a second try can mend. An unknown cause has none."""
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
    """The name of the module whose code raised an error; '' where it was not raised."""
    steps = list(traceback.walk_tb(error.__traceback__))
    return str(steps[-1][0].f_globals.get("__name__")) if steps else ""


def _of_ray(error: BaseException) -> bool:
    """Return whether Ray itself raised an error, and not the work that it ran."""
    if isinstance(error, RayError):
        return not isinstance(error, RayTaskError)
    return _raised_in(error).partition(".")[0] in ("ray", "grpc")


@contextmanager
def ray_may_fail() -> Iterator[None]:
    """An error that Ray itself raises in the context is `WorkersLost` if it may pass; any other is
    raised as it is.

    Where this process's node, its head or the room in its store is lost, Ray raises not only its
    own kinds of errors.
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
        # Which would wait again.
        atexit.unregister(ray.shutdown)
    except Exception as error:
        if not _of_ray(error):
            raise


def cause_of(error: RayError) -> BaseException | None:
    """The exception that the work raised on the actor; None where Ray itself failed."""
    return error.cause if isinstance(error, RayTaskError) else None


def refuse_input(error: RayError) -> None:
    """Raises the `InputError` that an actor raised, if it did, as this process would have raised
    it.
    """
    cause = cause_of(error)
    if isinstance(cause, InputError):
        raise InputError(str(cause)) from None


def is_loss(error: RayError) -> bool:
    """Whether a call was lost with its actor or its objects; if not, the work itself has raised an
    exception.
    """
    cause = cause_of(error)
    # The work's exception cannot be unpickled here.
    if isinstance(error, UnserializableException):
        return False
    if cause is None or isinstance(cause, Restarted):
        return True
    # That is an exception that cannot be pickled.
    return isinstance(cause, RayError) and type(cause) is not RayError


def lost_object(error: RayError) -> ObjectLostError | None:
    """The loss of an object that the call needs, if the call was lost for that reason; its actor is
    well.
    """
    cause = cause_of(error)
    return cause if isinstance(cause, ObjectLostError) else None


def is_gpu_fault(error: RayError) -> bool:
    """Whether the work ended with an error of CUDA's that no later work in its process would
    survive.

    The GPU may be faulty (ECC, Xid), or the work itself, such as a label beyond the classes: CUDA's
    error is the same.
    """
    cause = cause_of(error)
    if isinstance(cause, torch.OutOfMemoryError):
        return False
    return isinstance(cause, ACCELERATOR_ERROR) or str(cause).startswith(
        ("CUDA error", "cuDNN error")
    )
