"""The manifests: checked by strict schemas and by rules beyond them, and read by Ray's autoscaler."""

import copy
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from rayfed import read_job
from rayfed.screen.options import read_override

FOLDER = Path(__file__).resolve().parents[2] / "cluster" / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))

every_file = pytest.mark.parametrize("name", FILES)


@pytest.fixture
def manifests(documents):
    return lambda name: documents(f"kubernetes/{name}")


@pytest.fixture
def cluster(manifests):
    return manifests("raycluster.yaml")[0]


@pytest.fixture
def job(manifests):
    return manifests("rayjob.yaml")[0]


def pods(cluster):
    spec = cluster["spec"]
    return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]


def all_pods(manifests):
    found = [*pods(manifests("raycluster.yaml")[0])]
    found.append(manifests("rayjob.yaml")[0]["spec"]["submitterPodTemplate"])
    return [*found, manifests("redis.yaml")[1]["spec"]["template"]]


@every_file
def test_kubernetes_accepts_every_manifest(name, manifests, check):
    for manifest in manifests(name):
        check(manifest)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["spec"].update(enableInTreeAutoscalling=True),
        lambda c: c["spec"]["workerGroupSpecs"][0].update(maxReplicas="4"),
        lambda c: c["spec"]["workerGroupSpecs"][0].pop("groupName"),
        lambda c: pods(c)[1]["spec"]["containers"][0].update(img="rayfed"),
        lambda c: pods(c)[1]["spec"]["securityContext"].update(runAsRoot=False),
    ],
)
def test_the_schema_refuses_mistakes(change, cluster, check):
    changed = copy.deepcopy(cluster)
    change(changed)
    with pytest.raises(ValidationError):
        check(changed)


def test_the_job_starts_the_same_cluster(cluster, job):
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]


def test_the_operator_accepts_the_cluster_and_the_job(cluster, job):
    """Its rules beyond the schema: autoscaler v2 restarts no pods, and a time to live needs a shutdown."""
    assert cluster["spec"]["enableInTreeAutoscaling"] and cluster["spec"]["autoscalerOptions"]["version"] == "v2"
    assert all(pod["spec"]["restartPolicy"] == "Never" for pod in pods(cluster))
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert 1 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert job["spec"]["shutdownAfterJobFinishes"] and "deletionStrategy" not in job["spec"]


def test_ray_reads_a_head_that_does_not_train_and_workers_with_whole_gpus(cluster):
    cluster["metadata"]["namespace"] = "default"
    read = _derive_autoscaling_config_from_ray_cr(cluster)
    head, worker = (read["available_node_types"][name] for name in ("headgroup", "gpu"))
    assert (head["resources"]["CPU"], head["resources"].get("GPU", 0), head["max_workers"]) == (0, 0, 0)
    assert (worker["resources"]["CPU"], worker["resources"]["GPU"]) == (8, 1)
    assert (worker["min_workers"], worker["max_workers"]) == (1, 4)
    assert read["idle_timeout_minutes"] == 5


def test_the_job_runs_a_valid_job_file(job):
    command, verb, path, *words = shlex.split(job["spec"]["entrypoint"])
    assert (command, verb) == ("rayfed", "run") and "--resume" in words
    overrides = dict(read_override(value) for flag, value in pairwise(words) if flag == "-s")
    inside = FOLDER.parents[1] / Path(path).relative_to("/home/ray/rayfed")  # the checkout in the image
    read = read_job(inside, overrides)
    assert read.output.path.startswith("/shared/") and read.ray.num_gpus == 0.25
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}


def test_no_pod_runs_as_root_or_may_become_root(manifests):
    for pod in all_pods(manifests):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] and pod["spec"]["securityContext"]["runAsUser"] > 0
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_every_container_requests_cpu_and_memory(manifests):
    for pod in all_pods(manifests):
        for container in pod["spec"]["containers"]:
            asked = container["resources"]
            assert {"cpu", "memory"} <= set(asked["requests"])
            assert asked["limits"]["memory"] == asked["requests"]["memory"]


def test_names_agree_between_manifests(cluster, manifests):
    (claim,) = manifests("storage.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods(cluster):
        assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert pod["spec"]["containers"][0]["volumeMounts"] == [{"name": "shared", "mountPath": "/shared"}]
    service, redis = manifests("redis.yaml")
    options = cluster["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    (password,) = redis["spec"]["template"]["spec"]["containers"][0]["env"]
    assert password["valueFrom"] == options["redisPassword"]["valueFrom"]


def test_network_policies_admit_only_the_cluster_and_the_operator(manifests):
    """Each policy selects pods that exist; the head also accepts the operator's connections."""
    labels = {frozenset(pod["metadata"]["labels"].items()) for pod in all_pods(manifests)}
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in manifests("network.yaml")}
    for spec in policies.values():
        chosen = set(spec["podSelector"]["matchLabels"].items())
        assert any(chosen <= pod for pod in labels)
    sources = [rule["from"] for rule in policies["rayfed"]["ingress"]]
    assert sources[0] == [{"podSelector": {"matchLabels": {"app": "rayfed"}}}]
    assert sources[1][0]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    assert policies["rayfed"]["ingress"][1]["ports"] == [{"port": 8265}]
    assert len(sources) == 2 and policies["rayfed"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policies["rayfed-redis"], "Redis opens no connections"


def test_no_pod_changes_the_owner_of_all_files_at_its_start(manifests):
    owners = [pod["spec"]["securityContext"] for pod in all_pods(manifests)]
    assert {o["fsGroupChangePolicy"] for o in owners if "fsGroup" in o} == {"OnRootMismatch"}


def test_redis_takes_the_place_of_its_shell_with_its_settings_on_standard_input(manifests, tmp_path):
    """As process 1 of its container it gets the signal to stop, which a shell would not pass on."""
    (container,) = manifests("redis.yaml")[1]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "redis-server").write_text('#!/bin/sh\necho "$$ $*"\ncat\n')
    (tmp_path / "redis-server").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDIS_PASSWORD": "a$b"}
    command = [*container["command"], *container["args"]]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as redis:
        said, _ = redis.communicate(timeout=60)
    assert said == f"{redis.pid} -\nrequirepass a$b\nappendonly yes\ndir /data\n"


def test_no_secret_is_in_a_file(manifests):
    assert not [m for name in FILES for m in manifests(name) if m["kind"] == "Secret"]
