"""A round's work in tasks: how a cohort is cut into them, and how the summands of its clients are added up.

The clients of a task are served by one worker, one after the other, which adds up their summands in that order. The
engine adds up the tasks' sums in the order of the tasks. So neither the driver nor Ray's stores hold all updates of a
cohort.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayfed.base.errors import RunFailed, Unlike
from rayfed.base.spans import timed
from rayfed.clients.settings import Training
from rayfed.tensors.trees import (
    Layout,
    Packed,
    Path,
    Span,
    Tree,
    bytes_of,
    checked,
    difference,
    leaves,
    tree_of,
    weight_of,
    within,
)

T = TypeVar("T")
Task = tuple[int, ...]  # clients

MOST_TASKS = 2000  # per round, roughly: the sums of more would fill the driver's link (docs/scale.md)
TAPER = 8  # a task has at most an eighth of the work that is left: at the end, few workers wait for the last


@dataclass(frozen=True, eq=False)
class Summed:
    """The checked summands of a task, by slot: added up, or of a single client as they are."""

    tree: dict[str, Tree]
    layout: Layout  # of each client's summands


def cut(num_examples: Mapping[int, int], training: Training) -> list[Task]:
    """Cut a cohort, with each client's images, into tasks, the longest work first.

    A task has up to `train.task_images` images of training, or more where a cohort would else have more than 2,000
    tasks; a client with more than that is alone. Towards the end tasks become shorter, down to one client, so that
    workers finish at about the same time. All this is a function of the job: no bit depends on the workers.

    >>> cut({0: 300, 1: 40, 2: 40, 3: 900, 4: 40}, Training(task_images=400))
    [(3,), (0,), (1,), (2,), (4,)]
    >>> [len(task) for task in cut(dict.fromkeys(range(60), 60), Training(task_images=300))]
    [5, 5, 5, 5, 5, 4, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    steps, epochs = training.local_steps, training.local_epochs
    images = {c: steps * training.batch_size if steps else n * epochs for c, n in num_examples.items()}
    waiting = deque(sorted(num_examples, key=lambda client: (-num_examples[client], client)))
    left = sum(images.values())
    most, tasks = max(training.task_images, left / MOST_TASKS), []
    while waiting:
        task: list[int] = []
        room = min(most, left / TAPER)
        while waiting and (not task or images[waiting[0]] <= room):
            task.append(client := waiting.popleft())
            left, room = left - images[client], room - images[client]
        tasks.append(tuple(task))
    return tasks


class OrderedSum:
    """Adds trees in the given order, in float64; integers stay exact integers.

    The order is the caller's, so the bits of the sum do not depend on which client was ready first. The product of a
    float32 weight and a number of samples is exact in float64.

    >>> from rayfed.tensors.trees import Scaled
    >>> total = OrderedSum()
    >>> total.add({"n": 2, "w": Scaled(2, torch.tensor([1.0]))})
    >>> total.add({"n": 1, "w": Scaled(1, torch.tensor([4.0]))})
    >>> total.value
    {'n': 3, 'w': tensor([6.], dtype=torch.float64)}
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None  # of each summand
        self._totals: dict[Path, Any] = {}
        self._spans: dict[Path, Span] = {}  # where the tensors among them lie in the buffers
        self._buffers: dict[str, Tensor] = {}

    @property
    def value(self) -> Tree:
        """The sum, without any `Scaled`; None before the first summand."""
        return tree_of(self._totals.items()) if self._totals else None

    def packed(self) -> Packed:
        """The sum as `pack` would give it, without a copy."""
        skeleton = [(path, self._spans.get(path, total)) for path, total in self._totals.items()]
        return Packed(skeleton, {dtype: bytes_of(buffer) for dtype, buffer in self._buffers.items()})

    @timed("fold")
    def add(self, summand: Tree, layout: Layout | None = None) -> None:
        """Raises ValueError as `checked` does, and `Unlike` for another layout than before.

        A summand that was checked elsewhere comes with its layout, and so does a sum, with that of its summands.
        """
        layout = checked(summand) if layout is None else layout
        if self.layout is not None and (unlike := difference(layout, self.layout)) is not None:
            raise Unlike(unlike)
        found = [(_place(path), leaf, weight_of(path)) for path, leaf in leaves(summand)]
        if first := self.layout is None:
            self._begin(found)
        self.layout = layout
        for place, leaf, weight in found:
            total, factor = self._totals.get(place), 1 if weight is None else weight
            if isinstance(total, Tensor):
                _add(total, leaf, factor, first)
            elif isinstance(leaf, int | float):
                self._totals[place] = leaf * factor if total is None else total + leaf * factor
            else:
                self._totals[place] = leaf

    def _begin(self, found: Sequence[tuple[Path, Any, float | None]]) -> None:
        """Lay out the tensors, which the first summand fills."""
        ends: dict[str, int] = {}
        for place, leaf, weight in found:
            self._totals[place] = None  # for the order
            if isinstance(leaf, Tensor):
                dtype = "int64" if weight is None and not leaf.is_floating_point() else "float64"
                self._spans[place] = Span(dtype, ends.get(dtype, 0), tuple(leaf.shape))
                ends[dtype] = self._spans[place].start + leaf.numel()
                device = leaf.device
        for dtype, end in ends.items():
            self._buffers[dtype] = torch.empty(end, dtype=getattr(torch, dtype), device=device)
        for place, span in self._spans.items():
            self._totals[place] = within(self._buffers[span.dtype], span)


def _place(path: Path) -> Path:
    return tuple(step for step in path if step[0] != "scaled")


def _add(total: Tensor, leaf: Tensor, factor: float, first: bool) -> None:
    """`total += factor * leaf`, the `first` time `=`."""
    leaf = leaf.detach()
    if leaf.dtype not in (torch.float32, torch.float64) or leaf.device != total.device:
        leaf = leaf.to(total)  # torch itself converts float32 while it adds, without a copy in float64
    if first:
        total.copy_(leaf).mul_(factor)
    else:
        total.add_(leaf, alpha=factor)


def add_up(
    stage: str, tasks: Sequence[Task], replies: Iterable[tuple[Summed, list[T]]]
) -> tuple[dict[str, Tree], list[T]]:
    """The tasks' summands, added up by slot, and the rest of each client's reply."""
    total = OrderedSum()
    rests: list[T] = []
    for task, (summed, found) in zip(tasks, replies, strict=True):
        with refusing(stage, task[0], tasks[0][0]):
            total.add(summed.tree, summed.layout)  # and drop them: the next are fetched only now
        rests += found
    return total.value or {}, rests


@contextmanager
def refusing(stage: str, client: int, first: int) -> Iterator[None]:
    """Raise `RunFailed` with the client where its summand cannot be added to those from `first` on."""
    try:
        yield
    except Unlike as error:
        raise RunFailed(
            f"client {first} or {client}, {stage}: one of their summands is odd; that of client {client} is not like "
            f"that of client {first}: {error}; nothing was averaged"
        ) from None
    except ValueError as error:
        raise RunFailed(f"client {client}, {stage}: its summand {error}; nothing was averaged") from None
