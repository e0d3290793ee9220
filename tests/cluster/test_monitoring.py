"""A real scrape of Ray has every metric and label of the panels, with the right values.

As Prometheus does, the tests find Ray by the file in which it lists its nodes.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayfed.runtime.gauges import SERIES

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "cluster" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana" / "dashboards" / "rayfed.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
ONLY_WITH_GPU = {"ray_node_gpus_utilization"}
SELECTOR = re.compile(r"(\w+)\{(.*?)\}")

# Runs a job; in the middle of round 3, prints the figures of round 2, and waits until its input ends.
DRIVER = """
import sys, rayfed, rayfed.experiment

class Held(rayfed.experiment.Display):
    def client(self, done, total):
        if self.round_done == 2 and done == 2:  # the gauges still show one client
            print(*self.figures, flush=True)
            sys.stdin.read()
    def round(self, round):
        self.round_done = round.round
        self.figures = round.test_accuracy, round.test_loss, round.forgetting, round.seconds

job, overrides = sys.argv[1], dict(pair.split("=") for pair in sys.argv[2:])
rayfed.run(job, overrides | {"train.num_rounds": 3, "train.clients_per_round": 3}, display=Held())
"""


def selectors(expr):
    """Metric -> the labels by which the expression selects or groups it, and their values (None: any value)."""
    kept = {label.strip(): None for group in re.findall(r"\bby \((.*?)\)", expr) for label in group.split(",")}
    found = {}
    for name, matchers in SELECTOR.findall(expr):
        given = re.findall(r'(\w+)(=~?)"(.*?)"', matchers)
        found[name] = kept | {label: value if operator == "=" else None for label, operator, value in given}
    return found


def fits(labels, wanted):
    return all(label in labels and value in (None, labels[label]) for label, value in wanted.items())


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def until(look, seconds=120):
    """The first true value of `look`, which may raise URLError until the server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError):
            if found := look():
                return found
        time.sleep(1)
    pytest.fail(f"not after {seconds} s")


def get(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


def test_every_panel_asks_the_datasource_for_the_chosen_run():
    source = (MONITORING / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    uid = re.search(r"uid: (\S+)", source)[1]
    (run,) = DASHBOARD["templating"]["list"]
    assert run["name"] == "run" and run["query"]["query"] == "label_values(ray_rayfed_round, run)"
    for part in (run, *PANELS, *(target for _, target in TARGETS)):
        assert part["datasource"] == {"type": "prometheus", "uid": uid}


def test_every_gauge_of_a_run_has_a_panel():
    used = {name for _, target in TARGETS for name in selectors(target["expr"]) if name.startswith("ray_rayfed_")}
    assert used == {f"ray_{name}" for name in SERIES}


def test_nothing_listens_beyond_this_machine():
    compose, start = (MONITORING / "compose.yaml").read_text(), (MONITORING / "start.sh").read_text()
    assert "--web.listen-address=127.0.0.1:${PROMETHEUS_PORT:?}" in compose
    assert '--web.listen-address="127.0.0.1:$PROMETHEUS_PORT"' in start
    settings = dict(re.findall(r"^(\w+)=(.*)$", (MONITORING / "grafana" / "settings.env").read_text(), re.MULTILINE))
    assert settings["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer" and settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in re.findall(r"image: (\S+)", compose))


def test_without_a_ray_the_script_says_how_to_start_one(tmp_path):
    done = subprocess.run([MONITORING / "start.sh", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "start the run first, or give Ray's --temp-dir" in done.stderr


@pytest.fixture(scope="module")
def ray_folder():
    """The folder of a small Ray with ports of its own; at the end Ray is stopped and the folder removed."""
    flags = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    flags += ("metrics-export-port", "ray-client-server-port")
    *ports, head, autoscaler = free_ports(len(flags) + 2)
    environment = os.environ | {"RAY_AUTH_MODE": "token"}
    environment |= {"DASHBOARD_METRIC_PORT": str(head), "AUTOSCALER_METRIC_PORT": str(autoscaler)}  # else fixed ones
    with tempfile.TemporaryDirectory(prefix="mon-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=2"]
        command += ["--disable-usage-stats", f"--temp-dir={folder}/ray"]
        command += [f"--{flag}={port}" for flag, port in zip(flags, ports, strict=True)]
        ray = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=environment)
        try:
            written = [Path(folder, "ray", f) for f in ("prom_metrics_service_discovery.json", "ray_current_cluster")]
            until(lambda: all(path.exists() for path in written) or ray.poll() is not None)
            assert ray.poll() is None
            yield Path(folder) / "ray"
        finally:
            ray.terminate()
            ray.wait(60)


@pytest.fixture(scope="module")
def run(ray_folder, tmp_path_factory):
    """A run that waits in its third round; gives accuracy, loss, forgetting and seconds of the second round."""
    address = (ray_folder / "ray_current_cluster").read_text().strip()
    overrides = {"name": "watched/run", "ray.address": address, "output.path": tmp_path_factory.mktemp("runs")}
    overrides |= {"model.name": "lenet"}
    command = [sys.executable, "-c", DRIVER, ROOT / "jobs" / "quickstart.toml"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    environment = os.environ | {"RAY_AUTH_MODE": "token"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment, cwd=ROOT) as driver:
        try:
            yield [float(figure) for figure in driver.stdout.readline().split()]
            driver.stdin.close()
            assert driver.wait(120) == 0
        finally:
            driver.kill()


def scrape(folder):
    """(metric, labels, value) from every target that Ray lists and that answers."""
    samples = []
    for group in json.loads((folder / "prom_metrics_service_discovery.json").read_text()):
        for target in group["targets"]:
            with contextlib.suppress(urllib.error.URLError):  # Ray lists an autoscaler that it may not have
                for family in text_string_to_metric_families(get(f"http://{target}/metrics")):
                    samples += [(sample.name, sample.labels, sample.value) for sample in family.samples]
    return samples


@pytest.mark.slow
def test_every_panel_finds_its_metrics_in_a_scrape(ray_folder, run):
    def second_round():
        samples = scrape(ray_folder)
        shown = {name: value for name, labels, value in samples if labels.get("run") == "watched/run"}
        alive = any(name == "ray_actors" and labels["State"] == "ALIVE" for name, labels, _ in samples)
        return (samples, shown) if alive and shown.get("ray_rayfed_round") == 2 else None

    samples, shown = until(second_round)
    accuracy, loss, forgetting, seconds = run
    assert shown["ray_rayfed_test_accuracy"] == pytest.approx(accuracy)
    assert shown["ray_rayfed_test_loss"] == pytest.approx(loss)
    assert shown["ray_rayfed_forgetting"] == pytest.approx(forgetting)
    assert shown["ray_rayfed_round_seconds"] == pytest.approx(seconds)
    assert (shown["ray_rayfed_clients_done"], shown["ray_rayfed_clients_in_round"]) == (1, 3)
    assert shown["ray_rayfed_retries"] == 0
    assert shown["ray_rayfed_bytes_down"] > 0 and shown["ray_rayfed_bytes_up"] > 0

    for title, target in TARGETS:
        found = selectors(target["expr"])
        assert found, f"{title}: no metric in {target['expr']}"
        for metric, wanted in found.items():
            there = [labels for name, labels, _ in samples if name == metric]
            assert there or metric in ONLY_WITH_GPU, f"{title}: Ray has no {metric}"
            found_it = any(fits(labels, wanted) for labels in there)
            assert found_it or not there, f"{title}: {metric} with {wanted} is not among {there}"
