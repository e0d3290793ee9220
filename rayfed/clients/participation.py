"""The [clients] table: which clients take part, which of them answer, and how long that takes.

Everything is off by default: every client is always there, is chosen with the same probability, and
answers. Each draw is a function of the job's seed, the round and the client, so no bit depends on
the machine. If a trace has a column for something, it is not drawn.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated

from rayfed.base.errors import InputError
from rayfed.base.values import Checked, Ge, Gt, Le, Lt, PathMark
from rayfed.clients.sampling import SAMPLING, SAMPLING_TEXT, Rule, Uniform

# These are keys of the table, and columns of a trace.
SPEEDS = ("seconds_per_example", "bytes_per_second")
# This column of a trace stands in place of the key `dropout`.
DROPS = "drops"


@dataclass(frozen=True)
class Participation(Checked):
    """Availability, sampling, drop-out, and a virtual clock with a deadline.

    Over-selection is that of Bonawitz et al., "Towards Federated Learning at Scale: System Design"
    (MLSys 2019), sections 2.2 and 9: choose more clients than are needed, average the first that
    answer in time, ignore the others. There a round with too few answers is abandoned; here the
    answers that came are averaged.
    """

    available: Annotated[
        float, Gt(0), Le(1), "chance that a client is there in a round; 1: always"
    ] = 1.0
    trace: Annotated[
        str, PathMark(), "Parquet file of the clients there in each round, in place of `available`"
    ] = ""
    dropout: Annotated[float, Ge(0), Lt(1), "chance that a chosen client does not answer"] = 0.0
    seconds_per_example: Annotated[
        float | None, Gt(0), "virtual seconds to train on an image; the median"
    ] = None
    bytes_per_second: Annotated[
        float | None, Gt(0), "virtual speed of a client's network; the median"
    ] = None
    spread: Annotated[
        float, Ge(0), Le(10), "deviation of the logarithms of both speeds among the clients"
    ] = 0.0
    deadline: Annotated[
        float | None, Gt(0), "virtual seconds after which an answer does not count"
    ] = None
    held_out: Annotated[
        int, Ge(0), "clients, drawn by the seed, that never train: for `rayfed clients`"
    ] = 0
    oversample: Annotated[
        float,
        Ge(1),
        Le(1000),
        "how many times train.clients_per_round are chosen; the first to answer count",
    ] = 1.0
    sampling: Annotated[Rule, SAMPLING, SAMPLING_TEXT] = field(default_factory=Uniform)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace and self.available < 1:
            settings = f"clients.available = {self.available} and clients.trace = '{self.trace}'"
            raise InputError(f"{settings}: both say which clients are there; give one of the two")
        if not self.trace:
            self.refuse_idle()

    def chosen(self, clients_per_round: int) -> int:
        """Return how many clients are chosen if enough are there.

        >>> Participation(dropout=0.1, oversample=1.3).chosen(10)
        13
        """
        # Without rounding, 1.1 * 10 would be a little more than 11.
        return ceil(round(clients_per_round * self.oversample, 9))

    def has_clock(self, columns: Collection[str]) -> bool:
        """Say whether work takes virtual time; `columns` are the columns of the trace."""
        return any(getattr(self, speed) is not None or speed in columns for speed in SPEEDS)

    def refuse_idle(self, columns: Collection[str] = ()) -> None:
        """Raise `InputError` if a key would change nothing, or if the trace gives its value."""
        columns_of_keys = {"dropout": DROPS, **{speed: speed for speed in SPEEDS}}
        for key, column in columns_of_keys.items():
            if getattr(self, key) and column in columns:
                raise InputError(
                    f"clients.{key} = {getattr(self, key)}: the trace has a column '{column}'; "
                    "give one"
                )
        clock = " or ".join(f"clients.{speed}" for speed in SPEEDS)
        if self.spread and not any(getattr(self, speed) for speed in SPEEDS):
            raise InputError(
                f"clients.spread = {self.spread}: there is no speed to spread; give {clock}"
            )
        if self.deadline is not None and not self.has_clock(columns):
            raise InputError(
                f"clients.deadline = {self.deadline}: no work takes virtual time; give {clock}"
            )
        answers_differ = self.dropout or DROPS in columns or self.has_clock(columns)
        if self.oversample > 1 and not answers_differ:
            raise InputError(
                f"clients.oversample = {self.oversample}: all clients would answer, at the same "
                f"time; give clients.dropout, {clock}"
            )
