"""Losses that learn the label."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Softmax cross-entropy; `smoothing` of the label's mass is spread evenly over all C classes."""
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def restricted_cross_entropy(
    logits: Tensor, labels: Tensor, label_counts: Tensor, *, alpha: float, soft: bool = False
) -> Tensor:
    """Cross-entropy with the logits of classes that the client does not hold scaled by `alpha`.

    Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID
    Data" (KDD 2021). `label_counts` (C,) is the client's count of each class. With `soft`, every
    class is scaled by `alpha + (1 - alpha) * n_c / max(n)`. `alpha = 1` is plain cross-entropy.
    """
    counts = label_counts.to(logits.device)
    held = counts.double() / counts.max() if soft else counts > 0
    return F.cross_entropy(logits * (alpha + (1 - alpha) * held.to(logits.dtype)), labels)


def calibrated_cross_entropy(
    logits: Tensor, labels: Tensor, label_counts: Tensor, *, tau: float
) -> Tensor:
    """Cross-entropy with a margin of `tau * n_c^(-1/4)` taken from each logit: rare classes must
    win by more.

    Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration" (ICML
    2022). The difference of two margins is the paper's pairwise label margin. `label_counts` (C,)
    is the client's count of each class; with `tau > 0` the margin of a class without samples is
    infinite, so that it is not in the softmax, and must not be a label. `tau = 0` is plain
    cross-entropy. The paper leaves the label out of the softmax's denominator, which gives a loss
    without a lower bound; it is in here, as in others' code.
    """
    if tau == 0:
        return cross_entropy(logits, labels)
    return F.cross_entropy(logits - tau * label_counts.to(logits) ** -0.25, labels)


def adjusted_cross_entropy(logits: Tensor, labels: Tensor, label_counts: Tensor) -> Tensor:
    """Cross-entropy with the logits shifted by the log of each class's share, `log(n_c / n +
    1e-9)`.

    Menon et al., "Long-Tail Learning via Logit Adjustment" (ICLR 2021), with tau = 1. A class
    without samples is almost out of the softmax. `label_counts` (C,) is the client's count of each
    class; equal counts are plain cross-entropy.
    """
    return F.cross_entropy(logits + _log_shares(label_counts.to(logits)), labels)


def logit_suppression(logits: Tensor, labels: Tensor, label_counts: Tensor) -> Tensor:
    """The logits of each class pushed down on samples of other classes, classes weighed by their
    shares `p`.

    `label_counts` (C,) is the client's count of each class.

    `sum_c p_c log(mean_i exp([y_i != c] (z_ic - log p_c - log C)))`. Guo et al., "Exploring Vacant
    Classes in Label-Skewed Federated Learning" (AAAI 2025), as their code has it; their Algorithm 1
    has the indicator outside the exponential, and does not shift the logits. It is no mean over
    samples: that is inside the logarithm.
    """
    counts = label_counts.to(logits)
    even = (
        logits - _log_shares(counts) - math.log(len(counts))
    )  # (B, C): as if classes were equally frequent
    others = labels[:, None] != torch.arange(len(counts), device=labels.device)
    return (counts / counts.sum()) @ (torch.logsumexp(even * others, dim=0) - math.log(len(labels)))


def prediction_variance(logits: Tensor) -> Tensor:
    """How far the softmax varies too little over the batch: the mean over classes of `max(0,
    C^(-1/2) - deviation)`.

    Son et al., "FedUV: Uniformity and Variance for Heterogeneous Federated Learning" (CVPR 2024).
    `C^(-1/2)` is the deviation of each class's probability over one sure prediction per class. 0
    for a batch of one.
    """
    if len(logits) == 1:
        return 0.0 * logits.sum()
    return F.relu(logits.shape[1] ** -0.5 - logits.softmax(dim=1).std(dim=0)).mean()


def _log_shares(counts: Tensor) -> Tensor:
    """`log(n_c / n + 1e-9)`, (C,)."""
    return (counts / counts.sum() + 1e-9).log()
