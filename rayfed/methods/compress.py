"""Averages of compressed updates: clients send less than their weights.

What is added up is what the server would make of the messages: weights. `bytes_sent` says how long
the messages are. Only parameters are compressed. Buffers are sent as they are: their values, such
as BatchNorm's counts of batches, are integers or must stay exact.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from rayfed.base.values import Ge, Gt, Le
from rayfed.methods.part import Part
from rayfed.methods.server import Average
from rayfed.methods.views import ClientView, Fit, Step
from rayfed.tensors.trees import Scaled, Tree
from rayfed.tensors.weights import Weights

# The bytes of the place of an entry, as an int32.
PLACE = 4
# The bytes of the length of a tensor, as a float32.
LENGTH = 4
WEIGHT_TEXT = "what a client's weight is: its number of samples, or 1"


@dataclass(frozen=True)
class SparseAverage(Part):
    """Average updates of which a client sends the largest entries, and keeps the rest for later.

    Top-k with error feedback: Stich et al., "Sparsified SGD with Memory" (NeurIPS 2018), algorithm
    1, here with local epochs as in Basu et al., "Qsparse-local-SGD" (NeurIPS 2019), algorithm 1.

    A client's update is `u = w_local - w + e`. Its `share` of entries with the largest magnitudes,
    over all parameters, is sent. The error `e` of its next training is what was not sent. Among
    equal magnitudes, the first entries are sent.
    """

    slot: ClassVar[str] = "average"
    share: Annotated[float, Gt(0), Le(1), "share of the entries that are sent; 1 is FedAvg"] = 0.01
    feedback: Annotated[bool, "add what was not sent to the client's next update"] = True
    by: Annotated[Literal["samples", "client"], WEIGHT_TEXT] = "samples"

    def report(self, client: ClientView, local: None, fit: Fit) -> tuple[Tree, Tree]:
        trained = {name: tensor.detach() for name, tensor in fit.parameters.items()}
        if client.memory is not None:
            trained = {name: tensor + client.memory[name] for name, tensor in trained.items()}
        update = {name: tensor - client.weights[name] for name, tensor in trained.items()}
        kept = largest(update, num_kept(update, self.share))
        sent = dict(fit.weights)
        error: dict[str, Tensor] = {}
        for name, tensor in trained.items():
            sent[name] = torch.where(kept[name], tensor, client.weights[name])
            error[name] = torch.where(kept[name], 0.0, update[name])
        # If all is sent, there is no error, and no memory.
        memory = error if self.feedback and self.share < 1 else None
        return weighted(self.by, client, fit, sent), memory

    def bytes_sent(self, summands: Tree) -> int:
        """Return the bytes of the values that are sent, and of their places.

        The places are numbers of 4 bytes, or a bit for each entry if that is shorter.
        """
        parameters, others = summands["parameters"].values, summands["buffers"].values
        sizes = {name: tensor.numel() for name, tensor in parameters.items()}
        number, total = num_kept(parameters, self.share), sum(sizes.values())
        places = 0 if number == total else min(PLACE * number, math.ceil(total / 8))
        # Values of the largest type, as any entry may be sent.
        width = max((tensor.element_size() for tensor in parameters.values()), default=0)
        return number * width + places + bytes_of(others)

    def update(self, state: None, total: Tree, step: Step) -> tuple[None, Step]:
        return None, mean_of(total, step)


@dataclass(frozen=True)
class QuantizedAverage(Part):
    """Average updates whose entries are rounded at random to a few levels.

    FedPAQ (Reisizadeh et al., AISTATS 2020), algorithm 1, with the quantiser of QSGD (Alistarh et
    al., NeurIPS 2017), eq. 4 there, from memory.

    An entry `v_i` of a tensor `v` of the update becomes `||v|| sign(v_i) l / levels`, where the
    level `l` is `levels |v_i| / ||v||`, rounded up with the probability of its fraction and down
    otherwise. So the mean over the draws is `v_i`. A message has the length of each tensor as a
    float, and for each entry one of `2 levels + 1` numbers, all with the same number of bits. The
    paper of QSGD shortens this further with a code for small levels.
    """

    slot: ClassVar[str] = "average"
    levels: Annotated[
        int, Ge(1), Le(2**23), "levels of a magnitude above 0; 127 are a byte per entry"
    ] = 127
    by: Annotated[Literal["samples", "client"], WEIGHT_TEXT] = "samples"

    def report(self, client: ClientView, local: None, fit: Fit) -> tuple[Tree, None]:
        sent = dict(fit.weights)
        for name, tensor in fit.parameters.items():
            before = client.weights[name]
            sent[name] = before + quantized(tensor.detach() - before, self.levels)
        return weighted(self.by, client, fit, sent), None

    def bytes_sent(self, summands: Tree) -> int:
        """Return the bytes of the levels, in whole bytes per tensor, and of the lengths."""
        parameters, others = summands["parameters"].values, summands["buffers"].values
        bits = math.ceil(math.log2(2 * self.levels + 1))
        total = bytes_of(others)
        for tensor in parameters.values():
            total += LENGTH + math.ceil(bits * tensor.numel() / 8)
        return total

    def update(self, state: None, total: Tree, step: Step) -> tuple[None, Step]:
        return None, mean_of(total, step)


def weighted(by: str, client: ClientView, fit: Fit, sent: Weights) -> Tree:
    """Return the summands of a client whose weights arrive as `sent`."""
    weight = client.num_examples if by == "samples" else 1
    parameters = {name: sent[name] for name in fit.parameters}
    buffers = {name: tensor for name, tensor in sent.items() if name not in parameters}
    return {
        "weight": weight,
        "parameters": Scaled(weight, parameters),
        "buffers": Scaled(weight, buffers),
    }


def mean_of(total: Tree, step: Step) -> Step:
    """Return the step to the mean of what the clients have sent."""
    weights = {**total["parameters"], **total["buffers"]}
    _, averaged = Average().update(None, {"weight": total["weight"], "weights": weights}, step)
    return averaged


def bytes_of(tensors: Weights) -> int:
    """Return the bytes of tensors that are sent as they are."""
    return sum(tensor.nbytes for tensor in tensors.values())


def num_kept(tensors: Weights, share: float) -> int:
    """Return how many entries of all tensors together are sent: at least one.

    >>> num_kept({"w": torch.zeros(10), "b": torch.zeros(2)}, share=0.25)
    3
    """
    total = sum(tensor.numel() for tensor in tensors.values())
    # Without rounding, 0.07 * 100 would be above 7.
    return max(1, math.ceil(round(share * total, 9)))


def largest(tensors: Weights, number: int) -> dict[str, Tensor]:
    """Return for each tensor which entries are among the `number` with the largest magnitudes.

    The magnitudes of all tensors are compared. Of equal ones, the first count.

    >>> largest({"w": torch.tensor([3.0, -5.0]), "b": torch.tensor([4.0])}, 2)
    {'w': tensor([False,  True]), 'b': tensor([True])}
    """
    if not tensors:
        # All parameters stay at the clients.
        return {}
    magnitudes = torch.cat([tensor.abs().flatten() for tensor in tensors.values()])
    # The order in which `topk` gives equal values may depend on the device: only its least counts.
    least = magnitudes.topk(number).values.min()
    kept = magnitudes > least
    equal = magnitudes == least
    kept |= equal & (equal.cumsum(0) <= number - kept.sum())
    masks: dict[str, Tensor] = {}
    start = 0
    for name, tensor in tensors.items():
        masks[name] = kept[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    return masks


def quantized(values: Tensor, levels: int) -> Tensor:
    """Round a tensor at random to levels of its length; the mean over the draws is the tensor.

    Values on a level stay there.

    >>> quantized(torch.tensor([3.0, -4.0]), levels=5)
    tensor([ 3., -4.])
    """
    length = values.norm()
    if not length:
        return torch.zeros_like(values)
    level = values.abs() * (levels / length)
    down = level.floor()
    up = torch.rand_like(values) < level - down
    return values.sign() * (down + up) * (length / levels)
