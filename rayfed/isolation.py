"""A part's hooks leave nothing behind in the process that runs them.

A hook may draw from any generator and change torch's settings. If such a change lasted, the next client on the same
worker would inherit it, and the results would depend on which worker served which client.
"""

import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

import numpy as np
import torch

log = logging.getLogger(__name__)
SHOWN = 10_000  # characters that the hooks of one client, or of the server, may print in a round
LAST = 2_000  # more characters are shown, from the end
IN_LOG = 200_000  # characters of the rest that are in the log
TINY = sys.float_info.min  # half of it is denormal


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _flushes_denormals() -> bool:
    return TINY / 2 == 0.0  # torch does not tell; the setting is the thread's, so it holds for Python's floats too


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(value: tuple[bool, bool]) -> None:
    if value != _determinism():  # torch's function imports its compiler: 80 MB and two seconds in each process
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])


# How each setting is read and written.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: torch.empty(0).device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_determinism, _set_determinism),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    *(_attribute(getattr(torch.backends.cudnn, name), "fp32_precision") for name in ("conv", "rnn")),
    _attribute(torch.backends.mkldnn, "enabled"),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    (lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on)),
    (_flushes_denormals, torch.set_flush_denormal),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (np.geterr, lambda found: np.seterr(**found)),
)


@contextmanager
def isolated(seed: int, device: torch.device, *, flush: bool = False) -> Iterator[None]:
    """Python's, NumPy's and torch's generators are seeded; they and torch's settings are restored at the end.

    With `flush`, denormal numbers (below 1e-38) become zero: a processor takes many times as long for them, and the
    gradients of a client with few classes are soon so small. torch sets that for the calling thread alone.

    Of what is printed meanwhile, the beginning and the end are shown.
    """
    before = [read() for read, _ in SETTINGS]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), short_of(sys.stdout, redirect_stdout), short_of(sys.stderr, redirect_stderr):
        random.seed(seed)
        # By a list: from one number NumPy's generator would give the stream of torch's, as both are Mersenne Twisters.
        np.random.seed([1, seed % 2**32, seed >> 32])
        torch.set_flush_denormal(flush)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond: it asks every kind of device
        if devices:
            torch.cuda.manual_seed(seed)
        try:
            yield
        except SystemExit as error:
            raise RuntimeError(f"a hook has ended Python ({error!r}); it should raise an exception instead") from error
        finally:
            for (_, write), value in zip(SETTINGS, before, strict=True):
                write(value)


class Short:
    """A stream for the output of some hooks, of which only the beginning and the end are shown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._room, self._lines, self._rest, self._last = SHOWN, 0, "", ""

    def write(self, text: str) -> int:
        shown = text if sys.gettrace() else text[: self._room]  # all, while a debugger traces the hook
        self._stream.write(shown)
        self._room = max(0, self._room - len(text))
        if rest := text[len(shown) :]:
            self._lines += rest.count("\n")
            self._rest += rest[: IN_LOG - len(self._rest)]
            self._last = (self._last + rest)[-LAST:]
        return len(text)

    def end(self) -> None:
        """Show the end of the output. The log has the rest from its beginning."""
        if self._last:
            self._stream.write(f"\n... output of {self._lines:,} lines more; it ends:\n{self._last}")
            log.info("the output that is not shown:\n%s", self._rest, extra={"on_screen": True})  # in the log only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def short_of(stream: TextIO, redirect: Callable[[Any], Any]) -> Iterator[None]:
    """Within the context, only the beginning and the end of what is written to a standard stream are shown."""
    short = Short(stream)
    try:
        with redirect(short):
            yield
    finally:
        short.end()
