"""The learning rate by round, as factors of `train.lr`.

A schedule is a frozen dataclass whose `factor(round)` depends on its own fields alone, never on `train.num_rounds`: so
a run that is resumed with more rounds keeps the rates that it has had.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from rayfed.base.errors import InputError, did_you_mean, spelled
from rayfed.base.values import Checked, Ge, Gt, Le, build, name_in, named, table


@dataclass(frozen=True, kw_only=True)
class Schedule(Checked):
    """A warm-up, in which the rate grows by the same amount from round to round, and what `_after` says after it."""

    warmup: Annotated[
        int,
        Ge(0),
        "rounds in which the rate grows; the round after them is the first with train.lr",
    ] = 0

    def factor(self, round: int) -> float:
        """What `train.lr` is multiplied by in round 1, 2, ..."""
        return (
            round / (self.warmup + 1)
            if round <= self.warmup
            else self._after(round - self.warmup - 1)
        )

    def _after(self, rounds: int) -> float:
        """The factor so many rounds after the first round with `train.lr`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """`train.lr` in all rounds, times `train.lr_decay` from round to round.

    >>> [Constant(warmup=3).factor(round) for round in (1, 2, 3, 4, 5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    def _after(self, rounds: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """The rate times `gamma` after each `every` rounds, as torch's `StepLR`.

    >>> [Step(every=2, gamma=0.5).factor(round) for round in (1, 2, 3, 4, 5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: Annotated[int, Ge(1), "rounds with the same rate"]
    gamma: Annotated[float, Gt(0), Le(1), "factor of the rate from one step to the next"] = 0.1

    def _after(self, rounds: int) -> float:
        return self.gamma ** (rounds // self.every)


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a period of a cosine, from `train.lr` down to `floor`, as torch's `CosineAnnealingLR`.

    Round `until` is the last on the curve, still above `floor`, which all later rounds have. Loshchilov and Hutter
    (ICLR 2017), eq. 5, without restarts.

    >>> [round(Cosine(until=4).factor(number), 3) for number in (1, 2, 3, 4, 5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    until: Annotated[int, Ge(1), "the last round on the curve"]
    floor: Annotated[
        float, Ge(0), Le(1), "the share of train.lr that remains in all later rounds"
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup >= self.until:
            raise InputError(
                f"train.schedule.warmup = {self.warmup}: leaves no round up to train.schedule.until = {self.until} for "
                "the cosine; give a smaller number"
            )

    def _after(self, rounds: int) -> float:
        done = min(1.0, rounds / (self.until - self.warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2


SCHEDULES: Mapping[str, type[Schedule]] = {"constant": Constant, "step": Step, "cosine": Cosine}


def read_schedule(value: Any) -> Schedule:
    """A schedule from its name, or from a table with a name; a table without one is `constant`."""
    name, options = named(value, "train.schedule", default="constant")
    name = spelled(name, SCHEDULES)
    if name not in SCHEDULES:
        raise InputError(
            f"train.schedule: unknown schedule '{name}'{did_you_mean(name, SCHEDULES)}"
        )
    return build(SCHEDULES[name], options, "train.schedule")


def write_schedule(schedule: Schedule) -> dict[str, Any]:
    """A schedule as `read_schedule` reads it."""
    return {"name": name_in(SCHEDULES, type(schedule)), **table(schedule)}
