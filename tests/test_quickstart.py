"""The quickstart, run by its command: the model learns."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

QUICKSTART = Path(__file__).resolve().parents[1] / "jobs/quickstart.toml"


@pytest.mark.slow
def test_the_quickstart_learns_and_leaves_its_results(tmp_path):
    command = [sys.executable, "-m", "rayfed", "run", str(QUICKSTART), "-s", f"output.path={tmp_path}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "quickstart"
    assert str(folder) in run.stdout
    rounds = pq.read_table(folder / "rounds.parquet").to_pylist()
    assert [row["round"] for row in rounds] == list(range(13))
    assert rounds[-1]["test_accuracy"] > 0.7
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    tables = {"rounds.parquet", "clients.parquet", "classes.parquet", "partition.parquet"}
    others = {"job.toml", "environment.json", "summary.json", "checkpoints", "report.html", "log.txt", ".lock"}
    assert {path.name for path in folder.iterdir()} == tables | others
