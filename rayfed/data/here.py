"""Whether the data of a source are on this machine, without reading or downloading them."""

from pathlib import Path

from rayfed.data.hub import HUB, PLACE
from rayfed.data.settings import MINI

# What torchvision unpacks below `data.root`.
FOLDERS = {
    "mnist": "MNIST/raw",
    "fashion-mnist": "FashionMNIST/raw",
    "emnist": "EMNIST/raw",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
}


def is_here(source: str, root: str) -> bool:
    """Whether a source needs no download: its folder is there, whether or not it is whole."""
    folder = Path(root).expanduser()
    if source == MINI:
        return True
    if source in FOLDERS:
        return (folder / FOLDERS[source]).is_dir()
    place = PLACE.fullmatch(HUB[source][0] if source in HUB else source)
    if place:
        return (folder / "hub" / f"datasets--{place[1].replace('/', '--')}").is_dir()
    return Path(source).expanduser().exists()
