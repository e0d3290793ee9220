"""Code of the user's may keep something from client to client: who it is, its caches, and a check
that refuses it.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfed.base.errors import BrokenContract
from rayfed.base.files import is_installed
from rayfed.measures.metrics import Evaluation
from rayfed.methods.part import Part, parts_at
from rayfed.rounds.messages import ClientReply
from rayfed.rounds.setup import Setup
from rayfed.tensors.trees import leaves
from rayfed.tensors.wire import bytes_of

# Packages whose parts and modules keep nothing of a client: those of any other may, and are the
# user's.
LIBRARIES = frozenset({"rayfed", "torch", "torchvision", "timm", "peft"})
RAYFED = str(Path(__file__).parents[1])


def users_own(setup: Setup, round: int) -> list[Part | nn.Module]:
    """The parts and the modules of the model that are the user's."""
    every: list[Part | nn.Module] = [*parts_at(setup.job.method, round), *setup.model.modules()]
    own = [one for one in every if _of_user(type(one))]
    # A function of the user's makes a model of torch's own modules, and may have hung hooks on
    # them.
    if ":" in setup.job.model.name and setup.model not in own:
        own.append(setup.model)
    return own


def users_caches(own: Sequence[Part | nn.Module]) -> list[Callable[[], object]]:
    """What empties the caches in the user's modules, in their classes, and of the parts'
    `cached_property`.
    """
    empty: list[Callable[[], object]] = []
    for module in filter(_is_users, list(sys.modules.values())):
        values = list(vars(module).values())
        for kind in [
            value
            for value in values
            if isinstance(value, type) and value.__module__ == module.__name__
        ]:
            # Also of a staticmethod.
            values += [getattr(value, "__func__", value) for value in vars(kind).values()]
        clears = [
            getattr(value, "cache_clear", None)
            for value in values
            if callable(value) and not isinstance(value, type)
        ]
        empty += [clear for clear in clears if callable(clear)]
    for part in own:
        for name in dir(type(part)):
            if isinstance(getattr(type(part), name), functools.cached_property):
                empty.append(partial(vars(part).pop, name, None))
    return empty


def _is_users(module: ModuleType) -> bool:
    """Whether a module is a file that is neither installed nor of this package."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not file.startswith(RAYFED) and not is_installed(file)


def _of_user(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in LIBRARIES


# Slot -> all bits that a run depends on; the loss is under the slot ''.
Bits = dict[str, Any]


def bits_of(reply: ClientReply) -> Bits:
    """The bits of a client's reply."""
    bits: Bits = {"": reply.row.train_loss.hex()}
    for slot in reply.summands.keys() | reply.memory.keys():
        of_slot = leaves((reply.summands.get(slot), reply.memory.get(slot)))
        bits[slot] = [
            (path, _bytes(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf))
            for path, leaf in of_slot
        ]
    return bits


def refuse_other_bits(
    work: str, own: Sequence[Part | nn.Module], before: Bits, after: Bits
) -> None:
    """Raises `BrokenContract` where a client that is served again, after others, gives other bits."""
    slots = [slot for slot in before.keys() | after.keys() if before.get(slot) != after.get(slot)]
    if not slots:
        return
    suspects = [one for one in own if getattr(one, "slot", "") in slots] or own
    names = " or ".join(dict.fromkeys(map(_name, suspects)))
    raise BrokenContract(
        f"{work}: served again after others, it gives other bits, so the results would depend on "
        f"which process serves whom, and on where a run is resumed. {names} keeps something from "
        "client to client (a global, an attribute of a class, a generator of its own, a patched "
        "function): give it back as memory or state, and draw from torch's generator; to have no "
        "check: ray.check_repeat = false"
    )


def refuse_other_numbers(own: Sequence[nn.Module], first: Evaluation, again: Evaluation) -> None:
    """Raises `BrokenContract` where a model, looked at again on the same images, gives other
    numbers.
    """
    same_answers = np.array_equal(first.confusion, again.confusion)
    if same_answers and first.loss.hex() == again.loss.hex():
        return
    names = " or ".join(dict.fromkeys(map(_name, own)))
    raise BrokenContract(
        "the evaluation: on the same test images, the same model gives other outputs the second "
        f"time. {names} keeps something from one forward pass to the next (a global, an attribute "
        "of a class, a generator of its own): keep it in the model's buffers, and draw from "
        "torch's generator, which rayfed seeds; to have no check: ray.check_repeat = false"
    )


def _name(one: Part | nn.Module) -> str:
    kind = type(one)
    return (
        f"{kind.__module__}.{kind.__qualname__}"
        if _of_user(kind)
        else "the model that your function makes"
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes_of(tensor.detach().contiguous().reshape(-1)).tobytes()
