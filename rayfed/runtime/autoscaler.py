"""Room for more actors than fit now, which Ray's autoscaler is asked to make; it adds nodes to a cluster.

Ray keeps one request per cluster, the last, also after the job that made it. So ours lasts only until the run starts:
from then on the actors that still wait for room are the demand, which ends with the run, however that ends.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.core.generated import autoscaler_pb2
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from rayfed.errors import InputError
from rayfed.job import RayOptions
from rayfed.runtime.heartbeat import Heartbeat
from rayfed.runtime.placement import Resources, actor_text, nodes_text, num_actors

log = logging.getLogger(__name__)

RPC_LIMIT = 10.0  # seconds in which the head must answer
ANSWER_LIMIT = 60.0  # seconds in which the autoscaler must answer; it looks for requests every five


@contextmanager
def room(options: RayOptions, nodes: Sequence[Resources], clients_per_round: int) -> Iterator[int]:
    """The number of actors to start; where they do not fit, the autoscaler is asked for nodes, for the context.

    Raises `InputError`, as `num_actors` does, where no autoscaler is there or it cannot add the nodes.
    """
    try:
        count = num_actors(options, nodes, clients_per_round)
    except InputError as error:
        if options.actors == "auto" or not _is_there():
            raise
        count, refused = options.actors, error
    else:
        yield count
        return
    log.info("%s; Ray's autoscaler is asked for %d actors, each with %s", nodes_text(nodes), count, actor_text(options))
    bundle = {"CPU": options.num_cpus, "GPU": options.gpu_share}
    try:
        _request([{kind: amount for kind, amount in bundle.items() if amount}] * count)
        if why := _refusal():
            raise InputError(f"{refused}; Ray's autoscaler {why} (`ray status`)")
        yield count
    finally:
        _withdraw()


# Importing Ray's autoscaler takes a tenth of a second, so it is imported when it is used.


def _is_there() -> bool:
    """Whether the cluster has an autoscaler of version 2, which may only watch a cluster of fixed size."""
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    return is_autoscaler_v2(fetch_from_server=True)


def _request(bundles: list[Resources]) -> None:
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles)


def _refusal() -> str:
    """What the autoscaler, which has just been asked for nodes, says against it, in words."""
    asked, heartbeat = _status().cluster_resource_state.cluster_resource_state_version, Heartbeat()
    end = time.monotonic() + ANSWER_LIMIT
    while time.monotonic() < end:
        answer = _status().autoscaling_state
        if answer.last_seen_cluster_resource_state_version > asked:
            return "cannot add nodes for so many" if answer.infeasible_cluster_resource_constraints else ""
        heartbeat.beat(lambda: "an answer of Ray's autoscaler")
        time.sleep(0.5)
    return f"has not answered for {ANSWER_LIMIT:.0f} s"


def _status() -> Any:
    """The state of the cluster, of a higher version each time, and the autoscaler's last answer."""
    reply = internal_kv_get_gcs_client().get_cluster_status(timeout_s=RPC_LIMIT)
    return autoscaler_pb2.GetClusterStatusReply.FromString(reply)  # type: ignore[attr-defined]


def _withdraw() -> None:
    try:
        _request([])
    except Exception as error:  # of many kinds; the run needs nothing of it, and the head forgets it when it ends
        kept = "until another request, the cluster keeps the nodes that this run has asked for"
        log.warning("the request to Ray's autoscaler could not be withdrawn (%r): %s", error, kept)
