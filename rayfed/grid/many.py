"""Many runs at once on Ray, such as those of a grid: each is a task of one process, and has the same bits as alone."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rayfed.data.samples import Dataset
from rayfed.data.sources import Kept
from rayfed.experiment import Way, run_checked
from rayfed.folder.checkpoint import start_over
from rayfed.folder.summary import Ended
from rayfed.job import Job
from rayfed.rounds.display import Display
from rayfed.runtime.signals import stopping

STOPPING = "stopping the runs, each with a checkpoint of its last round; Ctrl-C again ends at once, without them"


def run_many(
    jobs: Sequence[Job],
    watch: Callable[[Sequence[Job]], None] = lambda jobs: None,
    *,
    force: bool = False,
    other_bits: bool = False,
    display: Callable[[], Display] = Display,
) -> Iterator[Ended]:
    """Run jobs, as many at once as there is room for, and give each as it ends.

    Each continues where it was begun, or begins again with `force`. `watch` is told, each second, which are under way;
    each has a `display` in its own process. Where one job after the other is done sooner (`connected_for_many`), this
    runs none and gives none, and the caller runs them.
    """
    if not jobs or jobs[0].ray.mode == "off":
        return
    from rayfed.runtime.slots import connected_for_many, in_slots  # importing Ray takes a second

    with connected_for_many(jobs) as at_once:
        if not at_once:
            return
        if force:
            for job in jobs:
                start_over(job)
        play = partial(_play_here, other_bits=other_bits, display=display)
        # Once more than in `connected_for_many`: when Ray is connected, its C++ handles SIGTERM.
        with stopping(STOPPING):
            yield from in_slots(jobs, play, Kept().load, watch)


def _play_here(job: Job, dataset: Dataset, other_bits: bool, display: Callable[[], Display]) -> None:
    run_checked(job, Way(display(), False, other_bits, on_ray=False, read=lambda data: dataset), resume=True)
