"""Models by name: those of this package, and any importable function."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn

from rayfed.base.errors import InputError, told
from rayfed.base.values import UnknownKey, amended, build, find
from rayfed.data.inputs import INPUTS, Inputs, inputs_with
from rayfed.models.classifier import has_features, with_projection
from rayfed.models.from_timm import PREFIX, timm_builder
from rayfed.models.settings import HOMES, Adapt
from rayfed.models.trial import check_outputs, line_of

# A builder is called as `builder(image_shape=(1, 28, 28), num_classes=10, **options)`. For other
# inputs it gets the fields of their class in `INPUTS` in place of `image_shape`.
Builder = Callable[..., nn.Module]
NO_OPTIONS: Mapping[str, Any] = {}
# These are the keys of every model.
KEYS = [field.name for field in fields(Adapt)]


def _own_models() -> dict[str, Builder]:
    """Return the functions of this package that build a model, by name."""
    builders = {}
    for home, names in HOMES.items():
        module = importlib.import_module(f"rayfed.models.{home}")
        for name in names:
            builders[name] = getattr(module, name)
    return builders


MODELS = _own_models()


def _with_more_keys(name: str, error: InputError) -> InputError:
    """Return the error of a model's options; for an unknown key with the keys of every model."""
    if not isinstance(error, UnknownKey):
        return error
    more_keys = ["project"] if name in MODELS else []
    return UnknownKey(*error.args, *more_keys, *KEYS)


def build_model(
    name: str, options: Mapping[str, Any] = NO_OPTIONS, *, num_classes: int, seed: int, **shape: Any
) -> nn.Module:
    """Build the model `name` for images of `image_shape`, on the CPU, in training mode.

    `image_shape` is (channels, height, width). For other inputs, give their fields
    (`rayfed.data.inputs`) in place of `image_shape`: `length` and `vocabulary` of tokens, or
    `num_features` of vectors.

    `name` is one of `MODELS`, or `timm/NAME`, or the `package.module:function` of a function. The
    function is called with `image_shape`, `num_classes` and the `options`, and returns a module
    from images (B, *image_shape) to logits (B, num_classes). A `Classifier`, or another module with
    `features` and `head`, also serves the methods that look at features.

    The weights depend on `seed` alone, and torch's generators are left as they were. Raises
    `InputError` for all that can be wrong, found by a forward pass of two images.

    >>> model = build_model("cnn", image_shape=(1, 28, 28), num_classes=10, seed=0)
    >>> sum(parameter.numel() for parameter in model.parameters())
    1663370
    """
    inputs = inputs_with(shape)
    required = {**shape, "num_classes": num_classes}
    options = dict(options)
    project = options.pop("project", 0) if name in MODELS else 0
    if not isinstance(project, int) or isinstance(project, bool) or project < 0:
        raise InputError(
            f"model '{name}'.project = {told(project)}: give a whole number, 0 or more"
        )
    builder = _builder(name)
    # The CPU's generator alone is seeded: torch.manual_seed would reset those of the GPUs as well.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            _refuse_other_parameters(name, builder, inputs, required)
            model = build(builder, options, f"model '{name}'", **required)
            if project and has_features(model):
                model = with_projection(model, project)
        except InputError as error:
            raise amended(error, partial(_with_more_keys, name)) from None
        except Exception as error:
            call = ", ".join(f"{key}={value!r}" for key, value in {**required, **options}.items())
            raise InputError(
                f"model '{name}': cannot be built from {call}: {line_of(error)}"
            ) from error
        if not isinstance(model, nn.Module):
            raise InputError(
                f"model '{name}': must return a torch.nn.Module, not {type(model).__name__}"
            )
        check_outputs(name, model, inputs, num_classes)
    return model


def _builder(name: str) -> Builder:
    """Return the function that builds the model `name`; raise `InputError` if there is none."""
    if name.startswith(PREFIX):
        return timm_builder(name)
    builder: Any = find(name, MODELS, "model", ", or timm/NAME")
    if not callable(builder):
        raise InputError(
            f"model '{name}' is {told(builder)}; it must be a function that returns a "
            "torch.nn.Module"
        )
    return builder


def _refuse_other_parameters(
    name: str, builder: Builder, inputs: Inputs, required: Mapping[str, Any]
) -> None:
    """Raise `InputError` if a model is for other inputs, or lacks a `required` parameter."""
    parameters = inspect.signature(builder).parameters
    kinds = [kind for kind in INPUTS if parameters.keys() >= set(kind._fields)]
    if kinds and type(inputs) not in kinds:
        model_kind, data_kind = kinds[0].__name__.lower(), type(inputs).__name__.lower()
        raise InputError(f"model '{name}' takes {model_kind}, and the data are {data_kind}")
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_all and not parameters.keys() >= required.keys():
        call = ", ".join(f"{key}=..." for key in required)
        raise InputError(
            f"model '{name}' has the parameters {', '.join(parameters) or 'none'}; it is called "
            f"with {call} and its options in [model]: give its parameters these names"
        )
