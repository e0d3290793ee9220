"""Workers for a run, on Ray or in this process."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from rayfed.engine import Workers
from rayfed.local import Site
from rayfed.runtime.here import Here, Progress, no_progress

log = logging.getLogger(__name__)


@contextmanager
def open_workers(
    site: Site, progress: Progress = no_progress, *, on_ray: bool, other_bits: bool = False
) -> Iterator[Workers]:
    """Workers for the site's job, for as long as the context lasts; with `other_bits` on several kinds of hardware."""
    job = site.job
    with threads(job.ray.threads):
        if not on_ray:
            with signals_as_ctrl_c():
                yield Here(site, progress, gpu=job.ray.num_gpus != 0)
            return
        from rayfed.runtime.session import open_pool  # importing Ray takes a second

        with (
            open_pool(site, progress, other_bits=other_bits) as pool,
            signals_as_ctrl_c(),
        ):  # Ray sets a handler of its own when it starts
            yield pool


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with `count` threads, afterwards with the number before: it can change the last bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on each signal that stops a run, so that finished rounds are kept; say so at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def stop(number: int, frame: object) -> None:
        with suppress(RuntimeError):  # the signal came while a line was being written
            log.info("stopping, with a checkpoint of the last finished round; Ctrl-C again to stop without")
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ours = {number for number, handler in before.items() if handler is not signal.SIG_IGN}  # as `nohup` sets
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)  # None: it was not set from Python
