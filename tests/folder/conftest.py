"""A job that trains in a second on two files of random images."""

import pytest


@pytest.fixture
def tables(tmp_path, write_images):
    write_images(tmp_path, 40, 10, classes=2)
    return {
        "name": "run",
        "method": "scaffold",
        "data": {"source": str(tmp_path / "data"), "partition": {"name": "iid", "num_clients": 4}},
        "model": "lenet",
        "train": {"num_rounds": 5, "clients_per_round": 2, "lr": 0.1},
        "ray": {"mode": "off"},
        "output": {"path": str(tmp_path / "runs"), "every": 2, "every_seconds": 1e9},
    }
