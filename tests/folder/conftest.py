"""A job that trains in a second on two files of random images."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture
def tables(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for split, rows in (("train", 40), ("test", 10)):
        images = pa.array(list(rng.integers(0, 256, (rows, 784), np.uint8)))
        pq.write_table(pa.table({"image": images, "label": np.arange(rows) % 2}), tmp_path / f"data/{split}.parquet")
    return {
        "name": "run",
        "method": "scaffold",
        "data": {"source": str(tmp_path / "data"), "partition": {"name": "iid", "num_clients": 4}},
        "model": "lenet",
        "train": {"num_rounds": 5, "clients_per_round": 2, "lr": 0.1},
        "ray": {"mode": "off"},
        "output": {"path": str(tmp_path / "runs"), "every": 2, "every_seconds": 1e9},
    }


@pytest.fixture
def no_page(monkeypatch):
    """The page would take longer than the run."""
    monkeypatch.setattr("rayfed.experiment._write_page", lambda path: None)
