"""Models that give penultimate features and logits, by name: `build_model("cnn", image_shape=..., ...)`."""

from rayfed.models.classifier import Classifier, has_features
from rayfed.models.registry import MODELS, build_model

__all__ = ["MODELS", "Classifier", "build_model", "has_features"]
