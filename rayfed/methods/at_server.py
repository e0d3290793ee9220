"""Parts with which the server trains after the clients, on images or on features that it draws.

Both train in eval mode, so that BatchNorm keeps its averaged statistics, and with Adam, anew in
each round. The server trains in the process that runs the rounds: on the CPU, with the job's number
of threads.
"""

import copy
import logging
import math
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
# The number of images per forward pass. It is a constant, because it can change the last bits.
AT_ONCE = 250


@dataclass(frozen=True)
class EnsembleDistill(Part):
    """Distil the clients' mean logits on the server's images into the average.

    FedDF (Lin et al., NeurIPS 2020), algorithm 1, as in the authors' code.

    The logits have a plain mean, the loss is the KL divergence, and the optimizer is Adam. Each
    step is on a batch of the auxiliary set. The clients receive this set in each round, and report
    their logits on it. The student is measured before the first step and after each pass, on
    held-out images with their labels. The best one is the new global model.
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
            logits = [client.run(fit.model, piece).logits for piece in images.split(AT_ONCE)]
        return {"clients": 1, "logits": torch.cat(logits)}, None

    def update(self, state: None, total: Tree, step: Step) -> tuple[None, Step]:
        if not self.steps:
            return None, step
        images, labels = samples_of(step.server)
        teacher = total["logits"] / total["clients"]
        model, run = trainable(step, step.averaged), step.server.run
        index = torch.arange(len(images))
        # The held-out images are spread evenly, because the images are in the order of the classes.
        held_out = ((index + 1) * self.held_out).floor() > (index * self.held_out).floor()
        to_train = index[~held_out]
        steps_per_pass = math.ceil(len(to_train) / self.batch_size)
        best_accuracy, best = -1.0, trained(model, step)

        def loss(rows: Tensor) -> Tensor:
            batch = to_train[rows]
            return losses.distill(run(model, images[batch]).logits, teacher[batch], tau=self.tau)

        def keep_best(steps: int) -> None:
            nonlocal best_accuracy, best
            if steps != self.steps and steps % steps_per_pass:
                return
            with torch.no_grad():
                predictions = run(model, images[held_out]).logits.argmax(dim=1)
            accuracy = (predictions == labels[held_out]).double().mean().item()
            if accuracy > best_accuracy or not held_out.any():
                best_accuracy, best = accuracy, copied(trained(model, step))

        descend_on(self, step.server.round, parameters_of(model), loss, len(to_train), keep_best)
        return None, step.changed(best)


@dataclass(frozen=True)
class HeadCalibration(Part):
    """Train the head on features that the server draws for each class.

    CCVR (Luo et al., NeurIPS 2021).

    It takes the place of an average in the last round of a method that changes in time. No client
    trains in this round, and all other weights stay. The features of a class are drawn from a
    Gaussian. Its mean and covariance are those of the sampled clients' features under the round's
    global model. For these a client sends C x D x D doubles. A class that the sampled clients lack
    is left out.
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
        """Return, by class, the client's number of samples, and sums over their features.

        The numbers are (C,), the sums of the features (C, D), and those of their outer products
        (C, D, D).
        """
        outputs, labels = client.all_outputs(client.global_model)
        features = outputs.of_features.double()
        sums = features.new_zeros(client.num_classes, features.shape[1])
        # These are gigabytes with 2048 features.
        products = features.new_zeros(*sums.shape, features.shape[1])
        for c in labels.unique().tolist():
            of_class = features[labels == c]
            sums[c] = of_class.sum(dim=0)
            products[c] = of_class.T @ of_class
        return {"counts": client.label_counts, "sums": sums, "products": products}

    def tell(self, state: None, server: ServerView, surveyed: Tree) -> tuple[Tree, None]:
        # The sums are the state until `update`, which needs them.
        return surveyed, None

    def update(self, surveyed: Tree, total: None, step: Step) -> tuple[None, Step]:
        counts = surveyed["counts"]
        present = counts.nonzero().flatten()
        absent = (counts == 0).nonzero().flatten().tolist()
        if absent:
            numbers = ", ".join(map(str, absent))
            log.warning(
                "round %d: head_calibration has no example of the classes numbered %s",
                step.server.round,
                numbers,
            )
        features = torch.cat([self._drawn(surveyed, c) for c in present.tolist()])
        # A label is the position of its class among the classes that are present.
        labels = torch.arange(len(present)).repeat_interleave(self.features_per_class)
        model = trainable(step, step.weights)

        def loss(rows: Tensor) -> Tensor:
            logits = model.get_submodule("head")(features[rows])
            return losses.cross_entropy(logits[:, present], labels[rows])

        descend_on(self, step.server.round, head_parameters(model), loss, len(features))
        return None, step.towards(step.weights).changed(trained(model, step))

    def _drawn(self, surveyed: Tree, c: int) -> Tensor:
        """Draw features of a class, (features_per_class, D).

        The root of the covariance is the symmetric one: only this root does not depend on the signs
        of the eigenvectors.
        """
        count = surveyed["counts"][c].item()
        mean, covariance = gaussian(count, surveyed["sums"][c], surveyed["products"][c])
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt() @ vectors.T
        drawn = torch.randn(self.features_per_class, len(mean), dtype=torch.float64)
        return (mean + drawn @ root).float()


def gaussian(n: int, sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (D,) and the covariance (D, D) of `n` features.

    `sums` (D,) is their sum, and `products` (D, D) the sum of their outer products. The covariance
    has the divisor `n - 1`; for a single feature it is 0.

    >>> x = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
    >>> gaussian(2, x.sum(dim=0), x.T @ x)
    (tensor([2., 1.]), tensor([[2., 2.],
            [2., 2.]]))
    """
    mean = sums / n
    return mean, (products - n * torch.outer(mean, mean)) / max(1, n - 1)


def samples_of(server: ServerView) -> tuple[Tensor, Tensor]:
    """Return the auxiliary set: images (A, c, h, w) and labels (A,)."""
    images, labels = zip(*server.samples(), strict=True)
    return torch.cat(images), torch.cat(labels)


def trainable(step: Step, weights: Weights) -> nn.Module:
    """Return the model with these weights, in eval mode, for the server to train.

    Parameters that the job freezes stay frozen.
    """
    model = copy.deepcopy(step.server.frozen(weights))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in step.trainable)
    return model


def trained(model: nn.Module, step: Step) -> Weights:
    """Return the model's parameters, but no buffers, that are in the weights, without gradients."""
    parameters = dict(model.named_parameters())
    return {name: p.detach() for name, p in parameters.items() if name in step.weights}


def descend_on(
    part: Any,
    round: int,
    parameters: Weights,
    loss: Callable[[Tensor], Tensor],
    count: int,
    after: Callable[[int], object] = lambda steps: None,
) -> None:
    """Take a part's `steps` steps with Adam, which change the parameters in place.

    Each step is on the loss of a batch of the rows 0 to `count - 1`, which are shuffled for each
    pass. The part also has `lr` and `batch_size`. `after` is called before the first step and after
    each step, with the number of steps until then. Raise `Diverged` if a loss is not finite.
    """
    training = Training(
        optimizer="adam", lr=part.lr, local_steps=part.steps, batch_size=part.batch_size
    )
    step = stepper(parameters, training, round=1)
    after(0)
    # The round has seeded the default generator.
    for index, rows in enumerate(batches(count, training, torch.default_generator)):
        value = loss(rows)
        if not torch.isfinite(value):
            raise Diverged(
                f"the server's loss became {value.item()} in round {round}, step {index + 1} of "
                f"{part.steps}, with {part!r}; try a smaller lr"
            )
        step(value)
        after(index + 1)
