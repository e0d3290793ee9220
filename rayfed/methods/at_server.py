"""Parts with which the server itself trains, after the clients: on its own images, or on features
that it draws.

Both train in eval mode, so that BatchNorm keeps its averaged statistics, and with Adam, anew in
each round. The server trains where the rounds are played: on the CPU, with the job's number of
threads.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from rayfed import losses
from rayfed.base.errors import Diverged, InputError
from rayfed.base.values import Ge, Gt, Lt
from rayfed.clients.batches import batches
from rayfed.clients.optimizers import stepper
from rayfed.clients.settings import Training
from rayfed.methods.part import Part
from rayfed.methods.personal import head_parameters
from rayfed.methods.requirements import require_features
from rayfed.methods.views import ClientView, Fit, ServerView, Step
from rayfed.tensors.trees import Tree, copied
from rayfed.tensors.weights import Weights, parameters_of

log = logging.getLogger(__name__)
# Images per forward pass; a constant, since it can change the last bits.
AT_ONCE = 250


@dataclass(frozen=True)
class EnsembleDistill(Part):
    """The average distilled from the clients' mean logits on the server's images.

    FedDF (Lin et al., NeurIPS 2020).

    Algorithm 1, as in the authors' code: plain mean of the logits, KL divergence, Adam, and the
    student that was best on held-out images, by their labels, of those after each pass; the average
    is the first. Each step is on a batch of the auxiliary set, which the clients get anew in each
    round, to report their logits on it.
    """

    changes_average: ClassVar[bool] = True
    steps: Annotated[int, Ge(0), "steps on the server in each round; 0 is FedAvg"] = 100
    lr: Annotated[float, Gt(0), "learning rate of these steps (Adam)"] = 1e-3
    batch_size: Annotated[int, Ge(1), "images per step"] = 128
    tau: Annotated[float, Gt(0), "temperature"] = 1.0
    held_out: Annotated[
        float, Ge(0), Lt(1), "share of the images that choose the best student; 0: the last one"
    ] = 0.2
    auxiliary_per_class: Annotated[int, Ge(1), ("samples of each class that the server keeps")] = 64  # type: ignore[misc]

    def tell(self, state: None, server: ServerView, surveyed: None) -> tuple[None, Tensor]:
        return None, samples_of(server)[0]

    def report(self, client: ClientView, images: Tensor, fit: Fit) -> tuple[Tree, None]:
        with torch.no_grad():
            logits = torch.cat(
                [client.run(fit.model, some).logits for some in images.split(AT_ONCE)]
            )
        return {"clients": 1, "logits": logits}, None

    def update(self, state: None, total: Tree, step: Step) -> tuple[None, Step]:
        if not self.steps:
            return None, step
        (images, labels), teacher = samples_of(step.server), total["logits"] / total["clients"]
        model, run = trainable(step, step.averaged), step.server.run
        index = torch.arange(len(images))
        # Evenly, as classes are in turn.
        held = ((index + 1) * self.held_out).floor() > (index * self.held_out).floor()
        to_train = index[~held]
        accuracy, best = -1.0, trained(model, step)

        def loss(rows: Tensor) -> Tensor:
            return losses.distill(
                run(model, images[to_train[rows]]).logits, teacher[to_train[rows]], tau=self.tau
            )

        def keep_best(taken: int) -> None:
            nonlocal accuracy, best
            if taken != self.steps and taken % -(-len(to_train) // self.batch_size):
                return
            with torch.no_grad():
                right = (
                    (run(model, images[held]).logits.argmax(dim=1) == labels[held])
                    .double()
                    .mean()
                    .item()
                )
            if right > accuracy or not held.any():
                accuracy, best = right, copied(trained(model, step))

        descend_on(self, step.server.round, parameters_of(model), loss, len(to_train), keep_best)
        return None, step.changed(best)


@dataclass(frozen=True)
class HeadCalibration(Part):
    """A head trained anew on features that are drawn for each class.

    CCVR (Luo et al., NeurIPS 2021).

    In place of an average, for the last round of a method that changes in time: no client trains in
    it, and all other weights stay. Each class has a Gaussian, with the mean and the covariance of
    the cohort's features under the round's global model, for whose sums a client sends C x D x D
    doubles. A class that the cohort lacks is left out.
    """

    slot: ClassVar[str] = "average"
    features_per_class: Annotated[int, Ge(1), "features to draw for each class (M_c)"] = 1000
    steps: Annotated[int, Ge(1), "steps on them, from the old head"] = 500
    lr: Annotated[float, Gt(0), "learning rate of these steps (Adam)"] = 1e-2
    batch_size: Annotated[int, Ge(1), "features per step"] = 128

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)
        if not head_parameters(model):
            raise InputError(
                "head_calibration: the model has no module `head` that trains, so there is nothing "
                "to calibrate; give its last layer that name, and do not freeze it"
            )

    def survey(self, client: ClientView) -> Tree:
        """By class: the number of the client's samples (C,), sums of features (C, D), of their
        products (C, D, D).
        """
        outputs, labels = client.all_outputs(client.global_model)
        features = outputs.of_features.double()
        sums = features.new_zeros(client.num_classes, features.shape[1])
        # Large: gigabytes with 2048 features.
        products = features.new_zeros(*sums.shape, features.shape[1])
        for c in labels.unique().tolist():
            own = features[labels == c]
            sums[c] = own.sum(dim=0)
            products[c] = own.T @ own
        return {"counts": client.label_counts, "sums": sums, "products": products}

    def tell(self, state: None, server: ServerView, surveyed: Tree) -> tuple[Tree, None]:
        # Until `update`.
        return surveyed, None

    def update(self, surveyed: Tree, total: None, step: Step) -> tuple[None, Step]:
        counts = surveyed["counts"]
        # The classes of the cohort.
        held = counts.nonzero().flatten()
        absent = (counts == 0).nonzero().flatten().tolist()
        if absent:
            numbers = ", ".join(map(str, absent))
            log.warning(
                "round %d: head_calibration has no example of the classes numbered %s",
                step.server.round,
                numbers,
            )
        features = torch.cat([self._drawn(surveyed, c) for c in held.tolist()])
        # Among the classes held.
        labels = torch.arange(len(held)).repeat_interleave(self.features_per_class)
        model = trainable(step, step.weights)

        def loss(rows: Tensor) -> Tensor:
            return losses.cross_entropy(
                model.get_submodule("head")(features[rows])[:, held], labels[rows]
            )

        descend_on(self, step.server.round, head_parameters(model), loss, len(features))
        return None, step.towards(step.weights).changed(trained(model, step))

    def _drawn(self, surveyed: Tree, c: int) -> Tensor:
        """Features of a class, (features_per_class, D).

        The root is symmetric: it alone does not depend on signs.
        """
        mean, covariance = gaussian(
            surveyed["counts"][c].item(), surveyed["sums"][c], surveyed["products"][c]
        )
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt() @ vectors.T
        return (
            mean + torch.randn(self.features_per_class, len(mean), dtype=torch.float64) @ root
        ).float()


def gaussian(n: int, sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """The mean (D,) and the covariance (D, D) of `n` features, from their sum and the sum of their
    outer products.

    The covariance has the divisor `n - 1`; that of a single feature is 0.

    >>> x = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
    >>> gaussian(2, x.sum(dim=0), x.T @ x)
    (tensor([2., 1.]), tensor([[2., 2.],
            [2., 2.]]))
    """
    mean = sums / n
    return mean, (products - n * torch.outer(mean, mean)) / max(1, n - 1)


def samples_of(server: ServerView) -> tuple[Tensor, Tensor]:
    """The auxiliary set: images (A, c, h, w) and labels (A,)."""
    images, labels = zip(*server.samples(), strict=True)
    return torch.cat(images), torch.cat(labels)


def trainable(step: Step, weights: Weights) -> nn.Module:
    """The model with these weights, in eval mode, for the server to train; what the job freezes
    stays frozen.
    """
    model = copy.deepcopy(step.server.frozen(weights))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in step.trainable)
    return model


def trained(model: nn.Module, step: Step) -> Weights:
    """The model's parameters that the weights have, without a gradient. Not BatchNorm's buffers."""
    parameters = dict(model.named_parameters())
    return {name: p.detach() for name, p in parameters.items() if name in step.weights}


def descend_on(
    part: Any,
    round: int,
    parameters: Weights,
    loss: Callable[[Tensor], Tensor],
    count: int,
    after: Callable[[int], object] = lambda taken: None,
) -> None:
    """A part's steps, in place, on the loss of batches of rows 0 to `count - 1`, which each pass
    shuffles again.

    The part has `steps`, `lr` and `batch_size`. `after` is called with the number of steps that are
    taken: 0 at first.
    """
    training = Training(
        optimizer="adam", lr=part.lr, local_steps=part.steps, batch_size=part.batch_size
    )
    step = stepper(parameters, training, round=1)
    after(0)
    # Seeded by the round.
    for index, rows in enumerate(batches(count, training, torch.default_generator)):
        value = loss(rows)
        if not torch.isfinite(value):
            raise Diverged(
                f"the server's loss became {value.item()} in round {round}, step {index + 1} of "
                f"{part.steps}, with {part!r}; try a smaller lr"
            )
        step(value)
        after(index + 1)
