"""Find code of the user's that keeps something from client to client, and refuse it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfed.base.errors import BrokenContract
from rayfed.measures.metrics import Evaluation
from rayfed.methods.part import Part, parts_at
from rayfed.rounds.messages import ClientReply
from rayfed.rounds.setup import Setup
from rayfed.tensors.trees import leaves
from rayfed.tensors.wire import bytes_of

# Packages whose parts and modules keep nothing of a client: those of any other may, and are the
# user's.
LIBRARIES = frozenset({"rayfed", "torch", "torchvision", "timm", "peft"})


def users_own(setup: Setup, round: int) -> list[Part | nn.Module]:
    """Return the parts and the modules of the model that are the user's."""
    candidates: list[Part | nn.Module] = list(parts_at(setup.job.method, round))
    candidates.extend(setup.model.modules())
    users = [candidate for candidate in candidates if _of_user(type(candidate))]
    # A function of the user's makes a model of torch's own modules, and may have hung hooks on
    # them.
    if ":" in setup.job.model.name and setup.model not in users:
        users.append(setup.model)
    return users


def _of_user(kind: type) -> bool:
    """Say whether a class is the user's."""
    return kind.__module__.partition(".")[0] not in LIBRARIES


# Slot -> all bits that a run depends on; the loss is under the slot ''.
Bits = dict[str, Any]


def bits_of(reply: ClientReply) -> Bits:
    """Return the bits of a client's reply, by slot."""
    bits: Bits = {"": reply.row.train_loss.hex()}
    for slot in reply.summands.keys() | reply.memory.keys():
        of_slot = []
        for path, leaf in leaves((reply.summands.get(slot), reply.memory.get(slot))):
            of_slot.append((path, _bytes(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)))
        bits[slot] = of_slot
    return bits


def refuse_other_bits(
    where: str, users_code: Sequence[Part | nn.Module], before: Bits, after: Bits
) -> None:
    """Raise `BrokenContract` where a client that is served again, after others, has other bits."""
    slots = [slot for slot in before.keys() | after.keys() if before.get(slot) != after.get(slot)]
    if not slots:
        return
    suspects = [code for code in users_code if getattr(code, "slot", "") in slots] or users_code
    names = " or ".join(dict.fromkeys(map(_name, suspects)))
    raise BrokenContract(
        f"{where}: served again after others, it gives other bits, so the results would depend on "
        f"which process serves whom, and on where a run is resumed. {names} keeps something from "
        "client to client (a global, an attribute of a class, a generator of its own, a patched "
        "function): give it back as memory or state, and draw from torch's generator; to have no "
        "check: ray.check_repeat = false"
    )


def refuse_other_numbers(
    modules: Sequence[nn.Module], before: Evaluation, again: Evaluation
) -> None:
    """Raise `BrokenContract` where a model has other numbers on the same images, seen again."""
    same_answers = np.array_equal(before.confusion, again.confusion)
    if same_answers and before.loss.hex() == again.loss.hex():
        return
    names = " or ".join(dict.fromkeys(map(_name, modules)))
    raise BrokenContract(
        "the evaluation: on the same test images, the same model gives other outputs the second "
        f"time. {names} keeps something from one forward pass to the next (a global, an attribute "
        "of a class, a generator of its own): keep it in the model's buffers, and draw from "
        "torch's generator, which rayfed seeds; to have no check: ray.check_repeat = false"
    )


def _name(code: Part | nn.Module) -> str:
    """Return the name of the user's code for a message."""
    kind = type(code)
    if _of_user(kind):
        return f"{kind.__module__}.{kind.__qualname__}"
    return "the model that your function makes"


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values."""
    return bytes_of(tensor.detach().contiguous().reshape(-1)).tobytes()
