"""Run many jobs, such as the runs of a grid. Each has the same results as if it ran alone."""

from collections.abc import Callable, Generator, Sequence

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
    """Run jobs, and yield how each ended as it ends.

    On Ray, as many jobs run at once as there is room for. Each runs in a task of one process. They
    run one after the other on all actors if that is done sooner (`connected_for_many`), and also
    without Ray. A job that was begun is continued, or begins again with `force`. Every second, or
    when a job begins, `watch` is called with the jobs that are running. Each job has a `display` in
    its own process.
    """
    if not jobs:
        return
    data = Kept()
    if jobs[0].ray.mode == "on":
        # Imported here, because importing Ray takes a second.
        from rayfed.runtime.slots import connected_for_many, in_slots

        def play(job: Job, dataset: Dataset) -> None:
            """Run a job in the process of a task."""
            options = RunOptions(other_bits=other_bits, on_ray=False, read=lambda _: dataset)
            experiment.run(job, [display(), *usual_observers(job)], options, resume=True)

        with connected_for_many(jobs) as at_once:
            if at_once:
                if force:
                    for job in jobs:
                        start_over(job)
                # Set again after `connected_for_many`: when Ray connects, its C++ code takes over
                # SIGTERM.
                with stopping(STOPPING):
                    yield from in_slots(jobs, play, data.load, watch)
                return
    for job in jobs:
        watch([job])
        try:
            options = RunOptions(force=force, other_bits=other_bits, read=data.load)
            experiment.run(job, [display(), *usual_observers(job)], options, resume=not force)
        except Exception as error:
            ended = Ended(job, getattr(error, "exit_code", 1), explained(error))
        else:
            ended = Ended(job)
        yield ended
