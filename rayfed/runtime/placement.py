"""What is asked for against what there is: how many actors fit on the nodes, and how many clients on a GPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rayfed.job import RayOptions
from rayfed.values import InputError

Resources = dict[str, float]

GPU_PART = 0.9  # of a GPU's memory that actors are given; the rest is for what CUDA takes for each process
MOST_ON_A_GPU = 1000  # Ray counts in ten-thousandths of one


@dataclass(frozen=True)
class Place:
    """Where an actor is."""

    node: str  # its address, as results have it
    node_id: str  # one that Ray gives no second node
    device: str


def capacity(options: RayOptions, nodes: Sequence[Resources]) -> int:
    """How many actors fit on the nodes: an actor lies on one node, so each is counted by itself."""

    def on(node: Resources) -> int:
        by_cpu = math.floor(node.get("CPU", 0) / options.num_cpus + 1e-6)
        if options.gpu_share == 0:
            return by_cpu
        gpus = math.floor(node.get("GPU", 0) + 1e-6)
        if options.gpu_share < 1:
            return min(by_cpu, gpus * round(1 / options.gpu_share))
        return min(by_cpu, gpus // round(options.gpu_share))

    return sum(on(node) for node in nodes)


def num_actors(options: RayOptions, nodes: Sequence[Resources], clients_per_round: int) -> int:
    """How many actors to start. Raises `InputError` when more are asked for than fit, with the most that do."""
    fit = capacity(options, nodes)
    if fit == 0:
        raise InputError(
            f"no actor with {each(options)} fits: {there(nodes)}; ask for less with ray.num_cpus and ray.num_gpus"
        )
    if options.actors == "auto":
        return min(fit, clients_per_round)
    if options.actors > fit:
        raise InputError(
            f"ray.actors = {options.actors}, each with {each(options)}: {there(nodes)}, so at most {fit} fit; "
            "ask for fewer, or for less each (ray.num_cpus = 0.5 lets two share a CPU)"
        )
    return options.actors


def each(options: RayOptions) -> str:
    """What an actor has, in words."""
    return f"{options.num_cpus:g} CPU and {options.gpu_share:g} GPU"


def there(nodes: Sequence[Resources]) -> str:
    """What a cluster has, in words."""
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    return f"there are {cpus:g} CPU and {gpus:g} GPU" + (f" on {len(nodes)} nodes" if len(nodes) > 1 else "")


def where(places: Iterable[Place]) -> str:
    """Pool sizes by node, in words.

    >>> where([Place("10.0.0.1", "a", "cpu"), Place("10.0.0.2", "b", "cpu"), Place("10.0.0.1", "a", "cpu")])
    '2 actors on 10.0.0.1, 1 on 10.0.0.2 (cpu)'
    """
    places = sorted(places, key=lambda place: (place.device, place.node))
    by_device = {
        device: Counter((place.node, place.node_id) for place in places if place.device == device)
        for device in dict.fromkeys(place.device for place in places)
    }
    text = "; ".join(
        ", ".join(f"{count} on {node}" for (node, _), count in nodes.items()) + f" ({device})"
        for device, nodes in by_device.items()
    )
    first, _, rest = text.partition(" ")
    return f"{first} actor{'' if first == '1' else 's'} {rest}" if text else "no actor"


def share_of_gpu(client_bytes: int, gpu_bytes: int) -> float:
    """The part of a GPU, one k-th, that a client of so many bytes is given: as many as fit into 90 % of the smallest.

    Raises `InputError` where not even one fits.

    >>> share_of_gpu(client_bytes=3 * 2**30, gpu_bytes=16 * 2**30)
    0.25
    """
    fit = min(math.floor(GPU_PART * gpu_bytes / client_bytes), MOST_ON_A_GPU)
    if fit == 0:
        raise InputError(
            f"a client needs {gib(client_bytes)} of GPU memory, and {GPU_PART:.0%} of the smallest GPU are "
            f"{gib(GPU_PART * gpu_bytes)}; try a smaller train.batch_size, or ray.num_gpus = 1 to use a GPU to the full"
        )
    return 1 / fit


def memory_cap(gpu_share: float) -> float:
    """The part of a GPU's memory that an actor may take: a cap where several share it, all of it otherwise."""
    return GPU_PART * gpu_share if gpu_share < 1 else 1.0


def settled(options: RayOptions, nodes: Sequence[Resources]) -> RayOptions:
    """`ray.num_gpus = "auto"` is 0 where there is no GPU."""
    if options.num_gpus == "auto" and not any(node.get("GPU", 0) >= 1 for node in nodes):
        return replace(options, num_gpus=0.0)
    return options


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
