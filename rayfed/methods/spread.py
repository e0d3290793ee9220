"""Parts that keep a batch's features, or its predictions, from becoming all alike."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from rayfed import losses
from rayfed.base.values import Ge, Gt, Le
from rayfed.methods.part import Part
from rayfed.methods.views import Batch


@dataclass(frozen=True)
class Decorrelation(Part):
    """Features kept from correlating with each other over a batch. FedDecorr (Shi et al., ICLR 2023).

    The factor is that of the authors' code, `rayfed.losses.decorrelation`: with batches of 64 it is 62 times that of
    the paper's formula, and the default weight belongs to it.
    """

    needs_features: ClassVar[bool] = True
    beta: Annotated[float, Ge(0), "weight of the term; 0 is FedAvg"] = 0.1

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.beta * losses.decorrelation(batch.features)


@dataclass(frozen=True)
class ClassDecorrelation(Part):
    """Features kept from correlating with each other within each class of a batch. In FedMR (Fan et al., TMLR 2023).

    The paper's intra-class loss, with the factor of the authors' code: `rayfed.losses.class_decorrelation`.
    """

    needs_features: ClassVar[bool] = True
    intra: Annotated[float, Ge(0), "weight of the correlations within classes; 0 has none"] = 0.01

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.intra * losses.class_decorrelation(batch.features, batch.labels)


@dataclass(frozen=True)
class RelaxedContrast(Part):
    """Features near those of their class, but not too near, and far from other classes. FedRCL (Seo et al., CVPR 2024).

    On penultimate features, and mined as in the authors' code: `rayfed.losses.relaxed_contrast`. The code takes the
    mean of this term over the stages of a ResNet; here are the last one's features alone.
    """

    needs_features: ClassVar[bool] = True
    weight: Annotated[float, Ge(0), "weight of the term; 0 is FedAvg"] = 1.0
    penalty: Annotated[float, Ge(0), "weight of the penalty on samples that are too near to their class (beta)"] = 1.0
    threshold: Annotated[float, Ge(-1), Le(1), "the cosine from which on they are too near (lambda)"] = 0.7
    tau: Annotated[float, Gt(0), "temperature"] = 0.05

    def loss(self, batch: Batch, local: None) -> Tensor:
        options = {"tau": self.tau, "threshold": self.threshold, "penalty": self.penalty}
        return self.weight * losses.relaxed_contrast(batch.features, batch.labels, **options)


@dataclass(frozen=True)
class PredictionVariance(Part):
    """Predictions that vary over a batch as those of sure, even classes would. In FedUV (Son et al., CVPR 2024)."""

    variance: Annotated[float, Ge(0), "weight of the lack of variance in the predictions (lambda)"] = 2.5

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.variance * losses.prediction_variance(batch.logits)


@dataclass(frozen=True)
class FeatureUniformity(Part):
    """Features pushed apart over a batch, whatever their labels. In FedUV (Son et al., CVPR 2024)."""

    needs_features: ClassVar[bool] = True
    uniformity: Annotated[float, Ge(0), "weight of the nearness of features (mu)"] = 0.5

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.uniformity * losses.feature_uniformity(batch.features)
