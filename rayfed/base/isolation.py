"""A part's hooks leave nothing behind in the process that runs them.

A hook may draw from any generator and change torch's settings. If such a change lasted, the next client on the same
worker would inherit it, and the results would depend on which worker served which client.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as of_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# torch 2.9 and later has a precision for each kind of operation. torch 2.7 and 2.8 has only the older
# switches. What asks for this name can go once pyproject.toml asks for torch 2.9.
HAS_PRECISIONS = hasattr(torch.backends.cudnn, "conv")
TINY = sys.float_info.min  # half of it is denormal


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _flushes_denormals() -> bool:
    return (
        TINY / 2 == 0.0
    )  # torch does not tell; the setting is the thread's, so it holds for Python's floats too


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: tuple[bool, bool]) -> None:
    if (
        value != _determinism()
    ):  # torch's function imports its compiler: 80 MB and two seconds in each process
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _contents(table: MutableMapping[Any, Any]) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def write(before: dict[Any, Any]) -> None:
        if dict(table) != before:
            for key in table.keys() - before.keys():
                del table[key]
            table.update(before)

    return lambda: dict(table), write


def _depth(stack: Callable[[], list[Any]]) -> tuple[Callable[[], int], Callable[[int], None]]:
    def write(before: int) -> None:
        for mode in reversed(stack()[before:]):
            mode.__exit__(None, None, None)

    return lambda: len(stack()), write


def _switches_of_tf32() -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """How cuDNN's use of TF32 is read and written."""
    if not HAS_PRECISIONS:
        return [_attribute(torch.backends.cudnn, "allow_tf32")]
    backends: Any = torch.backends
    return [
        _attribute(backends.cudnn.conv, "fp32_precision"),
        _attribute(backends.cudnn.rnn, "fp32_precision"),
    ]


# How each setting is read and written.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: torch.empty(0).device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_determinism, _set_determinism),
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    *_switches_of_tf32(),
    _attribute(torch.backends.mkldnn, "enabled"),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    (lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on)),
    (_flushes_denormals, torch.set_flush_denormal),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (np.geterr, lambda found: np.seterr(**found)),
    _contents(os.environ),
    *(
        _contents(hooks)
        for name, hooks in vars(of_modules).items()
        if name.startswith("_global") and "hooks" in name
    ),
    _attribute(of_modules, "_global_is_full_backward_hook"),
    _depth(
        _get_current_function_mode_stack
    ),  # after the default device, which is a mode below all others
    _depth(_get_current_dispatch_mode_stack),
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with `count` threads, afterwards with the number before: it can change the last bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def set_tf32(on: bool) -> None:
    """Whether CUDA may round the factors of float32 products to TF32, which keeps 10 bits of 23.

    torch has two sets of switches for it: the newer overrules the older, but raises an error where they disagree.
    torch 2.7 and 2.8 has only the older set.
    """
    backends: Any = torch.backends
    backends.cudnn.allow_tf32 = on
    torch.set_float32_matmul_precision("high" if on else "highest")
    if not HAS_PRECISIONS:
        return
    for operations in (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul):
        operations.fp32_precision = "tf32" if on else "ieee"


@contextmanager
def in_tf32(on: bool) -> Iterator[None]:
    """Within the context, TF32 is on, if it is asked for; afterwards it is off."""
    if on:
        set_tf32(True)
    try:
        yield
    finally:
        if on:
            set_tf32(False)


@contextmanager
def isolated(seed: int, device: torch.device, *, flush: bool = False) -> Iterator[None]:
    """Python's, NumPy's and torch's generators are seeded; they, torch's settings, hooks and modes, and the environment
    are restored at the end.

    With `flush`, denormal numbers (below 1e-38) become zero: a processor takes many times as long for them, and the
    gradients of a client with few classes are soon so small. torch sets that for the calling thread alone.
    """
    before = [read() for read, _ in SETTINGS]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        random.seed(seed)
        # By a list: from one number NumPy's generator would give the stream of torch's, as both are Mersenne Twisters.
        np.random.seed([1, seed % 2**32, seed >> 32])
        torch.set_flush_denormal(flush)
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed takes a millisecond: it asks every kind of device
        if devices:
            torch.cuda.manual_seed(seed)
        try:
            yield
        except SystemExit as error:
            raise RuntimeError(
                f"a hook has ended Python ({error!r}); it should raise an exception instead"
            ) from error
        finally:
            for (_, write), value in zip(SETTINGS, before, strict=True):
                write(value)
