"""Remake rayfed/data/fashion_mnist_mini from the four idx .gz files of Fashion-MNIST; the same bytes every time.

python tools/make_fashion_mnist_mini.py [FOLDER] [OUTPUT]     # by default the folder of Debian's dataset-fashion-mnist
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rayfed.data.downloads import FASHION, read_idx
from rayfed.data.samples import Samples

SEED = 0
PER_CLASS = {"train": 1000, "test": 200}


def png(pixels: np.ndarray) -> bytes:
    """A grey image (H, W) as an uncompressed PNG: zstd over many of them in a row beats deflate on each."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


def choose(labels: np.ndarray, per_class: int, rng: np.random.Generator) -> np.ndarray:
    """Row numbers, `per_class` of every class, shuffled."""
    rows = [rng.permutation(np.flatnonzero(labels == label))[:per_class] for label in range(len(FASHION))]
    return rng.permutation(np.concatenate(rows))


def write(samples: Samples, rows: np.ndarray, path: Path) -> None:
    schema = pa.schema([("image", pa.binary()), ("label", pa.int8())], metadata={"classes": ",".join(FASHION)})
    table = pa.table([[png(samples.images[row, 0]) for row in rows], samples.labels[rows]], schema=schema)
    pq.write_table(table, path, compression="zstd", compression_level=19, use_dictionary=False)
    print(f"{path}: {len(rows)} images, {path.stat().st_size:,} bytes")


def main(folder: str = "/usr/share/datasets/fashion-mnist", output: str = "rayfed/data/fashion_mnist_mini") -> None:
    rng = np.random.default_rng(SEED)
    for split, part in (("train", "train"), ("test", "t10k")):
        samples = read_idx(Path(folder), part, FASHION)
        write(samples, choose(samples.labels, PER_CLASS[split], rng), Path(output) / f"{split}.parquet")


if __name__ == "__main__":
    main(*sys.argv[1:])
