"""Losses against forgetting: pure functions of logits, features and labels.

Nothing in here is federated, and this package needs torch and nothing else.

Shapes, everywhere: `B` batch, `C` classes, `D` features. Logits are (B, C), features (B, D), labels
(B,) int64.

Every loss is summed over the classes, unless its docstring says mean, and averaged over the batch.
It is differentiable in its first argument only, and finite on logits of size 1e3. Six losses are
not a mean over samples but a function of the whole batch: `decorrelation`, `class_decorrelation`,
`feature_uniformity`, `relaxed_contrast`, `prediction_variance` and `logit_suppression`.

Softened losses have the factor `tau**2` (Hinton et al., 2015), so that the gradient's scale does
not depend on the temperature.
"""

# fmt: off
from rayfed.losses.classify import (
    adjusted_cross_entropy, calibrated_cross_entropy, cross_entropy, logit_suppression,
    prediction_variance, restricted_cross_entropy,
)
from rayfed.losses.distill import (
    class_adaptive_distill, class_adaptive_weights, distill,
    label_masked_distill, majority_labels, not_true_distill, not_true_squared_error,
    prototype_similarity_distill, selective_distill, squared_error, trusted, vacant_class_distill,
)
from rayfed.losses.factors import scaled, softened
from rayfed.losses.represent import (
    class_decorrelation, decorrelation, feature_distill, feature_uniformity, model_contrast,
    prototype_contrast, prototype_distance, relaxed_contrast,
)

__all__ = [
    "adjusted_cross_entropy", "calibrated_cross_entropy", "class_adaptive_distill",
    "class_adaptive_weights", "class_decorrelation", "cross_entropy",
    "decorrelation", "distill", "feature_distill", "feature_uniformity", "label_masked_distill",
    "logit_suppression",
    "majority_labels", "model_contrast", "not_true_distill", "not_true_squared_error",
    "prediction_variance", "prototype_contrast", "prototype_distance",
    "prototype_similarity_distill", "relaxed_contrast", "restricted_cross_entropy",
    "scaled", "selective_distill", "softened", "squared_error", "trusted", "vacant_class_distill",
]
