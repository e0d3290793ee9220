"""The first job that anybody runs, as they run it."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_quickstart_learns_and_leaves_its_results(tmp_path):
    command = [sys.executable, "-m", "rayfed", "run", str(ROOT / "jobs" / "quickstart.toml")]
    run = subprocess.run([*command, "-s", f"output.path={tmp_path}"], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "quickstart"
    assert str(folder) in run.stdout
    rounds = pq.read_table(folder / "rounds.parquet").to_pylist()
    assert [row["round"] for row in rounds] == list(range(13))
    assert rounds[-1]["test_accuracy"] > 0.7
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    names = {path.name for path in folder.iterdir()}
    tables = {"rounds.parquet", "clients.parquet", "classes.parquet", "partition.parquet"}
    assert names == tables | {
        "job.toml",
        "environment.json",
        "summary.json",
        "checkpoints",
        "report.html",
        "log.txt",
    }
