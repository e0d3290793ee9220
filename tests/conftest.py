"""A federation that trains in milliseconds, but has what makes federated learning hard.

Labels are skewed, classes are missing, one client has a single sample, one is balanced, and last
batches are smaller.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import settings
from torch import nn

import rayfed
from rayfed.clients.settings import Training
from rayfed.data import sources
from rayfed.data.federation import Federation
from rayfed.data.inputs import Images
from rayfed.data.partition import Natural, Partition
from rayfed.data.samples import Samples
from rayfed.data.settings import MINI, Augment, Data
from rayfed.folder.places import folder_of
from rayfed.job import Job, RayOptions, make_job
from rayfed.models.classifier import Classifier
from rayfed.observers import page
from rayfed.rounds import tasks
from rayfed.rounds.engine import rounds
from rayfed.rounds.setup import Setup
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.wire import pack, unpack

os.environ[("RAY_worker_niceness")] = "0"  # noqa: SIM112  (beside other tests, nicer actors would wait for minutes)
# Where pytest looks for examples in docstrings, it imports the file, and from then on all of rayfed's
# code in this process would be as on a Mac.
collect_ignore = ["no_linux"]
# A busy machine is no failure.
settings.register_profile("rayfed", deadline=None)
settings.load_profile("rayfed")
# More threads could change the last bits of a sum, and tests may run side by side.
torch.set_num_threads(1)

# A check with a limit of time runs as many tests as its machine can, and says how many it left out.
BEGAN = time.monotonic()
MINUTES = float(os.environ.get("TEST_MINUTES", "inf"))

CLASSES = ("ash", "birch", "cedar", "elm")
WRITE_PAGE = page.write_page
# A row per client, a column per class.
COUNTS = [
    [9, 3, 0, 0],
    [0, 8, 1, 2],
    [0, 0, 1, 0],
    [2, 2, 2, 2],
    [0, 0, 12, 1],
    [1, 0, 0, 6],
]


def pytest_runtest_setup(item):
    if time.monotonic() - BEGAN > 60 * MINUTES:
        pytest.skip(f"the {MINUTES:.0f} minutes of TEST_MINUTES are over")


def pytest_collection_modifyitems(items):
    """Give slow tests more time, for a machine that is several times slower than ours."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


def _samples(rng, labels):
    # The same for training and test.
    pattern = np.random.default_rng(7).integers(0, 180, (len(CLASSES), 1, 4, 4))
    images = pattern[labels] + rng.integers(0, 76, (len(labels), 1, 4, 4))
    return Samples(images.astype(np.uint8), labels, CLASSES)


@pytest.fixture(autouse=True, scope="session")
def _embedded_images_are_decoded_once():
    read, known = sources.load, {}

    def load(data):
        if data.source != MINI:
            return read(data)
        key = repr(
            replace(data, partition=Natural(data.client), augment=Augment(), auxiliary_per_class=0)
        )
        if key not in known:
            known[key] = read(data)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "load", load)
        yield


@pytest.fixture(autouse=True, scope="session")
def _runs_write_no_page():
    """It would take longer than the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write_page", lambda path: None)
        yield


@pytest.fixture(scope="module")
def pages():
    """For tests that look at the page of a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write_page", WRITE_PAGE)
        yield


@pytest.fixture(autouse=True)
def _small_cohorts_have_groups(monkeypatch):
    """Cohorts of a few clients are cut into tasks of several clients too, as large cohorts are."""
    monkeypatch.setattr(tasks, "TAPER", 2)


@pytest.fixture(autouse=True)
def _tests_leave_no_modules(tmp_path_factory):
    """A command puts the current folder on the path. In a later test, a module of the same name would
    be found in the folder of the earlier test.
    """
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    folders = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and file.startswith(folders):
            del sys.modules[name]


@pytest.fixture(scope="session")
def run_apart():
    """Run a job in a process of its own, where it may start a Ray; gives its result.

    In this process another test may have joined one, and Ray has one for each process. It also
    keeps the token of the first: the shared Ray of tests/runtime would have no more actors.
    """

    def run_apart(tables):
        code = "import json, sys, rayfed; rayfed.run(json.loads(sys.argv[1]))"
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(tables)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        # It is done: this only reads its results.
        return rayfed.resume(folder_of(make_job(tables)))

    return run_apart


@pytest.fixture(scope="session")
def write_images():
    """Write a data set of random images of so many pixels: the folder `data` in a folder, for
    `data.source`.
    """

    def write(folder, train, test, pixels=784, classes=4):
        rng = np.random.default_rng(0)
        (folder / "data").mkdir(exist_ok=True)
        for split, rows in (("train", train), ("test", test)):
            images = pa.array(list(rng.integers(0, 256, (rows, pixels), np.uint8)))
            pq.write_table(
                pa.table({"image": images, "label": np.arange(rows) % classes}),
                folder / f"data/{split}.parquet",
            )

    return write


@pytest.fixture(scope="session")
def make_federation():
    """Make a federation from a table like `COUNTS`; the server holds two more samples of each
    class.
    """

    def make(counts=COUNTS):
        counts, rng = np.array(counts), np.random.default_rng(0)
        labels = [np.repeat(np.arange(len(CLASSES)), row) for row in counts]
        train = _samples(rng, np.concatenate([*labels, np.repeat(np.arange(len(CLASSES)), 2)]))
        test = _samples(rng, rng.integers(0, len(CLASSES), 30))
        dealt = Partition.of_owners(
            np.repeat(np.arange(len(counts)), counts.sum(axis=1)), len(counts)
        )
        mean, std = Images((1, 4, 4)).moments(train.examples)
        return Federation(
            train, test, dealt, dealt, mean, std, auxiliary=np.arange(counts.sum(), len(train))
        )

    return make


@pytest.fixture(scope="session")
def make_model():
    """The same small model each time; with `norm`, BatchNorm and Dropout tell training from
    evaluation.
    """

    def make(norm=False):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            layers = [
                nn.Conv2d(1, 4, 3),
                *([nn.BatchNorm2d(4)] if norm else []),
                nn.ReLU(),
                nn.Flatten(),
            ]
            layers += [nn.Dropout(0.2)] if norm else []
            return Classifier(nn.Sequential(*layers), nn.Linear(16, len(CLASSES)))

    return make


@pytest.fixture
def make_setup(make_federation, make_model):
    """Make a setup from a method and the settings that differ from the usual ones."""

    def make(method, *, counts=COUNTS, norm=False, augment=None, seed=0, ray=None, **training):
        usual = {
            "num_rounds": 3,
            "clients_per_round": 4,
            "local_epochs": 2,
            "batch_size": 5,
            "lr": 0.1,
        }
        usual |= {"lr_decay": 0.5, "momentum": 0.9, "weight_decay": 1e-3}
        data, training = Data(augment=augment or Augment()), Training(**usual | training)
        job = Job("tiny", seed, method, data, train=training, ray=ray or RayOptions())
        return Setup(make_model(norm), make_federation(counts), job, torch.device("cpu"))

    return make


@pytest.fixture
def play():
    """Train a setup to the end; gives all its rounds, round 0 first."""
    return lambda setup, workers=None: list(rounds(setup, workers or ThisProcess(setup)))


@pytest.fixture(scope="session")
def digest():
    """A hash of a tree's skeleton and of every bit of its tensors."""

    def digest(tree):
        packed = pack(tree)
        parts = [
            repr(packed.skeleton).encode(),
            *(packed.buffers[name].tobytes() for name in sorted(packed.buffers)),
        ]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    return digest


@pytest.fixture(scope="session")
def bits(digest):
    """All of a round that must not depend on where, when or how often its work was done, in
    comparable form.
    """

    def bits(round):
        return {
            "round": round.round,
            "weights": digest(round.weights),
            "states": {slot: digest(hold.state) for slot, hold in round.held.items()},
            "memories": {
                client: digest(unpack(packed)) for client, packed in round.memories.items()
            },
            "evaluation": round.evaluation
            and (round.evaluation.confusion.tolist(), round.evaluation.loss),
            "calibration_error": round.calibration_error,
            "forgetting": round.forgetting,
            "peak": digest(torch.tensor(round.peak)),
            "clients": [
                (row.client, row.num_examples, row.train_loss, row.notes) for row in round.clients
            ],
            "bytes": (round.bytes_down, round.bytes_up),
            "notes": dict(round.notes),
            "sampling": {name: array.tolist() for name, array in (round.sampling or {}).items()},
            "confusions": {client: counts.tolist() for client, counts in round.confusions.items()},
        }

    return bits
