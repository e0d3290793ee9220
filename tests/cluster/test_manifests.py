"""The files of cluster/: Kubernetes' and KubeRay's schemas, and Ray's dry run, accept them; one
image is in them all.

`kubernetes-1.37.json.gz` is the part of Kubernetes' published schema that the manifests need
(Apache-2.0), without its descriptions: the kinds below, and all kinds that they refer to, of
`v1.37.0-local-strict/_definitions.json` in the package kubernetes-validate 1.37.0.

`kuberay-1.6.2.json` lists the fields of KubeRay's RayCluster and RayJob and their types, from the
reference of its interface (release 1.6.2, ray.io/v1); `!` marks a required field, `[]` a list. A
name with a capital is another kind, of the same file or of Kubernetes. `prometheus-operator.json`
lists the fields of a PodMonitor (monitoring.coreos.com/v1) in the same way, the usual ones.
"""

import gzip
import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config, validate_config

from rayfed import read_job
from rayfed.cli import main
from rayfed.cli.options import read_override
from rayfed.job import read_toml

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
LAUNCHERS = ["aws.yaml", "gcp.yaml", "on-premise.yaml"]
DOCUMENTS = {
    path.relative_to(CLUSTER).as_posix(): list(yaml.safe_load_all(path.read_text()))
    for path in CLUSTER.rglob("*.yaml")
}
KUBERNETES = {
    name: documents for name, documents in DOCUMENTS.items() if name.startswith("kubernetes/")
}
RAY = KUBERNETES["kubernetes/raycluster.yaml"][0]
JOB = KUBERNETES["kubernetes/rayjob.yaml"][0]
SERVICE, REDIS = KUBERNETES["kubernetes/redis.yaml"]
RAY_PODS = [
    RAY["spec"]["headGroupSpec"]["template"],
    RAY["spec"]["workerGroupSpecs"][0]["template"],
]
PODS = [*RAY_PODS, JOB["spec"]["submitterPodTemplate"], REDIS["spec"]["template"]]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
PYTHON = PROJECT["tool"]["mypy"]["python_version"]

HERE = Path(__file__).parent
SCHEMAS = HERE / "kubernetes-1.37.json.gz"
CORE, META = "io.k8s.api.core.v1.", "io.k8s.apimachinery.pkg.apis.meta.v1."
# By apiVersion and kind.
KINDS = {
    ("v1", "PersistentVolumeClaim"): f"{CORE}PersistentVolumeClaim",
    ("v1", "Secret"): f"{CORE}Secret",
    ("v1", "Service"): f"{CORE}Service",
    ("apps/v1", "StatefulSet"): "io.k8s.api.apps.v1.StatefulSet",
    ("networking.k8s.io/v1", "NetworkPolicy"): "io.k8s.api.networking.v1.NetworkPolicy",
    ("ray.io/v1", "RayCluster"): "RayCluster",
    ("ray.io/v1", "RayJob"): "RayJob",
    ("monitoring.coreos.com/v1", "PodMonitor"): "PodMonitor",
}
SIMPLE = {
    "strings": {"type": "object", "additionalProperties": {"type": "string"}},
    "positive": {"type": "integer", "minimum": 1},
    **{name: {"type": name} for name in ("string", "boolean", "number")},
    "integer": {"type": "integer", "minimum": 0},
}


def check(manifest, kuberay="1.6.2"):
    """Raises jsonschema.ValidationError, which names the place, if Kubernetes or its operator would
    refuse it.
    """
    kind = KINDS[manifest["apiVersion"], manifest["kind"]]
    schema = {"$ref": f"#/$defs/{kind}", "$defs": {**_kubernetes(), **_of_operators(kuberay)}}
    jsonschema.Draft202012Validator(schema).validate(manifest)


def _kubernetes():
    return json.loads(gzip.decompress(SCHEMAS.read_bytes()))


def _of_operators(kuberay):
    kinds = {}
    for name in ("kuberay-1.6.2.json", "prometheus-operator.json"):
        kinds |= json.loads((HERE / name).read_text())
    if kuberay != "1.6.2":
        for kind, fields in json.loads((HERE / f"kuberay-{kuberay}.json").read_text()).items():
            # What is new in a kind, or a new kind.
            kinds[kind] = {**kinds.get(kind, {}), **fields}

    def schema(given):
        if isinstance(given, list):
            return {"enum": given}
        if given.endswith("[]"):
            return {"type": "array", "items": schema(given.removesuffix("[]"))}
        if given in SIMPLE:
            return SIMPLE[given]
        of_kubernetes = (META if given in ("ObjectMeta", "LabelSelector") else CORE) + given
        return {"$ref": f"#/$defs/{given if given in kinds else of_kubernetes}"}

    return {
        kind: {
            "type": "object",
            "properties": {name.rstrip("!"): schema(given) for name, given in fields.items()},
            "required": [name.rstrip("!") for name in fields if name.endswith("!")],
            "additionalProperties": False,
        }
        for kind, fields in kinds.items()
    }


# Kubernetes
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KUBERNETES)
def test_kubernetes_accepts_every_manifest_and_none_holds_a_secret(name):
    for manifest in KUBERNETES[name]:
        check(manifest)
        assert manifest["kind"] != "Secret"


def test_prometheus_reads_the_pods_of_a_ray_cluster_and_no_policy_keeps_it_out():
    monitor, policy = KUBERNETES["kubernetes/monitor.yaml"]
    chosen = monitor["spec"]["selector"]["matchLabels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == chosen
    for pod in RAY_PODS:
        assert chosen.items() <= pod["metadata"]["labels"].items()
    # KubeRay's own port, which no container of ours names otherwise.
    assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": 8080}]


def test_the_schema_refuses_a_misspelt_field():
    with pytest.raises(jsonschema.ValidationError):
        check({**RAY, "spec": {**RAY["spec"], "enableInTreeAutoscalling": True}})


def test_the_job_starts_the_same_cluster_and_runs_a_valid_job_file():
    assert (
        JOB["spec"]["rayClusterSpec"] == RAY["spec"] and RAY["spec"]["rayVersion"] == PINNED["ray"]
    )
    command, verb, path, *words = shlex.split(JOB["spec"]["entrypoint"])
    assert (command, verb) == ("rayfed", "run") and "--resume" in words
    overrides = dict(read_override(value) for flag, value in pairwise(words) if flag == "-s")
    checkout = re.search(
        r"^WORKDIR (\S+)$", (ROOT / "cluster/Dockerfile").read_text(), re.MULTILINE
    )[1]
    job = read_job(ROOT / Path(path).relative_to(checkout), overrides)
    assert job.output.path.startswith("/shared/")


def test_rays_autoscaler_reads_a_head_that_does_not_train_and_workers_with_whole_gpus():
    read = _derive_autoscaling_config_from_ray_cr(
        {**RAY, "metadata": {**RAY["metadata"], "namespace": "default"}}
    )
    head, worker = (read["available_node_types"][name] for name in ("headgroup", "gpu"))
    assert (head["resources"]["CPU"], head["resources"].get("GPU", 0), head["max_workers"]) == (
        0,
        0,
        0,
    )
    assert (worker["resources"]["CPU"], worker["resources"]["GPU"]) == (8, 1)


@pytest.mark.parametrize("pod", PODS, ids=["head", "worker", "submitter", "redis"])
def test_no_pod_is_root_and_each_asks_for_its_memory(pod):
    owner = pod["spec"]["securityContext"]
    assert owner["runAsNonRoot"] and owner["runAsUser"] > 0
    for container in pod["spec"]["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert (
            container["resources"]["limits"]["memory"]
            == container["resources"]["requests"]["memory"]
        )


def test_names_agree_between_manifests():
    (claim,) = KUBERNETES["kubernetes/storage.yaml"]
    claims = {pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] for pod in RAY_PODS}
    assert claims == {claim["metadata"]["name"]}
    options = RAY["spec"]["gcsFaultToleranceOptions"]
    assert (
        options["redisAddress"]
        == f"{SERVICE['metadata']['name']}:{SERVICE['spec']['ports'][0]['port']}"
    )
    (password,) = REDIS["spec"]["template"]["spec"]["containers"][0]["env"]
    assert password["valueFrom"] == options["redisPassword"]["valueFrom"]
    labels = [pod["metadata"]["labels"].items() for pod in PODS]
    for policy in KUBERNETES["kubernetes/network.yaml"]:
        assert any(policy["spec"]["podSelector"]["matchLabels"].items() <= own for own in labels)


# `rayfed manifest`
# ------------------------------------------------------------------------------------------


@pytest.fixture
def write_manifest(tmp_path, monkeypatch):
    """Write the manifest of a job file, and return its documents."""
    monkeypatch.chdir(tmp_path)

    def write(*options, job="quickstart", fails=False):
        arguments = ["manifest", job, "--image", "example.com/rayfed:1", *options]
        ended = CliRunner().invoke(main, [*arguments, "-o", "job.yaml"])
        assert (ended.exit_code != 0) == fails, ended.output
        if fails:
            return ended.output
        return list(yaml.safe_load_all((tmp_path / "job.yaml").read_text()))

    return write


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--gpus", "0", "--cpus", "2", "--memory", "4Gi", "--workers", "3"],
        ["--queue", "team-a", "-s", "train.num_rounds=3", "--claim", "results"],
        ["--head-cpus", "4", "--head-memory", "64Gi", "--pull-secret", "one", "--retries", "0"],
    ],
    ids=" ".join,
)
def test_kubernetes_accepts_the_manifest_of_a_job(write_manifest, options):
    job_file, job = write_manifest(*options)
    check(job)
    assert job_file["kind"] == "ConfigMap"
    assert tomllib.loads(job_file["data"]["job.toml"]) == read_toml("quickstart")


def test_the_manifest_of_a_job_runs_this_job_with_its_settings(write_manifest):
    job_file, job = write_manifest(
        "-s", "train.num_rounds=3", "-s", "method={name='fedprox', mu=1}"
    )
    command, verb, path, *words = shlex.split(job["spec"]["entrypoint"])
    assert (command, verb, path) == ("rayfed", "run", "/etc/rayfed/job.toml")
    overrides = dict(read_override(value) for flag, value in pairwise(words) if flag == "-s")
    read = read_job(tomllib.loads(job_file["data"]["job.toml"]), overrides)
    assert read.train.num_rounds == 3 and read.output.path == "/shared/runs"
    groups = [
        job["spec"]["rayClusterSpec"]["headGroupSpec"],
        *job["spec"]["rayClusterSpec"]["workerGroupSpecs"],
    ]
    for group in groups:
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["job"]["configMap"]["name"] == job_file["metadata"]["name"]
        mounts = {
            mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]
        }
        assert mounts == {"shared": "/shared", "job": "/etc/rayfed"}
        assert pod["containers"][0]["image"] == "example.com/rayfed:1"


def test_the_manifest_of_a_job_asks_for_what_it_is_told(write_manifest):
    _, job = write_manifest("--gpus", "2", "--workers", "4", "--memory", "64Gi")
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (4, 4, 4)
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"memory": "64Gi", "nvidia.com/gpu": "2"}
    _, job = write_manifest("--gpus", "0")
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert "nvidia.com/gpu" not in pod["containers"][0]["resources"]["requests"]
    assert "tolerations" not in pod


def test_the_head_has_what_it_is_told_and_does_not_train(write_manifest):
    for options, cpus, memory in (
        ([], "2", "8Gi"),
        (["--head-cpus", "16", "--head-memory", "100Gi", "--gpus", "2"], "16", "100Gi"),
    ):
        _, job = write_manifest(*options)
        head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
        (container,) = head["template"]["spec"]["containers"]
        assert container["resources"] == {
            "requests": {"cpu": cpus, "memory": memory},
            "limits": {"memory": memory},
        }
        assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"


def test_all_pods_pull_the_image_with_the_secrets(write_manifest):
    _, job = write_manifest("--pull-secret", "one", "--pull-secret", "team.two")
    ray = job["spec"]["rayClusterSpec"]
    templates = [
        job["spec"]["submitterPodTemplate"],
        ray["headGroupSpec"]["template"],
        *(group["template"] for group in ray["workerGroupSpecs"]),
    ]
    for template in templates:
        assert template["spec"]["imagePullSecrets"] == [{"name": "one"}, {"name": "team.two"}]
    _, job = write_manifest()
    assert "imagePullSecrets" not in yaml.dump(job)


def test_a_cluster_of_a_fixed_size_has_no_autoscaler(write_manifest):
    for options in ([], ["--queue", "team-a"], ["--workers", "5"]):
        _, job = write_manifest(*options)
        ray = job["spec"]["rayClusterSpec"]
        (group,) = ray["workerGroupSpecs"]
        assert group["minReplicas"] == group["maxReplicas"]
        assert "enableInTreeAutoscaling" not in ray and "autoscalerOptions" not in ray


def test_a_failed_job_is_tried_again_as_often_as_it_is_told(write_manifest):
    assert write_manifest()[1]["spec"]["backoffLimit"] == 2
    assert write_manifest("--retries", "0")[1]["spec"]["backoffLimit"] == 0


def test_a_job_in_a_queue_is_suspended(write_manifest):
    _, job = write_manifest("--queue", "team-a")
    assert job["metadata"]["labels"] == {
        "app": "rayfed",
        "kueue.x-k8s.io/queue-name": "team-a",
    }
    assert job["spec"]["suspend"] is True


def test_the_workers_have_the_labels_that_the_job_asks_for(write_manifest):
    wanted = '{"ray.io/accelerator-type" = "H100", pool = "large", market-type = "!spot"}'
    _, job = write_manifest("-s", f"ray.labels={wanted}")
    check(job)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    # Ray tells the accelerator by itself, and a label that is absent is not "spot".
    assert group["labels"] == {"pool": "large"}
    wanted = '{"ray.io/accelerator-type" = "!H100"}'
    _, job = write_manifest("--gpus", "0", "-s", f"ray.labels={wanted}")
    assert "labels" not in job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    _, job = write_manifest()
    assert "labels" not in job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]


def test_logs_go_to_the_history_server_if_it_has_an_image(write_manifest):
    _, job = write_manifest("--history", "example.com/collector:1")
    check(job, kuberay="1.7.0")
    with pytest.raises(jsonschema.ValidationError, match="historyServerOptions"):
        check(job)
    options = job["spec"]["rayClusterSpec"]["historyServerOptions"]
    assert options == {"collectorOptions": {"image": "example.com/collector:1"}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory", "32 GB"], "--memory '32 GB': write a whole number of Mi, Gi or Ti"),
        (["--head-memory", "8G"], "--head-memory '8G': write a whole number of Mi, Gi or Ti"),
        (["--pull-secret", "A"], "--pull-secret 'A': Kubernetes' names have small letters, digits"),
        (
            ["--gpus", "0.5"],
            "Invalid value for '--gpus': 0.5 is no whole number; Kubernetes gives a pod whole GPUs: "
            "give --gpus 1, and a fraction to each actor: -s ray.num_gpus=0.5\n",
        ),
        (["--gpus", "half"], "Invalid value for '--gpus': 'half' is not a valid integer"),
        (["--gpus", "-1"], "Invalid value for '--gpus': -1 is not in the range x>=0"),
        *(
            ([option, "1.5"], f"'{option}': 1.5 is no whole number; give 1 or more")
            for option in ("--cpus", "--head-cpus")
        ),
        (
            ["--gpus", "0", "-s", 'ray.labels={"ray.io/accelerator-type" = "H100"}'],
            "ray.labels: ray.io/accelerator-type = 'H100': Ray gives this label to nodes with a "
            "GPU, but a worker's pod has none (--gpus 0); give --gpus 1 or more, or leave",
        ),
        (["--queue", "team a"], "--queue 'team a': Kubernetes' names have small letters, digits"),
        (["--claim", ""], "--claim '': Kubernetes' names have"),
        (["--claim", "Mine"], "--claim 'Mine': Kubernetes' names have"),
        (["--image", "my image:1"], "--image 'my image:1': that is no name of an image"),
        (["--image", ""], "--image is missing: name the image that all pods run"),
        (
            ["-s", "data.source=mine.parquet"],
            "data.source = 'mine.parquet': a pod has no such file",
        ),
        (["-s", "ray.num_cpus=9"], "ray.num_cpus = 9, but a worker's pod has 8 CPUs"),
        (["-s", "ray.num_gpus=2"], "ray.num_gpus = 2, but a worker's pod has 1 GPUs"),
        (
            ["-s", "ray.memory=40"],
            "ray.memory = 40.0: 40.0 GB, but a worker's pod has 34.4 GB (--memory 32Gi)",
        ),
        (
            ["-s", "ray.labels={pool = 'in(a,b)'}"],
            "ray.labels: pool = 'in(a,b)': the manifest's workers have one value, of at most",
        ),
        (["--history", " "], "--history ' ': that is no name of an image"),
        (["-s", "ray.mode=off"], "ray.mode = 'off': the workers would have nothing to do"),
        (
            ["--gpus", "0", "-s", "ray.num_gpus=0.5"],
            "ray.num_gpus = 0.5, but a worker's pod has 0 GPUs; give --gpus 1 or more",
        ),
        *(
            (["-s", f"ray.labels={{'{name}' = 'x'}}"], f"ray.labels: '{name}': the workers' pods")
            for name in ("app", "rayfed/node", "kueue.x-k8s.io/queue-name", "kubernetes.io/arch")
        ),
        (["-s", "ray.labels={'a b' = 'x'}"], "ray.labels: 'a b': Kubernetes allows letters"),
        (["-s", f"ray.labels={{a = '{'x' * 64}'}}"], "the manifest's workers have one value"),
    ],
)
def test_a_manifest_that_could_not_run_is_refused(write_manifest, options, words):
    assert words in write_manifest(*options, fails=True)


@pytest.mark.parametrize("run", ["2026-run", "x" * 80, "A_b/1", "9"])
def test_the_name_of_a_job_is_one_that_kuberay_takes(write_manifest, run):
    """KubeRay wants a DNS label that begins with a letter, and adds to it for its pods."""
    name = write_manifest("-s", f"name='{run}'")[1]["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{,38}[a-z0-9])?", name)


def test_long_names_stay_different(write_manifest):
    names = {write_manifest("-s", f"name={'a' * 60}-{n}")[1]["metadata"]["name"] for n in range(9)}
    assert len(names) == 9


def test_a_manifest_replaces_a_manifest_alone(write_manifest, tmp_path):
    write_manifest()
    write_manifest()
    (tmp_path / "job.yaml").write_text("name = 'mine'\n")
    assert "-o 'job.yaml' is there, and no manifest" in write_manifest(fails=True)
    assert (tmp_path / "job.yaml").read_text() == "name = 'mine'\n"
    (tmp_path / "job.yaml").unlink()
    (tmp_path / "job.yaml").mkdir()
    assert "-o 'job.yaml' is a folder; give a file" in write_manifest(fails=True)


def test_code_that_the_image_must_have_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_schedule.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Halved:\n"
        "    def factor(self, round: int) -> float:\n"
        "        return 0.5\n"
    )
    settings = ["-s", "train.schedule=my_schedule:Halved", "-s", "train.lr_decay=1"]
    arguments = ["manifest", "quickstart", "--image", "x", *settings]
    ended = CliRunner().invoke(main, arguments)
    assert ended.exit_code == 0, ended.output
    assert "build these into the image, as no code is sent: my_schedule:Halved" in ended.stderr


# `ray up`, and the image
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHERS)
def test_rays_dry_run_accepts_every_launcher_whose_head_has_a_token_and_does_not_train(name):
    """Ray's defaults would add commands, which would replace the image's Ray by a nightly build."""
    (launcher,) = DOCUMENTS[name]
    prepared = prepare_config(launcher)
    validate_config(prepared)
    assert not any(
        prepared[key] for key in ("setup_commands", "head_setup_commands", "worker_setup_commands")
    )
    for key in ("initialization_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        assert prepared[key] == launcher[key]
    (start,) = [
        command for command in launcher["head_start_ray_commands"] if "ray start" in command
    ]
    assert {"--num-cpus=0", "--num-gpus=0", "--dashboard-host=127.0.0.1"} <= set(start.split())
    assert "--env RAY_AUTH_MODE=token" in launcher["docker"]["run_options"]


def test_every_file_names_the_same_image():
    texts = {path.name: path.read_text() for path in CLUSTER.rglob("*") if path.is_file()}
    tags = {name: re.findall(r"example.com/rayfed:(\S+)", text) for name, text in texts.items()}
    assert {name for name, found in tags.items() if found} >= {
        "Dockerfile",
        *LAUNCHERS,
        "raycluster.yaml",
        "rayjob.yaml",
    }
    assert {tag for found in tags.values() for tag in found} == {f"ray{PINNED['ray']}-py{PYTHON}"}


def test_the_bases_of_the_image_have_the_python_and_the_ray_of_the_others():
    text = (CLUSTER / "Dockerfile").read_text()
    assert "FROM $BASE\n" in text
    (plain,) = re.findall(r"^ARG BASE=python:(\d+\.\d+)\.", text, re.MULTILINE)
    ((ray_version, python),) = re.findall(r"BASE=rayproject/ray:(\S+)-py(\d+)-", text)
    assert (plain, ray_version, python) == (PYTHON, PINNED["ray"], PYTHON.replace(".", ""))


def test_the_build_gets_only_what_it_copies_and_the_image_runs_as_a_numbered_user():
    """.dockerignore excludes every file that COPY does not name, so no data, result or token is
    sent to the build.
    """
    text = re.sub(r"^#.*\n", "", (CLUSTER / "Dockerfile").read_text(), flags=re.MULTILINE).replace(
        "\\\n", " "
    )
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    assert steps[-1] == ["USER", "1000"]
    copied = {source for kind, value in steps if kind == "COPY" for source in value.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert {line for line in lines if line[0] != "!"} == {"*", "**/__pycache__"}
    assert {line[1:] for line in lines if line[0] == "!"} == copied
