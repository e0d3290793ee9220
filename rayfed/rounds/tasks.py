"""A round's work in tasks: how a cohort is cut into them, and how their sums are added up.

The clients of a task are served by one worker, one after the other, which adds up their summands in
that order (`TaskSum`). The engine adds up the tasks' sums in the order of the tasks (`add_up`). The
first part divides the sum by the weights (`Average.update` in `methods/server.py`). So neither the
driver nor Ray's stores hold all updates of a cohort. Where a round's sums are large, workers add
them in groups, and the engine adds the groups' sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from rayfed.base.errors import BrokenContract, NotSummable, RunFailed, Unlike
from rayfed.clients.settings import Training
from rayfed.rounds.messages import ClientReply, Task, TaskGroup, TaskReply
from rayfed.tensors.sums import OrderedSum, checked
from rayfed.tensors.trees import Layout, Tree
from rayfed.tensors.wire import pack, unpack

# Tasks per round, roughly: the sums of more would fill the driver's link (docs/scale.md).
MOST_TASKS = 2000
# A task has at most an eighth of the work that is left: at the end, few workers wait for the last.
TAPER = 8
# The most bytes of a round's sums that the driver gets one by one. A link of 10 Gbit/s takes three
# seconds for them.
MOST_BYTES_UNGROUPED = 2**32
# The most tasks in a group.
LARGEST_GROUP = 16


def cut_into_tasks(num_examples: Mapping[int, int], training: Training) -> list[Task]:
    """Cut a cohort, with each client's images, into tasks, the longest work first.

    A task has up to `train.task_images` images of training, or more where a cohort would else have
    more than 2,000 tasks; a client with more than that is alone. Towards the end tasks become
    shorter, down to one client, so that workers finish at about the same time. All this is a
    function of the job: no bit depends on the workers.

    >>> cut_into_tasks({0: 300, 1: 40, 2: 40, 3: 900, 4: 40}, Training(task_images=400))
    [(3,), (0,), (1,), (2,), (4,)]
    >>> tasks = cut_into_tasks(dict.fromkeys(range(60), 60), Training(task_images=300))
    >>> [len(task) for task in tasks]
    [5, 5, 5, 5, 5, 4, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    images = estimated_work(num_examples, training)
    waiting = deque(sorted(num_examples, key=lambda client: (-num_examples[client], client)))
    images_left = sum(images.values())
    largest = max(training.task_images, images_left / MOST_TASKS)
    tasks: list[Task] = []
    while waiting:
        task: list[int] = []
        room = min(largest, images_left / TAPER)
        while waiting and (not task or images[waiting[0]] <= room):
            client = waiting.popleft()
            task.append(client)
            images_left -= images[client]
            room -= images[client]
        tasks.append(tuple(task))
    return tasks


def estimated_work(num_examples: Mapping[int, int], training: Training) -> dict[int, float]:
    """Return about how many images each client takes through its steps in a round.

    Last batches may be smaller: `clients.clock.images_trained` counts exactly.
    """
    if training.local_steps:
        return dict.fromkeys(num_examples, training.local_steps * training.batch_size)
    return {client: count * training.local_epochs for client, count in num_examples.items()}


def grouped(tasks: Sequence[Task], num_bytes: int) -> list[TaskGroup]:
    """Return the tasks of a round in groups, whose sums come to the engine.

    Each task is a group, unless all sums together exceed 4 GiB: then up to 16 in a row are one. A
    sum has twice the model's `num_bytes`, as it is in float64. This is a function of the job, as a
    task is.

    >>> grouped([(3,), (0, 2), (1,)], 4 * 10**6)
    [[(3,)], [(0, 2)], [(1,)]]
    >>> grouped([(3,), (0, 2), (1,)], 4 * 10**9)
    [[(3,), (0, 2), (1,)]]
    """
    size = LARGEST_GROUP if 2 * num_bytes * len(tasks) > MOST_BYTES_UNGROUPED else 1
    count = -(-len(tasks) // size)
    groups: list[TaskGroup] = []
    for number in range(count):
        start = len(tasks) * number // count
        stop = len(tasks) * (number + 1) // count
        groups.append(list(tasks[start:stop]))
    return groups


class TaskSum:
    """The summands of a task's clients, checked, and added up in the order of the task."""

    def __init__(self, where: str, task: Task) -> None:
        self._where, self._task = where, task
        self._total = OrderedSum()
        self._layout: Layout = {}
        # The summands of a single client stay as they are: a sum in float64 has twice the bytes.
        self._only: Tree = None
        self._bytes_up = 0

    def add(self, client: int, summands: Tree, bytes_up: int) -> None:
        """Add the summands of the next client. Raises `RunFailed` where that is not possible."""
        with refusing(self._where, client, self._task[0]):
            self._layout = checked(summands)
            if len(self._task) > 1:
                self._total.add(summands, self._layout)
            else:
                self._only = pack(summands)
        self._bytes_up += bytes_up

    def reply(self, clients: Sequence[ClientReply] = ()) -> TaskReply:
        """Return the task's reply: the sum, and the rest of the clients' replies."""
        summands = self._total.packed() if len(self._task) > 1 else self._only
        return TaskReply(self._task[0], self._layout, self._bytes_up, summands, clients)


def add_up(where: str, replies: Iterable[TaskReply]) -> TaskReply:
    """Add up the replies of several tasks, or groups, in their order; the sum is a reply too.

    Where a summand cannot be added, the error names its client, and `where`: the round.
    """
    first: int | None = None
    total = OrderedSum()
    clients: list[ClientReply] = []
    bytes_up = 0
    # The next reply is fetched only when this one is added.
    for reply in replies:
        if first is None:
            first = reply.first
        with refusing(where, reply.first, first):
            total.add(unpack(reply.summands, copy=False), reply.layout)
        clients += reply.clients
        bytes_up += reply.bytes_up
    summands = pack({}) if total.layout is None else total.packed()
    return TaskReply(first, total.layout or {}, bytes_up, summands, clients)


@contextmanager
def refusing(where: str, client: int | None, first: int | None) -> Iterator[None]:
    """Raise `RunFailed` where the summand of a client cannot be added to those from `first` on."""
    try:
        yield
    except Unlike as error:
        raise BrokenContract(
            f"client {first} or {client}, {where}: one of their summands is odd; that of client "
            f"{client} is not like that of client {first}: {error}; nothing was averaged"
        ) from None
    except ValueError as error:
        # A value of a wrong kind is a mistake in the code; a NaN may come from the learning rate.
        kind = BrokenContract if isinstance(error, NotSummable) else RunFailed
        raise kind(f"client {client}, {where}: its summand {error}; nothing was averaged") from None


def name_client(error: Exception, client: int) -> Exception:
    """Return the error, which says from now on at which client it was raised."""
    with suppress(AttributeError):
        error.at_client = client  # type: ignore[attr-defined]
    return error


def at_client(error: BaseException | None, task: Sequence[int]) -> int | None:
    """Return the client of a task at which an exception was raised; None where nobody knows."""
    return getattr(error, "at_client", task[0] if len(task) == 1 else None)
