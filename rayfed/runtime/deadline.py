"""How long a message may take."""

from typing import Literal

# Seconds, seconds, times the longest message so far.
FIRST, LEAST, SLOWER = 3600.0, 300.0, 10.0


class Deadline:
    """The longest time that a message may take, in seconds: `ray.deadline` for each task, or piece
    of the test set.

    With "auto": ten times the longest message of its kind so far, in proportion to the size where
    it is larger than that; at least five minutes; and an hour while none has been answered.
    """

    def __init__(self, seconds: float | Literal["auto"]) -> None:
        self._fixed = seconds
        # Kind -> seconds, size.
        self._longest: dict[str, tuple[float, int]] = {}

    def seconds(self, kind: str, size: int, count: int) -> float:
        """The time for a message with so many tasks, or pieces of the test set."""
        if self._fixed != "auto":
            return self._fixed * count
        if kind not in self._longest:
            return FIRST
        longest, its_size = self._longest[kind]
        return max(LEAST, SLOWER * longest * max(1.0, size / max(1, its_size)))

    @property
    def of_fetching(self) -> float:
        """The time in which an actor must get an object of another's."""
        return LEAST if self._fixed == "auto" else self._fixed

    def took(self, kind: str, size: int, seconds: float) -> None:
        """Note how long a message took."""
        self._longest[kind] = max(self._longest.get(kind, (0.0, 0)), (seconds, size))
