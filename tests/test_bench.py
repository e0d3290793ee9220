"""The benchmark's own arithmetic, and that its contenders do the same work. Nothing here asserts on seconds."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rayfed
from rayfed.models import build_model

TOOL = Path(__file__).parents[1] / "tools/bench.py"
MINI = Path(rayfed.__file__).parent / "data/fashion_mnist_mini"
SMAPS = """\
7f0000000000-7f0000100000 r-xp 00000000 08:01 42                         /usr/lib/libtorch.so
Rss:                 100 kB
Pss:                  25 kB
Private_Dirty:        10 kB
VmFlags: rd ex mr mw me
7f0000200000-7f0000300000 rw-p 00000000 00:00 0                          [heap]
Rss:                  60 kB
Pss:                  50 kB
Private_Dirty:        60 kB
7f0000400000-7f0000500000 rw-s 00000000 00:01 7                          /dev/shm/plasma (deleted)
Rss:                  40 kB
Pss:                  20 kB
Private_Dirty:         0 kB
"""


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench", TOOL)
    sys.modules["bench"] = tool = importlib.util.module_from_spec(spec)  # its dataclasses look for their module
    spec.loader.exec_module(tool)
    yield tool
    del sys.modules["bench"]


@pytest.fixture
def entry(bench):
    """Make an entry from the seconds of its rounds; two clients train for a second each in every round."""

    def make(name, seconds, accuracy=0.5):
        laps = [bench.Lap(number, accuracy, s, 2.0, 0.5, 2) for number, s in enumerate(seconds)]
        return bench.Entry(name, start=7.0, end=3.0, memory=512.0, laps=laps, counted=laps[3:])

    return make


def test_a_round_is_compared_with_the_same_round_of_the_tuned_pool(bench, entry):
    """The ratio is the median of ratios: rounds differ, as their clients do."""
    ours, tuned = entry("ray", [9, 8, 99, 4, 20, 6]), entry("tuned", [9, 4, 9, 2, 16, 4])
    line = bench.figures_of(ours, tuned, processes=2)
    assert (line.round, line.ratio, line.first, line.start, line.end) == (6, 1.5, 8, 7.0, 3.0)
    assert line.overhead == (6 * 2 - 2.0 - 0.5) / 2
    assert bench.figures_of(ours, None, processes=2).ratio is None
    table = bench.table_of([line, bench.figures_of(tuned, tuned, processes=2)])
    assert len({len(row) for row in table.splitlines()}) == 1
    assert "1.50" in table and "1.00" in table


def test_contenders_that_are_pools_race_in_each_size(bench):
    assert bench.entrants(["ray", "here"], [4]) == {"ray": 4, "here": 1}
    assert bench.entrants(["tuned", "here"], [1, 8]) == {"tuned x1": 1, "tuned x8": 8, "here": 1}
    assert all(bench.kind_of(name) in bench.CONTENDERS for name in bench.entrants(bench.CONTENDERS, [1, 2]))


def test_accuracies_that_are_apart_are_seen(bench, entry):
    assert bench.gap(entry("ray", [1, 1]), entry("tuned", [1, 1], accuracy=0.4)) == pytest.approx(0.1)


def test_memory_counts_each_file_once_and_all_else_by_its_share(bench, tmp_path, monkeypatch):
    found = dict(bench.mappings(SMAPS))
    assert found["[heap]"] == {"Rss": 60, "Pss": 50, "Private_Dirty": 60}
    monkeypatch.setattr(bench, "Path", lambda name: tmp_path / name.strip("/"))
    for pid, pages in ((1, 100), (2, 80)):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/smaps").write_text(SMAPS.replace("100 kB", f"{pages} kB"))
    assert bench.memory_of([1, 2, 3]) * 1024 == 2 * (10 + 50 + 20) + (100 - 10)  # process 3 has ended


@pytest.mark.parametrize("name", ["W1", "W1b", "W2", "W3", "W3b"])
def test_every_workload_is_a_valid_job(bench, name):
    workload = bench.WORKLOADS[name]
    job = rayfed.read_job(bench.job_table(workload, {"source": "mnist"}, 60_000, 7, 0.0))
    assert job.data.partition.num_clients == (1000 if name == "W2" else 100)
    assert bench.distils(job) == name.startswith("W3")


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_tuned_pools_model_is_the_same_function_of_one_vector(bench, channels_last):
    model = build_model("cnn", image_shape=(3, 12, 12), num_classes=10, seed=0)
    images = torch.randn(4, 3, 12, 12)
    flat = bench.Flat(model, channels_last=channels_last)
    assert [type(layer).__name__ for layer in flat.model.features][:3] == ["Conv2d", "MaxPool2d", "ReLU"]
    torch.testing.assert_close(flat.model(images), model(images))
    another = build_model("cnn", image_shape=(3, 12, 12), num_classes=10, seed=1)
    other = bench.Flat(another, channels_last=channels_last).to("cpu")
    other.values.copy_(flat.values)
    assert torch.equal(other.model(images), flat.model(images))


@pytest.mark.slow
def test_all_contenders_do_the_same_work(tmp_path):
    """FedNTD, on the embedded images."""
    contenders = ["ray", "tuned", "here", "plain"]
    command = [TOOL, "--quick", "--workloads", "W3", "--contenders", *contenders, "--json", tmp_path / "out.json"]
    run = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    lines = json.loads((tmp_path / "out.json").read_text())["workloads"]["W3"]["contenders"]
    assert [line["contender"] for line in lines] == contenders
    for laps in zip(*(line["laps"] for line in lines), strict=True):
        assert len({(lap["number"], lap["clients"]) for lap in laps}) == 1
        assert max(lap["accuracy"] for lap in laps) - min(lap["accuracy"] for lap in laps) <= 0.05
    assert all(line["memory"] > 0 for line in lines)
