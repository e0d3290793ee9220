"""Residual networks for small images (He et al., CVPR 2016).

They have the CIFAR stem, a 3x3 convolution of stride 1 without a pool, so they take images of any
size. The first stage keeps the resolution and every later stage halves it. `norm = "group"` puts
GroupNorm of `groups` groups (Wu and He, ECCV 2018) in the place of BatchNorm. Clients with skewed
labels disagree about BatchNorm's statistics.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from torch import Tensor, nn

from rayfed.base.errors import InputError
from rayfed.base.values import Ge
from rayfed.models.classifier import Classifier

# A block is made from its inputs, outputs and stride.
Block = Callable[[int, int, int], nn.Module]
Norm = Literal["batch", "group"]
# The number of groups of GroupNorm.
Groups = Annotated[int, Ge(1)]
Shape = tuple[int, int, int]


def resnet8(
    *, image_shape: Shape, num_classes: int, norm: Norm = "batch", groups: Groups = 2
) -> Classifier:
    """Build a residual network of 8 layers: a basic block at each of the widths 16, 32, 64."""
    return _resnet(image_shape, num_classes, _basic, 16, [(16, 1), (32, 1), (64, 1)], norm, groups)


def resnet10(
    *, image_shape: Shape, num_classes: int, norm: Norm = "batch", groups: Groups = 2
) -> Classifier:
    """Build a residual network of 10 layers: a basic block at each of the widths 64 to 512.

    The widths are 64, 128, 256, 512.
    """
    return _resnet(
        image_shape, num_classes, _basic, 64, [(64, 1), (128, 1), (256, 1), (512, 1)], norm, groups
    )


def resnet18(
    *,
    image_shape: Shape,
    num_classes: int,
    stem: Literal["3x3", "7x7"] = "3x3",
    norm: Norm = "batch",
    groups: Groups = 2,
) -> Classifier:
    """Build a residual network of 18 layers: 2 basic blocks at each of the widths 64 to 512.

    The widths are 64, 128, 256, 512.

    FedACG, FedRCL and FedWSQ train it with GroupNorm of 2 groups; FL-Simulator too, with the 7x7
    stem of large images, which has stride 2 and a pool.
    """
    stages = [(64, 2), (128, 2), (256, 2), (512, 2)]
    return _resnet(image_shape, num_classes, _basic, 64, stages, norm, groups, large=stem == "7x7")


def resnet50(
    *, image_shape: Shape, num_classes: int, norm: Norm = "batch", groups: Groups = 2
) -> Classifier:
    """Build a residual network of 50 layers: 3, 4, 6 and 3 bottleneck blocks.

    FedSSD and FedCSD train it.
    """
    return _resnet(
        image_shape,
        num_classes,
        _bottleneck,
        64,
        [(256, 3), (512, 4), (1024, 6), (2048, 3)],
        norm,
        groups,
    )


def resnet56(
    *,
    image_shape: Shape,
    num_classes: int,
    bottleneck: bool = False,
    norm: Norm = "batch",
    groups: Groups = 2,
) -> Classifier:
    """Build a residual network of 56 layers for CIFAR: 9 basic blocks per width 16, 32, 64.

    It is the network of section 4.2 of He et al. With `bottleneck`, it is the network of the same
    name in the code of FedML and of FedAlign: 6 bottleneck blocks at each of the widths 64, 128,
    256. They have 0.85 and 0.59 million parameters for 10 classes.
    """
    if bottleneck:
        return _resnet(
            image_shape, num_classes, _bottleneck, 16, [(64, 6), (128, 6), (256, 6)], norm, groups
        )
    return _resnet(image_shape, num_classes, _padded, 16, [(16, 9), (32, 9), (64, 9)], norm, groups)


class Residual(nn.Module):
    """A block with a shortcut: `relu(path(x) + shortcut(x))`."""

    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path = path
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.path(x) + self.shortcut(x))


class Pad(nn.Module):
    """Every `stride`-th pixel, and `channels` maps of zeros after the maps of `x`.

    It has no parameters (He et al., option A).
    """

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.channels = channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.channels)
        )


def _basic(inputs: int, outputs: int, stride: int) -> Residual:
    """Return a block of two 3x3 convolutions, with a projection as its shortcut."""
    return Residual(
        _two_convolutions(inputs, outputs, stride), _projection(inputs, outputs, stride)
    )


def _padded(inputs: int, outputs: int, stride: int) -> Residual:
    """Return a block of two 3x3 convolutions, with padding as its shortcut."""
    return Residual(_two_convolutions(inputs, outputs, stride), Pad(outputs - inputs, stride))


def _two_convolutions(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return two 3x3 convolutions with a ReLU between them; the first has the stride."""
    return nn.Sequential(
        *_convolution(inputs, outputs, 3, stride), nn.ReLU(), *_convolution(outputs, outputs, 3)
    )


def _bottleneck(inputs: int, outputs: int, stride: int) -> Residual:
    """Return a block of 1x1, 3x3 and 1x1 convolutions, the inner ones of a quarter of the width."""
    inner = outputs // 4
    path = nn.Sequential(
        *_convolution(inputs, inner, 1),
        nn.ReLU(),
        *_convolution(inner, inner, 3, stride),
        nn.ReLU(),
        *_convolution(inner, outputs, 1),
    )
    return Residual(path, _projection(inputs, outputs, stride))


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a 1x1 convolution if the shape changes, otherwise the identity (option B)."""
    same_shape = stride == 1 and inputs == outputs
    return nn.Identity() if same_shape else nn.Sequential(*_convolution(inputs, outputs, 1, stride))


def _resnet(
    image_shape: Shape,
    num_classes: int,
    block: Block,
    stem: int,
    stages: Sequence[tuple[int, int]],
    norm: Norm,
    groups: int,
    large: bool = False,
) -> Classifier:
    """Build a stem of `stem` maps, and blocks in `stages` of a width and a depth.

    `stem` divides all other widths. The stem is a 3x3 convolution, or for `large` images a 7x7
    convolution and a pool, each of stride 2. Raises `InputError` for `groups` that do not fit.
    """
    layers: list[nn.Module] = []
    if large:
        layers.extend(_convolution(image_shape[0], stem, 7, 2))
        layers.append(nn.ReLU())
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    else:
        layers.extend(_convolution(image_shape[0], stem, 3))
        layers.append(nn.ReLU())
    inputs = stem
    for stage, (width, depth) in enumerate(stages):
        for position in range(depth):
            stride = 2 if stage > 0 and position == 0 else 1
            layers.append(block(inputs, width, stride))
            inputs = width
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if norm == "batch" and groups != 2:
        raise InputError(
            f"model.groups = {groups} is of GroupNorm; give model.norm = 'group' too, or leave it "
            "out"
        )
    if norm == "group":
        if stem % groups:
            raise InputError(
                f"model.groups = {groups} does not divide the {stem} channels of the first layer"
            )
        for name, module in list(features.named_modules()):
            if isinstance(module, nn.BatchNorm2d):
                features.set_submodule(name, nn.GroupNorm(groups, module.num_features))
    return Classifier(features, head=nn.Linear(inputs, num_classes))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """Return a padded convolution without a bias, and its BatchNorm."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.BatchNorm2d(outputs)
