"""Parts that distil: they keep what a client does not hold, by staying near a teacher's logits.

The teacher is the round's global model, unless a part says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from rayfed import losses
from rayfed.methods.part import Batch, ClientView, Part
from rayfed.values import Ge, Gt, Le

Beta = Annotated[float, Ge(0), "weight of the distillation; 0 is FedAvg"]
Tau = Annotated[float, Gt(0), "temperature of both softmaxes"]


@dataclass(frozen=True)
class Distill(Part):
    """Knowledge distillation over all classes (Hinton et al., 2015), as a term of the local objective."""

    slot: ClassVar[str] = "distill"
    beta: Beta = 1.0
    tau: Tau = 1.0

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.beta * losses.distill(batch.logits, batch.teacher.logits, tau=self.tau)


@dataclass(frozen=True)
class NotTrueDistill(Part):
    """Distillation over the classes other than the label. FedNTD (Lee et al., NeurIPS 2022), eq. 10 and 11.

    `mix` blends it with plain distillation (eq. 17, 18), `form = "mse"` compares logits (appendix L), `teacher = false`
    takes a teacher that knows nothing, i.e. uniform over the not-true classes.
    """

    slot: ClassVar[str] = "distill"
    beta: Beta = 1.0
    tau: Tau = 1.0
    mix: Annotated[float, Ge(0), Le(1), "share of not-true distillation; the rest is plain distillation"] = 1.0
    form: Annotated[Literal["kl", "mse"], "divergence of softmaxes, or mean squared gap of logits"] = "kl"
    teacher: Annotated[bool, "false: a zero teacher, without a forward pass"] = True

    def loss(self, batch: Batch, local: None) -> Tensor:
        teacher = batch.teacher.logits if self.teacher else torch.zeros_like(batch.logits)
        if self.form == "mse":
            term = losses.not_true_squared_error(batch.logits, teacher, batch.labels)
        else:
            term = losses.not_true_distill(batch.logits, teacher, batch.labels, tau=self.tau)
        if self.mix < 1:
            term = self.mix * term + (1 - self.mix) * losses.distill(batch.logits, teacher, tau=self.tau)
        return self.beta * term


@dataclass(frozen=True)
class LabelMaskedDistill(Part):
    """Distillation from a teacher masked on the client's majority classes. FedLMD (Lu et al., ACM MM 2023), eq. 3 to 6.

    `teacher = false` is FedLMD-Tf (eq. 7, 8): uniform over the classes that remain. The paper's own inequality for the
    majority is garbled; `rayfed.losses.majority_labels` has the reading we take.
    """

    slot: ClassVar[str] = "distill"
    beta: Beta = 1.0
    tau: Tau = 1.0
    teacher: Annotated[bool, "false: a zero teacher, without a forward pass"] = True

    def begin(self, client: ClientView) -> Tensor:
        return losses.majority_labels(client.label_counts)

    def loss(self, batch: Batch, majority: Tensor) -> Tensor:
        teacher = batch.teacher.logits if self.teacher else torch.zeros_like(batch.logits)
        return self.beta * losses.label_masked_distill(batch.logits, teacher, batch.labels, majority, tau=self.tau)
