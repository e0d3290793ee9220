"""Any model of timm by its name: `[model] name = "timm/resnet18"`.

The seed draws the weights; nothing is downloaded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rayfed.base.errors import InputError, did_you_mean
from rayfed.data.inputs import Images
from rayfed.models.classifier import Classifier

PREFIX = "timm/"


class TimmClassifier(Classifier):
    """A model of timm: `features` is all of it except the classifier, which is `head`."""

    def __init__(self, net: nn.Module, place: str) -> None:
        """Split a model at its classifier.

        `place` is the name of the classifier in the model; an `Identity` takes its place.
        """
        super().__init__(net, net.get_submodule(place))
        self._place = place
        net.set_submodule(place, nn.Identity())

    def renamed(self, name: str) -> str:
        """Return the name here of an entry in timm's own files."""
        entry = name.removeprefix(f"{self._place}.")
        return f"head.{entry}" if entry != name else f"features.{name}"


def timm_builder(name: str) -> Callable[..., nn.Module]:
    """Return the function that builds the model `timm/NAME`.

    Raises `InputError` if timm cannot be imported, or if timm has no such model.
    """
    try:
        # This import takes seconds.
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
    timm_name = name.removeprefix(PREFIX)

    def build(*, image_shape: tuple[int, int, int], num_classes: int, **options: Any) -> nn.Module:
        channels, *size = image_shape
        arguments = dict(pretrained=False, in_chans=channels, num_classes=num_classes, **options)
        with_size = {**arguments, "img_size": tuple(size)}
        try:
            net = timm.create_model(timm_name, **with_size)
        except TypeError as error:
            if "'img_size'" not in str(error):
                raise
            # A network of convolutions takes images of any size, and no `img_size`.
            net = timm.create_model(timm_name, **arguments)
        _refuse_cropping(name, net, size)
        return _split(net, image_shape)

    return build


def _refuse_cropping(name: str, net: nn.Module, size: list[int]) -> None:
    """Raise `InputError` if the patches do not divide the images.

    The grid of patches would be smaller than the images, and leave out their edges.
    """
    patch = getattr(getattr(net, "patch_embed", None), "patch_size", None)
    if not isinstance(patch, tuple):
        return
    if any(side % patch_side for side, patch_side in zip(size, patch, strict=True)):
        patches, images = "x".join(map(str, patch)), "x".join(map(str, size))
        raise InputError(
            f"model '{name}': its patches of {patches} pixels do not divide images of {images}; "
            "give data.size = 224, for example, or model.patch_size"
        )


@torch.no_grad()
def _split(net: nn.Module, image_shape: tuple[int, int, int]) -> nn.Module:
    """Return the model as features and head, if its last step is a linear classifier.

    Another model is returned as it is.
    """
    classifier = net.get_classifier() if hasattr(net, "get_classifier") else None  # type: ignore[operator]
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
