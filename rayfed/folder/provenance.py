"""The origin of a result: versions, the commit, the hardware, and hashes of all that went in."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from rayfed.base.code import Source, edited
from rayfed.base.errors import InputError
from rayfed.base.files import is_installed
from rayfed.data.unevenness import unevenness
from rayfed.folder.summary import read_environment
from rayfed.job import Job
from rayfed.methods.part import all_parts
from rayfed.methods.registry import describe
from rayfed.rounds.executor import Executor
from rayfed.rounds.setup import Setup
from rayfed.tensors.weights import bits, frozen

COMMIT = "RAYFED_COMMIT"
# These packages can change the bits of every run, and COMPUTE those of a run that imports them.
ALWAYS = ("rayfed-distill", "torch", "numpy")
COMPUTE = (*ALWAYS, "torchvision", "timm", "peft")
PACKAGES = ("rayfed-distill", "ray", "torch", "torchvision", "timm", "peft", "numpy", "pyarrow")


def environment(setup: Setup, executor: Executor) -> dict[str, Any]:
    """Return versions, the commit, the hardware, and hashes of the job, data, model and modules."""
    federation = setup.federation
    origin: dict[str, Any] = {
        "method": describe(setup.job.method),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": commit(),
        "job": setup.job.hash(),
        "data": federation.hash(),
        "contents": federation.contents(),
        "partition": federation.dealt.hash(),
    }
    if setup.trace:
        origin["trace"] = setup.trace.hash()
    origin["unevenness"] = unevenness(
        *federation.cells(), federation.num_clients, federation.num_classes
    )
    origin["model"] = hash_of_model(setup)
    origin["hardware"] = list(executor.kinds())
    origin["modules"] = {name: hash_of(source) for name, source in sources(setup.job).items()}
    return origin


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that compute in this process, and so can change bits.

    torchvision, timm and peft count if the model has imported them.
    """
    names = [name for name in COMPUTE if name in ALWAYS or name in sys.modules]
    return {name: _version(name) for name in names}


def other_versions(noted: Mapping[str, str | None]) -> list[str]:
    """Say which packages that can change bits have other versions than a run has noted."""
    lines = []
    for name, version in versions().items():
        old = noted.get(name)
        if old and version and old != version:
            lines.append(f"the version of {name} is {old} there, {version} here")
    return lines


def versions_of(folder: Path) -> dict[str, str | None]:
    """Return the versions that a run had when it began, or when it was resumed last.

    They stand in its `environment.json`. A version that is not noted is None.
    """
    packages = _newest_environment(folder).get("packages", {})
    return {name: packages.get(name) for name in ALWAYS}


def about(setup: Setup) -> dict[str, Any]:
    """Return what a user of a run's weights needs: the model, and how its inputs are prepared."""
    data = setup.federation
    facts = {
        "model": setup.job.table()["model"],
        **data.inputs._asdict(),
        "classes": data.train.classes,
    }
    return {**facts, "mean": data.mean, "deviation": data.std}


def sources(job: Job) -> dict[str, bytes]:
    """Return the content of each of the user's modules that the job uses, by name.

    These are the modules of its method, data, model, partition and schedule, and what they import.
    A script or notebook (`__main__`) is left out: it may change between a run and its continuation.
    A library counts only if the job names it.
    """
    unread = [name for name in _modules_of(job) if not _is_left_out(name)]
    contents: dict[str, bytes] = {}
    while unread:
        name = unread.pop()
        module = sys.modules.get(name)
        file = str(getattr(module, "__file__", None))
        if module and name not in contents and file.endswith(".py") and os.path.isfile(file):
            contents[name] = _at_the_start.get(name) or Path(file).read_bytes()
            # A file that was edited since it was imported may not be Python any more.
            with suppress(SyntaxError):
                for imported in _imports(module, contents[name]):
                    if _is_users(imported):
                        unread.append(imported)
    return contents


def _modules_of(job: Job) -> list[str]:
    """Return the names of the modules of everything that the job names."""
    names = [type(part).__module__ for part in all_parts(job.method)]
    names.append(type(job.data.partition).__module__)
    names.append(type(job.data.skew).__module__)
    if job.data.module:
        names.append(job.data.module)
    names.append(type(job.train.schedule).__module__)
    names.append(type(job.clients.sampling).__module__)
    if ":" in job.model.name:
        names.append(job.model.name.partition(":")[0])
    return names


# The modules of the run that began last in this process.
_at_the_start: dict[str, bytes] = {}


def refuse_edited(job: Job) -> None:
    """Raise `InputError` if a user's module is not imported as its file is now.

    The run records the modules that are read here, even if their files are edited later.
    """
    _at_the_start.clear()
    modules = sources(job)
    for name, content in modules.items():
        differing = edited(sys.modules[name], content)
        if differing:
            raise InputError(
                f"the module '{name}' has changed since it was imported ({differing}), so the run "
                "would not be of the code that it records; restart Python (in a notebook the "
                f"kernel), or importlib.reload({name}) and make your parts again"
            )
    kinds: list[type] = [type(part) for part in all_parts(job.method)]
    kinds.append(type(job.data.partition))
    for kind in kinds:
        # The class that has this name in the module now.
        newest: Any = sys.modules.get(kind.__module__)
        for step in kind.__qualname__.split("."):
            newest = getattr(newest, step, None)
        if kind.__module__ in modules and newest is not None and newest is not kind:
            raise InputError(
                f"{kind.__module__}.{kind.__qualname__} was made before its module was loaded "
                "anew, and has the earlier code: import it again and make it again (from "
                f"{kind.__module__} import {kind.__qualname__})"
            )
    _at_the_start.update(modules)


def modules_to_send(job: Job) -> list[Source]:
    """Return the user's modules as they were when the run began, for actors to import them."""
    modules = []
    for name, content in sources(job).items():
        modules.append(Source(name, str(sys.modules[name].__file__), content))
    return modules


def is_of(modules: Collection[str], error: BaseException) -> bool:
    """Say whether an error's traceback goes through one of these modules.

    The text of a client's error has the traceback of the client.
    """
    if not isinstance(error, Exception):
        return False
    traceback_text = "".join(traceback.format_exception(error))
    for name in modules:
        path = name.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if f'/{file}", line' in traceback_text:
                return True
    return False


def changed_since(folder: Path) -> list[str]:
    """Return the user's modules that a run has noted and whose files have changed since.

    A module without a file on this machine does not count.
    """
    changed = []
    for name, digest in _newest_environment(folder).get("modules", {}).items():
        # A module that was made by hand has no spec, which raises ValueError.
        with suppress(ImportError, ValueError, OSError):
            # The module may not be imported here, so its file is searched.
            spec = importlib.util.find_spec(name)
            if spec and spec.origin and hash_of(Path(spec.origin).read_bytes()) != digest:
                changed.append(name)
    return changed


def refuse_another_partition(folder: Path, setup: Setup, round: int) -> None:
    """Raise `InputError` if a run's clients held other images in a round than in the setup."""
    in_force = read_environment(folder)
    for resumed in in_force.get("resumed", []):
        if resumed["after_round"] < round:
            in_force = resumed
    partition = setup.federation.dealt.hash()
    if in_force.get("partition", partition) != partition:
        raise InputError(
            f"the partition is not the one of round {round} of the run in '{folder}': clients hold "
            "other images now; put back the rule, or the file that it reads, as it was"
        )


def hash_of_model(setup: Setup) -> str:
    """Return the SHA-256 of what no checkpoint holds of a run's model.

    These are the frozen tensors, and the file that the model's weights come from. Returns '' if
    there is neither.
    """
    frozen_names, path = frozen(setup.model), setup.job.model.adapt.weights
    if not frozen_names and not path:
        return ""
    digest = hashlib.sha256()
    for name, tensor in setup.model.state_dict().items():
        if name in frozen_names:
            digest.update(name.encode())
            digest.update(bits(tensor).numpy().tobytes())
    if path:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def hash_of(content: bytes) -> str:
    """Return the SHA-256 of a content in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _newest_environment(folder: Path) -> dict[str, Any]:
    """Return what a run noted when it began, or when it was resumed last."""
    environment = read_environment(folder)
    resumed = environment.get("resumed", [])
    return resumed[-1] if resumed else environment


def _imports(module: ModuleType, source: bytes) -> Iterator[str]:
    """Yield the modules that a module imports, and the names that it imports from them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            dotted = "." * node.level + (node.module or "")
            origin = importlib.util.resolve_name(dotted, module.__package__ or None)
            yield origin
            for alias in node.names:
                yield f"{origin}.{alias.name}"


def _is_left_out(name: str) -> bool:
    """Say whether a module is part of rayfed, or a script or notebook."""
    return name.partition(".")[0] in ("rayfed", "__main__")


def _is_users(name: str) -> bool:
    """Say whether an imported module is the user's, and not an installed library."""
    file = str(getattr(sys.modules.get(name), "__file__", None))
    return not _is_left_out(name) and not is_installed(file)


def _version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of this package's source tree, with a `+` if the tree has changes.

    Returns None if there is no tree.
    """
    folder = Path(__file__).parent
    if not (folder.parents[1] / ".git").exists():
        # `rayfed submit` sets this variable, because it sends no tree.
        return os.environ.get(COMMIT) or None

    def git(*words: str) -> str:
        answer = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        )
        return answer.stdout.strip()

    try:
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+" if changes else commit
