"""What only a GPU shows: `pytest -m gpu` on a machine with one. docs/gpu.md says what has been run
so far.

`RAYFED_PRETENDED_GPUS=1 pytest -m gpu` tries the tests themselves on a CPU, as far as they go
there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import rayfed
from rayfed.base.isolation import SETTINGS
from rayfed.job import read_job
from rayfed.rounds.engine import rounds
from rayfed.rounds.setup import open_setup
from rayfed.runtime.gpus import PRETENDED
from rayfed.runtime.this_process import ThisProcess

MINI = Path(rayfed.__file__).parent / "data/fashion_mnist_mini"
AUGMENT = {"crop": 2, "flip": True, "cutout": 6}
CHILD = Path(__file__).with_name("child.py")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Skip where there is no GPU; what a run on the GPU sets in this process is put back."""
    if os.environ.get(PRETENDED):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    elif not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    # Tests that use cuBLAS without a worker may come first.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = [setting.read() for setting in SETTINGS]
    yield
    for setting, value in zip(SETTINGS, before, strict=True):
        setting.write(value)


@pytest.fixture
def card(gpu):
    """For tests that a CPU cannot stand in for."""
    if not torch.cuda.is_available():
        pytest.skip("needs a real GPU")
    return torch.device("cuda:0")


@pytest.fixture
def device(gpu):
    """The GPU, or what stands for it."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder with 1,500 of the embedded images for training, which leaves enough for FedSSD, and
    200 for the test.
    """
    folder = tmp_path_factory.mktemp("images")
    for name, rows in (("train", 1500), ("test", 200)):
        pq.write_table(
            pq.read_table(MINI / f"{name}.parquet").slice(0, rows), folder / f"{name}.parquet"
        )
    return folder


@pytest.fixture
def make_table(images, tmp_path):
    """Make a job's table: four clients of some 370 images, three of them in each of two rounds."""

    def make(method="fedavg", model="cnn", augment=AUGMENT, **training):
        partition = {"name": "dirichlet", "alpha": 1.0, "num_clients": 4}
        train = {
            "num_rounds": 2,
            "clients_per_round": 3,
            "local_epochs": 1,
            "batch_size": 64,
            "lr": 0.02,
        }
        return {
            "name": "gpu",
            "method": method,
            "data": {"source": str(images), "partition": partition, "augment": augment},
            "model": model,
            "train": {**train, "momentum": 0.9, **training},
            "ray": {"mode": "off", "num_gpus": 1},
            "output": {"path": str(tmp_path / "runs")},
        }

    return make


@pytest.fixture
def make_job_setup(make_table):
    """Make the setup of such a job."""
    return lambda *given, **training: open_setup(read_job(make_table(*given, **training)))


@pytest.fixture
def train():
    """Train a setup to the end, on the GPU or on the CPU; gives the last round."""

    def train(setup, gpu=True):
        *_, last = rounds(setup, ThisProcess(setup, gpu=gpu))
        return last

    return train


@pytest.fixture
def begin():
    """Begin work of child.py in a process of its own; gives a function that waits for its
    answer.
    """

    def begin(what, table, environment=(), **given):
        words = [sys.executable, CHILD, json.dumps({"what": what, "table": table, **given})]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        child = subprocess.Popen(words, env={**os.environ, **dict(environment)}, **pipe)

        def answer():
            out, errors = child.communicate(timeout=250)
            assert child.returncode == 0, errors
            return json.loads(out.splitlines()[-1])

        return answer

    return begin
