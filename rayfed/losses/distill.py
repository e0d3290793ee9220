"""Losses that keep a student's logits near a teacher's. Shapes as in the package's docstring.

The teacher is a constant everywhere: no gradient reaches it.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Literal["adaptive", "forcible", "none"]


def distill(logits: Tensor, teacher_logits: Tensor, *, tau: float) -> Tensor:
    """`tau^2 KL(softmax(teacher / tau) || softmax(student / tau))`.

    Hinton et al., "Distilling the Knowledge in a Neural Network" (2015); as a local objective:
    FedLSD, FedNTD eq. 3.

    >>> logits = torch.tensor([[2.0, 0.0]])
    >>> distill(logits, logits, tau=1.0)
    tensor(0.)
    """
    student = F.log_softmax(logits / tau, dim=1)
    teacher = F.log_softmax(teacher_logits.detach().to(logits) / tau, dim=1)
    return tau**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def squared_error(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Squared gap of the logits, summed over the classes (FedSSD's loss with a constant weight, its
    Table 3).
    """
    return (teacher_logits.detach().to(logits) - logits).square().sum(dim=1).mean()


def not_true_distill(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, tau: float
) -> Tensor:
    """`distill` over the C-1 classes other than the label, so that the label's logit is left to the
    cross-entropy.

    Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
    Learning" (NeurIPS 2022), eq. 10 and 11. The gradient on the true logit is exactly 0.
    """
    student, teacher = _others(labels, logits, teacher_logits)
    return distill(student, teacher, tau=tau)


def not_true_squared_error(logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Tensor:
    """Mean squared gap of the C-1 not-true logits (FedNTD, appendix L)."""
    student, teacher = _others(labels, logits, teacher_logits.detach().to(logits))
    return F.mse_loss(student, teacher)


def majority_labels(label_counts: Tensor) -> Tensor:
    """The classes of which a client holds more than `n / C` images: bool (C,) from counts (C,).

    Lu et al., "Federated Learning with Label-Masking Distillation" (ACM MM 2023), section 3.2. The
    paper's inequality is garbled; the authors' code does this.

    >>> majority_labels(torch.tensor([6, 2, 0, 0]))
    tensor([ True, False, False, False])
    """
    return label_counts * label_counts.numel() > label_counts.sum()


def label_masked_distill(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, majority: Tensor, *, tau: float
) -> Tensor:
    """Distillation from a teacher that is masked on the label and on the client's majority classes.

    FedLMD, eq. 3 to 6, with `majority` (C,) from `majority_labels`. The student's softmax is over
    all classes but the label: majority classes stay in it, and are pushed down because the teacher
    gives them nothing. The teacher's is over the classes that are neither label nor majority; eq. 3
    alone would leave it mass on the label, where the student has none, and the divergence would be
    infinite. A sample for which no class remains contributes 0.
    """
    minority = ~majority.to(logits.device).expand_as(logits)
    kept, own, taught = _others(labels, minority, logits, teacher_logits.detach().to(logits))
    student = F.log_softmax(own / tau, dim=1)
    teacher = F.log_softmax((taught / tau).masked_fill(~kept, torch.finfo(logits.dtype).min), dim=1)
    divergence = torch.where(kept, teacher.exp() * (teacher - student), 0)
    return tau**2 * divergence.sum(dim=1).mean()


def vacant_class_distill(logits: Tensor, teacher_logits: Tensor, vacant: Tensor) -> Tensor:
    """`distill` over the classes that a client has no sample of, given by their indices `vacant`,
    (V,), V > 0.

    Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning" (AAAI 2025), their
    vacant-class distillation; no temperature. The other logits have no gradient.
    """
    return distill(logits[:, vacant], teacher_logits[:, vacant], tau=1.0)


def class_weighted_distill(logits: Tensor, teacher_logits: Tensor, class_weights: Tensor) -> Tensor:
    """`sum_c a_c p_c (log p_c - log q_c)`: the divergence from the teacher's softmax `p`, each
    class weighed, (C,).

    Aljahdali et al., "Flashback: Understanding and Mitigating Forgetting in Federated Learning"
    (2024), its dynamic distillation. With weights of 1 it is `distill` at `tau = 1`; with others it
    may be negative.
    """
    student = F.log_softmax(logits, dim=1)
    teacher = F.log_softmax(teacher_logits.detach().to(logits), dim=1)
    return (
        (class_weights.detach().to(logits) * teacher.exp() * (teacher - student)).sum(dim=1).mean()
    )


def class_adaptive_weights(
    teacher_logits: Tensor, labels: Tensor, num_classes: int, *, low: float, high: float, tau: float
) -> Tensor:
    """How much to trust the teacher on each class: (C,), linear from `low` to `high` in its mean
    `p_y`.

    He et al., "Class-Wise Adaptive Self Distillation for Federated Learning on Non-IID Data" (AAAI
    2022), eq. 3, where `phi = p_y - sum of the others = 2 p_y - 1`. Logits (N, C) and labels (N,)
    are the client's whole data; `p` is the softmax at `tau`. A class without samples gets `low`.
    """
    p_label = F.softmax(teacher_logits.detach() / tau, dim=1).gather(1, labels[:, None])[:, 0]
    counts = torch.bincount(labels, minlength=num_classes)
    sums = torch.zeros(num_classes, dtype=p_label.dtype, device=p_label.device).index_add_(
        0, labels, p_label
    )
    return low + (high - low) * sums / counts.clamp(min=1)


def class_adaptive_distill(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, class_weights: Tensor, *, tau: float
) -> Tensor:
    """`(1 - a_y) CE + a_y L_d` sample by sample, with `a` (C,) from `class_adaptive_weights`
    (FedCAD eq. 1, 2).

    `L_d` is the cross-entropy of student and teacher at `tau`, times `tau^2`. This is the whole
    local objective.
    """
    weight = class_weights.detach().to(logits)[labels]
    hard = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - weight) * hard).mean() + (
        weight * _soft_cross_entropy(logits, teacher_logits, tau)
    ).mean()


def selective_distill(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    credibility: Tensor,
    *,
    m_max: float,
    inside_norm: bool,
) -> Tensor:
    """`sum_k M_k (zt_k - z_k)^2`: logits held to the teacher's where it is credible.

    He et al., "Learning Critically: Selective Self-Distillation in Federated Learning on Non-IID
    Data" (IEEE Trans. Big Data, 2022), eq. 2 to 6. `credibility` (C,) is the teacher's on each
    class, M_class; on a sample it is `1 - sqrt(1 - p_y)`; `M = m_max * max(0, M_class * M_sample -
    0.1)`. Eq. 3 prints `(M_k (zt_k - z_k))^2`, which `inside_norm=True` gives; at the paper's
    `m_max` that is FedAvg.
    """
    teacher_logits = teacher_logits.detach().to(logits)
    p_label = F.softmax(teacher_logits, dim=1).gather(1, labels[:, None])  # (B, 1)
    on_sample = 1 - (1 - p_label).clamp(min=0).sqrt()
    weight = m_max * (credibility.detach().to(logits)[None, :] * on_sample - 0.1).clamp(
        min=0
    )  # (B, C)
    gap = teacher_logits - logits
    return ((weight * gap).square() if inside_norm else weight * gap.square()).sum(dim=1).mean()


def prototype_similarity_distill(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    prototypes: Tensor | None,
    *,
    tau: float,
    mask: Mask,
    released: bool = False,
) -> Tensor:
    """Distillation from a teacher whose logits are scaled by the student's similarity to each
    class's prototype.

    Yan et al., "Rethinking Client Drift in Federated Learning: A Logit Perspective" (2023), eq. 6
    to 15. `prototypes` (C, C) holds the mean teacher logits of each class, a zero row for a class
    that no client holds; None leaves the teacher as it is. `delta = softmax_c(cos(z, P_c))` is part
    of the target, so no gradient goes through it. `mask` drops samples on which the raw teacher is
    poor: it keeps samples whose label has a probability above `1/C` (`adaptive`), or the largest
    (`forcible`). The mean is over the whole batch, dropped samples included.

    `released` follows the authors' code (IAMJackYan/FedCSD) in three points: delta has a gradient;
    the loss is the KL divergence, whose entropy of the target counts because of that gradient; the
    mask looks at the scaled logits.
    """
    teacher_logits = teacher_logits.detach().to(logits)
    target = teacher_logits
    if prototypes is not None:
        similarity = F.cosine_similarity(
            logits[:, None, :], prototypes.detach().to(logits)[None, :, :], dim=2
        )
        target = F.softmax(similarity, dim=1) * teacher_logits
    # `_soft_cross_entropy` lets no gradient through its target, `_divergence` does.
    loss = (_divergence if released else _soft_cross_entropy)(logits, target, tau)  # (B,)
    return (loss * trusted(target.detach() if released else teacher_logits, labels, mask)).mean()


def trusted(teacher_logits: Tensor, labels: Tensor, mask: Mask) -> Tensor:
    """The samples on which FedCSD's mask keeps the teacher, bool (B,)."""
    if mask == "adaptive":
        return (
            F.softmax(teacher_logits, dim=1).gather(1, labels[:, None])[:, 0]
            > 1 / teacher_logits.shape[1]
        )
    if mask == "forcible":
        return teacher_logits.argmax(dim=1) == labels
    return torch.ones_like(labels, dtype=torch.bool)


def _others(labels: Tensor, *values: Tensor) -> list[Tensor]:
    """Of each tensor the values of the classes other than a sample's label, in order: (B, C-1) of
    (B, C).

    Not by `gather`: the deterministic form of its gradient sorts, which took 0.7 ms of each step on
    a GPU.
    """
    before = torch.arange(values[0].shape[1] - 1, device=labels.device) < labels[:, None]
    return [torch.where(before, each[:, :-1], each[:, 1:]) for each in values]


def _soft_cross_entropy(logits: Tensor, teacher_logits: Tensor, tau: float) -> Tensor:
    """`-tau^2 sum_k softmax(teacher / tau)_k log softmax(student / tau)_k` of each sample: (B,)."""
    target = F.softmax(teacher_logits.detach().to(logits) / tau, dim=1)
    return -(tau**2) * (target * F.log_softmax(logits / tau, dim=1)).sum(dim=1)


def _divergence(logits: Tensor, target_logits: Tensor, tau: float) -> Tensor:
    """`tau^2 KL(softmax(target / tau) || softmax(student / tau))` of each sample, (B,); the target
    takes a gradient.
    """
    student, target = F.log_softmax(logits / tau, dim=1), F.log_softmax(target_logits / tau, dim=1)
    return tau**2 * (target.exp() * (target - student)).sum(dim=1)
