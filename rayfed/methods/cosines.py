"""Parts whose logits are cosines, so that no class has a longer row in the head than others."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rayfed import losses
from rayfed.base.values import Gt
from rayfed.methods.part import Part
from rayfed.methods.views import Batch, ClientView, Fit, ServerView, Step
from rayfed.tensors.trees import Tree

# A loss as a function of cosines (B, C) and their factor.
Scaled = Callable[[Tensor, Tensor], Tensor]
Scale = Annotated[float, Gt(0), "first factor of the cosines, which is learned then"]


@dataclass(frozen=True, eq=False)
class LocalScale:
    """The factor of the cosines in training at a client."""

    # A scalar tensor.
    value: Tensor
    # Takes a step of the job's optimizer on a loss.
    step: Callable[[Tensor], None]

    def learned(self, cosines: Tensor, loss: Scaled) -> Tensor:
        """Return the loss of the cosines, as a term for the model.

        The factor takes its own step on the same loss.
        """
        term = loss(cosines, self.value.detach().clone())
        self.step(loss(cosines.detach(), self.value))
        return term


class LearnedScale:
    """The hooks of a factor of cosines that clients learn, and the server averages by samples."""

    scale: float

    def init(self, weights: Tree) -> Tree:
        return self.scale

    def tell(self, scale: Tree, server: ServerView, surveyed: None) -> tuple[Tree, Tree]:
        return scale, scale

    def local_scale(self, client: ClientView) -> LocalScale:
        """Return the factor for a client's training, with the value that the server has sent."""
        value = torch.tensor(client.payload, device=client.label_counts.device, requires_grad=True)
        return LocalScale(value, client.stepper({"scale": value}))

    def scale_of(self, client: ClientView, local: LocalScale) -> Tree:
        """Return the summands of the factor's average."""
        return {"examples": client.num_examples, "scale": client.num_examples * local.value.item()}

    def averaged_scale(self, total: Tree) -> Tree:
        """Return the factor's average by samples."""
        return total["scale"] / total["examples"]


@dataclass(frozen=True)
class SimplexHead(LearnedScale, Part):
    """Learn labels by cosines to the fixed corners of a simplex, shifted by class shares.

    FedETF (Li et al., ICCV 2023).

    The term is a cross-entropy. The head is the linear projection of the authors' code
    (ZexiLee/ICCV-2023-FedETF), to as many features as there are classes. So the corners can be
    those of `_to_corners`, and the model's largest logit is its largest cosine. The factor is
    learned, as in that code.
    """

    slot: ClassVar[str] = "supervise"
    scale: Scale = 1.0

    def begin(self, client: ClientView) -> LocalScale:
        return self.local_scale(client)

    def loss(self, batch: Batch, scale: LocalScale) -> Tensor:
        def loss(cosines: Tensor, factor: Tensor) -> Tensor:
            logits = factor * cosines
            return losses.adjusted_cross_entropy(logits, batch.labels, batch.label_counts)

        return scale.learned(_to_corners(batch.logits), loss)

    def report(self, client: ClientView, scale: LocalScale, fit: Fit) -> tuple[Tree, None]:
        return self.scale_of(client, scale), None

    def update(self, scale: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        return self.averaged_scale(total), step


@dataclass(frozen=True)
class ShareScaledSimplex(Part):
    """Learn labels by cosines to the corners of a simplex, each times its class's share.

    FedGELA (Fan et al., NeurIPS 2023).

    The term is a cross-entropy. A client's corners are `C n_c / n` long. So a class that the client
    lacks has the logit 0, and its room stays free. It follows the authors' code
    (MediaBrain-SJTU/FedGELA), with features of length 1 (the code's `l2`; its default is
    BatchNorm), and with the head as the code's last projection. The global model has corners of one
    length.
    """

    slot: ClassVar[str] = "supervise"
    tau: Annotated[float, Gt(0), "temperature: what the cosines are divided by"] = 0.2

    def begin(self, client: ClientView) -> Tensor:
        return client.label_counts * client.num_classes / client.num_examples

    def loss(self, batch: Batch, lengths: Tensor) -> Tensor:
        return losses.cross_entropy(lengths * _to_corners(batch.logits) / self.tau, batch.labels)


def _to_corners(logits: Tensor) -> Tensor:
    """Return the cosines, (B, C), of logits to the corners of a simplex.

    The corners are the axes less their mean, scaled to length 1.

    >>> _to_corners(torch.tensor([[3.0, 0.0]]))
    tensor([[ 0.7071, -0.7071]])
    """
    classes = logits.shape[1]
    directions = normalize(logits, dim=1)
    return math.sqrt(classes / (classes - 1)) * (directions - directions.mean(dim=1, keepdim=True))
