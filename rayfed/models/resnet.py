"""Residual networks for small images (He et al., CVPR 2016).

All have the CIFAR stem, a 3x3 convolution of stride 1 and no pool, and so take images of any size. The first stage
keeps the resolution and every later one halves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from rayfed.models.classifier import Classifier

__all__ = ["resnet8", "resnet10", "resnet50"]


def resnet8(*, image_shape: tuple[int, int, int], num_classes: int) -> Classifier:
    """Residual network of 8 layers: one basic block at each of the widths 16, 32, 64."""
    return _resnet(image_shape, num_classes, block=_basic, stem=16, widths=(16, 32, 64), depths=(1, 1, 1))


def resnet10(*, image_shape: tuple[int, int, int], num_classes: int) -> Classifier:
    """Residual network of 10 layers: one basic block at each of the widths 64, 128, 256, 512."""
    widths = (64, 128, 256, 512)
    return _resnet(image_shape, num_classes, block=_basic, stem=64, widths=widths, depths=(1, 1, 1, 1))


def resnet50(*, image_shape: tuple[int, int, int], num_classes: int) -> Classifier:
    """Residual network of 50 layers: 3, 4, 6 and 3 bottleneck blocks (FedSSD and FedCSD)."""
    widths = (256, 512, 1024, 2048)
    return _resnet(image_shape, num_classes, block=_bottleneck, stem=64, widths=widths, depths=(3, 4, 6, 3))


class Residual(nn.Module):
    """`relu(path(x) + shortcut(x))`; the shortcut is a 1x1 convolution where the shape changes, else `x` itself."""

    def __init__(self, path: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = path
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.path(x) + self.shortcut(x))


def _basic(inputs: int, outputs: int, stride: int) -> Residual:
    path = nn.Sequential(*_convolution(inputs, outputs, 3, stride), nn.ReLU(), *_convolution(outputs, outputs, 3))
    return Residual(path, inputs, outputs, stride)


def _bottleneck(inputs: int, outputs: int, stride: int) -> Residual:
    inner = outputs // 4
    path = nn.Sequential(
        *_convolution(inputs, inner, 1),
        nn.ReLU(),
        *_convolution(inner, inner, 3, stride),
        nn.ReLU(),
        *_convolution(inner, outputs, 1),
    )
    return Residual(path, inputs, outputs, stride)


def _resnet(
    image_shape: tuple[int, int, int],
    num_classes: int,
    *,
    block: Callable[[int, int, int], Residual],
    stem: int,
    widths: Sequence[int],
    depths: Sequence[int],
) -> Classifier:
    layers = [*_convolution(image_shape[0], stem, 3), nn.ReLU()]
    inputs = stem
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for position in range(depth):
            layers.append(block(inputs, width, 2 if stage > 0 and position == 0 else 1))
            inputs = width
    return Classifier(
        features=nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        head=nn.Linear(inputs, num_classes),
    )


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.BatchNorm2d(outputs)
