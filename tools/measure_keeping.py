"""Measure the seconds that a run's folder costs.

    python tools/measure_keeping.py rounds [ROUNDS]
    python tools/measure_keeping.py memories [CLIENTS KILOBYTES]

The first keeps rounds one by one: 5,000 by default, with 10 clients and 10 classes each. The second
writes a checkpoint of many clients' memories, by default 20,000 of 200 kB, as of SCAFFOLD; then a
tenth of them changes.
"""

from __future__ import annotations

import gc
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfed.data.federation import federate
from rayfed.data.partition import Iid
from rayfed.data.samples import Dataset, Samples
from rayfed.folder.checkpoint import newest
from rayfed.folder.places import checkpoints_of
from rayfed.folder.recorder import Recorder
from rayfed.folder.tables import RESULTS, read_table
from rayfed.job import make_job
from rayfed.measures.metrics import Evaluation
from rayfed.rounds.round import ClientRow, Round
from rayfed.rounds.setup import Setup
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.wire import pack

CLASSES = 10


def open_setup(output: str, clients: int = 10) -> Setup:
    names = tuple(map(str, range(CLASSES)))
    samples = Samples(np.zeros((clients, 1, 4, 4), np.uint8), np.arange(clients) % CLASSES, names)
    job = {
        "name": "keeping",
        "output": {"path": output, "every_seconds": 1e9},
        "ray": {"mode": "off"},
    }
    federation = federate(Dataset(samples, samples), Iid(num_clients=clients))
    return Setup(nn.Linear(1, 1), federation, make_job(job), torch.device("cpu"))


def a_round(number: int, clients: range, memories: Mapping[int, Any]) -> Round:
    evaluation = Evaluation(np.eye(CLASSES, dtype=np.int64) * 7 + 1, 8.0)
    rows = tuple(
        ClientRow(client, 60, 1 / (client + number + 1), 0.5, "10.0.0.1") for client in clients
    )
    weights = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    return Round(number, weights, {}, memories, evaluation, np.ones(CLASSES), 0.1, rows)


def memory(client: int, round: int, kilobytes: int) -> Any:
    """As the workers hold it: SCAFFOLD's control variate, with the shapes of a small network's
    parameters.
    """
    values = np.random.default_rng((client, round)).standard_normal(kilobytes * 250, np.float32)
    shares = np.split(
        values, [kilobytes, 3 * kilobytes, 10 * kilobytes, 200 * kilobytes, 240 * kilobytes]
    )
    tensors = {
        f"layer{number}.weight": torch.from_numpy(share) for number, share in enumerate(shares)
    }
    return pack({"round": round, "slots": {"control": tensors}})


@contextmanager
def timed(what: str) -> Iterator[None]:
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    yield
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    grown = (after.ru_maxrss - before.ru_maxrss) / 1024
    print(
        f"{what:32} {seconds:8.1f} s  ({cpu:6.1f} s of processors), peak memory + {grown:.0f} MiB",
        flush=True,
    )


def files_in(folder: Path) -> list[Path]:
    """Return the files in a folder and in those below; none where there is no folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def measure_rounds(setup: Setup, rounds: int) -> None:
    with timed(f"keeping {rounds} rounds"), Recorder(setup, ThisProcess(setup)) as recorder:
        for number in range(rounds + 1):
            recorder.round(a_round(number, range(10) if number else range(0), {}))
    for name in RESULTS:
        with timed(f"reading {name}"):
            read_table(recorder.path, name)
        print(f"{'':32} {len(files_in(recorder.path / f'{name}.parquet')):8} files")
    with timed("newest checkpoint"):
        saved = newest(checkpoints_of(setup.job))
    with timed("resuming"), Recorder(setup, ThisProcess(setup), saved):
        pass


def measure_memories(setup: Setup, clients: int, kilobytes: int) -> None:
    kept = {client: memory(client, 1, kilobytes) for client in range(clients)}
    with Recorder(setup, ThisProcess(setup)) as recorder:
        with timed(f"all {clients} memories"):
            recorder.round(a_round(1, range(clients), kept))
        changed = range(0, clients, 10)
        kept |= {client: memory(client, 2, kilobytes) for client in changed}
        for number in range(2, 10):
            recorder.round(a_round(number, changed if number == 2 else range(0), kept))
        with timed("a tenth of them"):
            recorder.round(a_round(10, range(0), kept))
    files = files_in(recorder.path / "checkpoints")
    print(f"{'':32} {len(files):8} files")
    kept.clear()
    held = sum(file.stat().st_size for file in files)
    print(f"{'':32} {held / 2**20:8.0f} MiB")
    with timed("newest checkpoint"):
        saved = newest(checkpoints_of(setup.job))
    assert saved is not None
    with timed("restoring it"):
        assert len(saved.restore(setup, ThisProcess(setup)).memories) == clients


if __name__ == "__main__":
    what, numbers = sys.argv[1], [int(number) for number in sys.argv[2:]]
    folder = Path(tempfile.mkdtemp(prefix="keeping-", dir="."))
    try:
        if what == "rounds":
            measure_rounds(open_setup(str(folder)), *(numbers or [5000]))
        else:
            clients, kilobytes = numbers or [20_000, 200]
            measure_memories(open_setup(str(folder), clients), clients, kilobytes)
    finally:
        shutil.rmtree(folder)
