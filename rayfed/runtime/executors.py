"""Executors for a run's setup: on Ray, or in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rayfed.base.errors import InputError, first_line
from rayfed.base.isolation import threads
from rayfed.rounds.executor import Executor, Progress, no_progress
from rayfed.rounds.setup import Setup
from rayfed.runtime.hardware import keep_freed_memory
from rayfed.runtime.placement import warn_of_idle_gpus
from rayfed.runtime.signals import stopping
from rayfed.runtime.this_process import ThisProcess

KEEPING = (
    "stopping, with a checkpoint of the last finished round; Ctrl-C again ends at once, without it"
)


@contextmanager
def on_ray_or_here(setup: Setup, *, on_ray: bool) -> Iterator[Setup]:
    """Start or join Ray for the context, if it is asked for, and yield the setup to work with.

    On Ray the setup's data lie in Ray's store, where actors read them too. So drop `setup` for the
    one that is yielded: then this process keeps no second copy.
    """
    if not on_ray:
        yield setup
        return
    try:
        # Ray is imported only here, as that takes a second.
        from rayfed.runtime.session import connected, refuse_unsendable, stored
    except ImportError as error:
        raise InputError(
            f"Ray cannot be imported ({first_line(error)}): install it with pip install "
            "'ray[default]', or train without Ray: -s ray.mode=off"
        ) from error

    job = setup.job
    with stopping("stopping"):
        refuse_unsendable(job.model.name, setup.model)
    with stopping("stopping"), connected(job.ray, job.name, job.train.clients_per_round):
        setup = stored(setup)
        yield setup


@contextmanager
def open_executor(
    setup: Setup, progress: Progress = no_progress, *, on_ray: bool, other_bits: bool = False
) -> Iterator[Executor]:
    """Yield an executor for the setup's job; with `other_bits` on several kinds of hardware.

    With `on_ray` Ray is connected already.
    """
    job = setup.job
    with threads(job.ray.threads):
        if not on_ray:
            warn_of_idle_gpus(job.ray, [{"GPU": torch.cuda.device_count()}])
            with stopping(KEEPING):
                yield ThisProcess(setup, progress, gpu=job.ray.num_gpus != 0)
            return
        from rayfed.runtime.session import open_actors

        # So the server averages in memory that it has: new memory takes tens of milliseconds.
        keep_freed_memory()
        # The handlers are set once more: when Ray is connected, its C++ handles SIGTERM, until a
        # handler is set from Python again.
        with (
            stopping("stopping"),
            open_actors(setup, progress, other_bits=other_bits) as pool,
            stopping(KEEPING),
        ):
            yield pool
