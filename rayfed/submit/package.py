"""The files that are sent with a submitted job.

They are those of the working folder, without files that no cluster should get. In a git repository,
git says which files it ignores. These stay here as well: files named like a secret, hidden files,
caches, environments, data, weights, the folders of runs, and the job's own paths. The rest is
copied into a temporary folder, which Ray packs. `rayfed` is sent as a separate module, so that the
cluster runs the code that has checked the job.
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

# The most bytes to send. Ray refuses larger uploads without a reason.
LIMIT = 100 * 2**20
PACKAGE = Path(rayfed.__file__).parent
SECRET = "looks like a secret: "
# The words of names such as gcp_key.json, apiKey and ID_RSA.
WORDS = re.compile(r"[A-Z0-9]+(?![a-z])|[A-Z]?[a-z0-9]+")
# These words stand in the names of files that hold secrets.
SECRETS = re.compile(
    r"""(?x)[0-9]*(account|accesskey|apikey|auth|authtoken|cnf|cookies|credentials?|creds
    |dockercfg|env|envrc|github|htpasswd|identity|kaggle|keys?|keychain|keystore|keytab|kube
    |kubeconfig|netrc|npmrc|oauth|passphrase|passwd|passwords?|pgpass|privatekey|pw|pypirc|rclone
    |rootkey|s3cfg|secrets?|token|vault|wallet
    |asc|db|der|dsa|ecdsa|ed25519|gpg|jks|kdbx?|ovpn|p12|p8|pem|pfx|pgp|ppk|rsa|snk|sqlite|tfstate
    |tfvars)[0-9]*"""
)
# A file of source code is sent, whatever its name.
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
# From version 2.53 on, Ray reads this file where it packs.
RAYIGNORE = ".rayignore"
# This file has the same form, and every version of Ray reads it.
GITIGNORE = ".gitignore"
# A folder with all files of a line is an environment, or the folder of a run.
MARKS = (("pyvenv.cfg",), ("conda-meta",), ("job.toml", "environment.json"))


class Chosen(NamedTuple):
    """The files that are sent, with their bytes, and the files that stay, with the reason."""

    sent: dict[str, int]
    stays: dict[str, str]

    def lines(self) -> list[tuple[str, Any]]:
        """Return lines for the screen: what is sent, the largest files, and what looks secret."""
        total = decimal(sum(self.sent.values()))
        lines = [("packed", f"{len(self.sent):,} files, {total}, and rayfed itself")]
        sizes = Counter(self.sent).most_common(10)
        if sizes:
            largest = ", ".join(f"{name} {decimal(size)}" for name, size in sizes)
            lines.append(("largest", largest))
        looks = []
        for name, reason in self.stays.items():
            if reason.startswith(SECRET):
                looks.append(f"{name} ({reason.removeprefix(SECRET)})")
        if looks:
            how = "like secrets; rename them, or send them with --include PATTERN"
            lines.append(("not sent", f"{listed(looks)}: {how}"))
        return lines

    def all_lines(self) -> list[tuple[str, str, str]]:
        """Return every file with its size, and all that stays with the reason."""
        files = [(decimal(size), name, "") for name, size in sorted(self.sent.items())]
        for name, reason in sorted(self.stays.items()):
            files.append(("not sent", name, reason))
        return files


def chosen(
    root: Path,
    without: Sequence[Path] = (),
    patterns: Sequence[str] = (),
    include: Sequence[str] = (),
) -> Chosen:
    """Return the files of a folder that are sent, and those that stay.

    `without` are folders and files to leave out, `patterns` are further patterns: `images`,
    `notes/*.pdf`. `include` are patterns of files that are sent although they look like secrets.
    Raises `InputError` if git cannot list the files that it ignores, if a file would hide a module
    that Ray or rayfed import, and above the limit, naming the largest files.
    """
    real = root.resolve()
    included = [_plain(pattern) for pattern in include]
    stays: dict[str, str] = {}
    sent: dict[str, int] = {}
    names = _kept_names(real, _reasons(real, without, patterns), stays)
    targets: set[Path] = set()
    # Links come last, so that it is known whether their targets are sent.
    for name in sorted(names, key=lambda name: ((real / name).is_symlink(), name)):
        path = real / name
        if path.is_symlink() and path.resolve() not in targets:
            stays[str(name)] = "is a link to what is not sent"
            continue
        look = named_like_a_secret(name)
        if look and not any(_matches(name, pattern) for pattern in included):
            stays[str(name)] = f"{SECRET}named '{look}'"
            continue
        sent[str(name)] = path.stat().st_size
        targets.add(path)
    _refuse_hiding(real, sent)
    _refuse_too_many(sent)
    return Chosen(sent, stays)


def _kept_names(
    root: Path, reason_for: Callable[[PurePosixPath], str], stays: dict[str, str]
) -> list[PurePosixPath]:
    """Return the files that have no reason to stay; the others are added to `stays`.

    If a folder stays, it is added instead of its files.
    """
    names = []
    for name in _listed(root):
        # The outermost folder that stays decides, and the file comes last.
        for place in (*reversed(name.parents[:-1]), name):
            reason = reason_for(place)
            if reason:
                stays[str(name) if place == name else f"{place}/"] = reason
                break
        else:
            if (root / name).is_file():
                names.append(name)
    return names


def _matches(name: PurePosixPath, pattern: str) -> bool:
    """Say whether a file, or a folder that it is in, matches a pattern."""
    return any(place.match(pattern) for place in (name, *name.parents))


def named_like_a_secret(name: PurePosixPath) -> str:
    """Return the word for which a file's name looks like a secret; '' if there is none.

    The folder `secrets` is such a word as well.

    >>> named_like_a_secret(PurePosixPath("api_key2.json"))
    'key2'
    >>> [named_like_a_secret(PurePosixPath(name)) for name in ("keyboard.json", "key.py")]
    ['', '']
    """
    if SOURCE.fullmatch(name.suffix.lower()):
        return ""
    words = WORDS.findall(name.name)
    words += [folder for folder in name.parts[:-1] if folder == "secrets"]
    for word in words:
        if SECRETS.fullmatch(word.lower()):
            return word
    return ""


def _reasons(
    root: Path, without: Sequence[Path], patterns: Sequence[str]
) -> Callable[[PurePosixPath], str]:
    """Return a function that says why a file or folder stays; '' if there is no reason.

    A file is sent only if its folders are sent.
    """
    apart = [path.expanduser().resolve() for path in (*without, PACKAGE, root / PACKAGE.name)]
    refused = [*HIDDEN, *CACHES, *DATA]
    refused += [_plain(pattern) for pattern in patterns]

    @cache
    def reason_for(place: PurePosixPath) -> str:
        path = root / place
        if any(_has_all(path, marks) for marks in MARKS):
            return "is an environment, or the folder of a run"
        if path in apart:
            return "is the job's own place, or rayfed"
        if place.name == RAYIGNORE:
            return ""
        for pattern in refused:
            if place.match(pattern):
                return f"matches '{pattern}'"
        return ""

    return reason_for


def _has_all(folder: Path, names: Sequence[str]) -> bool:
    """Say whether a folder has all of these files."""
    return all((folder / name).exists() for name in names)


@contextmanager
def staged(root: Path, names: Iterable[str]) -> Iterator[dict[str, object]]:
    """Yield Ray's runtime environment, with copies of these files of a folder, and of rayfed.

    Raises `InputError` if a file cannot be read.
    """
    with TemporaryDirectory() as stage:
        work = Path(stage, "work")
        module = Path(stage, PACKAGE.name)
        for name in names:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy(root / name, work / name)
            except OSError as error:
                raise InputError(
                    f"'{name}' cannot be read ({error.strerror}); leave it out: --exclude '{name}'"
                ) from None
            # This overwrites no file of the user: the other hidden files are not sent.
            if Path(name).name == RAYIGNORE:
                shutil.copy(root / name, (work / name).with_name(GITIGNORE))
        shutil.copytree(PACKAGE, module, ignore=shutil.ignore_patterns(*CACHES))
        shutil.copytree(EXAMPLES, module / "examples", dirs_exist_ok=True)
        yield {"working_dir": str(work), "py_modules": [str(module)]}


def anchored(jobs: Sequence[Job], base: Path | None, elsewhere: str) -> dict[str, str]:
    """Return the relative paths of jobs, made absolute from `base`, by their keys.

    The job will not run in its user's folder. Raises `InputError` if there is no base, because the
    cluster is elsewhere, or if the jobs of a grid differ.
    """
    places: dict[str, set[str]] = {}
    for job in jobs:
        for key, path in job.places().items():
            places.setdefault(key, set()).add(path)
    absolute = {}
    for key, paths in places.items():
        if not any(map(is_relative, paths)):
            continue
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
        (path,) = paths
        absolute[key] = str(base / path)
    return absolute


def _plain(pattern: str) -> str:
    """Return a pattern without the slashes and stars that say that it is a folder.

    >>> _plain("notes/"), _plain("notes/**")
    ('notes', 'notes')
    """
    return pattern.strip("/").removesuffix("/**")


def _listed(root: Path) -> Iterator[PurePosixPath]:
    """Yield the files in a folder and in the folders below it.

    In a git repository, files that git ignores are left out.
    """
    is_in_git = any((folder / ".git").exists() for folder in (root, *root.parents))
    if not is_in_git or _git(root, "check-ignore", "."):
        # This does not follow links.
        for place, _, names in os.walk(root):
            for name in names:
                yield PurePosixPath(Path(place, name).relative_to(root))
        return
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for file in map(os.fsdecode, filter(None, listed.split(b"\0"))):
        path = root / file
        # A folder in git's list is another repository, for example a submodule.
        if path.is_dir() and not path.is_symlink():
            for inner in _listed(path):
                yield PurePosixPath(file) / inner
        else:
            yield PurePosixPath(file)


def _git(root: Path, *words: str) -> bytes:
    """Return what a command of git prints in a folder.

    Raises `InputError` if git fails.
    """
    fault = ""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, timeout=60)
        # The exit code 1 says that nothing fits.
        if done.returncode > 1:
            fault = done.stderr.decode(errors="replace").strip()
    except (OSError, subprocess.SubprocessError) as error:
        fault = str(error)
    if fault:
        raise InputError(
            f"'{root}' is in a git repository, but git cannot list the files that it ignores "
            f"({fault}), so nothing is sent; repair that, or submit from a folder without git"
        )
    return done.stdout


def _refuse_hiding(root: Path, names: Iterable[str]) -> None:
    """Raise `InputError` if a file would hide a module that Ray or rayfed import."""
    taken = set()
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if name != "__main__" and file and not Path(file).is_relative_to(root):
            taken.add(name)
    for name in names:
        hidden = name.removesuffix(".py").removesuffix("/__init__")
        if name.endswith(".py") and hidden in taken | sys.stdlib_module_names:
            raise InputError(
                f"'{name}' would hide the module '{hidden}' from Ray, whose processes look for "
                "modules in the folder that is sent first; give the file another name, or leave it "
                f"out: --exclude {name.partition('/')[0]}"
            )


def _refuse_too_many(sizes: dict[str, int]) -> None:
    """Raise `InputError` if the files are larger than Ray takes, and name the largest ones."""
    total = sum(sizes.values())
    if total <= LIMIT:
        return
    largest = Counter(sizes)
    for place, size in sizes.items():
        # A folder of many small files counts as one.
        if "/" in place:
            largest[place.partition("/")[0] + "/"] += size
    lines = [f"{decimal(size):>12}  {place}" for place, size in largest.most_common(6)]
    raise InputError(
        f"the working folder has {decimal(total)} in {len(sizes):,} files, and {decimal(LIMIT)} "
        "can be sent; leave out files that the job does not need with --exclude PATTERN or "
        ".gitignore; the largest:\n" + "\n".join(lines)
    )
