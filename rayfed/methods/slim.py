"""FedAlign's part: it holds the last stage of a network near a slimmed copy of this stage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from rayfed.base.errors import InputError
from rayfed.base.values import Ge, Gt, Le
from rayfed.clients.settings import Training
from rayfed.methods.part import Part
from rayfed.methods.requirements import require_features
from rayfed.methods.views import Batch


@dataclass(frozen=True)
class SlimAlign(Part):
    """Keep the last stage as smooth as a slimmed copy of this stage.

    FedAlign (Mendieta et al., CVPR 2022), eq. 3-5.

    The slimmed stage shares the stage's weights and keeps the first `width` of the channels of its
    input and of every layer. For both stages, the spectral norm of the matrix between input and
    output features stands for the Lipschitz constant. The slimmed stage's norm is pulled to the
    full stage's. The authors' code scales the gap to the cross-entropy and clips gradients; we
    divide the gap by the full norm, which needs neither. FedNTD compares with FedAlign in its Table
    13.
    """

    mu: Annotated[float, Ge(0), "weight of the term; 0 is FedAvg"] = 0.45
    width: Annotated[float, Gt(0), Le(1), "share of the channels that the slimmed stage keeps"] = (
        0.25
    )

    def check(self, model: nn.Module, training: Training) -> None:
        require_features(self, model)
        stages = model.features
        if not isinstance(stages, nn.Sequential) or not any(
            list(stage.parameters()) for stage in stages
        ):
            raise InputError(
                f"{self!r} needs a model whose `features` is an nn.Sequential, to find its last "
                "stage"
            )

    def loss(self, batch: Batch, local: None) -> Tensor:
        with torch.no_grad():
            stage, inputs, outputs = _last_stage(batch.model.features, batch.images.clone())  # type: ignore[arg-type]
            full = _spectral_norm(inputs, outputs)
            narrow = _cut(inputs, self.width)
        slim = _spectral_norm(narrow, _slimmed(stage, narrow, self.width))
        # The gap is divided by the full norm, because features have no common scale. With the plain
        # gap, `cnn` and `lenet` diverged.
        return self.mu * ((slim - full) / full.clamp(min=1e-6)).square().mean()


def _last_stage(features: nn.Module, images: Tensor) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return the last stage of `features`, with its input and its output on some images.

    A stage begins with a layer that changes the shape, and ends before the next such layer. It is
    the last stage that has parameters: the blocks of a residual network's last resolution, or the
    hidden layer of `cnn` with its ReLU.
    """
    layers, values = list(_layers(features)), [images]
    for layer in layers:
        values.append(_apart(layer, values[-1]))
    changes = [i for i in range(len(layers)) if values[i].shape != values[i + 1].shape]
    trained = [i for i, layer in enumerate(layers) if list(layer.parameters())]
    # Token numbers make no matrix, so the stage cannot begin before the first real values.
    earliest = next(i for i, value in enumerate(values) if value.is_floating_point())
    start = max((i for i in changes if earliest <= i <= trained[-1]), default=earliest)
    # A layer without parameters, for example a pool, is left before the stage.
    start = start if start in trained else start + 1
    end = min((i for i in changes if i > trained[-1]), default=len(layers))
    return nn.Sequential(*layers[start:end]), values[start], values[end]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a sequence, and of the sequences in it, in order.

    Dropout is left out, because two passes would drop different values.
    """
    if type(module).forward is nn.Sequential.forward:
        for layer in module.children():
            yield from _layers(layer)
    elif not isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
        yield module


def _apart(module: nn.Module, x: Tensor) -> Tensor:
    """Run a forward pass that leaves no trace in the model.

    BatchNorm's running statistics go to copies.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return torch.func.functional_call(module, buffers, (x,))


def _cut(x: Tensor, width: float) -> Tensor:
    """Return `x`, (B, c, ...), with only the first `width` of its channels; the others are 0."""
    channels = x.shape[1]
    mask = torch.arange(channels, device=x.device) < max(1, round(width * channels))
    return x * mask.view([1, channels] + [1] * (x.dim() - 2))


def _slimmed(stage: nn.Module, x: Tensor, width: float) -> Tensor:
    """Return the output of a stage with only the first `width` of each layer's channels.

    The input is cut as well, so a shortcut that is the identity carries only these channels.
    """

    def cut(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return _cut(output, width)

    hooks = []
    for layer in stage.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
            hooks.append(layer.register_forward_hook(cut))
    try:
        return _apart(stage, x)
    finally:
        for hook in hooks:
            hook.remove()


def _spectral_norm(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return the largest singular value of the matrix between input and output features, (B,).

    There is one matrix per sample. Both features are (B, c, h, w) or (B, c). If two maps differ in
    size, the larger one is pooled to the smaller one. The value comes from ten power iterations.
    """
    if inputs.dim() == 4 and inputs.shape[2:] != outputs.shape[2:]:
        inputs = nn.functional.adaptive_avg_pool2d(inputs, list(outputs.shape[2:]))  # type: ignore[arg-type]
    a, b = _as_columns(inputs), _as_columns(outputs)

    def apply(v: Tensor) -> Tensor:
        # The matrix a b^T / (h w) is never formed, because it may have millions of entries.
        return a @ (b.transpose(1, 2) @ v) / a.shape[2]

    with torch.no_grad():
        v = torch.ones(len(b), b.shape[1], 1, dtype=b.dtype, device=b.device)  # (B, c_out, 1)
        for _ in range(10):
            v = nn.functional.normalize(b @ (a.transpose(1, 2) @ apply(v)), dim=1)
    return apply(v).flatten(1).norm(dim=1)


def _as_columns(features: Tensor) -> Tensor:
    """Return features as (B, c, h w), or (B, c, 1) if they are (B, c)."""
    return features.flatten(2) if features.dim() == 4 else features[:, :, None]
