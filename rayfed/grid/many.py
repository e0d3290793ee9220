"""Many runs, such as those of a grid: each has the bits that it has alone."""

from collections.abc import Callable, Generator, Sequence
from functools import partial

from rayfed import experiment
from rayfed.base.errors import explained
from rayfed.data.samples import Dataset
from rayfed.data.sources import Kept
from rayfed.experiment import RunOptions
from rayfed.folder.recorder import start_over
from rayfed.folder.summary import Ended
from rayfed.job import Job
from rayfed.observers.usual import usual_observers
from rayfed.rounds.observer import Observer
from rayfed.runtime.signals import stopping

STOPPING = (
    "stopping the runs, each with a checkpoint of its last round; Ctrl-C again ends at once, "
    "without them"
)


def run_many(
    jobs: Sequence[Job],
    watch: Callable[[Sequence[Job]], None] = lambda jobs: None,
    *,
    force: bool = False,
    other_bits: bool = False,
    display: Callable[[], Observer] = Observer,
) -> Generator[Ended]:
    """Run jobs, and give each as it ends.

    On Ray as many at once as there is room for, each in a task of one process; one after the other,
    on all actors, where that is done sooner (`connected_for_many`), or without Ray. Each continues
    where it was begun, or begins again with `force`. `watch` is told, each second or when one
    begins, which are under way; each has a `display` in its own process.
    """
    if not jobs:
        return
    kept = Kept()
    if jobs[0].ray.mode == "on":
        # Importing Ray takes a second.
        from rayfed.runtime.slots import (
            connected_for_many,
            in_slots,
        )

        with connected_for_many(jobs) as at_once:
            if at_once:
                if force:
                    for job in jobs:
                        start_over(job)
                play = partial(_play_here, other_bits=other_bits, display=display)
                # Once more than in `connected_for_many`: when Ray is connected, its C++ handles
                # SIGTERM.
                with stopping(STOPPING):
                    yield from in_slots(jobs, play, kept.load, watch)
                return
    for job in jobs:
        watch([job])
        try:
            options = RunOptions(force=force, other_bits=other_bits, read=kept.load)
            experiment.run(job, [display(), *usual_observers(job)], options, resume=not force)
        except Exception as error:
            ended = Ended(job, getattr(error, "exit_code", 1), explained(error))
        else:
            ended = Ended(job)
        yield ended


def _play_here(
    job: Job, dataset: Dataset, other_bits: bool, display: Callable[[], Observer]
) -> None:
    options = RunOptions(other_bits=other_bits, on_ray=False, read=lambda data: dataset)
    experiment.run(job, [display(), *usual_observers(job)], options, resume=True)
