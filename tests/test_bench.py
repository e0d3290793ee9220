"""The benchmark's own arithmetic, and that its contenders do the same work. Nothing here asserts on seconds."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rayfed

TOOL = Path(__file__).parents[1] / "tools/bench.py"


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


@pytest.mark.parametrize("name", ["W1", "W1b", "W2", "W3", "W3b"])
def test_every_workload_is_a_valid_job(bench, name):
    workload = bench.WORKLOADS[name]
    job = rayfed.read_job(bench.job_table(workload, {"source": "mnist"}, 60_000, 7, 0.0))
    assert job.data.partition.num_clients == (1000 if name == "W2" else 100)
    assert bench.distils(job) == name.startswith("W3")


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
