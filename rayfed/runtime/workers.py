"""Workers for a run, on Ray or in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rayfed.engine import Workers
from rayfed.local import Site
from rayfed.runtime.here import Here, Progress, no_progress
from rayfed.runtime.signals import stopping

KEEPING = "stopping, with a checkpoint of the last finished round; Ctrl-C again to stop without"


@contextmanager
def open_workers(
    site: Site, progress: Progress = no_progress, *, on_ray: bool, other_bits: bool = False
) -> Iterator[Workers]:
    """Workers for the site's job, for as long as the context lasts; with `other_bits` on several kinds of hardware."""
    job = site.job
    with threads(job.ray.threads):
        if not on_ray:
            with stopping(KEEPING):
                yield Here(site, progress, gpu=job.ray.num_gpus != 0)
            return
        from rayfed.runtime.session import open_pool  # importing Ray takes a second

        # The inner one once more, as Ray sets a handler of its own when it starts.
        with stopping("stopping"), open_pool(site, progress, other_bits=other_bits) as pool, stopping(KEEPING):
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
