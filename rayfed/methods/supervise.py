"""Parts that learn the labels: a method has exactly one of them (slot `supervise`)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from rayfed import losses
from rayfed.base.errors import InputError
from rayfed.base.values import Ge, Gt, Le, Lt
from rayfed.methods.part import Part
from rayfed.methods.views import Batch, ClientView


@dataclass(frozen=True)
class CrossEntropy(Part):
    """Learn labels by softmax cross-entropy, times `weight`.

    In FedLSD's local objective the weight is `1 - beta` (FedNTD, eq. 3).
    """

    slot: ClassVar[str] = "supervise"
    weight: Annotated[float, Ge(0), "factor of the term"] = 1.0
    smoothing: Annotated[
        float, Ge(0), Lt(1), "share of the label's mass spread over all classes"
    ] = 0.0

    def loss(self, batch: Batch, local: None) -> Tensor:
        term = losses.cross_entropy(batch.logits, batch.labels, smoothing=self.smoothing)
        return losses.scaled(self.weight, term)


@dataclass(frozen=True)
class RestrictedCrossEntropy(Part):
    """Scale down the logits of classes that the client lacks, before the cross-entropy.

    FedRS (Li and Zhan, KDD 2021).
    """

    slot: ClassVar[str] = "supervise"
    alpha: Annotated[
        float, Ge(0), Le(1), "scale of an absent class's logit; 1 is plain cross-entropy"
    ] = 0.5
    soft: Annotated[bool, "scale every class by how much of it the client holds"] = False

    def loss(self, batch: Batch, local: None) -> Tensor:
        return losses.restricted_cross_entropy(
            batch.logits, batch.labels, batch.label_counts, alpha=self.alpha, soft=self.soft
        )


@dataclass(frozen=True)
class ClassAdaptiveDistill(Part):
    """Mix cross-entropy and distillation by how well the teacher knows the class.

    FedCAD (He et al., AAAI 2022), eq. 1 to 3.

    It fills this slot because it also weighs the cross-entropy. The teacher is measured once per
    round on the client's own, un-augmented data. The paper gives no temperature; we take 1.
    """

    slot: ClassVar[str] = "supervise"
    low: Annotated[
        float, Ge(0), Le(1), "weight of distillation on a class unknown to the teacher (beta)"
    ] = 0.25
    high: Annotated[
        float, Ge(0), Le(1), "weight of distillation on a class fully known to it (gamma)"
    ] = 0.5
    tau: Annotated[float, Gt(0), "temperature of both softmaxes"] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise InputError(
                f"class_adaptive_distill: low = {self.low} must not be above high = {self.high}"
            )

    def begin(self, client: ClientView) -> Tensor:
        outputs, labels = client.all_outputs(client.global_model)
        return losses.class_adaptive_weights(
            outputs.logits, labels, client.num_classes, low=self.low, high=self.high, tau=self.tau
        )

    def loss(self, batch: Batch, class_weights: Tensor) -> Tensor:
        teacher = batch.teacher.logits
        return losses.class_adaptive_distill(
            batch.logits, teacher, batch.labels, class_weights, tau=self.tau
        )
