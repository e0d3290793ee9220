"""Name what a user may type to see whether a cluster has room."""

import ray

from rayfed.job import RayOptions


def ray_status(options: RayOptions) -> str:
    """Return the command that shows a joined cluster's nodes and what holds them.

    Return '' for a Ray that the run started itself: it has no other users, so there is nothing to
    look for. The command has the address: without one, Ray takes any that it finds on this machine.
    """
    if not options.cluster:
        return ""
    return f"`ray status --address={ray.get_runtime_context().gcs_address}`"
