"""Connecting to Ray, and putting actors on it: what is asked for is held against what there is first."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError

from rayfed.job import RayOptions
from rayfed.local import Site
from rayfed.runtime.actors import ClientActor
from rayfed.runtime.here import Progress, quiet
from rayfed.runtime.pool import Pool
from rayfed.values import InputError

log = logging.getLogger(__name__)

START_LIMIT = 180.0  # seconds in which the actors must have come up

# For a Ray that we start: workers find torch imported, and freed objects leave the store at once rather than in
# batches of a second (which held four times as much).
OUR_RAY = {
    "RAY_preload_python_modules": "torch",
    "RAY_free_objects_period_milliseconds": "20",
    "RAY_USAGE_STATS_ENABLED": "0",
}


Resources = dict[str, float]


def capacity(options: RayOptions, nodes: list[Resources]) -> int:
    """How many actors fit on the nodes: an actor lies on one node, so each is counted by itself."""

    def on(node: Resources) -> int:
        by_cpu = math.floor(node.get("CPU", 0) / options.num_cpus + 1e-6)
        return (
            by_cpu if options.gpu_share == 0 else min(by_cpu, math.floor(node.get("GPU", 0) / options.gpu_share + 1e-6))
        )

    return sum(on(node) for node in nodes)


def num_actors(options: RayOptions, nodes: list[Resources], clients_per_round: int) -> int:
    """How many actors to start. Raises `InputError` when more are asked for than fit, with the most that do."""
    fit = capacity(options, nodes)
    there = f"there are {sum(n.get('CPU', 0) for n in nodes):g} CPU and {sum(n.get('GPU', 0) for n in nodes):g} GPU"
    there += f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    each = f"{options.num_cpus:g} CPU and {options.gpu_share:g} GPU"
    if fit == 0:
        raise InputError(f"no actor with {each} fits: {there}; ask for less with ray.num_cpus and ray.num_gpus")
    if options.actors == "auto":
        return min(fit, clients_per_round)
    if options.actors > fit:
        raise InputError(
            f"ray.actors = {options.actors}, each with {each}: {there}, so at most {fit} fit; "
            "ask for fewer, or for less each (ray.num_cpus = 0.5 lets two share a CPU)"
        )
    return options.actors


@contextmanager
def workers(options: RayOptions, name: str, site: Site, progress: Progress = quiet) -> Iterator[Pool]:
    """A pool of actors for the run `name`, on a Ray that is started here or joined.

    A Ray that was started here ends with the run; of one that was joined, only our actors do.
    """
    with _joined(options.cluster) if options.cluster else _started(options, site):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        shared = ray.put(site)  # one copy of the data on each node; actors read it in place
        actors = _place(options, name, shared, num_actors(options, nodes, site.training.clients_per_round))

        def reopen(actor: Any) -> ObjectRef:
            return actor.open.remote(shared)

        try:
            yield Pool(actors, reopen, site.federation.num_examples, len(site.federation.test.labels), progress)
        finally:
            for actor in actors:
                ray.kill(actor)


@contextmanager
def _started(options: RayOptions, site: Site) -> Iterator[None]:
    here = {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(torch.cuda.device_count())}
    num_actors(options, [here], site.training.clients_per_round)  # refused before anything is started
    before = {key: os.environ.get(key) for key in OUR_RAY}
    os.environ.update({key: value for key, value in OUR_RAY.items() if before[key] is None})
    # It warns that token authentication is on, which is as it should be.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    try:
        context = ray.init(
            address="local",  # a bare init would follow an old address file to a Ray that may be gone
            num_cpus=int(here["CPU"]),
            num_gpus=int(here["GPU"]),
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


def _place(options: RayOptions, name: str, shared: ObjectRef, count: int) -> list[Any]:
    """Start actors, wait for them with a limit, and say what came up."""
    started = time.perf_counter()
    actors = [
        ClientActor.options(  # type: ignore[attr-defined]
            name=f"{name}/client-{i}",
            num_cpus=options.num_cpus,
            num_gpus=options.gpu_share,
            max_restarts=-1,
            max_task_retries=0,  # the pool runs lost work again itself, and elsewhere
            scheduling_strategy="SPREAD",
        ).remote(f"{name}/client-{i}", options.threads)
        for i in range(count)
    ]
    opened = [actor.open.remote(shared) for actor in actors]
    try:
        places = ray.get(opened, timeout=START_LIMIT)
    except GetTimeoutError:
        up, _ = ray.wait(opened, num_returns=count, timeout=0)
        for actor in actors:
            ray.kill(actor)
        raise InputError(
            f"after {START_LIMIT:.0f} s {len(up)} of {count} actors had come up: the cluster has the resources "
            f"but does not give them now; try ray.actors = {max(1, len(up))}, or wait until other jobs are done"
        ) from None
    devices = {device: sum(d == device for _, d in places) for _, device in places}
    on = ", ".join(f"{n} on {device}" for device, n in devices.items())
    log.info("%d actors up after %.1f s (%s)", count, time.perf_counter() - started, on)
    return actors
