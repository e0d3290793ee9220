"""What if a run loses the head of its cluster, or the node that it is on itself: Ray ends it, and it can be resumed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rayfed.record import read_json, read_table
from rayfed.runtime import head
from rayfed.runtime.head import Head

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ["model.name=lenet", "train.local_steps=2", "train.clients_per_round=4", "train.num_rounds=1000"]


def test_nobody_waits_for_a_silent_head_twice(monkeypatch, caplog):
    answer, asked = threading.Event(), []

    def nodes():
        asked.append(answer.wait(60))
        return [{"CPU": 1.0}]

    monkeypatch.setattr(head, "nodes", nodes)
    monkeypatch.setattr(head, "HEAD_LIMIT", 0.2)
    one = Head()
    assert [one.nodes(), one.nodes(), one.silent] == [None, None, True]
    assert caplog.text.count("has not answered") == 1
    answer.set()
    while one.nodes() is None:
        pass
    assert (one.nodes(), one.silent) == ([{"CPU": 1.0}], False)
    assert caplog.text.count("is back") == 1
    assert len(asked) == 2, "once while it was silent, and once more"


def rayfed(*arguments):
    command = [sys.executable, "-m", "rayfed", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses(path):
    """By round, up to a checkpoint."""
    return read_table(path, "rounds").select(["round", "test_loss", "train_loss"]).to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["raylet", "gcs_server"])
def test_a_run_that_loses_its_own_node_or_the_head_can_be_resumed(a_cluster, tmp_path, monkeypatch, lost):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "20")  # a minute, if nothing else is said
    settings = [f"output.path={tmp_path}", "name=run", "method=scaffold", *SETTINGS]
    with a_cluster(join=False, num_cpus=0) as cluster:  # this process is to live
        cluster.add_node(num_cpus=1)
        words = [word for setting in [*settings, f"ray.address={cluster.address}"] for word in ("-s", setting)]
        with rayfed("run", ROOT / "jobs/quickstart.toml", *words) as run:
            try:
                for line in run.stdout:
                    if line.startswith("round   11/"):
                        os.kill(cluster.head_node.all_processes[lost][0].process.pid, signal.SIGKILL)
                        break
                _, said = run.communicate(timeout=120)
            finally:
                run.kill()
    assert run.returncode == 75, said
    assert "ended without a word" in said and "--resume" in said
    kept = max(int(file.stem[6:]) for file in (tmp_path / "run/checkpoints").glob("round-*.json"))
    if lost == "raylet":
        assert kept == 10, "every ten rounds"
    else:
        assert "the head of the cluster has not answered for 10 s" in said
        assert kept > 11, "after each round that it went on alone"
    ending = ["-s", f"train.num_rounds={kept + 2}", "-s", "ray.mode=off"]
    with rayfed("resume", tmp_path / "run", *ending, "-s", "ray.address=") as resumed:
        assert resumed.wait(120) == 0, resumed.stderr.read()
    assert read_json(tmp_path / "run/summary.json")["status"] == "done"
    words = [word for setting in settings for word in ("-s", setting)]
    with rayfed("run", ROOT / "jobs/quickstart.toml", *words, *ending, "-s", "name=whole") as whole:
        assert whole.wait(120) == 0, whole.stderr.read()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
