"""Find a cluster's job server, check that it answers, and tell which of its nodes are here."""

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

# The address at which a Ray has its dashboard by default.
USUAL = "http://127.0.0.1:8265"
# The variables that name a cluster. Ray prefers them to any argument.
VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
ELSEWHERE = "if the cluster is elsewhere, give --address http://HOST:8265"
# Seconds in which a cluster must answer.
ANSWER_LIMIT = 10.0


@contextmanager
def job_server(named: str | None) -> Iterator[Jobs]:
    """Yield the job server at an address: its URL, its `host:port`, or auto, this machine's Ray.

    Without an address, the environment names it, or it is that Ray. Show the user's token, if any.
    Raise `InputError` where no Ray answers, or it refuses us; `NoRay` if the user has named no
    address either.
    """
    if named:
        named_by = "--address"
    else:
        named_by = next((name for name in VARIABLES if os.environ.get(name)), "")
    address = named or os.environ.get(named_by) or "auto"
    if address == "auto":
        address, named_by = USUAL, ""
    refuse_secrets(f"ray://{address.rpartition('://')[2]}", named_by)
    hidden = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    keep_private()
    try:
        url = address.rstrip("/") if "://" in address else f"http://{address}"
        jobs = Jobs(url, named_by)
        try:
            jobs.ask("GET", "/api/version", ANSWER_LIMIT)["ray_version"]
        except ClusterLost as error:
            raise _no_ray(address, named_by, brief(error.__cause__ or error)) from None
        except (LookupError, TypeError):
            raise _no_ray(address, named_by, "what answers is another program") from None
        yield jobs
    finally:
        os.environ.update(hidden)


def nodes_of(jobs: Jobs) -> list[dict[str, Any]]:
    """Return the cluster's nodes that are alive, as its dashboard describes them.

    Return none while its head is starting.
    """
    try:
        summary = jobs.ask("GET", "/nodes?view=summary")["data"]["summary"]
        nodes = [node["raylet"] for node in summary]
        return [node for node in nodes if node["state"] == "ALIVE"]
    except (ClusterLost, LookupError, TypeError):
        # The head is starting, or it is not a Ray of this version.
        return []


def are_here(jobs: Jobs, nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether all these nodes are this machine, so that a path means the same there as here.

    Return False if there are none. Raise `InputError` where they are this machine, and another
    user of it could change what the cluster runs.
    """
    # The URL does not tell where the nodes are: its port may be forwarded.
    try:
        for node in nodes:
            ip = node["nodeManagerAddress"]
            with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
                # This fails unless the address is this machine's.
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
    folder: str | None = node.get("sessionDir")
    return folder or str(Path(node["rayletSocketName"]).parents[1])


def _no_ray(address: str, named_by: str, reason: str) -> InputError:
    """Return the error where no Ray answers: `NoRay` where nobody has named the address."""
    variable = f", which {named_by} names," if named_by.startswith("RAY") else ""
    kind_of_error = InputError if named_by else NoRay
    return kind_of_error(
        f"no Ray cluster answers at {address}{variable} ({reason})\n"
        "to train on this machine, use rayfed run: it needs no cluster\n"
        f"{ELSEWHERE}\n"
        f"{private.LINES}"
    )
