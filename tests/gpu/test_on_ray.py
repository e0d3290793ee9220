"""Whole runs whose actors share a GPU: their bits, their failures, their end; and where such a run
may go on.
"""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import rayfed
from rayfed.base.errors import ClientFailed, InputError
from rayfed.methods import Part, compose, scaffold

# Torch before 2.8 has no such class.
GPU_ERROR = getattr(torch, "AcceleratorError", RuntimeError)

# A thread of torch's that uses cuBLAS first makes the context itself, and warns of it.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]
HALF = {"ray.mode": "on", "ray.actors": 2, "ray.num_gpus": 0.5}
TOOL = Path(__file__).parents[2] / "tools/bench.py"


def log_of(result):
    return (result.path / "log.txt").read_text()


@dataclass(frozen=True)
class Fault(Part):
    """The first clients, of a number, that begin on a device make it fail there; on a CPU, the
    error is raised.
    """

    what: str
    folder: str
    times: int

    def begin(self, client):
        count = len(list(Path(self.folder).iterdir()))
        if count >= self.times:
            return
        Path(self.folder, str(count)).touch()
        device = client.label_counts.device
        if self.what == "assert":
            if device.type == "cpu":
                raise GPU_ERROR("CUDA error: device-side assert triggered")
            client.label_counts[torch.tensor([10**6], device=device)].sum().item()
        else:
            if device.type == "cpu":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            total = torch.cuda.get_device_properties(device).total_memory
            # The cap of half a GPU is 0.45.
            torch.empty(int(0.6 * total), dtype=torch.uint8, device=device)


@pytest.fixture
def folder(tmp_path):
    (folder := tmp_path / "faults").mkdir()
    return str(folder)


def test_two_actors_on_a_gpu_have_the_bits_of_this_process(make_table, digest, device):
    table = make_table("scaffold")
    shared, here = rayfed.run(table, HALF), rayfed.run(table, {"name": "here"})
    assert (
        f"actors: 2 on {log_of(shared).partition('actors: 2 on ')[2].partition(' ')[0]} ({device})"
        in log_of(shared)
    )
    assert digest(shared.weights) == digest(here.weights)
    if device.type == "cuda":
        (kind,) = json.loads((shared.path / "environment.json").read_text())["hardware"]
        assert kind["device"] == torch.cuda.get_device_name(device)


def test_auto_measures_and_leaves_nothing_on_the_gpu(make_table, device):
    def on_it():
        if not shutil.which("nvidia-smi"):
            return set()
        ask = ["nvidia-smi", "--query-compute-apps=pid,name", "--format=csv,noheader"]
        return set(
            subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines()
        )

    # From now on, this process itself is there.
    torch.zeros(1, device=device)
    before, auto = on_it(), {"ray.mode": "on", "ray.num_gpus": "auto", "train.clients_per_round": 2}
    log = log_of(rayfed.run(make_table("scaffold"), auto))
    measured = (
        "of GPU memory, the smallest GPU has"
        if device.type == "cuda"
        else "torch sees no GPU where Ray has one"
    )
    assert measured in log or torch.cuda.device_count() > 1, (
        "or each of the two actors has a GPU of its own"
    )
    # The last process may need a moment.
    for _ in range(100):
        if not (left := {line for line in on_it() - before if "ray" in line or "python" in line}):
            break
        time.sleep(0.1)
    assert not left


def test_a_client_that_makes_cuda_fail_is_trained_again_in_a_new_process(
    make_table, digest, folder
):
    runs = []
    for times in (0, 1):
        method = compose(scaffold(), Fault("assert", folder, times))
        runs.append(rayfed.run(make_table(), {**HALF, "name": f"faults-{times}"}, method=method))
    assert "failed (CUDA error: device-side assert triggered" in log_of(runs[1])
    assert digest(runs[0].weights) == digest(runs[1].weights)


def test_a_client_that_always_makes_cuda_fail_ends_the_run_by_its_name(make_table, folder):
    method = compose(Fault("assert", folder, times=99))
    with pytest.raises(
        ClientFailed, match=r"(?s)^client \d, round 1 failed on .*device-side assert triggered"
    ):
        rayfed.run(make_table(), HALF, method=method)


def test_an_actor_is_held_to_its_part_of_the_memory_and_told_what_to_do(make_table, folder):
    method = compose(Fault("memory", folder, times=99))
    with pytest.raises(ClientFailed, match=r"(?s)CUDA out of memory.*try a larger ray.num_gpus"):
        rayfed.run(make_table(), HALF, method=method)


def test_a_run_goes_on_to_the_same_bits_on_its_gpu(make_table, digest):
    table = make_table("scaffold", num_rounds=4)
    whole = rayfed.run(table)
    part = rayfed.run(table, {"name": "part", "train.num_rounds": 2})
    assert digest(rayfed.resume(part.path, {"train.num_rounds": 4}).weights) == digest(
        whole.weights
    )


@pytest.mark.parametrize(("first", "then"), [(1, 0), (0, 1)])
def test_a_run_goes_on_on_another_device_only_with_leave(card, make_table, first, then):
    part = rayfed.run(make_table("scaffold"), {"ray.num_gpus": first})
    more = {"train.num_rounds": 3, "ray.num_gpus": then}
    with pytest.raises(InputError, match=r"to other bits: .*device is .*--other-bits"):
        rayfed.resume(part.path, more)
    assert rayfed.resume(part.path, more, other_bits=True).rounds.num_rows == 4


@pytest.mark.parametrize(
    ("contenders", "sizes"),
    [(["ray", "tuned", "graphs", "here", "plain"], ["1", "2"]), (["tuned", "compiled"], ["1"])],
)
def test_the_benchmark_runs_on_the_gpu(card, images, contenders, sizes):
    command = [
        sys.executable,
        TOOL,
        "--quick",
        "--device",
        "cuda",
        "--processes",
        *sizes,
        "--workloads",
        "W2",
    ]
    command += [
        "--contenders",
        *contenders,
        "--data",
        images / "train.parquet",
        "--test",
        images / "test.parquet",
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    assert all(f"| {name} " in done.stdout for name in contenders)
