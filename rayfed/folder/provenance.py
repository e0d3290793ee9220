"""The origin of a result: versions, the code's commit, the hardware, and hashes of everything that
went in.
"""

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
from rayfed.base.files import is_installed, read_regular
from rayfed.data.unevenness import unevenness
from rayfed.folder.summary import read_environment
from rayfed.job import Job
from rayfed.methods.part import all_parts
from rayfed.methods.registry import describe
from rayfed.rounds.executor import Executor
from rayfed.rounds.setup import Setup
from rayfed.tensors.weights import bits, frozen

COMMIT = "RAYFED_COMMIT"
ALWAYS = ("rayfed-distill", "torch", "numpy")
COMPUTE = (*ALWAYS, "torchvision", "timm", "peft")
PACKAGES = ("rayfed-distill", "ray", "torch", "torchvision", "timm", "peft", "numpy", "pyarrow")


def environment(setup: Setup, executor: Executor) -> dict[str, Any]:
    """Versions, the code's commit, the kinds of hardware, and hashes of all that went in: job,
    data, model, ...
    """
    return {
        "method": describe(setup.job.method),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": commit(),
        "job": setup.job.hash(),
        "data": setup.federation.hash(),
        "contents": setup.federation.contents(),
        "partition": setup.federation.dealt.hash(),
        **({"trace": setup.trace.hash()} if setup.trace else {}),
        "unevenness": unevenness(
            *setup.federation.cells(), setup.federation.num_clients, setup.federation.num_classes
        ),
        "model": hash_of_model(setup),
        "hardware": list(executor.kinds()),
        "modules": {name: hash_of(source) for name, source in sources(setup.job).items()},
    }


def versions() -> dict[str, str | None]:
    """The versions of the packages that compute in this process, and so can change bits.

    torchvision, timm and peft count where the model has imported them.
    """
    names = [name for name in COMPUTE if name in ALWAYS or name in sys.modules]
    return {name: _version(name) for name in names}


def other_versions(noted: Mapping[str, str | None]) -> list[str]:
    """Which packages that can change bits have other versions here than are noted of a run, in
    words.
    """
    return [
        f"the version of {name} is {noted[name]} there, {version} here"
        for name, version in versions().items()
        if noted.get(name) and version and noted[name] != version
    ]


def versions_of(folder: Path) -> dict[str, str | None]:
    """The versions in `environment.json` of a run, when it began or was resumed last; empty where
    there are none.
    """
    began = read_environment(folder)
    packages = [began, *began.get("resumed", [])][-1].get("packages", {})
    return {name: packages.get(name) for name in ALWAYS}


def about(setup: Setup) -> dict[str, Any]:
    """What one needs beside a run's weights to use them without rayfed: the model, and how its
    inputs are prepared.
    """
    data = setup.federation
    facts = {
        "model": setup.job.table()["model"],
        **data.inputs._asdict(),
        "classes": data.train.classes,
    }
    return {**facts, "mean": data.mean, "deviation": data.std}


def sources(job: Job) -> dict[str, bytes]:
    """The user's modules by name: those of the job's method, data, model, partition, schedule, and
    what they import.

    A script or notebook (`__main__`) is none: it may change between a run and its continuation. A
    library is one only where the job names it.
    """
    in_job = [type(part).__module__ for part in all_parts(job.method)]
    in_job += [type(job.data.partition).__module__, *filter(None, [job.data.module])]
    in_job.append(type(job.train.schedule).__module__)
    if ":" in job.model.name:
        in_job.append(job.model.name.partition(":")[0])
    unread = [name for name in in_job if name.partition(".")[0] not in ("rayfed", "__main__")]
    contents: dict[str, bytes] = {}
    while unread:
        name = unread.pop()
        module = sys.modules.get(name)
        file = str(getattr(module, "__file__", None))
        if module and name not in contents and file.endswith(".py") and os.path.isfile(file):
            contents[name] = _at_the_start.get(name) or Path(file).read_bytes()
            # It has been changed since it was imported.
            with suppress(SyntaxError):
                unread += [
                    imported for imported in _imports(module, contents[name]) if _is_users(imported)
                ]
    return contents


# Of the run that began last in this process: its modules.
_at_the_start: dict[str, bytes] = {}


def refuse_edited(job: Job) -> None:
    """Raises `InputError` where a user's module is not imported as its file is now.

    What is read here is what the run records, however its files are edited later.
    """
    _at_the_start.clear()
    found = sources(job)
    for name, content in found.items():
        differing = edited(sys.modules[name], content)
        if differing:
            raise InputError(
                f"the module '{name}' has changed since it was imported ({differing}), so the run "
                "would not be of the code that it records; restart Python (in a notebook the "
                f"kernel), or importlib.reload({name}) and make your parts again"
            )
    for one in (*all_parts(job.method), job.data.partition):
        kind = type(one)
        now: Any = sys.modules.get(kind.__module__)
        for step in kind.__qualname__.split("."):
            now = getattr(now, step, None)
        if kind.__module__ in found and now is not None and now is not kind:
            raise InputError(
                f"{kind.__module__}.{kind.__qualname__} was made before its module was loaded "
                "anew, and has the earlier code: import it again and make it again (from "
                f"{kind.__module__} import {kind.__qualname__})"
            )
    _at_the_start.update(found)


def to_send(job: Job) -> list[Source]:
    """The user's modules, for actors to import them as they were when the run began."""
    return [
        Source(name, str(sys.modules[name].__file__), content)
        for name, content in sources(job).items()
    ]


def is_of(modules: Collection[str], error: BaseException) -> bool:
    """Whether an error's traceback, which for a client's error is in its text, goes through one of
    these modules.
    """
    traceback_text = "".join(traceback.format_exception(error))
    files = [
        f"{name.replace('.', '/')}{end}" for name in modules for end in (".py", "/__init__.py")
    ]
    return isinstance(error, Exception) and any(
        f'/{file}", line' in traceback_text for file in files
    )


def changed_since(folder: Path) -> list[str]:
    """The user's modules, as noted of a run, whose files are others now.

    A file that is nowhere here is passed over.
    """
    began, changed = read_environment(folder), []
    for name, digest in [began, *began.get("resumed", [])][-1].get("modules", {}).items():
        # Also of a module that was made by hand.
        with suppress(ImportError, ValueError, OSError):
            # It need not be imported.
            spec = importlib.util.find_spec(name)
            if spec and spec.origin and hash_of(Path(spec.origin).read_bytes()) != digest:
                changed.append(name)
    return changed


def refuse_another_partition(folder: Path, setup: Setup, round: int) -> None:
    """Raises `InputError` where a run's clients held other images in a round than the setup deals to
    them.
    """
    began = read_environment(folder)
    in_force = began
    for resumed in began.get("resumed", []):
        if resumed["after_round"] < round:
            in_force = resumed
    now = setup.federation.dealt.hash()
    if in_force.get("partition", now) != now:
        raise InputError(
            f"the partition is not the one of round {round} of the run in '{folder}': clients hold "
            "other images now; put back the rule, or the file that it reads, as it was"
        )


def hash_of_model(setup: Setup) -> str:
    """SHA-256 of what no checkpoint holds of a run's model: what is frozen, and the file that its
    weights come from.

    Empty where there is neither.
    """
    digest, still, path = hashlib.sha256(), frozen(setup.model), setup.job.model.adapt.weights
    for name, tensor in setup.model.state_dict().items():
        if name in still:
            digest.update(name.encode())
            digest.update(bits(tensor).numpy().tobytes())
    digest.update(read_regular(Path(path)) if path else b"")
    return digest.hexdigest() if still or path else ""


def hash_of(content: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(content).hexdigest()


def _imports(module: ModuleType, source: bytes) -> Iterator[str]:
    """The modules that a module imports, and the names that it imports from them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), module.__package__ or None
            )
            yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))


def _is_users(name: str) -> bool:
    file = str(getattr(sys.modules.get(name), "__file__", None))
    return name.partition(".")[0] not in ("rayfed", "__main__") and not is_installed(file)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this package's source tree; `+` if the tree has changes, None if there is no
    tree.
    """
    here = Path(__file__).parent
    if not (here.parents[1] / ".git").exists():
        # Set by `rayfed submit`, which sends no tree.
        return os.environ.get(COMMIT) or None
    try:
        commit, changes = (
            subprocess.run(
                ["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10
            ).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changes.strip() else "")
