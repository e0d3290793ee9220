"""Access to a Ray: its token, and the network interface that it listens on. See docs/security.md.

Whoever reaches a Ray can run code in it. Ray itself turns tokens on for a cluster of one machine; the rest is added
here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
from ray.exceptions import AuthenticationError

from rayfed.base.errors import InputError, refuse_secrets
from rayfed.runtime import internals
from rayfed.runtime.private import RECIPE
from rayfed.runtime.tokens import ADVICE, keep_private, token_file

ASK_LIMIT = 5.0  # seconds in which a cluster must answer whether it accepts our token
MODE = "RAY_AUTH_MODE"


@contextmanager
def starting() -> Iterator[None]:
    """While a Ray is started here: its token is private, and it listens on the loopback interface only.

    Ray makes a token if there is none, which every user of this machine could read. `RAY_AUTH_MODE` is obeyed.
    """
    if os.environ.get(MODE, "token") == "token":
        with suppress(OSError):  # Ray says why it cannot write there
            token_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with internals.on_loopback(), _naming_the_token():
            yield
    finally:
        keep_private()


def joining(address: str) -> None:
    """Before a Ray is joined: show our token if the cluster asks for a token, and only then.

    A process that shows a token also demands it from the cluster: a cluster without tokens could not call it back, and
    would drop our actors. So the cluster is asked first. Raises `InputError` where no cluster answers, or it refuses
    our token; Ray itself would try for 20 seconds to some minutes, without a reason.
    """
    refuse_secrets(f"ray://{address.rpartition('://')[2]}", "ray.address")
    chosen = MODE in os.environ  # obeyed, whatever the cluster does
    cannot_be_asked = (
        "://" in address or not internals.can_knock()
    )  # it gets our token, if there is one
    error = None if chosen else _knock(address)
    if chosen or cannot_be_asked or (error and error.code() == grpc.StatusCode.UNAUTHENTICATED):
        with _naming_the_token():
            internals.show_token()
        keep_private()
        error = _knock(address)
    if error and error.code() == grpc.StatusCode.UNAUTHENTICATED:
        raise InputError(
            f"ray.address = '{address}': the cluster asks for a token, and got none or a wrong token; {ADVICE}"
        )
    if error and error.code() == grpc.StatusCode.UNAVAILABLE:
        raise InputError(
            f"ray.address = '{address}': no Ray answers there ({error.details()}); start one with `{RECIPE}`, "
            "or leave the address out to have one started here; if it has TLS, set RAY_USE_TLS and RAY_TLS_... as there"
        )


def _knock(address: str) -> grpc.RpcError | None:
    """The error that a cluster answers to a call; None if there is none, or if joining will find it."""
    if "://" in address:
        return None  # an address for Ray's client, which has another server
    try:
        return internals.knock(address, ASK_LIMIT)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"ray.address = '{address}': TLS is on, but cannot be used: {error}"
        ) from None


@contextmanager
def _naming_the_token() -> Iterator[None]:
    try:
        yield
    except AuthenticationError as error:
        why = str(error).partition(". ")[0]  # the sentences that follow say to make another token
        raise InputError(f"no token for Ray: {why}; {ADVICE}") from None
