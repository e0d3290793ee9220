"""A run that is stopped from outside keeps what it has finished, and says so."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
JOB = [str(ROOT / "jobs" / "quickstart.toml"), "-s", "model.name=lenet", "-s", "train.num_rounds=1000"]


def as_in_a_terminal():
    """A shell has what it starts in the background ignore Ctrl-C, and so have its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_between_two_rounds(tmp_path, mode, sent):
    command = [sys.executable, "-m", "rayfed", "run", *JOB, "-s", f"ray.mode={mode}", "-s", f"output.path={tmp_path}"]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal
    )
    try:
        for line in run.stdout:
            if line.startswith("round    2/1000"):
                run.send_signal(sent)
                break
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130, said
    assert "stopped" in said and "are recorded in" in said
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["rounds"] >= 2
    manifests = [path.name for path in (tmp_path / "quickstart" / "checkpoints").glob("*.json")]
    assert manifests == [f"round-{summary['rounds']:05d}.json"]
