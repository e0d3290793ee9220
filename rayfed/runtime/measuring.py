"""Measure what an actor needs, where the job leaves its part of a GPU or its memory to rayfed.

An actor, the probe, rehearses the largest client before the run's actors are created.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.filesize import decimal

from rayfed.base.errors import ClientFailed, InputError, WorkersLost
from rayfed.job import RayOptions
from rayfed.runtime.causes import is_lost, ray_may_fail, refuse_input
from rayfed.runtime.gpus import cards_of_a_node, share_as_measured
from rayfed.runtime.heartbeat import got
from rayfed.runtime.placement import Resources, capacity
from rayfed.runtime.rehearsal import Needs
from rayfed.runtime.worker_group import new_actor

log = logging.getLogger(__name__)

# For each key that may be measured, a number to give instead.
INSTEAD = {"ray.num_gpus": "0.25", "ray.memory": "4"}
# Seconds in which the largest client must be measured.
MEASURE_LIMIT = 3600.0
# What "auto" sets aside of a node's memory, over what was measured. A process grows a little in its
# first rounds, as pieces of memory that it gives back do not always serve again.
MARGIN = 1.25
# A measured amount of memory is rounded up to a multiple of these bytes.
STEP = 10**7


def measured(
    options: RayOptions,
    name: str,
    setup: ObjectRef,
    nodes: Mapping[str, Resources],
    most: int,
) -> RayOptions:
    """Return the options with numbers where `ray.num_gpus` or `ray.memory` is "auto".

    `name` is the run's, `setup` its setup in Ray's store, and `most` the number of actors that it
    can use. If there are enough GPUs, each actor has a whole GPU, and its part is not measured.

    Raise `WorkersLost` where there is no room for the probe for `ray.patience` seconds,
    `InputError` where a client does not fit or is not done after an hour, `ClientFailed` where it
    fails.
    """
    whole = replace(options, num_gpus=options.gpu_share)
    shares_gpus = options.num_gpus == "auto" and capacity(whole, list(nodes.values())) < most
    if not shares_gpus and options.memory != "auto":
        return whole
    keys = ["ray.num_gpus"] if shares_gpus else []
    if options.memory == "auto":
        keys.append("ray.memory")
    with ray_may_fail():
        probe = new_actor(whole, f"{name}/probe")
        needs, cards = ask(probe, setup, whole, nodes, keys)
    if shares_gpus:
        sizes: list[int] = []
        for sizes_of_node, _ in cards:
            sizes.extend(sizes_of_node)
        share = share_as_measured(needs.gpu_memory, sizes, min(fit for _, fit in cards))
        whole = replace(whole, num_gpus=share)
    if options.memory == "auto":
        whole = replace(whole, memory=memory_as_measured(needs.memory, list(nodes.values())))
    return whole


def ask(
    probe: Any,
    setup: ObjectRef,
    options: RayOptions,
    nodes: Mapping[str, Resources],
    keys: Sequence[str],
) -> tuple[Needs, list[tuple[list[int], int]]]:
    """Return what the probe needs for the largest client, and the GPUs of each node that has some.

    The probe is killed then. `keys` are those that are measured, for messages.
    """
    place, on_it = "place for an actor", ""
    if options.gpu_share == 1:
        place, on_it = "whole GPU", " on a whole GPU"
    asked = " and ".join(f"{key} = 'auto'" for key in keys)
    advice = "give " + " and ".join(f"{key} = {INSTEAD[key]}" for key in keys) + ", for example"
    strategies = [
        NodeAffinitySchedulingStrategy(name, soft=False) for name in nodes if nodes[name].get("GPU")
    ]
    try:
        try:
            awaited = f"a {place}, to measure the largest client"
            got([probe.where.remote()], options.patience, awaited, starting=True)
        except GetTimeoutError:
            raise WorkersLost(
                f"{asked}: for {options.patience:.0f} s (ray.patience) no {place} was free, to "
                f"measure the largest client; try again when other jobs are done, or {advice}"
            ) from None
        questions = [probe.measure.remote([setup])]
        for strategy in strategies:
            questions.append(cards_of_a_node.options(scheduling_strategy=strategy).remote())
        awaited = f"the largest client, which is measured{on_it}"
        needs, *cards = got(questions, MEASURE_LIMIT, awaited, starting=True)
    except GetTimeoutError:
        raise InputError(
            f"{asked}: the largest client was not done after {MEASURE_LIMIT:.0f} s; {advice}"
        ) from None
    except RayError as error:
        refuse_input(error)
        if is_lost(error):
            raise
        raise ClientFailed(f"{asked}: the largest client failed{on_it}:\n{error}") from None
    finally:
        ray.kill(probe)
    return needs, cards


def memory_as_measured(needed: int, nodes: Sequence[Resources]) -> float:
    """Return the gigabytes that an actor gets which takes `needed` bytes: a quarter more.

    Raise `InputError` where no node has as much, and where nothing tells what a process takes.

    >>> memory_as_measured(400 * 10**6, [{"memory": 8e9}])
    0.5
    """
    if needed == 0:
        raise InputError(
            "ray.memory = 'auto': only Linux tells what a process takes; give a number of "
            "gigabytes, such as ray.memory = 4, or 0 to set none aside"
        )
    aside = math.ceil(needed * MARGIN / STEP) * STEP
    most = max((node["memory"] for node in nodes if "memory" in node), default=math.inf)
    if aside > most:
        raise InputError(
            f"ray.memory = 'auto': a client takes {decimal(needed)}, so that an actor gets "
            f"{decimal(aside)}, and a node has at most {decimal(round(most))} for actors; try a "
            "smaller train.batch_size, or ray.memory = 0 to set none aside"
        )
    log.info(
        "the largest client takes %s of memory: ray.memory = %g, %s for each actor",
        decimal(needed),
        aside / 1e9,
        decimal(aside),
    )
    return aside / 1e9
