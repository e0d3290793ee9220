"""Weight standardisation: layers that use their weights with mean 0 and one standard deviation.

Shapes: `O` outputs of a layer (filters of a convolution, neurons of a linear layer).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# These layers make up for small outputs of the layer before them.
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# A shorter filter, without norms, lets outputs vanish within a few layers.
SHORT = 0.1
# It is added to a filter's standard deviation, as in FedWSQ's code.
EPSILON = 1e-5


def standardised(weight: Tensor, scale: float) -> Tensor:
    """Return a layer's weight (O, ...) with mean 0 and the deviation `scale` in each filter.

    Weight standardisation (Qiao et al., arXiv:1903.10520), with the scale of FedWSQ (Kim et al.,
    ICCV 2025), `rho` there. As in FedWSQ's code (Seongyeol-kim/FedWSQ, `models/resnet_ws.py`), the
    variance of `n` weights is a sum over `n - 1`, and 1e-5 is added to the deviation.

    >>> standardised(torch.tensor([[1.0, 3.0, 5.0]]), scale=2.0)
    tensor([[-2.0000,  0.0000,  2.0000]])
    """
    inputs = tuple(range(1, weight.ndim))
    deviation, mean = torch.std_mean(weight, dim=inputs, keepdim=True)
    return (weight - mean) / (deviation + EPSILON) * scale


class StandardisedConv(nn.modules.conv._ConvNd):
    """A convolution that uses its weight standardised; its parameter stays as it is."""

    weight_scale: float

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, standardised(self.weight, self.weight_scale), self.bias)


class StandardisedConv1d(StandardisedConv, nn.Conv1d):
    """A standardised convolution of sequences."""


class StandardisedConv2d(StandardisedConv, nn.Conv2d):
    """A standardised convolution of images."""


class StandardisedConv3d(StandardisedConv, nn.Conv3d):
    """A standardised convolution of volumes."""


class StandardisedLinear(nn.Linear):
    """A linear layer that uses its weight standardised; its parameter stays as it is."""

    weight_scale: float

    def forward(self, x: Tensor) -> Tensor:
        weight = standardised(self.weight, self.weight_scale)
        return nn.functional.linear(x, weight, self.bias)


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: StandardisedConv1d,
    nn.Conv2d: StandardisedConv2d,
    nn.Conv3d: StandardisedConv3d,
    nn.Linear: StandardisedLinear,
}


def can_be_standardised(layer: nn.Module) -> bool:
    """Say whether a layer is one of torch's own that can be standardised.

    A filter of a single weight cannot: it would become 0.
    """
    weight = getattr(layer, "weight", None)
    return type(layer) in KINDS and isinstance(weight, Tensor) and weight[0].numel() > 1


def standardise(layers: Iterable[nn.Module], scale: float) -> None:
    """Let layers use their weights standardised, in place.

    Their parameters keep their names and values, so that clients send, and the server averages,
    what is not standardised.
    """
    for layer in layers:
        # As torch's parametrizations do, which would rename the weight.
        layer.__class__ = KINDS[type(layer)]
        layer.weight_scale = scale  # type: ignore[assignment]


def vanishing(model: nn.Module, layers: Iterable[nn.Module], scale: float) -> bool:
    """Say whether a model's outputs would vanish, as it has no norms and filters are short."""
    if any(isinstance(module, NORMS) for module in model.modules()):
        return False
    sizes = [layer.get_parameter("weight")[0].numel() for layer in layers]
    return scale * math.sqrt(min(sizes)) < SHORT


def is_standardised(model: nn.Module) -> bool:
    """Say whether a model has layers that use their weights standardised."""
    return any(type(module) in KINDS.values() for module in model.modules())
