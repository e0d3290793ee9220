"""Access to a Ray: its token, and the network interface that it listens on. See docs/security.md.

Whoever reaches a Ray can run code in it. Ray itself turns tokens on for a cluster of one machine; the rest is added
here. Some of Ray's names used here are private: `tests/runtime/test_trust.py` checks them against a real Ray.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import grpc
from ray._private import ray_constants, services
from ray._private.authentication import authentication_token_setup as ray_tokens
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.exceptions import AuthenticationError

from rayfed.base.errors import InputError, refuse_secrets
from rayfed.runtime import replaced
from rayfed.runtime.private import RECIPE
from rayfed.runtime.tokens import ADVICE, keep_private, token_file

ASK_LIMIT = 5.0  # seconds in which a cluster must answer whether it accepts our token
NO_PROXY = (("grpc.enable_http_proxy", 0),)  # like Ray's own connections

# It warns that token authentication is on, which is right.
logging.getLogger(ray_tokens.__name__).setLevel(logging.ERROR)


@contextmanager
def starting() -> Iterator[None]:
    """While a Ray is started here: its token is private, and it listens on the loopback interface only.

    Ray makes a token if there is none, which every user of this machine could read. `RAY_AUTH_MODE` is obeyed.
    """
    if os.environ.get(ray_tokens.AUTH_MODE_ENV_VAR, "token") == "token":
        with suppress(OSError):  # Ray says why it cannot write there
            token_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:  # as Ray does on Windows and macOS: other machines cannot reach it
        with replaced(ray_constants, "ENABLE_RAY_CLUSTER", False), _naming_the_token():
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
    chosen = ray_tokens.AUTH_MODE_ENV_VAR in os.environ  # obeyed, whatever the cluster does
    error = None if chosen else _knock(address)
    if chosen or "://" in address or (error and error.code() == grpc.StatusCode.UNAUTHENTICATED):
        with _naming_the_token():
            ray_tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            ray_tokens.ensure_token_if_auth_enabled(None, create_token_if_missing=False)
        keep_private()
        error = _knock(address)
    if error and error.code() == grpc.StatusCode.UNAUTHENTICATED:
        raise InputError(f"ray.address = '{address}': the cluster asks for a token, and {_shown()}; {ADVICE}")
    if error and error.code() == grpc.StatusCode.UNAVAILABLE:
        raise InputError(
            f"ray.address = '{address}': no Ray answers there ({error.details()}); start one with `{RECIPE}`, "
            "or leave the address out to have one started here; if it has TLS, docs/security.md says what is needed"
        )


def _knock(address: str) -> grpc.RpcError | None:
    """The error that a cluster answers to a call; None if there is none, or if joining will find it."""
    if "://" in address:
        return None  # an address for Ray's client, which has another server
    try:
        place = services.canonicalize_bootstrap_address(address)
    except (ValueError, ConnectionError):  # no such address; no Ray on this machine
        return None
    if place:
        try:
            with closing(init_grpc_channel(place, NO_PROXY)) as channel:
                head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
                head.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=ASK_LIMIT)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            return error
        except (OSError, RuntimeError) as error:  # of the files that the RAY_TLS_... variables name
            raise InputError(f"ray.address = '{address}': TLS is on, but cannot be used: {error}") from None
    return None


def _shown() -> str:
    """The token that we showed to a cluster, in words."""
    if (mode := os.environ.get(ray_tokens.AUTH_MODE_ENV_VAR, "")) != "token":
        return f"RAY_AUTH_MODE is '{mode}'" if mode else "there is none here"
    return f"{'RAY_AUTH_TOKEN' if os.environ.get('RAY_AUTH_TOKEN') else repr(str(token_file()))} holds another token"


@contextmanager
def _naming_the_token() -> Iterator[None]:
    try:
        yield
    except AuthenticationError as error:
        why = str(error).partition(". ")[0]  # the sentences that follow say to make another token
        raise InputError(f"no token for Ray: {why}; {ADVICE}") from None
