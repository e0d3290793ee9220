"""Losses on the penultimate features, (B, D)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def model_contrast(features: Tensor, global_features: Tensor, previous_features: Tensor, *, tau: float) -> Tensor:
    """Pull features towards the global model's, away from those of the client's own previous model.

    Li et al., "Model-Contrastive Federated Learning" (CVPR 2021), eq. 3, without the projection head.
    """
    near = F.cosine_similarity(features, global_features.detach().to(features), dim=1)
    far = F.cosine_similarity(features, previous_features.detach().to(features), dim=1)
    pair = torch.stack([near, far], dim=1) / tau  # (B, 2)
    return F.cross_entropy(pair, torch.zeros(len(pair), dtype=torch.int64, device=pair.device))


def prototype_distance(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Mean squared distance of features to the prototype (C, D) of their label; 0 for classes not `known` (C,).

    Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI 2022), eq. 8.
    """
    squared = (features - prototypes.detach().to(features)[labels]).square().mean(dim=1)
    return (squared * known.detach().to(features)[labels]).mean()
