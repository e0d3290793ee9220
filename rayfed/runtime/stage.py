"""A stage of a round (evaluation, survey or training) as calls: those that wait, and the replies of the others."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayfed.base.errors import RunFailed
from rayfed.runtime.calls import Call, Submit, Values
from rayfed.runtime.crew import Member


@dataclass(eq=False)
class Stage:
    """The calls of a stage, in the order in which they are handed out."""

    calls: Sequence[Call]
    submit: Submit
    most: int  # calls in a message
    progress: Callable[[int, int], None]  # called when a message is answered: how many clients are done, of how many

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.calls)))
        self.finished: dict[int, tuple[Member, Values]] = {}  # who replied and what; not yet given out
        self.losses: Counter[int] = Counter()
        self.alone: set[int] = set()  # calls that get a message of their own
        self.faulty: dict[int, str] = {}  # call -> the node whose GPU failed it; the call is tried on another, once
        self.error: RunFailed | None = None  # for whoever waits for the answers
        self.over = False
        self._left = sum(call.size for call in self.calls)  # of those that wait
        self._largest = max((call.size for call in self.calls), default=0)
        self._done, self._watched = 0, False

    def next_message(self, actors: int) -> range:
        """The next call, and those after it while together they are no more work than two bounds.

        These are the largest call, and half of an actor's even share of what waits. So the last messages are short, and
        all actors are done at about the same time (Flynn Hummel et al., 1992, "Factoring").
        """
        first = self.waiting.popleft()
        end, size = first + 1, self.calls[first].size
        room = min(self._largest, self._left / (2 * actors))
        while self.waiting and self.waiting[0] == end < first + self.most and not self.alone & {first, end}:
            size += self.calls[end].size
            if size > room:
                break
            end += 1
            self.waiting.popleft()
        self._left -= self._size(range(first, end))
        return range(first, end)

    def wait_again(self, indices: range) -> None:
        """Put calls back, before all others."""
        if not self.over:
            self.waiting.extendleft(reversed(indices))
            self._left += self._size(indices)

    def lost(self, indices: range) -> int:
        """Calls were lost that went together: how often that of the first counts now.

        A loss of several calls counts for none of them: from now on each is alone, so it is known which loses actors.
        """
        self.alone.update(indices)
        self.losses.update(indices if len(indices) == 1 else ())
        return self.losses[indices[0]]

    def watch(self) -> None:
        """Somebody waits for the answers from now on, and is told of the progress."""
        self._watched = True
        self.clients_done(0)

    def clients_done(self, count: int) -> None:
        """So many more clients are done."""
        self._done += count
        if self._watched and self._done:
            self.progress(self._done, sum(len(call.task) for call in self.calls))

    def end(self, error: RunFailed | None = None) -> None:
        """No call is to be run any more; the `error` is why."""
        self.over, self.error = True, self.error or error
        self.waiting.clear()

    def _size(self, indices: range) -> int:
        return sum(self.calls[index].size for index in indices)
