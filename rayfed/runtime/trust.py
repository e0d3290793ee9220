"""Guard access to a Ray: its token, and the network interface that it listens on.

See docs/security.md. Whoever reaches a Ray can run code in it. Ray itself turns tokens on for a
cluster of one machine; the rest is added here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from ray.exceptions import AuthenticationError

from rayfed.base.errors import InputError, first_line, refuse_secrets
from rayfed.runtime import internals
from rayfed.runtime.environment import variables
from rayfed.runtime.private import LINES
from rayfed.runtime.tokens import ADVICE, MODE, for_a_new_ray, keep_private
from rayfed.runtime.versions import refuse_others

# Seconds in which a cluster must answer whether it accepts our token.
ASK_LIMIT = 5.0


@contextmanager
def starting() -> Iterator[None]:
    """Keep the token of a Ray private that is started in the context.

    It also listens on the loopback interface only. `RAY_AUTH_MODE` is obeyed. Raise `InputError`
    where a token cannot be kept anywhere.
    """
    with variables(for_a_new_ray()), internals.on_loopback(), _naming_the_token():
        internals.turn_tokens_on()
        yield


def joining(address: str, named: str) -> None:
    """Show our token to a Ray that is to be joined if it asks for a token, and only then.

    A process that shows a token also demands it from the cluster: a cluster without tokens could
    not call it back, and would drop our actors. So the cluster is asked first. Raise `InputError`
    where no cluster answers, or it refuses our token; Ray itself would try for 20 seconds to some
    minutes, without a reason. Raise it too where the cluster has another Ray, or another minor
    version of Python. `named` says in messages who has given the address.
    """
    refuse_secrets(f"ray://{address.rpartition('://')[2]}", named.partition(" = ")[0])
    # The user's choice is obeyed, whatever the cluster does.
    chosen = MODE in os.environ
    # A cluster that cannot be asked gets our token, if there is one.
    cannot_be_asked = "://" in address or not internals.can_knock()
    error = None if chosen else _knock(address, named)
    if chosen or cannot_be_asked or (error and error.code() == grpc.StatusCode.UNAUTHENTICATED):
        with _naming_the_token():
            internals.show_token()
        keep_private()
        error = _knock(address, named)
    if error and error.code() == grpc.StatusCode.UNAUTHENTICATED:
        raise InputError(
            f"{named}: the cluster asks for a token, and got none or a wrong token; {ADVICE}"
        )
    if error and error.code() == grpc.StatusCode.UNAVAILABLE:
        raise InputError(
            f"{no_ray(named, str(error.details()))}\n"
            "if the cluster has TLS, set RAY_USE_TLS and RAY_TLS_... as there"
        )
    their_versions = None if "://" in address else internals.versions_at(address, ASK_LIMIT)
    if their_versions:
        refuse_others(named, *their_versions)


def no_ray(named: str, reason: str) -> str:
    """Return the message where no Ray answers at an address, and what to do.

    >>> print(no_ray("ray.address = 'x:1'", "UNKNOWN: ipv4:x:1: Connection refused"))
    ... # doctest: +ELLIPSIS
    ray.address = 'x:1': no Ray answers there (connection refused)
    to run without it, leave the address out: rayfed then starts a Ray of its own
    to start a Ray that stays, type:
    ...
    """
    # gRPC repeats the address before it.
    if reason.endswith("Connection refused"):
        reason = "connection refused"
    return (
        f"{named}: no Ray answers there ({reason})\n"
        f"to run without it, {without(named)}: rayfed then starts a Ray of its own\n"
        f"{LINES}"
    )


def without(named: str) -> str:
    """Say how to go without an address that a key, or else a variable, has named."""
    return "unset RAY_ADDRESS" if named.startswith("RAY_ADDRESS") else "leave the address out"


def _knock(address: str, named: str) -> grpc.RpcError | None:
    """Return the error that a cluster answers to a call.

    Return None if there is none, or if joining will find it. Raise `InputError` where the files of
    TLS cannot be used.
    """
    if "://" in address:
        # It is an address for Ray's client, which has another server.
        return None
    try:
        return internals.knock(address, ASK_LIMIT)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{named}: TLS is on, but cannot be used: {error}") from None


@contextmanager
def _naming_the_token() -> Iterator[None]:
    """Raise `InputError` in our words where Ray finds no token."""
    try:
        yield
    except AuthenticationError as error:
        # The sentences that follow the first say to make another token. Before Ray 2.60 they are on
        # the next lines.
        reason = first_line(error).partition(". ")[0].rstrip(".")
        raise InputError(f"no token for Ray: {reason}; {ADVICE}") from None
