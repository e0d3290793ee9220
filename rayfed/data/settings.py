"""The [data] table of a job file: which examples, and how they are read, augmented and dealt."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from rayfed.base.errors import InputError, spelled
from rayfed.base.values import Checked, Form, Ge, Le, Lt, PathMark
from rayfed.data.partition import PARTITIONS, Iid, Rule, read_rule, write_rule
from rayfed.data.skews import SKEWS, NoSkew, Skew, read_skew, write_skew

MINI = "fashion-mnist-mini"
# A function is neither a URI such as s3://bucket nor a path such as C:/data.
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
SOURCES = {
    MINI: "10,000 + 2,000 grey 28x28, 10 classes of clothing; MIT, Zalando SE; embedded in rayfed",
    "mnist": (
        "60,000 + 10,000 grey 28x28, 10 digits; CC BY-SA 3.0; by torchvision, downloaded once (12 "
        "MB)"
    ),
    "fashion-mnist": (
        "60,000 + 10,000 grey 28x28, 10 classes of clothing; MIT; by torchvision, downloaded once "
        "(31 MB)"
    ),
    "emnist": (
        "112,800 + 18,800 grey 28x28, 47 digits and letters (balanced); by torchvision, downloaded "
        "once (562 MB)"
    ),
    "cifar10": (
        "50,000 + 10,000 RGB 32x32, 10 classes of objects; by torchvision, downloaded once (170 MB)"
    ),
    "cifar100": (
        "50,000 + 10,000 RGB 32x32, 100 classes of objects; by torchvision, downloaded once (169 "
        "MB)"
    ),
    "cinic10": (
        "90,000 + 90,000 RGB 32x32, CIFAR-10's classes; CC BY 4.0; from the hub, downloaded once "
        "(771 MB)"
    ),
    "tiny-imagenet": (
        "100,000 + 10,000 RGB 64x64, 200 classes of objects; from the hub, downloaded once (161 MB)"
    ),
    "femnist": (
        "814,277 of 28x28, 62 digits and letters, writer_id; BSD; no test set; from the hub, "
        "downloaded once"
    ),
}
"""The named sources, with a line about each, as `rayfed data` lists them."""

IN_PLACE = ("tokens", "text", "features")
"""Keys of [data] that name columns in place of images."""


@dataclass(frozen=True)
class Augment(Checked):
    """Changes to training images, off by default.

    Usual for CIFAR: crop = 4, flip = true, cutout = 16.
    """

    crop: Annotated[int, Ge(0), "padding of the random crop in pixels; 0 is off"] = 0
    crop_padding: Annotated[
        Literal["zero", "reflect"], "the padding is black, or mirrors the image"
    ] = "zero"
    flip: Annotated[bool, "mirror half of the images left to right"] = False
    cutout: Annotated[
        int, Ge(0), "side of the square that Cutout sets to 0 after normalisation; 0 is off"
    ] = 0

    @property
    def off(self) -> bool:
        """Say whether an image is the same in every epoch."""
        return not (self.crop or self.flip or self.cutout)


@dataclass(frozen=True)
class Data(Checked):
    """A federation's data.

    The fields from `test` to `vocabulary` are for files; named sources need none of them.
    """

    source: Annotated[
        str,
        PathMark(),
        "a named source (`rayfed data` lists them), a path or URI, or module:function",
    ] = MINI
    root: Annotated[str, PathMark(), "folder of the downloaded sources"] = "~/.cache/rayfed/data"
    split: Annotated[
        Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"],
        'which part of EMNIST to load (only for source = "emnist")',
    ] = "balanced"
    auxiliary_per_class: Annotated[
        int, Ge(0), "images of each class for the server; a method may ask for more"
    ] = 0
    size: Annotated[
        int,
        Ge(0),
        Le(4096),
        "scale and centre-crop all images to size x size pixels; 0: as they are",
    ] = 0
    test: Annotated[
        str, PathMark(), "path or URI of the test set, if it is not part of `source`"
    ] = ""
    test_fraction: Annotated[
        float, Ge(0), Lt(1), "part of each class of the training set to test on; 0: the test set"
    ] = 0.0
    test_seed: Annotated[int, Ge(0), "seed of the choice of held-out images"] = 0
    image: Annotated[
        str, "column of the images: encoded bytes, {bytes, path} structs or lists of pixels"
    ] = "image"
    label: Annotated[str, "column of the labels: numbers from 0 or names"] = "label"
    domain: Annotated[
        str, "column of the test images' domains; each has an accuracy of its own"
    ] = ""
    shape: Annotated[list[int], "shape of lists of pixels: [C, H, W] or [H, W, C]"] = field(
        default_factory=list
    )
    tokens: Annotated[
        str, "in place of images: column of lists of token numbers, from 1; 0 is padding"
    ] = ""
    text: Annotated[
        str, "in place of images: column of text, each of whose words is hashed to a token number"
    ] = ""
    features: Annotated[
        list[str], "in place of images: columns of numbers, or of lists of numbers"
    ] = field(default_factory=list)
    length: Annotated[
        int, Ge(0), "tokens of an example: what is longer is cut; 0: as in the longest to train on"
    ] = 0
    vocabulary: Annotated[
        int, Ge(0), "tokens are below it; 0: the training set's largest, plus 1; text needs it"
    ] = 0
    augment: Augment = field(default_factory=Augment)
    partition: Annotated[
        Rule,
        Form(read_rule, write_rule, default="iid", kinds=PARTITIONS),
        f"the rule by which images are dealt: {', '.join(PARTITIONS)}, or package.module:Rule",
    ] = field(default_factory=Iid)
    skew: Annotated[
        Skew,
        Form(read_skew, write_skew, default="none", kinds=SKEWS),
        f"how clients' examples look different: {', '.join(SKEWS)}, or package.module:Name",
    ] = field(default_factory=NoSkew)

    def __post_init__(self) -> None:
        super().__post_init__()
        # CIFAR10 means cifar10 if there is no folder of that name.
        source = spelled(self.source, SOURCES)
        if source != self.source and not Path(self.source).exists():
            object.__setattr__(self, "source", source)
        self._check_columns()

    @property
    def client(self) -> str:
        """Return the column of the natural clients, which the partition names.

        Returns '' if the partition needs none.
        """
        return getattr(self.partition, "column", "")

    @property
    def module(self) -> str:
        """Return the user's module if the source is a function, `package.module:name`.

        Returns '' for other sources.
        """
        return self.source.partition(":")[0] if FUNCTION.fullmatch(self.source) else ""

    @property
    def in_place_of_images(self) -> str:
        """Return the key that names the columns a model sees if they are no images, or ''.

        The key is tokens, text or features.
        """
        return next((key for key in IN_PLACE if getattr(self, key)), "")

    @property
    def columns(self) -> list[str]:
        """Return the columns that a model sees."""
        return self.features or [self.tokens or self.text or self.image]

    def _check_columns(self) -> None:
        """Raise InputError if the columns in place of images do not fit the other keys."""
        key = self.in_place_of_images
        if not key:
            return
        place = f"data.{key} = {getattr(self, key)!r}"
        if self.source in SOURCES or self.module:
            raise InputError(
                f"{place}: the source '{self.source}' has images; give data.source, a path of "
                "Parquet files"
            )
        kinds = [name for name in IN_PLACE if getattr(self, name)]
        if len(kinds) > 1:
            raise InputError(f"data.{' and data.'.join(kinds)}: give only one of them")
        defaults = {"image": Data.image, "size": 0, "shape": [], "augment": Augment()}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                raise InputError(f"{place}: data.{name} is for images; leave it out")
        if self.label in self.columns:
            raise InputError(
                f"{place}: '{self.label}' is the label, which the model is to predict (data.label)"
            )
        if self.text and self.vocabulary < 2:
            raise InputError(
                f"{place}: data.vocabulary = {self.vocabulary}; give 2 or more, how many token "
                "numbers words are hashed to, such as 20000"
            )


def is_relative(path: str) -> bool:
    """Say whether a path means another place in another folder.

    >>> [is_relative(path) for path in ("runs", "/runs", "~/runs", "s3://bucket/runs")]
    [True, False, False, False]
    """
    return "://" not in path and not path.startswith(("/", "~"))
