"""Tokens, addresses and certificates, against real Rays that were started with them."""

import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import ray
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from rayfed.base.errors import InputError
from rayfed.runtime import internals, tokens, trust, versions
from rayfed.runtime.session import AS_LATER_RAYS

OURS = platform.python_version()
MINOR = OURS.rpartition(".")[0]
RIGHT, WRONG = "0123456789abcdef" * 2, "f" * 32


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own, and an environment without a word about tokens."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def with_token(home, token, mode=0o644, folder=0o755):
    """A token, by default with the modes that Ray gives it."""
    (home / ".ray").mkdir(exist_ok=True)
    (home / ".ray").chmod(folder)
    (home / ".ray" / "auth_token").write_text(token)
    (home / ".ray" / "auth_token").chmod(mode)


def mode_of(path):
    return path.stat().st_mode & 0o777


def python(script, **environment):
    """The output of a process of its own: Ray reads its environment when it is imported."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, timeout=800, env={**os.environ, **environment}, **pipes).stdout


JOIN = """
import logging, sys
logging.basicConfig()
from rayfed.runtime import trust
try:
    trust.joining("{address}", "ray.address = '{address}'")
except ValueError as error:
    print(type(error).__name__, error)
    sys.exit()
import ray
ray.init(address="{address}", logging_level="ERROR")

@ray.remote
class Answer:  # an actor, not a task: the cluster must also reach back to us
    def get(self):
        return 6 * 7

print("joined,", ray.get(Answer.remote().get.remote()))
"""


JOIN_AS_A_RUN = """
import ray
from rayfed.job import RayOptions
from rayfed.runtime.session import connected
with connected(RayOptions(address="{address}"), "test", 1):
    print(ray.get(ray.put(42)))
"""


@pytest.fixture
def head(ray_head):
    """`with head(home, RAY_AUTH_MODE=...)`: the address of a Ray that another user has started."""

    @contextmanager
    def head(home, **environment):
        environment = {
            **os.environ,
            "HOME": str(home),
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }
        with ray_head(environment, "--num-cpus=2", "--include-dashboard=false") as ports:
            yield f"127.0.0.1:{ports['port']}"

    return head


@pytest.mark.parametrize(
    ("mode", "folder"),
    [(0o644, 0o755), (0o640, 0o710), (0o604, 0o701), (0o666, 0o777), (0o644, 0o700)],
)
def test_a_token_that_others_could_read_is_made_private_with_a_warning(home, caplog, mode, folder):
    with_token(home, RIGHT, mode, folder)
    tokens.keep_private()
    assert mode_of(home / ".ray/auth_token") == 0o600
    assert ("auth_token could be read by others; now only by you" in caplog.text) == (
        folder != 0o700
    )
    caplog.clear()
    tokens.keep_private()
    assert not caplog.text


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize("where", ["HOME", "the system's", "read-only", "nowhere"])
def test_a_new_ray_finds_a_token_that_was_never_open_to_others(
    home, short_folder, monkeypatch, where, has_token
):
    """Ray looks into HOME alone, so it is told of any other place."""
    monkeypatch.setenv("RAY_TMPDIR", short_folder)
    ours = Path(short_folder, f"rayfed.{os.getuid()}")
    place = {"HOME": home / ".ray", "the system's": home / ".ray"}.get(where, ours)
    if has_token:
        place.mkdir(mode=0o700)
        (place / "auth_token").write_text(RIGHT)
        (place / "auth_token").chmod(0o600)
    if where == "the system's":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(Path, "home", lambda: home)
    if where == "read-only":
        monkeypatch.setenv("HOME", "/proc/1")
    if where == "nowhere":
        monkeypatch.setattr(Path, "home", no_home)
    before = os.umask(0)
    try:
        told = tokens.for_a_new_ray()
    finally:
        os.umask(before)
    token = place / "auth_token"
    assert told == ({} if where == "HOME" else {"RAY_AUTH_TOKEN_PATH": str(token)})
    assert (mode_of(place), mode_of(token)) == (0o700, 0o600)
    content = token.read_text()
    assert content == RIGHT if has_token else len(content) == 64
    assert [path.name for path in place.iterdir()] == ["auth_token"]
    assert tokens.for_a_new_ray() == told and token.read_text() == content


@pytest.mark.parametrize(
    "chosen",
    [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": RIGHT}, {"RAY_AUTH_TOKEN_PATH": "/nothing"}],
)
def test_no_token_is_made_where_the_user_has_chosen(home, monkeypatch, chosen):
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert tokens.for_a_new_ray() == {} and not (home / ".ray").exists()


def test_a_user_without_a_home_folder_has_no_token(home, monkeypatch):
    monkeypatch.setattr(Path, "home", no_home)
    tokens.keep_private()
    assert tokens.read_token() == ""


START = """
import ray
from rayfed.runtime import trust
from ray._private import ray_constants
from ray._raylet import AuthenticationMode, get_authentication_mode
with trust.starting():
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
token = get_authentication_mode() == AuthenticationMode.TOKEN
print(token, ray.util.get_node_ip_address(), ray_constants.ENABLE_RAY_CLUSTER)
"""


@pytest.mark.slow
def test_a_ray_of_ours_has_a_private_token_and_listens_on_loopback(home, short_folder):
    assert python(START, RAY_TMPDIR=short_folder, **AS_LATER_RAYS) == "True 127.0.0.1 True\n", (
        "and nothing is logged"
    )
    assert (mode_of(home / ".ray"), mode_of(home / ".ray/auth_token")) == (0o700, 0o600)
    assert len((home / ".ray/auth_token").read_text()) == 64


ASKED = '''
import ray
from rayfed.runtime import trust
with trust.starting():
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")

import os, subprocess, sys
ask = """if True:
    import sys
    from rayfed.runtime import internals
    with internals.on_loopback():  # else Ray takes 127.0.0.1 for this machine's other address
        error = internals.knock(sys.argv[1], 10)
    print(error.code().name if error else 'let in')
"""
command = [sys.executable, "-c", ask, ray.get_runtime_context().gcs_address]
stranger = {**os.environ, "RAY_AUTH_MODE": "disabled", "HOME": "/nothing"}
for environment in (dict(os.environ), stranger):
    print(subprocess.run(command, env=environment, capture_output=True, text=True).stdout, end="")
'''


@pytest.mark.slow
def test_a_ray_of_ours_refuses_whoever_has_no_token(home, short_folder):
    assert python(ASKED, RAY_TMPDIR=short_folder, **AS_LATER_RAYS) == "let in\nUNAUTHENTICATED\n"


@pytest.mark.slow
def test_ray_auth_mode_disabled_makes_no_token(home, short_folder):
    assert (
        python(START, RAY_TMPDIR=short_folder, RAY_AUTH_MODE="disabled") == "False 127.0.0.1 True\n"
    )
    assert not (home / ".ray").exists()


FACTS = '{{"ray_version": "{ray}", "python_version": "{python}"}}'


@pytest.fixture
def tell():
    """`tell(ray, python)`: the cluster of this process says that it was started with these."""
    head = internal_kv_get_gcs_client()
    key, space = internals.private("cluster_facts", "cluster_space")
    before = head.internal_kv_get(key, space)

    def tell(ray, python):
        facts = FACTS.format(ray=ray, python=python)
        head.internal_kv_put(key, facts.encode(), True, space)

    yield tell
    head.internal_kv_put(key, before, True, space)


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "told by Ray"])
@pytest.mark.parametrize(
    ("their_ray", "their_python", "message"),
    [
        (ray.__version__, OURS, None),
        (ray.__version__, f"{MINOR}.99", None),
        (
            "2.99.0",
            OURS,
            "either install that Ray here: pip install 'ray.default.==2.99.0'; or use",
        ),
        (
            "2.99.0",
            "3.99.0",
            "==2.99.0', in an environment with Python 3.99; or use a cluster with",
        ),
        (
            ray.__version__,
            "3.99.0",
            f"in an environment with Python 3.99; or .* and Python {MINOR}$",
        ),
        ("2.40.0", OURS, r"rayfed needs Ray 2\.52 or later, so use a cluster with Ray"),
        ("2.40.0", "3.9.1", rf"rayfed needs .*, so use a cluster with Ray .* and Python {MINOR}$"),
    ],
)
def test_a_cluster_of_another_version_is_one_message_with_both_versions(
    asked, their_ray, their_python, message
):
    """As the cluster's head tells it, and as Ray words it where the head cannot be asked."""

    def refuse():
        if asked:
            versions.refuse_others("RAY_ADDRESS = 'here'", their_ray, their_python)
        else:
            words = f"with:\n    Ray: {their_ray}\n    Python: {their_python}\nThis process"
            error = RuntimeError(f"Version mismatch: The cluster was started {words} on ...")
            versions.refuse_as_told("RAY_ADDRESS = 'here'", error)

    if message is None:
        refuse()
        return
    with pytest.raises(InputError, match=message) as refused:
        refuse()
    said = str(refused.value)
    assert said.startswith(
        f"RAY_ADDRESS = 'here': that cluster has Ray {their_ray} on Python {their_python}, but "
    )
    assert f"this environment has Ray {ray.__version__} on Python {OURS}; " in said
    assert "\n" not in said


def test_a_cluster_of_another_version_is_refused_before_it_is_joined(cluster, tell):
    trust.joining(cluster, "ray.address")
    tell("2.99.0", OURS)
    with pytest.raises(InputError, match=r"^ray\.address: that cluster has Ray 2\.99\.0 on Python"):
        trust.joining(cluster, "ray.address")


@pytest.mark.slow
def test_a_python_of_another_patch_version_is_joined(cluster, tell):
    tell(ray.__version__, f"{MINOR}.99")
    assert "42" in python(JOIN_AS_A_RUN.format(address=cluster))


def tls(*files):
    """TLS with a certificate, its key and the certificate of an authority."""
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    return {"RAY_USE_TLS": "1", **dict(zip(names, map(str, files), strict=True))}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RAY_AUTH_MODE": "token"},
            "no token for Ray: .*no authentication token was found; put the token that",
        ),
        ({"RAY_USE_TLS": "1"}, "TLS is on, but cannot be used: .*must also be set"),
        (tls("/x", "/x", "/x"), "TLS is on, but cannot be used: .*No such file or directory: '/x'"),
        (
            {},
            "ray.address = '127.0.0.1:1': no Ray answers there .connection refused.\n.*\n.*\n"
            "(  .*\n)+  ray start --head",
        ),
    ],
    ids=["no token", "no certificates", "no such certificates", "no Ray"],
)
def test_a_cluster_that_cannot_be_joined_is_one_message_at_once(home, environment, message):
    printed = python(JOIN.format(address="127.0.0.1:1"), **environment)
    assert printed.startswith("InputError ") and "Traceback" not in printed
    assert re.search(message, printed), printed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_with_a_token_is_joined_only_with_it_and_others_always(
    home, head, tmp_path_factory
):
    theirs = tmp_path_factory.mktemp("theirs")
    with_token(theirs, RIGHT)
    with ExitStack() as stack:
        join = JOIN.format(address=stack.enter_context(head(theirs, RAY_AUTH_MODE="token")))
        assert "InputError" in python(
            join
        ) and "asks for a token, and got none or a wrong token" in python(join)
        assert "no token for Ray: " in python(join, RAY_AUTH_TOKEN_PATH="/nothing")
        with_token(home, WRONG)
        assert "got none or a wrong token; put the token that" in python(join)
        assert mode_of(home / ".ray/auth_token") == 0o600
        assert "joined, 42" in python(join, RAY_AUTH_TOKEN=RIGHT)
        assert "got none or a wrong token" in python(join, RAY_AUTH_TOKEN="f")
        with_token(home, RIGHT)
        assert "joined, 42" in python(join)
        assert "got none or a wrong token" in python(join, RAY_AUTH_MODE="disabled")
        join = JOIN.format(address=stack.enter_context(head(theirs, RAY_AUTH_MODE="disabled")))
        # With a token that this cluster does not ask for.
        assert "joined, 42" in python(join)
        (home / ".ray" / "auth_token").unlink()
        assert "joined, 42" in python(join)


LISTEN = """
import os, subprocess
import rayfed
from rayfed import Observer

class Look(Observer):
    def round(self, round):
        if round.round == 1:
            told = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
            print(*("LISTENS " + line for line in told.splitlines()), sep="\\n")
            session = subprocess.run(["pgrep", "-s", "0"], capture_output=True, text=True)
            print("PIDS", os.getpid(), *session.stdout.split())

small = {"name": "n", "train": {"num_rounds": 1, "clients_per_round": 1}, "data": {"partition": {"num_clients": 100}}}
rayfed.run({**small, "ray": {"mode": "MODE", "actors": 1}}, observers=[Look()])
"""


def listeners(mode, cwd):
    """The addresses that a run listens on while it trains, with all processes of its session."""
    command = [sys.executable, "-c", LISTEN.replace("MODE", mode)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=cwd, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    pids = set(re.search(r"^PIDS (.*)$", done.stdout, re.M)[1].split())
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("LISTENS")]
    return [line[4] for line in lines if pids & set(re.findall(r"pid=(\d+)", line[-1]))]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("ss"), reason="ss is not installed")
def test_a_run_on_a_ray_of_its_own_listens_on_loopback_only(home):
    addresses = listeners("on", home)
    # GCS, raylet, dashboard, its agent, an actor.
    assert len(addresses) >= 5
    assert [
        a for a in addresses if not a.startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:", "[::1]:"))
    ] == []
    assert mode_of(home / ".ray/auth_token") == 0o600


@pytest.mark.slow
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
    return tls(folder / "node.crt", folder / "node.key", folder / "ca.crt")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_tls_admits_certificates_of_the_same_authority_only(home, head):
    with_token(home, RIGHT)
    ours, foreign = certificates(home / "ours"), certificates(home / "foreign")
    with head(home, RAY_AUTH_MODE="token", **ours) as address:
        join = JOIN.format(address=address)
        assert "joined, 42" in python(join, **ours)
        assert "no Ray answers there" in python(join)
        assert "no Ray answers there" in python(join, **foreign)
        assert "CERTIFICATE_VERIFY_FAILED" in python(
            join, **{**ours, "RAY_TLS_CA_CERT": foreign["RAY_TLS_CA_CERT"]}
        )
