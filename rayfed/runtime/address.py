"""Find a cluster's job server, check that it answers, and tell which of its nodes are this machine."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayfed.base.errors import ClusterLost, InputError, NoRay, refuse_secrets
from rayfed.runtime import private
from rayfed.runtime.jobs import Jobs, brief
from rayfed.runtime.tokens import keep_private

# Where a Ray has its dashboard by default.
USUAL = "http://127.0.0.1:8265"
# They name a cluster; Ray prefers them to any argument.
VARIABLES = (
    "RAY_API_SERVER_ADDRESS",
    "RAY_ADDRESS",
)
# Seconds in which a cluster must answer.
ANSWER_LIMIT = 10.0


@contextmanager
def job_server(named: str | None) -> Iterator[Jobs]:
    """The job server at an address: its URL, its `host:port`, or auto, the Ray on this machine.

    Without an address, the environment names it, or it is that Ray. Shows the user's token, if any.
    Raises `InputError` where no Ray answers, or it refuses us; `NoRay` if the user has named no
    address either.
    """
    by = "--address" if named else next((name for name in VARIABLES if os.environ.get(name)), "")
    address = named or os.environ.get(by) or "auto"
    if address == "auto":
        address, by = USUAL, ""
    refuse_secrets(f"ray://{address.rpartition('://')[2]}", by)
    hidden = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    keep_private()
    try:
        url = address.rstrip("/") if "://" in address else f"http://{address}"
        jobs = Jobs(url, by)
        try:
            jobs.ask("GET", "/api/version", ANSWER_LIMIT)["ray_version"]
        except ClusterLost as error:
            raise _no_ray(address, by, brief(error.__cause__ or error)) from None
        except (LookupError, TypeError):
            raise _no_ray(address, by, "what answers is another program") from None
        yield jobs
    finally:
        os.environ.update(hidden)


def nodes_of(jobs: Jobs) -> list[dict[str, Any]]:
    """The cluster's nodes that are alive, as its dashboard describes them; none while its head is
    starting.
    """
    try:
        nodes = [
            node["raylet"] for node in jobs.ask("GET", "/nodes?view=summary")["data"]["summary"]
        ]
        return [node for node in nodes if node["state"] == "ALIVE"]
    except (ClusterLost, LookupError, TypeError):
        # Or it is not a Ray of this version.
        return []


def are_here(jobs: Jobs, nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all these nodes are this machine, so that a path means the same there as here; False
    if there are none.

    Raises `InputError` where they are, and another user of this machine could change what the
    cluster runs.
    """
    # The URL does not tell: its port may be forwarded.
    try:
        for node in nodes:
            ip = node["nodeManagerAddress"]
            with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
                # Fails unless the address is this machine's.
                probe.bind((ip, 0))
    except OSError:
        return False
    for node in nodes:
        private.refuse_open(_session_of(node), f"the Ray at {jobs.address}")
    return bool(nodes)


def _session_of(node: Mapping[str, Any]) -> str:
    """Return the folder of a node's session.

    Ray before 2.55 does not tell it, but names a socket in the folder `sockets` below it. That way
    can go once pyproject.toml asks for Ray 2.55.
    """
    told: str | None = node.get("sessionDir")
    return told or str(Path(node["rayletSocketName"]).parents[1])


def _no_ray(address: str, by: str, why: str) -> InputError:
    variable = f", which {by} names," if by.startswith("RAY") else ""
    return (InputError if by else NoRay)(
        f"no Ray answers at {address}{variable} ({why}); start a Ray here with `{private.RECIPE}`, "
        "or name another by its dashboard, such as --address http://HOST:8265"
    )
