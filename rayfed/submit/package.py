"""The files that are sent with a submitted job: the working folder, without files that no cluster
should get.

In a git repository, git tells which files it ignores. What is named like a secret, hidden files,
caches, environments, data, weights, the folders of runs and the job's own paths stay here, too. The
rest is copied into a temporary folder, which Ray packs. `rayfed` is sent as a module of its own, so
that the cluster runs the code that has checked the job.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.filesize import decimal

import rayfed
from rayfed.base.errors import InputError
from rayfed.data.settings import is_relative
from rayfed.job import EXAMPLES, Job
from rayfed.report.words import listed

# Bytes; Ray refuses larger uploads without a reason.
LIMIT = 100 * 2**20
PACKAGE = Path(rayfed.__file__).parent
SECRET = "looks like a secret: "
# Of names such as gcp_key.json, apiKey and ID_RSA
WORDS = re.compile(r"[A-Z0-9]+(?![a-z])|[A-Z]?[a-z0-9]+")
# Such words, in the names of files that hold secrets.
SECRETS = re.compile(
    r"""(?x)[0-9]*(account|accesskey|apikey|auth|authtoken|cnf|cookies|credentials?|creds|dockercfg|env|envrc|github
    |htpasswd|identity|kaggle|keys?|keychain|keystore|keytab|kube|kubeconfig|netrc|npmrc|oauth|passphrase|passwd
    |passwords?|pgpass|privatekey|pw|pypirc|rclone|rootkey|s3cfg|secrets?|token|vault|wallet
    |asc|db|der|dsa|ecdsa|ed25519|gpg|jks|kdbx?|ovpn|p12|p8|pem|pfx|pgp|ppk|rsa|snk|sqlite|tfstate|tfvars)[0-9]*"""
)
# Any name.
SOURCE = re.compile(
    r"\.(bib|c|cc|cmake|cpp|cu|cuh|go|h|hpp|ipynb|java|jl|js|md|py|pyi|pyx|r|rs|rst|tex|ts)"
)
HIDDEN = (".*",)
CACHES = ("__pycache__", "*.egg-info", "node_modules", "venv", "*.pyc", "*.pyo")
DATA = (
    "*.parquet",
    "*.pq",
    "*.safetensors",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.zip",
    "*.tar",
    "*.tar.gz",
    "*.tgz",
)
# Ray reads it where it packs, from Ray 2.53 on.
RAYIGNORE = ".rayignore"
# It has the same form, and every Ray reads it.
GITIGNORE = ".gitignore"
# Of environments, and of a run's folder.
MARKS = (
    ("pyvenv.cfg",),
    ("conda-meta",),
    ("job.toml", "environment.json"),
)


class Chosen(NamedTuple):
    """The files that are sent, with their bytes; what stays, and why."""

    sent: dict[str, int]
    stays: dict[str, str]

    def lines(self) -> list[tuple[str, Any]]:
        """For the screen: what is sent, the largest files of it, and what looks like secrets."""
        largest = ", ".join(
            f"{name} {decimal(size)}" for name, size in Counter(self.sent).most_common(10)
        )
        looks = [
            f"{name} ({why.removeprefix(SECRET)})"
            for name, why in self.stays.items()
            if why.startswith(SECRET)
        ]
        lines = [
            (
                "packed",
                f"{len(self.sent):,} files, {decimal(sum(self.sent.values()))}, and rayfed itself",
            )
        ]
        if largest:
            lines.append(("largest", largest))
        if looks:
            how = "like secrets; rename them, or send them with --include PATTERN"
            lines.append(("not sent", f"{listed(looks)}: {how}"))
        return lines

    def all_lines(self) -> list[tuple[str, str, str]]:
        """Every file with its size, and all that stays with the reason."""
        files = [(decimal(size), name, "") for name, size in sorted(self.sent.items())]
        return files + [("not sent", name, why) for name, why in sorted(self.stays.items())]


def chosen(
    root: Path,
    without: Sequence[Path] = (),
    patterns: Sequence[str] = (),
    include: Sequence[str] = (),
) -> Chosen:
    """The files of a folder that are sent, and those that stay.

    `without` are folders and files to leave out, `patterns` are further patterns: `images`,
    `notes/*.pdf`; `include` are patterns of files that are sent although they look like secrets.
    Raises `InputError` where git cannot list the files that it ignores, where a file would hide a
    module that Ray or rayfed import, and above the limit, naming the largest files.
    """
    real = root.resolve()
    included = [_plain(pattern) for pattern in include]
    why_apart = _reasons(real, without, patterns)
    files = Chosen({}, {})
    names = []
    for name in _listed(real):
        # Its folders, the outermost first, and itself.
        above = [*reversed(name.parents[:-1]), name]
        place = next((place for place in above if why_apart(place)), None)
        if place == name:
            files.stays[str(name)] = why_apart(name)
        elif place is not None:
            files.stays[f"{place}/"] = why_apart(place)
        elif (real / name).is_file():
            names.append(name)
    targets: set[Path] = set()
    # Links come last.
    for name in sorted(names, key=lambda name: ((real / name).is_symlink(), name)):
        path = real / name
        if path.is_symlink() and path.resolve() not in targets:
            files.stays[str(name)] = "is a link to what is not sent"
            continue
        is_included = any(
            place.match(pattern) for pattern in included for place in (name, *name.parents)
        )
        look = named_like_a_secret(name)
        if look and not is_included:
            files.stays[str(name)] = f"{SECRET}named '{look}'"
            continue
        files.sent[str(name)] = path.stat().st_size
        targets.add(path)
    _refuse_hiding(real, files.sent)
    _refuse_too_many(files.sent)
    return files


def named_like_a_secret(name: PurePosixPath) -> str:
    """The word of a file's name, or the folder `secrets`, for which it looks like a secret; ''
    where there is none.

    >>> [named_like_a_secret(PurePosixPath(name)) for name in ("api_key2.json", "keyboard.json", "key.py")]
    ['key2', '', '']
    """
    words = [
        *WORDS.findall(name.name),
        *(folder for folder in name.parts[:-1] if folder == "secrets"),
    ]
    is_source = SOURCE.fullmatch(name.suffix.lower())
    return (
        "" if is_source else next((word for word in words if SECRETS.fullmatch(word.lower())), "")
    )


def _reasons(
    root: Path, without: Sequence[Path], patterns: Sequence[str]
) -> Callable[[PurePosixPath], str]:
    """Gives why a file or folder stays, by itself; '' for none.

    A file is sent if its folders are, too.
    """
    apart = [path.expanduser().resolve() for path in (*without, PACKAGE, root / PACKAGE.name)]
    refused = [*HIDDEN, *CACHES, *DATA, *map(_plain, patterns)]

    @cache
    def why(place: PurePosixPath) -> str:
        path = root / place
        if any(all((path / mark).exists() for mark in marks) for marks in MARKS):
            return "is an environment, or the folder of a run"
        if path in apart:
            return "is the job's own place, or rayfed"
        pattern = next((pattern for pattern in refused if place.match(pattern)), None)
        return f"matches '{pattern}'" if pattern and place.name != RAYIGNORE else ""

    return why


@contextmanager
def staged(root: Path, names: Iterable[str]) -> Iterator[dict[str, object]]:
    """Copies of these files of a folder, and of rayfed, as Ray's runtime environment."""
    with TemporaryDirectory() as stage:
        work, module = Path(stage, "work"), Path(stage, PACKAGE.name)
        for name in names:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy(root / name, work / name)
            except OSError as error:
                raise InputError(
                    f"'{name}' cannot be read ({error.strerror}); leave it out: --exclude '{name}'"
                ) from None
            # No file of the user's is overwritten: hidden files are not sent, but for this one.
            if Path(name).name == RAYIGNORE:
                shutil.copy(root / name, (work / name).with_name(GITIGNORE))
        shutil.copytree(PACKAGE, module, ignore=shutil.ignore_patterns(*CACHES))
        shutil.copytree(EXAMPLES, module / "examples", dirs_exist_ok=True)
        yield {"working_dir": str(work), "py_modules": [str(module)]}


def anchored(jobs: Sequence[Job], base: Path | None, elsewhere: str) -> dict[str, str]:
    """The relative paths of jobs, made absolute from `base`: the job will not run in its user's
    folder.

    Raises `InputError` where there is no base, because the cluster is elsewhere, or where the jobs
    of a grid differ.
    """
    places: dict[str, set[str]] = {}
    for job in jobs:
        for key, path in job.places().items():
            places.setdefault(key, set()).add(path)
    relative = {key: paths for key, paths in places.items() if any(map(is_relative, paths))}
    for key, paths in relative.items():
        shown = ", ".join(f"'{path}'" for path in sorted(paths))
        if base is None:
            raise InputError(
                f"{key} = {shown}: the job's driver runs on {elsewhere}; a relative path is in a "
                "folder that is deleted with the job: give an absolute path on that machine: -s "
                f"{key}=/shared/..."
            )
        if len(paths) > 1:
            raise InputError(
                f"{key} = {shown}: these runs of a grid differ; give absolute paths in the job file"
            )
    return {key: str(base / path) for key, paths in relative.items() for path in paths if base}


def _plain(pattern: str) -> str:
    return pattern.strip("/").removesuffix("/**")


def _listed(root: Path) -> Iterator[PurePosixPath]:
    """The files in a folder, also in the folders below it; in a git repository, without the files
    that git ignores.
    """
    if not any((folder / ".git").exists() for folder in (root, *root.parents)) or _git(
        root, "check-ignore", "."
    ):
        # Not through links.
        for place, _, names in os.walk(root):
            yield from (PurePosixPath(Path(place, name).relative_to(root)) for name in names)
        return
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in map(os.fsdecode, filter(None, listed.split(b"\0"))):
        # A folder is another repository: a submodule, for example.
        inner = root / name
        within = _listed(inner) if inner.is_dir() and not inner.is_symlink() else [PurePosixPath()]
        yield from (PurePosixPath(name) / place for place in within)


def _git(root: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, timeout=60)
        # 1: nothing was found.
        why = done.stderr.decode(errors="replace").strip() if done.returncode > 1 else ""
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    if why:
        raise InputError(
            f"'{root}' is in a git repository, but git cannot list the files that it ignores "
            f"({why}), so nothing is sent; repair that, or submit from a folder without git"
        )
    return done.stdout


def _refuse_hiding(root: Path, names: Iterable[str]) -> None:
    files = {
        name: getattr(module, "__file__", None)
        for name, module in sys.modules.items()
        if name != "__main__"
    }
    taken = {name for name, file in files.items() if file and not Path(file).is_relative_to(root)}
    for name in names:
        module = name.removesuffix(".py").removesuffix("/__init__")
        if name.endswith(".py") and module in taken | sys.stdlib_module_names:
            raise InputError(
                f"'{name}' would hide the module '{module}' from Ray, whose processes look for "
                "modules in the folder that is sent first; give the file another name, or leave it "
                f"out: --exclude {name.partition('/')[0]}"
            )


def _refuse_too_many(sizes: dict[str, int]) -> None:
    total = sum(sizes.values())
    if total <= LIMIT:
        return
    largest = Counter(sizes)
    for place, size in sizes.items():
        # Many small files are found by their folder.
        if "/" in place:
            largest[place.partition("/")[0] + "/"] += size
    raise InputError(
        f"the working folder has {decimal(total)} in {len(sizes):,} files, and {decimal(LIMIT)} "
        "can be sent; leave out files that the job does not need with --exclude PATTERN or "
        ".gitignore; the largest:\n"
        + "\n".join(f"{decimal(size):>12}  {place}" for place, size in largest.most_common(6))
    )
