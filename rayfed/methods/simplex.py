"""A head that all clients share from the start, because it is not learned: the corners of a simplex."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from rayfed import losses
from rayfed.base.errors import InputError
from rayfed.base.values import Gt
from rayfed.methods.part import Part
from rayfed.methods.views import Batch, ClientView, ServerView, Step
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights


@dataclass(frozen=True)
class SimplexHead(Part):
    """Cross-entropy of the cosines to a simplex's corners, shifted by class shares. FedETF (Li et al., ICCV 2023).

    The corners (C, D), one per class, have length 1 and equal angles. They are made of the initial head, and so follow
    the job's seed. The cosines' factor `s` is learned, as in the authors' code (ZexiLee/ICCV-2023-FedETF): the head
    keeps it, with the weights `s / sqrt(C)` times the corners, so that a step of SGD on them is one on `s`.
    """

    slot: ClassVar[str] = "supervise"
    needs_features: ClassVar[bool] = True
    scale: Annotated[float, Gt(0), "first factor of the cosines, which is learned then"] = 1.0

    def check(self, model: nn.Module) -> None:
        super().check(model)
        head = model.head
        if not isinstance(head, nn.Linear) or head.in_features < head.out_features:
            raise InputError(
                f"{self!r} needs a model with a single linear layer as its head, with as many features as there are "
                "classes, or more; the model's option `project` sets the features"
            )
        if not head.weight.requires_grad:
            raise InputError(f"{self!r} learns the scale of the head, which is frozen; freeze less")

    def init(self, weights: Weights) -> Tree:
        return {"corners": _simplex(weights["head.weight"]), "scale": self.scale}

    def tell(self, state: Tree, server: ServerView, surveyed: None) -> tuple[Tree, Tree]:
        return state, state

    def begin(self, client: ClientView) -> Tree:
        return {**client.payload, "before": client.weights["head.weight"], "counts": client.label_counts}

    def loss(self, batch: Batch, local: Tree) -> Tensor:
        scale = _scale(local, local["before"], batch.model.get_parameter("head.weight"))
        cosines = normalize(batch.features, dim=1) @ local["corners"].T
        return losses.adjusted_cross_entropy(scale * cosines, batch.labels, local["counts"])

    def update(self, state: Tree, total: None, step: Step) -> tuple[Tree, Step]:
        """The head is put to the corners again, from the first round on."""
        if "head.weight" not in step.trainable:
            raise InputError("simplex_head: the head stays at the clients; remove that, or this part")
        scale = float(_scale(state, step.weights["head.weight"].double(), step.averaged["head.weight"].double()))
        corners = state["corners"] * scale / math.sqrt(len(state["corners"]))
        fixed = {"head.weight": corners}
        if "head.bias" in step.averaged:
            fixed["head.bias"] = torch.zeros(len(corners))
        return {**state, "scale": scale}, step.changed(fixed)


def _scale(state: Tree, before: Tensor, weight: Tensor) -> Tensor:
    """The factor now: that of the state, plus how far the head has moved along the corners since then."""
    return state["scale"] + ((weight - before) * state["corners"]).sum() / math.sqrt(len(before))


def _simplex(head: Tensor) -> Tensor:
    """The corners, (C, D), of a regular simplex around 0, in the space that the rows of a head (C, D) span."""
    classes = len(head)
    basis, _ = torch.linalg.qr(head.double().T)  # (D, C), orthonormal
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    return (math.sqrt(classes / (classes - 1)) * centred @ basis.T).float()
