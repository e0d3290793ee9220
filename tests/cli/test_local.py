"""`rayfed logs` and `rayfed stop` of a run of this folder: which process it is, and which it is
not.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

HOLD = """
import time
from pathlib import Path
from rayfed.folder.lock import locked

with locked(Path("runs/bg")):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def bg(folder, monkeypatch):
    """The folder of a run that nothing works on, where no Ray answers."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr("rayfed.runtime.address.USUAL", "http://127.0.0.1:1")
    path = folder / "runs/bg"
    path.mkdir(parents=True)
    (path / "job.toml").write_text("[train]\nnum_rounds = 9\n")
    (path / "summary.json").write_text(json.dumps({"status": "running", "rounds": 4}))
    (path / "log.txt").write_text("round 4/9\n")
    return path


@pytest.fixture
def holder(bg):
    """A process that works on the run, as far as anybody can see."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_the_process_of_a_run_is_asked_to_stop_and_waited_for(bg, holder, rayfed):
    status = rayfed("status", "bg")
    assert "its log: `rayfed logs -f bg`; to stop it: `rayfed stop bg`" in status.stdout
    ended = rayfed("stop", "bg")
    assert ended.exit_code == 0, ended.output
    assert f"stopping bg, process {holder.pid}" in ended.stderr
    assert "to continue it: rayfed resume runs/bg" in ended.stdout
    assert holder.wait() == -signal.SIGTERM


def test_a_file_that_the_run_has_just_removed_does_not_hide_its_lock(
    bg, holder, rayfed, monkeypatch
):
    """As a temporary file of its tables, which was there when the open files were listed."""
    listed = psutil.Process.open_files
    removed = SimpleNamespace(path=str(bg / "rounds.parquet.tmp"))
    monkeypatch.setattr(psutil.Process, "open_files", lambda self: [removed, *listed(self)])
    ended = rayfed("stop", "bg")
    assert ended.exit_code == 0, ended.output
    assert holder.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "process {other} on {here}",
            "process {other}, which is another user's, or of another container",
        ),
        ("process {holder} on elsewhere", "runs on elsewhere, as process {holder}: stop it there"),
        ("", "does not say which process runs bg"),
    ],
)
def test_no_other_process_is_stopped(bg, holder, rayfed, words, says):
    """A number in a file may be that of another process by now, or of a process on another
    machine.
    """
    with subprocess.Popen(["sleep", "60"]) as other:
        names = {"other": other.pid, "holder": holder.pid, "here": platform.node()}
        with (bg / ".lock").open("r+") as lock:
            lock.truncate(0)
            lock.write(words.format(**names))
        ended = rayfed("stop", "bg")
        assert (ended.exit_code, says.format(**names) in ended.stderr) == (2, True), ended.stderr
        assert (other.poll(), holder.poll()) == (None, None)
        other.kill()


def test_a_run_that_has_ended_is_not_stopped_and_its_log_is_printed(bg, rayfed):
    (bg / "summary.json").write_text(json.dumps({"status": "done", "rounds": 9}))
    for name in ("bg", "runs/bg"):
        assert rayfed("stop", name).stdout == f"{name} is done\n"
        for words in (["logs", name], ["logs", "-f", name]):
            shown = rayfed(*words)
            assert (shown.exit_code, shown.stdout) == (0, "round 4/9\n")
            assert "log: runs/bg/log.txt" in shown.stderr
    unknown = rayfed("stop", "gb")
    assert (
        unknown.exit_code == 2 and "'gb': no run of this name in runs, and no Ray" in unknown.stderr
    )


@pytest.mark.slow
def test_a_stopped_run_has_a_checkpoint_from_which_it_continues(folder, rayfed):
    words = [sys.executable, "-m", "rayfed", "run", "job.toml", "-s", "train.num_rounds=1000000"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(folder)])
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}) as process:
        summary = folder / "runs/tiny/summary.json"
        while not summary.exists() or json.loads(summary.read_text())["rounds"] < 2:
            assert process.poll() is None
            time.sleep(0.1)
        ended = rayfed("stop", "tiny")
        assert (ended.exit_code, ended.stdout.startswith("tiny is stopped")) == (0, True)
        assert process.wait() == 130
    played = json.loads(summary.read_text())["rounds"]
    continued = rayfed("resume", "runs/tiny", "-s", f"train.num_rounds={played + 1}")
    assert continued.exit_code == 0, continued.output
