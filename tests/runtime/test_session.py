"""Joining a Ray, being placed on it, and leaving it as it was."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray

from rayfed.job import RayOptions
from rayfed.methods import fedavg, fedntd
from rayfed.runtime import session
from rayfed.runtime.session import share_as_measured, workers
from rayfed.values import InputError

GIB = 2**30
QUICKSTART = Path(__file__).resolve().parents[2] / "jobs" / "quickstart.toml"


def test_actors_have_their_share_of_a_gpu(cluster, make_site):
    with workers(RayOptions(address=cluster, num_gpus=0.5, actors=4), f"gpu-{os.getpid()}", make_site(fedavg())):
        free = ray.available_resources()
        assert free.get("GPU", 0) == 0
        names = [name for name in ray.util.list_named_actors() if name.startswith("gpu-")]
        assert sorted(names) == [f"gpu-{os.getpid()}/client-{i}" for i in range(4)]


def test_auto_puts_as_many_on_a_gpu_as_fit(cluster, make_site, monkeypatch, caplog, here, on_ray):
    """The GPUs are pretended, and so is the measuring: the rest is real."""
    monkeypatch.setattr(
        session, "measured", lambda options, name, sites: share_as_measured(4 * GIB, [9 * GIB, 24 * GIB])
    )
    site = make_site(fedavg(), num_rounds=1)
    with caplog.at_level("INFO"):
        assert on_ray(site, "auto", num_gpus="auto") == here(site)
    assert (
        "the largest client takes 4.0 GiB of GPU memory, the smallest GPU has 9.0 GiB: ray.num_gpus = 1/2"
        in caplog.text
    )
    assert "4 actors on" in caplog.text


def test_auto_on_a_gpu_that_torch_does_not_see_gives_a_whole_one(cluster, make_site, caplog):
    with workers(RayOptions(address=cluster, num_gpus="auto"), f"auto-{os.getpid()}", make_site(fedavg())):
        assert "torch sees no GPU where Ray has one" in caplog.text
        assert len([name for name in ray.util.list_named_actors() if name.startswith("auto-")]) == 2


def test_an_address_where_no_ray_answers_is_refused(make_site, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")
    with pytest.raises(InputError, match=r"ray.address = '127.0.0.1:1': no Ray answers there"):
        with workers(RayOptions(address="127.0.0.1:1"), "nobody", make_site(fedavg())):
            pass


@pytest.mark.slow
def test_an_old_address_file_of_a_ray_that_is_gone_misleads_nobody(tmp_path):
    """A bare `ray.init()` would follow it, and wait."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a socket's path may have 107 characters
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text("192.0.2.77:6379")
    values = {"name": "n", "output.path": tmp_path, "model.name": "lenet", "train.num_rounds": 1, "ray.actors": 1}
    words = [word for key, value in values.items() for word in ("-s", f"{key}={value}")]
    command = [sys.executable, "-m", "rayfed", "run", str(QUICKSTART), *words]
    environment = {**os.environ, "RAY_TMPDIR": str(folder)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    assert "1 actor on" in done.stderr


def test_nothing_of_a_run_stays_in_a_cluster_that_was_joined(cluster, make_site, on_ray):
    on_ray(make_site(fedntd(), num_rounds=1), 2)
    assert ray.is_initialized()
    wait_for(ray.cluster_resources())
    assert not [name for name in ray.util.list_named_actors() if name.startswith("test-")]


def files(folder):
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.slow
def test_no_file_but_the_results_stays_of_a_run_in_a_cluster_that_was_joined(cluster, tmp_path):
    """But for what Ray logs, and the list of fonts that matplotlib keeps for everybody."""
    session = ray._private.worker._global_node.get_session_dir_path()
    before = files(session)
    for name in ("home", "temporary", "here"):
        (tmp_path / name).mkdir()
    settings = ["model.name=lenet", "train.num_rounds=1", "ray.actors=1", f"ray.address={cluster}"]
    subprocess.run(
        [sys.executable, "-m", "rayfed", "run", str(QUICKSTART), *(word for s in settings for word in ("-s", s))],
        cwd=tmp_path / "here",
        env={**os.environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")},
        capture_output=True,
        check=True,
    )
    left = {file for file in files(tmp_path) if not file.startswith("home/.cache/matplotlib/")}
    assert left and all(file.startswith("here/runs/quickstart/") for file in left)
    assert all(file.startswith("logs/") for file in files(session) - before)


def resources():
    """What is free: object store memory is, when no object is left."""
    return ray.available_resources()


def wait_for(before):
    """A killed actor's CPU, and the memory of what nobody refers to, come back a moment later."""
    for _ in range(300):
        if resources() == before:
            break
        time.sleep(0.1)
    assert resources() == before


HANGING = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
import rayfed
from rayfed.methods import Part, compose

@dataclass(frozen=True)
class Hang(Part):
    file: str

    def begin(self, client):
        Path(self.file).touch()
        time.sleep(3600)

job, address, path = sys.argv[1:]
overrides = {"ray.address": address, "ray.actors": 1, "output.path": path, "model.name": "lenet", "name": "hanging"}
rayfed.run(job, overrides, method=compose(Hang(path + "/there")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_ends_the_run_and_leaves_nothing_in_the_cluster(cluster, tmp_path, sent):
    before = resources()
    command = [sys.executable, "-c", HANGING, str(QUICKSTART), cluster, str(tmp_path)]
    run = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have it ignored
    )
    try:
        while not (tmp_path / "there").exists():
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.1)
        run.send_signal(sent)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert "KeyboardInterrupt" in said
    wait_for(before)
    assert not [name for name in ray.util.list_named_actors() if name.startswith("hanging")]


def test_each_node_can_read_the_data_itself(cluster, make_site, here, on_ray):
    site = make_site(fedntd(), num_rounds=2)
    assert on_ray(site, 2, data="storage", load=partial(identity, site)) == here(site)


def test_a_node_that_reads_other_data_is_refused(cluster, make_site, on_ray):
    site = make_site(fedntd())
    other = make_site(fedntd())
    other.federation.train.images[0] ^= np.uint8(1)
    with pytest.raises(InputError, match=r"the data that .* reads \(ray.data = 'storage'\) is not the data here"):
        on_ray(site, 2, data="storage", load=partial(identity, other))


def identity(site):
    return site
