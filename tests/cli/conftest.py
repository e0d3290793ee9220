"""The command; a working folder with a job, a model and a tiny data set; and a job server that runs
nothing.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import ray
from click.testing import CliRunner

from rayfed.cli import main

JOB = """
name = "tiny"
method = "fedntd"
[data]
source = "data"
shape = [1, 4, 4]
[data.partition]
name = "iid"
num_clients = 4
[model]
name = "tiny_models:linear"
[train]
num_rounds = 2
clients_per_round = 2
batch_size = 8
[ray]
mode = "off"
"""
MODELS = """
from torch import nn
def linear(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))
"""


@pytest.fixture(scope="session")
def rayfed():
    """Run the command in this process."""
    return lambda *arguments: CliRunner().invoke(main, arguments, prog_name="rayfed")


@pytest.fixture
def folder(tmp_path, monkeypatch, write_images):
    """The current folder, a temporary one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tiny_models", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write_images(tmp_path, 40, 20, pixels=16)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "tiny_models.py").write_text(MODELS)
    return tmp_path


@pytest.fixture
def cluster(monkeypatch):
    """A job server on this machine that takes `packages` and `submissions`, at `url`, and runs
    nothing.
    """
    packages, submissions, version = {}, [], ray.__version__

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            place, name = self.path.rsplit("/", 1)
            if place.startswith("/api/packages"):
                self.answer({}, 200 if name in packages else 404)
            elif self.path == "/api/version":
                self.answer({"ray_version": version, "version": "4"})
            else:
                jobs = [known | {"driver_exit_code": None} for known in submissions]
                self.answer(next((known for known in jobs if known["submission_id"] == name), jobs))

        def do_PUT(self):
            packages[self.path.rpartition("/")[2]] = self.body()
            self.answer({})

        def do_POST(self):
            times = {"start_time": 0, "end_time": None}
            submissions.append(
                json.loads(self.body()) | {"status": "PENDING", "message": "waits", **times}
            )
            self.answer({"job_id": None, "submission_id": submissions[-1]["submission_id"]})

        def body(self):
            return self.rfile.read(int(self.headers["Content-Length"]))

        def answer(self, content, code=200):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_):
            pass

    monkeypatch.setattr("rayfed.cli.submit.are_here", lambda jobs, nodes: True)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{server.server_port}", packages=packages, submissions=submissions
        )
        server.shutdown()
