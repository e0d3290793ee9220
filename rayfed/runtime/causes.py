"""What an error of Ray, or of a call on an actor, means: wrong input, a loss, or an exception of the work itself."""

import atexit
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import ray
import torch
from ray.exceptions import ObjectLostError, RayError, RayTaskError, UnserializableException

from rayfed.base.aside import aside
from rayfed.base.errors import InputError, Restarted, WorkersLost, first_line

# torch 2.7 has no such class, and raises a RuntimeError instead, whose text begins with "CUDA error".
# This name can go once pyproject.toml asks for torch 2.8.
ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", ())
END_LIMIT = 20.0  # seconds in which Ray, or what is on it, must end


@contextmanager
def ray_may_fail() -> Iterator[None]:
    """An error that Ray itself raises in the context is `WorkersLost`; any other error is raised as it is.

    Where this process's node, its head or the room in its store is lost, Ray raises not only its own kinds of errors.
    """
    try:
        yield
    except (RayError, OSError, ValueError, RuntimeError, AssertionError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        of_ray = str(frame.f_globals.get("__name__")).partition(".")[0] in ("ray", "grpc")
        if isinstance(error, RayTaskError) or not (of_ray or isinstance(error, RayError)):
            raise
        raise WorkersLost(
            f"Ray has failed here ({type(error).__name__}: {first_line(error)}): the node of this process is lost, or "
            "its disk or object store is full"
        ) from error


def end_of_ray(end: Callable[[], object]) -> None:
    """End Ray, or what is on it. Where it fails or does not answer, it is left: its processes end with this one."""
    try:
        with suppress(WorkersLost), ray_may_fail():
            aside(end).result(END_LIMIT)
    except TimeoutError:
        atexit.unregister(ray.shutdown)  # which would wait again


def cause_of(error: RayError) -> BaseException | None:
    """The exception that the work raised on the actor; None where Ray itself failed."""
    return error.cause if isinstance(error, RayTaskError) else None


def refuse_input(error: RayError) -> None:
    """Raises the `InputError` that an actor raised, if it did, as this process would have raised it."""
    cause = cause_of(error)
    if isinstance(cause, InputError):
        raise InputError(str(cause)) from None


def is_loss(error: RayError) -> bool:
    """Whether a call was lost with its actor or its objects; if not, the work itself has raised an exception."""
    cause = cause_of(error)
    if isinstance(error, UnserializableException):  # the work's exception cannot be unpickled here
        return False
    if cause is None or isinstance(cause, Restarted):
        return True
    return (
        isinstance(cause, RayError) and type(cause) is not RayError
    )  # that is an exception that cannot be pickled


def lost_object(error: RayError) -> ObjectLostError | None:
    """The loss of an object that the call needs, if the call was lost for that reason; its actor is well."""
    cause = cause_of(error)
    return cause if isinstance(cause, ObjectLostError) else None


def is_gpu_fault(error: RayError) -> bool:
    """Whether the work ended with an error of CUDA's that no later work in its process would survive.

    The GPU may be faulty (ECC, Xid), or the work itself, such as a label beyond the classes: CUDA's error is the same.
    """
    cause = cause_of(error)
    if isinstance(cause, torch.OutOfMemoryError):
        return False
    return isinstance(cause, ACCELERATOR_ERROR) or str(cause).startswith(
        ("CUDA error", "cuDNN error")
    )
