"""The [train] table: the rounds, and how a client trains in one of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rayfed.base.errors import InputError
from rayfed.base.values import Checked, Form, Ge, Gt, Le, Lt
from rayfed.clients.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    Factors,
    check_factors,
    read_schedule,
    write_schedule,
)

SCHEDULE = Form(read_schedule, write_schedule, default="constant", kinds=SCHEDULES)
SCHEDULE_TEXT = f"the learning rate by round: {', '.join(SCHEDULES)}, or your own, module:Name"
PRECISION_TEXT = (
    "bf16: of forward passes, tests too, by autocast; tf32: of a client's training, on an NVIDIA "
    "GPU"
)
PATIENCE_TEXT = (
    "evaluated rounds without a better test accuracy, after which the run ends; 0: it goes on"
)


@dataclass(frozen=True)
class Training(Checked):
    """The rounds, and how a client trains in one.

    The optimizer's state (momentum, Adam's moments) is new in each.
    """

    num_rounds: Annotated[int, Ge(1), "rounds to train"] = 20
    clients_per_round: Annotated[int, Ge(1), "clients sampled each round"] = 5
    local_epochs: Annotated[
        float, Gt(0), "passes over a client's data in a round; 0.5: half of its batches"
    ] = 1
    local_steps: Annotated[int | None, Ge(1), "steps in a round, in place of epochs"] = None
    batch_size: Annotated[
        int, Ge(1), Le(10**18), "images per step; the last batch of an epoch may be smaller"
    ] = 50
    task_images: Annotated[
        int, Ge(1), "images per task: an actor trains small clients one after the other"
    ] = 500
    optimizer: Annotated[
        Literal["sgd", "adam", "adamw"], "a client's; it begins anew in each round"
    ] = "sgd"
    lr: Annotated[
        float, Gt(0), "learning rate of the first round after the warm-up, if there is one"
    ] = 0.01
    lr_decay: Annotated[float, Gt(0), Le(1), "factor of the learning rate from round to round"] = (
        1.0
    )
    schedule: Annotated[Factors, SCHEDULE, SCHEDULE_TEXT] = field(default_factory=Constant)
    momentum: Annotated[float, Ge(0), Lt(1), "momentum of sgd"] = 0.0
    weight_decay: Annotated[
        float, Ge(0), "added to the gradient (sgd, adam), or taken from the weights (adamw)"
    ] = 0.0
    clip: Annotated[
        float, Ge(0), "largest norm of a step's gradient over all parameters; 0: any"
    ] = 0.0
    precision: Annotated[Literal["float32", "bf16", "tf32"], PRECISION_TEXT] = "float32"
    eval_every: Annotated[
        int, Ge(1), Le(10**18), "rounds from one evaluation to the next; the last has one too"
    ] = 1
    patience: Annotated[int, Ge(0), PATIENCE_TEXT] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # 2.0 becomes 2, so that job files and hashes do not tell the two apart.
        if self.local_epochs == int(self.local_epochs):
            object.__setattr__(self, "local_epochs", int(self.local_epochs))
        if self.momentum and self.optimizer != "sgd":
            raise InputError(
                f"train.momentum = {self.momentum} is for sgd: {self.optimizer} has its own (its "
                "first moment); give train.momentum = 0"
            )
        if self.lr_decay < 1 and not isinstance(self.schedule, Constant):
            name = write_schedule(self.schedule)["name"]
            raise InputError(
                f"train.lr_decay = {self.lr_decay}: with train.schedule = '{name}' the rate would "
                "fall in two ways; give one of the two"
            )
        check_factors(self.schedule, self.num_rounds)
        if isinstance(self.schedule, Cosine) and not self.schedule.factor(self.num_rounds):
            raise InputError(
                f"train.num_rounds = {self.num_rounds}: after train.schedule.until = "
                f"{self.schedule.until} the rate is 0, and nothing would train; give the last "
                "round as train.schedule.until, or a train.schedule.floor above 0"
            )

    def steps(self, num_examples: int) -> int:
        """Return the steps of a client with that many images in a round.

        A part of a batch counts as a whole batch.

        >>> all_epochs = (1, 0.5, 1.5, 0.01)
        >>> [Training(batch_size=10, local_epochs=epochs).steps(45) for epochs in all_epochs]
        [5, 3, 8, 1]
        """
        per_epoch = -(-num_examples // self.batch_size)
        # Without rounding, 100 * 0.07 would be above 7.
        return self.local_steps or max(1, math.ceil(round(self.local_epochs * per_epoch, 9)))

    def lr_at(self, round: int) -> float:
        """Return the learning rate of round 1, 2, ..."""
        return self.lr * self.lr_decay ** (round - 1) * float(self.schedule.factor(round))

    def evaluates(self, round: int) -> bool:
        """Say whether the global model is evaluated after a round.

        It is evaluated after each `eval_every`-th round, and after the last.
        """
        return round % self.eval_every == 0 or round >= self.num_rounds

    def counts(self, round: int) -> bool:
        """Say whether an evaluation is one of every `eval_every` rounds, not the initial one."""
        return round > 0 and round % self.eval_every == 0

    def can_forget(self, round: int) -> bool:
        """Say whether a round has an earlier one whose accuracies count.

        Only then can something be forgotten.

        >>> [Training(eval_every=2).can_forget(round) for round in (0, 1, 2, 3, 4)]
        [False, False, False, True, True]
        """
        return round > self.eval_every

    def patience_is_over(self, accuracies: Mapping[int, float | None]) -> bool:
        """Say whether the run ends early, by the test accuracies of its rounds so far.

        An accuracy of None stands for a round without an evaluation. Only rounds that count do, so
        a run decides the same when it is stopped and continued, or extended. The best round is the
        first with the best accuracy.

        >>> Training(patience=2).patience_is_over({0: 0.1, 1: 0.5, 2: 0.4, 3: 0.5})
        True
        """
        counted = [
            accuracy
            for round, accuracy in accuracies.items()
            if self.counts(round) and accuracy is not None
        ]
        return 0 < self.patience < len(counted) and max(counted) == max(counted[: -self.patience])
