"""Parts that push a batch's features or predictions apart, or pull them to another model's."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor, nn

from rayfed import losses
from rayfed.base.values import Ge, Gt, Le
from rayfed.clients.settings import Training
from rayfed.methods.part import Part
from rayfed.methods.requirements import require_features
from rayfed.methods.views import Batch, ClientView, Fit, ServerView
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights


@dataclass(frozen=True)
class FeatureDistill(Part):
    """Pull features to the features that the global model has of the same samples.

    Feature distillation (FedCSD, Yan et al., 2023, eq. 5), which the paper compares with the
    distillation of logits (its Fig. 1). The paper's "MSE loss" is read as a mean over the features.
    """

    mu: Annotated[float, Ge(0), "weight of the mean squared gap; 0 is FedAvg"] = 0.01

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.mu * losses.feature_distill(batch.features, batch.teacher.of_features)


@dataclass(frozen=True)
class ModelContrast(Part):
    """Pull features to those of the global model, away from those of the client's last model.

    MOON (Li et al., CVPR 2021), eq. 3, on penultimate features.

    The projection head is an option of the model (`project`). A client that has not trained before
    has no term, or is pushed away from the job's initial model, as in FedNTD's code. It is not
    pushed away from the round's global model: both cosines would be equal, and the gradient 0.
    """

    mu: Annotated[float, Ge(0), "weight of the contrast; 0 is FedAvg"] = 1.0
    tau: Annotated[float, Gt(0), "temperature"] = 0.5
    first: Annotated[
        Literal["none", "initial"],
        "what stands for the last model of a client that has none: nothing, or round 0's",
    ] = "none"

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)

    def init(self, weights: Weights) -> Weights | None:
        return weights if self.first == "initial" else None

    def tell(
        self, initial: Weights | None, server: ServerView, surveyed: None
    ) -> tuple[Tree, Tree]:
        return initial, initial

    def begin(self, client: ClientView) -> nn.Module | None:
        previous = client.payload if client.memory is None else client.memory
        return None if previous is None else client.frozen(previous)

    def loss(self, batch: Batch, previous: nn.Module | None) -> Tensor | None:
        if previous is None:
            return None
        before = batch.outputs_of(previous).of_features
        term = losses.model_contrast(
            batch.features, batch.teacher.of_features, before, tau=self.tau
        )
        return losses.scaled(self.mu, term)

    def report(self, client: ClientView, local: object, fit: Fit) -> tuple[None, Tree]:
        return None, fit.weights


@dataclass(frozen=True)
class Decorrelation(Part):
    """Keep features from correlating with each other over a batch.

    FedDecorr (Shi et al., ICLR 2023).

    The factor is that of the authors' code, `rayfed.losses.decorrelation`. With batches of 64 it is
    62 times the factor of the paper's formula. The default weight belongs to the code's factor.
    """

    beta: Annotated[float, Ge(0), "weight of the term; 0 is FedAvg"] = 0.1

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.beta * losses.decorrelation(batch.features)


@dataclass(frozen=True)
class ClassDecorrelation(Part):
    """Keep features from correlating with each other within each class of a batch.

    FedMR (Fan et al., TMLR 2023).

    It is the intra-class loss, with the factor of the authors' code:
    `rayfed.losses.class_decorrelation`. The paper's loss between classes is neither in that code
    nor here.
    """

    intra: Annotated[float, Ge(0), "weight of the term; 0 is FedAvg"] = 0.01

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.intra * losses.class_decorrelation(batch.features, batch.labels)


@dataclass(frozen=True)
class RelaxedContrast(Part):
    """Pull features to their class, but not too near, and push them away from other classes.

    FedRCL (Seo et al., CVPR 2024).

    It acts on penultimate features, with samples chosen as in the authors' code:
    `rayfed.losses.relaxed_contrast`. The code takes the mean of this term over the stages of a
    ResNet; here only the features of the last stage count.
    """

    weight: Annotated[float, Ge(0), "weight of the term; 0 is FedAvg"] = 1.0
    penalty: Annotated[
        float, Ge(0), "weight of the penalty on samples that are too near to their class (beta)"
    ] = 1.0
    threshold: Annotated[
        float, Ge(-1), Le(1), "the cosine from which on they are too near (lambda)"
    ] = 0.7
    tau: Annotated[float, Gt(0), "temperature"] = 0.05

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)

    def loss(self, batch: Batch, local: None) -> Tensor:
        options = {"tau": self.tau, "threshold": self.threshold, "penalty": self.penalty}
        term = losses.relaxed_contrast(batch.features, batch.labels, **options)
        return losses.scaled(self.weight, term)


@dataclass(frozen=True)
class PredictionVariance(Part):
    """Make predictions vary over a batch as if each class were predicted equally often, for sure.

    In FedUV (Son et al., CVPR 2024).
    """

    variance: Annotated[
        float, Ge(0), "weight of the lack of variance in the predictions (lambda)"
    ] = 2.5

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.variance * losses.prediction_variance(batch.logits)


@dataclass(frozen=True)
class FeatureUniformity(Part):
    """Push features apart over a batch, whatever their labels.

    In FedUV (Son et al., CVPR 2024).
    """

    uniformity: Annotated[float, Ge(0), "weight of the nearness of features (mu)"] = 0.5

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)

    def loss(self, batch: Batch, local: None) -> Tensor:
        return self.uniformity * losses.feature_uniformity(batch.features)
