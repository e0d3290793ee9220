"""Changes to any model after it is built: weights from a file, frozen parameters, LoRA."""

import difflib
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

from rayfed.base.errors import InputError
from rayfed.base.files import read_regular
from rayfed.models.settings import Adapt, Lora
from rayfed.tensors.weights import Weights

NAMED = 4  # names in a message
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CLOSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # they take the weights of their layers, and call none

log = logging.getLogger(__name__)


def adapt(model: nn.Module, settings: Adapt, seed: int) -> None:
    """Change a model in place as the keys of every model say; LoRA's matrices are drawn from `seed` alone.

    Raises `InputError` where the file does not fit, a pattern matches nothing, or nothing would train.
    """
    if settings.weights:
        _load_file(model, settings.weights)
    for name in matching(settings.freeze, dict(model.named_parameters()), "model.freeze", "parameter"):
        model.get_parameter(name).requires_grad_(False)
    if settings.lora.rank:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            _add_lora(model, settings.lora)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"model.freeze = {settings.freeze}: no parameter of the model would train; freeze fewer")


def matching(patterns: Sequence[str], names: Iterable[str], key: str, kind: str) -> list[str]:
    """The names that a pattern fits, in their own order. Raises `InputError` for a pattern that fits no name."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"{key}: the pattern '{pattern}' fits no {kind}; {_nearest(pattern, names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def head_of(model: nn.Module) -> str:
    """The name of the module that gives the logits: `head`, or the last linear or convolution layer."""
    if isinstance(getattr(model, "head", None), nn.Module):
        return "head"
    return next((name for name, module in reversed([*model.named_modules()]) if isinstance(module, LAYERS)), "")


def _load_file(model: nn.Module, path: str) -> None:
    """The weights in a file, by our names or by those of timm's own files; the head may be of other classes."""
    try:
        given = safetensors.torch.load(read_regular(Path(path)))
    except FileNotFoundError:
        raise InputError(f"model.weights = '{path}': there is no such file") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"model.weights = '{path}': not a safetensors file that can be read ({error})") from None
    own: Weights = model.state_dict()
    renamed = getattr(model, "renamed", str)
    found = {name if name in own else renamed(name): tensor for name, tensor in given.items()}
    wrong = sorted(
        [
            *(f"'{name}' is not in the model; {_nearest(name, own)}" for name in found.keys() - own.keys()),
            *(f"'{name}' is not in the file; {_nearest(name, given)}" for name in own.keys() - found.keys()),
            *(
                f"'{name}' is {tuple(found[name].shape)} in the file, and {tuple(tensor.shape)} in the model"
                for name, tensor in own.items()
                if name in found and found[name].shape != tensor.shape
            ),
        ]
    )
    head = f"'{head_of(model)}."
    if refused := [text for text in wrong if not text.startswith(head)]:
        more = f"; and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
        raise InputError(f"model.weights = '{path}' does not fit the model: {'; '.join(refused[:NAMED])}{more}")
    if wrong:
        log.warning("model.weights: the head is not taken from the file, and begins as the seed draws it: %s", wrong[0])
        found = {name: tensor for name, tensor in found.items() if not f"'{name}".startswith(head)}
    model.load_state_dict(found, strict=False)


def _add_lora(model: nn.Module, lora: Lora) -> None:
    """peft's layers in place of those that the patterns fit; beside their matrices only the head trains."""
    head = head_of(model)
    apart = [head, *(name for name, module in model.named_modules() if isinstance(module, CLOSED))]
    # Of grouped convolutions, peft takes only those whose groups divide the rank.
    layers = [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, LAYERS) and getattr(module, "groups", 1) == 1 and not _is_in(name, apart)
    ]
    if not layers:
        kinds = "linear layer and no convolution without groups, beside its head, that LoRA could change"
        closed = "those of torch's own attention and TransformerEncoderLayer it cannot"
        raise InputError(f"model.lora: the model has no {kinds}; {closed}")
    names = matching(lora.targets or ["*"], layers, "model.lora.targets", "layer that LoRA can change")
    weights = {name: model.get_submodule(name).get_parameter("weight") for name in names}
    if full := [name for name, weight in weights.items() if lora.rank >= min(len(weight), weight[0].numel())]:
        text = "model.lora.rank = %d: no less than the rank of '%s' itself%s, so LoRA sends more than the whole layer"
        log.warning(text, lora.rank, full[0], f" (and of {len(full) - 1} more)" if len(full) > 1 else "")
    try:
        from peft import LoraConfig, inject_adapter_in_model  # takes seconds: it imports transformers
    except ImportError as error:
        install = "pip install 'rayfed-distill[lora]'"
        raise InputError(f"model.lora needs peft, which cannot be imported ({error}): {install}") from None
    exactly = "|".join(map(re.escape, names))
    scale: Any = lora.alpha  # peft's annotation asks for a whole number, and its code does not
    inject_adapter_in_model(LoraConfig(r=lora.rank, lora_alpha=scale, target_modules=exactly), model)
    model.get_submodule(head).requires_grad_(True)


def _is_in(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _nearest(given: str, names: Iterable[str]) -> str:
    """The end of a message about a name that is not there."""
    names = list(names)
    if near := difflib.get_close_matches(given, sorted(names), n=3, cutoff=0.3):
        return f"the nearest are {', '.join(map(repr, near))}"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"there are {', '.join(map(repr, names[:NAMED]))}{more}" if names else "there is none"
