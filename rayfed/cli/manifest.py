"""The command `manifest`, which writes what Kubernetes needs to run a job."""

import re
import sys
from pathlib import Path
from typing import Any

import click
import tomli_w

from rayfed.base.errors import InputError
from rayfed.base.files import write_text
from rayfed.cli.options import job_argument, read_override, settings_option

FRACTION = re.compile(r"[0-9]*[.][0-9]+")
# What to give in place of a fraction, in words for a message.
WHOLE_GPUS = (
    "Kubernetes gives a pod whole GPUs: give --gpus 1, and a fraction to each actor: "
    "-s ray.num_gpus={}"
)
WHOLE_CPUS = "give 1 or more"


class Whole(click.IntRange):
    """A whole number from `min` on; `advice` says what to give in place of a fraction."""

    def __init__(self, min: int, advice: str) -> None:
        super().__init__(min)
        self._advice = advice

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Any:
        """Return the number. Raise click's error for a fraction, with the advice."""
        if isinstance(value, str) and FRACTION.fullmatch(value):
            self.fail(f"{value} is no whole number; {self._advice.format(value)}", param, context)
        return super().convert(value, param, context)


def refuse_other_file(path: Path) -> None:
    """Raise `InputError` for a folder, and for a file that is no manifest: a job file, perhaps."""
    if path.is_dir():
        raise InputError(f"-o '{path}' is a folder; give a file, such as -o {path / 'job.yaml'}")
    if path.is_file() and not path.read_bytes().startswith(b"apiVersion:"):
        raise InputError(f"-o '{path}' is there, and no manifest; give another file")


@click.command()
@job_argument
@settings_option
@click.option(
    "--image", metavar="NAME", default="", help="The image of all pods: `make image` makes one."
)
@click.option(
    "--workers", type=click.IntRange(1), default=1, show_default=True, help="Pods that train."
)
@click.option(
    "--gpus",
    type=Whole(0, WHOLE_GPUS),
    default=1,
    show_default=True,
    help="GPUs of a worker's pod.",
)
@click.option(
    "--cpus",
    type=Whole(1, WHOLE_CPUS),
    default=8,
    show_default=True,
    help="CPUs of a worker's pod.",
)
@click.option(
    "--memory", metavar="SIZE", default="32Gi", show_default=True, help="Memory of a worker's pod."
)
@click.option(
    "--head-cpus",
    type=Whole(1, WHOLE_CPUS),
    default=2,
    show_default=True,
    help="CPUs of the head's pod, for the driver.",
)
@click.option(
    "--head-memory",
    metavar="SIZE",
    default="8Gi",
    show_default=True,
    help="Memory of the head's pod.",
)
@click.option(
    "--pull-secret",
    "pull_secrets",
    metavar="NAME",
    multiple=True,
    help="A secret with which the pods pull the image; may be given again.",
)
@click.option(
    "--retries",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="How often a failed job is tried again, from its last checkpoint.",
)
@click.option(
    "--claim",
    metavar="NAME",
    default="rayfed-shared",
    show_default=True,
    help="The claim of the volume that the pods share; the results lie on it, in runs/.",
)
@click.option("--queue", metavar="NAME", default="", help="Kueue's queue, in which the job waits.")
@click.option(
    "--history",
    metavar="IMAGE",
    default="",
    help="The image that sends Ray's logs to KubeRay's history server (KubeRay 1.7).",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the manifest to a file. If not given, it is printed.",
)
def manifest(
    job: str,
    settings: tuple[str, ...],
    output: Path | None,
    **options: str | int | tuple[str, ...],
) -> None:
    """Write a Kubernetes manifest that runs a job with KubeRay.

    It has a RayJob, with a Ray cluster of its own that ends with the job, and a ConfigMap with the
    job file. A pod that is lost is replaced, and a failed attempt resumes from the last checkpoint.
    Your own code is not in the manifest: build it into the image.

    \b
    Examples:
      rayfed manifest jobs/quickstart.toml --image registry.example.com/rayfed:1 -o job.yaml
      kubectl apply -f job.yaml
      rayfed manifest jobs/quickstart.toml --image IMAGE --workers 4 --queue team-a
    """
    from rayfed.grid.cells import expand
    from rayfed.job import read_toml
    from rayfed.submit.manifest import Cluster, manifest, own_code

    cluster = Cluster(**options)  # type: ignore[arg-type]
    tables = read_toml(job)
    cells = expand(tables, dict(map(read_override, settings)))
    text = manifest(tomli_w.dumps(tables), cells, settings, cluster)
    own = sorted(set(own_code(cells[0].job())))
    if own:
        print(f"build these into the image, as no code is sent: {', '.join(own)}", file=sys.stderr)
    if cluster.history:
        print(
            "fill in collectorOptions.env in the manifest: KubeRay's collector needs "
            "STORAGE_BACKEND, and where to store",
            file=sys.stderr,
        )
    if output is None:
        print(text, end="")
        return
    refuse_other_file(output)
    try:
        write_text(output, text)
    except OSError as error:
        raise InputError(f"the manifest cannot be written: {error}") from None
    print(f"manifest in {output}; to start it: kubectl apply -f {output}")
