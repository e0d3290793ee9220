"""Joining a Ray, being placed on it, and leaving it as it was."""

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
import ray
from ray.exceptions import RayActorError, RuntimeEnvSetupError

from rayfed import experiment
from rayfed.base.errors import InputError, RunFailed, WorkersLost
from rayfed.job import Output, RayOptions
from rayfed.methods import fedavg
from rayfed.runtime import causes, executors, gpus, internals, measuring, private, session
from rayfed.runtime.session import connected

QUICKSTART = Path(__file__).resolve().parents[2] / "jobs" / "quickstart.toml"


def rayfed_run(settings, **options):
    words = [word for setting in settings for word in ("-s", setting)]
    command = [sys.executable, "-m", "rayfed", "run", QUICKSTART, *words]
    return subprocess.run(command, capture_output=True, text=True, **options)


def nothing_is_left(run):
    """The CPU of a killed actor, and the memory of objects without references, come back a moment
    later.
    """
    # A traceback that an earlier test caught may hold a reference to an object.
    gc.collect()
    for _ in range(300):
        if ray.available_resources() == ray.cluster_resources():
            break
        time.sleep(0.1)
    assert ray.available_resources() == ray.cluster_resources()
    assert not [name for name in ray.util.list_named_actors() if name.startswith(run)]


# What Ray raises where it cannot be started, the error that it is, and words of the message.
STARTS = [
    (FileNotFoundError(2, "No such file", "/proc/x"), InputError, "/proc/x'; HOME and TMPDIR must"),
    (PermissionError(13, "Permission denied", "/x"), InputError, "'/x'; HOME and TMPDIR must name"),
    (
        OSError(24, "Too many open files"),
        InputError,
        "Too many open files; raise .* ulimit -n 8192",
    ),
    (OSError(36, "File name too long", "/x"), InputError, "'/x'; let TMPDIR name a folder of"),
    (OSError(28, "No space left on device", "/tmp/ray"), WorkersLost, "on device.*; try again"),
    (OSError(98, "Address already in use"), WorkersLost, "Address already in use; try again"),
    (OSError(11, "Resource temporarily unavailable"), WorkersLost, "unavailable; try again"),
    (OSError(12, "Cannot allocate memory"), WorkersLost, "Cannot allocate memory; try again"),
    (ValueError("Port 9 is already occupied. More."), WorkersLost, "occupied. More; try again"),
    (ConnectionRefusedError(111, "Connection refused"), WorkersLost, "refused; try again"),
    (RayActorError(), WorkersLost, "The actor experienced .*; try again"),
    # Causes that are not known: they may be there the next time too.
    (
        Exception("Failed to start a dashboard."),
        RunFailed,
        "start a dashboard; to train without Ray",
    ),
    (RuntimeError("Failed to start GCS.  Last 2 lines:\nx"), RunFailed, "Failed to start GCS; to"),
    (RuntimeEnvSetupError("no pip"), RunFailed, "Failed to set up runtime environment"),
    (RuntimeError("Version mismatch: Ray 2.9"), RunFailed, "Version mismatch: Ray 2.9; to train"),
    (ImportError("libX.so: cannot open"), RunFailed, "libX.so: cannot open; to train without Ray"),
    (KeyError("uid not found: 12345"), RunFailed, "uid not found: 12345"),
    (ValueError("timeout must be above 0"), RunFailed, "above 0; to train without Ray"),
    (ValueError(), RunFailed, "ValueError; to train without Ray: -s ray.mode=off"),
]


@pytest.mark.parametrize(("error", "kind", "message"), STARTS)
def test_a_ray_that_cannot_be_started_is_one_sentence_and_only_what_may_pass_is_tried_again(
    make_setup, monkeypatch, error, kind, message
):
    def init(**options):
        raise error

    monkeypatch.setattr(session.ray, "init", init)
    # An earlier test joined one.
    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)
    with (
        pytest.raises((RunFailed, InputError), match=rf"^Ray cannot be .*{message}") as refused,
        connected(RayOptions(), "t", 2),
    ):
        pass
    assert type(refused.value) is kind and "\n" not in str(refused.value)


# Ray's kinds of errors that a second try does not mend; all others have exit code 75.
FOR_EVER = {
    "ActorAlreadyExistsError",
    "ActorHandleNotFoundError",
    "ActorPlacementGroupRemoved",
    "AsyncioActorExit",
    "AuthenticationError",
    "CrossLanguageError",
    "ObjectRefStreamEndOfStreamError",
    "OufOfBandObjectRefSerializationException",
    "PendingCallsLimitExceeded",
    "RayCgraphCapacityExceeded",
    "RayChannelError",
    "RayDirectTransportError",
    "RayError",
    # Unless it says that it has lost a connection.
    "RaySystemError",
    "RayTaskError",
    "RuntimeEnvSetupError",
    "StreamingGeneratorReplayInconsistentError",
    "TaskCancelledError",
    "TaskPlacementGroupRemoved",
    "UnserializableException",
    "UserCodeException",
}


def test_each_kind_of_rays_errors_may_pass_or_not():
    """A kind that a newer Ray adds is in neither list, and its runs end with exit code 1."""
    kinds = [kind for kind in vars(ray.exceptions).values() if isinstance(kind, type)]
    ours = [kind for kind in kinds if issubclass(kind, ray.exceptions.RayError)]
    for kind in ours:
        assert issubclass(kind, causes.LOST) == (kind.__name__ not in FOR_EVER), kind.__name__


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ray.exceptions.RaySystemError("Broken pipe"), True),
        (ray.exceptions.RaySystemError("No module named 'mine'"), False),
        (RuntimeError("Timed out waiting for node info"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (OSError("unknown"), False),
        (ValueError("not a number of CPUs"), False),
        (grpc.RpcError(), False),
        (AssertionError("x"), False),
    ],
)
def test_an_error_passes_only_where_its_cause_is_known(error, passes):
    assert causes.may_pass(error) == passes


def test_a_start_with_too_few_open_files_names_their_number(monkeypatch):
    def init(**options):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(session.resource, "getrlimit", lambda which: (200, 200))
    with (
        pytest.raises(InputError, match=r"may open 200 files only: raise .*: ulimit -n 8192"),
        connected(RayOptions(), "t", 2),
    ):
        pass


# How Ray begins such a line, also where the machine was only too busy.
A_BUG = (
    "An unexpected system state has occurred. You have likely discovered a bug in Ray. Please report "
    "this issue at https://github.com/ray-project/ray/issues and we'll work with you to fix it. "
)


@pytest.mark.parametrize(
    ("is_up", "logged", "told", "kind"),
    [
        (True, "Check failed: room", "Check failed: room", WorkersLost),
        (False, f"{A_BUG}Check failed: a Timed out b", "a Timed out b", WorkersLost),
        (False, f"{A_BUG}Check failed: room", "room", RunFailed),
    ],
)
def test_a_start_that_was_too_slow_is_tried_again_but_not_one_that_has_failed(
    monkeypatch, is_up, logged, told, kind
):
    def init(_temp_dir, **options):
        logs = Path(_temp_dir, "session_1", "logs")
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text(f"[x] (raylet) [t C 1 1] a.cc:1:  {logged}\n")
        raise Exception("The current node timed out during startup. More")

    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(private, "is_raylet_in", lambda folder: is_up)
    end = "try again$" if kind is WorkersLost else "to train without Ray"
    message = rf"timed out during startup. More \(raylet.err: {told}\); {end}"
    with pytest.raises(RunFailed, match=message) as refused, connected(RayOptions(), "t", 2):
        pass
    assert type(refused.value) is kind


# ray.address, RAY_ADDRESS, the address to join, what names it.
ADDRESSES = [
    ("", None, "", ""),
    ("", "10.0.0.1:6379", "10.0.0.1:6379", "RAY_ADDRESS"),
    ("auto", "10.0.0.1:6379", "10.0.0.1:6379", "RAY_ADDRESS"),
    ("auto", None, "auto", "ray.address"),
    ("10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2:6379", "ray.address"),
    ("local", None, "", ""),
    ("local", "10.0.0.1:6379", "", ""),
    ("", "local", "", ""),
]


@pytest.mark.parametrize(("key", "variable", "address", "name"), ADDRESSES)
def test_the_address_of_a_ray_is_the_keys_or_the_variables(
    monkeypatch, key, variable, address, name
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    options = RayOptions(address=key)
    assert options.cluster == address
    if address:
        assert options.cluster_named == f"{name} = '{address}'"


def test_the_url_of_a_dashboard_is_refused_by_the_name_of_what_gives_it(monkeypatch):
    url = "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", url)
    with (
        pytest.raises(
            InputError, match=f"^RAY_ADDRESS = '{url}': .*; or unset RAY_ADDRESS to have"
        ),
        connected(RayOptions(), "t", 1),
    ):
        pass
    with (
        pytest.raises(InputError, match=f"^ray.address = '{url}': .*; or leave the address out to"),
        connected(RayOptions(address=url), "t", 1),
    ):
        pass


def test_a_process_with_a_ray_starts_no_other_and_joins_no_other(cluster, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(
            InputError, match=r"initialised in this process.* ray.address = 'auto'; or call"
        ),
        connected(RayOptions(), "t", 1),
    ):
        pass
    with (
        pytest.raises(InputError, match=f"already, at {cluster}; give ray.address = 'auto'"),
        connected(RayOptions(address="127.0.0.1:1"), "t", 1),
    ):
        pass
    for address in ("auto", cluster):
        with connected(RayOptions(address=address), "t", 1):
            assert ray.get_runtime_context().gcs_address == cluster


@pytest.mark.parametrize(("variable", "is_on"), [(None, False), ("0", False), ("1", True)])
def test_rays_hook_for_uv_is_off_unless_a_variable_turns_it_on(monkeypatch, variable, is_on):
    monkeypatch.delenv(internals.UV_HOOK, raising=False)
    if variable is not None:
        monkeypatch.setenv(internals.UV_HOOK, variable)
    (before,) = internals.private("uv_hook")
    with internals.without_uv():
        assert internals.private("uv_hook") == [before if is_on else False]
    assert internals.private("uv_hook") == [before]


@pytest.mark.parametrize(
    ("version", "is_newer"), [("2.60.9", False), ("2.61.0rc1", True), ("3.0.0.dev0", True)]
)
def test_a_ray_newer_than_tested_is_a_warning(cluster, monkeypatch, caplog, version, is_newer):
    pinned = re.search(
        r"^ray==(\d+)\.(\d+)", (QUICKSTART.parents[1] / "constraints.txt").read_text(), re.MULTILINE
    )
    assert tuple(map(int, pinned.groups())) == session.TESTED
    monkeypatch.setattr(ray, "__version__", version)
    with connected(RayOptions(address=cluster), "t", 1):
        assert (
            f"Ray {version} is newer than rayfed was tested with; if it fails: pip install "
            "'ray[default]==2.60.*'" in caplog.text
        ) == is_newer


def test_data_that_are_refused_start_no_ray(make_setup, monkeypatch, tmp_path):
    def refuse(job, read):
        raise InputError("the data are wrong")

    monkeypatch.setattr(session, "connected", None)
    monkeypatch.setattr(experiment, "open_setup", refuse)
    job = replace(make_setup(fedavg()).job, output=Output(str(tmp_path)))
    with pytest.raises(InputError, match="the data are wrong"):
        experiment.run(job, [], experiment.RunOptions())


def visible(actor):
    """The GPUs that CUDA would show to an actor."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_gpus", "share", "measured"), [(4, "auto", False), (2, "auto", True), (4, 0.25, False)]
)
def test_every_gpu_has_the_same_number_of_actors(
    a_cluster, make_setup, monkeypatch, caplog, here, pool_on, played, num_gpus, share, measured
):
    """The GPUs and the measured bytes are pretended, all else is real; Ray itself puts four fourths
    on one GPU.
    """
    as_measured = partial(gpus.share_as_measured, 4 * 10**9, [9 * 10**9, 24 * 10**9])
    monkeypatch.setattr(
        measuring, "share_as_measured", lambda needed, sizes, most: as_measured(most=most)
    )
    setup = make_setup(fedavg(), num_rounds=1)
    pretended = {gpus.PRETENDED: "1", gpus.NOT_SET: "1" if measured else ""}
    with a_cluster(pretended, num_cpus=1, num_gpus=num_gpus), caplog.at_level("INFO"):
        with pool_on(setup, "test-gpus", num_cpus=0.25, num_gpus=share) as pool:
            assert played(setup, pool) == here(setup)
            given = {
                member.gpu: member.actor.__ray_call__.remote(visible)
                for member in pool._group._workers
            }
            assert ray.get([*given.values()]) == [*given]
            count = Counter(member.gpu for member in pool._group._workers)
        assert count == {str(gpu): 4 // num_gpus for gpu in range(num_gpus)}
        # They hold objects in the store.
        del pool, given
        nothing_is_left("test-")
    text = "client takes 4.0 GB of GPU memory, the smallest GPU has 9.0 GB: up to 2 actors on a GPU"
    assert (text in caplog.text) == measured


def test_without_ray_absent_gpus_are_warned_about(make_setup, monkeypatch, caplog):
    monkeypatch.setattr(executors.torch.cuda, "device_count", lambda: 0)
    with executors.open_executor(make_setup(fedavg(), ray=RayOptions(num_gpus=0.5)), on_ray=False):
        assert (
            "ray.num_gpus = 0.5, but torch sees no GPU here: this process trains on its CPU"
            in caplog.text
        )


@pytest.mark.slow
def test_the_address_file_of_a_ray_that_is_gone_is_not_followed(tmp_path, short_folder):
    """A bare `ray.init()` would follow it, and wait."""
    Path(short_folder, "ray").mkdir()
    Path(short_folder, "ray", "ray_current_cluster").write_text("192.0.2.77:6379")
    environment = {**os.environ, "RAY_TMPDIR": short_folder}
    environment.pop("RAY_ADDRESS", None)
    settings = [
        "name=n",
        f"output.path={tmp_path}",
        "model.name=lenet",
        "train.num_rounds=1",
        "ray.actors=1",
    ]
    done = rayfed_run(settings, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert "actors: 1 on " in done.stderr


BESIDE = """
import ray
from rayfed.job import RayOptions
from rayfed.runtime import internals
from rayfed.runtime.session import connected

with connected(RayOptions(actors=1), "beside", 1):
    print(ray.get_runtime_context().gcs_address, *internals.running_here())
"""


@pytest.mark.slow
def test_a_run_that_starts_a_ray_beside_the_user_s_own_says_how_to_join_that(ray_head):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with ray_head(environment, "--num-cpus=1", "--node-ip-address=127.0.0.1") as ports:
        done = subprocess.run(
            [sys.executable, "-c", BESIDE], env=environment, capture_output=True, text=True
        )
    started, *others = done.stdout.split()
    (other,) = (address for address in others if address.endswith(f":{ports['port']}"))
    assert f"to use that one: -s ray.address={other}\n" in done.stderr
    assert started not in others and other not in internals.running_here()


def files(folder):
    return {
        path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()
    }


@pytest.mark.slow
def test_nothing_but_the_results_stays_of_a_run_in_a_cluster_that_was_joined(cluster, tmp_path):
    """Except for Ray's logs, and matplotlib's list of fonts."""
    session = ray._private.worker._global_node.get_session_dir_path()
    before = files(session)
    for name in ("home", "temporary", "here"):
        (tmp_path / name).mkdir()
    settings = ["model.name=lenet", "train.num_rounds=1", "ray.actors=1", f"ray.address={cluster}"]
    environment = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "temporary"),
    }
    # Once a test has started a Ray with a token in this process, the cluster asks for it.
    token = Path.home() / ".ray/auth_token"
    if token.exists():
        environment.setdefault("RAY_AUTH_TOKEN_PATH", str(token))
    done = rayfed_run(settings, cwd=tmp_path / "here", env=environment)
    assert done.returncode == 0, done.stderr
    left = {file for file in files(tmp_path) if not file.startswith("home/.cache/matplotlib/")}
    assert left and all(file.startswith("here/runs/quickstart/") for file in left)
    assert all(file.startswith("logs/") for file in files(session) - before)
    nothing_is_left("quickstart")


HANGING = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
import rayfed
from rayfed.methods import Part, compose

@dataclass(frozen=True)
class Hang(Part):
    file: str

    def begin(self, client):
        Path(self.file).touch()
        time.sleep(3600)

job, address, path = sys.argv[1:]
overrides = {"ray.address": address, "ray.actors": 1, "output.path": path, "model.name": "lenet", "name": "hanging"}
rayfed.run(job, overrides, method=compose(Hang(path + "/there")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_ends_the_run_and_leaves_nothing_in_the_cluster(
    cluster, tmp_path, sent
):
    command = [sys.executable, "-c", HANGING, str(QUICKSTART), cluster, str(tmp_path)]
    run = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # A shell may have told us to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not (tmp_path / "there").exists():
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.1)
        run.send_signal(sent)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert "KeyboardInterrupt" in said
    nothing_is_left("hanging")
