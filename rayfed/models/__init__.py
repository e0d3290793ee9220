"""Models that give penultimate features and logits, by name: `build_model("cnn", image_shape=..., ...)`."""

from typing import TYPE_CHECKING

__all__ = ["MODELS", "Classifier", "build_model", "has_features"]

if TYPE_CHECKING:
    from rayfed.models.classifier import Classifier, has_features
    from rayfed.models.registry import MODELS, build_model
else:
    HOMES = {"classifier": ["Classifier", "has_features"], "registry": ["MODELS", "build_model"]}

    def __getattr__(name):
        """The names of the package, imported when they are used: a list of a job's keys needs no torch."""
        import importlib

        home = next((home for home, names in HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module 'rayfed.models' has no attribute '{name}'")
        return getattr(importlib.import_module(f"rayfed.models.{home}"), name)
