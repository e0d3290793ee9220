"""A run that loses the head of its cluster, or the node that it is on: Ray ends it, and it can be
resumed.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayfed.base.errors import WorkersLost
from rayfed.folder.tables import read_table
from rayfed.job import RayOptions, read_job
from rayfed.runtime import head
from rayfed.runtime.head import Head
from rayfed.runtime.worker_group import WorkerGroup

QUICKSTART = Path(__file__).resolve().parents[2] / "jobs/quickstart.toml"
SETTINGS = [
    "model.name=lenet",
    "train.local_steps=2",
    "train.clients_per_round=4",
    # More than any machine plays in the half minute in which it goes on without the head.
    "train.num_rounds=100000",
]


def test_a_silent_head_is_not_asked_again_until_it_answers(monkeypatch, caplog):
    answer, asked = threading.Event(), []

    def nodes(labels):
        asked.append(answer.wait(60))
        return {"a": {"CPU": 1.0}}

    monkeypatch.setattr(head, "nodes", nodes)
    monkeypatch.setattr(head.internals, "draining", set)
    asking = Head({})
    assert [asking.nodes(0.0), asking.nodes(0.0), asking.silent] == [None, None, False], (
        "asked without waiting"
    )
    monkeypatch.setattr(head, "HEAD_LIMIT", 0.2)
    assert [asking.nodes(), asking.nodes(), asking.silent] == [None, None, True]
    assert caplog.text.count("has not answered") == 1
    answer.set()
    # From here on the head is never late, however busy this machine is.
    monkeypatch.setattr(head, "HEAD_LIMIT", 60.0)
    while asking.nodes() is None:
        pass
    assert (asking.nodes(), asking.silent) == ({"a": {"CPU": 1.0}}, False)
    assert caplog.text.count("is back") == 1
    assert len(asked) == 2, "once while it was silent, and once more"

    def fails(labels):
        raise OSError("no route")

    monkeypatch.setattr(head, "nodes", fails)
    caplog.clear()
    asking = Head({})
    with pytest.raises(WorkersLost, match="the head of the cluster does not answer; try again"):
        asking.known()
    assert [asking.nodes(), asking.silent] == [None, True]
    assert caplog.text.count("the head of the cluster failed (OSError('no route'))") == 1
    monkeypatch.setattr(head, "nodes", lambda labels: {})
    assert [asking.nodes(), asking.silent] == [{}, False] and caplog.text.count("is back") == 1


def test_a_silent_head_is_asked_once_whether_memory_was_full(monkeypatch, caplog):
    """Not for each actor of a lost node: all other work waits for the answer."""
    answer, asked = threading.Event(), []
    monkeypatch.setattr(head, "HEAD_LIMIT", 0.2)
    monkeypatch.setattr(head, "nodes", dict)
    monkeypatch.setattr(head.internals, "draining", set)
    monkeypatch.setattr(
        head.internals, "memory_was_full", lambda process: asked.append(process) or answer.wait(60)
    )
    asking = Head({})
    assert [asking.memory_was_full("a"), asking.memory_was_full("b"), asking.silent] == [
        False,
        False,
        True,
    ]
    assert asked == ["a"] and caplog.text.count("has not answered") == 1
    answer.set()
    monkeypatch.setattr(head, "HEAD_LIMIT", 60.0)
    assert asking.nodes() == {} and asking.memory_was_full("c")


def rayfed(command, target, *settings):
    words = [word for setting in settings for word in ("-s", setting)]
    command = [sys.executable, "-m", "rayfed", command, str(target), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses(path):
    """The losses of each round that the run's tables have."""
    return read_table(path, "rounds").select(["round", "test_loss", "train_loss"]).to_pylist()


@pytest.mark.slow
def test_a_run_that_loses_the_head_keeps_each_round_and_can_be_resumed(
    a_cluster, tmp_path, monkeypatch
):
    """The chaos test kills the raylets and the heads of runs' own Rays."""
    # Ray's default is a minute.
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "20")
    settings = [f"output.path={tmp_path}", "name=run", "method=scaffold", *SETTINGS]
    # Ray would end this process too.
    with a_cluster(join=False, num_cpus=0) as cluster:
        cluster.add_node(num_cpus=1)
        with rayfed("run", QUICKSTART, *settings, f"ray.address={cluster.address}") as run:
            try:
                next(line for line in run.stdout if re.match("round +11/", line))
                os.kill(
                    cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL
                )
                _, said = run.communicate(timeout=240)
            finally:
                run.kill()
    assert run.returncode == 75, said
    assert "ended without a message" in said and "--resume" in said
    assert "the head of the cluster has not answered for 10 s" in said
    kept = max(int(file.stem[6:]) for file in (tmp_path / "run/checkpoints").glob("round-*.json"))
    assert kept > 11, "after each round without the head; usually every ten rounds"
    ending = [f"train.num_rounds={kept + 2}", "ray.mode=off"]
    for command, target, *more in (
        ("resume", tmp_path / "run", "ray.address="),
        ("run", QUICKSTART, *settings, "name=whole"),
    ):
        with rayfed(command, target, *more, *ending) as process:
            # Not `wait`: a fast machine has played so many rounds that their lines fill a pipe.
            _, said = process.communicate()
            assert process.returncode == 0, said
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_run_without_an_actor_says_whether_other_jobs_hold_the_nodes_or_they_are_about_to_end():
    nodes = {"a": {"CPU": 2.0}}
    head = SimpleNamespace(nodes=lambda: nodes, draining=set())
    setup = SimpleNamespace(job=read_job({"name": "run"}))
    group = WorkerGroup(RayOptions(num_gpus=0.0), "run", setup, None, 1, head)
    assert "there are 2 CPU and 0 GPU, which other jobs may hold" in group._missing()
    head.draining.add("a")
    assert (
        "2 CPU and 0 GPU, on nodes that are about to end and take no actors: add a node"
        in group._missing()
    )
    nodes["b"] = {"CPU": 1.0}
    assert "which other jobs may hold" in group._missing()
