"""The two small convolutional networks that most papers on federated learning train."""

from __future__ import annotations

from torch import nn

from rayfed.models.classifier import Classifier
from rayfed.values import InputError

__all__ = ["cnn", "lenet"]


def cnn(*, image_shape: tuple[int, int, int], num_classes: int) -> Classifier:
    """Two padded 5x5 convolutions and a hidden layer of 512 (McMahan et al., AISTATS 2017; FedNTD and FedLMD)."""
    channels, height, width = image_shape
    if min(height, width) < 4:
        raise InputError(f"model 'cnn': its two pools need images of 4x4 pixels or more, not {height}x{width}")
    return Classifier(
        features=nn.Sequential(
            *_convolution(channels, 32, padding=2),
            *_convolution(32, 64, padding=2),
            nn.Flatten(),
            *_hidden(64 * (height // 4) * (width // 4), 512),
        ),
        head=nn.Linear(512, num_classes),
    )


def lenet(*, image_shape: tuple[int, int, int], num_classes: int) -> Classifier:
    """LeNet-5 with ReLU and max pooling (LeCun et al., Proc. IEEE 1998; as FedSSD, MOON and NIID-Bench train it)."""
    channels, height, width = image_shape
    if min(height, width) < 16:
        raise InputError(
            f"model 'lenet': its unpadded convolutions need images of 16x16 pixels or more, not {height}x{width}"
        )
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return Classifier(
        features=nn.Sequential(
            *_convolution(channels, 6, padding=0),
            *_convolution(6, 16, padding=0),
            nn.Flatten(),
            *_hidden(16 * rows * columns, 120),
            *_hidden(120, 84),
        ),
        head=nn.Linear(84, num_classes),
    )


def _convolution(inputs: int, outputs: int, *, padding: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, kernel_size=5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)


def _hidden(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs), nn.ReLU()
