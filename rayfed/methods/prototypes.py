"""Parts that use prototypes: the mean feature of each class, over the clients of a round."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from rayfed import losses
from rayfed.base.values import Ge
from rayfed.methods.part import Part
from rayfed.methods.views import Batch, ClientView, Fit, ServerView, Step
from rayfed.tensors.trees import Tree


class MeanFeatures:
    """The hooks that keep prototypes: the mean feature of each class over the round's clients, (C, D).

    Each client sends the sums and counts of its features by class, from its trained model on its un-augmented data. A
    class that no client of a round holds keeps its prototype. In a part's first round there are none.
    """

    needs_features: ClassVar[bool] = True

    def tell(self, prototypes: Tree, server: ServerView, surveyed: None) -> tuple[Tree, Tree]:
        return prototypes, prototypes

    def report(self, client: ClientView, local: Tree, fit: Fit) -> tuple[Tree, None]:
        return _sums_by_class(client, fit.model), None

    def update(self, prototypes: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        return _means_by_class(total, prototypes), step


@dataclass(frozen=True)
class Prototypes(MeanFeatures, Part):
    """Features pulled towards the mean feature of their label. FedProto (Tan et al., AAAI 2022), with averaging.

    The means are of the clients' trained models, over the clients of the round before.
    """

    mu: Annotated[float, Ge(0), "weight of the distance; 0 is FedAvg"] = 1.0

    def loss(self, batch: Batch, prototypes: Tree) -> Tensor | None:
        if prototypes is None:
            return None
        distance = losses.prototype_distance(batch.features, batch.labels, prototypes["means"], prototypes["known"])
        return self.mu * distance


@dataclass(frozen=True)
class PrototypeContrast(MeanFeatures, Part):
    """Features contrasted with the prototypes of all classes, then cross-entropy. FedProc (Mu et al., FGCS 2023).

    `a CE + (1 - a) contrast`, where `a` grows from 0 to 1 over `rounds` rounds of this part. The prototypes are those
    of `Prototypes`; its first round has none, and trains on cross-entropy alone, as in the authors' code
    (MuXutong/FedProc).
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
        return share * hard + (1 - share) * losses.prototype_contrast(batch.features, batch.labels, prototypes)


@dataclass(frozen=True)
class PrototypeMargin(MeanFeatures, Part):
    """Features kept as far from other classes as their own prototype is. In FedMR (Fan et al., TMLR 2023).

    For the paper's inter-class loss, from memory, as the authors' code has none: `rayfed.losses.prototype_margin`. The
    prototypes are those of `Prototypes`; a part's first round has none.
    """

    inter: Annotated[float, Ge(0), "weight of the margins between classes; 0 has none"] = 1.0

    def loss(self, batch: Batch, prototypes: Tree) -> Tensor | None:
        if prototypes is None:
            return None
        invaded = losses.prototype_margin(batch.features, batch.labels, prototypes["means"], prototypes["known"])
        return self.inter * invaded


def _sums_by_class(client: ClientView, model: nn.Module) -> Tree:
    """A model's features on the client's samples, summed by class (C, D), and the samples of each class (C,)."""
    sums = []
    for outputs, labels in client.outputs(model):
        features = outputs.of_features.double()  # (B, D)
        zeros = features.new_zeros(client.num_classes, features.shape[1])
        sums.append(zeros.index_add_(0, labels, features))  # (C, D)
    return {"sums": torch.stack(sums).sum(dim=0), "counts": client.label_counts}


def _means_by_class(total: Tree, before: Tree) -> Tree:
    """The prototypes, mean features of each class (C, D), those before where it has no samples; and which are known."""
    counts = total["counts"]
    means = (total["sums"] / counts.clamp(min=1)[:, None]).float()
    known = counts > 0
    if before is not None:
        means = torch.where(known[:, None], means, before["means"])
        known = known | before["known"]
    return {"means": means, "known": known}
