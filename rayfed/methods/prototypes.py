"""Parts that use prototypes: the mean feature of each class over the clients of a round."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from rayfed import losses
from rayfed.base.errors import InputError
from rayfed.base.values import Ge, Le
from rayfed.clients.settings import Training
from rayfed.methods.cosines import LearnedScale, LocalScale, Scale
from rayfed.methods.own_model import refuse_other_heads
from rayfed.methods.part import Part
from rayfed.methods.requirements import require_features
from rayfed.methods.views import Batch, ClientView, Fit, ServerView, Step
from rayfed.tensors.trees import Tree


class MeanFeatures:
    """The hooks that compute prototypes: the mean feature of each class, (C, D).

    The mean is over the clients of a round. Each client sends the sums and counts of its features
    by class, from its trained model on its un-augmented data. A class that no client of a round
    holds keeps its prototype. In a part's first round there are no prototypes.
    """

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)

    def tell(self, prototypes: Tree, server: ServerView, surveyed: None) -> tuple[Tree, Tree]:
        return prototypes, prototypes

    def report(self, client: ClientView, local: Tree, fit: Fit) -> tuple[Tree, None]:
        return sums_by_class(client, fit.model), None

    def update(self, prototypes: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        counts = total["counts"]
        means = (total["sums"] / counts.clamp(min=1)[:, None]).float()
        known = counts > 0
        if prototypes is not None:
            means = torch.where(known[:, None], means, prototypes["means"])
            known = known | prototypes["known"]
        return {"means": means, "known": known}, step


@dataclass(frozen=True)
class Prototypes(MeanFeatures, Part):
    """Pull features to the mean feature of their label.

    FedProto (Tan et al., AAAI 2022), with averaging.

    The means are of the trained models of the last round's clients.
    """

    mu: Annotated[float, Ge(0), "weight of the distance; 0 is FedAvg"] = 1.0

    def loss(self, batch: Batch, prototypes: Tree) -> Tensor | None:
        if prototypes is None:
            return None
        distance = losses.prototype_distance(
            batch.features, batch.labels, prototypes["means"], prototypes["known"]
        )
        return losses.scaled(self.mu, distance)


@dataclass(frozen=True)
class PrototypeContrast(MeanFeatures, Part):
    """Contrast features with the prototypes of all classes, and go over to cross-entropy.

    FedProc (Mu et al., FGCS 2023).

    The term is `a CE + (1 - a) contrast`, where `a` grows from 0 to 1 over `rounds` rounds of this
    part. The prototypes are means of features of length 1. The part's first round has no
    prototypes, and trains on cross-entropy alone, as in the authors' code (MuXutong/FedProc).
    """

    slot: ClassVar[str] = "supervise"
    rounds: Annotated[int, Ge(1), "rounds after which cross-entropy is alone; 1 is FedAvg"] = 100

    def tell(self, prototypes: Tree, server: ServerView, surveyed: None) -> tuple[Tree, Tree]:
        return prototypes, None if prototypes is None else prototypes["means"]

    def begin(self, client: ClientView) -> tuple[Tensor | None, float]:
        return client.payload, min(1.0, (client.round - client.since) / self.rounds)

    def loss(self, batch: Batch, local: tuple[Tensor | None, float]) -> Tensor:
        prototypes, share = local
        hard = losses.cross_entropy(batch.logits, batch.labels)
        if prototypes is None or share == 1:
            return hard
        hard = share * hard
        contrast = losses.prototype_contrast(batch.features, batch.labels, prototypes)
        return hard + (1 - share) * contrast

    def report(self, client: ClientView, local: object, fit: Fit) -> tuple[Tree, None]:
        return sums_by_class(client, fit.model, of_length_1=True), None


@dataclass(frozen=True)
class PrototypeHead(LearnedScale, Part):
    """Learn labels by cosines to a head of class means, which is not trained.

    FedNH (Dai et al., AAAI 2023).

    The term is a cross-entropy. The head's rows have length 1, from the initial head on. After a
    round each row follows the mean of the clients' mean features of its class: `W <- keep W +
    (1 - keep) P`, each at length 1, where a client's mean counts by its samples of the class. A
    class that no client holds keeps its row. It follows the authors' code (Yutong-Dai/FedNH), which
    begins with orthogonal rows. The factor of the cosines is learned.
    """

    slot: ClassVar[str] = "supervise"
    changes_average: ClassVar[bool] = True
    keep: Annotated[float, Ge(0), Le(1), "how much of a class's row is kept (rho)"] = 0.9
    scale: Scale = 1.0

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)
        refuse_other_heads(self, model)

    def begin(self, client: ClientView) -> tuple[LocalScale, Tensor]:
        return self.local_scale(client), normalize(client.weights["head.weight"], dim=1)

    def loss(self, batch: Batch, local: tuple[LocalScale, Tensor]) -> Tensor:
        scale, head = local

        def loss(cosines: Tensor, factor: Tensor) -> Tensor:
            return losses.cross_entropy(factor * cosines, batch.labels)

        return scale.learned(normalize(batch.features, dim=1) @ head.T, loss)

    def report(
        self, client: ClientView, local: tuple[LocalScale, Tensor], fit: Fit
    ) -> tuple[Tree, None]:
        of_classes = sums_by_class(client, fit.model, of_length_1=True)
        directions = of_classes["counts"][:, None] * normalize(of_classes["sums"], dim=1)
        return {**self.scale_of(client, local[0]), "directions": directions}, None

    def update(self, scale: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        if "head.weight" not in step.trainable:
            raise InputError(
                "prototype_head: the head stays at the clients; remove that, or this part"
            )
        rows = normalize(step.weights["head.weight"].double(), dim=1)
        means = normalize(total["directions"], dim=1)
        rows = normalize(self.keep * rows + (1 - self.keep) * means, dim=1)
        head = {"head.weight": rows}
        if "head.bias" in step.averaged:
            head["head.bias"] = torch.zeros(len(rows))
        return self.averaged_scale(total), step.changed(head)


def sums_by_class(client: ClientView, model: nn.Module, of_length_1: bool = False) -> Tree:
    """Sum a model's features on the client's samples by class, (C, D).

    The counts of the samples (C,) come with the sums. With `of_length_1`, each feature vector is
    scaled to length 1 first.
    """
    sums = []
    for outputs, labels in client.outputs(model):
        features = outputs.of_features.double()  # (B, D)
        features = normalize(features, dim=1) if of_length_1 else features
        zeros = features.new_zeros(client.num_classes, features.shape[1])
        sums.append(zeros.index_add_(0, labels, features))  # (C, D)
    return {"sums": torch.stack(sums).sum(dim=0), "counts": client.label_counts}
