"""An average of updates that are rounded to the best levels for normally distributed entries.

The levels are those of Lloyd (IEEE Trans. Inf. Theory 1982) and Max (IRE Trans. Inf. Theory 1960):
of all quantisers with so many levels, theirs has the least mean squared error on a standard normal
number.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from rayfed.base.errors import InputError
from rayfed.base.values import Ge, Gt, Le
from rayfed.clients.settings import Training
from rayfed.methods.compress import WEIGHT_TEXT, bytes_of, mean_of, weighted
from rayfed.methods.part import Part
from rayfed.methods.views import ClientView, Fit, ServerView, Step
from rayfed.models.standardise import is_standardised
from rayfed.tensors.trees import Scaled, Tree
from rayfed.tensors.weights import Weights, parameters_of

# The bytes of the standard deviation of a tensor, as a float32.
DEVIATION = 4
# Newton's method needs five steps for two levels, and seven for 256.
NEWTON_STEPS = 20


@dataclass(frozen=True)
class NormalQuantizedAverage(Part):
    """Average updates whose entries are rounded to the best levels for a normal distribution.

    FedWSQ (Kim et al., ICCV 2025). This part is DANUQ, its distribution-aware non-uniform
    quantisation; `model.weight_standardisation` is its other half. The paper's text was not at
    hand. We follow the authors' code (Seongyeol-kim/FedWSQ, `utils/quantization_function.py`).

    An entry `u` of a tensor of the update becomes `s q(u / s)`. The level `q` nearest to a number
    is one of `2^bits` (`normal_levels`). `s` is the server's running mean of the deviations of
    this tensor's updates: `s <- (1 - momentum) s + momentum mean(std(u_k))`. With `scale =
    "client"` it is the deviation of the client's own update. A message has `bits` for each entry,
    and the deviation of each tensor.

    Rounded are tensors with two or more dimensions except the first and the last, as in the code:
    its stem, its head, the norms and the biases are sent as they are. Its levels for 4 bits lie up
    to 8 % below ours, which have the least error.
    """

    slot: ClassVar[str] = "average"
    bits: Annotated[int, Ge(1), Le(8), "bits of an entry; there are 2^bits levels"] = 4
    zero: Annotated[bool, "make 0 one of the levels, if there are more than two"] = True
    scale: Annotated[
        Literal["server", "client"],
        "whose deviation the levels are multiplied by: the server's running mean, or the client's",
    ] = "server"
    momentum: Annotated[
        float, Gt(0), Le(1), "what a round counts in the server's running mean of the deviations"
    ] = 0.1
    start: Annotated[float, Gt(0), "the server's deviation of each tensor at first"] = 1e-3
    ends: Annotated[bool, "round the first and the last weight of the model too"] = False
    standardised: Annotated[bool, "refuse a model without model.weight_standardisation"] = True
    by: Annotated[Literal["samples", "client"], WEIGHT_TEXT] = "samples"

    def check(self, model: nn.Module, training: Training) -> None:
        if self.standardised and not is_standardised(model):
            raise InputError(
                "normal_quantized_average: FedWSQ standardises the model's weights too; give "
                "model.weight_standardisation = 0.001 (0.05 for a model without norms, such as "
                "cnn), or standardised = false to this part"
            )
        if not self.rounded_names(parameters_of(model)):
            raise InputError(
                "normal_quantized_average: no weight would be rounded, as the model has none "
                "between its first and its last that trains; give ends = true to this part"
            )

    def init(self, weights: Weights) -> Tree:
        """Return the server's deviations of tensors; those that no client has sent are missing."""
        return {}

    def tell(self, deviations: Tree, server: ServerView, surveyed: None) -> tuple[Tree, Tree]:
        return deviations, {name: value.float() for name, value in deviations.items()}

    def report(self, client: ClientView, known: Tree, fit: Fit) -> tuple[Tree, None]:
        sent = dict(fit.weights)
        deviations: dict[str, Tensor] = {}
        parameters = fit.parameters
        for name in self.rounded_names(parameters):
            before = client.weights[name]
            # Sums must not depend on the layout in memory, which a model may have as channels last.
            update = (parameters[name].detach() - before).contiguous()
            deviations[name] = update.std()
            scale = deviations[name] if self.scale == "client" else known.get(name, self.start)
            sent[name] = before + rounded(update, scale, normal_levels(self.bits, self.zero))
        summands = weighted(self.by, client, fit, sent)
        if self.scale == "server":
            summands["deviations"] = Scaled(summands["weight"], deviations)
        return summands, None

    def bytes_sent(self, summands: Tree) -> int:
        """Return the bytes of the levels, in whole bytes per tensor, and of all that is exact."""
        parameters, others = summands["parameters"].values, summands["buffers"].values
        names = self.rounded_names(parameters)
        total = bytes_of(others)
        for name, tensor in parameters.items():
            if name in names:
                total += DEVIATION + math.ceil(self.bits * tensor.numel() / 8)
            else:
                total += tensor.nbytes
        return total

    def update(self, deviations: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        moved = dict(deviations)
        for name, summed in total.get("deviations", {}).items():
            before = deviations.get(name, self.start)
            mean = summed / total["weight"]
            moved[name] = (1 - self.momentum) * before + self.momentum * mean
        return moved, mean_of(total, step)

    def rounded_names(self, parameters: Weights) -> list[str]:
        """Return the names of the parameters that are rounded, in the order of the model."""
        names = [name for name, tensor in parameters.items() if tensor.ndim > 1]
        chosen = names if self.ends else names[1:-1]
        # The deviation of a single entry is not defined.
        return [name for name in chosen if parameters[name].numel() > 1]


def rounded(values: Tensor, scale: Tensor | float, levels: tuple[float, ...]) -> Tensor:
    """Round each entry to the nearest of `scale` times the levels, which ascend.

    >>> rounded(torch.tensor([-0.3, 0.4, 1.1, 9.0]), scale=0.5, levels=(-1.0, 0.0, 2.0))
    tensor([-0.5000,  0.0000,  1.0000,  1.0000])
    """
    known = torch.tensor(levels, dtype=values.dtype, device=values.device)
    between = (known[1:] + known[:-1]) / 2
    # If the scale is 0, the quotient is infinite or NaN, and the entry becomes 0.
    return known[torch.bucketize(values / scale, between)] * scale


@functools.cache
def normal_levels(bits: int, zero: bool = True) -> tuple[float, ...]:
    """Return `2^bits` levels for standard normal numbers, ascending.

    Without `zero`, they are the levels with the least mean squared error. With it, 0 is one of
    them, and there is one more above it than below: of all such levels, these have the least error.
    A single bit has no level for 0.

    >>> [round(level, 4) for level in normal_levels(1)]
    [-0.7979, 0.7979]
    >>> [round(level, 4) for level in normal_levels(2)]
    [-1.224, 0.0, 0.7646, 1.7241]
    >>> [round(level, 4) for level in normal_levels(2, zero=False)]
    [-1.5104, -0.4528, 0.4528, 1.5104]
    """
    half = 2 ** (bits - 1)
    if bits == 1 or not zero:
        above = positive_levels(half, zero=False)
        return (*mirrored(above), *above)
    below = positive_levels(half - 1, zero=True)
    return (*mirrored(below), 0.0, *positive_levels(half, zero=True))


def mirrored(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return the levels below 0 that are as far from it, ascending.

    >>> mirrored((1.0, 2.0))
    (-2.0, -1.0)
    """
    return tuple(-level for level in reversed(levels))


def positive_levels(number: int, zero: bool) -> tuple[float, ...]:
    """Return the best `number` levels above 0 for standard normal numbers, ascending.

    The levels below 0 mirror them, and with `zero` 0 lies between them as a level. Each is the mean
    of the numbers that are nearer to it than to other levels. Newton's method solves this system of
    equations; Lloyd's own iteration takes millions of steps for 256 levels.
    """
    # Many levels are spread like the cube root of the density, a normal distribution of variance 3
    # (Panter and Dite, Proc. IRE 1951).
    places = torch.arange(number, dtype=torch.float64) + 0.5
    share_above = (number - places) / (2 * number + int(zero))
    levels = -math.sqrt(3) * torch.special.ndtri(share_above)
    for _ in range(NEWTON_STEPS):
        means, slopes = means_between(levels, zero)
        change = torch.eye(number, dtype=torch.float64) - slopes
        levels = levels - torch.linalg.solve(change, levels - means)
    return tuple(levels.tolist())


def means_between(levels: Tensor, zero: bool) -> tuple[Tensor, Tensor]:
    """Return the mean of the normal numbers nearest to each of n positive levels, and the slopes.

    The slopes (n, n) are the derivatives of the means by the levels.
    """
    # Levels at 0 or below do not move: 0 itself, or the mirrored first level.
    first = levels[:1] / 2 if zero else torch.zeros_like(levels[:1])
    lower = torch.cat([first, (levels[1:] + levels[:-1]) / 2])
    upper = torch.cat([lower[1:], torch.full_like(first, math.inf)])
    density_at_lower, density_at_upper = density(lower), density(upper)
    # Differences of tails keep their digits far from 0, where those of `ndtr` would lose them.
    mass = torch.special.ndtr(-lower) - torch.special.ndtr(-upper)
    means = (density_at_lower - density_at_upper) / mass
    # Each bound lies between two levels, so a level moves it by half.
    by_lower = density_at_lower * (means - lower) / mass / 2
    by_upper = torch.zeros_like(by_lower)
    by_upper[:-1] = density_at_upper[:-1] * (upper[:-1] - means[:-1]) / mass[:-1] / 2
    of_own = by_lower + by_upper
    if not zero:
        of_own[0] = by_upper[0]
    slopes = torch.diag(of_own) + torch.diag(by_upper[:-1], 1) + torch.diag(by_lower[1:], -1)
    return means, slopes


def density(x: Tensor) -> Tensor:
    """Return the density of the standard normal distribution."""
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
