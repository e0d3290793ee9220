"""Losses against forgetting: pure functions of logits, features and labels. Nothing in here is federated.

Shapes, everywhere: `B` batch, `C` classes, `D` features. Logits are (B, C), features (B, D), labels (B,) int64.
Every loss is summed over classes, averaged over the batch, differentiable in its first argument only, and finite on
logits of size 1e3. Softened losses have the factor `tau**2` (Hinton et al., 2015), so that the scale of the gradient
does not depend on the temperature. This package needs torch and nothing else.
"""

# fmt: off
from rayfed.losses.classify import cross_entropy, restricted_cross_entropy
from rayfed.losses.distill import (
    class_adaptive_distill, class_adaptive_weights, distill, label_masked_distill, majority_labels, not_true_distill,
    not_true_squared_error, prototype_similarity_distill, selective_distill, squared_error, trusted,
)
from rayfed.losses.represent import model_contrast, prototype_distance

__all__ = [
    "class_adaptive_distill", "class_adaptive_weights", "cross_entropy", "distill", "label_masked_distill",
    "majority_labels", "model_contrast", "not_true_distill", "not_true_squared_error", "prototype_distance",
    "prototype_similarity_distill", "restricted_cross_entropy", "selective_distill", "squared_error",
    "trusted",
]
