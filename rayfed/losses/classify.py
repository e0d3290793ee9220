"""Losses that learn the label."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Softmax cross-entropy; `smoothing` of the label's mass is spread evenly over all C classes."""
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def restricted_cross_entropy(
    logits: Tensor, labels: Tensor, label_counts: Tensor, *, alpha: float, soft: bool = False
) -> Tensor:
    """Cross-entropy with the logits of classes that the client does not hold scaled by `alpha`.

    Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data" (KDD 2021).
    `label_counts` (C,) is the client's count of each class. With `soft`, every class is scaled by
    `alpha + (1 - alpha) * n_c / max(n)`. `alpha = 1` is plain cross-entropy.
    """
    counts = label_counts.to(logits.device)
    held = counts.double() / counts.max() if soft else counts > 0
    return F.cross_entropy(logits * (alpha + (1 - alpha) * held.to(logits.dtype)), labels)
