"""The learning rate by round, as factors of `train.lr`.

A schedule is a frozen dataclass. Its `factor(round)` depends on its own fields alone, never on
`train.num_rounds`: so a run that is resumed with more rounds keeps the rates that it has had. A
user's own schedule is such a class too.
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
    """A value of `train.schedule`: a schedule of this file, or a user's own frozen dataclass."""

    def factor(self, round: int) -> float:
        """Return what `train.lr` is multiplied by in round 1, 2, ..., above 0."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Checked):
    """A warm-up, and after it what `_after` says.

    In the warm-up the rate grows by the same amount from round to round.
    """

    warmup: Annotated[
        int,
        Ge(0),
        "rounds in which the rate grows; the round after them is the first with train.lr",
    ] = 0

    def factor(self, round: int) -> float:
        """Return what `train.lr` is multiplied by in round 1, 2, ..."""
        if round <= self.warmup:
            return round / (self.warmup + 1)
        return self._after(round - self.warmup - 1)

    def _after(self, rounds: int) -> float:
        """Return the factor that many rounds after the first round with `train.lr`."""
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
    """The rate is multiplied by `gamma` after each `every` rounds, as by torch's `StepLR`.

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

    Round `until` is the last round on the curve, still above `floor`. All later rounds have
    `floor`. Source: Loshchilov and Hutter (ICLR 2017), eq. 5, without restarts.

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
        progress = min(1.0, rounds / (self.until - self.warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


SCHEDULES: Mapping[str, type[Schedule]] = {"constant": Constant, "step": Step, "cosine": Cosine}

# That many rounds of a user's own schedule are checked, and the last.
CHECKED = 10_000
# Other tools have schedules of these names; the text says what to use here.
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
# Names of schedules in other tools end in these words: LinearLR, ReduceLROnPlateau.
ENDS = ("lr", "scheduler", "schedule", "decay", "on")


def read_schedule(value: Any) -> Any:
    """Return a schedule from its name, or from a table with a name.

    A table without a name is `constant`.

    >>> read_schedule({"name": "step", "every": 10})
    Step(warmup=0, every=10, gamma=0.1)
    """
    name, options = named(value, "train.schedule", default="constant")
    return build(_find(name), options, "train.schedule")


def write_schedule(schedule: Any) -> dict[str, Any]:
    """Return a schedule in the form that `read_schedule` reads."""
    return {"name": name_in(SCHEDULES, type(schedule)), **table(schedule)}


def check_factors(schedule: Any, num_rounds: int) -> None:
    """Raise `InputError` unless a user's own schedule gives each round one and the same rate.

    Each round is asked twice.
    """
    name = write_schedule(schedule)["name"]
    if name in SCHEDULES:
        return
    rounds = list(range(1, min(num_rounds, CHECKED) + 1))
    rounds.append(num_rounds)
    for round in rounds:
        factor = _factor(schedule, name, round)
        second_factor = _factor(schedule, name, round)
        if factor != second_factor:
            raise InputError(
                f"train.schedule '{name}': factor({round}) gives {factor!r}, then "
                f"{second_factor!r}; it must depend on the round and on the fields alone, so that "
                "a run can be resumed"
            )


def _factor(schedule: Any, name: str, round: int) -> float:
    """Return the factor that a user's own schedule gives a round.

    Raises `InputError` if it gives something else.
    """
    label = f"train.schedule '{name}': factor({round})"
    try:
        factor = schedule.factor(round)
    except Exception as error:
        # The user's code may raise anything.
        raise InputError(f"{label} fails: {type(error).__name__}: {error}") from error
    if isinstance(factor, bool) or not isinstance(factor, Real):
        raise InputError(f"{label} gives {told(factor)}; give a number, such as 0.5")
    number = float(factor)
    if not (math.isfinite(number) and number > 0):
        raise InputError(
            f"{label} gives {factor}; give a finite number above 0: with a rate of 0 nothing would "
            "train, and some methods divide by the rate"
        )
    return number


def _find(name: str) -> Any:
    """Return the class of a schedule: one of `SCHEDULES`, or a user's own, by `module:Name`.

    Raises `InputError` for a name that other tools have, and for a class that is no schedule.
    """
    plain = name.lower().replace("_", "").replace("-", "")
    for end in ENDS:
        plain = plain.removesuffix(end)
    if ":" in name:
        plain = ""
    for foreign, advice in ELSEWHERE.items():
        if plain and plain.endswith(foreign):
            raise InputError(
                f"unknown schedule '{name}': {advice} (valid: {', '.join(SCHEDULES)}, or "
                "'package.module:Name')"
            )
    schedule: Any = find(name, SCHEDULES, "schedule")
    parameters = getattr(schedule, "__dataclass_params__", None)
    is_frozen = inspect.isclass(schedule) and bool(parameters and parameters.frozen)
    if not (is_frozen and callable(getattr(schedule, "factor", None))):
        raise InputError(
            f"schedule '{name}' is {told(schedule)}; it must be a frozen dataclass with a method "
            "`factor(self, round)`"
        )
    return schedule
