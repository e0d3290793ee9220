"""Ray's private names: all that this package uses.

A later Ray may have one of them no longer. Then a run goes on without what the name is for, which
each function says. `tests/runtime/test_internals.py` takes names away in turn.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig

from rayfed.runtime.proxies import proxies_for
from rayfed.runtime.tokens import token_is_named
from rayfed.runtime.versions import minor

# The module of Ray's C++ code, as a traceback names it.
RAYLET = "ray._raylet"
NAMES = {
    "adds_nodes": "ray.autoscaler.v2.utils:is_autoscaler_v2",
    "check_alive": "ray.core.generated.gcs_service_pb2:CheckAliveRequest",
    "cluster_address": "ray._private.services:canonicalize_bootstrap_address",
    "cluster_facts": "ray._common.usage.usage_constants:CLUSTER_METADATA_KEY",
    "cluster_space": "ray._private.ray_constants:KV_NAMESPACE_CLUSTER",
    "dashboard_key": "ray._private.ray_constants:DASHBOARD_ADDRESS",
    "dashboard_space": "ray._private.ray_constants:KV_NAMESPACE_DASHBOARD",
    "draining": "ray._private.state:state.get_draining_nodes",
    "full_memory": "ray.core.generated.common_pb2:NODE_OUT_OF_MEMORY",
    "head_store": "ray.experimental.internal_kv:internal_kv_get_gcs_client",
    "head_value": "ray.experimental.internal_kv:_internal_kv_get",
    "multi_node": "ray._private.ray_constants:ENABLE_RAY_CLUSTER",
    "need_token": (
        "ray._private.authentication.authentication_token_setup:ensure_token_if_auth_enabled"
    ),
    "node_service": "ray.core.generated.gcs_service_pb2_grpc:NodeInfoGcsServiceStub",
    "open_channel": "ray._private.grpc_utils:init_grpc_channel",
    "print_lines": "ray._private.worker:print_to_stdstream",
    "read_variables": "ray._raylet:Config.initialize",
    "set_sigterm": "ray._private.utils:set_sigterm_handler",
    "show_token": (
        "ray._private.authentication.authentication_token_setup"
        ":maybe_enable_token_auth_if_token_available"
    ),
    "state": "ray._private.state:state",
    "uv_hook": "ray._private.ray_constants:RAY_ENABLE_UV_RUN_RUNTIME_ENV",
    "value_request": "ray.core.generated.gcs_service_pb2:InternalKVGetRequest",
    "value_service": "ray.core.generated.gcs_service_pb2_grpc:InternalKVGcsServiceStub",
    "worker_table": "ray.core.generated.gcs_pb2:WorkerTableData",
}
QUIET = {
    # Warns that tokens are on, which is right.
    "ray._private.authentication.authentication_token_setup": logging.ERROR,
    # Logs each package that it makes and sends.
    "ray._private.runtime_env.packaging": logging.WARNING,
    # Logs what it uploads.
    "ray.dashboard.modules.dashboard_sdk": logging.WARNING,
    # Logs that a log has ended.
    "ray.dashboard.modules.job.sdk": logging.WARNING,
}
for name, level in QUIET.items():
    logging.getLogger(name).setLevel(level)

# Begins a thousand characters of Ray's.
GUESS = "A worker died or was killed while executing a task"
# Whether workers get the environment of the driver's `uv run`.
UV_HOOK = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
# Like Ray's own connections.
NO_PROXY = (("grpc.enable_http_proxy", 0),)


def private(*names: str) -> list[Any] | None:
    """Return what Ray has under these keys of `NAMES`; None if it lacks any of them."""
    values = []
    for name in names:
        module, _, path = NAMES[name].partition(":")
        try:
            value = import_module(module)
            for step in path.split("."):
                value = getattr(value, step)
        except (ImportError, AttributeError):
            return None
        values.append(value)
    return values


@contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """Let a key of `NAMES` name another value within the context.

    Where Ray lacks the name, nothing is changed.
    """
    if private(name) is None:
        yield
        return
    module, _, path = NAMES[name].partition(":")
    owner = import_module(module)
    before = getattr(owner, path)
    setattr(owner, path, value)
    try:
        yield
    finally:
        setattr(owner, path, before)


def keeping_handlers() -> AbstractContextManager[None]:
    """Have `ray.init` leave this process's handler of SIGTERM alone, within the context.

    Ray's would end the process at once, with Ray half started. Where Ray lacks the name, the
    process has Ray's handler from here on.
    """
    return replaced("set_sigterm", lambda handler: None)


def in_our_words() -> AbstractContextManager[None]:
    """Keep Ray, within the context, from printing its guesses why a worker has died.

    The run says what is known. All of Ray's other lines are printed, without colours where nobody
    watches, as a file would keep their codes.
    """
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    found = private("print_lines")
    if found is None:
        return nullcontext()
    (print_lines,) = found

    def print_others(data: dict[str, Any], *more: Any, **named: Any) -> None:
        """Print all lines of Ray's but its guesses."""
        lines = [line for line in data.get("lines", []) if not line.lstrip().startswith(GUESS)]
        if lines:
            print_lines({**data, "lines": lines}, *more, **named)

    return replaced("print_lines", print_others)


def on_loopback() -> AbstractContextManager[None]:
    """Have a Ray start on the loopback interface only, within the context.

    Ray does so itself on Windows and macOS. Where Ray lacks the name, other machines reach it too,
    and its token alone protects it.
    """
    return replaced("multi_node", False)


def without_uv() -> AbstractContextManager[None]:
    """Have `ray.init` take no notice of `uv run`, within the context.

    It takes notice if `RAY_ENABLE_UV_RUN_RUNTIME_ENV` says so, or if Ray lacks the name. Then it
    packs the working folder, with data and keys in it, for its workers, and refuses more than
    512 MiB.
    """
    if os.environ.get(UV_HOOK, "0").lower() in ("1", "true"):
        return nullcontext()
    return replaced("uv_hook", False)


def same_modules(folders: list[str], **metadata: str) -> JobConfig:
    """Return a configuration with which Ray's workers look for modules in these folders, in order.

    By default they look in the working folder first, where a file may have the name of one of
    Python's modules.
    """
    config = JobConfig(metadata=metadata, _py_driver_sys_path=[*reversed(folders)])
    # Then Ray adds no folder.
    config._runtime_env_has_working_dir = lambda: True  # type: ignore[method-assign]
    return config


def running_here() -> list[str]:
    """Return the addresses of this user's Rays that `ray start` has put on this machine.

    A Ray that ends with its program is not among them. A raylet's command names Ray's folder, where
    `ray start` writes the address. Without that, none is known.
    """
    addresses = set()
    for process in psutil.process_iter():
        # The process may have ended, or its Ray may have written no address.
        with suppress(psutil.Error, OSError):
            command = process.cmdline()
            if not command or not command[0].endswith("/raylet"):
                continue
            if process.uids().real != os.getuid():
                continue
            options = [word for word in command if word.startswith("--temp_dir=")]
            if not options:
                continue
            folder = options[0].partition("=")[2]
            address = Path(folder, "ray_current_cluster").read_text()
            # Another address is of a Ray that is gone.
            if any(address in word for word in command):
                addresses.add(address)
    return sorted(addresses)


def memory_was_full(process: str) -> bool:
    """Say whether Ray killed a process because its node ran out of memory; False if it cannot tell.

    `process` is Ray's id of the process, in hexadecimal digits.
    """
    found = private("state", "worker_table", "full_memory")
    if found is None:
        return False
    state, worker_table, full_memory = found
    answer = state._connect_and_get_accessor().get_worker_info(ray.WorkerID(bytes.fromhex(process)))
    return bool(worker_table.FromString(answer).exit_type == full_memory)


def draining() -> set[str]:
    """Return the ids of the nodes that are about to end.

    Else none, as no public API tells: they are lost without a notice.
    """
    found = private("draining")
    return set(found[0]()) if found else set()


def adds_nodes() -> bool:
    """Say whether the cluster has an autoscaler for which waiting actors are a demand; else False.

    That is an autoscaler of version 2.
    """
    found = private("adds_nodes")
    return found is not None and bool(found[0](fetch_from_server=True))


def show_token() -> None:
    """Show our token to the clusters that are joined from now on.

    Else only `RAY_AUTH_MODE` does that. Raise `ray.exceptions.AuthenticationError` where there is
    no token and `RAY_AUTH_MODE` asks for one.
    """
    show = private("show_token")
    need = private("need_token")
    if show is not None:
        show[0](warn_if_disabled=False)
    elif token_is_named():
        _use_tokens()
    if need is not None:
        need[0](None, create_token_if_missing=False)


def turn_tokens_on() -> None:
    """Let a Ray that this process starts have a token, unless `RAY_AUTH_MODE` is set.

    Ray 2.60 and later does that itself. Ray 2.52 to 2.59 would start without a token, in silence.
    This function can go once pyproject.toml asks for Ray 2.60.
    """
    if minor(ray.__version__) < (2, 60):
        _use_tokens()


def _use_tokens() -> None:
    """Set `RAY_AUTH_MODE` where it is not set, for this process and those that it starts.

    Ray has read the variable when it was imported, so it is told to read it again.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    found = private("read_variables")
    if found is None:
        raise AuthenticationError("this Ray uses a token only where RAY_AUTH_MODE=token is set")
    os.environ["RAY_AUTH_MODE"] = "token"
    found[0]("")


def can_knock() -> bool:
    """Say whether a cluster can be asked if it takes our token."""
    return private("cluster_address", "open_channel", "node_service", "check_alive") is not None


def knock(address: str, limit: float) -> grpc.RpcError | None:
    """Return the error that a cluster's head answers to a call within `limit` seconds.

    Return None if there is no error, no such address, no Ray on this machine, or no way to ask.
    Raise `OSError` or `RuntimeError` for the files that the RAY_TLS_... variables name.
    """
    found = private("open_channel", "node_service", "check_alive")
    place = _place_of(address)
    if found is None or not place:
        return None
    open_channel, node_service, check_alive = found
    try:
        with closing(open_channel(place, NO_PROXY)) as channel:
            node_service(channel).CheckAlive(check_alive(), timeout=limit)
    except grpc.RpcError as error:
        return error
    return None


def versions_at(address: str, limit: float) -> tuple[str, str] | None:
    """Return the versions of Ray and Python with which a cluster's head was started.

    None where the head does not tell within `limit` seconds, or there is no way to ask. Then Ray
    compares the versions itself, when it has joined.
    """
    found = private(
        "open_channel", "value_service", "value_request", "cluster_facts", "cluster_space"
    )
    place = _place_of(address)
    if found is None or not place:
        return None
    open_channel, value_service, value_request, key, space = found
    request = value_request(key=key, namespace=space)
    try:
        with closing(open_channel(place, NO_PROXY)) as channel:
            answer = value_service(channel).InternalKVGet(request, timeout=limit)
        facts = json.loads(answer.value)
        return str(facts["ray_version"]), str(facts["python_version"])
    except (grpc.RpcError, ValueError, LookupError, TypeError):
        return None


def _place_of(address: str) -> str | None:
    """Return the host and the port of a cluster's head; None where there is no such address."""
    found = private("cluster_address")
    if found is None:
        return None
    try:
        place: str | None = found[0](address)
    except (ValueError, ConnectionError):
        return None
    return place


@contextmanager
def without_waiting_for_the_dashboard() -> Iterator[None]:
    """Have `ray.init` go on before the dashboard's address is known, within the context.

    That saves two seconds.
    """
    found = private("head_value", "dashboard_key", "dashboard_space", "head_store")
    if found is None:
        yield
        return
    get, key, *_ = found

    def at_once(name: str | bytes, **options: Any) -> bytes | None:
        """Return an empty address at once where the dashboard's is asked for."""
        return b"" if name == key else get(name, **options)

    with replaced("head_value", at_once):
        yield


def dashboard_address(limit: float) -> str:
    """Return where the dashboard is; '' if it is not known yet.

    Put the address where Ray's own tools look for it. Raise an exception where the head does not
    answer within `limit` seconds. '' for ever where Ray lacks a name.
    """
    found = private("head_value", "dashboard_key", "dashboard_space", "head_store")
    if found is None:
        return ""
    _, key, space, head_store = found
    head = head_store()
    address = head.internal_kv_get(key.encode(), space, timeout=limit)
    if not address:
        return ""
    head.internal_kv_put(b"webui:url", address, True, space, timeout=limit)
    return str(address.decode())


def job_client(url: str, headers: Mapping[str, str], limit: float) -> Any:
    """Return Ray's client of a job server, with these headers and `limit` seconds per request.

    The headers replace a token that Ray may find, and a password of `~/.netrc`. A request takes a
    proxy as `proxies_for` says. Else a request has no limit, takes the environment's proxy, and Ray
    shows its token unasked.
    """
    import requests

    # Importing it takes a third of a second.
    from ray.job_submission import JobSubmissionClient

    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")

    class Client(JobSubmissionClient):
        def _do_request(
            self,
            method: str,
            endpoint: str,
            *,
            data: Any = None,
            json_data: Any = None,
            **options: Any,
        ) -> Any:
            with requests.Session() as session:
                # Neither proxies nor ~/.netrc.
                session.trust_env = False
                session.proxies = proxies_for(url)
                session.verify = bundle or True
                session.headers.update(headers)
                answer = session.request(
                    method, url + endpoint, data=data, json=json_data, timeout=limit, **options
                )
            if answer.status_code in (401, 403):
                raise AuthenticationError(answer.reason)
            return answer

    return Client(url)
