"""What an error of a call on an actor means: wrong input, a loss, or an exception of the work itself."""

import torch
from ray.exceptions import ObjectLostError, RayError, RayTaskError, UnserializableException

from rayfed.errors import InputError, Restarted


def cause_of(error: RayError) -> BaseException | None:
    """The exception that the work raised on the actor; None where Ray itself failed."""
    return error.cause if isinstance(error, RayTaskError) else None


def refuse_input(error: RayError) -> None:
    """Raises the `InputError` that an actor raised, if it did, as this process would have raised it."""
    if isinstance(cause := cause_of(error), InputError):
        raise InputError(str(cause)) from None


def is_loss(error: RayError) -> bool:
    """Whether a call was lost with its actor or its objects; if not, the work itself has raised an exception."""
    cause = cause_of(error)
    if isinstance(error, UnserializableException):  # the work's exception cannot be unpickled here
        return False
    if cause is None or isinstance(cause, Restarted):
        return True
    return isinstance(cause, RayError) and type(cause) is not RayError  # that is an exception that cannot be pickled


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
    return isinstance(cause, torch.AcceleratorError) or str(cause).startswith(("CUDA error", "cuDNN error"))
