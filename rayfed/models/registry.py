"""Models by name: those of this package, and any importable function."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rayfed.data.decode import MEMORY
from rayfed.models.classifier import has_features
from rayfed.models.convnets import cnn, lenet
from rayfed.models.resnet import resnet8, resnet10, resnet50
from rayfed.models.vision import alexnet, mobilenet
from rayfed.values import InputError, did_you_mean

__all__ = ["MODELS", "build_model"]

# Called as `builder(image_shape=(channels, height, width), num_classes=..., **options)`. The first line of its
# docstring describes the model.
Builder = Callable[..., nn.Module]

MODELS: dict[str, Builder] = {
    builder.__name__: builder for builder in (cnn, lenet, resnet8, resnet10, resnet50, mobilenet, alexnet)
}


def build_model(
    name: str, *, image_shape: tuple[int, int, int], num_classes: int, seed: int, **options: Any
) -> nn.Module:
    """The model `name` for images of `image_shape` (channels, height, width), on the CPU, in training mode.

    `name` is one of `MODELS`, or the `package.module:function` of a function that is called with `image_shape`,
    `num_classes` and the `options`, and returns a module from images (B, *image_shape) to logits (B, num_classes).
    A `Classifier`, or another module with `features` and `head`, also serves the methods that look at features.

    The weights depend on `seed` alone, and torch's generators are left as they were. Raises `InputError` for all
    that can be wrong, found by a forward pass of two images.

    >>> model = build_model("cnn", image_shape=(1, 28, 28), num_classes=10, seed=0)
    >>> sum(parameter.numel() for parameter in model.parameters())
    1663370
    """
    if len(image_shape) != 3 or min(image_shape) < 1 or num_classes < 1:
        raise InputError(
            f"model '{name}': needs an image shape (channels, height, width) and at least one class, "
            f"not {image_shape} and {num_classes}"
        )
    builder = MODELS[name] if name in MODELS else _imported(name)
    _check_options(name, builder, options)
    if name in MODELS:
        _check_size(name, builder, image_shape, num_classes, options)
    # Not torch.manual_seed, which would reset the generators of the GPUs as well.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            model = builder(image_shape=image_shape, num_classes=num_classes, **options)
        except InputError:
            raise
        except Exception as error:
            given = {"image_shape": image_shape, "num_classes": num_classes, **options}
            call = ", ".join(f"{key}={value!r}" for key, value in given.items())
            raise InputError(f"model '{name}': cannot be built from {call}: {_line(error)}") from error
        if not isinstance(model, nn.Module):
            raise InputError(f"model '{name}': must return a torch.nn.Module, not {type(model).__name__}")
        _check_forward(name, model, image_shape, num_classes)
    return model


def _imported(name: str) -> Builder:
    module, colon, function = name.partition(":")
    if not colon:
        raise InputError(f"unknown model '{name}'{did_you_mean(name, MODELS)}, or give a 'package.module:function'")
    try:
        source = importlib.import_module(module)
    except Exception as error:
        raise InputError(f"model '{name}': cannot import '{module}': {_line(error)}") from error
    builder = getattr(source, function, None)
    if not callable(builder):
        raise InputError(f"model '{name}': the module '{module}' has no function '{function}'")
    return builder


def _check_options(name: str, builder: Builder, options: dict[str, Any]) -> None:
    parameters = inspect.signature(builder).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    valid = {parameter.name for parameter in parameters} - {"image_shape", "num_classes"}
    for key in options:
        if key not in valid:
            hint = did_you_mean(key, valid) if valid else "; it takes none"
            raise InputError(f"model '{name}': unknown option '{key}'{hint}")


def _check_size(
    name: str, builder: Builder, image_shape: tuple[int, int, int], num_classes: int, options: dict[str, Any]
) -> None:
    """A model beyond the machine's memory is refused before any of it is filled."""
    try:
        with torch.device("meta"):
            model = builder(image_shape=image_shape, num_classes=num_classes, **options)
    except Exception:
        return  # whatever it is, it is said when the model is built
    if (size := sum(tensor.nbytes for tensor in model.state_dict().values())) > MEMORY:
        raise InputError(
            f"model '{name}': for images of {'x'.join(map(str, image_shape))} and {num_classes:,} classes it has "
            f"{size / 2**30:,.0f} GiB of weights, and this machine has {MEMORY / 2**30:,.0f} GiB of memory; give "
            "smaller images, or another model"
        )


@torch.no_grad()
def _check_forward(name: str, model: nn.Module, image_shape: tuple[int, int, int], num_classes: int) -> None:
    """One pass in eval mode, where dropout is off and BatchNorm's statistics stay as they are."""
    images = torch.linspace(0, 1, 2 * math.prod(image_shape)).view(2, *image_shape)
    size = "x".join(map(str, image_shape))
    model.eval()
    try:
        logits = model(images)
    except Exception as error:
        raise InputError(f"model '{name}': cannot take images of {size}: {_line(error)}") from error
    if _shape(logits) != (2, num_classes):
        raise InputError(
            f"model '{name}': logits of 2 images of {size} must have the shape (2, {num_classes}), not {_shape(logits)}"
        )
    if has_features(model):
        try:
            features = model.features(images)
            same = features.ndim == 2 and torch.allclose(model.head(features), logits, equal_nan=True)
        except Exception as error:
            raise InputError(f"model '{name}': head(features(images)) fails: {_line(error)}") from error
        if not same:
            raise InputError(
                f"model '{name}': features(images) must have the shape (B, D), and head of them must give the "
                f"model's logits; features here: {_shape(features)}"
            )
    model.train()


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
