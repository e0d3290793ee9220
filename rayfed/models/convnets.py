"""The two small convolutional networks that most papers train, and one whose features are drawn.

ReLU comes after the pool: it is the same function with the same gradient, on a quarter of the
values.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from rayfed.base.errors import InputError
from rayfed.base.values import Ge
from rayfed.models.classifier import Classifier


def cnn(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    second: Annotated[int, Ge(0), "width of a second hidden layer; 0: none"] = 0,
) -> Classifier:
    """Build two padded 5x5 convolutions and a hidden layer of 512.

    It is the network of McMahan et al. (AISTATS 2017), and of FedNTD and FedLMD. FedNTD's Table 2
    also measures a `second` hidden layer, of 128. Raises `InputError` for images below 4x4 pixels.
    """
    channels, height, width = image_shape
    if min(height, width) < 4:
        raise InputError(
            f"model 'cnn': its two pools need images of 4x4 pixels or more, not {height}x{width}"
        )
    layers = [
        nn.Conv2d(channels, 32, kernel_size=5, padding=2),
        MaxPool(),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=5, padding=2),
        MaxPool(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
    ]
    if second:
        layers += [nn.Linear(512, second), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), head=nn.Linear(second or 512, num_classes))


def circle(*, image_shape: tuple[int, int, int], num_classes: int) -> Classifier:
    """Build the network of `cnn`, with features in the plane that have the length 1.

    It is for FedNTD's Fig. 18. Raises `InputError` for images below 4x4 pixels.
    """
    model = cnn(image_shape=image_shape, num_classes=num_classes)
    assert isinstance(model.features, nn.Sequential)
    features = nn.Sequential(*model.features, nn.Linear(512, 2), UnitLength())
    return Classifier(features, head=nn.Linear(2, num_classes))


def lenet(
    *, image_shape: tuple[int, int, int], num_classes: int, batch_norm: bool = False
) -> Classifier:
    """Build LeNet-5 with ReLU and max pooling.

    It is the network of LeCun et al. (Proc. IEEE 1998), as FedSSD, MOON and NIID-Bench train it.

    With `batch_norm`, BatchNorm follows each convolution; the other layers begin with the same
    weights. Raises `InputError` for images below 16x16 pixels.
    """
    channels, height, width = image_shape
    if min(height, width) < 16:
        raise InputError(
            f"model 'lenet': it needs images of at least 16x16 pixels, not {height}x{width}"
        )
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    layers: list[nn.Module] = []
    for inputs, outputs in ((channels, 6), (6, 16)):
        layers.append(nn.Conv2d(inputs, outputs, kernel_size=5))
        if batch_norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers.append(MaxPool())
        layers.append(nn.ReLU())
    layers.append(nn.Flatten())
    for width, hidden in ((16 * rows * columns, 120), (120, 84)):
        layers.append(nn.Linear(width, hidden))
        layers.append(nn.ReLU())
    return Classifier(nn.Sequential(*layers), head=nn.Linear(84, num_classes))


class UnitLength(nn.Module):
    """Divide features by their length."""

    def forward(self, x: Tensor) -> Tensor:
        """Take features (B, D) to features of length 1."""
        return nn.functional.normalize(x, dim=1)


class MaxPool(nn.MaxPool2d):
    """Max pooling of 2 x 2, with torch's values and gradients.

    On a CPU, without a gradient, it compares four views. Torch's own pooling takes ten times as
    long for LeNet's six maps.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """Take maps (B, c, h, w) to maps (B, c, h // 2, w // 2)."""
        if x.requires_grad or x.device.type != "cpu":
            return super().forward(x)
        height, width = (side // 2 * 2 for side in x.shape[2:])
        row_maxima = torch.maximum(x[:, :, 0:height:2], x[:, :, 1:height:2])
        return torch.maximum(row_maxima[..., 0:width:2], row_maxima[..., 1:width:2])
