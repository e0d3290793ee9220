"""The learning rate by round, as factors of `train.lr`.

A schedule is a frozen dataclass whose `factor(round)` depends on its own fields alone, never on
`train.num_rounds`: so a run that is resumed with more rounds keeps the rates that it has had. A
schedule of the user's own is such a class too.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, Protocol

from rayfed.base.errors import InputError, told
from rayfed.base.values import Checked, Ge, Gt, Le, build, find, name_in, named, table


class Factors(Protocol):
    """What `train.schedule` may be: a schedule of this file, or a frozen dataclass of the user's
    own.
    """

    def factor(self, round: int) -> float:
        """What `train.lr` is multiplied by in round 1, 2, ..., above 0."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Checked):
    """A warm-up, in which the rate grows by the same amount from round to round, and what `_after`
    says after it.
    """

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

    Round `until` is the last on the curve, still above `floor`, which all later rounds have.
    Loshchilov and Hutter (ICLR 2017), eq. 5, without restarts.

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
                f"train.schedule.warmup = {self.warmup}: leaves no round up to "
                f"train.schedule.until = {self.until} for the cosine; give a smaller number"
            )

    def _after(self, rounds: int) -> float:
        done = min(1.0, rounds / (self.until - self.warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2


SCHEDULES: Mapping[str, type[Schedule]] = {"constant": Constant, "step": Step, "cosine": Cosine}


# Rounds of a schedule of the user's own, and the last.
CHECKED = 10_000
# Names that other tools have for schedules, and what stands for them here.
ELSEWHERE = {
    "linear": (
        "a rate that grows linearly is a warm-up of `constant`; one that falls linearly is a class "
        "of your own"
    ),
    "polynomial": "it is a few lines in a class of your own",
    "exponential": "give train.lr_decay, the factor from round to round",
    "multistep": "`step` has steps of equal length; others are a few lines in a class of your own",
    "plateau": "a rate cannot depend on accuracies; `train.patience` ends a run early",
    "onecycle": "it is a few lines in a class of your own",
    "none": "leave train.schedule out, or give `constant`",
    "warmup": "each schedule has a warm-up: train.schedule.warmup",
}
# LinearLR, ReduceLROnPlateau.
ENDS = ("lr", "scheduler", "schedule", "decay", "on")


def read_schedule(value: Any) -> Any:
    """A schedule from its name, or from a table with a name; a table without one is `constant`."""
    name, options = named(value, "train.schedule", default="constant")
    return build(_find(name), options, "train.schedule")


def write_schedule(schedule: Any) -> dict[str, Any]:
    """A schedule as `read_schedule` reads it."""
    return {"name": name_in(SCHEDULES, type(schedule)), **table(schedule)}


def check_factors(schedule: Any, num_rounds: int) -> None:
    """Raise `InputError` unless a schedule of the user's own gives each round a rate, and the same
    rate twice.
    """
    name = write_schedule(schedule)["name"]
    if name in SCHEDULES:
        return
    for round in [*range(1, min(num_rounds, CHECKED) + 1), num_rounds]:
        first, second = (_factor(schedule, name, round) for _ in range(2))
        if first != second:
            raise InputError(
                f"train.schedule '{name}': factor({round}) gives {first!r}, then {second!r}; it "
                "must depend on the round and on the fields alone, so that a run can be resumed"
            )


def _factor(schedule: Any, name: str, round: int) -> float:
    """The factor of a schedule of the user's own in a round.

    Raises `InputError` for what is no factor.
    """
    where = f"train.schedule '{name}': factor({round})"
    try:
        factor = schedule.factor(round)
    except Exception as error:
        # The user's code may raise anything.
        raise InputError(f"{where} fails: {type(error).__name__}: {error}") from error
    if isinstance(factor, bool) or not isinstance(factor, Real):
        raise InputError(f"{where} gives {told(factor)}; give a number, such as 0.5")
    number = float(factor)
    if not (math.isfinite(number) and number > 0):
        raise InputError(
            f"{where} gives {factor}; give a finite number above 0: with a rate of 0 nothing would "
            "train, and some methods divide by the rate"
        )
    return number


def _find(name: str) -> Any:
    """The class of a schedule: one of `SCHEDULES`, or one of the user's own, by `module:Name`."""
    plain = name.lower().replace("_", "").replace("-", "")
    for end in ENDS:
        plain = plain.removesuffix(end)
    for known, meant in ELSEWHERE.items():
        if ":" not in name and plain and (plain == known or plain.endswith(known)):
            raise InputError(
                f"unknown schedule '{name}': {meant} (valid: {', '.join(SCHEDULES)}, or "
                "'package.module:Name')"
            )
    schedule: Any = find(name, SCHEDULES, "schedule")
    parameters = getattr(schedule, "__dataclass_params__", None)
    is_frozen = bool(parameters and parameters.frozen)
    if not (
        inspect.isclass(schedule) and is_frozen and callable(getattr(schedule, "factor", None))
    ):
        raise InputError(
            f"schedule '{name}' is {told(schedule)}; it must be a frozen dataclass with a method "
            "`factor(self, round)`"
        )
    return schedule
