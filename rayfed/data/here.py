"""A check whether the data of a source are on this machine, without reading them."""

from pathlib import Path

from rayfed.data.hub import HUB, PLACE
from rayfed.data.settings import MINI

# Torchvision unpacks a source into this folder below `data.root`.
FOLDERS = {
    "mnist": "MNIST/raw",
    "fashion-mnist": "FashionMNIST/raw",
    "emnist": "EMNIST/raw",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
}


def is_here(source: str, root: str) -> bool:
    """Say whether a source needs no download.

    Its folder is there; whether the folder is complete is not checked.
    """
    folder = Path(root).expanduser()
    if source == MINI:
        return True
    if source in FOLDERS:
        return (folder / FOLDERS[source]).is_dir()
    place = PLACE.fullmatch(HUB[source][0] if source in HUB else source)
    if place:
        return (folder / "hub" / f"datasets--{place[1].replace('/', '--')}").is_dir()
    return Path(source).expanduser().exists()
