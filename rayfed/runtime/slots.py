"""Play many runs at once, each in a Ray task with the resources of one actor.

A run has the same bits in any process. It writes its own folder, from where its task is, so nodes
must share the folder of the results. The driver makes each run's folder, and a task that does not
find it ends them all. A task that is lost goes on elsewhere from the run's checkpoint.
"""

import logging
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress

import ray
import torch
from ray import ObjectRef
from ray.exceptions import RayError, TaskCancelledError

from rayfed.base.errors import STOPPED, InputError, Locked, WorkersLost, explained, first_line
from rayfed.data.federation import Read
from rayfed.data.samples import Dataset
from rayfed.folder.lock import is_locked
from rayfed.folder.places import folder_of
from rayfed.folder.summary import Ended
from rayfed.job import Job, RayOptions
from rayfed.runtime.causes import ray_may_fail, refuse_input
from rayfed.runtime.gpus import device_given, memory_cap, without_absent_gpus
from rayfed.runtime.head import Head
from rayfed.runtime.heartbeat import Heartbeat
from rayfed.runtime.hints import ray_status
from rayfed.runtime.placement import Resources, capacity, spread
from rayfed.runtime.session import connected, machine

log = logging.getLogger(__name__)

# Seconds from one look at the running runs to the next.
TICK = 1.0
# Seconds in which a run that is stopped must have written its checkpoint.
LAST_WORDS = 60.0

# Runs a job in this process on its data, from its checkpoint on if it has one.
Play = Callable[[Job, Dataset], None]


@contextmanager
def connected_for_many(jobs: Sequence[Job]) -> Iterator[bool]:
    """Connect to a Ray for many runs at once, for the context; yield whether that pays.

    Yield False where one run after the other, on all actors, is faster: where there are fewer runs
    than a single run could have actors.
    """
    options = jobs[0].ray
    alike = all(job.ray == options for job in jobs)
    if not alike or not (options.cluster or _pays(jobs, [machine()])):
        yield False
        return
    with connected(options, jobs[0].name, len(jobs)):
        if options.cluster:
            yield _pays(jobs, list(Head(options.labels).known().values()))
        else:
            yield True


def _pays(jobs: Sequence[Job], nodes: Sequence[Resources]) -> bool:
    """Say whether runs at once are faster on these nodes than one after the other."""
    slots = _room(_on(nodes, jobs[0], len(jobs)), nodes)
    smallest_cohort = min(job.train.clients_per_round for job in jobs)
    return slots > 1 and len(jobs) >= min(slots, smallest_cohort)


def _on(nodes: Sequence[Resources], job: Job, runs: int) -> RayOptions:
    """Return what each of so many runs is given on these nodes.

    With `ray.num_gpus = "auto"` that is a whole GPU.
    """
    return spread(without_absent_gpus(job.ray, nodes), nodes, runs)


def _room(options: RayOptions, nodes: Sequence[Resources]) -> int:
    """Return how many runs may be under way at once; 0 where not a single run fits."""
    fit = capacity(options, nodes)
    if fit == 0 or options.actors == "auto":
        return fit
    return options.actors


def in_slots(
    jobs: Sequence[Job], play: Play, read: Read, watch: Callable[[Sequence[Job]], None]
) -> Iterator[Ended]:
    """Run jobs on the Ray that is connected, in their order; yield each as it ends.

    As many run at once as there is room for. `read` gives a job's data, the same object for all
    jobs that read the same; `watch` is told, each second, which runs are under way. Where the
    iteration is left early, they stop with a checkpoint. Raise `InputError` where a node does not
    see the folder of the results.
    """
    if jobs[0].ray.memory == "auto":
        log.warning(
            "ray.memory = 'auto': runs at once are not measured, and no memory is set aside for "
            "them; give a number of gigabytes, such as ray.memory = 4"
        )
    with ray_may_fail(), closing(Slots(play, read, len(jobs), jobs[0].ray.labels)) as slots:
        waiting, heartbeat = deque(jobs), Heartbeat(starting=True)
        while waiting or slots.running:
            while waiting and slots.has_room(waiting[0]):
                slots.begin(waiting.popleft())
            under_way = [job for job in slots.running.values() if is_locked(folder_of(job))]
            watch(under_way)
            if under_way:
                heartbeat.progress()
            heartbeat.beat(lambda: _awaited(jobs[0].ray))
            for ended in slots.ended():
                heartbeat.progress()
                yield ended


def _awaited(options: RayOptions) -> str:
    """Say what runs wait for that have not begun."""
    command = ray_status(options)
    if not command:
        return "a run to begin"
    return f"a run to begin, and for room for it on the cluster ({command})"


class Slots:
    """Runs under way on a cluster."""

    def __init__(self, play: Play, read: Read, runs: int, labels: Mapping[str, str]) -> None:
        self.running: dict[ObjectRef, Job] = {}
        self._play, self._read, self._runs = play, read, runs
        self._head = Head(labels)
        # How often each run's task was lost.
        self._lost: Counter[str] = Counter()
        self._stored: list[tuple[Dataset, ObjectRef]] = []

    def has_room(self, job: Job) -> bool:
        """Say whether another run is to be begun; a cluster may grow or shrink."""
        nodes = list(self._head.known().values())
        return len(self.running) < max(1, _room(_on(nodes, job, self._runs), nodes))

    def begin(self, job: Job) -> None:
        """Make a run's folder, and send the run to a node."""
        try:
            folder_of(job).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"results cannot be written: {error}") from None
        options = _on(list(self._head.known().values()), job, self._runs)
        play = _play_on_gpu if options.gpu_share else _play_in_slot
        reference = play.options(
            name=job.name,
            num_cpus=options.num_cpus,
            num_gpus=options.gpu_share,
            memory=options.memory_bytes or None,
            max_retries=0,
            label_selector=options.labels,
        ).remote(self._play, job, os.getcwd(), self._data(job))
        self.running[reference] = job

    def ended(self) -> Iterator[Ended]:
        """Yield the runs that have ended since the last time, after a second at most.

        Lost runs are begun again.
        """
        references = list(self.running)
        ray.wait(references, timeout=TICK)
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        for reference in done:
            job = self.running.pop(reference)
            try:
                exit_code, message = ray.get(reference)
            except RayError as error:
                refuse_input(error)
                exit_code, message = STOPPED, first_line(error)
            if exit_code != STOPPED:
                yield Ended(job, exit_code, message)
                continue
            self._lost[job.name] += 1
            times, limit = self._lost[job.name], job.ray.max_retries
            if times > limit:
                problem = (
                    f"error: the process of the run was lost or locked out {times} times, the last "
                    f"time: {message}"
                )
                yield Ended(job, WorkersLost.exit_code, problem)
                continue
            log.warning(
                "the process of %s is lost or locked out (%s); it continues from its last "
                "checkpoint, attempt %d of %d",
                job.name,
                message,
                times + 1,
                limit + 1,
            )
            self.begin(job)

    def _data(self, job: Job) -> ObjectRef:
        """Return the job's data in Ray's store, where the runs of a node read them in place."""
        dataset = self._read(job.data)
        for stored, reference in self._stored:
            if stored is dataset:
                return reference
        reference = ray.put(dataset)
        self._stored.append((dataset, reference))
        return reference

    def close(self) -> None:
        """Stop the runs that are under way, each with a checkpoint."""
        for reference in self.running:
            ray.cancel(reference)
        if self.running:
            ray.wait(list(self.running), num_returns=len(self.running), timeout=LAST_WORDS)


def _in_slot(play: Play, job: Job, folder: str, dataset: Dataset) -> tuple[int, str]:
    """Play a run; return the exit code and the message that its command would have ended with.

    Raise `InputError` where this node does not see the run's folder: its results would be lost
    here.
    """
    with suppress(OSError):
        # Paths in the job may be relative to the folder of the command.
        os.chdir(folder)
    if not folder_of(job).is_dir():
        raise InputError(
            f"node {ray.util.get_node_ip_address()} does not see '{job.output.path}' "
            "(output.path), where each run of a grid writes its results: name a folder that all "
            "nodes share, or use a Ray of this machine only (no ray.address)"
        )
    # Where the signal is ignored, `ray.cancel` does nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray's handler raises SystemExit. In a hook, that would look like an error of the user's.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        if device_given().type == "cuda":
            torch.cuda.set_per_process_memory_fraction(memory_cap(job.ray.gpu_share))
        elif not ray.get_gpu_ids():
            # Ray hides no GPU from a process to which it gives none.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        play(job, dataset)
    except (KeyboardInterrupt, TaskCancelledError):
        return STOPPED, "a signal has stopped it"
    except Locked as error:
        # A machine that was lost may still have the lock.
        return STOPPED, str(error)
    except Exception as error:
        return getattr(error, "exit_code", 1), explained(error)
    return 0, ""


_play_in_slot = ray.remote(_in_slot)
# Its process ends after one run, as a process whose CUDA was used stays on that GPU.
_play_on_gpu = ray.remote(max_calls=1)(_in_slot)
