"""Models by name: those of this package, and any importable function."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from rayfed.base.errors import InputError, told
from rayfed.base.values import UnknownKey, build, find
from rayfed.data.inputs import INPUTS, inputs_with
from rayfed.models.classifier import has_features, with_projection
from rayfed.models.from_timm import PREFIX, timm_builder
from rayfed.models.settings import HOMES, Adapt
from rayfed.models.trial import check_outputs, line_of

# Called as `builder(image_shape=(channels, height, width), num_classes=..., **options)`; `INPUTS`
# has other keywords.
Builder = Callable[..., nn.Module]
NO_OPTIONS: Mapping[str, Any] = {}
# Of every model.
KEYS = [f.name for f in fields(Adapt)]

MODELS: dict[str, Builder] = {
    name: getattr(importlib.import_module(f"rayfed.models.{home}"), name)
    for home, names in HOMES.items()
    for name in names
}


def build_model(
    name: str, options: Mapping[str, Any] = NO_OPTIONS, *, num_classes: int, seed: int, **shape: Any
) -> nn.Module:
    """The model `name` for images of `image_shape` (channels, height, width), on the CPU, in
    training mode.

    For other inputs, give their fields (`rayfed.data.inputs`) in place of `image_shape`: `length`
    and `vocabulary` of tokens, or `num_features` of vectors.

    `name` is one of `MODELS`, or the `package.module:function` of a function that is called with
    `image_shape`, `num_classes` and the `options`, and returns a module from images (B,
    *image_shape) to logits (B, num_classes); or `timm/NAME`. A `Classifier`, or another module with
    `features` and `head`, also serves the methods that look at features.

    The weights depend on `seed` alone, and torch's generators are left as they were. Raises
    `InputError` for all that can be wrong, found by a forward pass of two images.

    >>> model = build_model("cnn", image_shape=(1, 28, 28), num_classes=10, seed=0)
    >>> sum(parameter.numel() for parameter in model.parameters())
    1663370
    """
    inputs = inputs_with(shape)
    given = {**shape, "num_classes": num_classes}
    options = dict(options)
    project = options.pop("project", 0) if name in MODELS else 0
    if not isinstance(project, int) or isinstance(project, bool) or project < 0:
        raise InputError(
            f"model '{name}'.project = {told(project)}: give a whole number, 0 or more"
        )
    builder = (
        timm_builder(name)
        if name.startswith(PREFIX)
        else find(name, MODELS, "model", ", or timm/NAME")
    )
    if not callable(builder):
        raise InputError(
            f"model '{name}' is {told(builder)}; it must be a function that returns a "
            "torch.nn.Module"
        )
    # Not torch.manual_seed, which would reset the generators of the GPUs as well.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            takes = inspect.signature(builder).parameters
            kinds = [kind for kind in INPUTS if {*kind._fields} <= {*takes}]
            if kinds and type(inputs) not in kinds:
                wanted, are = kinds[0].__name__.lower(), type(inputs).__name__.lower()
                raise InputError(f"model '{name}' takes {wanted}, and the data are {are}")
            if not {*given} <= {*takes} and not any(
                p.kind is p.VAR_KEYWORD for p in takes.values()
            ):
                call = ", ".join(f"{key}=..." for key in given)
                raise InputError(
                    f"model '{name}' has the parameters {', '.join(takes) or 'none'}; it is called "
                    f"with {call} and its options in [model]: give its parameters these names"
                )
            model = build(builder, options, f"model '{name}'", **given)
            if project and has_features(model):
                model = with_projection(model, project)
        except UnknownKey as error:
            raise UnknownKey(*error.args, *(["project"] if name in MODELS else []), *KEYS) from None
        except InputError:
            raise
        except Exception as error:
            call = ", ".join(f"{key}={value!r}" for key, value in {**given, **options}.items())
            raise InputError(
                f"model '{name}': cannot be built from {call}: {line_of(error)}"
            ) from error
        if not isinstance(model, nn.Module):
            raise InputError(
                f"model '{name}': must return a torch.nn.Module, not {type(model).__name__}"
            )
        check_outputs(name, model, inputs, num_classes)
    return model
