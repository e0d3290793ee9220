"""Changes to any model after it is built: weights from a file, frozen parameters, LoRA."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
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
from rayfed.tensors.weights import Weights, identical, other_names

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# They take the weights of their layers, and call none.
CLOSED = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Bytes of a file that say what it is.
BEGINNING = 200
# In a message.
FILES_NAMED = 5

log = logging.getLogger(__name__)


def adapt(model: nn.Module, settings: Adapt, seed: int) -> None:
    """Change a model in place as the keys of every model say; LoRA's matrices are drawn from `seed`
    alone.

    Raises `InputError` where the file does not fit, a pattern matches nothing, or nothing would
    train.
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
    """The names that a pattern fits, in their own order.

    Raises `InputError` for a pattern that fits no name.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"{key}: the pattern '{pattern}' fits no {kind}{did_you_mean(pattern, names)}"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def head_of(model: nn.Module) -> str:
    """The name of the module that gives the logits: `head`, or the last linear or convolution
    layer.
    """
    if isinstance(getattr(model, "head", None), nn.Module):
        return "head"
    return next(
        (name for name, module in reversed([*model.named_modules()]) if isinstance(module, LAYERS)),
        "",
    )


def _load_file(model: nn.Module, path: str) -> None:
    """The weights in a file, by our names or by those of timm's own files; the head may be of other
    classes.
    """
    file = _read_weights(path)
    own: Weights = model.state_dict()
    renamed = getattr(model, "renamed", str)
    weights = {name if name in own else renamed(name): tensor for name, tensor in file.items()}
    others = other_names(model)
    _refuse_apart(path, weights, others)
    loaded_too = _names_in(weights, others)
    # By entry: why it does not fit.
    wrong: dict[str, str] = {}
    for name in sorted({*weights, *own}):
        if name not in own:
            wrong[name] = f"'{name}' is not in the model{did_you_mean(name, own)}"
        elif name not in weights:
            if others.get(name, name) not in loaded_too:
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
            "model.weights: the head is not taken from the file, and begins as the seed draws it: "
            "%s",
            reason,
        )
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(head)}
    _refuse_values(path, weights, own, dict(model.named_parameters(remove_duplicate=False)))
    model.load_state_dict(weights, strict=False)


def _read_weights(path: str) -> Weights:
    """The tensors of a safetensors file, by name.

    Raises `InputError`, with the way on, for all other files.
    """
    key = f"model.weights = '{path}'"
    if Path(path).is_dir():
        files = sorted(file.name for file in Path(path).glob("*.safetensors"))
        inside = f"; in it are {', '.join(files[:FILES_NAMED])}" if files else ""
        raise InputError(f"{key} is a folder; give one safetensors file{inside}{_joining(files)}")
    if path.endswith(".index.json"):
        raise InputError(
            f"{key} lists the files of a model that is cut into several; give one safetensors file"
            f"{_joining(['a', 'b'])}"
        )
    try:
        content = read_regular(Path(path))
    except FileNotFoundError:
        raise InputError(f"{key}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{key}: not a safetensors file that can be read ({error})") from None
    other = _other_form(content, path)
    if other:
        raise InputError(f"{key} {other}")
    try:
        return safetensors.torch.load(content)
    except SafetensorError as error:
        raise InputError(
            f"{key}: not a safetensors file that can be read ({error}); write it anew by "
            "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
        ) from None


def _joining(files: Sequence[str]) -> str:
    """How several files of weights become one."""
    if len(files) < 2:
        return ""
    return (
        "; to join them: from safetensors.torch import load_file, save_file; weights = {}; "
        "[weights.update(load_file(file)) for file in FILES]; save_file(weights, "
        "'weights.safetensors')"
    )


def _other_form(content: bytes, path: str) -> str:
    """What a file is that is no safetensors file, and the way on; empty where its beginning does
    not say.
    """
    begins = content[:BEGINNING].lstrip().lower()
    if begins.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the weights themselves; fetch them: git lfs pull"
    if begins.startswith((b"<!doctype", b"<html", b"<?xml")):
        return (
            "is a web page, not weights: a download that was answered by a page, for example "
            "because it needs a login; download the file itself"
        )
    if content.startswith((b"PK\x03\x04", b"\x80")):
        return (
            "was written by torch.save, and reading it could run code; convert it once: python -c "
            '"import torch; '
            "from safetensors.torch import save_file; "
            f"w = torch.load('{path}', map_location='cpu', weights_only=True); w = "
            "w.get('state_dict', w); "
            "save_file({k: v.clone().contiguous() for k, v in w.items()}, 'weights.safetensors')\""
        )
    if content.startswith((b"\x89HDF", b"GGUF")):
        return (
            "is a file of another tool (HDF5 or GGUF); load it there, and write the model's "
            "state_dict by safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
        )
    return ""


def _names_in(weights: Weights, others: Mapping[str, str]) -> set[str]:
    """The first names of the model's tensors that are in the file, under any of their names."""
    return {others.get(name, name) for name in weights}


def _refuse_apart(path: str, weights: Weights, others: Mapping[str, str]) -> None:
    """Raise `InputError` where the file has two values for one tensor of the model."""
    for name, first in others.items():
        if name in weights and first in weights and not identical(weights[name], weights[first]):
            raise InputError(
                f"model.weights = '{path}' has '{first}' and '{name}' apart, and in the model they "
                "are one tensor; leave one of them out of the file"
            )


def _refuse_values(path: str, weights: Weights, own: Weights, parameters: Weights) -> None:
    """Raise `InputError` for values that the model cannot begin with; half precision becomes the
    model's own.
    """
    for name, tensor in weights.items():
        if own[name].is_floating_point() and tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(
                f"model.weights = '{path}': '{name}' is {kind}, as quantised weights are; give "
                "weights in float32, float16 or bfloat16"
            )
        finite = bool(torch.isfinite(tensor).all())
        # A mask may hold infinities, in the file as in the model.
        if not finite and (name in parameters or bool(torch.isfinite(own[name]).all())):
            raise InputError(
                f"model.weights = '{path}': '{name}' holds a NaN or an infinity: its training "
                "diverged, or the file is damaged; give weights of an earlier moment"
            )


def _add_lora(model: nn.Module, lora: Lora) -> None:
    """peft's layers in place of those that the patterns fit; beside their matrices only the head
    trains.
    """
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
            "model.lora: the model has no linear layer and no convolution without groups, beside "
            "its head, that LoRA could change; those of torch's own attention and "
            "TransformerEncoderLayer it cannot"
        )
    names = matching(
        lora.targets or ["*"], layers, "model.lora.targets", "layer that LoRA can change"
    )
    try:
        # Takes seconds: it imports transformers.
        from peft import (
            LoraConfig,
            inject_adapter_in_model,
        )
    except ImportError as error:
        install = "pip install 'rayfed-distill[lora]'"
        raise InputError(
            f"model.lora needs peft, which cannot be imported ({error}): {install}"
        ) from None
    exactly = "|".join(map(re.escape, names))
    # Peft's annotation asks for a whole number, and its code does not.
    scale: Any = lora.alpha
    inject_adapter_in_model(
        LoraConfig(r=lora.rank, lora_alpha=scale, target_modules=exactly), model
    )
    model.get_submodule(head).requires_grad_(True)


def _is_in(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
