"""Two of torchvision's networks, made for images of 224 x 224 pixels, with a stem that suits small images too.

Where the shorter side is below `SMALL` pixels, the first convolution keeps the resolution: at 32 pixels AlexNet's own
stem would leave nothing to pool, and MobileNet's a single pixel. Larger images get torchvision's network unchanged.
"""

from torch import nn

from rayfed.errors import InputError
from rayfed.models.classifier import Classifier

SMALL = 128  # pixels


def mobilenet(*, image_shape: tuple[int, int, int], num_classes: int, dropout: float = 0.2) -> Classifier:
    """torchvision's MobileNetV2, its stem of stride 1 on small images (Sandler et al., CVPR 2018)."""
    from torchvision.models import mobilenet_v2  # takes about a second

    channels, *sides = image_shape
    stride = 1 if min(sides) < SMALL else 2
    stem = nn.Conv2d(channels, 32, kernel_size=3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out")
    net = mobilenet_v2(num_classes=num_classes, dropout=dropout)
    net.features[0][0] = stem
    return Classifier(nn.Sequential(net.features, nn.AdaptiveAvgPool2d(1), nn.Flatten()), head=net.classifier)


def alexnet(*, image_shape: tuple[int, int, int], num_classes: int, dropout: float = 0.5) -> Classifier:
    """torchvision's AlexNet, its stem 3x3 of stride 1 on small images (Krizhevsky, arXiv:1404.5997; FedCSD)."""
    from torchvision.models import alexnet as torchvision_alexnet

    channels, *sides = image_shape
    if min(sides) < 15:
        raise InputError(f"model 'alexnet': it needs images of at least 15x15 pixels, not {sides[0]}x{sides[1]}")
    kernel, stride, padding = (3, 1, 1) if min(sides) < SMALL else (11, 4, 2)
    stem = nn.Conv2d(channels, 64, kernel, stride, padding)
    net = torchvision_alexnet(num_classes=num_classes, dropout=dropout)
    net.features[0] = stem
    *hidden, head = net.classifier
    return Classifier(nn.Sequential(net.features, net.avgpool, nn.Flatten(), *hidden), head=head)
