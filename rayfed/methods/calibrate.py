"""Parts that correct the logits for the classes of which a client has many, few or no samples."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from rayfed import losses
from rayfed.base.values import Ge
from rayfed.methods.part import Part
from rayfed.methods.views import Batch


@dataclass(frozen=True)
class CalibratedCrossEntropy(Part):
    """Take a margin of `tau * n_c^(-1/4)` from each logit before the cross-entropy.

    FedLC (Zhang et al., ICML 2022).

    `rayfed.losses.calibrated_cross_entropy` states how we read the paper. The default of `tau` is
    FedLC's value in Table 10 of FedVLS.
    """

    slot: ClassVar[str] = "supervise"
    tau: Annotated[float, Ge(0), "factor of the margins; 0 is FedAvg"] = 0.5

    def loss(self, batch: Batch, local: None) -> Tensor:
        return losses.calibrated_cross_entropy(
            batch.logits, batch.labels, batch.label_counts, tau=self.tau
        )


@dataclass(frozen=True)
class AdjustedCrossEntropy(Part):
    """Shift each logit by the log of its class's share before the cross-entropy.

    Menon et al., ICLR 2021; used in FedVLS.
    """

    slot: ClassVar[str] = "supervise"

    def loss(self, batch: Batch, local: None) -> Tensor:
        return losses.adjusted_cross_entropy(batch.logits, batch.labels, batch.label_counts)


@dataclass(frozen=True)
class LogitSuppression(Part):
    """Push the logits of a class down on the samples of other classes.

    FedVLS (Guo et al., AAAI 2025), as in the authors' code.
    """

    strength: Annotated[float, Ge(0), "weight of the suppression of logits"] = 0.005

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.strength * losses.logit_suppression(
            batch.logits, batch.labels, batch.label_counts
        )
