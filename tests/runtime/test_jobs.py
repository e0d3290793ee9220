"""Jobs on a real Ray that asks for a token: submitted, watched, stopped. And how submissions are told apart."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfed.job import NAME
from rayfed.runtime import jobs
from rayfed.runtime.jobs import Client, ClusterLost, Jobs, Submission, id_for, pick
from rayfed.values import InputError

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TOKEN = "0123456789abcdef" * 4
MODELS = """
from torch import nn


def linear(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))


def broken(image_shape, num_classes):
    class Broken(nn.Linear):
        def forward(self, images):
            if self.training:
                raise ValueError("this cannot be trained")
            return super().forward(images.flatten(1))

    return Broken(784, num_classes)
"""
JOB = """
name = "papers/tiny"
[model]
name = "tiny_models:linear"
[train]
num_rounds = 2
clients_per_round = 2
local_steps = 1
[ray]
actors = 1
"""


# Names and ids -------------------------------------------------------------------------------------------------------

names = st.from_regex(NAME, fullmatch=True).filter(lambda name: len(name) < 60)


@given(st.lists(names, max_size=6), names)
def test_an_id_is_new_and_can_be_part_of_an_url(before, name):
    taken = []
    for run in [*before, name, name]:
        taken.append(id_for(run, taken))
    assert len(set(taken)) == len(taken)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", one) for one in taken)
    assert taken[-1].startswith(re.sub(r"[/+]", "-", name))


@given(st.lists(names, min_size=1, max_size=8), st.data())
def test_a_run_is_found_by_its_name_the_newest_first_and_by_its_id(runs, data):
    submissions = []
    for run in runs:
        submissions.insert(0, Submission(id_for(run, [one.id for one in submissions]), "done", run))
    run = data.draw(st.sampled_from(runs))
    assert pick(run, submissions, "here") == next(one for one in submissions if one.run == run)
    one = data.draw(st.sampled_from(submissions))
    if one.id not in runs:  # a run's name goes before an id
        assert pick(one.id, submissions, "here") == one


def test_an_unknown_name_is_refused_with_the_nearest():
    known = [Submission("papers-tiny-2", "done", "papers/tiny"), Submission("raysubmit_1", "done")]
    with pytest.raises(
        InputError, match=r"nothing called 'papers/tyni' has been .* to the cluster at here; did you mean"
    ):
        pick("papers/tyni", known, "here")
    with pytest.raises(InputError, match="'tiny': nothing has been submitted to the cluster at here"):
        pick("tiny", [], "here")
    assert pick("raysubmit_1", known, "here") == known[1]


def test_a_cluster_without_an_agent_is_told_what_may_be_in_its_way():
    """Ray's own words where two of them run on one machine."""

    def list_jobs():
        raise RuntimeError("Request failed with status code 500: No available agent to submit job, please try again.")

    with pytest.raises(ClusterLost, match=r"cluster at here refuses: .*No available agent.*another Ray.*port 52365"):
        Jobs("here", "", SimpleNamespace(list_jobs=list_jobs)).all()


def test_a_cluster_that_falls_silent_is_not_waited_for_without_an_end(monkeypatch):
    class Silent(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/api/version":
                over.wait(60)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""}')

        def log_message(self, *words):
            pass

    over = threading.Event()
    monkeypatch.setattr(jobs, "REQUEST_LIMIT", 0.5)
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        (thread := threading.Thread(target=server.serve_forever)).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            with pytest.raises(ClusterLost, match=rf"the cluster at {url} does not answer any more \(.*timed? ?out"):
                Jobs(url, "", Client(url)).all()
        finally:
            over.set()
            server.shutdown()
            thread.join()


# On a real Ray -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def head():
    """The URL of a Ray that asks for a token, and the environment of a user who has the token in a file."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a socket's path may have 107 characters
    home = folder / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text(TOKEN)
    (home / ".ray/auth_token").chmod(0o600)
    user = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(home)}
    flags = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    flags += ("metrics-export-port", "ray-client-server-port", "runtime-env-agent-port")
    ports = dict(zip(flags, free_ports(len(flags)), strict=True))
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=1", f"--temp-dir={folder}/ray"]
    command += ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
    command += ["--min-worker-port=0", "--max-worker-port=0", *(f"--{flag}={port}" for flag, port in ports.items())]
    path = {"PATH": f"{BIN}{os.pathsep}{user['PATH']}"}  # as in an activated environment
    with open(folder / "log", "w") as log:
        of_cluster = user | path | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
        ray = subprocess.Popen(command, env=of_cluster, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{ports['dashboard-port']}"
        for _ in range(120):
            if "Ray runtime started" in (folder / "log").read_text() and ray.poll() is None:
                break
            time.sleep(1)
        else:
            raise AssertionError((folder / "log").read_text())
        yield url, user | path
    finally:
        ray.terminate()  # it ends all that it has started
        ray.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def at(head, tmp_path):
    """`rayfed`, as a process in a folder with a model of one's own, that speaks to the cluster."""
    url, environment = head
    (tmp_path / "tiny_models.py").write_text(MODELS)
    (tmp_path / "job.toml").write_text(JOB)

    def start(*arguments, **more):
        command = [sys.executable, "-m", "rayfed", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment | {"RAY_API_SERVER_ADDRESS": url} | more,
            preexec_fn=interruptible,
            **pipes,
        )

    return start


def interruptible():
    """A shell has what it starts in the background ignore Ctrl-C, and so have its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(process):
    stdout, stderr = process.communicate(timeout=240)
    return process.returncode, stdout, stderr


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_a_job_is_submitted_followed_and_listed(at, tmp_path):
    shutil.move(tmp_path / "job.toml", tmp_path.parent / "elsewhere.toml")  # it need not lie in the working folder
    job = tmp_path.parent / "elsewhere.toml"
    code, out, err = ended(at("submit", job, "-s", "train.lr=0.05", "--follow"))
    assert code == 0, out + err
    results = tmp_path / "runs/papers/tiny"
    assert re.search(r"^cluster +http://127.0.0.1:\d+, named by RAY_API_SERVER_ADDRESS, on this machine$", out, re.M)
    assert re.search(r"^packed +\d+ files, \d+\.\d MiB$", out, re.M)
    assert f"results  {results}\nsubmitted as papers-tiny\n" in out
    assert re.findall(r"^round (\d)/2  accuracy", out, re.M) == ["0", "1", "2"]
    assert summary(results)["status"] == "done"
    assert "lr = 0.05" in (results / "job.toml").read_text()

    code, out, _ = ended(at("status"))
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    accuracy = f"{summary(results)['last']['test_accuracy']:.3f}"
    assert ["papers/tiny", "done", "2/2", accuracy] in [row[:4] for row in rows if row[-1:] == ["papers-tiny"]]
    code, out, _ = ended(at("status", "papers/tiny"))
    assert re.search(r"^method +Average \+ CrossEntropy$", out, re.M)
    assert f"results     {results}" in out and "round 2/2" in out
    _, log, _ = ended(at("logs", "papers/tiny"))
    assert (log, 0) == ended(at("logs", "papers-tiny", "-f"))[1::-1]
    assert log.count("round 1/2") == 1

    assert ended(at("stop", "papers/tiny"))[1] == "papers/tiny is done already\n"
    code, _, err = ended(at("submit", job))
    assert code == 2 and f"'{results}' holds the results of a run; give --force to replace them" in err
    code, _, err = ended(at("logs", "papers/tyni"))
    assert code == 2 and "did you mean 'papers/tiny'?" in err


@pytest.mark.slow
def test_a_job_that_fails_hands_on_its_exit_code_and_says_why(at, tmp_path):
    code, out, err = ended(
        at("submit", "job.toml", "-s", "model.name=tiny_models:broken", "-s", "name=bad", "--follow")
    )
    assert code == 1
    assert "ValueError: this cannot be trained" in out
    assert "error: bad failed with exit code 1; more: `rayfed status bad`" in err
    assert summary(tmp_path / "runs/bad")["status"] == "failed"
    _, out, _ = ended(at("status", "bad"))
    assert re.search(r"^status +failed$", out, re.M)
    assert "ValueError: this cannot be trained" in out

    code, out, _ = ended(
        at("submit", "job.toml", "-s", "data.source=none.parquet", "-s", "name=bad", "--force", "--follow")
    )
    assert code == 2, "bad input that only the cluster can see"
    assert "submitted as bad-2\n" in out
    assert f"data.source = '{tmp_path}/none.parquet': no such file" in out


@pytest.mark.slow
def test_stop_gives_a_run_the_time_to_keep_what_is_finished(at, tmp_path):
    code, out, err = ended(at("submit", "job.toml", "-s", "train.num_rounds=100000", "-s", "name=long"))
    assert code == 0, err
    assert out.endswith("to watch: `rayfed logs -f long`; to stop: `rayfed stop long`\n")
    follower = at("logs", "-f", "long")
    assert any(line.startswith("round      2/") for line in follower.stdout)
    follower.send_signal(signal.SIGINT)
    code, _, err = ended(follower)
    assert (code, err) == (130, "long goes on; to stop it: `rayfed stop long`\n")
    code, _, err = ended(at("submit", "job.toml", "-s", "name=long", "--force"))
    assert code == 2 and "'long' is running there already, as long" in err

    code, out, _ = ended(at("stop", "long"))
    assert (code, out) == (0, f"long is stopped; what is finished lies in {tmp_path}/runs/long\n")
    left = summary(tmp_path / "runs/long")
    assert left["status"] == "stopped" and left["rounds"] >= 2
    assert list((tmp_path / "runs/long/checkpoints").iterdir())

    follower = at("submit", "job.toml", "-s", "train.num_rounds=100000", "-s", "name=long", "--resume", "--follow")
    shown = []
    for line in follower.stdout:
        shown += map(int, re.findall(r"^round +(\d+)/", line))
        if shown and shown[-1] > left["rounds"] + 1:
            break
    follower.send_signal(signal.SIGINT)  # while the log is followed, it stops the job
    out, err = follower.stdout.read(), follower.stderr.read()  # `communicate` would lose what is in the buffer
    assert ended(follower)[0] == 130, out + err
    assert "stopping the job; Ctrl-C again leaves it to itself" in err
    assert f"long is stopped; what is finished lies in {tmp_path}/runs/long" in err
    shown += map(int, re.findall(r"^round +(\d+)/", out, re.M))
    assert shown == list(range(shown[0], shown[-1] + 1)), "each line once, after the interruption too"
    assert shown[0] > 1, "it has gone on, and not begun anew"
    assert summary(tmp_path / "runs/long")["rounds"] >= left["rounds"] + 2


@pytest.mark.slow
def test_who_has_no_token_or_another_is_refused_in_a_sentence(at, tmp_path):
    for given_token in ({"HOME": str(tmp_path)}, {"RAY_AUTH_TOKEN": "f" * 64}):
        code, _, err = ended(at("submit", "job.toml", **given_token))
        assert code == 2
        (error,) = [line for line in err.splitlines() if "error" in line]
        assert "asks for a token, and has got none or another; put the one that `ray get-auth-token` prints" in error


@pytest.mark.slow
def test_nothing_is_submitted_to_a_ray_that_ends_with_a_run(head, tmp_path):
    environment = {**head[1], "HOME": str(tmp_path)}
    long = ["-s", "train.num_rounds=1000", "-s", "ray.actors=1", "-s", "name=own", "-s", f"output.path={tmp_path}"]
    command = [sys.executable, "-m", "rayfed", "run", str(ROOT / "jobs/quickstart.toml"), *long]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            url = next(line.split()[-1] for line in run.stderr if line.startswith("Ray dashboard: "))
            submit = [sys.executable, "-m", "rayfed", "submit", str(ROOT / "jobs/quickstart.toml"), "--address", url]
            said = subprocess.run(submit, env=environment, capture_output=True, text=True)
        finally:
            run.kill()
    assert said.returncode == 2
    assert f"the Ray at {url} belongs to the run 'own', and ends with it; start one that stays" in said.stderr


@pytest.mark.slow
def test_rays_own_command_submits_as_well(head, tmp_path):
    url, environment = head
    command = [BIN / "ray", "job", "submit", f"--address={url}", "--working-dir=.", "--", "python", "jobs/train.py"]
    command += ["jobs/quickstart.toml", "-s", f"output.path={tmp_path}", "-s", "model.name=lenet"]
    command += ["-s", "train.num_rounds=1", "-s", "train.local_steps=1"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"RAY_AUTH_MODE": "token"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(tmp_path / "quickstart")["status"] == "done"
