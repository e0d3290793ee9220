"""Any model of timm by its name, `[model] name = "timm/resnet18"`.

The seed draws its weights: none are downloaded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from rayfed.base.errors import InputError, did_you_mean
from rayfed.data.inputs import Images
from rayfed.models.classifier import Classifier

PREFIX = "timm/"


class TimmClassifier(Classifier):
    """A model of timm: `features` is all of it but the classifier, which is `head`."""

    def __init__(self, net: nn.Module, place: str) -> None:
        """`place` is the name of the classifier in the model; an `Identity` takes its place."""
        super().__init__(net, net.get_submodule(place))
        self._place = place
        net.set_submodule(place, nn.Identity())

    def renamed(self, name: str) -> str:
        """The name here of an entry in timm's own files."""
        inside = name.removeprefix(f"{self._place}.")
        return f"head.{inside}" if inside != name else f"features.{name}"


def timm_builder(name: str) -> Callable[..., nn.Module]:
    """The function that builds the model `timm/NAME`.

    Raises `InputError` where timm has no such model.
    """
    try:
        # Takes seconds.
        import timm
    except ImportError as error:
        install = "pip install 'rayfed-distill[timm]'"
        raise InputError(
            f"model '{name}' needs timm, which cannot be imported ({error}): {install}"
        ) from None
    names = [f"{PREFIX}{model}" for model in timm.list_models()]
    if name not in names:
        raise InputError(
            f"model '{name}': timm {timm.__version__} has no such model{did_you_mean(name, names)}"
        )
    wanted = name.removeprefix(PREFIX)

    def build(*, image_shape: tuple[int, int, int], num_classes: int, **options: Any) -> nn.Module:
        channels, *size = image_shape
        given: dict[str, Any] = {
            "pretrained": False,
            "in_chans": channels,
            "num_classes": num_classes,
        }
        create = partial(timm.create_model, wanted, **given, **options)
        try:
            net = create(img_size=tuple(size))
        except TypeError as error:
            if "'img_size'" not in str(error):
                raise
            # Of convolutions, for images of any size.
            net = create()
        _refuse_cropping(name, net, size)
        return _split(net, image_shape)

    return build


def _refuse_cropping(name: str, net: nn.Module, size: list[int]) -> None:
    """A grid of patches that is smaller than the images would leave out their edges."""
    patch = getattr(getattr(net, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple) and any(side % p for side, p in zip(size, patch, strict=True)):
        patches, images = "x".join(map(str, patch)), "x".join(map(str, size))
        raise InputError(
            f"model '{name}': its patches of {patches} pixels do not divide images of {images}; "
            "give data.size = 224, for example, or model.patch_size"
        )


@torch.no_grad()
def _split(net: nn.Module, image_shape: tuple[int, int, int]) -> nn.Module:
    """The model as features and head, where its classifier is a linear layer and its last step;
    else as it is.
    """
    classifier = net.get_classifier() if hasattr(net, ("get_classifier")) else None  # type: ignore[operator]
    if not isinstance(classifier, nn.Linear):
        return net
    place = next(name for name, module in net.named_modules() if module is classifier)
    images = Images(image_shape).some(2)
    logits = net.eval()(images)
    split = TimmClassifier(net, place).eval()
    features = split.features(images)
    if features.ndim == 2 and torch.equal(split.head(features), logits):
        return split.train()
    net.set_submodule(place, classifier)
    return net.train()
