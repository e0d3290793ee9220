"""Let actors share a GPU.

The way of an actor's part: `ray.num_gpus`, which `gpu_share` (job.py) rounds to whole GPUs or 1/k.
For "auto", `open_actors` (session.py) calls `measured` (measuring.py). Where whole GPUs are too
few, `measured` plays the largest client, and `share_as_measured` here makes a part of the memory
that this took. `spread` (placement.py) fits the part to the nodes, Ray gets it with each actor
(worker_group.py), and the actor caps its memory by `memory_cap` here (actors.py).
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ray
import torch
from rich.filesize import decimal

from rayfed.base.errors import InputError
from rayfed.job import RayOptions
from rayfed.runtime.placement import Resources

log = logging.getLogger(__name__)

# The part of a GPU's memory that all actors on it may take. CUDA takes some more for itself in each
# process.
GPU_PART = 0.9
# This variable is in the environment of a Ray whose GPUs do not exist, as in tests.
PRETENDED = "RAYFED_PRETENDED_GPUS"
# Where this variable is set, Ray shows a process all GPUs of its node.
NOT_SET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
# Actors that "auto" puts on a GPU at most. They take turns on it: an actor with the small `cnn`
# keeps an H100 busy for a fifth of the time, with a larger model for longer. With NVIDIA's
# Multi-Process Service they compute at once, and 48 are its limit.
TAKING_TURNS, WITH_MPS = 4, 48


def without_absent_gpus(options: RayOptions, nodes: Sequence[Resources]) -> RayOptions:
    """Return the options with `ray.num_gpus = "auto"` as 0 where no node has a GPU."""
    if options.num_gpus == "auto" and not any(node.get("GPU", 0) >= 1 for node in nodes):
        return replace(options, num_gpus=0.0)
    return options


def device_given() -> torch.device:
    """Return the device that Ray has given this process, which sees only its own GPUs.

    To be called before CUDA is used.

    Raise `InputError` where torch does not see a GPU that Ray has given, unless that is a
    pretended GPU.
    """
    gpu_ids = ray.get_gpu_ids()
    if not gpu_ids:
        return torch.device("cpu")
    if os.environ.get(NOT_SET):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    if torch.cuda.is_available():
        return torch.device("cuda:0")
    if os.environ.get(PRETENDED):
        return torch.device("cpu")
    raise InputError(
        f"Ray counts a GPU on node {ray.util.get_node_ip_address()}, but torch {torch.__version__} "
        "sees none there, so clients would train on its CPU. Check `nvidia-smi` there: a container "
        "needs NVIDIA's toolkit, NVIDIA_VISIBLE_DEVICES=all and "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility; torch needs a driver that is new enough. To "
        "train on CPUs, set ray.num_gpus = 0; where GPUs are only pretended, start Ray with "
        f"{PRETENDED}=1"
    )


def memory_cap(gpu_share: float) -> float:
    """Return the part of a GPU's memory that an actor may take.

    Ray only counts fractions: it does not hold actors to them.
    """
    return GPU_PART * gpu_share if gpu_share < 1 else 1.0


def most_on_a_gpu() -> int:
    """Return how many actors `auto` puts on a GPU of this machine at most."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return WITH_MPS if Path(pipes, "control").exists() else TAKING_TURNS


def share_as_measured(needed: int, gpus: Sequence[int], most: int) -> float:
    """Return the part of a GPU, 1/k, such that k clients fit into 90 % of the smallest GPU.

    A client takes `needed` bytes, and k is at most `most`. Raise `InputError` where not even a
    single client fits.

    >>> share_as_measured(3 * 2**30, gpus=[16 * 2**30, 80 * 2**30], most=8)
    0.25
    """
    if needed == 0 or not gpus:
        log.warning(
            "ray.num_gpus = 'auto': torch sees no GPU where Ray has one; each actor gets a whole "
            "GPU"
        )
        return 1.0
    room = int(GPU_PART * min(gpus))
    fit = min(room // needed, most)
    if fit == 0:
        raise InputError(
            f"a client needs {decimal(needed)} of GPU memory, and {GPU_PART:.0%} of the smallest "
            f"GPU are {decimal(room)}; try a smaller train.batch_size, or ray.num_gpus = 1 for a "
            "whole GPU per actor"
        )
    log.info(
        "the largest client takes %s of GPU memory, the smallest GPU has %s: up to %d actors on a "
        "GPU",
        decimal(needed),
        decimal(min(gpus)),
        fit,
    )
    return 1 / fit


# Its process ends after one call, so that it leaves nothing on the GPUs.
@ray.remote(num_cpus=0, max_calls=1)
def cards_of_a_node() -> tuple[list[int], int]:
    """Return the memory of each GPU of a node, and how many actors a GPU has there at most."""
    sizes = []
    for number in range(torch.cuda.device_count()):
        sizes.append(torch.cuda.get_device_properties(number).total_memory)
    return sizes, most_on_a_gpu()
