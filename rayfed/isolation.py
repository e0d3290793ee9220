"""A part's hooks leave nothing behind in the process that runs them.

A hook may draw from any generator and change torch's settings. If such a change lasted, the next client on the same
worker would inherit it, and the results would depend on which worker served which client.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# How each setting is read and written.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    ),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    (lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on)),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


@contextmanager
def isolated(seed: int, device: torch.device) -> Iterator[None]:
    """Python's, NumPy's and torch's generators are seeded; they and torch's settings are restored at the end."""
    before = [read() for read, _ in SETTINGS]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond: it asks every kind of device
        if devices:
            torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            for (_, write), value in zip(SETTINGS, before, strict=True):
                write(value)
