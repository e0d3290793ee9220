"""Say how long a message may take."""

from typing import Literal

# Seconds that a message may take while none of its kind has been answered.
FIRST = 3600.0
# Seconds that any message may take.
LEAST = 300.0
# How many times as long as the longest message so far a message may take.
SLOWER = 10.0


class Deadline:
    """Knows the longest time that a message may take, in seconds.

    `ray.deadline` gives it for each task, or piece of the test set. With "auto": ten times the
    longest message of its kind so far, in proportion to the size where it is larger than that; at
    least five minutes; and an hour while none has been answered.
    """

    def __init__(self, seconds: float | Literal["auto"]) -> None:
        self._fixed = seconds
        # By kind, the seconds and the size of the longest message so far.
        self._longest: dict[str, tuple[float, int]] = {}

    def seconds(self, kind: str, size: int, count: int) -> float:
        """Return the time for a message with so many tasks, or pieces of the test set."""
        if self._fixed != "auto":
            return self._fixed * count
        if kind not in self._longest:
            return FIRST
        longest, longest_size = self._longest[kind]
        return max(LEAST, SLOWER * longest * max(1.0, size / max(1, longest_size)))

    @property
    def of_fetching(self) -> float:
        """Return the time in which an actor must get an object of another actor's."""
        return LEAST if self._fixed == "auto" else self._fixed

    def took(self, kind: str, size: int, seconds: float) -> None:
        """Note how long a message took."""
        self._longest[kind] = max(self._longest.get(kind, (0.0, 0)), (seconds, size))
