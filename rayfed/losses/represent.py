"""Losses on the penultimate features, (B, D)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.losses.precision import constant, in_float32


@in_float32
def model_contrast(features: Tensor, global_features: Tensor, previous_features: Tensor, *, tau: float) -> Tensor:
    """Pull features towards the global model's, away from those of the client's own previous model.

    Li et al., "Model-Contrastive Federated Learning" (CVPR 2021), eq. 3; on penultimate features, without a projection
    head.
    """
    near = F.cosine_similarity(features, constant(global_features, features), dim=1)
    far = F.cosine_similarity(features, constant(previous_features, features), dim=1)
    pair = torch.stack([near, far], dim=1) / tau  # (B, 2)
    return F.cross_entropy(pair, torch.zeros(len(pair), dtype=torch.int64, device=pair.device))


@in_float32
def prototype_distance(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Mean squared distance of features to the prototype (C, D) of their label; 0 for classes not `known` (C,).

    Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI 2022), eq. 8.
    """
    squared = (features - constant(prototypes, features)[labels]).square().mean(dim=1)
    return (squared * constant(known, features)[labels]).mean()
