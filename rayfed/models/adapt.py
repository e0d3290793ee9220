"""Changes to any model after it is built: weights from a file, frozen parameters, LoRA."""

import logging
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from rayfed.base.errors import InputError, did_you_mean
from rayfed.base.files import read_regular
from rayfed.models.settings import Adapt, Lora
from rayfed.tensors.weights import Weights

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CLOSED = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
)  # they take the weights of their layers, and call none

log = logging.getLogger(__name__)


def adapt(model: nn.Module, settings: Adapt, seed: int) -> None:
    """Change a model in place as the keys of every model say; LoRA's matrices are drawn from `seed` alone.

    Raises `InputError` where the file does not fit, a pattern matches nothing, or nothing would train.
    """
    if settings.weights:
        _load_file(model, settings.weights)
    for name in matching(
        settings.freeze, dict(model.named_parameters()), "model.freeze", "parameter"
    ):
        model.get_parameter(name).requires_grad_(False)
    if settings.lora.rank:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            _add_lora(model, settings.lora)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"model.freeze = {settings.freeze}: no parameter of the model would train; freeze fewer"
        )


def matching(patterns: Sequence[str], names: Iterable[str], key: str, kind: str) -> list[str]:
    """The names that a pattern fits, in their own order. Raises `InputError` for a pattern that fits no name."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"{key}: the pattern '{pattern}' fits no {kind}{did_you_mean(pattern, names)}"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def head_of(model: nn.Module) -> str:
    """The name of the module that gives the logits: `head`, or the last linear or convolution layer."""
    if isinstance(getattr(model, "head", None), nn.Module):
        return "head"
    return next(
        (name for name, module in reversed([*model.named_modules()]) if isinstance(module, LAYERS)),
        "",
    )


def _load_file(model: nn.Module, path: str) -> None:
    """The weights in a file, by our names or by those of timm's own files; the head may be of other classes."""
    try:
        file = safetensors.torch.load(read_regular(Path(path)))
    except FileNotFoundError:
        raise InputError(f"model.weights = '{path}': there is no such file") from None
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"model.weights = '{path}': not a safetensors file that can be read ({error})"
        ) from None
    own: Weights = model.state_dict()
    renamed = getattr(model, "renamed", str)
    weights = {name if name in own else renamed(name): tensor for name, tensor in file.items()}
    wrong: dict[str, str] = {}  # by entry: why it does not fit
    for name in sorted({*weights, *own}):
        if name not in own:
            wrong[name] = f"'{name}' is not in the model{did_you_mean(name, own)}"
        elif name not in weights:
            wrong[name] = f"'{name}' is not in the file{did_you_mean(name, file)}"
        elif weights[name].shape != own[name].shape:
            there, here = tuple(weights[name].shape), tuple(own[name].shape)
            wrong[name] = f"'{name}' is {there} in the file, and {here} in the model"
    head = f"{head_of(model)}."
    for name, reason in wrong.items():
        if not name.startswith(head):
            raise InputError(f"model.weights = '{path}' does not fit the model: {reason}")
    if wrong:
        reason = next(iter(wrong.values()))
        log.warning(
            "model.weights: the head is not taken from the file, and begins as the seed draws it: %s",
            reason,
        )
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(head)}
    model.load_state_dict(weights, strict=False)


def _add_lora(model: nn.Module, lora: Lora) -> None:
    """peft's layers in place of those that the patterns fit; beside their matrices only the head trains."""
    head = head_of(model)
    apart = [head, *(name for name, module in model.named_modules() if isinstance(module, CLOSED))]
    # Of grouped convolutions, peft takes only those whose groups divide the rank.
    layers = [
        name
        for name, module in model.named_modules()
        if name
        and isinstance(module, LAYERS)
        and getattr(module, "groups", 1) == 1
        and not _is_in(name, apart)
    ]
    if not layers:
        raise InputError(
            "model.lora: the model has no linear layer and no convolution without groups, beside its head, that LoRA "
            "could change; those of torch's own attention and TransformerEncoderLayer it cannot"
        )
    names = matching(
        lora.targets or ["*"], layers, "model.lora.targets", "layer that LoRA can change"
    )
    try:
        from peft import (
            LoraConfig,
            inject_adapter_in_model,
        )  # takes seconds: it imports transformers
    except ImportError as error:
        install = "pip install 'rayfed-distill[lora]'"
        raise InputError(
            f"model.lora needs peft, which cannot be imported ({error}): {install}"
        ) from None
    exactly = "|".join(map(re.escape, names))
    scale: Any = lora.alpha  # peft's annotation asks for a whole number, and its code does not
    inject_adapter_in_model(
        LoraConfig(r=lora.rank, lora_alpha=scale, target_modules=exactly), model
    )
    model.get_submodule(head).requires_grad_(True)


def _is_in(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
