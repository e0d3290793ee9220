"""Losses that learn the label."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return the softmax cross-entropy of (B, C) logits and (B,) labels.

    The share `smoothing` of the label's mass is spread evenly over all C classes.
    """
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def restricted_cross_entropy(
    logits: Tensor, labels: Tensor, label_counts: Tensor, *, alpha: float, soft: bool = False
) -> Tensor:
    """Return the cross-entropy with the logits of classes without samples scaled by `alpha`.

    Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID
    Data" (KDD 2021). `label_counts` (C,) is the client's count of each class. With `soft`, every
    class is scaled by `alpha + (1 - alpha) * n_c / max(n)`. `alpha = 1` is plain cross-entropy.

    >>> logits, labels = torch.tensor([[2.0, 2.0]]), torch.tensor([0])
    >>> restricted_cross_entropy(logits, labels, torch.tensor([8, 0]), alpha=0.0)
    tensor(0.1269)
    >>> cross_entropy(torch.tensor([[2.0, 0.0]]), labels)
    tensor(0.1269)
    """
    counts = label_counts.to(logits.device)
    share = counts.double() / counts.max() if soft else counts > 0
    return F.cross_entropy(logits * (alpha + (1 - alpha) * share.to(logits.dtype)), labels)


def calibrated_cross_entropy(
    logits: Tensor, labels: Tensor, label_counts: Tensor, *, tau: float
) -> Tensor:
    """Return the cross-entropy after a margin of `tau * n_c^(-1/4)` is taken from each logit.

    A rare class has a larger margin, so it must win by more.

    Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration" (ICML
    2022). The difference of two margins is the paper's pairwise label margin. `label_counts` (C,)
    is the client's count of each class. With `tau > 0` the margin of a class without samples is
    infinite: that class is not in the softmax, and must not be a label. `tau = 0` is plain
    cross-entropy.

    The paper leaves the label out of the softmax's denominator, which gives a loss without a lower
    bound. Here the label is in the denominator, as in the code of other authors.
    """
    if tau == 0:
        return cross_entropy(logits, labels)
    return F.cross_entropy(logits - tau * label_counts.to(logits) ** -0.25, labels)


def adjusted_cross_entropy(logits: Tensor, labels: Tensor, label_counts: Tensor) -> Tensor:
    """Return the cross-entropy after each logit is shifted by the log of its class's share.

    The shift is `log(n_c / n + 1e-9)`, so a class without samples is almost out of the softmax.

    Menon et al., "Long-Tail Learning via Logit Adjustment" (ICLR 2021), with tau = 1.
    `label_counts` (C,) is the client's count of each class. With equal counts the result is the
    plain cross-entropy.
    """
    return F.cross_entropy(logits + _log_shares(label_counts.to(logits)), labels)


def logit_suppression(logits: Tensor, labels: Tensor, label_counts: Tensor) -> Tensor:
    """Return a loss that pushes each class's logits down on the samples of other classes.

    `sum_c p_c log(mean_i exp([y_i != c] (z_ic - log p_c - log C)))`, where `p` (C,) holds the
    shares of the classes in `label_counts` (C,), the client's count of each class. The loss is not
    a mean over samples, because that mean is inside the logarithm.

    Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning" (AAAI 2025), as in
    their code. Their Algorithm 1 has the indicator outside the exponential, and does not shift the
    logits.
    """
    counts = label_counts.to(logits)
    # The logits as if all classes were equally frequent.
    even = logits - _log_shares(counts) - math.log(len(counts))  # (B, C)
    wrong = labels[:, None] != torch.arange(len(counts), device=labels.device)  # (B, C)
    return (counts / counts.sum()) @ (torch.logsumexp(even * wrong, dim=0) - math.log(len(labels)))


def prediction_variance(logits: Tensor) -> Tensor:
    """Return by how much the softmax of (B, C) logits varies too little over the batch.

    The mean over classes of `max(0, C^(-1/2) - deviation)`. `C^(-1/2)` is the standard deviation
    of a class's probability over C samples, if each class is predicted once and with certainty. A
    batch of one gives 0.

    Son et al., "FedUV: Uniformity and Variance for Heterogeneous Federated Learning" (CVPR 2024).
    """
    if len(logits) == 1:
        return 0.0 * logits.sum()
    return F.relu(logits.shape[1] ** -0.5 - logits.softmax(dim=1).std(dim=0)).mean()


def _log_shares(counts: Tensor) -> Tensor:
    """Return the log of each class's share, `log(n_c / n + 1e-9)`, (C,)."""
    return (counts / counts.sum() + 1e-9).log()
