"""A run's setup, and workers for it: on Ray, or in this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rayfed.base.errors import InputError, first_line
from rayfed.base.isolation import threads
from rayfed.job import Job
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
def opened(
    job: Job, make: Callable[[], Setup], tell: Callable[[Setup], None], *, on_ray: bool
) -> Iterator[Setup]:
    """The setup that `make` gives, of which `tell` is told; with `on_ray` Ray is started, or joined,
    for the context.

    On Ray, its data lie in Ray's store, where actors read them too.
    """
    with stopping("stopping"):
        setup = make()
        tell(setup)
    if not on_ray:
        yield setup
        return
    try:
        # Importing Ray takes a second.
        from rayfed.runtime.session import connected, refuse_unsendable, stored
    except ImportError as error:
        raise InputError(
            f"Ray cannot be imported ({first_line(error)}): install it with pip install "
            "'ray[default]', or train without Ray: -s ray.mode=off"
        ) from error

    with stopping("stopping"):
        refuse_unsendable(job.model.name, setup.model)
    with stopping("stopping"), connected(job.ray, job.name, job.train.clients_per_round):
        # Without this process's own copy of the data.
        setup = stored(setup)
        yield setup


@contextmanager
def open_executor(
    setup: Setup, progress: Progress = no_progress, *, on_ray: bool, other_bits: bool = False
) -> Iterator[Executor]:
    """Workers for the setup's job, for the context; with `other_bits` on several kinds of hardware.

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

        # The server averages in memory that it has: new memory takes tens of milliseconds.
        keep_freed_memory()
        # Once more: when Ray is connected, its C++ handles SIGTERM, until a handler is set from
        # Python again.
        with (
            stopping("stopping"),
            open_actors(setup, progress, other_bits=other_bits) as workers,
            stopping(KEEPING),
        ):
            yield workers
