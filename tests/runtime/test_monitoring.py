"""A real scrape of Ray has every metric and label of the panels, with the right values.

As Prometheus does, the tests find Ray by the file in which it lists its nodes.
"""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
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
# Where a server is not up yet, or a busy machine takes longer than `get` waits.
NO_ANSWER = (OSError, http.client.HTTPException)
SELECTOR = re.compile(r"(\w+)\{(.*?)\}")

# Runs a job; in the middle of round 3, prints the figures of round 2, and waits until its input
# ends.
DRIVER = """
import sys, rayfed, rayfed.experiment

class Held(rayfed.Observer):
    def client(self, done, total):
        if self.round_done == 2 and done >= 2:  # the gauges still show what was done before
            print(*self.figures, self.done, flush=True)
            sys.stdin.read()
        self.done = done
    def round(self, round):
        self.round_done = round.round
        self.figures = round.test_accuracy, round.test_loss, round.forgetting, round.seconds

job, overrides = sys.argv[1], dict(pair.split("=") for pair in sys.argv[2:])
rayfed.run(job, overrides | {"train.num_rounds": 3, "train.clients_per_round": 3}, observers=[Held()])
"""


def selectors(expr):
    """Metric -> the labels by which the expression selects or groups it, and their values (None:
    any value).
    """
    kept = {
        label.strip(): None
        for group in re.findall(r"\bby \((.*?)\)", expr)
        for label in group.split(",")
    }
    found = {}
    for name, matchers in SELECTOR.findall(expr):
        given = re.findall(r'(\w+)(=~?)"(.*?)"', matchers)
        found[name] = kept | {
            label: value if operator == "=" else None for label, operator, value in given
        }
    return found


def fits(labels, wanted):
    return all(
        label in labels and value in (None, labels[label]) for label, value in wanted.items()
    )


def until(look, seconds=240):
    """The first true value of `look`, which may raise `NO_ANSWER` until the server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(*NO_ANSWER):
            if found := look():
                return found
        time.sleep(1)
    pytest.fail(f"not after {seconds} s")


def get(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


def test_every_panel_asks_the_chosen_prometheus_for_the_chosen_run_and_every_gauge_has_a_panel():
    source, run = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    assert run["query"]["query"] == "label_values(ray_rayfed_round, run)"
    for part in (run, *PANELS, *(target for _, target in TARGETS)):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    used = {
        name
        for _, target in TARGETS
        for name in selectors(target["expr"])
        if name.startswith("ray_rayfed_")
    }
    assert used == {f"ray_{name}" for name in SERIES}


def test_nothing_listens_beyond_this_machine():
    compose, start = (
        (MONITORING / "compose.yaml").read_text(),
        (MONITORING / "start.sh").read_text(),
    )
    settings = (MONITORING / "grafana" / "settings.env").read_text()
    assert "--web.listen-address=127.0.0.1:${PROMETHEUS_PORT:?}" in compose
    assert '--web.listen-address="127.0.0.1:$PROMETHEUS_PORT"' in start
    assert (
        "GF_SERVER_HTTP_ADDR=127.0.0.1\n" in settings
        and "GF_AUTH_ANONYMOUS_ORG_ROLE=Viewer\n" in settings
    )


def test_without_a_ray_the_script_says_how_to_start_one(tmp_path):
    done = subprocess.run([MONITORING / "start.sh", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "start the run first, or give Ray's --temp-dir" in done.stderr


@contextlib.contextmanager
def watched(address, environment, path):
    """A run that waits in its third round; gives accuracy, loss, forgetting and seconds of the
    second round.
    """
    overrides = {
        "name": "watched/run",
        "ray.address": address,
        "output.path": path,
        "model.name": "lenet",
    }
    command = [sys.executable, "-c", DRIVER, ROOT / "jobs" / "quickstart.toml"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment, cwd=ROOT) as driver:
        try:
            yield [float(figure) for figure in driver.stdout.readline().split()]
            driver.stdin.close()
            assert driver.wait(240) == 0
        finally:
            driver.kill()


def scrape(folder):
    """(metric, labels, value) from every target that Ray lists and that answers."""
    samples = []
    for group in json.loads((folder / "prom_metrics_service_discovery.json").read_text()):
        for target in group["targets"]:
            # Ray lists an autoscaler that it may not have.
            with contextlib.suppress(*NO_ANSWER):
                for family in text_string_to_metric_families(get(f"http://{target}/metrics")):
                    samples += [
                        (sample.name, sample.labels, sample.value) for sample in family.samples
                    ]
    return samples


def lacking(samples):
    """What a panel asks for and these samples do not have, in words."""
    found = []
    for title, target in TARGETS:
        asked = selectors(target["expr"])
        if not asked:
            found.append(f"{title}: no metric in {target['expr']}")
        for metric, wanted in asked.items():
            there = [labels for name, labels, _ in samples if name == metric]
            if not there and metric not in ONLY_WITH_GPU:
                found.append(f"{title}: Ray has no {metric}")
            if there and not any(fits(labels, wanted) for labels in there):
                found.append(f"{title}: {metric} with {wanted} is not among {there}")
    return found


@pytest.mark.slow
def test_every_panel_finds_its_metrics_in_a_scrape(ray_head, tmp_path):
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    with ExitStack() as stack:
        ports = stack.enter_context(
            ray_head(environment, "--num-cpus=2", "--node-ip-address=127.0.0.1")
        )
        figures = stack.enter_context(
            watched(f"127.0.0.1:{ports['port']}", environment, tmp_path / "runs")
        )

        folder = Path(ports["folder"], "ray")

        def second_round():
            samples = scrape(folder)
            shown = {
                name: value for name, labels, value in samples if labels.get("run") == "watched/run"
            }
            alive = any(
                name == "ray_actors" and labels["State"] == "ALIVE" for name, labels, _ in samples
            )
            in_the_third = (
                shown.get("ray_rayfed_round") == 2
                and shown.get("ray_rayfed_clients_done") == figures[-1]
            )
            return shown if alive and in_the_third else None

        shown = until(second_round)
        # Ray sends some of its own series later than others.
        for _ in range(120):
            if not (missing := lacking(scrape(folder))):
                break
            time.sleep(1)
    names = (
        "test_accuracy",
        "test_loss",
        "forgetting",
        "round_seconds",
        "clients_done",
        "clients_in_round",
        "retries",
    )
    found = [shown[f"ray_rayfed_{name}"] for name in names]
    assert found == pytest.approx([*figures, 3, 0])
    assert shown["ray_rayfed_bytes_down"] > 0 and shown["ray_rayfed_bytes_up"] > 0
    assert missing == []
