"""Tokens, addresses and certificates, against real Rays that were started with them."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rayfed.runtime import trust

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = "0123456789abcdef" * 2, "f" * 32


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own, and an environment that says nothing of tokens."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def with_token(home, token, mode=0o644):
    """The token as Ray leaves it in a home."""
    (home / ".ray").mkdir(exist_ok=True)
    (home / ".ray" / "auth_token").write_text(token)
    (home / ".ray" / "auth_token").chmod(mode)


def mode_of(home):
    return (home / ".ray" / "auth_token").stat().st_mode & 0o777


def python(script, **environment):
    """What a process of its own prints: Ray reads its environment when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    return done.stdout + done.stderr


JOIN = """
import logging, sys
logging.basicConfig()
from rayfed.runtime import trust
try:
    trust.joining("{address}")
except ValueError as error:
    print(type(error).__name__, error)
    sys.exit()
import ray
ray.init(address="{address}", logging_level="ERROR")

@ray.remote
class Answer:  # an actor, not a task: the cluster has to reach back to us, too
    def get(self):
        return 6 * 7

print("joined,", ray.get(Answer.remote().get.remote()))
"""


@contextmanager
def head(home, port, **environment):
    """The address of a `ray start --head`, which ends with this."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path may have 107 characters
    ports = {
        "port": 0,
        "dashboard-agent-listen-port": 2,
        "dashboard-agent-grpc-port": 3,
        "metrics-export-port": 4,
        "runtime-env-agent-port": 5,
        "node-manager-port": 6,
        "object-manager-port": 7,
        "ray-client-server-port": 8,
        "min-worker-port": 10,
        "max-worker-port": 49,
    }
    command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--num-cpus=2"]
    command += [f"--{name}={port + offset}" for name, offset in ports.items()]
    command += [f"--temp-dir={folder}", "--include-dashboard=false", "--object-store-memory=100000000"]
    environment = {**os.environ, "HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", **environment}
    ray = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        for line in ray.stdout:
            lines.append(line)
            if "block forever" in line:
                break
        assert any("runtime started" in line for line in lines), "".join(lines)
        yield f"127.0.0.1:{port}"
    finally:
        ray.terminate()
        ray.wait(60)
        ray.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o666])
def test_a_token_that_others_can_read_is_taken_from_them_and_that_is_said(home, caplog, mode):
    with_token(home, RIGHT, mode)
    trust._keep_private()
    assert mode_of(home) == 0o600
    assert "auth_token could be read by others; now only by you" in caplog.text
    caplog.clear()
    trust._keep_private()
    assert not caplog.text


def test_no_token_is_nothing_to_keep(home, caplog):
    trust._keep_private()
    assert not caplog.text and not (home / ".ray").exists()


START = """
from rayfed.runtime import trust
from ray._private import ray_constants, services
from ray._raylet import AuthenticationMode, get_authentication_mode
with trust.starting():
    print(get_authentication_mode() == AuthenticationMode.TOKEN, services.get_node_ip_address())
print(ray_constants.ENABLE_RAY_CLUSTER)
"""


def test_a_ray_of_ours_gets_a_private_token_and_loopback(home):
    assert python(START).split() == ["True", "127.0.0.1", "True"]
    assert mode_of(home) == 0o600
    assert len((home / ".ray" / "auth_token").read_text()) == 64


def test_who_wants_no_tokens_gets_none(home):
    assert python(START, RAY_AUTH_MODE="disabled").split() == ["False", "127.0.0.1", "True"]
    assert not (home / ".ray").exists()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RAY_AUTH_MODE": "token"}, "no token for Ray: .*no authentication token was found; put the cluster's"),
        ({"RAY_USE_TLS": "1"}, "TLS is on, but cannot be used: .*must also be set"),
        (
            {
                "RAY_USE_TLS": "1",
                **dict.fromkeys(("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"), "/x"),
            },
            "TLS is on, but cannot be used: .*No such file or directory: '/x'",
        ),
        ({}, "ray.address = '127.0.0.1:1': no Ray answers there .*Connection refused.*ray start --head"),
    ],
    ids=["no token", "no certificates", "no such certificates", "nobody"],
)
def test_what_cannot_work_is_refused_at_once(home, environment, message):
    (line,) = python(JOIN.format(address="127.0.0.1:1"), **environment).splitlines()
    assert line.startswith("InputError ")
    assert re.search(message, line)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_with_a_token_is_joined_with_it_alone_and_one_without_by_anybody(home, tmp_path_factory):
    theirs = tmp_path_factory.mktemp("theirs")
    with_token(theirs, RIGHT)
    with ExitStack() as stack:
        guarded = stack.enter_context(head(theirs, 24100, RAY_AUTH_MODE="token"))
        join = JOIN.format(address=guarded)
        assert "InputError" in python(join) and "asks for a token, and there is none here" in python(join)
        assert "no token for Ray: " in python(join, RAY_AUTH_TOKEN_PATH="/nothing")
        with_token(home, WRONG)
        assert f"the one in '{home}/.ray/auth_token' is another; give the token that" in python(join)
        assert mode_of(home) == 0o600
        assert "joined, 42" in python(join, RAY_AUTH_TOKEN=RIGHT)
        assert "the one in RAY_AUTH_TOKEN is another" in python(join, RAY_AUTH_TOKEN="f")
        with_token(home, RIGHT)
        assert "joined, 42" in python(join)
        assert "and RAY_AUTH_MODE is 'disabled'" in python(join, RAY_AUTH_MODE="disabled")
        open_to_all = stack.enter_context(head(theirs, 24200, RAY_AUTH_MODE="disabled"))
        join = JOIN.format(address=open_to_all)
        assert "joined, 42" in python(join)  # with a token that nobody asks for
        (home / ".ray" / "auth_token").unlink()
        assert "joined, 42" in python(join)


LISTEN = """
import os, subprocess
import rayfed
from rayfed.experiment import Silent

class Look(Silent):
    def round(self, round):
        if round.round == 1:
            told = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
            print(*("LISTENS " + line for line in told.splitlines()), sep="\\n")
            session = subprocess.run(["pgrep", "-s", "0"], capture_output=True, text=True)
            print("PIDS", os.getpid(), session.stdout.split())

small = {"name": "n", "train": {"num_rounds": 1, "clients_per_round": 1}, "data": {"partition": {"num_clients": 100}}}
rayfed.run({**small, "ray": {"mode": "MODE", "actors": 1}}, display=Look())
"""


def listeners(mode, cwd):
    """The addresses that a run listens on while it trains: it, and all that it started, are one session."""
    done = subprocess.run(
        [sys.executable, "-c", LISTEN.replace("MODE", mode)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    pids = set(re.search(r"^PIDS (.*)$", done.stdout, re.M)[1].replace("'", " ").replace(",", " ").split())
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("LISTENS")]
    return [line[4] for line in lines if pids & set(re.findall(r"pid=(\d+)", line[-1]))]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("ss"), reason="ss is not installed")
def test_a_run_on_a_ray_of_its_own_listens_on_loopback_only(home):
    addresses = listeners("on", home)
    assert len(addresses) >= 5  # GCS, raylet, dashboard, its agent, an actor
    assert [a for a in addresses if not a.startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:", "[::1]:"))] == []
    assert mode_of(home) == 0o600


@pytest.mark.skipif(not shutil.which("ss"), reason="ss is not installed")
def test_a_run_without_ray_listens_nowhere(home):
    assert listeners("off", home) == []


def certificates(folder):
    """The three files of docs/security.md."""
    script = """
    openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj "/CN=ray CA" -keyout ca.key -out ca.crt
    openssl req -newkey rsa:2048 -nodes -subj "/CN=ray" -keyout node.key -out node.csr
    echo "subjectAltName = IP:127.0.0.1, IP:$(hostname -I | cut -d' ' -f1)" > names.txt
    openssl x509 -req -in node.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile names.txt -out node.crt
    """
    folder.mkdir()
    subprocess.run(["sh", "-ec", script], cwd=folder, check=True, capture_output=True)
    files = {"SERVER_CERT": "node.crt", "SERVER_KEY": "node.key", "CA_CERT": "ca.crt"}
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{name}": str(folder / file) for name, file in files.items()}}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_tls_lets_in_who_has_a_certificate_of_the_same_authority(home):
    with_token(home, RIGHT)
    ours, foreign = certificates(home / "ours"), certificates(home / "foreign")
    with head(home, 24300, RAY_AUTH_MODE="token", **ours) as address:
        join = JOIN.format(address=address)
        assert "joined, 42" in python(join, **ours)
        assert "no Ray answers there" in python(join)
        assert "no Ray answers there" in python(join, **foreign)
        assert "CERTIFICATE_VERIFY_FAILED" in python(join, **{**ours, "RAY_TLS_CA_CERT": foreign["RAY_TLS_CA_CERT"]})
