"""What happens when a measure fails: it is left out, with a warning, and the run goes on."""

import functools
import logging

import torch

log = logging.getLogger(__name__)


def warn_of_failure(name: str, error: Exception) -> None:
    """Log, once in a process, that a measure fails.

    Raises the error where it is of a GPU's memory, after which cuDNN may go on with other bits:
    `hardware.advising`.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    _warn(name, f"{type(error).__name__}: {error}")


@functools.cache
def _warn(name: str, why: str) -> None:
    log.warning("measure = %s fails, and is left out: %s", name, why)
