"""A round's work in tasks: how a cohort is cut into them, and how the summands of its clients are
added up.

The clients of a task are served by one worker, one after the other, which adds up their summands in
that order. The engine adds up the tasks' sums in the order of the tasks. So neither the driver nor
Ray's stores hold all updates of a cohort. Where a round's sums are large, workers add them in
groups, and the engine adds the groups' sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rayfed.base.errors import BrokenContract, NotSummable, RunFailed, Unlike
from rayfed.clients.settings import Training
from rayfed.rounds.client_work import Reply
from rayfed.rounds.round import Memory
from rayfed.tensors.sums import OrderedSum
from rayfed.tensors.trees import Layout
from rayfed.tensors.wire import Packed, pack, unpack

# Clients
Task = tuple[int, ...]
# Whose sums are added before they come to the engine.
TaskGroup = Sequence[Task]

MOST_TASKS = (
    # Per round, roughly: the sums of more would fill the driver's link (docs/scale.md).
    2000
)
# A task has at most an eighth of the work that is left: at the end, few workers wait for the last.
TAPER = 8
# Of a round's sums that the driver gets one by one: a link of 10 Gbit/s takes three seconds.
MOST_BYTES = 2**32
# Tasks, at most, in a group.
GROUP = 16


@dataclass(frozen=True, eq=False)
class Assignment:
    """A task to train: its clients, and a handle to the memory of each client that has one."""

    clients: Task
    memories: Mapping[int, Memory]

    @classmethod
    def of(cls, task: Task, memories: Mapping[int, Memory]) -> Assignment:
        """Return the task with the memories of its clients out of all memories."""
        own = {client: memories[client] for client in task if client in memories}
        return cls(task, own)


@dataclass(frozen=True, eq=False)
class TaskReply:
    """What comes back from a task, or from several: their clients' summands, added up, and the rest
    of each reply.
    """

    # Of the clients, for messages; None where there are none.
    first: int | None
    # Of each client's summands.
    layout: Layout
    # That the clients sent, all together.
    bytes_up: int
    # Slot -> their sum; of a single client, as they are.
    summands: Packed
    # In their order; none after a survey.
    clients: Sequence[Reply] = ()


def cut(num_examples: Mapping[int, int], training: Training) -> list[Task]:
    """Cut a cohort, with each client's images, into tasks, the longest work first.

    A task has up to `train.task_images` images of training, or more where a cohort would else have
    more than 2,000 tasks; a client with more than that is alone. Towards the end tasks become
    shorter, down to one client, so that workers finish at about the same time. All this is a
    function of the job: no bit depends on the workers.

    >>> cut({0: 300, 1: 40, 2: 40, 3: 900, 4: 40}, Training(task_images=400))
    [(3,), (0,), (1,), (2,), (4,)]
    >>> [len(task) for task in cut(dict.fromkeys(range(60), 60), Training(task_images=300))]
    [5, 5, 5, 5, 5, 4, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    steps, epochs = training.local_steps, training.local_epochs
    images = {
        c: steps * training.batch_size if steps else n * epochs for c, n in num_examples.items()
    }
    waiting = deque(sorted(num_examples, key=lambda client: (-num_examples[client], client)))
    left = sum(images.values())
    most = max(training.task_images, left / MOST_TASKS)
    tasks: list[Task] = []
    while waiting:
        task: list[int] = []
        room = min(most, left / TAPER)
        while waiting and (not task or images[waiting[0]] <= room):
            client = waiting.popleft()
            task.append(client)
            left -= images[client]
            room -= images[client]
        tasks.append(tuple(task))
    return tasks


def task_text(task: Task, round: int, *, survey: bool) -> str:
    """A task in words."""
    clients = (
        f"client {task[0]}"
        if len(task) == 1
        else f"{len(task)} clients ({', '.join(map(str, task))})"
    )
    return f"{clients}, round {round} (survey)" if survey else f"{clients}, round {round}"


def grouped(tasks: Sequence[Task], num_bytes: int) -> list[TaskGroup]:
    """The tasks of a round in groups, each alone unless all sums together exceed 4 GiB: then up to
    16 in a row.

    A sum has twice the model's `num_bytes`, as it is in float64. A function of the job, as a task
    is.

    >>> grouped([(3,), (0, 2), (1,)], 4 * 10**6)
    [[(3,)], [(0, 2)], [(1,)]]
    >>> grouped([(3,), (0, 2), (1,)], 4 * 10**9)
    [[(3,), (0, 2), (1,)]]
    """
    most = GROUP if 2 * num_bytes * len(tasks) > MOST_BYTES else 1
    count = -(-len(tasks) // most)
    return [
        list(tasks[len(tasks) * i // count : len(tasks) * (i + 1) // count]) for i in range(count)
    ]


def add_up(where: str, replies: Iterable[TaskReply]) -> TaskReply:
    """The replies of several tasks, or groups, as that of one; each is named by its first client
    where it is odd.
    """
    first: int | None = None
    total, clients, bytes_up = OrderedSum(), list[Reply](), 0
    for reply in replies:
        first = reply.first if first is None else first
        with refusing(where, reply.first, first):
            # The next are fetched only now.
            total.add(unpack(reply.summands, copy=False), reply.layout)
        clients += reply.clients
        bytes_up += reply.bytes_up
    summands = pack({}) if total.layout is None else total.packed()
    return TaskReply(first, total.layout or {}, bytes_up, summands, clients)


@contextmanager
def refusing(where: str, client: int | None, first: int | None) -> Iterator[None]:
    """Raise `RunFailed` with the client where its summand cannot be added to those from `first` on."""
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
