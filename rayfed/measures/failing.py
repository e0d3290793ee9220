"""If a measure fails, it is left out with a warning, and the run continues."""

import functools
import logging

import torch

log = logging.getLogger(__name__)


def warn_of_failure(name: str, error: Exception) -> None:
    """Log that a measure fails, once in a process.

    Raise the error again if a GPU's memory was exhausted: after that, results may differ in their
    bits, because cuDNN may choose other algorithms (`hardware.advising`).
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    _warn(name, f"{type(error).__name__}: {error}")


@functools.cache
def _warn(name: str, reason: str) -> None:
    """Log a warning; the cache lets each one through only once."""
    log.warning("measure = %s fails, and is left out: %s", name, reason)
