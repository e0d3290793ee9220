"""Who may speak to a Ray: its token, kept private, and the network that it listens on. docs/security.md has the whole.

Whoever reaches a Ray can run code in it. What is used here of Ray's own is not part of its public interface;
`tests/runtime/test_trust.py` holds it against a real Ray.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
from ray._private import ray_constants, services
from ray._private.authentication import authentication_token_setup as ray_tokens
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.exceptions import AuthenticationError

from rayfed.values import InputError

log = logging.getLogger(__name__)

ASK_LIMIT = 5.0  # seconds in which a cluster may answer whether it takes our token
NO_PROXY = (("grpc.enable_http_proxy", 0),)  # as Ray's own connections

# It warns that token authentication is on, which is as it should be.
logging.getLogger(ray_tokens.__name__).setLevel(logging.ERROR)


@contextmanager
def starting() -> Iterator[None]:
    """While a Ray is started here: it asks everybody for the token, and listens on the loopback interface alone.

    A token is made if there is none; only this user can read it. `RAY_AUTH_MODE` in the environment is obeyed.
    """
    before = os.umask(0o077)  # Ray would let everybody on this machine read the token that it makes
    try:
        with _looking_for_token():
            ray_tokens.enable_token_auth_by_default()
            ray_tokens.ensure_token_if_auth_enabled(None, create_token_if_missing=True)
    finally:
        os.umask(before)
    _keep_private()
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # what Ray does on Windows and macOS: nothing there is for other machines
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters


def joining(address: str) -> None:
    """Before a Ray is joined: show our token where one is asked for, and only there.

    Who shows a token asks for it, too: a cluster without tokens would find that it cannot reach us, and drop our
    actors. So it is asked first. Raises `InputError` where nobody answers, or the cluster refuses what we show; Ray
    itself would try for 20 seconds to some minutes, and not say why.
    """
    chosen = ray_tokens.AUTH_MODE_ENV_VAR in os.environ  # obeyed, whatever the cluster does
    error = None if chosen else _knock(address)
    if chosen or "://" in address or (error and error.code() == grpc.StatusCode.UNAUTHENTICATED):
        with _looking_for_token():
            ray_tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            ray_tokens.ensure_token_if_auth_enabled(None, create_token_if_missing=False)
        _keep_private()
        error = _knock(address)
    if error and error.code() == grpc.StatusCode.UNAUTHENTICATED:
        raise InputError(
            f"ray.address = '{address}': the cluster asks for a token, and {_shown()}; give the token that "
            "`ray get-auth-token` prints on its head node, in ~/.ray/auth_token or in RAY_AUTH_TOKEN"
        )
    if error and error.code() == grpc.StatusCode.UNAVAILABLE:
        raise InputError(
            f"ray.address = '{address}': no Ray answers there ({error.details()}); start one with `ray start --head`, "
            "or leave the address out to have one started here; if it has TLS, docs/security.md says what is needed"
        )


def _knock(address: str) -> grpc.RpcError | None:
    """What a cluster answers to one call, if that is an error. Other errors of the address are found by joining."""
    if "://" in address:
        return None  # Ray's client, which speaks to another server
    try:
        place = services.canonicalize_bootstrap_address(address)
    except ValueError:
        return None
    if place:
        try:
            with closing(init_grpc_channel(place, NO_PROXY)) as channel:
                head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
                head.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=ASK_LIMIT)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            return error
        except (OSError, RuntimeError) as error:  # of what the RAY_TLS_... variables name, or do not
            raise InputError(f"ray.address = '{address}': TLS is on, but cannot be used: {error}") from None
    return None


def _shown() -> str:
    """What we have shown a cluster, in words."""
    if (mode := os.environ.get(ray_tokens.AUTH_MODE_ENV_VAR, "")) != "token":
        return f"RAY_AUTH_MODE is '{mode}'" if mode else "there is none here"
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "the one in RAY_AUTH_TOKEN is another"
    return f"the one in '{os.environ.get('RAY_AUTH_TOKEN_PATH') or _token_file()}' is another"


@contextmanager
def _looking_for_token() -> Iterator[None]:
    try:
        yield
    except AuthenticationError as error:
        why = str(error).partition(". ")[0]  # more sentences follow, and one of them says to make another token
        raise InputError(
            f"no token for Ray: {why}; put the cluster's token in ~/.ray/auth_token or in RAY_AUTH_TOKEN"
        ) from None


def _token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"


def _keep_private() -> None:
    """Take from others what they may do with the token file: earlier Rays have let everybody read it."""
    path = _token_file()
    try:
        mode = path.stat().st_mode
        if mode & 0o077:
            path.chmod(0o600)
            log.warning("%s could be read by others; now only by you", path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s may be read by others, and that cannot be changed: %s", path, error)
