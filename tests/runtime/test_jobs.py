"""Jobs on a real Ray that asks for a token: submitted, watched and stopped.

And the errors of a job server.
"""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import venv
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zipfile import ZipFile

import pytest
import requests
from shells import without_ray

import rayfed
from rayfed.base.errors import ClusterLost, InputError
from rayfed.job import EXAMPLES
from rayfed.runtime import jobs
from rayfed.runtime.jobs import Jobs, Submission, id_for
from rayfed.runtime.proxies import proxies_for, without_proxy_here

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TOKEN = "0123456789abcdef" * 4
MODELS = """
import json
from pathlib import Path

import rayfed
from torch import nn


def linear(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))


def broken(image_shape, num_classes):
    class Broken(nn.Linear):
        def forward(self, images):
            # The trial before the run has eight images at most: this is found only by training.
            if self.training and len(images) > 8:
                raise ValueError("this cannot be trained")
            return super().forward(images.flatten(1))

    return Broken(784, num_classes)


class Looking(nn.Linear):
    def forward(self, images):
        print("worked with", rayfed.__file__)
        return super().forward(images.flatten(1))


def looking(image_shape, num_classes):
    for place in (Path.cwd(), Path(rayfed.__file__).parent):
        print("FOLDER", json.dumps([str(place), [str(file.relative_to(place)) for file in place.rglob("*")]]))
    return Looking(784, num_classes)
"""
USING = """
import os
import our_tool
from torch import nn


class Using(nn.Linear):
    def forward(self, images):
        print("TOOL", our_tool.__file__, os.environ["COLOUR"])
        return super().forward(images.flatten(1))


def using(image_shape, num_classes):
    return Using(784, num_classes)
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


# Names and ids
# ------------------------------------------------------------------------------------------


def test_an_id_is_new_and_can_be_part_of_a_url():
    assert id_for("a/b+c", []) == "a-b-c"
    assert id_for("a/b+c", ["a-b-c", "a-b-c-2"]) == "a-b-c-3"


def test_a_submission_is_found_by_its_run_or_its_id_or_the_nearest_is_named(monkeypatch):
    tiny = [
        Submission(number, "done", "papers/tiny") for number in ("papers-tiny-2", "papers-tiny")
    ]
    known = [*tiny, Submission("raysubmit_1", "done")]
    monkeypatch.setattr(Jobs, "submissions", lambda jobs: known)
    jobs = Jobs("here", "")
    assert jobs.find("papers/tiny") == known[0], "the newest"
    assert jobs.find("raysubmit_1") == known[2]
    with pytest.raises(
        InputError,
        match=r"nothing called 'papers/tyni' was submitted to the cluster at here; did you mean",
    ):
        jobs.find("papers/tyni")
    known.clear()
    with pytest.raises(
        InputError, match="'tiny': nothing has been submitted to the cluster at here"
    ):
        jobs.find("tiny")


# Errors of a job server
# ------------------------------------------------------------------------------------------

VERSION = '{"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""}'
# Ray's words where two Rays run on one machine.
NO_AGENT = "No available agent to submit job, please try again."


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The URL of a job server, and its answers by method and path; a request without an answer
    waits for ever.
    """
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    answers, over = {"GET /api/version": (200, VERSION)}, threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = answers.get(f"{self.command} {self.path}") or (over.wait(60) and 500, "")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self):
            self.do_GET()

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        (thread := threading.Thread(target=server.serve_forever)).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", answers
        finally:
            over.set()
            server.shutdown()
            thread.join()


# Of a job server to a question and to a job.
BAD_ANSWERS = {
    "silence": (None, ClusterLost, r"the cluster at {url} does not answer any more \(.*timed out"),
    "no JSON": (
        (200, "<html>"),
        ClusterLost,
        r"the cluster at {url} does not answer any more \(Expecting value",
    ),
    "no agent": ((500, NO_AGENT), ClusterLost, rf"cluster at {{url}} refuses: .*{NO_AGENT}"),
    "no token": (
        (401, ""),
        InputError,
        r"the cluster at {url} asks for a token, and got none or a wrong token",
    ),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_an_error_of_a_job_server_is_one_message(server, monkeypatch, name):
    url, answers = server
    answer, error, message = BAD_ANSWERS[name]
    if name == "silence":
        monkeypatch.setattr(jobs, "REQUEST_LIMIT", 0.5)
    answers["GET /api/jobs/"] = answer
    with pytest.raises(error, match=message.format(url=url)):
        Jobs(url, "").submissions()
    if name in ("silence", "no agent"):
        answers |= {"GET /api/jobs/": (200, "[]"), "POST /api/jobs/": answer}
        with pytest.raises(error, match=message.format(url=url)):
            Jobs(url, "").submit(["true"], "run", {}, {})


SUBMITTED = '{"submission_id": "run", "job_id": null}'
DETAILS = """{"submission_id": "run", "status": "PENDING", "metadata": {}, "start_time": 0, "end_time": null,
"message": "", "driver_exit_code": null}"""


@pytest.mark.slow
@pytest.mark.parametrize("manner", ["open", "asks", "sends on", "asks and sends on"])
def test_the_token_is_shown_to_the_named_server_alone_once_it_has_asked(manner):
    # By port: what was shown there.
    seen = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            port, shown = self.server.server_port, self.headers.get("Authorization")
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.setdefault(port, set()).add(shown)
            named = port == first.server_port
            code = (
                401
                if named and "asks" in manner and not shown
                else 307
                if named and "sends on" in manner
                else 200
            )
            self.send_response(code)
            if code == 307:
                self.send_header("Location", f"http://127.0.0.1:{second.server_port}{self.path}")
            self.end_headers()
            paths = {"/api/version": VERSION, "/api/jobs/run": DETAILS}
            answer = paths.get(self.path, "[]" if self.command == "GET" else SUBMITTED)
            self.wfile.write(answer.encode() if code == 200 else b"")

        def do_POST(self):
            self.do_GET()

        def log_message(self, *words):
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as first,
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as second,
    ):
        for server in (first, second):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        work = (
            f"Jobs('http://127.0.0.1:{first.server_port}', '').submit(['true'], 'run', {{}}, {{}})"
        )
        environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        command = [sys.executable, "-c", f"from rayfed.runtime.jobs import Jobs; {work}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        first.shutdown()
        second.shutdown()
    assert (done.returncode, done.stderr) == (0, "")
    assert seen.pop(first.server_port) == (
        {None, f"Bearer {TOKEN}"} if "asks" in manner else {None}
    )
    assert seen == ({second.server_port: {None}} if "sends on" in manner else {})


PROXY = "http://proxy.example:3128"
TAKES_A_PROXY = [
    ("https://ray.example", {}, True),
    ("https://203.0.113.7:8265", {}, True),
    ("https://ray.example", {"no_proxy": "other.example,.example"}, False),
    ("https://ray.example", {"https_proxy": ""}, False),
    # The proxy would read the token.
    ("http://ray.example:8265", {}, False),
    ("https://localhost:8265", {}, False),
    ("https://127.0.0.1", {}, False),
    ("https://127.1:8265", {}, False),
    ("https://[::1]:8265", {}, False),
    ("https://0.0.0.0:8265", {}, False),
    ("http://127.0.0.1:8265", {}, False),
]


@pytest.mark.parametrize(("url", "more", "takes"), TAKES_A_PROXY)
def test_only_requests_over_https_to_other_machines_take_the_proxy(monkeypatch, url, more, takes):
    for name in ("http", "https", "all", "no"):
        for variable in (f"{name}_proxy", f"{name.upper()}_PROXY"):
            monkeypatch.delenv(variable, raising=False)
    for name, value in {"http_proxy": PROXY, "https_proxy": PROXY, **more}.items():
        monkeypatch.setenv(name, value)
    assert proxies_for(url) == ({"https": PROXY} if takes else {})


def test_rays_processes_reach_the_loopback_interface_without_the_proxy(monkeypatch):
    for name in ("http", "https", "all", "no"):
        for variable in (f"{name}_proxy", f"{name.upper()}_PROXY"):
            monkeypatch.delenv(variable, raising=False)
    assert without_proxy_here() == {}
    monkeypatch.setenv("http_proxy", PROXY)
    monkeypatch.setenv("no_proxy", "own.example, 127.0.0.1")
    listed = "own.example,127.0.0.1,localhost,::1"
    assert without_proxy_here() == {"no_proxy": listed, "NO_PROXY": listed}


def test_no_request_to_this_machine_goes_to_a_proxy_or_shows_a_password_of_netrc(
    server, tmp_path, monkeypatch
):
    url, answers = server
    answers |= {"GET /api/jobs/": (200, "[]"), "POST /api/jobs/": (200, SUBMITTED)}
    answers["GET /api/jobs/run"] = (200, DETAILS)
    (tmp_path / "netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        # Nobody listens there.
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    shown = []
    send = requests.Session.send

    def watched(session, request, **options):
        shown.append(request.headers.get("Authorization"))
        return send(session, request, **options)

    monkeypatch.setattr(requests.Session, "send", watched)
    assert Jobs(url, "").submit(["true"], "run", {}, {}).id == "run"
    assert shown and set(shown) == {None}


# On a real Ray
# ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def head(ray_head, tmp_path_factory):
    """The URL of a Ray that asks for a token, and the environment of a user with the token in a
    file.
    """
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray/auth_token").write_text(TOKEN)
    (home / ".ray/auth_token").chmod(0o600)
    user = without_ray() | {"HOME": str(home)}
    # As in an activated environment.
    user["PATH"] = f"{BIN}{os.pathsep}{user['PATH']}"
    of_cluster = user | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    with ray_head(of_cluster, "--num-cpus=1", "--node-ip-address=127.0.0.1") as ports:
        yield f"http://127.0.0.1:{ports['dashboard-port']}", user


@pytest.fixture
def at(head, tmp_path):
    """`at("submit", ...)`: rayfed speaks to the cluster, from a folder with models of the user's
    own.
    """
    url, environment = head
    (tmp_path / "tiny_models.py").write_text(MODELS)
    (tmp_path / "job.toml").write_text(JOB)

    def start(*arguments, **more):
        return subprocess.Popen(
            [BIN / "rayfed", *arguments],
            cwd=tmp_path,
            env=environment | {"RAY_API_SERVER_ADDRESS": url} | more,
            # A shell may have told us to ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def ended(process):
    stdout, stderr = process.communicate(timeout=800)
    return process.returncode, stdout, stderr


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def without_caches(files):
    return {str(file) for file in files if "__pycache__" not in str(file)}


@pytest.mark.slow
def test_a_job_is_submitted_followed_and_listed(at, tmp_path):
    code, out, err = ended(at("submit", "job.toml", "-s", "train.lr=0.05", "--follow"))
    assert code == 0, out + err
    results = tmp_path / "runs/papers/tiny"
    assert re.search(
        r"^cluster +http://127.0.0.1:\d+, named by RAY_API_SERVER_ADDRESS, on this machine$",
        out,
        re.M,
    )
    assert re.search(r"^packed +2 files, \d\.\d kB, and rayfed itself$", out, re.M)
    assert f"results  {results}\nsubmitted as papers-tiny\n" in out
    assert re.findall(r"^round (\d)/2  accuracy", out, re.M) == ["0", "1", "2"]
    assert summary(results)["status"] == "done"
    assert "lr = 0.05" in (results / "job.toml").read_text()

    code, out, _ = ended(at("status"))
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["papers/tiny", "done"] in [row[:2] for row in rows if row[-1:] == ["papers-tiny"]]
    code, out, _ = ended(at("status", "papers/tiny"))
    assert re.search(r"^method +fedavg$", out, re.M)
    assert f"results     {results}" in out and "round 2/2" in out
    _, log, _ = ended(at("logs", "papers/tiny"))
    assert (log, 0) == ended(at("logs", "papers-tiny", "-f"))[1::-1]
    assert log.count("round 1/2") == 1

    assert ended(at("stop", "papers/tiny"))[1] == "papers/tiny is done already\n"
    code, _, err = ended(at("submit", "job.toml"))
    assert code == 2 and "'runs/papers/tiny' holds the results of a run; choose one:\n" in err
    assert "  continue the run: the same command, with --resume\n" in err
    code, _, err = ended(at("logs", "papers/tyni"))
    assert code == 2 and "did you mean 'papers/tiny'?" in err


@pytest.mark.slow
def test_a_job_gets_the_rayfed_that_submitted_it_and_no_secret_file(at, tmp_path):
    kept = ["id_cards.py", "notes/read.txt", "alias.txt"]
    left = [
        "server.pem",
        "keys/id_rsa",
        ".env",
        "notes/.netrc",
        "ignored.txt",
        "data/large.bin",
        "private.csv",
    ]
    for place in [
        "id_cards.py",
        "notes/read.txt",
        *left,
        "../outside/secret",
        "rayfed/__init__.py",
        "rayfed/job.py",
    ]:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("raise RuntimeError('another rayfed')")
    for link, target in {
        "alias.txt": "notes/read.txt",
        "link.txt": "../outside/secret",
        "linked": "../outside",
    }.items():
        (tmp_path / link).symlink_to(target)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("ignored.txt\ndata/\n")
    (tmp_path / ".git/info/exclude").write_text("private.csv\n")

    code, out, err = ended(
        at("submit", "job.toml", "-s", "model.name=tiny_models:looking", "--follow")
    )
    assert code == 0, out + err
    (folder, files), (package, modules) = map(json.loads, re.findall(r"^FOLDER (.*)$", out, re.M))
    assert without_caches(files) == {"job.toml", "tiny_models.py", "notes", *kept}
    submitted = Path(rayfed.__file__).parent
    examples = {
        "examples",
        *(f"examples/{file.relative_to(EXAMPLES)}" for file in EXAMPLES.rglob("*")),
    }
    ours = without_caches(file.relative_to(submitted) for file in submitted.rglob("*"))
    assert without_caches(modules) == ours | examples
    assert not Path(package).is_relative_to(folder) and Path(package) != submitted
    assert set(re.findall(r"worked with (\S+)$", out, re.M)) == {f"{package}/__init__.py"}, (
        "on the actors too"
    )


@pytest.mark.slow
def test_a_failed_job_passes_its_exit_code_on_and_says_why(at, tmp_path):
    bad = ["submit", "job.toml", "--follow", "-s", "name=bad"]
    code, out, err = ended(at(*bad, "-s", "model.name=tiny_models:broken"))
    assert code == 1
    assert "ValueError: this cannot be trained" in out
    assert "error: bad failed with exit code 1; more: `rayfed status bad`" in err
    assert summary(tmp_path / "runs/bad")["status"] == "failed"
    _, out, _ = ended(at("status", "bad"))
    assert re.search(r"^status +failed$", out, re.M)
    assert "ValueError: this cannot be trained" in out

    code, out, _ = ended(at(*bad, "-s", "data.source=none.parquet", "--force"))
    assert code == 2, "bad input that only the run can see"
    assert "submitted as bad-2\n" in out
    assert f"data.source = '{tmp_path}/none.parquet': no such file" in out


@pytest.mark.slow
def test_stop_gives_a_run_the_time_to_keep_its_finished_rounds(at, tmp_path):
    code, out, err = ended(
        at("submit", "job.toml", "-s", "train.num_rounds=100000", "-s", "name=long")
    )
    assert code == 0, err
    assert out.endswith("to watch: `rayfed logs -f long`; to stop: `rayfed stop long`\n")
    follower = at("logs", "-f", "long")
    assert any(line.startswith("round      2/") for line in follower.stdout)
    follower.send_signal(signal.SIGINT)
    code, _, err = ended(follower)
    assert (code, err) == (130, "long continues; to stop it: `rayfed stop long`\n")
    code, _, err = ended(at("submit", "job.toml", "-s", "name=long", "--force"))
    assert code == 2 and "'long' is running there already, as long" in err

    code, out, _ = ended(at("stop", "long"))
    assert (code, out) == (0, f"long is stopped; its finished rounds lie in {tmp_path}/runs/long\n")
    left = summary(tmp_path / "runs/long")
    assert left["status"] == "stopped" and left["rounds"] >= 2
    assert list((tmp_path / "runs/long/checkpoints").iterdir())

    follower = at(
        "submit",
        "job.toml",
        "-s",
        "train.num_rounds=100000",
        "-s",
        "name=long",
        "--resume",
        "--follow",
    )
    shown = []
    for line in follower.stdout:
        shown += map(int, re.findall(r"^round +(\d+)/", line))
        if shown and shown[-1] > left["rounds"] + 1:
            break
    # While the log is followed, it stops the job.
    follower.send_signal(signal.SIGINT)
    # `communicate` would lose what is in the buffer.
    out, err = (
        follower.stdout.read(),
        follower.stderr.read(),
    )
    assert ended(follower)[0] == 130, out + err
    assert "stopping the job; Ctrl-C again: do not wait for its end" in err
    assert f"long is stopped; its finished rounds lie in {tmp_path}/runs/long" in err
    shown += map(int, re.findall(r"^round +(\d+)/", out, re.M))
    assert shown == list(range(shown[0], shown[-1] + 1)), (
        "each line once, also after the interruption"
    )
    assert shown[0] > 1, "it has continued, not begun anew"
    assert summary(tmp_path / "runs/long")["rounds"] >= left["rounds"] + 2


@pytest.mark.slow
def test_a_missing_or_wrong_token_is_refused_in_one_sentence(at, tmp_path):
    for given_token in ({"HOME": str(tmp_path)}, {"RAY_AUTH_TOKEN": "f" * 64}):
        code, _, err = ended(at("submit", "job.toml", **given_token))
        assert code == 2
        (error,) = [line for line in err.splitlines() if "error" in line]
        assert re.search(
            "asks for a token, and got none or a wrong token; put .* `ray get-auth-token` prints",
            error,
        )


@pytest.mark.slow
def test_nothing_is_submitted_to_a_ray_that_ends_with_a_run(head, tmp_path):
    environment = {**head[1], "HOME": str(tmp_path)}
    long = [
        "-s",
        "train.num_rounds=1000",
        "-s",
        "ray.actors=1",
        "-s",
        "name=own",
        "-s",
        f"output.path={tmp_path}",
    ]
    command = [BIN / "rayfed", "run", ROOT / "jobs/quickstart.toml", *long]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            url = next(
                line.split()[-1] for line in run.stderr if line.startswith("Ray dashboard: ")
            )
            submit = [BIN / "rayfed", "submit", "jobs/quickstart.toml", "--address", url]
            said = subprocess.run(submit, cwd=ROOT, env=environment, capture_output=True, text=True)
        finally:
            run.kill()
    assert said.returncode == 2
    assert (
        f"the Ray at {url} belongs to the run 'own', and ends with it; start a Ray that stays"
        in said.stderr
    )


@pytest.mark.slow
def test_rays_own_command_submits_as_well(head, tmp_path):
    url, environment = head
    command = [
        BIN / "ray",
        "job",
        "submit",
        f"--address={url}",
        "--working-dir=.",
        "--",
        "python",
        "jobs/train.py",
    ]
    command += ["jobs/quickstart.toml", "-s", f"output.path={tmp_path}", "-s", "model.name=lenet"]
    command += ["-s", "train.num_rounds=1", "-s", "train.local_steps=1"]
    environment = environment | {"RAY_AUTH_MODE": "token"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(tmp_path / "quickstart")["status"] == "done"


# Variables, packages and a place for the driver
# ----------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """A Python with the packages of this one in a small environment of its own: for packages, Ray
    copies that.
    """
    venv.create(tmp_path / "small", symlinks=True)
    (setup,) = (tmp_path / "small/lib").glob("python*/site-packages")
    (setup / "all.pth").write_text(sysconfig.get_path("purelib"))
    return tmp_path / "small/bin/python"


def wheel(folder):
    """A package without dependencies, as a file: no index is asked."""
    path = folder / "our_tool-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("our_tool.py", "")
        archive.writestr(
            "our_tool-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: our-tool\nVersion: 1.0\n",
        )
        archive.writestr(
            "our_tool-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("our_tool-1.0.dist-info/RECORD", "")
    return path


@pytest.mark.slow
def test_a_job_gets_its_variables_and_packages_and_its_driver_a_place(small, ray_head, tmp_path):
    user = without_ray()
    user |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAYFED_TRUST_THIS_MACHINE": "1",
    }
    (work := tmp_path / "work").mkdir()
    (work / "using.py").write_text(USING)
    (work / "job.toml").write_text(JOB)
    words = [
        "-s",
        "model.name=using:using",
        "-s",
        f"output.path={tmp_path}/runs",
        "--env",
        "COLOUR=dark blue",
    ]

    def submit(*more):
        command = [BIN / "rayfed", "submit", "job.toml", *words, *more, "--address", url]
        return subprocess.run(
            command, cwd=work, env=user, capture_output=True, text=True, timeout=800
        )

    flags = ["--num-cpus=2", "--node-ip-address=127.0.0.1", "--labels=disk=fast"]
    with ray_head(user, *flags, python=small) as ports:
        url = f"http://127.0.0.1:{ports['dashboard-port']}"
        place = [
            "--entrypoint-num-cpus",
            "1",
            "--entrypoint-memory",
            "268435456",
            "--entrypoint-label",
        ]
        done = submit(
            "--with", f"our-tool @ {wheel(tmp_path).as_uri()}", *place, "disk=in(fast)", "--follow"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        used = set(re.findall(r"TOOL (\S+) (.*)$", done.stdout, re.M))
        assert {colour for _, colour in used} == {"dark blue"}
        assert all("/runtime_resources/pip/" in file for file, _ in used), "on the actors too"

        done = submit(*place, "disk=slow", "-s", "name=waits")
        assert (
            done.returncode == 0
            and "no node has what it asks for, so the job waits for one" in done.stdout
        ), done.stderr
        assert Jobs(url, "").get("waits").status == "pending"
