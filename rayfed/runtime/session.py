"""Connecting to Ray, and a crew of actors on it: what is asked for is held against what there is first."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfed.job import RayOptions
from rayfed.local import ClientFailed, Site
from rayfed.provenance import hash_of
from rayfed.runtime import OWNER, trust
from rayfed.runtime.crew import Crew, hired
from rayfed.runtime.gauges import Gauges
from rayfed.runtime.head import nodes
from rayfed.runtime.here import Progress, quiet
from rayfed.runtime.placement import gib, num_actors, settled, share_of_gpu
from rayfed.runtime.pool import Pool
from rayfed.runtime.probe import gpu_bytes
from rayfed.values import InputError

log = logging.getLogger(__name__)

# For a Ray that we start: workers find torch imported, and freed objects leave the store at once rather than in
# batches of a second (which held four times as much).
OUR_RAY = {
    "RAY_preload_python_modules": "torch",
    "RAY_free_objects_period_milliseconds": "20",
    "RAY_USAGE_STATS_ENABLED": "0",
}

MEASURE_LIMIT = 3600.0  # seconds for a client to be tried on a GPU

Load = Callable[[], Site]


@contextmanager
def workers(
    options: RayOptions, name: str, site: Site, progress: Progress = quiet, load: Load | None = None
) -> Iterator[Pool]:
    """A pool of actors for the run `name`, on a Ray that is started here or joined.

    A Ray that was started here ends with the run; of one that was joined, only our actors do. `load` makes the site
    anew, on a node that reads the data itself (`ray.data = "storage"`).
    """
    cohort = site.training.clients_per_round
    with _joined(options.cluster) if options.cluster else _started(options, name, cohort):
        options = settled(options, nodes())
        num_actors(options, nodes(), cohort)  # what can never fit is refused before anything is measured
        sites = Sites(site, load if options.data == "storage" else None)
        if options.num_gpus == "auto":
            options = replace(options, num_gpus=measured(options, name, sites))
        count = num_actors(options, nodes(), cohort)
        crew = Crew(options, name, sites.references, cohort if options.actors == "auto" else options.actors)
        with closing(Gauges(name)) as gauges:
            try:
                crew.start(count)
                num_test = len(site.federation.test.labels)
                yield Pool(crew, options, site.federation.num_examples, num_test, progress, gauges)
            finally:
                crew.end()


class Sites:
    """What actors need of the run, where they can read it in place: one copy a node.

    It goes out from here, once to each node; or, with `load`, each node makes it, and it is compared with ours.
    """

    def __init__(self, site: Site, load: Load | None = None) -> None:
        self._site = site
        self._load = load
        self._hash = hash_of(site.federation) if load else ""
        self._made: dict[str, ObjectRef] = {}

    def references(self, lost: ObjectLostError | None) -> Mapping[str, ObjectRef]:
        """By node, or one for all under ""; those that were `lost` are made again."""
        if lost is not None:
            self._made.clear()
        if self._load is None:
            self._made = self._made or {"": ray.put(self._site)}
        else:
            alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
            self._made = {node: self._made.get(node) or self._read(self._load, node) for node in alive}
        return self._made

    def _read(self, load: Load, node: str) -> ObjectRef:
        there = NodeAffinitySchedulingStrategy(node, soft=True)  # elsewhere, should Ray have to make it once more
        return _site.options(scheduling_strategy=there).remote(load, self._hash)


@ray.remote(num_cpus=0)
def _site(load: Load, expected: str) -> Site:
    site = load()
    if (found := hash_of(site.federation)) != expected:
        raise InputError(
            f"the data that {ray.util.get_node_ip_address()} reads (ray.data = 'storage') is not the data here: its "
            f"hash is {found[:12]}..., not {expected[:12]}...; let data.source be the same on all nodes, or leave "
            "ray.data = 'store'"
        )
    return site


def measured(options: RayOptions, run: str, sites: Sites) -> float:
    """GPUs an actor, as the largest client turns out to need: it is trained on a whole GPU, and its memory measured."""
    probe = hired(replace(options, num_gpus=1.0), f"{run}/probe")
    gpu_nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in gpu_nodes]
    asked = [probe.measure.remote(sites.references(None))]
    asked += [_gpu_bytes.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    try:
        needed, *sizes = ray.get(asked, timeout=MEASURE_LIMIT)
    except GetTimeoutError:
        raise InputError(
            f"ray.num_gpus = 'auto': the largest client, tried on a GPU, was not done after {MEASURE_LIMIT:.0f} s; say "
            "how many fit, such as ray.num_gpus = 0.25"
        ) from None
    except RayError as error:
        raise ClientFailed(
            f"the largest client, tried on a whole GPU (ray.num_gpus = 'auto'), failed:\n{error}"
        ) from None
    finally:
        ray.kill(probe)
    return share_as_measured(needed, [size for node in sizes for size in node])


def share_as_measured(needed: int, gpus: Sequence[int]) -> float:
    """The part of a GPU for a client that needs so many bytes, where GPUs have so many."""
    if needed == 0 or not gpus:
        log.warning("ray.num_gpus = 'auto': torch sees no GPU where Ray has one; each actor is given a whole one")
        return 1.0
    share = share_of_gpu(needed, min(gpus))
    log.info(
        "the largest client takes %s of GPU memory, the smallest GPU has %s: ray.num_gpus = 1/%d",
        *(gib(needed), gib(min(gpus)), round(1 / share)),
    )
    return share


@ray.remote(num_cpus=0)
def _gpu_bytes() -> list[int]:
    return gpu_bytes()


@contextmanager
def _started(options: RayOptions, name: str, clients_per_round: int) -> Iterator[None]:
    here = {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(torch.cuda.device_count())}
    num_actors(settled(options, [here]), [here], clients_per_round)  # refused before anything is started
    before = {key: os.environ.get(key) for key in OUR_RAY}
    os.environ.update({key: value for key, value in OUR_RAY.items() if before[key] is None})
    try:
        with trust.starting():
            context = ray.init(
                address="local",  # a bare init would follow an old address file to a Ray that may be gone
                num_cpus=int(here["CPU"]),
                num_gpus=int(here["GPU"]),
                job_config=JobConfig(metadata={OWNER: name}),
                logging_level=logging.WARNING,
            )
        if context.dashboard_url:
            log.info("Ray dashboard: http://%s", context.dashboard_url)
        yield
    finally:
        ray.shutdown()
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)


@contextmanager
def _joined(address: str) -> Iterator[None]:
    already = ray.is_initialized()
    if not already:
        trust.joining(address)
        try:
            context = ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise InputError(
                f"ray.address = '{address}': no Ray answers there ({str(error).splitlines()[0]}); start one with "
                "`ray start --head`, or leave the address out to have one started here"
            ) from None
        if context.dashboard_url:
            log.info("joined the Ray cluster at %s; dashboard: http://%s", address, context.dashboard_url)
    try:
        yield
    finally:
        if not already:
            ray.shutdown()
