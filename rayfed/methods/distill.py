"""Parts that hold a client's logits near a teacher's logits.

So a client keeps knowledge of which it has no data. The teacher is the round's global model, unless
a part says otherwise.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rayfed import losses
from rayfed.base.errors import InputError
from rayfed.base.values import Ge, Gt, Le, Lt
from rayfed.measures import metrics
from rayfed.methods.part import Part
from rayfed.methods.views import Batch, ClientView, ServerView, Step
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights, combine, like

Beta = Annotated[float, Ge(0), "weight of the distillation; 0 is FedAvg"]
Tau = Annotated[float, Gt(0), "temperature of both softmaxes"]
MASK = (
    "keep samples whose label the teacher gives a probability above 1/C, or the largest "
    "probability, or all samples"
)


@dataclass(frozen=True)
class Distill(Part):
    """Distil the teacher's softmax over all classes, as a term of the local objective.

    Knowledge distillation (Hinton et al., 2015).
    """

    beta: Beta = 1.0
    tau: Tau = 1.0
    form: Annotated[
        Literal["kl", "mse"], "divergence of softmaxes, or summed squared gap of logits"
    ] = "kl"

    def loss(self, batch: Batch, local: None) -> Tensor:
        if self.form == "mse":
            term = losses.squared_error(batch.logits, batch.teacher.logits)
        else:
            term = losses.distill(batch.logits, batch.teacher.logits, tau=self.tau)
        return losses.scaled(self.beta, term)


@dataclass(frozen=True)
class NotTrueDistill(Part):
    """Distil over the classes other than the label.

    FedNTD (Lee et al., NeurIPS 2022), eq. 10 and 11.

    `mix` blends it with plain distillation (eq. 17, 18), `form = "mse"` compares logits (appendix
    L), and `teacher = false` uses a uniform teacher over the not-true classes.
    """

    beta: Beta = 1.0
    tau: Tau = 1.0
    mix: Annotated[
        float, Ge(0), Le(1), "share of not-true distillation; the rest is plain distillation"
    ] = 1.0
    form: Annotated[
        Literal["kl", "mse"], "divergence of softmaxes, or mean squared gap of logits"
    ] = "kl"
    teacher: Annotated[
        bool, "false: no teacher; distil towards a uniform distribution, without its forward pass"
    ] = True

    def loss(self, batch: Batch, local: None) -> Tensor:
        teacher = batch.teacher.logits if self.teacher else torch.zeros_like(batch.logits)
        if self.form == "mse":
            term = losses.not_true_squared_error(batch.logits, teacher, batch.labels)
        else:
            term = losses.not_true_distill(batch.logits, teacher, batch.labels, tau=self.tau)
        if self.mix < 1:
            term = self.mix * term
            plain = losses.distill(batch.logits, teacher, tau=self.tau)
            term = term + (1 - self.mix) * plain
        return losses.scaled(self.beta, term)


@dataclass(frozen=True)
class LabelMaskedDistill(Part):
    """Distil a teacher whose softmax leaves out the client's majority classes.

    FedLMD (Lu et al., ACM MM 2023), eq. 3-6.

    `teacher = false` is FedLMD-Tf (eq. 7, 8): uniform over the classes that remain. The paper's
    inequality for the majority is garbled; `rayfed.losses.majority_labels` states how we read it.
    """

    beta: Beta = 1.0
    tau: Tau = 1.0
    teacher: Annotated[
        bool, "false: no teacher; distil towards a uniform distribution, without its forward pass"
    ] = True

    def begin(self, client: ClientView) -> Tensor:
        return losses.majority_labels(client.label_counts)

    def loss(self, batch: Batch, majority: Tensor) -> Tensor:
        teacher = batch.teacher.logits if self.teacher else torch.zeros_like(batch.logits)
        term = losses.label_masked_distill(
            batch.logits, teacher, batch.labels, majority, tau=self.tau
        )
        return losses.scaled(self.beta, term)


@dataclass(frozen=True)
class VacantClassDistill(Part):
    """Distil over the classes that the client lacks.

    FedVLS (Guo et al., AAAI 2025).

    A client that lacks fewer than two classes has no term, because a softmax over a single class is
    constant.
    """

    beta: Beta = 0.1

    def begin(self, client: ClientView) -> Tensor:
        return (client.label_counts == 0).nonzero()[:, 0]

    def loss(self, batch: Batch, vacant: Tensor) -> Tensor | None:
        if len(vacant) < 2:
            return None
        return self.beta * losses.vacant_class_distill(batch.logits, batch.teacher.logits, vacant)


@dataclass(frozen=True)
class SelectiveDistill(Part):
    """Hold logits near the teacher's where the teacher is credible, by class and by sample.

    FedSSD (He et al., 2022), eq. 2-6.

    The server measures the global model's confusion at the start of each round, on an auxiliary set
    that is withdrawn from the clients. M weighs the squared gap. With `inside_norm = true` M is
    squared too, as eq. 3 prints it. At the paper's values the method is then FedAvg: the term's
    gradient is some 1e-5 of the cross-entropy's.
    """

    m_max: Annotated[float, Ge(0), "weight of a perfectly credible logit; 0 is FedAvg"] = 0.01
    inside_norm: Annotated[bool, "weigh the gap before it is squared, as the paper prints it"] = (
        False
    )
    auxiliary_per_class: Annotated[int, Ge(1), ("samples of each class that the server keeps")] = 64  # type: ignore[misc]

    def tell(self, state: None, server: ServerView, surveyed: None) -> tuple[None, Tensor]:
        confusion = np.zeros((server.num_classes, server.num_classes), dtype=np.int64)
        for outputs, labels in server.outputs(server.global_model):
            predictions = outputs.logits.argmax(dim=1).numpy()
            confusion += metrics.confusion_matrix(labels.numpy(), predictions, server.num_classes)
        return None, torch.from_numpy(metrics.credibility(confusion)).float()

    def loss(self, batch: Batch, credibility: Tensor) -> Tensor:
        teacher = batch.teacher.logits
        return losses.selective_distill(
            batch.logits,
            teacher,
            batch.labels,
            credibility,
            m_max=self.m_max,
            inside_norm=self.inside_norm,
        )


@dataclass(frozen=True)
class PrototypeSimilarityDistill(Part):
    """Distil an averaged teacher, scaled by the similarity of logits to class prototypes.

    FedCSD (Yan et al., 2023), eq. 6 to 15.

    The teacher is a moving average of all global models, the initial model included. Before
    training it is sent to the sampled clients, which return its logits summed by class; the
    prototypes are the means. The defaults are for CIFAR-100 and FEMNIST; Office-Caltech-10 and the
    code have `mu = 0.5, tau = 4`. Each ingredient can be turned off (Tables III, IV).

    `released` follows the authors' code (IAMJackYan/FedCSD) where it differs: `(1 - mu) CE`, the KL
    divergence with a gradient through the similarity, the mask on the scaled logits, and each
    client's prototypes from its own samples.
    """

    mu: Annotated[
        float | None, Ge(0), "weight of the distillation; 0.001 (0.5 where released); 0 is FedAvg"
    ] = None
    tau: Annotated[float | None, Gt(0), "temperature of both softmaxes; 10 (4 where released)"] = (
        None
    )
    mask: Annotated[Literal["adaptive", "forcible", "none"], MASK] = "adaptive"
    similarity: Annotated[bool, "scale the teacher's logits by similarity to the prototypes"] = True
    decay: Annotated[
        float, Ge(0), Lt(1), "moving average of the teacher; 0: the last global model"
    ] = 0.9
    released: Annotated[bool, "the authors' code where it differs from their paper"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.released and self.weight > 1:
            raise InputError(
                f"prototype_similarity_distill: mu = {self.mu}, released = true: the released code "
                "weighs the cross-entropy by 1 - mu; take mu from 0 to 1, or released = false"
            )

    @property
    def weight(self) -> float:
        """`mu`, or its default."""
        if self.mu is not None:
            return self.mu
        return 0.5 if self.released else 0.001

    @property
    def temperature(self) -> float:
        """`tau`, or its default."""
        if self.tau is not None:
            return self.tau
        return 4.0 if self.released else 10.0

    def init(self, weights: Weights) -> Weights | None:
        # Without a moving average the teacher is the global model, which is sent anyway.
        return weights if self.decay else None

    def survey(self, client: ClientView) -> Tree:
        return self._sums(client) if self.similarity and not self.released else None

    def tell(
        self, teacher: Weights | None, server: ServerView, surveyed: Tree
    ) -> tuple[Weights | None, Tensor | None]:
        return teacher, None if surveyed is None else self._means(surveyed)

    def begin(self, client: ClientView) -> tuple[nn.Module, Tensor | None]:
        prototypes = client.payload
        if self.similarity and self.released:
            prototypes = self._means(self._sums(client)).to(client.label_counts.device)
        return self._teacher(client), prototypes

    def loss(self, batch: Batch, local: tuple[nn.Module, Tensor | None]) -> Tensor:
        model, prototypes = local
        teacher = batch.outputs_of(model).logits
        term = self.weight * losses.prototype_similarity_distill(
            batch.logits,
            teacher,
            batch.labels,
            prototypes,
            tau=self.temperature,
            mask=self.mask,
            released=self.released,
        )
        if self.released:
            # The released code has (1 - mu) CE + mu L, and the slot `supervise` adds the complete
            # CE. So mu CE is taken away here.
            return term - self.weight * losses.cross_entropy(batch.logits, batch.labels)
        # Fig. 5 draws the ratio of these two. The released code's mask looks at other logits, so
        # they are not noted for it.
        trusted = losses.trusted(teacher, batch.labels, self.mask)
        batch.note("filtered", 1 - trusted.float().mean())
        right = losses.trusted(teacher, batch.labels, "forcible")
        batch.note("teacher_wrong", 1 - right.float().mean())
        return term

    def update(
        self, teacher: Weights | None, total: None, step: Step
    ) -> tuple[Weights | None, Step]:
        if teacher is None:
            return None, step
        average = combine(
            lambda t, w: self.decay * t.double() + (1 - self.decay) * w.double(),
            teacher,
            step.averaged,
        )
        return like(average, teacher), step

    def _sums(self, client: ClientView) -> dict[str, Tensor]:
        """Sum the teacher's logits on the client's samples by class, (C, C).

        The counts of the samples (C,) come with the sums.
        """
        sums = torch.zeros(client.num_classes, client.num_classes, dtype=torch.float64)
        for outputs, labels in client.outputs(self._teacher(client)):
            sums.index_add_(0, labels.cpu(), outputs.logits.double().cpu())
        return {"sums": sums, "counts": client.label_counts}

    @staticmethod
    def _means(summed: Tree) -> Tensor:
        """Return the prototypes (C, C); a class without samples has a zero row."""
        counts = summed["counts"].cpu().clamp(min=1)
        return (summed["sums"] / counts[:, None]).float()

    def _teacher(self, client: ClientView) -> nn.Module:
        """Return the moving average of the global models, or the global model without one."""
        return client.frozen(client.weights if client.state is None else client.state)


@dataclass(frozen=True)
class PastTeachersDistill(Part):
    """Distil the mean of the last global models.

    FedGKD (Yao et al., 2021).

    The first round has no teacher, because the initial model is untrained.
    """

    beta: Beta = 0.1
    tau: Tau = 1.0
    buffer: Annotated[int, Ge(1), "global models to average"] = 5

    def init(self, weights: Weights) -> list[Weights]:
        return []

    def tell(
        self, past: list[Weights], server: ServerView, surveyed: None
    ) -> tuple[list[Weights], Tree]:
        if server.round == 1:
            return past, None
        past = [*past, server.weights][-self.buffer :]
        if len(past) == 1:
            # This model is the round's global model, which is sent anyway.
            return past, {"teacher": None}
        mean = combine(lambda *models: sum(model.double() for model in models) / len(models), *past)
        return past, {"teacher": like(mean, server.weights)}

    def begin(self, client: ClientView) -> nn.Module | None:
        if client.payload is None:
            return None
        teacher = client.payload["teacher"]
        return client.frozen(client.weights if teacher is None else teacher)

    def loss(self, batch: Batch, teacher: nn.Module | None) -> Tensor | None:
        if teacher is None:
            return None
        teacher_logits = batch.outputs_of(teacher).logits
        return self.beta * losses.distill(batch.logits, teacher_logits, tau=self.tau)
