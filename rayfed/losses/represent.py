"""Losses on the penultimate features, (B, D)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.losses.factors import scaled


def model_contrast(
    features: Tensor, global_features: Tensor, previous_features: Tensor, *, tau: float
) -> Tensor:
    """Return a loss that is low where features are near the global model's features.

    They must be nearer to these than to the features of the client's own previous model. All three
    are (B, D).

    Li et al., "Model-Contrastive Federated Learning" (CVPR 2021), eq. 3, without the projection
    head.
    """
    near = F.cosine_similarity(features, global_features.detach().to(features), dim=1)
    far = F.cosine_similarity(features, previous_features.detach().to(features), dim=1)
    pair = torch.stack([near, far], dim=1) / tau  # (B, 2)
    return F.cross_entropy(pair, torch.zeros(len(pair), dtype=torch.int64, device=pair.device))


def feature_distill(features: Tensor, teacher_features: Tensor) -> Tensor:
    """Return the mean squared gap of features to the teacher's features, both (B, D).

    The mean is over the features and the batch. The teacher is a constant.

    Yan et al., "Rethinking Client Drift in Federated Learning: A Logit Perspective" (2023), eq. 5.

    >>> feature_distill(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]]))
    tensor(2.)
    """
    return F.mse_loss(features, teacher_features.detach().to(features))


def prototype_distance(
    features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor
) -> Tensor:
    """Return the mean squared distance of features to the prototype of their label.

    `prototypes` are (C, D). A class that is not `known` (C,) contributes 0.

    Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI 2022),
    eq. 8.
    """
    squared = (features - prototypes.detach().to(features)[labels]).square().mean(dim=1)
    return (squared * known.detach().to(features)[labels]).mean()


def prototype_contrast(features: Tensor, labels: Tensor, prototypes: Tensor) -> Tensor:
    """Return the cross-entropy of the cosines of features to all prototypes, (C, D).

    It is low where each feature is nearest to the prototype of its label.

    Mu et al., "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data" (FGCS 2023),
    as in their code. There is no temperature. A class without a prototype has a zero row, and a
    cosine of 0.
    """
    rows = prototypes.detach().to(features)
    cosines = F.cosine_similarity(features[:, None, :], rows[None, :, :], dim=2)  # (B, C)
    return F.cross_entropy(cosines, labels)


def decorrelation(features: Tensor) -> Tensor:
    """Return the mean squared correlation of two features over the batch, times `(B - 1)^2 / B`.

    A batch of one gives 0. A feature that is the same on the whole batch correlates with no other
    feature. Features are (B, D).

    Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous
    Federated Learning" (ICLR 2023). The paper's term is the squared Frobenius norm of the
    correlation matrix over D^2. The factor here comes from the authors' code (bytedance/FedDecorr),
    with which they chose their weight, and which leaves out the constant diagonal.
    """
    size, width = features.shape
    if size == 1 or width == 1:
        return 0.0 * features.sum()
    centred = features - features.mean(dim=0)
    scaled = centred / (centred.square().sum(dim=0) / (size - 1) + 1e-8).sqrt()  # (B, D)
    # The correlations, times B - 1.
    products = scaled.T @ scaled  # (D, D)
    off_diagonal = products.square().sum() - products.diagonal().square().sum()
    return off_diagonal / (width * (width - 1) * size)


def class_decorrelation(features: Tensor, labels: Tensor) -> Tensor:
    """Return the `decorrelation` within each class of the batch, averaged over classes.

    Classes with two or more samples count, weighed by their samples. If there is none, the loss is
    0. Features are (B, D).

    Fan et al., "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping"
    (TMLR 2023), their intra-class loss, with the factor of their code (MediaBrain-SJTU/FedMR).
    """
    classes = [features[labels == c] for c in labels.unique()]
    classes = [rows for rows in classes if len(rows) > 1]
    total, samples = 0.0 * features.sum(), 0
    for rows in classes:
        total = total + len(rows) * decorrelation(rows)
        samples += len(rows)
    return total / max(1, samples)


def feature_uniformity(features: Tensor) -> Tensor:
    """Return a loss that is low where the features (B, D) of a batch spread.

    The mean of `exp(-d / median d)` over the pairs of a batch, where `d` are their squared
    distances. If no two features differ, the loss is 0.

    Son et al., "FedUV: Uniformity and Variance for Heterogeneous Federated Learning" (CVPR 2024),
    as in their code (sonhamin/FedUV): features are not normalised. The median is over the distances
    that are not 0, and has a gradient too.
    """
    distances = torch.pdist(features).square()  # (B (B - 1) / 2,)
    apart = distances[distances > 0]
    if not len(apart):
        return 0.0 * features.sum()
    return torch.exp(-distances / apart.median()).mean()


def relaxed_contrast(
    features: Tensor, labels: Tensor, *, tau: float, threshold: float = 0.7, penalty: float = 1.0
) -> Tensor:
    """Return a loss that pulls features to their class, but not too near, by their cosines.

    It also pushes features (B, D) away from those of other classes.

    Seo et al., "Relaxed Contrastive Learning for Federated Learning" (CVPR 2024), as in their code
    (skynbe/FedRCL). For each sample the least similar sample of its class counts, and the two most
    similar samples of other classes. The penalty pushes a sample away from the least similar sample
    of its class, if even that has a cosine of `threshold` or more. The paper sums over all pairs of
    a class.
    """
    rows = F.normalize(features, dim=1)
    cosines = rows @ rows.T  # (B, B)
    same = labels[:, None] == labels
    pairs = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    to_itself = cosines.diagonal()
    farthest = torch.where(pairs, cosines, torch.inf).amin(dim=1)  # (B,)
    # The only sample of its class has an infinite minimum.
    alone = farthest.isinf()
    near = torch.where(alone, to_itself, farthest)
    wrong = torch.where(same, -torch.inf, cosines).topk(min(2, len(labels)), dim=1).values  # (B, 2)
    pulled = _softmax_loss(torch.cat([near[:, None], wrong], dim=1) / tau)
    too_near = torch.where(alone | (farthest < threshold), -1.0, farthest)
    pushed = _softmax_loss(torch.stack([to_itself, too_near], dim=1) / tau)
    return (pulled + scaled(penalty, pushed)).mean()


def _softmax_loss(logits: Tensor) -> Tensor:
    """Return the cross-entropy, (B,), if the first of (B, n) logits is the label's."""
    return torch.logsumexp(logits, dim=1) - logits[:, 0]
