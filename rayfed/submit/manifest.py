"""A Kubernetes manifest that runs a job file: a RayJob for KubeRay, and the job as a ConfigMap."""

import hashlib
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.filesize import decimal

from rayfed.base.errors import InputError
from rayfed.grid.cells import Cell
from rayfed.job import PACKAGE, Job, flat

# The manifests that come with rayfed. In a wheel they are part of the package, in a clone they lie
# in cluster/.
HERE = PACKAGE / "kubernetes"
KUBERNETES = HERE if HERE.is_dir() else PACKAGE.parent / "cluster/kubernetes"
# Where the pods find the job file and the volume that they share.
JOB_FOLDER = "/etc/rayfed"
SHARED = "/shared"
QUEUE = "kueue.x-k8s.io/queue-name"
GPU = "nvidia.com/gpu"
# The operator adds to the name of a job for the names of its pods.
LONGEST_NAME = 40
# Paths that a pod makes by itself.
ON_PODS = ("output.path", "data.root")
OWN_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
QUANTITY = re.compile(r"([1-9][0-9]*)(Mi|Gi|Ti)")
UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Ray gives the nodes these labels by itself.
LABELS_OF_RAY = "ray.io/"
ACCELERATOR = "ray.io/accelerator-type"
# KubeRay copies the labels of workers to their pods. So these would change which policies and which
# queue hold for the pods.
LABELS_OF_KUBERNETES = re.compile(r"app|rayfed/.*|[a-z0-9.-]*(k8s|kubernetes)\.io/.*")
# What Kubernetes allows as the key of a label, and as its value: one, not several or all but one.
LABEL_KEY = re.compile(
    r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{,61}[A-Za-z0-9])?"
)
ONE_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{,61}[A-Za-z0-9])?")
# The name of an object of Kubernetes, and of an image.
OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*")


class BlockDumper(yaml.SafeDumper):
    """Writes text of several lines as a block, as people write it."""


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Return the node of a text: a block if it has several lines."""
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


BlockDumper.add_representer(str, _write_text)


@dataclass(frozen=True)
class Cluster:
    """What the job's own cluster is made of."""

    image: str
    workers: int
    # Of one worker's pod.
    cpus: int
    memory: str
    gpus: int
    # The claim of the volume that all pods share.
    claim: str
    # Kueue's queue; '': none.
    queue: str
    # The image that sends Ray's logs to KubeRay's history server; '': none.
    history: str = ""
    # Of the head's pod.
    head_cpus: int = 2
    head_memory: str = "8Gi"
    # The names of secrets with which the pods pull the image.
    pull_secrets: Sequence[str] = ()
    # How often a failed job is tried again.
    retries: int = 2

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of a worker's memory."""
        quantity = QUANTITY.fullmatch(self.memory)
        assert quantity is not None
        return int(quantity[1]) * UNITS[quantity[2]]

    def __post_init__(self) -> None:
        for option, size in {"--memory": self.memory, "--head-memory": self.head_memory}.items():
            if not QUANTITY.fullmatch(size):
                raise InputError(
                    f"{option} '{size}': write a whole number of Mi, Gi or Ti, such as 32Gi"
                )
        if not self.image:
            raise InputError(
                "--image is missing: name the image that all pods run, which `make image` makes: "
                "--image registry.example.com/rayfed:1"
            )
        names = [("--claim", self.claim), ("--queue", self.queue or "none")]
        for secret in self.pull_secrets:
            names.append(("--pull-secret", secret))
        for option, value in names:
            if not OBJECT_NAME.fullmatch(value):
                raise InputError(
                    f"{option} '{value}': Kubernetes' names have small letters, digits, - and ."
                )
        for option, value in {"--image": self.image, "--history": self.history or "none"}.items():
            if not IMAGE_NAME.fullmatch(value):
                raise InputError(
                    f"{option} '{value}': that is no name of an image, such as "
                    "registry.example.com/rayfed:1"
                )


def manifest(text: str, cells: Sequence[Cell], settings: Sequence[str], cluster: Cluster) -> str:
    """Return the documents of a job file, for `kubectl apply -f`.

    `text` is the job file, and `settings` the overrides of the command line. Raise `InputError` for
    a job that asks for files of this machine, or for more than a pod has.
    """
    jobs = [cell.job() for cell in cells]
    for job in jobs:
        refuse_other_machine(job)
        refuse_more_than_a_pod(job, cluster)
    labels = labels_of_workers(jobs)
    refuse_accelerator(jobs[0], cluster)
    name = name_of(cells[0].grid or jobs[0].name)
    documents = [config_map(name, text), ray_job(name, settings, cluster, labels)]
    texts = []
    for document in documents:
        texts.append(yaml.dump(document, Dumper=BlockDumper, sort_keys=False))
    return "---\n".join(texts)


def own_code(job: Job) -> Iterator[str]:
    """Yield the names of functions and classes of the user's in a job, as module:Name."""
    for value in flat(job.table()).values():
        for part in value if isinstance(value, list) else [value]:
            name = part.get("name", "") if isinstance(part, dict) else part
            if isinstance(name, str) and OWN_NAME.fullmatch(name):
                yield name


def name_of(run: str) -> str:
    """Return a run's name as Kubernetes allows it.

    It begins with a letter, and a name that is cut ends with a hash of the whole, so that long
    names do not become the same.

    >>> name_of("FedNTD_table1/seed-0"), name_of("2026")
    ('fedntd-table1-seed-0', 'run-2026')
    """
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}".strip("-")
    if len(name) > LONGEST_NAME:
        digest = hashlib.sha256(run.encode()).hexdigest()[:6]
        name = f"{name[: LONGEST_NAME - 7].rstrip('-')}-{digest}"
    return name


def refuse_other_machine(job: Job) -> None:
    """Raise `InputError` if a job needs files that the pods do not have."""
    for key, path in job.places().items():
        if key in ON_PODS or "://" in path:
            continue
        if not Path(path).is_absolute():
            raise InputError(
                f"{key} = '{path}': a pod has no such file; give a place that all pods see, "
                f"such as -s {key}={SHARED}/{Path(path).name}, or a URL"
            )


def refuse_more_than_a_pod(job: Job, cluster: Cluster) -> None:
    """Raise `InputError` if an actor asks for more than a worker's pod has, or if there is none."""
    if job.ray.mode == "off":
        raise InputError(
            "ray.mode = 'off': the workers would have nothing to do; leave it out, as in: "
            "-s ray.mode=on"
        )
    if job.ray.num_cpus > cluster.cpus:
        raise InputError(
            f"ray.num_cpus = {job.ray.num_cpus:g}, but a worker's pod has {cluster.cpus} CPUs; "
            f"give --cpus {job.ray.num_cpus:g} or more"
        )
    if job.ray.num_gpus != "auto" and job.ray.num_gpus > cluster.gpus:
        raise InputError(
            f"ray.num_gpus = {job.ray.num_gpus:g}, but a worker's pod has {cluster.gpus} GPUs; "
            f"give --gpus {math.ceil(job.ray.num_gpus)} or more"
        )
    if job.ray.memory_bytes > cluster.memory_bytes:
        raise InputError(
            f"ray.memory = {job.ray.memory}: {decimal(job.ray.memory_bytes)}, but a worker's pod "
            f"has {decimal(cluster.memory_bytes)} (--memory {cluster.memory}); give a larger "
            "--memory"
        )


def refuse_accelerator(job: Job, cluster: Cluster) -> None:
    """Raise `InputError` if a job asks for a kind of GPU, and a worker's pod has none.

    Ray gives this label to nodes with a GPU alone, so the actors would wait for ever.
    """
    wanted = job.ray.labels.get(ACCELERATOR, "!")
    if not cluster.gpus and not wanted.startswith("!"):
        raise InputError(
            f"ray.labels: {ACCELERATOR} = '{wanted}': Ray gives this label to nodes with a GPU, "
            "but a worker's pod has none (--gpus 0); give --gpus 1 or more, or leave the label out"
        )


def labels_of_workers(jobs: Sequence[Job]) -> dict[str, str]:
    """Return the labels that the workers need so that the jobs' actors find a place.

    Raise `InputError` where one group of workers cannot have the labels that the jobs ask for.
    """
    wanted = jobs[0].ray.labels
    for job in jobs:
        if job.ray.labels != wanted:
            raise InputError(
                f"ray.labels differ between the runs of the grid ({wanted} and {job.ray.labels}), "
                "but a manifest has one kind of worker: write one manifest for each"
            )
    labels = {}
    for name, value in wanted.items():
        if name.startswith(LABELS_OF_RAY) or value.startswith("!"):
            continue
        if LABELS_OF_KUBERNETES.fullmatch(name):
            raise InputError(
                f"ray.labels: '{name}': the workers' pods would get this label, which Kubernetes, "
                "Kueue or the network policy read; give it another name"
            )
        if not LABEL_KEY.fullmatch(name):
            raise InputError(
                f"ray.labels: '{name}': Kubernetes allows letters, digits, -, _ and . in the name "
                "of a label, at most 63"
            )
        if not ONE_VALUE.fullmatch(value):
            raise InputError(
                f"ray.labels: {name} = '{value}': the manifest's workers have one value, of at "
                "most 63 letters, digits, -, _ and .; give it, "
                f'such as -s \'ray.labels={{"{name}" = "VALUE"}}\''
            )
        labels[name] = value
    return labels


def config_map(name: str, text: str) -> dict[str, Any]:
    """Return the ConfigMap that holds the job file."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-job", "labels": {"app": "rayfed"}},
        "data": {"job.toml": text},
    }


def ray_job(
    name: str, settings: Sequence[str], cluster: Cluster, labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the RayJob that comes with rayfed, with this job and cluster in it.

    `labels` are those of the workers.
    """
    job: dict[str, Any] = yaml.safe_load((KUBERNETES / "rayjob.yaml").read_text())
    job["metadata"] = {"name": name, "labels": {"app": "rayfed"}}
    if cluster.queue:
        # Kueue starts a job that is suspended, when its turn has come.
        job["metadata"]["labels"][QUEUE] = cluster.queue
        job["spec"]["suspend"] = True
    command = ["rayfed", "run", f"{JOB_FOLDER}/job.toml", "--resume"]
    for setting in [*settings, f"output.path={SHARED}/runs", "ray.address="]:
        command += ["-s", setting]
    job["spec"]["entrypoint"] = shlex.join(command)
    job["spec"]["backoffLimit"] = cluster.retries
    submitter = job["spec"]["submitterPodTemplate"]["spec"]
    fill_image(submitter, cluster)
    ray = job["spec"]["rayClusterSpec"]
    # The cluster has a fixed size, which Kueue counts. KubeRay itself replaces a lost pod.
    del ray["enableInTreeAutoscaling"], ray["autoscalerOptions"]
    head = ray["headGroupSpec"]["template"]["spec"]
    fill_pod(head, name, cluster)
    head["containers"][0]["resources"] = resources(cluster.head_cpus, cluster.head_memory, gpus=0)
    group = ray["workerGroupSpecs"][0]
    fill_workers(group, name, cluster)
    if labels:
        group["labels"] = dict(labels)
    if cluster.history:
        ray["historyServerOptions"] = {"collectorOptions": {"image": cluster.history}}
    return job


def fill_workers(group: dict[str, Any], name: str, cluster: Cluster) -> None:
    """Set the number of workers, and what each of them has."""
    group["replicas"] = group["minReplicas"] = group["maxReplicas"] = cluster.workers
    group["groupName"] = "gpu" if cluster.gpus else "cpu"
    pod = group["template"]["spec"]
    fill_pod(pod, name, cluster)
    if not cluster.gpus:
        del pod["tolerations"]
    pod["containers"][0]["resources"] = resources(cluster.cpus, cluster.memory, cluster.gpus)


def resources(cpus: int, memory: str, gpus: int) -> dict[str, dict[str, str]]:
    """Return what a container asks for, and its limits: it may use CPUs that are idle."""
    requests = {"cpu": str(cpus), "memory": memory}
    limits = {"memory": memory}
    if gpus:
        requests[GPU] = limits[GPU] = str(gpus)
    return {"requests": requests, "limits": limits}


def fill_image(pod: dict[str, Any], cluster: Cluster) -> None:
    """Give a pod the image, and the secrets with which it is pulled."""
    pod["containers"][0]["image"] = cluster.image
    if cluster.pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in cluster.pull_secrets]


def fill_pod(pod: dict[str, Any], name: str, cluster: Cluster) -> None:
    """Give a pod of the cluster the image, the shared volume and the job file."""
    fill_image(pod, cluster)
    container = pod["containers"][0]
    for volume in pod["volumes"]:
        volume["persistentVolumeClaim"]["claimName"] = cluster.claim
    pod["volumes"].append({"name": "job", "configMap": {"name": f"{name}-job"}})
    container["volumeMounts"].append({"name": "job", "mountPath": JOB_FOLDER, "readOnly": True})
