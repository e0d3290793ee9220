"""Losses against forgetting, as pure functions on logits, features and labels. Nothing federated in here.

Shapes, everywhere: `B` batch, `C` classes, `D` features. Logits are (B, C), features (B, D), labels (B,) int64.
Every loss is summed over classes, averaged over the batch, differentiable in its first argument and in no other, and
finite on logits of size 1e3. Softened losses carry the factor `tau**2` (Hinton et al., 2015), so that the gradient's
scale does not depend on the temperature.

This is the package that the actors import: it needs torch and nothing else.
"""

from rayfed.losses.classify import cross_entropy, restricted_cross_entropy
from rayfed.losses.distill import (
    class_adaptive_distill,
    class_adaptive_weights,
    distill,
    label_masked_distill,
    majority_labels,
    not_true_distill,
    not_true_squared_error,
    prototype_similarity_distill,
    selective_distill,
    squared_error,
)
from rayfed.losses.represent import model_contrast, prototype_distance

__all__ = [
    "class_adaptive_distill",
    "class_adaptive_weights",
    "cross_entropy",
    "distill",
    "label_masked_distill",
    "majority_labels",
    "model_contrast",
    "not_true_distill",
    "not_true_squared_error",
    "prototype_distance",
    "prototype_similarity_distill",
    "restricted_cross_entropy",
    "selective_distill",
    "squared_error",
]
