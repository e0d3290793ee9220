"""Losses that keep a student's logits near a teacher's logits.

Shapes are as in the package's docstring. The teacher is a constant everywhere: no gradient reaches
it.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.losses.factors import scaled, softened

Mask = Literal["adaptive", "forcible", "none"]


def distill(logits: Tensor, teacher_logits: Tensor, *, tau: float) -> Tensor:
    """Return the divergence of the student's softmax from the teacher's softmax.

    `tau^2 KL(softmax(teacher / tau) || softmax(student / tau))`, for (B, C) logits of both.

    Hinton et al., "Distilling the Knowledge in a Neural Network" (2015); as a local objective:
    FedLSD, FedNTD eq. 3.

    >>> logits = torch.tensor([[2.0, 0.0]])
    >>> distill(logits, logits, tau=1.0)
    tensor(0.)
    """
    student = F.log_softmax(softened(logits, tau), dim=1)
    teacher = F.log_softmax(softened(teacher_logits.detach().to(logits), tau), dim=1)
    divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return scaled(tau**2, divergence)


def squared_error(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return the squared gap of (B, C) logits, summed over the classes.

    It is FedSSD's loss with a constant weight (its Table 3).
    """
    return (teacher_logits.detach().to(logits) - logits).square().sum(dim=1).mean()


def not_true_distill(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, tau: float
) -> Tensor:
    """Return `distill` over the C-1 classes other than the label.

    So the label's logit is left to the cross-entropy. Logits are (B, C).

    Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
    Learning" (NeurIPS 2022), eq. 10 and 11. The gradient on the true logit is exactly 0.
    """
    student, teacher = _others(labels, logits, teacher_logits)
    return distill(student, teacher, tau=tau)


def not_true_squared_error(logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared gap of the C-1 not-true logits of (B, C) (FedNTD, appendix L)."""
    student, teacher = _others(labels, logits, teacher_logits.detach().to(logits))
    return F.mse_loss(student, teacher)


def majority_labels(label_counts: Tensor) -> Tensor:
    """Return which classes have more than `n / C` of a client's images: bool (C,) of counts (C,).

    Lu et al., "Federated Learning with Label-Masking Distillation" (ACM MM 2023), section 3.2. The
    paper's inequality is garbled; the authors' code does this.

    >>> majority_labels(torch.tensor([6, 2, 0, 0]))
    tensor([ True, False, False, False])
    """
    return label_counts * label_counts.numel() > label_counts.sum()


def label_masked_distill(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, majority: Tensor, *, tau: float
) -> Tensor:
    """Return `distill` from a teacher without the label and the client's majority classes.

    FedLMD, eq. 3 to 6, with `majority` (C,) from `majority_labels`. The student's softmax is over
    all classes except the label. Majority classes stay in it, and are pushed down because the
    teacher gives them no mass. The teacher's softmax is over the classes that are neither label nor
    majority: eq. 3 alone would leave it mass on the label, where the student has none, and the
    divergence would be infinite. A sample for which no class remains contributes 0.
    """
    minority = ~majority.to(logits.device).expand_as(logits)
    target = teacher_logits.detach().to(logits)
    # All three are (B, C-1).
    minority, student_logits, target = _others(labels, minority, logits, target)
    student = F.log_softmax(softened(student_logits, tau), dim=1)
    lowest = torch.finfo(logits.dtype).min
    teacher = F.log_softmax(softened(target, tau).masked_fill(~minority, lowest), dim=1)
    divergence = torch.where(minority, teacher.exp() * (teacher - student), 0)
    return scaled(tau**2, divergence.sum(dim=1).mean())


def vacant_class_distill(logits: Tensor, teacher_logits: Tensor, vacant: Tensor) -> Tensor:
    """Return `distill` over the classes of which a client has no sample.

    `vacant` (V,) holds the indices of these classes, V > 0. There is no temperature, and the other
    logits have no gradient.

    Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning" (AAAI 2025), their
    vacant-class distillation.
    """
    return distill(logits[:, vacant], teacher_logits[:, vacant], tau=1.0)


def class_adaptive_weights(
    teacher_logits: Tensor, labels: Tensor, num_classes: int, *, low: float, high: float, tau: float
) -> Tensor:
    """Return how much to trust the teacher on each class, (C,).

    The weight is linear in the teacher's mean `p_y` on the samples of a class, from `low` to
    `high`. A class without samples has the weight `low`. Logits (N, C) and labels (N,) are of all
    the client's data; `p` is the softmax at `tau`.

    He et al., "Class-Wise Adaptive Self Distillation for Federated Learning on Non-IID Data" (AAAI
    2022), eq. 3, where `phi = p_y - sum of the others = 2 p_y - 1`.

    >>> logits, labels = torch.tensor([[9.0, 9.0], [9.0, -99.0]]), torch.tensor([0, 0])
    >>> class_adaptive_weights(logits, labels, num_classes=2, low=0.0, high=1.0, tau=1.0)
    tensor([0.7500, 0.0000])
    """
    p = F.softmax(softened(teacher_logits.detach(), tau), dim=1)
    p_label = p.gather(1, labels[:, None])[:, 0]
    counts = torch.bincount(labels, minlength=num_classes)
    sums = torch.zeros(num_classes, dtype=p_label.dtype, device=p_label.device)
    sums.index_add_(0, labels, p_label)
    return low + (high - low) * sums / counts.clamp(min=1)


def class_adaptive_distill(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, class_weights: Tensor, *, tau: float
) -> Tensor:
    """Return cross-entropy and distillation, mixed by the weight of each sample's class.

    `(1 - a_y) CE + a_y L_d`, where `a` (C,) comes from `class_adaptive_weights` (FedCAD eq. 1, 2).
    `L_d` is the cross-entropy of student and teacher at `tau`, times `tau^2`. This is the complete
    local objective.
    """
    weight = class_weights.detach().to(logits)[labels]  # (B,)
    hard = F.cross_entropy(logits, labels, reduction="none")
    supervised = ((1 - weight) * hard).mean()
    soft = _soft_cross_entropy(logits, teacher_logits, tau)
    return supervised + (weight * soft).mean()


def selective_distill(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    credibility: Tensor,
    *,
    m_max: float,
    inside_norm: bool,
) -> Tensor:
    """Return the squared gap to the teacher's logits, weighed by how credible the teacher is.

    `sum_k M_k (zt_k - z_k)^2` with `M = m_max * max(0, M_class * M_sample - 0.1)`. M_class is
    `credibility` (C,), the teacher's on each class. M_sample is `1 - sqrt(1 - p_y)`, its
    credibility on a sample.

    He et al., "Learning Critically: Selective Self-Distillation in Federated Learning on Non-IID
    Data" (IEEE Trans. Big Data, 2022), eq. 2 to 6. Eq. 3 prints `(M_k (zt_k - z_k))^2`, which
    `inside_norm=True` gives; at the paper's `m_max` that is FedAvg.
    """
    teacher_logits = teacher_logits.detach().to(logits)
    p_label = F.softmax(teacher_logits, dim=1).gather(1, labels[:, None])  # (B, 1)
    on_sample = 1 - (1 - p_label).clamp(min=0).sqrt()  # (B, 1)
    on_class = credibility.detach().to(logits)[None, :]  # (1, C)
    weight = m_max * (on_class * on_sample - 0.1).clamp(min=0)  # (B, C)
    gap = teacher_logits - logits
    squared = (weight * gap).square() if inside_norm else weight * gap.square()
    return squared.sum(dim=1).mean()


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
    """Return `distill` from a teacher scaled by the student's similarity to class prototypes.

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
    if released:
        # Unlike `_soft_cross_entropy`, `_divergence` lets a gradient through its target.
        loss = _divergence(logits, target, tau)  # (B,)
        keeps = trusted(target.detach(), labels, mask)
    else:
        loss = _soft_cross_entropy(logits, target, tau)  # (B,)
        keeps = trusted(teacher_logits, labels, mask)
    return (loss * keeps).mean()


def trusted(teacher_logits: Tensor, labels: Tensor, mask: Mask) -> Tensor:
    """Return the samples on which FedCSD's mask keeps the teacher, bool (B,) of (B, C) logits.

    >>> trusted(torch.tensor([[3.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 1]), "forcible")
    tensor([ True, False])
    """
    if mask == "adaptive":
        p_label = F.softmax(teacher_logits, dim=1).gather(1, labels[:, None])[:, 0]
        return p_label > 1 / teacher_logits.shape[1]
    if mask == "forcible":
        return teacher_logits.argmax(dim=1) == labels
    return torch.ones_like(labels, dtype=torch.bool)


def _others(labels: Tensor, *values: Tensor) -> list[Tensor]:
    """Return each tensor without the values of the samples' labels: (B, C-1) of (B, C).

    The other classes stay in order. `gather` would do it too, but the deterministic form of its
    gradient sorts, which took 0.7 ms of each step on a GPU.
    """
    before = torch.arange(values[0].shape[1] - 1, device=labels.device) < labels[:, None]
    return [torch.where(before, value[:, :-1], value[:, 1:]) for value in values]


def _soft_cross_entropy(logits: Tensor, teacher_logits: Tensor, tau: float) -> Tensor:
    """Return the cross-entropy of the student and the teacher's softmax on each sample, (B,).

    `-tau^2 sum_k softmax(teacher / tau)_k log softmax(student / tau)_k`.
    """
    target = F.softmax(softened(teacher_logits.detach().to(logits), tau), dim=1)
    return -(tau**2) * (target * F.log_softmax(softened(logits, tau), dim=1)).sum(dim=1)


def _divergence(logits: Tensor, target_logits: Tensor, tau: float) -> Tensor:
    """Return the divergence from a target that takes a gradient too, on each sample, (B,).

    `tau^2 KL(softmax(target / tau) || softmax(student / tau))`.
    """
    student = F.log_softmax(softened(logits, tau), dim=1)
    target = F.log_softmax(softened(target_logits, tau), dim=1)
    return scaled(tau**2, (target.exp() * (target - student)).sum(dim=1))
