"""Losses on the penultimate features, (B, D)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def model_contrast(
    features: Tensor, global_features: Tensor, previous_features: Tensor, *, tau: float
) -> Tensor:
    """Pull features towards the global model's, away from those of the client's own previous model.

    Li et al., "Model-Contrastive Federated Learning" (CVPR 2021), eq. 3, without the projection
    head.
    """
    near = F.cosine_similarity(features, global_features.detach().to(features), dim=1)
    far = F.cosine_similarity(features, previous_features.detach().to(features), dim=1)
    pair = torch.stack([near, far], dim=1) / tau  # (B, 2)
    return F.cross_entropy(pair, torch.zeros(len(pair), dtype=torch.int64, device=pair.device))


def prototype_distance(
    features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor
) -> Tensor:
    """Mean squared distance of features to the prototype (C, D) of their label; 0 for classes not
    `known` (C,).

    Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI 2022),
    eq. 8.
    """
    squared = (features - prototypes.detach().to(features)[labels]).square().mean(dim=1)
    return (squared * known.detach().to(features)[labels]).mean()


def prototype_contrast(features: Tensor, labels: Tensor, prototypes: Tensor) -> Tensor:
    """Cross-entropy of the cosines of features to all prototypes, (C, D): each feature nearest to
    its label's.

    Mu et al., "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data" (FGCS 2023),
    as their code has it: no temperature; a class without a prototype has a zero row, and cosine 0.
    """
    rows = prototypes.detach().to(features)
    return F.cross_entropy(
        F.cosine_similarity(features[:, None, :], rows[None, :, :], dim=2), labels
    )


def decorrelation(features: Tensor) -> Tensor:
    """Mean squared correlation of two features over the batch, times `(B - 1)^2 / B`; 0 for a batch
    of one.

    Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous
    Federated Learning" (ICLR 2023). The paper's term is the squared Frobenius norm of the
    correlation matrix over D^2; the factor is that of the authors' code (bytedance/FedDecorr), with
    which they chose their weight, and which leaves out the constant diagonal. A feature that is the
    same on the whole batch correlates with none.
    """
    size, width = features.shape
    if size == 1 or width == 1:
        return 0.0 * features.sum()
    centred = features - features.mean(dim=0)
    scaled = centred / (centred.square().sum(dim=0) / (size - 1) + 1e-8).sqrt()  # (B, D)
    products = scaled.T @ scaled  # (D, D), of the correlations times B - 1
    return (products.square().sum() - products.diagonal().square().sum()) / (
        width * (width - 1) * size
    )


def class_decorrelation(features: Tensor, labels: Tensor) -> Tensor:
    """`decorrelation` within each class of the batch, averaged by samples over the classes that
    have two or more.

    Fan et al., "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping"
    (TMLR 2023), their intra-class loss, with the factor of their code (MediaBrain-SJTU/FedMR). 0
    where no class has two samples.
    """
    classes = [features[labels == c] for c in labels.unique()]
    several = [rows for rows in classes if len(rows) > 1]
    total = sum((len(rows) * decorrelation(rows) for rows in several), 0.0 * features.sum())
    return total / max(1, sum(map(len, several)))


def feature_uniformity(features: Tensor) -> Tensor:
    """Mean of `exp(-d / median d)` over the pairs of a batch, `d` their squared distances: low
    where features spread.

    Son et al., "FedUV: Uniformity and Variance for Heterogeneous Federated Learning" (CVPR 2024),
    as their code has it (sonhamin/FedUV): features are not normalised, and the median, of the
    distances that are not 0, has a gradient too. 0 where no two features differ.
    """
    distances = torch.pdist(features).square()  # (B (B - 1) / 2,)
    apart = distances[distances > 0]
    return torch.exp(-distances / apart.median()).mean() if len(apart) else 0.0 * features.sum()


def relaxed_contrast(
    features: Tensor, labels: Tensor, *, tau: float, threshold: float = 0.7, penalty: float = 1.0
) -> Tensor:
    """Features pulled to those of their class, but not too near, and away from other classes, by
    their cosines.

    Seo et al., "Relaxed Contrastive Learning for Federated Learning" (CVPR 2024), as their code has
    it (skynbe/FedRCL): of each sample's class only the least similar sample counts, and of other
    classes the two most similar ones; the penalty pushes a sample away from the least similar one
    of its class if even that has a cosine of `threshold` or more. The paper sums over all pairs of
    a class.
    """
    rows = F.normalize(features, dim=1)
    cosines = rows @ rows.T  # (B, B)
    same = labels[:, None] == labels
    others = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    own = cosines.diagonal()
    farthest = torch.where(others, cosines, torch.inf).amin(
        dim=1
    )  # (B,), infinite for a class of one
    alone = farthest.isinf()
    near = torch.where(alone, own, farthest)
    wrong = torch.where(same, -torch.inf, cosines).topk(min(2, len(labels)), dim=1).values  # (B, 2)
    pulled = _softmax_loss(torch.cat([near[:, None], wrong], dim=1) / tau)
    too_near = torch.where(alone | (farthest < threshold), -1.0, farthest)
    pushed = _softmax_loss(torch.stack([own, too_near], dim=1) / tau)
    return (pulled + penalty * pushed).mean()


def _softmax_loss(logits: Tensor) -> Tensor:
    """Cross-entropy, (B,), with the first of (B, n) logits for the label."""
    return torch.logsumexp(logits, dim=1) - logits[:, 0]
