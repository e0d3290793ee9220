"""Connect to Ray, and open a run's actors on it.

Requests beyond the cluster's resources are refused first.
"""

import errno
import logging
import math
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray
import torch
from ray import ObjectRef, cloudpickle
from ray.exceptions import RayError
from torch import nn

from rayfed.base.errors import LONGEST, InputError, RunFailed, WorkersLost, first_line
from rayfed.base.files import is_installed
from rayfed.job import RayOptions
from rayfed.models.sending import make_sendable
from rayfed.rounds.executor import Progress, no_progress
from rayfed.rounds.setup import Setup
from rayfed.runtime import OWNER, dashboard, internals, private, trust, versions
from rayfed.runtime.causes import SAID, end_of_ray, may_pass, ray_may_fail
from rayfed.runtime.environment import variables
from rayfed.runtime.gauges import Gauges
from rayfed.runtime.gpus import most_on_a_gpu, without_absent_gpus
from rayfed.runtime.head import Head, ending_with_its_node
from rayfed.runtime.measuring import measured
from rayfed.runtime.placement import (
    Resources,
    num_actors,
    spread,
    warn_of_idle_gpus,
    warn_of_small_stores,
)
from rayfed.runtime.pool import Pool
from rayfed.runtime.proxies import without_proxy_here
from rayfed.runtime.signals import ending_in_time, stopping
from rayfed.runtime.worker_group import WorkerGroup
from rayfed.tensors.trees import num_bytes
from rayfed.tensors.weights import state

log = logging.getLogger(__name__)

# Ray before 2.56 hides the GPUs from actors that ask for none, and announces on the terminal that
# later Rays will not. This can go once pyproject.toml asks for Ray 2.56.
AS_LATER_RAYS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# For a Ray that we start: its workers import what actors need before there are actors, and freed
# objects leave the store at once. (Ray's default is once per second, with which the store holds
# four times as much.)
OUR_RAY = {
    **AS_LATER_RAYS,
    "RAY_preload_python_modules": "torch,rayfed.runtime.actors",
    "RAY_free_objects_period_milliseconds": "20",
    "RAY_USAGE_STATS_ENABLED": "0",
    internals.UV_HOOK: "0",
    # Without it, Ray's processes that begin with `python -c` look for modules in the working folder
    # first.
    "PYTHONSAFEPATH": "1",
}
# What the user can do about errors of the operating system at the start of Ray.
LIMITS = {
    errno.EMFILE: "raise the limit of open files: ulimit -n 8192",
    errno.EACCES: "HOME and TMPDIR must name folders that can be written to",
    errno.EPERM: "HOME and TMPDIR must name folders that can be written to",
    errno.EROFS: "HOME and TMPDIR must name folders that can be written to",
    errno.ENOENT: "HOME and TMPDIR must name folders that can be written to",
    errno.ENOTDIR: "HOME and TMPDIR must name folders that can be written to",
    errno.EEXIST: "HOME and TMPDIR must name folders that can be written to",
    errno.ENAMETOOLONG: "let TMPDIR name a folder of yours with a short path",
}
# With fewer files than this that a process may open, Ray's processes fail in many ways.
FEW_FILES = 1024
LOOK = "to train without Ray: -s ray.mode=off"
# What marks a line of Ray's logs as fatal.
FATAL = re.compile(r" [CF] \d+ \d+\]|Check failed|terminate called|Traceback")
# The beginning of such a line: when it was logged, in which file of Ray's, and that it is a fault
# of Ray's, which it says also where a machine was only too busy.
FATAL_PREFIX = re.compile(
    r"^.*?\.cc:\d+:\s*(An unexpected system state has occurred.*?Check failed:\s*)?"
)
# The newest Ray that the tests were run with.
TESTED = (2, 60)
# Variables while a Ray is joined. Without the first one, Ray would refuse a cluster whose Python
# differs in its patch version only.
JOINING = {"RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor", **AS_LATER_RAYS}
# A variable that only the environment of a submitted job has.
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@contextmanager
def connected(options: RayOptions, name: str, most: int) -> Iterator[None]:
    """Start a Ray here for the context, with room for `most` actors, or join a running Ray.

    Call it in a thread that lasts as long as the context: Linux ends Ray's processes with the
    thread that started them.
    """
    refuse_hidden()
    warn_of_a_newer_ray()
    if options.cluster:
        ray_for_the_context = _joined(options.cluster, options.cluster_named)
    else:
        refuse_initialised()
        ray_for_the_context = _started(options, name, most)
    with internals.in_our_words(), ray_for_the_context:
        yield


def refuse_initialised() -> None:
    """Raise `InputError` where this process has a Ray already.

    Ray has one for each process.
    """
    if ray.is_initialized():
        raise InputError(
            "Ray is initialised in this process already, and no second Ray can be started: to run "
            "on it, give ray.address = 'auto'; or call ray.shutdown() first, to have a Ray started "
            "for the run"
        )


def refuse_hidden() -> None:
    """Raise `InputError` where a user's file is imported in place of a module of Python's.

    Ray's workers have both, the file and the module.
    """
    for name in sys.stdlib_module_names & sys.modules.keys():
        file = getattr(sys.modules[name], "__file__", None)
        # An installed file is not refused: Setuptools replaces a module of the library.
        if file and not is_installed(file):
            raise InputError(
                f"'{file}' hides Python's own module '{name}', and Ray's workers would not all "
                "import the same; give the file another name, or ray.mode = 'off'"
            )


def warn_of_a_newer_ray() -> None:
    """Log a warning where Ray is newer than the newest that the tests were run with.

    Ray changes what it does from minor version to minor version.
    """
    if tuple(map(int, ray.__version__.split(".")[:2])) > TESTED:
        older = "pip install 'ray[default]=={}.{}.*'".format(*TESTED)
        log.warning(
            "Ray %s is newer than rayfed was tested with; if it fails: %s", ray.__version__, older
        )


def where_this_process_looks() -> list[str]:
    """Return the folders in which Ray's workers look for modules."""
    return [os.path.abspath(folder) for folder in sys.path]


def machine() -> Resources:
    """Return the resources that a Ray that is started here would have at most.

    It keeps a part of the memory for its store and for the system.
    """
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        # macOS does not tell which processors a process may use.
        count = os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpus = torch.cuda.device_count()
    return {"CPU": float(count), "GPU": float(gpus), "memory": float(memory)}


@contextmanager
def open_actors(
    setup: Setup, progress: Progress = no_progress, *, other_bits: bool = False
) -> Iterator[Pool]:
    """Yield a run's actors, on the Ray that is connected.

    With `other_bits` they may be on several kinds of hardware.
    """
    given_options, name = setup.job.ray, setup.job.name
    cohort = setup.job.train.clients_per_round
    head = Head(given_options.labels)
    reference = setup.reference if isinstance(setup, Stored) else ray.put(setup)
    nodes = list(head.known().values())
    options = without_absent_gpus(given_options, nodes)
    most = cohort if given_options.actors == "auto" else given_options.actors
    if "auto" in (options.num_gpus, options.memory):
        # This is only for its error: where not a single actor fits, nothing is measured.
        num_actors(options, nodes, cohort)
        options = measured(options, name, reference, head.known(), most)
    if "auto" in (given_options.actors, given_options.num_gpus):
        options = spread(options, nodes, most)
    warn_of_idle_gpus(options, nodes)
    warn_of_small_stores(num_bytes(state(setup.model)), nodes)
    group = WorkerGroup(options, name, setup, reference, most, head, other_bits)
    with closing(Gauges(name, setup.job.train.num_rounds)) as gauges, ending_with_its_node():
        try:
            with ray_may_fail():
                group.start(wanted(options, list(head.known().values()), cohort))
            yield Pool(group, setup, progress, gauges)
        finally:
            group.end()


def wanted(options: RayOptions, nodes: Sequence[Resources], clients_per_round: int) -> int:
    """Return how many actors to create: as `num_actors`, or more where an autoscaler adds nodes.

    An autoscaler, of version 2, adds nodes for actors that wait for room, so actors that do not fit
    are created too. Ray forgets them when the run ends, however it ends.
    """
    try:
        return num_actors(options, nodes, clients_per_round)
    except InputError:
        if options.actors == "auto" or not internals.adds_nodes():
            raise
        return options.actors


@dataclass(frozen=True, eq=False)
class Stored(Setup):
    """A setup whose arrays lie in Ray's store.

    This process reads them there in place, as the actors of its node do.
    """

    reference: ObjectRef = field(kw_only=True)


def refuse_unsendable(name: str, model: nn.Module) -> None:
    """Raise `InputError` where a model cannot be sent to Ray's workers.

    That is found out before a Ray is started for it.
    """
    make_sendable(model)
    try:
        cloudpickle.loads(cloudpickle.dumps(model))
    except Exception as error:
        raise InputError(
            f"model '{name}': it cannot be sent to Ray's workers, as pickling it fails "
            f"({type(error).__name__}: {first_line(error)}); keep locks, files and connections out "
            "of it, or give ray.mode = 'off'"
        ) from error


@ray_may_fail()
def stored(setup: Setup) -> Stored:
    """Put the setup into the store. Who drops `setup` for the result keeps no second copy."""
    reference = ray.put(setup)
    in_store: Setup = ray.get(reference)
    return Stored(
        setup.model,
        in_store.federation,
        setup.job,
        setup.device,
        in_store.trace,
        writes_to_inputs=setup.writes_to_inputs,
        reference=reference,
    )


def _unset(values: Mapping[str, str]) -> dict[str, str]:
    """Return those of these variables that the environment does not have.

    So the user's values stay.
    """
    return {key: value for key, value in values.items() if key not in os.environ}


@contextmanager
def _started(options: RayOptions, name: str, most: int) -> Iterator[None]:
    """Start a Ray on this machine, for as long as the context lasts."""
    here = machine()
    if options.labels:
        raise InputError(
            "ray.labels choose nodes of a cluster, and a Ray would be started here; give "
            "ray.address too"
        )
    options = without_absent_gpus(options, [here])
    if options.num_gpus == "auto":
        options = replace(options, num_gpus=1 / most_on_a_gpu())
    # This refuses a request that cannot fit, before anything is started.
    count = num_actors(options, [here], most)
    # Ray starts a process for each CPU. With torch it has 320 MB, so there are no more than needed.
    here["CPU"] = math.ceil(count * options.num_cpus)
    for address in internals.running_here():
        log.warning(
            "a Ray of yours is on this machine, and the run starts another, which counts the same "
            "CPUs and GPUs; to use that one: -s ray.address=%s",
            address,
        )
    log.info("starting Ray")
    with variables({**_unset(OUR_RAY), **without_proxy_here()}), ExitStack() as stack:
        try:
            folder = stack.enter_context(private.folder())
            # A Ray that is half started cannot be stopped: its process would end by SIGSEGV.
            with (
                _explained(folder),
                trust.starting(),
                stopping("stopping", at_the_end=True),
                ending_in_time(lambda: private.kill_rays_in(folder)),
                internals.keeping_handlers(),
                internals.without_uv(),
                internals.without_waiting_for_the_dashboard(),
            ):
                ray.init(
                    # A bare init would follow an old address file to a Ray that may be gone.
                    address="local",
                    num_cpus=int(here["CPU"]),
                    num_gpus=int(here["GPU"]),
                    job_config=internals.same_modules(
                        where_this_process_looks(), **{OWNER: name, "job_name": name}
                    ),
                    logging_level=logging.WARNING,
                    _temp_dir=str(folder),
                )
            with dashboard.announced():
                yield
        finally:
            end_of_ray(ray.shutdown)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Raise one sentence where Ray cannot be started in its folder.

    Ray raises many kinds of errors. The error is `WorkersLost` where a second try may help,
    `InputError` for the machine's limits, else `RunFailed`.
    """
    try:
        yield
    except (InputError, RunFailed):
        raise
    except Exception as error:
        problem = f"Ray cannot be started here: {first_line(error).rstrip('.')}"
        if isinstance(error, OSError) and error.errno in LIMITS:
            raise InputError(f"{problem}; {LIMITS[error.errno]}") from None
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files < FEW_FILES:
            raise InputError(
                f"{problem}; this process may open {files} files only: {LIMITS[errno.EMFILE]}"
            ) from error
        # Ray calls it slow too where it waits in vain for a process that has ended. If that was for
        # lack of time or of room, it may not end so again.
        words = _last_words(folder)
        if may_pass(error) and (not words or private.is_raylet_in(folder) or SAID.search(words)):
            raise WorkersLost(f"{problem}{words}; try again") from error
        raise RunFailed(f"{problem}{words}; {LOOK}") from error


def _last_words(folder: Path) -> str:
    """Return what Ray's processes have logged last as fatal; '' if there is nothing."""
    for name in ("gcs_server.err", "raylet.err", "gcs_server.out", "raylet.out"):
        for log_file in folder.glob(f"session_*/logs/{name}"):
            with suppress(OSError):
                lines = log_file.read_text(errors="replace").splitlines()
                fatal = [line for line in lines if FATAL.search(line)]
                if fatal:
                    words = FATAL_PREFIX.sub("", fatal[0]).strip()
                    return f" ({name}: {words[:LONGEST]})"
    return ""


@contextmanager
def _joined(address: str, named: str) -> Iterator[None]:
    """Join a running Ray, and leave it as it was when the context ends.

    `named` says in messages who has given its address.
    """
    if address.startswith(("http://", "https://")):
        raise InputError(
            f"{named}: that is the URL of a dashboard, for `rayfed submit`; a run joins a Ray at "
            "the port of its head, such as ray.address = '127.0.0.1:6379'; or "
            f"{trust.without(named)} to have a Ray started here"
        )
    # Whoever has called us has joined a Ray already, and also leaves it.
    if ray.is_initialized():
        _refuse_another(address, named)
        yield
        return
    trust.joining(address, named)
    try:
        config = internals.same_modules(where_this_process_looks())
        with internals.keeping_handlers(), internals.without_uv(), variables(_unset(JOINING)):
            context = ray.init(address=address, job_config=config, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        versions.refuse_as_told(named, error)
        # What follows the first sentence names Ray's own options.
        reason = first_line(error).partition(". ")[0]
        raise InputError(trust.no_ray(named, reason)) from None
    try:
        # A job runs in its Ray, as the user who submitted it chose.
        if SUBMITTED not in os.environ:
            folder = context.address_info["session_dir"]  # type: ignore[attr-defined]
            private.refuse_open(folder, named)
        if context.dashboard_url:
            # Ray knows the address that "auto" has found.
            joined = context.address_info.get("gcs_address", address)  # type: ignore[attr-defined]
            log.info(
                "joined the Ray cluster at %s; dashboard: http://%s", joined, context.dashboard_url
            )
        yield
    finally:
        end_of_ray(ray.shutdown)


def _refuse_another(address: str, named: str) -> None:
    """Raise `InputError` where this process has joined a Ray at another port than the address's."""
    joined = ray.get_runtime_context().gcs_address
    port = address.rpartition(":")[2]
    if address != "auto" and "://" not in address and port != joined.rpartition(":")[2]:
        raise InputError(
            f"{named}: Ray is initialised in this process already, at {joined}; give ray.address = "
            "'auto' to run on that Ray, or call ray.shutdown() first"
        )
