"""Ray's private names: this Ray has them all, and a Ray that lacks one still runs, joins and
submits.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from shells import without_ray

from rayfed.runtime import internals
from rayfed.runtime.versions import OLDEST, minor

# The other names are in every Ray that pyproject.toml allows.
SINCE = {"show_token": (2, 60)}
ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "model.name=lenet",
    "train.num_rounds=1",
    "train.clients_per_round=2",
    "train.local_steps=1",
    "ray.actors=1",
]
WITHOUT = """
import sys
from rayfed.runtime import internals
internals.NAMES[sys.argv.pop(1)] = "ray:gone"
"""
COMMAND = WITHOUT + "from rayfed.cli import main; main()"
ASK = """
import ray
ray.init(address=sys.argv[1], logging_level="ERROR")
print(internals.memory_was_full(ray.get_runtime_context().get_worker_id()))
"""


@pytest.mark.parametrize("name", internals.NAMES)
def test_this_ray_has_every_name_that_its_version_has(name):
    has_it = minor(ray.__version__) >= SINCE.get(name, OLDEST)
    assert (internals.private(name) is not None) == has_it


def test_ray_prints_no_guesses_and_without_a_terminal_no_colours(capsys, monkeypatch):
    from ray._private import worker

    monkeypatch.delenv("RAY_COLOR_PREFIX", raising=False)
    guess = f"{internals.GUESS} by an unexpected system error. To troubleshoot the problem, check"
    with internals.in_our_words():
        for lines in ([guess], ["the disk is nearly full", guess]):
            data = {"lines": lines, "pid": "raylet", "is_err": False}
            worker.print_to_stdstream(data, ignore_prefix=False)
        shown = capsys.readouterr()
        monkeypatch.delenv("RAY_COLOR_PREFIX")
    assert shown.out + shown.err == "(raylet) the disk is nearly full\n"


def test_no_other_file_knows_a_private_name():
    others = {path for path in (ROOT / "rayfed").rglob("*.py") if path.name != "internals.py"}
    knowing = re.compile(
        r"(import|from) ray\.(_private|core|autoscaler|dashboard|experimental|_raylet)|\bray\._[^_]"
    )
    assert others and [path.name for path in others if knowing.search(path.read_text())] == []


def run(script, name, *words, **environment):
    command = [sys.executable, "-c", script, name, *words]
    environment = without_ray() | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def settings(path, *more):
    return [word for setting in (*TINY, f"output.path={path}", *more) for word in ("-s", setting)]


def last(path):
    return json.loads((path / "quickstart/summary.json").read_text())["last"]["test_accuracy"]


@pytest.fixture
def off(tmp_path):
    """The accuracy without Ray."""
    run(
        COMMAND, "state", "run", "jobs/quickstart.toml", *settings(tmp_path / "off", "ray.mode=off")
    )
    return last(tmp_path / "off")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["dashboard_key", "multi_node", "set_sigterm"])
def test_a_ray_of_ours_that_lacks_a_name_runs_with_the_same_result(tmp_path, off, name):
    run(COMMAND, name, "run", "jobs/quickstart.toml", *settings(tmp_path / name))
    assert last(tmp_path / name) == off


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ray_that_lacks_a_name_is_joined_and_gets_jobs_with_the_same_result(
    tmp_path, off, ray_head
):
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    with ray_head({**os.environ, **token}, "--num-cpus=1", "--node-ip-address=127.0.0.1") as ports:
        address = f"127.0.0.1:{ports['port']}"
        assert run(WITHOUT + ASK, "state", address, **token).strip() == "False"
        ours = {"RAY_AUTH_TOKEN": token["RAY_AUTH_TOKEN"]}
        without = {
            "adds_nodes": ours,
            "cluster_address": ours,
            "draining": ours,
            "show_token": token,
        }
        for name, shown in without.items():
            words = settings(tmp_path / name, f"ray.address={address}")
            run(COMMAND, name, "run", "jobs/quickstart.toml", *words, **shown)
            assert last(tmp_path / name) == off
