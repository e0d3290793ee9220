"""Workers for a run, on Ray or in this process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rayfed.engine import Workers
from rayfed.local import Site
from rayfed.runtime.here import Here, Progress, no_progress


@contextmanager
def open_workers(site: Site, progress: Progress = no_progress, *, on_ray: bool) -> Iterator[Workers]:
    """Workers for the site's job, for as long as the context lasts."""
    job = site.job
    with threads(job.ray.threads):
        if not on_ray:
            with sigterm_as_ctrl_c():
                yield Here(site, progress, gpu=job.ray.num_gpus != 0)
            return
        from rayfed.runtime.session import open_pool  # importing Ray takes a second

        with open_pool(site, progress) as pool, sigterm_as_ctrl_c():  # Ray sets a handler of its own when it starts
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
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on the signal with which schedulers stop a job, so that finished rounds are kept."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
