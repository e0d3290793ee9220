"""Changes to any model after it is built.

They are weights from a file, frozen parameters, standardised weights, and LoRA.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from rayfed.base.errors import InputError, did_you_mean
from rayfed.models.settings import Adapt, Lora
from rayfed.models.standardise import can_be_standardised, standardise, vanishing
from rayfed.tensors.weights import Weights, identical, other_names

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# These modules use the weights of their layers and do not call the layers, so a change of how a
# layer works has no effect.
CLOSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# That many bytes at the beginning of a file say what it is.
BEGINNING = 200
# A message names at most that many files.
FILES_NAMED = 5

log = logging.getLogger(__name__)


def adapt(model: nn.Module, settings: Adapt, seed: int) -> None:
    """Change a model in place as the keys of every model say.

    LoRA's matrices are drawn from `seed` alone. Raises `InputError` if the file does not fit, if a
    pattern matches nothing, or if nothing would train.
    """
    if settings.weights:
        _load_file(model, settings.weights)
    names = [name for name, _ in model.named_parameters()]
    for name in matching(settings.freeze, names, "model.freeze", "parameter"):
        model.get_parameter(name).requires_grad_(False)
    # They are found before LoRA's matrices are among the layers.
    to_standardise = _layers_to_standardise(model, settings.weight_standardisation)
    if settings.lora.rank:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            _add_lora(model, settings.lora)
    # Peft makes matrices of the class that a layer has, and its matrices are not standardised.
    standardise(to_standardise, settings.weight_standardisation)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"model.freeze = {settings.freeze}: no parameter of the model would train; freeze fewer"
        )


def matching(patterns: Sequence[str], names: Iterable[str], key: str, kind: str) -> list[str]:
    """Return the names that a pattern fits, in their own order.

    Raises `InputError` for a pattern that fits no name.

    >>> matching(["conv*", "head"], ["conv1", "head", "norm"], "model.freeze", "parameter")
    ['conv1', 'head']
    """
    names = list(names)
    matches: set[str] = set()
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise InputError(
                f"{key}: the pattern '{pattern}' fits no {kind}{did_you_mean(pattern, names)}"
            )
        matches.update(fitting)
    return [name for name in names if name in matches]


def head_of(model: nn.Module) -> str:
    """Return the name of the module that gives the logits.

    It is `head`, or else the last linear or convolution layer; empty if there is neither.
    """
    if isinstance(getattr(model, "head", None), nn.Module):
        return "head"
    layers = [name for name, module in model.named_modules() if isinstance(module, LAYERS)]
    return layers[-1] if layers else ""


def _load_file(model: nn.Module, path: str) -> None:
    """Load the weights of a file into the model.

    The file has the names of the model, or the names of timm's own files. Its head may be for other
    classes. Raises `InputError` if the rest does not fit.
    """
    file = _read_weights(path)
    state: Weights = model.state_dict()
    renamed = getattr(model, "renamed", str)
    weights = {name if name in state else renamed(name): tensor for name, tensor in file.items()}
    first_names = other_names(model)
    _refuse_apart(path, weights, first_names)
    in_file = _names_in(weights, first_names)
    # The reason of each entry that does not fit.
    misfits: dict[str, str] = {}
    for name in sorted(weights.keys() | state.keys()):
        if name not in state:
            misfits[name] = f"'{name}' is not in the model{did_you_mean(name, state)}"
        elif name not in weights:
            if first_names.get(name, name) not in in_file:
                misfits[name] = f"'{name}' is not in the file{did_you_mean(name, file)}"
        elif weights[name].shape != state[name].shape:
            file_shape, model_shape = tuple(weights[name].shape), tuple(state[name].shape)
            misfits[name] = f"'{name}' is {file_shape} in the file, and {model_shape} in the model"
    head = f"{head_of(model)}."
    for name, reason in misfits.items():
        if not name.startswith(head):
            raise InputError(f"model.weights = '{path}' does not fit the model: {reason}")
    if misfits:
        reason = next(iter(misfits.values()))
        log.warning(
            "model.weights: the head is not taken from the file, and begins as the seed draws it: "
            "%s",
            reason,
        )
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(head)}
    _refuse_values(path, weights, state, dict(model.named_parameters(remove_duplicate=False)))
    model.load_state_dict(weights, strict=False)


def _read_weights(path: str) -> Weights:
    """Return the tensors of a safetensors file by name.

    Raises `InputError` for all other files, and says what to do.
    """
    key = f"model.weights = '{path}'"
    if Path(path).is_dir():
        files = sorted(file.name for file in Path(path).glob("*.safetensors"))
        listing = f"; in it are {', '.join(files[:FILES_NAMED])}" if files else ""
        best = Path(path) / "checkpoints/best.safetensors"
        if best.is_file():
            listing = f"; it is a run's folder, so the best model's is '{best}'"
        raise InputError(f"{key} is a folder; give one safetensors file{listing}{_joining(files)}")
    if path.endswith(".index.json"):
        raise InputError(
            f"{key} lists the files of a model that is cut into several; give one safetensors file"
            f"{_joining(['a', 'b'])}"
        )
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"{key}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{key}: not a safetensors file that can be read ({error})") from None
    other_form = _other_form(content, path)
    if other_form:
        raise InputError(f"{key} {other_form}")
    try:
        return safetensors.torch.load(content)
    except SafetensorError as error:
        raise InputError(
            f"{key}: not a safetensors file that can be read ({error}); write it anew by "
            "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
        ) from None


def _joining(files: Sequence[str]) -> str:
    """Return the words of a message that say how several files of weights become one."""
    if len(files) < 2:
        return ""
    return (
        "; to join them: from safetensors.torch import load_file, save_file; weights = {}; "
        "[weights.update(load_file(file)) for file in FILES]; save_file(weights, "
        "'weights.safetensors')"
    )


def _other_form(content: bytes, path: str) -> str:
    """Say what a file is that is no safetensors file, and what to do.

    Returns an empty text if the beginning of the file does not say what it is.
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
            '"import torch; from safetensors.torch import save_file; '
            f"w = torch.load('{path}', map_location='cpu', weights_only=True); "
            "w = w.get('state_dict', w); "
            "save_file({k: v.clone().contiguous() for k, v in w.items()}, 'weights.safetensors')\""
        )
    if content.startswith((b"\x89HDF", b"GGUF")):
        return (
            "is a file of another tool (HDF5 or GGUF); load it there, and write the model's "
            "state_dict by safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
        )
    return ""


def _names_in(weights: Weights, first_names: Mapping[str, str]) -> set[str]:
    """Return the first names of the model's tensors that are in the file, under any name."""
    return {first_names.get(name, name) for name in weights}


def _refuse_apart(path: str, weights: Weights, first_names: Mapping[str, str]) -> None:
    """Raise `InputError` if the file has two values for one tensor of the model."""
    for name, first_name in first_names.items():
        if name not in weights or first_name not in weights:
            continue
        if not identical(weights[name], weights[first_name]):
            raise InputError(
                f"model.weights = '{path}' has '{first_name}' and '{name}' apart, and in the model "
                "they are one tensor; leave one of them out of the file"
            )


def _refuse_values(path: str, weights: Weights, state: Weights, parameters: Weights) -> None:
    """Raise `InputError` for values that the model cannot begin with.

    Half precision is allowed, and becomes the precision of the model.
    """
    for name, tensor in weights.items():
        if state[name].is_floating_point() and tensor.dtype not in FLOATS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise InputError(
                f"model.weights = '{path}': '{name}' is {dtype}, as quantised weights are; give "
                "weights in float32, float16 or bfloat16"
            )
        finite = bool(torch.isfinite(tensor).all())
        # A mask may hold infinities in the file if it holds infinities in the model.
        if not finite and (name in parameters or bool(torch.isfinite(state[name]).all())):
            raise InputError(
                f"model.weights = '{path}': '{name}' holds a NaN or an infinity: its training "
                "diverged, or the file is damaged; give weights of an earlier moment"
            )


def _layers_to_standardise(model: nn.Module, scale: float) -> list[nn.Module]:
    """Return all linear and convolution layers but the head, or none if the scale is 0.

    Raises `InputError` if there is no such layer, and warns if the model's outputs would vanish.
    """
    if not scale:
        return []
    layers = [layer for _, layer in _inner_layers(model) if can_be_standardised(layer)]
    if not layers:
        raise InputError(
            f"model.weight_standardisation = {scale}: the model has no linear layer and no "
            "convolution of torch's own classes, beside its head, whose weights could be "
            "standardised; give 0, or another model"
        )
    if vanishing(model, layers, scale):
        log.warning(
            "model.weight_standardisation = %g: the model has no norms, and with such small "
            "weights its outputs vanish, so it may learn nothing; give a larger value, such as 0.1",
            scale,
        )
    return layers


def _add_lora(model: nn.Module, lora: Lora) -> None:
    """Put peft's layers in the place of the layers that the patterns fit.

    Besides peft's matrices, only the head trains. Raises `InputError` if peft cannot be imported,
    or if there is no layer that LoRA can change.
    """
    head = head_of(model)
    # Peft takes a grouped convolution only if its groups divide the rank, so none is changed.
    layers = [name for name, layer in _inner_layers(model) if getattr(layer, "groups", 1) == 1]
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
        # This import takes seconds, as it imports transformers.
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        install = "pip install 'rayfed-distill[lora]'"
        raise InputError(
            f"model.lora needs peft, which cannot be imported ({error}): {install}"
        ) from None
    exact_pattern = "|".join(map(re.escape, names))
    # Peft's annotation asks for a whole number, but its code takes any number.
    scale: Any = lora.alpha
    config = LoraConfig(r=lora.rank, lora_alpha=scale, target_modules=exact_pattern)
    inject_adapter_in_model(config, model)
    model.get_submodule(head).requires_grad_(True)


def _inner_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of each linear and convolution layer but the head.

    Layers whose weights another module uses past them are left out.
    """
    excluded = [name for name, module in model.named_modules() if isinstance(module, CLOSED)]
    excluded.append(head_of(model))
    for name, module in model.named_modules():
        if name and isinstance(module, LAYERS) and not _is_in(name, excluded):
            yield name, module


def _is_in(name: str, modules: Iterable[str]) -> bool:
    """Say whether a name is the name of one of these modules, or lies inside one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)
