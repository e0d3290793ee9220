"""Two of torchvision's networks, with a stem that suits small images too.

They are made for images of 224 x 224 pixels. If the shorter side is below `SMALL` pixels, the first
convolution keeps the resolution: at 32 pixels AlexNet's own stem would leave nothing to pool, and
MobileNet's would leave a single pixel. Larger images get torchvision's network unchanged.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d

from rayfed.base.errors import InputError
from rayfed.models.classifier import Classifier

# Images are small if their shorter side is below this number of pixels.
SMALL = 128


def mobilenet(
    *, image_shape: tuple[int, int, int], num_classes: int, dropout: float = 0.2
) -> Classifier:
    """Build torchvision's MobileNetV2 (Sandler et al., CVPR 2018).

    On small images its stem has stride 1.
    """
    # This import takes about a second.
    from torchvision.models import mobilenet_v2

    channels, *sides = image_shape
    stride = 1 if min(sides) < SMALL else 2
    stem = nn.Conv2d(channels, 32, kernel_size=3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out")
    net = mobilenet_v2(num_classes=num_classes, dropout=dropout)
    net.features[0][0] = stem
    return Classifier(
        nn.Sequential(net.features, nn.AdaptiveAvgPool2d(1), nn.Flatten()), head=net.classifier
    )


def alexnet(
    *, image_shape: tuple[int, int, int], num_classes: int, dropout: float = 0.5
) -> Classifier:
    """Build torchvision's AlexNet (Krizhevsky, arXiv:1404.5997; FedCSD).

    On small images its stem is 3x3 of stride 1. Raises `InputError` for images below 15x15 pixels.
    """
    from torchvision.models import alexnet as torchvision_alexnet

    channels, *sides = image_shape
    if min(sides) < 15:
        raise InputError(
            f"model 'alexnet': it needs images of at least 15x15 pixels, not {sides[0]}x{sides[1]}"
        )
    kernel, stride, padding = (3, 1, 1) if min(sides) < SMALL else (11, 4, 2)
    stem = nn.Conv2d(channels, 64, kernel, stride, padding)
    net = torchvision_alexnet(num_classes=num_classes, dropout=dropout)
    net.features[0] = stem
    *hidden, head = net.classifier
    return Classifier(
        nn.Sequential(net.features, Pool(net.avgpool.output_size), nn.Flatten(), *hidden), head=head
    )


class Pool(nn.AdaptiveAvgPool2d):
    """Average pooling to (height, width) with the same bits every time, also on GPUs.

    Torch's own gradients vary on GPUs.
    """

    def forward(self, x: Tensor) -> Tensor:
        return pooled(x, *self.output_size) if x.is_cuda else super().forward(x)  # type: ignore[misc]


def pooled(x: Tensor, height: int, width: int) -> Tensor:
    """Return `adaptive_avg_pool2d` of `x`, computed as products of matrices.

    It takes maps (B, c, h, w) to maps (B, c, height, width).
    """
    identity_h = torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    identity_w = torch.eye(x.shape[3], dtype=x.dtype, device=x.device)
    rows = adaptive_avg_pool1d(identity_h, height)  # (h, height)
    columns = adaptive_avg_pool1d(identity_w, width)  # (w, width)
    return rows.T @ x @ columns
