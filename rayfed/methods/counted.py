"""Flashback's part: the more samples of a class a model has learned from, the more it is trusted.

The trust is by class.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from rayfed import losses
from rayfed.base.values import Ge, Gt, Le
from rayfed.methods.at_server import AT_ONCE, descend_on, samples_of, trainable, trained
from rayfed.methods.part import Part
from rayfed.methods.views import Batch, ClientView, Fit, Run, ServerView, Step
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import parameters_of


@dataclass(frozen=True)
class CountedDistill(Part):
    """Distil at the clients and at the server, with each class weighed by label counts.

    Flashback (Aljahdali et al., 2024).

    arXiv:2402.05558, from memory. At a client, the global model teaches class `c` with the weight
    `v_c / (v_c + n_c)`. At the server, the average learns the labels of the auxiliary set. It also
    learns from the clients' models and the last global model, whose softmaxes are weighed by `n_c`
    and by `v_c` over the sum of all. `v` adds up the clients' counts: each time that a client
    trains, a share `gamma` of its counts is added, until all its counts are in.
    """

    changes_average: ClassVar[bool] = True
    gamma: Annotated[
        float, Gt(0), Le(1), "share of a client's label counts that is added each time"
    ] = 0.1
    steps: Annotated[int, Ge(0), "steps on the server in each round"] = 100
    lr: Annotated[float, Gt(0), "learning rate of these steps (Adam)"] = 1e-3
    batch_size: Annotated[int, Ge(1), "images per step"] = 128
    auxiliary_per_class: Annotated[int, Ge(1), ("samples of each class that the server keeps")] = 64  # type: ignore[misc]

    def tell(self, v: Tensor | None, server: ServerView, surveyed: None) -> tuple[Tensor, Tree]:
        v = torch.zeros(server.num_classes, dtype=torch.float64) if v is None else v
        return v, {"images": samples_of(server)[0], "v": v.float()}

    def begin(self, client: ClientView) -> Tensor | None:
        v = client.payload["v"]
        return v / (v + client.label_counts).clamp(min=1e-9) if v.any() else None

    def loss(self, batch: Batch, class_weights: Tensor | None) -> Tensor | None:
        if class_weights is None:
            return None
        return losses.class_weighted_distill(batch.logits, batch.teacher.logits, class_weights)

    def report(self, client: ClientView, local: object, fit: Fit) -> tuple[Tree, float]:
        known_share = client.memory or 0.0
        added_share = min(self.gamma, 1 - known_share)
        counts = client.label_counts
        taught = counts * softmax(fit.model, client.run, client.payload["images"])
        summand = {"n": counts, "added": added_share * counts, "taught": taught}
        return summand, known_share + added_share

    def update(self, v: Tensor, total: Tree, step: Step) -> tuple[Tensor, Step]:
        after = v + total["added"]
        if not self.steps:
            return after, step
        server, model = step.server, trainable(step, step.averaged)
        images, labels = samples_of(server)
        taught = total["taught"] + v * softmax(server.global_model, server.run, images)
        # The rows do not sum to 1, because each class is divided by its own sum.
        target = (taught / (total["n"] + v).clamp(min=1e-9)).float()  # (A, C)

        def loss(rows: Tensor) -> Tensor:
            logits = server.run(model, images[rows]).logits
            distilled = -(target[rows] * logits.log_softmax(dim=1)).sum(dim=1).mean()
            return losses.cross_entropy(logits, labels[rows]) + distilled

        descend_on(self, server.round, parameters_of(model), loss, len(images))
        return after, step.changed(trained(model, step))


def softmax(model: torch.nn.Module, run: Run, images: Tensor) -> Tensor:
    """Return a model's probabilities on images, (A, C), in float64."""
    with torch.no_grad():
        logits = [run(model, piece).logits.double() for piece in images.split(AT_ONCE)]
        return torch.cat([piece.softmax(dim=1) for piece in logits])
