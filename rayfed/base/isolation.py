"""A run computes as a new process would, and leaves nothing behind in the process that runs it.

A script, a notebook or a module at its import may have changed torch's settings, and a hook may do
so in a run. Then the results would depend on who has called rayfed, or on which worker served which
client. So the settings that scripts change, and that can change a bit, have their usual values
while a run computes: those of a new process, such as that of `rayfed run`. Afterwards they have
their own values again.

None of these settings is a choice of the experiment. What an experiment chooses is in its job:
`train.precision` (bf16 and TF32), `ray.num_cpus` (threads). A model that wants another dtype
converts its own weights and inputs. On a GPU the usual values are those with which CUDA gives the
same bits each time. Warnings and the log change no bits: they stay as they are. So do variables of
the environment, which torch reads when it is imported.
"""

import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from rayfed.base.errors import InputError

log = logging.getLogger(__name__)

# Half of it is denormal.
TINY = sys.float_info.min
# In place of a usual value: the setting is only restored.
KEPT = object()

# torch 2.9 and later has a precision for each kind of operation. torch 2.7 and 2.8 has only the
# older switches. What asks for this name can go once pyproject.toml asks for torch 2.9.
HAS_PRECISIONS = hasattr(torch.backends.cudnn, "conv")
# Where torch keeps how it may round float32: for all operations, for a library, for one operation
# of a library.
PRECISIONS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("cuda", "matmul"),
    ("mkldnn", "all"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
    ("mkldnn", "matmul"),
)
ROUNDED = PRECISIONS if HAS_PRECISIONS else ()
Rounding = tuple[str | None, bool | None, tuple[str, ...]]
# torch's older switches for products and for cuDNN, and the newer ones in the order of
# `PRECISIONS`.
_USUAL = ("none", "none", "tf32", "tf32", "none", "none", "none", "none", "none")
_ON_GPU = ("none", "none", "ieee", "ieee", "ieee", "none", "none", "none", "ieee")
USUAL_ROUNDING: Rounding = ("highest", True, _USUAL[: len(ROUNDED)])
ROUNDING_ON_GPU: Rounding = ("highest", False, _ON_GPU[: len(ROUNDED)])


@dataclass(frozen=True, eq=False)
class Setting:
    """A setting of the process, or of the calling thread."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    # As in a new process.
    usual: Any = KEPT
    # Where the work is done on a GPU and the usual value is another there.
    on_gpu: Any = KEPT


def _attribute(owner: Any, name: str, usual: Any, on_gpu: Any = KEPT) -> Setting:
    return Setting(
        f"{getattr(owner, '__name__', owner)}.{name}",
        lambda: getattr(owner, name),
        lambda value: setattr(owner, name, value),
        usual,
        on_gpu,
    )


def _flushes_denormals() -> bool:
    # torch does not tell. The setting is the thread's, so it holds for Python's floats too.
    return TINY / 2 == 0.0


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: tuple[bool, bool]) -> None:
    # torch's function imports its compiler: 80 MB and two seconds in each process.
    if value != _determinism():
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _rounding() -> Rounding:
    """Return the switches; older ones are None where torch says that newer ones disagree."""
    try:
        of_products: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:
        of_products = None
    try:
        of_cudnn: bool | None = torch.backends.cudnn.allow_tf32
    except RuntimeError:
        of_cudnn = None
    newer = [torch._C._get_fp32_precision_getter(*place) for place in ROUNDED]
    return of_products, of_cudnn, tuple(newer)


def _set_rounding(value: Rounding) -> None:
    of_products, of_cudnn, newer = value
    if of_products is not None:
        torch.set_float32_matmul_precision(of_products)
    if of_cudnn is not None:
        torch._C._set_cudnn_allow_tf32(of_cudnn)
    for (library, operation), precision in zip(ROUNDED, newer, strict=True):
        torch._C._set_fp32_precision_setter(library, operation, precision)


def _autocast(device: str) -> Setting:
    return Setting(
        f"autocast on {device}",
        lambda: torch.is_autocast_enabled(device),
        lambda is_on: torch.set_autocast_enabled(device, is_on),
        usual=False,
    )


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_depth(value: int) -> None:
    # Within a context of autocast, torch keeps weights that it has cast, also those that have
    # changed since.
    torch.clear_autocast_cache()
    while _autocast_depth() > value:
        torch.autocast_decrement_nesting()
    while _autocast_depth() < value:
        torch.autocast_increment_nesting()


def _set_environment(before: dict[str, str]) -> None:
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


ENVIRONMENT = Setting("environment", lambda: dict(os.environ), _set_environment)

# Those that scripts, and code of users', change in practice.
SETTINGS: tuple[Setting, ...] = (
    Setting("threads", torch.get_num_threads, torch.set_num_threads),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    Setting(
        "default device",
        lambda: torch.empty(0).device,
        _set_default_device,
        torch.device("cpu"),
    ),
    Setting("gradients", torch.is_grad_enabled, torch.set_grad_enabled, True),
    Setting("float32", _rounding, _set_rounding, USUAL_ROUNDING, ROUNDING_ON_GPU),
    Setting("determinism", _determinism, _set_determinism, (False, False), (True, False)),
    _attribute(torch.backends.cudnn, "benchmark", False),
    _attribute(torch.backends.cudnn, "deterministic", False),
    _autocast("cpu"),
    _autocast("cuda"),
    Setting("depth of autocast", _autocast_depth, _set_autocast_depth, 0),
    Setting("denormal numbers", _flushes_denormals, torch.set_flush_denormal, False),
    Setting("Python's generator", random.getstate, random.setstate),
    Setting("NumPy's generator", np.random.get_state, np.random.set_state),
    ENVIRONMENT,
)


def set_usual(device: torch.device) -> None:
    """Give each setting its usual value for work on a device."""
    for setting in SETTINGS:
        wanted = setting.usual
        if device.type == "cuda" and setting.on_gpu is not KEPT:
            wanted = setting.on_gpu
        if wanted is not KEPT and setting.read() != wanted:
            setting.write(wanted)


# Held by the thread whose run is under way in this process.
_running = threading.Lock()
# What that run is called.
_holder = ""
_holding_thread: int | None = None


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Compute as in a process of its own: with usual settings, and no other run at the same time.

    Generators and most settings belong to the process. So where another thread's run is under way,
    this one waits for its end, and says so. Raises `InputError` where this thread itself is in a
    run. At the end everything is as before, except the environment.
    """
    global _holder, _holding_thread
    if _holding_thread == threading.get_ident():
        raise InputError(
            f"{name} cannot begin within {_holder}, which is under way in this thread: both would "
            "use this process's generators and settings; begin it before or after, or in a process "
            "of its own (subprocess)"
        )
    if not _running.acquire(blocking=False):
        log.warning(
            "%s waits for the end of %s, which is under way in another thread of this process; to "
            "have runs at the same time, give each a process of its own, or make them a grid",
            name,
            _holder,
        )
        _running.acquire()
    try:
        _holder, _holding_thread = name, threading.get_ident()
        with _usual():
            yield
    finally:
        _holder, _holding_thread = "", None
        _running.release()


@contextmanager
def _usual() -> Iterator[None]:
    """Give the settings their usual values for the context, and leave all modes.

    At the end everything is as before, except the environment.
    """
    with ExitStack() as stack:
        # Gradients cannot be computed in inference mode, whatever the setting of gradients is.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_without_modes())
        before = [(setting, setting.read()) for setting in SETTINGS if setting is not ENVIRONMENT]
        with torch.random.fork_rng(devices=[]):
            try:
                set_usual(torch.device("cpu"))
                yield
            finally:
                for setting, value in before:
                    setting.write(value)


@contextmanager
def _without_modes() -> Iterator[None]:
    """Leave the modes that are in force in this thread, such as `with torch.device("cuda")`."""
    device_mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    function_modes = [
        mode for mode in _get_current_function_mode_stack() if mode is not device_mode
    ]
    dispatch_modes = list(_get_current_dispatch_mode_stack())
    for _ in function_modes:
        _pop_function_mode()
    for _ in dispatch_modes:
        _pop_dispatch_mode()
    try:
        yield
    finally:
        for mode in dispatch_modes:
            _push_dispatch_mode(mode)
        for mode in function_modes:
            _push_function_mode(mode)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with `count` threads, which can change the last bits of a sum.

    Afterwards the number is the one before.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def set_tf32(on: bool) -> None:
    """Let CUDA round the factors of float32 products to TF32, which keeps 10 bits of 23, or not.

    torch has two sets of switches for it: the newer overrules the older, but raises an error where
    they disagree. torch 2.7 and 2.8 has only the older set.
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
    """Switch TF32 on for the context, if it is asked for, and off afterwards."""
    if on:
        set_tf32(True)
    try:
        yield
    finally:
        if on:
            set_tf32(False)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed Python's, NumPy's and torch's generators; those of other devices are left alone."""
    random.seed(seed)
    # By a list: from one number NumPy's generator would give the stream of torch's, as both are
    # Mersenne Twisters.
    np.random.seed([1, seed % 2**32, seed >> 32])
    # torch.manual_seed takes a millisecond: it asks every kind of device.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def isolated(seed: int, device: torch.device, *, flush: bool = False) -> Iterator[None]:
    """Seed the generators and give each setting its usual value; restore all of them at the end.

    With `flush`, denormal numbers (below 1e-38) become zero: a processor takes many times as long
    for them, and the gradients of a client with few classes are soon so small. torch sets that for
    the calling thread alone.
    """
    before = [setting.read() for setting in SETTINGS]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            set_usual(device)
            seed_generators(seed, device)
            torch.set_flush_denormal(flush)
            yield
        except SystemExit as error:
            raise RuntimeError(
                f"a hook has ended Python ({error!r}); it should raise an exception instead"
            ) from error
        finally:
            for setting, value in zip(SETTINGS, before, strict=True):
                setting.write(value)
