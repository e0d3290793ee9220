"""Remake rayfed/data/fashion_mnist_mini from the four idx .gz files of Fashion-MNIST; the same
bytes every time.

python tools/make_fashion_mnist_mini.py [FOLDER] [OUTPUT]     # by default the folder of Debian's
dataset-fashion-mnist
"""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from torchvision.datasets import FashionMNIST

CLASSES = FashionMNIST.classes
SEED = 0
PER_CLASS = {"train": 1000, "test": 200}


def read_idx(file: Path) -> np.ndarray:
    """The array of bytes in a gzipped idx file: two zeros, type, number of dimensions, the
    dimensions, the bytes.
    """
    content = gzip.decompress(file.read_bytes())
    shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def png(pixels: np.ndarray) -> bytes:
    """A grey image (H, W) as an uncompressed PNG: zstd over many of them in a row beats deflate on
    each.
    """
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


def choose(labels: np.ndarray, per_class: int, rng: np.random.Generator) -> np.ndarray:
    """Row numbers, `per_class` of every class, shuffled."""
    rows = [
        rng.permutation(np.flatnonzero(labels == label))[:per_class]
        for label in range(len(CLASSES))
    ]
    return rng.permutation(np.concatenate(rows))


def write(images: np.ndarray, labels: np.ndarray, path: Path) -> None:
    schema = pa.schema(
        [("image", pa.binary()), ("label", pa.int8())], metadata={"classes": ",".join(CLASSES)}
    )
    table = pa.table([[png(image) for image in images], labels.astype(np.int64)], schema=schema)
    pq.write_table(table, path, compression="zstd", compression_level=19, use_dictionary=False)
    print(f"{path}: {len(images)} images, {path.stat().st_size:,} bytes")


def main(
    folder: str = "/usr/share/datasets/fashion-mnist",
    output: str = "rayfed/data/fashion_mnist_mini",
) -> None:
    rng = np.random.default_rng(SEED)
    for split, part in (("train", "train"), ("test", "t10k")):
        images = read_idx(Path(folder) / f"{part}-images-idx3-ubyte.gz")
        labels = read_idx(Path(folder) / f"{part}-labels-idx1-ubyte.gz")
        rows = choose(labels, PER_CLASS[split], rng)
        write(images[rows], labels[rows], Path(output) / f"{split}.parquet")


if __name__ == "__main__":
    main(*sys.argv[1:])
